"""Native Hybrid Attention in JAX (arXiv 2510.07019): public names, loaded when first used."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nha_jax.inference.engine import Engine as Engine
    from nha_jax.inference.generate import Generation as Generation
    from nha_jax.inference.generate import generate as generate
    from nha_jax.inference.sampling import Sampling as Sampling
    from nha_jax.models.config import NHAConfig as NHAConfig
    from nha_jax.models.language_model import NHALanguageModel as NHALanguageModel
    from nha_jax.modules.attention import NativeHybridAttention as NativeHybridAttention
    from nha_jax.ops.api import native_hybrid_attention as native_hybrid_attention
    from nha_jax.ops.api import native_hybrid_attention_step as native_hybrid_attention_step
    from nha_jax.ops.rotary import RotaryScaling as RotaryScaling
    from nha_jax.ops.state import NHAState as NHAState

_PUBLIC = {
    "Engine": "nha_jax.inference.engine",
    "Generation": "nha_jax.inference.generate",
    "NHAConfig": "nha_jax.models.config",
    "NHALanguageModel": "nha_jax.models.language_model",
    "NHAState": "nha_jax.ops.state",
    "NativeHybridAttention": "nha_jax.modules.attention",
    "RotaryScaling": "nha_jax.ops.rotary",
    "Sampling": "nha_jax.inference.sampling",
    "generate": "nha_jax.inference.generate",
    "native_hybrid_attention": "nha_jax.ops.api",
    "native_hybrid_attention_step": "nha_jax.ops.api",
}
__all__ = [*_PUBLIC]
__version__ = "0.1.0"


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'nha_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
