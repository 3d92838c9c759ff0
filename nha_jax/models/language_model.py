"""The Native Hybrid Attention language model: token ids to logits."""

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int32

from nha_jax.models.config import NHAConfig
from nha_jax.models.layers import run_layers, run_layers_unrolled, scan_layers
from nha_jax.modules.attention import AttentionState, NativeHybridAttention
from nha_jax.modules.feed_forward import SwiGLU
from nha_jax.modules.norm import RMSNorm
from nha_jax.modules.partitioning import partitioned_parameter
from nha_jax.modules.positions import segment_positions
from nha_jax.ops.inputs import capacity_error
from nha_jax.ops.rotary import rotary_tables
from nha_jax.ops.windows import (
    Window,
    format_windows,
    is_windows_array,
    parse_windows,
    windows_array,
)

# What the backward pass of a layer may keep; "none" is not here, it takes no nn.remat at all.
_REMAT_POLICIES: dict[str, Callable[..., Any]] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@struct.dataclass
class LanguageModelState:
    """What an `NHALanguageModel` needs to go on after the last token.

    Attributes:
        layers: one `AttentionState` a layer.
    """

    layers: tuple[AttentionState, ...]

    @property
    def length(self) -> Int32[Array, " B"]:
        """Tokens seen of each row's current segment."""
        return self.layers[0].memory.length

    @property
    def segment_id(self) -> Int32[Array, " B"]:
        """Id of each row's current segment."""
        return self.layers[0].memory.segment_id

    @property
    def windows(self) -> tuple[Window, ...]:
        """The window of each layer that the state is for."""
        return tuple(layer.memory.window for layer in self.layers)


def attention_module(config: NHAConfig, **linen: Any) -> NativeHybridAttention:
    """The attention of every layer; its window is given when it is called.

    Args:
        config: configuration of the model.
        **linen: `name` and `parent` of the module.
    """
    return NativeHybridAttention(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        key_width=config.key_width,
        value_width=config.value_width,
        num_slots=config.num_slots,
        gate_temperature=config.gate_temperature,
        qk_norm=config.qk_norm,
        qkv_bias=config.qkv_bias,
        output_bias=config.output_bias,
        gate_bias=config.gate_bias,
        conv_width=config.conv_width,
        feature_map=config.feature_map,
        value_activation=config.value_activation,
        output_norm=config.output_norm,
        empty_slots=config.empty_slots,
        rotary_theta=config.rotary_theta,
        rotary_scaling=config.rotary_scaling,
        norm_epsilon=config.norm_epsilon,
        implementation=config.implementation,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        kernel_init=nn.initializers.normal(config.initializer_range),
        precision=config.matmul_precision,
        **linen,
    )


class DecoderLayer(nn.Module):
    """Pre-norm attention and pre-norm SwiGLU, each added to the residual stream."""

    config: NHAConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        window: "int | str | Int32[Array, '']",
        rotary: tuple[jax.Array, jax.Array],
        segment_ids: Int[Array, "B T"] | None = None,
        state: AttentionState | None = None,
        return_state: bool = False,
        return_statistics: bool = False,
        return_traces: bool = False,
    ) -> tuple[Float[Array, "B T D"], dict[str, Any]]:
        """Applies the layer.

        Returns:
            The residual stream and a dictionary with "state", "statistics" and "traces" where asked
            for.
        """
        config = self.config
        norm = functools.partial(
            RMSNorm,
            epsilon=config.norm_epsilon,
            dtype=jnp.dtype(config.dtype),
            param_dtype=jnp.dtype(config.param_dtype),
        )
        results = attention_module(config, name="attention")(
            norm(name="attention_norm")(x),
            segment_ids=segment_ids,
            rotary=rotary,
            window=window,
            state=state,
            return_state=return_state,
            return_statistics=return_statistics,
            return_traces=return_traces,
        )
        attended, *extra = results if isinstance(results, tuple) else (results,)
        x = nn.with_logical_constraint(x + attended, ("batch", "length", "embed"))
        feed_forward = SwiGLU(
            config.feed_forward_width,
            dtype=jnp.dtype(config.dtype),
            param_dtype=jnp.dtype(config.param_dtype),
            kernel_init=nn.initializers.normal(config.initializer_range),
            precision=config.matmul_precision,
            name="feed_forward",
        )
        x = x + feed_forward(norm(name="feed_forward_norm")(x))
        x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
        names = ["state"] * return_state + ["statistics"] * return_statistics
        names += ["traces"] * return_traces
        return x, dict(zip(names, extra, strict=True))


