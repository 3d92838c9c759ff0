"""Native Hybrid Attention as a Linen module: projections, gate, rotary, operator, output."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from flax.typing import Dtype, Initializer, PrecisionLike
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from nha_jax.modules.convolution import ShortConvolution
from nha_jax.modules.norm import RMSNorm
from nha_jax.modules.partitioning import operator_axes
from nha_jax.modules.positions import segment_positions
from nha_jax.modules.projection import Projection
from nha_jax.ops.api import native_hybrid_attention, native_hybrid_attention_step
from nha_jax.ops.rotary import RotaryScaling, rotary_tables
from nha_jax.ops.sharded import sharded_native_hybrid_attention
from nha_jax.ops.state import NHAState
from nha_jax.ops.windows import Window, parse_window

FEATURE_MAPS = {"silu": jax.nn.silu, "relu": jax.nn.relu, "identity": lambda x: x}
VALUE_ACTIVATIONS = {"identity": lambda x: x, "silu": jax.nn.silu}


@struct.dataclass
class ConvolutionTails:
    """The last P = conv_width - 1 inputs of the current segment, zeros where it has fewer.

    Attributes:
        query: [B, P, N, H], projected queries before the convolution.
        key: [B, P, K, H].
        value: [B, P, K, V].
    """

    query: Float[Array, "B P N H"]
    key: Float[Array, "B P K H"]
    value: Float[Array, "B P K V"]


@struct.dataclass
class AttentionState:
    """What a `NativeHybridAttention` needs to go on after the last token.

    Attributes:
        memory: state of the operator: slots, window, length and id of the current segment.
        convolution: tails of the short convolutions; None where the module has none.
    """

    memory: NHAState
    convolution: ConvolutionTails | None


class NativeHybridAttention(nn.Module):
    """Attention over an exact window and gated memory slots with one softmax (DESIGN section 1).

    The parameters do not depend on the window. Projections run in `dtype`; the gate, the norms, the
    rotary angles and everything inside the softmax are float32.

    Attributes:
        num_heads: query heads N.
        num_kv_heads: key/value heads K; None means N. Query heads of a group are contiguous.
        key_width: width H of query and key heads; None means the width of the input divided by N.
        value_width: width V of value heads; None means H.
        num_slots: memory slots M a kv head; 0 is sliding-window attention.
        window: tokens seen exactly, the token itself included; None is full attention, 0 is Gated
            Slot Attention.
        gate_temperature: tau in log_gate = log_sigmoid(x W_g) / tau.
        qk_norm: RMSNorm of each query and key head before rotary embedding.
        qkv_bias: biases in the query, key and value projections.
        output_bias: bias in the output projection.
        gate_bias: bias in the gate projection.
        conv_width: taps of a short causal depthwise convolution on queries, keys and values; 0 for
            none.
        feature_map: "silu", "relu" or "identity", applied to slot queries and slot keys only.
        value_activation: "identity" or "silu", applied to values.
        output_norm: RMSNorm of each head of the operator's output.
        empty_slots: "masked" or "sink".
        rotary_theta: base of the rotary frequencies.
        rotary_scaling: scaling of the rotary frequencies for long contexts, or None.
        norm_epsilon: added to the mean square in the norms.
        implementation: of the operator; None chooses the best.
        dtype: dtype of the computation; None promotes those of the input and the parameters.
        param_dtype: dtype of the parameters.
        kernel_init: initialiser of the projections.
        bias_init: initialiser of the biases.
        precision: precision of the projections.
    """

    num_heads: int
    num_kv_heads: int | None = None
    key_width: int | None = None
    value_width: int | None = None
    num_slots: int = 64
    window: int | str | None = None
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
    implementation: str | None = None
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros_init()
    precision: PrecisionLike = None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "*B T"] | None = None,
        rotary: tuple[Float[Array, "*B T H/2"], Float[Array, "*B T H/2"]] | None = None,
        window: "int | str | Int[Array, ''] | None" = None,
        state: AttentionState | None = None,
        return_state: bool = False,
        return_slot_share: bool = False,
        return_statistics: bool = False,
        return_traces: bool = False,
    ) -> Any:
        """Attends from every token to its segment's past.

        Args:
            x: input, of any content where padded.
            segment_ids: ids from 1, 0 = padding; None means one segment a row, without padding.
            positions: positions for the rotary embedding; None counts the tokens of each segment,
                on from the state's length where a state is given.
            rotary: (cos, sin) of `rotary_tables` for the positions, to share them between layers;
                takes the place of `positions`.
            window: None is the module's own window. Otherwise that many tokens, "full", or a traced
                int32 scalar (`nha_jax.ops.windows.FULL` is full attention), with which no state can
                be taken or returned.
            state: state after the tokens before `x`; it is not changed.
            return_state: also return the state after `x`. Without `state`, one that for a full
                window has no room for more tokens: begin with `init_state` to decode.
            return_slot_share: also return the share of each query's softmax that fell on slots.
            return_statistics: also return the means over real tokens of slot_share, log_gate and
                retention, as scalars.
            return_traces: also return a dictionary of what the memories do at every token:
                "slot_share" [B, T, N] and "log_gate" [B, T, K, M], float32.

        Returns:
            [B, T, D] in the dtype of the computation, zero where padded (or a tuple of it and what
            else was asked for, in the order state, slot_share [B, T, N] float32, statistics,
            traces).

        Raises:
            ValueError: a field or an argument is invalid; the message names it.
        """
        num_kv_heads, key_width, value_width = self._sizes(x)
        window = self._window(window)
        batch, length = x.shape[:2]
        if segment_ids is not None:
            if segment_ids.shape != (batch, length):
                raise ValueError(
                    f"segment_ids has shape {segment_ids.shape}, but must be [B, T] = "
                    f"({batch}, {length})."
                )
            # Whatever stands in padding, NaN included, must not reach a product with a zero weight.
            x = jnp.where((segment_ids > 0)[..., None], x, 0)

        project = functools.partial(self._project, use_bias=self.qkv_bias)
        query_axes, kv_axes = ("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim")
        query = project(x, "query", (self.num_heads, key_width), query_axes)
        key = project(x, "key", (num_kv_heads, key_width), kv_axes)
        value = project(x, "value", (num_kv_heads, value_width), kv_axes)
        tails = None
        if self.conv_width:
            query, key, value, tails = self._convolve(query, key, value, segment_ids, state)
        if self.qk_norm:
            query = self._norm("query_norm")(query)
            key = self._norm("key_norm")(key)
        value = VALUE_ACTIVATIONS[self.value_activation](value)
        slot_query = slot_key = None
        if self.feature_map != "identity":
            slot_query = FEATURE_MAPS[self.feature_map](query)
            slot_key = FEATURE_MAPS[self.feature_map](key)
        log_gate = self._log_gate(x, num_kv_heads)

        if rotary is None:
            rotary = self._rotary_tables(x, key_width, segment_ids, positions, state)
        options: dict[str, Any] = {
            "window": window,
            "slot_query": slot_query,
            "slot_key": slot_key,
            "rotary": rotary,
            "segment_ids": segment_ids,
            "empty_slots": self.empty_slots,
            "implementation": self.implementation,
            "return_slot_share": return_slot_share or return_statistics or return_traces,
        }
        split = None
        if state is None and not return_state:
            split = operator_axes(batch, length, num_kv_heads)
        if state is not None and length == 1:
            results = native_hybrid_attention_step(
                query, key, value, log_gate, state.memory, **options
            )
            out, memory, *shares = results
        elif split is not None:
            results = sharded_native_hybrid_attention(
                query, key, value, log_gate, axes=split, **options
            )
            out, *shares = results if isinstance(results, tuple) else (results,)
            memory = None
        else:
            results = native_hybrid_attention(
                query,
                key,
                value,
                log_gate,
                initial_state=None if state is None else state.memory,
                return_state=return_state,
                **options,
            )
            out, *shares = results if isinstance(results, tuple) else (results,)
            memory = shares.pop(0) if return_state else None
        slot_share: Any = shares[0] if shares else None

        if self.output_norm:
            out = self._norm("output_norm")(out)
        axes = ("heads", "head_dim", "embed")
        out = self._project(out, "output", (x.shape[-1],), axes, self.output_bias)
        if segment_ids is not None and self.output_bias:
            out = jnp.where((segment_ids > 0)[..., None], out, 0)

        returned: list[Any] = [out]
        if return_state:
            returned.append(AttentionState(memory=memory, convolution=tails))
        if return_slot_share:
            returned.append(slot_share)
        if return_statistics:
            returned.append(_statistics(slot_share, log_gate, segment_ids))
        if return_traces:
            returned.append({"slot_share": slot_share, "log_gate": log_gate})
        return returned[0] if len(returned) == 1 else tuple(returned)

    def init_state(
        self,
        batch: int,
        *,
        window: int | str | None = None,
        capacity: int | None = None,
        dtype: DTypeLike | None = None,
    ) -> AttentionState:
        """An empty state, to begin a prefill or to decode from nothing; needs no parameters.

        The module must have been made with `key_width`.

        Args:
            batch: number of sequences B.
            window: None is the module's own window; "full" is full attention.
            capacity: for full attention the largest number of tokens a segment may reach; for a
                window of W tokens ignored, the state holds W.
            dtype: dtype of the window's keys and values and of the convolution's tails; None is the
                module's `dtype`, or its `param_dtype` where that is None.

        Raises:
            ValueError: full attention without a capacity, or a module without `key_width`.
        """
        if self.key_width is None:
            raise ValueError("key_width is None, but init_state needs it: give it to the module.")
        num_kv_heads = self.num_kv_heads or self.num_heads
        value_width = self.value_width or self.key_width
        if dtype is None:
            dtype = self.dtype or self.param_dtype
        static = self._window(window)
        memory = NHAState.init(
            batch,
            num_kv_heads,
            self.key_width,
            value_width,
            self.num_slots,
            window=static,
            capacity=capacity if static is None else None,
            dtype=dtype,
        )
        convolution = None
        if self.conv_width:
            past = self.conv_width - 1
            convolution = ConvolutionTails(
                query=jnp.zeros((batch, past, self.num_heads, self.key_width), dtype),
                key=jnp.zeros((batch, past, num_kv_heads, self.key_width), dtype),
                value=jnp.zeros((batch, past, num_kv_heads, value_width), dtype),
            )
        return AttentionState(memory=memory, convolution=convolution)

    def _sizes(self, x: jax.Array) -> tuple[int, int, int]:
        """Checks the fields against the input; returns K, H and V."""
        if x.ndim != 3:
            raise ValueError(f"x has shape {x.shape}, but must be [B, T, D].")
        num_kv_heads = self.num_kv_heads or self.num_heads
        if self.num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}, but must be a multiple of num_kv_heads "
                f"({num_kv_heads})."
            )
        key_width = self.key_width
        if key_width is None:
            if x.shape[-1] % self.num_heads:
                raise ValueError(
                    f"key_width is None, but the width {x.shape[-1]} of x is not a multiple of "
                    f"num_heads ({self.num_heads}): give key_width."
                )
            key_width = x.shape[-1] // self.num_heads
        if key_width % 2:
            raise ValueError(
                f"key_width is {key_width}, but must be even: rotary embedding pairs its halves."
            )
        if self.conv_width < 0 or self.conv_width == 1:
            raise ValueError(
                f"conv_width is {self.conv_width}, but must be 0 (no convolution) or at least 2."
            )
        if not self.gate_temperature > 0:
            raise ValueError(f"gate_temperature is {self.gate_temperature}, but must be above 0.")
        for name, valid in (
            ("feature_map", FEATURE_MAPS),
            ("value_activation", VALUE_ACTIVATIONS),
        ):
            if getattr(self, name) not in valid:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, but must be one of {', '.join(valid)}."
                )
        return num_kv_heads, key_width, self.value_width or key_width

    def _window(self, window: Any) -> Any:
        """The window to use: a static one (None = full) or a traced scalar."""
        if isinstance(window, jax.Array):
            return window
        chosen: Window = parse_window(self.window if window is None else window)
        return chosen

    def _project(
        self,
        x: jax.Array,
        name: str,
        features: tuple[int, ...],
        axes: tuple[str, ...],
        use_bias: bool,
        output_dtype: Dtype | None = None,
    ) -> jax.Array:
        """Projects `x` and constrains the result to be split as the kernel's outputs are."""
        out = Projection(
            features,
            axes,
            use_bias=use_bias,
            dtype=self.dtype,
            output_dtype=output_dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            precision=self.precision,
            name=name,
        )(x)
        return nn.with_logical_constraint(out, ("batch", "length", *axes[-len(features) :]))

    def _log_gate(self, x: jax.Array, num_kv_heads: int) -> Float[Array, "B T K M"]:
        """log_sigmoid(x W_g) / tau: operands in `dtype`, the product summed and kept in float32."""
        operands = self.dtype or jnp.result_type(x, self.param_dtype)
        features = (num_kv_heads, self.num_slots)
        axes = ("embed", "kv_heads", "slots")
        wide = jnp.promote_types(operands, jnp.float32)
        logits = self._project(x, "gate", features, axes, self.gate_bias, wide)
        return jax.nn.log_sigmoid(logits) / self.gate_temperature

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(
            epsilon=self.norm_epsilon,
            axis_name="head_dim",
            param_dtype=self.param_dtype,
            name=name,
        )

    def _convolve(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        segment_ids: jax.Array | None,
        state: AttentionState | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array, ConvolutionTails]:
        if state is not None and state.convolution is None:
            raise ValueError(
                f"state has no convolution tails, but conv_width is {self.conv_width}: make it "
                "with init_state of this module."
            )
        tails = None if state is None else state.convolution
        results = []
        for name, x, axis in (
            ("query", query, "heads"),
            ("key", key, "kv_heads"),
            ("value", value, "kv_heads"),
        ):
            convolution = ShortConvolution(
                self.conv_width,
                axis_name=axis,
                param_dtype=self.param_dtype,
                name=f"{name}_convolution",
            )
            results.append(
                convolution(
                    x,
                    segment_ids=segment_ids,
                    tail=None if tails is None else getattr(tails, name),
                    tail_segment_id=None if state is None else state.memory.segment_id,
                )
            )
        outputs, next_tails = zip(*results, strict=True)
        return *outputs, ConvolutionTails(*next_tails)

    def _rotary_tables(
        self,
        x: jax.Array,
        key_width: int,
        segment_ids: jax.Array | None,
        positions: jax.Array | None,
        state: AttentionState | None,
    ) -> tuple[jax.Array, jax.Array]:
        batch, length = x.shape[:2]
        if positions is None:
            memory = None if state is None else state.memory
            positions = segment_positions(segment_ids, length, memory)
        if positions.shape not in ((length,), (batch, length)):
            raise ValueError(
                f"positions has shape {positions.shape}, but must be [T] or [B, T] with B = "
                f"{batch} and T = {length}."
            )
        return rotary_tables(
            positions, key_width, theta=self.rotary_theta, scaling=self.rotary_scaling
        )


def _statistics(
    slot_share: Float[Array, "B T N"],
    log_gate: Float[Array, "B T K M"],
    segment_ids: Int[Array, "B T"] | None,
) -> dict[str, Float[Array, ""]]:
    """Means over real tokens, heads and slots, without gradients, in float32."""
    slot_share, log_gate = jax.lax.stop_gradient((slot_share, log_gate))
    weight = jnp.ones(log_gate.shape[:2]) if segment_ids is None else segment_ids > 0
    weight = weight.astype(jnp.float32)
    count = jnp.maximum(jnp.sum(weight), 1.0)

    def mean(x: jax.Array) -> jax.Array:
        if x.size == 0:
            return jnp.zeros(())
        per_token = jnp.mean(x.astype(jnp.float32), axis=tuple(range(2, x.ndim)))
        return jnp.sum(per_token * weight) / count

    return {
        "slot_share": mean(slot_share),
        "log_gate_mean": mean(log_gate),
        "retention": mean(jnp.exp(log_gate)),
    }
