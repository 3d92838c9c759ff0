"""The configuration of a Native Hybrid Attention language model."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from nha_jax.configuration import from_mapping
from nha_jax.ops.rotary import RotaryScaling
from nha_jax.ops.windows import Window, format_windows, parse_windows

FEATURE_MAPS = ("silu", "relu", "identity")
VALUE_ACTIVATIONS = ("identity", "silu")
EMPTY_SLOTS = ("masked", "sink")
IMPLEMENTATIONS = ("reference", "xla", "pallas", "triton")
DTYPES = ("bfloat16", "float16", "float32", "float64")
PRECISIONS = ("default", "high", "highest")
REMAT_POLICIES = ("none", "full", "dots", "dots_no_batch")
# Far beyond any model, and small enough that a mistyped number is refused at once instead of
# running out of memory in the middle of something.
_MOST_LAYERS = 10_000
_LARGEST_SIZE = 1 << 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class NHAConfig:
    """Shape and options of an `NHALanguageModel`; validated when it is made.

    Windows do not change the parameters: a model can be trained with one setting and evaluated
    with another.

    Attributes:
        vocab_size: number of token ids.
        num_layers: number of decoder layers (L).
        width: width of the residual stream (D).
        num_heads: query heads (N), a multiple of `num_kv_heads`.
        num_kv_heads: key/value heads (K); query heads of a group are contiguous.
        key_width: width of a query/key head (H); even, because rotary embedding pairs its halves.
        value_width: width of a value head (V); None means `key_width`, and is stored so.
        feed_forward_width: hidden width of the SwiGLU feed-forward.
        num_slots: long-term memory slots a kv head (M); 0 is sliding-window attention.
        windows: windows of the layers, in any form `nha_jax.ops.windows.parse_windows` reads;
            stored as a tuple with one entry a layer, None for full attention.
        gate_temperature: tau in log_gate = log_sigmoid(x W_g) / tau.
        qk_norm: RMSNorm of each query and key head before rotary embedding.
        qkv_bias: biases in the query, key and value projections.
        output_bias: bias in the output projection.
        gate_bias: bias in the gate projection.
        conv_width: taps of the short causal depthwise convolution on queries, keys and values; 0
            for none.
        feature_map: applied to slot queries and slot keys only: "silu", "relu" or "identity".
        value_activation: applied to values: "identity" or "silu".
        output_norm: RMSNorm of each head of the operator's output.
        empty_slots: "masked" or "sink" (DESIGN section 1).
        rotary_theta: base of the rotary frequencies.
        rotary_scaling: how the rotary frequencies are scaled for long contexts, or None.
        norm_epsilon: added to the mean square in every RMSNorm.
        tie_embeddings: whether the output head is the embedding matrix.
        initializer_range: standard deviation of the normal initialisation of all matrices.
        dtype: dtype of the computation; norms, gates, rotary angles, softmax and logits are
            float32.
        param_dtype: dtype of the parameters.
        precision: of the model's matrix products: "default" (TF32 for float32 on a GPU), "high" or
            "highest"; None is "highest" where `dtype` is float32 or float64, else "default".
        remat: what a layer keeps for its backward pass: "none" (no rematerialisation: everything),
            "full" (its input only), "dots" (results of matrix products), "dots_no_batch" (results
            of matrix products without batch dimensions: projections, not attention).
        implementation: of the operator: "reference", "xla", "pallas", "triton", or None for the
            best.
    """

    vocab_size: int
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    key_width: int
    value_width: int | None = None
    feed_forward_width: int
    num_slots: int = 64
    windows: str | int | tuple[int | str | None, ...] | None = "32"
    gate_temperature: float = 8.0
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    gate_bias: bool = False
    conv_width: int = 0
    feature_map: str = "silu"
    value_activation: str = "identity"
    output_norm: bool = False
    empty_slots: str = "masked"
    rotary_theta: float = 10000.0
    rotary_scaling: RotaryScaling | None = None
    norm_epsilon: float = 1e-6
    tie_embeddings: bool = True
    initializer_range: float = 0.02
    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    precision: str | None = None
    remat: str = "none"
    implementation: str | None = None

    def __post_init__(self) -> None:
        if self.value_width is None:
            object.__setattr__(self, "value_width", self.key_width)
        self._check_int("vocab_size", 1, 2**31 - 1)  # ids are int32
        self._check_int("num_layers", 1, _MOST_LAYERS)
        for name in ("width", "num_heads", "num_kv_heads", "key_width", "value_width"):
            self._check_int(name, 1, _LARGEST_SIZE)
        self._check_int("feed_forward_width", 1, _LARGEST_SIZE)
        self._check_int("num_slots", 0, _LARGEST_SIZE)
        self._check_int("conv_width", 0, _LARGEST_SIZE)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}, but must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})."
            )
        if self.key_width % 2:
            raise ValueError(
                f"key_width is {self.key_width}, but must be even: rotary embedding pairs "
                "its halves."
            )
        if self.conv_width == 1:
            raise ValueError(
                "conv_width is 1, but must be 0 (no convolution) or at least 2: one tap sees no "
                "earlier token."
            )
        for name in ("gate_temperature", "rotary_theta", "norm_epsilon", "initializer_range"):
            self._check_positive(name)
        for name in ("qk_norm", "qkv_bias", "output_bias", "gate_bias", "output_norm"):
            self._check_bool(name)
        self._check_bool("tie_embeddings")
        self._check_choice("feature_map", FEATURE_MAPS)
        self._check_choice("value_activation", VALUE_ACTIVATIONS)
        self._check_choice("empty_slots", EMPTY_SLOTS)
        self._check_choice("precision", (*PRECISIONS, None))
        self._check_choice("remat", REMAT_POLICIES)
        self._check_choice("implementation", (*IMPLEMENTATIONS, None))
        self._check_dtype("dtype")
        self._check_dtype("param_dtype")
        if not isinstance(self.rotary_scaling, RotaryScaling | None):
            raise ValueError(
                f"rotary_scaling is {self.rotary_scaling!r}, but must be a RotaryScaling or None."
            )
        object.__setattr__(self, "windows", parse_windows(self.windows, self.num_layers))

    @property
    def layer_windows(self) -> tuple[Window, ...]:
        """The window of each layer, None for full attention."""
        return parse_windows(self.windows, self.num_layers)

    @property
    def matmul_precision(self) -> str:
        """The precision of matrix products: `precision`, or what its None stands for."""
        if self.precision is not None:
            return self.precision
        return "highest" if self.dtype in ("float32", "float64") else "default"

    def to_dict(self) -> dict[str, Any]:
        """This configuration as a dictionary that `json` writes and `from_dict` reads.

        Windows are written in their short form, such as "64,full@3,11".
        """
        fields = dataclasses.asdict(self)
        fields["windows"] = format_windows(self.layer_windows)
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "NHAConfig":
        """Makes the configuration that `to_dict` wrote.

        Raises:
            ConfigurationError: a field is unknown, missing or invalid (a ValueError).
        """
        return from_mapping(cls, fields, "model")

    def _check_int(self, name: str, minimum: int, maximum: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError(f"{name} is {value!r}, but must be a whole number from {minimum}.")
        if value > maximum:
            raise ValueError(f"{name} is {value}, but may be {maximum} at most.")

    def _check_positive(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} is {value!r}, but must be a number above 0.")
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} is {value!r}, but must be a finite number above 0.")

    def _check_bool(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}, but must be True or False.")

    def _check_choice(self, name: str, valid: tuple[str | None, ...]) -> None:
        value = getattr(self, name)
        if value not in valid:
            options = ", ".join(repr(option) for option in valid)
            raise ValueError(f"{name} is {value!r}, but must be one of {options}.")

    def _check_dtype(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, str):
            try:
                value = jnp.dtype(value).name
            except TypeError:
                value = getattr(self, name)
            object.__setattr__(self, name, value)
        self._check_choice(name, DTYPES)