class NHALanguageModel(nn.Module):
    """Decoder-only language model with Native Hybrid Attention in every layer.

    Parameters are {"embed", "layers", "final_norm", "head"} ("head" only where untied), those of
    the layers stacked [L, ...]; they do not depend on the windows.

    Attributes:
        config: shape and options.
    """

    config: NHAConfig

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "*B T"] | None = None,
        windows: Any = None,
        state: LanguageModelState | None = None,
        return_state: bool = False,
        return_statistics: bool = False,
        return_traces: bool = False,
        logits_at: Int[Array, "B R"] | None = None,
    ) -> Any:
        """Computes the logits of the token after each token.

        Args:
            tokens: token ids.
            segment_ids: ids from 1, 0 = padding; None means one segment a row, without padding.
            positions: positions for the rotary embedding; None counts the tokens of each segment,
                on from the state's length where a state is given.
            windows: None for the configuration's; any specification `parse_windows` reads, static;
                or an int32 array [L] (`nha_jax.ops.windows.windows_array`), data, with which one
                compiled function serves all settings, but no state can be taken or returned.
            state: state after the tokens before these, from `init_state` or an earlier call; it is
                not changed.
            return_state: also return the state after `tokens`. Without `state`, one that in layers
                of full attention has no room for more tokens: begin with `init_state` to decode.
            return_statistics: also return a dictionary of float32 arrays [L], means over real
                tokens and heads: "slot_share" (mass of the softmax on slots), "log_gate_mean",
                "retention".
            return_traces: also return a dictionary of what each layer's memories do at every token:
                "slot_share" [L, B, T, N] and "log_gate" [L, B, T, K, M], float32.
            logits_at: places in each row, from 0 to T - 1, after which logits are wanted; None for
                all. A long prompt wants one of them, and all would take more memory than all else.

        Returns:
            Logits [B, T, vocab_size] in float32, or [B, R, vocab_size] with `logits_at` (or a tuple
            of them, then the state, the statistics and the traces, as asked for).

        Raises:
            ValueError: tokens, windows or the state do not fit the configuration.
        """
        config = self.config
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(
                f"tokens has shape {tokens.shape} and dtype {tokens.dtype}, but must be integers "
                "[B, T]."
            )
        if segment_ids is not None and segment_ids.shape != tokens.shape:
            raise ValueError(
                f"segment_ids has shape {segment_ids.shape}, but must be that of tokens, "
                f"{tokens.shape}."
            )
        if logits_at is not None and (
            logits_at.ndim != 2
            or logits_at.shape[0] != tokens.shape[0]
            or not jnp.issubdtype(logits_at.dtype, jnp.integer)
        ):
            raise ValueError(
                f"logits_at has shape {logits_at.shape} and dtype {logits_at.dtype}, but must be "
                f"integers [B, R] with B = {tokens.shape[0]}."
            )
        _check_vocabulary(tokens, segment_ids, config.vocab_size)
        if segment_ids is not None:
            # Padding may be marked with an id outside the vocabulary.
            tokens = jnp.where(segment_ids > 0, tokens, 0)

        dtype = jnp.dtype(config.dtype)
        param_dtype = jnp.dtype(config.param_dtype)
        init = nn.initializers.normal(config.initializer_range)
        vocab_size, width = config.vocab_size, config.width
        embedding = partitioned_parameter(
            self, "embed", init, ("vocab", "embed"), (vocab_size, width), param_dtype
        )
        x = jnp.take(embedding, tokens, axis=0).astype(dtype)
        x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
        x, outputs = self._run_layers(
            x,
            segment_ids,
            positions,
            windows,
            state,
            return_state=return_state,
            return_statistics=return_statistics,
            return_traces=return_traces,
        )
        if logits_at is not None:
            x = jnp.take_along_axis(x, logits_at[..., None], axis=1)
        x = RMSNorm(
            epsilon=config.norm_epsilon, dtype=dtype, param_dtype=param_dtype, name="final_norm"
        )(x)

        if config.tie_embeddings:
            head = embedding.T
        else:
            head = partitioned_parameter(
                self, "head", init, ("embed", "vocab"), (width, vocab_size), param_dtype
            )
        # Operands in the compute dtype; products are summed and kept in float32.
        logits = jax.lax.dot_general(
            x,
            head.astype(dtype),
            (((2,), (0,)), ((), ())),
            precision=config.matmul_precision,
            preferred_element_type=jnp.promote_types(dtype, jnp.float32),
        )
        logits = nn.with_logical_constraint(logits, ("batch", "length", "vocab"))
        returned: list[Any] = [logits]
        names = ["state"] * return_state + ["statistics"] * return_statistics
        names += ["traces"] * return_traces
        returned += [outputs[name] for name in names]
        return returned[0] if len(returned) == 1 else tuple(returned)

    def init_state(
        self,
        batch: int,
        *,
        windows: Any = None,
        capacity: int | None = None,
        dtype: DTypeLike | None = None,
    ) -> LanguageModelState:
        """An empty state, to begin a prefill or to decode from nothing; needs no parameters.

        Args:
            batch: number of sequences B.
            windows: a static specification; None for the configuration's.
            capacity: largest number of tokens a segment may reach; needed where a layer has full
                attention.
            dtype: dtype of the windows' keys and values; None for the configuration's.

        Raises:
            ValueError: a layer has full attention and there is no capacity.
        """
        static = self._static_windows(windows)
        if None in static and capacity is None:
            raise ValueError(
                "capacity is None, but a layer has full attention: give the largest number of "
                "tokens."
            )
        attention = attention_module(self.config, parent=None)
        return LanguageModelState(
            tuple(
                attention.init_state(
                    batch,
                    window="full" if window is None else window,
                    capacity=capacity,
                    dtype=dtype,
                )
                for window in static
            )
        )

    def _static_windows(self, windows: Any) -> tuple[Window, ...]:
        if windows is None:
            return self.config.layer_windows
        return parse_windows(windows, self.config.num_layers)

    def _run_layers(
        self,
        x: jax.Array,
        segment_ids: jax.Array | None,
        positions: jax.Array | None,
        windows: Any,
        state: LanguageModelState | None,
        *,
        return_state: bool,
        return_statistics: bool,
        return_traces: bool,
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Runs all layers in the way that fits the windows and the state.

        Returns:
            The residual stream and a dictionary with "state", and with "statistics" and "traces"
            stacked over the layers, where asked for.
        """
        config = self.config
        length = x.shape[1]
        static: tuple[Window, ...] | None = None
        if is_windows_array(windows):
            self._check_windows_array(windows, state, return_state)
        else:
            static = self._static_windows(windows)
            if state is not None and state.windows != static:
                raise ValueError(
                    f"state is for the windows {format_windows(state.windows)!r}, but this call "
                    f"has {format_windows(static)!r}: make a state with init_state(windows=...)."
                )
        if state is not None:
            _check_capacity(segment_ids, length, state)
        if positions is None:
            memory = None if state is None else state.layers[0].memory
            positions = segment_positions(segment_ids, length, memory)
        elif positions.shape not in ((length,), x.shape[:2]):
            raise ValueError(
                f"positions has shape {positions.shape}, but must be [T] or [B, T] = {x.shape[:2]}."
            )
        rotary = rotary_tables(
            positions, config.key_width, theta=config.rotary_theta, scaling=config.rotary_scaling
        )

        def apply_layer(
            layer: nn.Module, x: jax.Array, window: Any, state: Any, *, prevent_cse: bool
        ) -> tuple[jax.Array, Any]:
            static_window = "full" if window is None else window

            def call(layer: nn.Module, x: jax.Array, data_window: Any, state: Any) -> Any:
                return layer(
                    x,
                    window=static_window if data_window is None else data_window,
                    rotary=rotary,
                    segment_ids=segment_ids,
                    state=state,
                    return_state=return_state and data_window is None,
                    return_statistics=return_statistics,
                    return_traces=return_traces,
                )

            if config.remat != "none":
                policy = _REMAT_POLICIES[config.remat]
                call = nn.remat(call, policy=policy, prevent_cse=prevent_cse)
            return call(layer, x, window if isinstance(window, jax.Array) else None, state)

        layer = DecoderLayer(config, name="layers")
        outputs: list[Any]
        if static is None or self.is_initializing():
            data = windows_array(static) if static else jnp.asarray(windows, jnp.int32)
            scanned, stacked = scan_layers(layer, x, data, apply_layer)
            if static is None or not (return_state or state is not None):
                return scanned, stacked
        states = None if state is None else state.layers
        if states is not None and length == 1:
            x, outputs = run_layers_unrolled(layer, x, static, apply_layer, states)
        else:
            x, outputs = run_layers(layer, x, static, apply_layer, states)
        results: dict[str, Any] = {}
        for name in ("statistics", "traces"):
            if name in outputs[0]:
                each = [output[name] for output in outputs]
                results[name] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
        if return_state:
            results["state"] = LanguageModelState(tuple(output["state"] for output in outputs))
        return x, results

    def _check_windows_array(
        self, windows: Any, state: LanguageModelState | None, return_state: bool
    ) -> None:
        if state is not None or return_state:
            raise ValueError(
                "windows is an array, but a state can only be taken or returned with static "
                "windows: give a tuple or a string."
            )
        shape = (self.config.num_layers,)
        if windows.shape != shape or not jnp.issubdtype(windows.dtype, jnp.integer):
            raise ValueError(
                f"windows is an array of shape {windows.shape} and dtype {windows.dtype}, but must "
                f"be int32 of shape {shape}."
            )


def _check_vocabulary(tokens: Any, segment_ids: Any, vocab_size: int) -> None:
    """Refuses ids outside the vocabulary where they can be looked at, that is outside of jit."""
    if isinstance(tokens, jax.core.Tracer) or isinstance(segment_ids, jax.core.Tracer):
        return
    real = np.asarray(tokens)
    if segment_ids is not None:
        real = real[np.asarray(segment_ids) > 0]
    outside = real[(real < 0) | (real >= vocab_size)]
    if outside.size:
        raise ValueError(
            f"tokens has the id {outside[0]}, but ids must be from 0 to {vocab_size - 1}."
        )


def _check_capacity(segment_ids: Any, length: int, state: LanguageModelState) -> None:
    """Refuses more tokens than a layer of full attention can hold, where numbers are concrete."""
    capacities = [layer.memory.capacity for layer in state.layers if layer.memory.window is None]
    numbers = segment_positions(segment_ids, length, state.layers[0].memory)
    if not capacities or isinstance(numbers, jax.core.Tracer):
        return
    real = np.ones(numbers.shape, bool) if segment_ids is None else np.asarray(segment_ids) > 0
    lengths = np.where(real, np.asarray(numbers) + 1, 0)
    if lengths.max() > min(capacities):
        raise capacity_error(lengths, min(capacities))


def count_parameters(config: NHAConfig) -> int:
    """Number of parameters of the model, without allocating any."""
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    variables = jax.eval_shape(NHALanguageModel(config).init, jax.random.key(0), tokens)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables["params"]))
