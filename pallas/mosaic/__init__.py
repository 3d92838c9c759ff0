"""Pallas kernels on the Mosaic GPU backend: NVIDIA Hopper and newer."""

from pallas.mosaic.operator import attention

__all__ = ["attention"]
