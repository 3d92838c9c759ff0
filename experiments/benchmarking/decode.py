"""Decoding: tokens a second, bytes of state, and how near both are to what the memory allows.

Weights are random and states are taken as if `context` tokens had been read: what is measured is
the speed of a step, the whole of it in one program, sampling included.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarking import timing
from nha_jax.inference.cost import decode_cost
from nha_jax.inference.decode import MAX_STEPS, Sequences, decode
from nha_jax.inference.engine import Engine
from nha_jax.inference.sampling import GREEDY, SamplingArrays
from nha_jax.inference.sequences import layer_bytes
from nha_jax.models.config import NHAConfig
from nha_jax.models.language_model import LanguageModelState, NHALanguageModel
from nha_jax.ops.api import native_hybrid_attention_step
from nha_jax.ops.state import NHAState
from nha_jax.ops.windows import Window

SHAPES = {
    "small": NHAConfig(
        vocab_size=1000,
        num_layers=2,
        width=128,
        num_heads=4,
        num_kv_heads=2,
        key_width=32,
        feed_forward_width=256,
        num_slots=16,
        windows="16,full@1",
        dtype="float32",
    ),
    "llama3_8b": NHAConfig(
        vocab_size=128_256,
        num_layers=32,
        width=4096,
        num_heads=32,
        num_kv_heads=8,
        key_width=128,
        feed_forward_width=14_336,
        num_slots=64,
        windows="64,full@7,15,23,31",
        rotary_theta=500_000.0,
        tie_embeddings=False,
        dtype="bfloat16",
        param_dtype="bfloat16",
    ),
}
"""Models by name: a small one, and the shape of Llama 3 8B with full attention in 4 layers."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One setting of the windows at one batch size and context.

    Attributes:
        setting: "hybrid" (the model's windows), "full" (full attention in all layers) or "windowed"
            (the window of most layers in all of them).
        batch: sequences.
        context: tokens that each has.
        state_bytes: bytes of all states, as they are allocated.
        moved_bytes: what a step must move: weights and the states' parts that are read or written.
        seconds: of a step, median; None where it does not fit into the device's memory.
    """

    setting: str
    batch: int
    context: int
    state_bytes: int
    moved_bytes: int
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class AttentionMeasurement:
    """The attention of one windowed layer by itself.

    Attributes:
        batch: sequences.
        moved_bytes: bytes that a step must move: window read, slots read and written.
        seconds: of a step, median.
    """

    batch: int
    moved_bytes: int
    seconds: float


def copy_bandwidth(num_bytes: int, *, rounds: int) -> float:
    """Bytes a second that reading and writing a large array moves, both counted.

    Args:
        num_bytes: size of the array.
        rounds: how often it is timed.
    """
    repeats = 8
    source = jnp.ones((num_bytes // 4,), jnp.float32)
    # In place, so that no time goes into new memory; adding keeps XLA from leaving it out.
    passes = jax.jit(lambda x: jax.lax.fori_loop(0, repeats, lambda _, y: y + 1, x))
    seconds = timing.medians({"copy": lambda: passes(source)}, rounds=rounds)["copy"]
    return 2 * repeats * source.nbytes / seconds


def random_params(config: NHAConfig) -> Any:
    """Parameters of the size of trained ones, made on the device in the compute dtype."""
    shapes = jax.eval_shape(
        NHALanguageModel(config).init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32)
    )
    leaves, structure = jax.tree.flatten(nn.meta.unbox(shapes)["params"])

    @functools.partial(jax.jit, static_argnames=("shape", "dtype"))
    def draw(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        limit = 3**0.5 * config.initializer_range
        return jax.random.uniform(key, shape, minval=-limit, maxval=limit).astype(dtype)

    keys = jax.random.split(jax.random.key(0), len(leaves))
    made = [draw(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, made)


def settings_of(config: NHAConfig) -> dict[str, tuple[Window, ...]]:
    """The settings of the windows that are compared, by name."""
    windows = config.layer_windows
    limited = [window for window in windows if window is not None]
    common = statistics.mode(limited or [64])
    return {
        "hybrid": windows,
        "full": (None,) * config.num_layers,
        "windowed": (common,) * config.num_layers,
    }


def measure(
    config: NHAConfig,
    params: Any,
    *,
    settings: Sequence[str],
    batches: Sequence[int],
    contexts: Sequence[int],
    rounds: int,
    on_measured: Callable[[Measurement], None],
) -> list[Measurement]:
    """Times steps of decoding in each setting, at each batch size and context.

    Args:
        config: the model.
        params: its parameters.
        settings: names of `settings_of`.
        batches: numbers of sequences.
        contexts: tokens that they have.
        rounds: calls of MAX_STEPS steps that are timed.
        on_measured: called with each measurement as it is made.
    """
    measured = []
    for name in settings:
        for batch in batches:
            for context in contexts:
                windows = settings_of(config)[name]
                one = _measure_one(config, params, name, windows, batch, context, rounds)
                on_measured(one)
                measured.append(one)
    return measured


def _measure_one(
    config: NHAConfig,
    params: Any,
    name: str,
    windows: tuple[Window, ...],
    batch: int,
    context: int,
    rounds: int,
) -> Measurement:
    model = NHALanguageModel(dataclasses.replace(config, windows=windows))
    capacity = context + MAX_STEPS * (rounds + 1)
    init = functools.partial(model.init_state, batch, capacity=capacity)
    state_bytes = sum(layer_bytes(jax.eval_shape(init)))
    cost = decode_cost(config, windows, context)
    moved = cost.weight_bytes + batch * cost.state_bytes
    needed = state_bytes + sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if needed > _memory_limit():
        return Measurement(name, batch, context, state_bytes, moved, None)
    sequences = _sequences(model, init(), context)
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        sequences, _ = jax.block_until_ready(decode(model, params, sequences, MAX_STEPS))
        times.append(time.perf_counter() - start)
    # The first call compiled.
    seconds = statistics.median(times[1:]) / MAX_STEPS
    return Measurement(name, batch, context, state_bytes, moved, seconds)


def _memory_limit() -> float:
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", float("inf"))


def _sequences(model: NHALanguageModel, state: LanguageModelState, context: int) -> Sequences:
    """Sequences that never end, as if they had read `context` tokens."""
    batch = state.length.shape[0]

    def seen(memory: NHAState) -> NHAState:
        # Arrays of their own, because each is donated.
        return dataclasses.replace(
            memory,
            length=jnp.full((batch,), context, jnp.int32),
            segment_id=jnp.ones((batch,), jnp.int32),
        )

    layers = tuple(dataclasses.replace(layer, memory=seen(layer.memory)) for layer in state.layers)
    return Sequences(
        state=LanguageModelState(layers),
        token=jnp.zeros((batch,), jnp.int32),
        count=jnp.ones((batch,), jnp.int32),
        limit=jnp.full((batch,), 2**31 - 1, jnp.int32),
        active=jnp.ones((batch,), bool),
        sampling=jax.tree.map(jnp.asarray, SamplingArrays.of([GREEDY] * batch)),
        end_ids=jnp.full((batch, 4), -1, jnp.int32),
        seen=jnp.zeros((batch, model.config.vocab_size), bool),
    )


def measure_attention(
    config: NHAConfig, batches: Sequence[int], *, rounds: int
) -> list[AttentionMeasurement]:
    """Times the attention of one windowed layer, many steps in one program.

    Args:
        config: the model.
        batches: numbers of sequences.
        rounds: how often each is timed.
    """
    return [_measure_attention(config, batch, rounds) for batch in batches]


def _measure_attention(config: NHAConfig, batch: int, rounds: int) -> AttentionMeasurement:
    assert config.value_width is not None
    (window, *_) = settings_of(config)["windowed"]
    dtype = jnp.dtype(config.dtype)
    kv_heads, slots = config.num_kv_heads, config.num_slots
    rng = np.random.default_rng(0)

    def draw(heads: int, width: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((batch, 1, heads, width)), dtype)

    inputs = (
        draw(config.num_heads, config.key_width),
        draw(kv_heads, config.key_width),
        draw(kv_heads, config.value_width),
        -jnp.ones((batch, 1, kv_heads, slots), jnp.float32),
    )
    state = NHAState.init(
        batch, kv_heads, config.key_width, config.value_width, slots, window=window, dtype=dtype
    )
    state = dataclasses.replace(
        state,
        length=jnp.full((batch,), 10 * (window or 0), jnp.int32),
        segment_id=jnp.ones((batch,), jnp.int32),
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def steps(state: NHAState, inputs: Any) -> tuple[NHAState, jax.Array]:
        def body(_: int, carry: tuple[NHAState, jax.Array]) -> tuple[NHAState, jax.Array]:
            state, query = carry
            _, key, value, log_gate = inputs
            out, state = native_hybrid_attention_step(
                query,
                key,
                value,
                log_gate,
                state,
                window=window,
                implementation=config.implementation,
            )
            # Each step waits for the one before, as layers and tokens do.
            return state, query + 1e-3 * out[..., :1]

        return jax.lax.fori_loop(0, MAX_STEPS, body, (state, inputs[0]))

    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(steps(state, inputs))
        times.append(time.perf_counter() - start)
    cost = decode_cost(dataclasses.replace(config, num_layers=1, windows="0"), (window,), 2**30)
    return AttentionMeasurement(
        batch, batch * cost.state_bytes, statistics.median(times[1:]) / MAX_STEPS
    )


def measure_engine(
    config: NHAConfig, params: Any, *, prompts: int, num_sequences: int, tokens: int
) -> dict[str, float]:
    """Tokens a second of the engine, for prompts at once and one by one.

    Args:
        config: the model.
        params: its parameters.
        prompts: number of prompts, of 8 to 64 tokens.
        num_sequences: sequences at once.
        tokens: tokens generated for each.
    """
    rng = np.random.default_rng(0)
    texts = [
        rng.integers(0, config.vocab_size, rng.integers(8, 65)).tolist() for _ in range(prompts)
    ]
    rates = {}
    for name, places in (("one by one", 1), ("engine", num_sequences)):
        engine = Engine(
            NHALanguageModel(config),
            params,
            num_sequences=places,
            max_prompt=64,
            max_output=tokens,
            prefill_chunk=64,
        )
        engine.submit(texts[0])
        list(engine.run())  # compiles
        start = time.perf_counter()
        for text in texts:
            engine.submit(text)
        list(engine.run())
        rates[name] = prompts * tokens / (time.perf_counter() - start)
    return rates


def header() -> str:
    """The head of the table that `line` fills."""
    return (
        f"{'windows':<10}{'batch':>6}{'context':>9}{'ms/step':>10}{'tokens/s':>11}"
        f"{'state':>16}{'floor':>12}{'of floor':>10}"
    )


def line(measured: Measurement, bandwidth: float) -> str:
    """A measurement as a line of the table; the floor is what must move, at the copy's rate."""
    floor = measured.moved_bytes / bandwidth
    if measured.seconds is None:
        speed, share = f"{'does not fit':>21}", ""
    else:
        rate = measured.batch / measured.seconds
        speed = f"{1e3 * measured.seconds:>10.3f}{rate:>11,.0f}"
        share = f"{floor / measured.seconds:>10.1%}"
    return (
        f"{measured.setting:<10}{measured.batch:>6}{measured.context:>9}{speed}"
        f"{measured.state_bytes:>14,} B {1e3 * floor:>8.3f} ms{share}"
    )


def comparisons(measurements: Sequence[Measurement]) -> list[str]:
    """How the settings compare at the same batch and context, and windowed layers over contexts."""
    found = {(m.setting, m.batch, m.context): m for m in measurements if m.seconds}
    lines = []
    for (setting, batch, context), hybrid in found.items():
        full = found.get(("full", batch, context))
        if setting == "hybrid" and full is not None and full.seconds and hybrid.seconds:
            lines.append(
                f"batch {batch}, context {context}: hybrid has "
                f"{full.seconds / hybrid.seconds:.2f} times the tokens/s of full attention and "
                f"1/{full.state_bytes / hybrid.state_bytes:.1f} of its state"
            )
    for batch in dict.fromkeys(m.batch for m in measurements):
        times = [
            m.seconds
            for m in found.values()
            if m.seconds and (m.setting, m.batch) == ("windowed", batch)
        ]
        if len(times) > 1:
            lines.append(
                f"batch {batch}: windowed layers alone take {max(times) / min(times):.3f} times as "
                "long at the slowest context as at the fastest"
            )
    return lines
