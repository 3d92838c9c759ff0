"""What the machine and its environment are, for reports and for the head of a table."""

import importlib.metadata
import os
from collections.abc import Iterable

import jax


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Version of each distribution in `names` that is installed."""
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def core_count() -> int:
    """CPU cores that this process may use, which may be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_gpu(device: jax.Device) -> bool:
    """Whether a device is a GPU (JAX's platform name is "gpu", whoever made it)."""
    return device.platform == "gpu"


def describe_device(device: jax.Device) -> str:
    """One device in words: platform, number, kind and, where the platform tells, its memory."""
    stats = device.memory_stats() or {}
    memory = ""
    if "bytes_limit" in stats:
        limit, used = stats["bytes_limit"] / 2**30, stats.get("bytes_in_use", 0) / 2**30
        memory = f", {limit:.1f} GiB for JAX, {used:.1f} GiB in use"
    return f"{device.platform}:{device.id} {device.device_kind}{memory}"
