"""Cases of the kernels' contract and its float64 judge, with the arguments that `attention` has.

The judge keeps to DESIGN's token-by-token definition (`docs/design.md`) with rows of history before
the tokens, in JAX so that it also gives gradients; `test_judge` ties it to the operator's oracle.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.ops.cases import HARD_GATES


@dataclasses.dataclass(frozen=True)
class Contract:
    """One call; letters as in the design, P rows of history, `seen` tokens before the row."""

    window: int | None
    T: int = 128
    B: int = 1
    N: int = 2
    K: int = 1
    H: int = 64
    V: int = 64
    M: int = 64
    P: int = 0
    seen: int = 0
    segments: tuple[tuple[int, ...], ...] | None = None  # lengths a row; negative = padding
    sink: bool = False
    hard_gates: bool = False
    traced: bool = False
    dtype: type = jnp.bfloat16

    @property
    def number(self):
        number = np.full((self.B, self.T), -1, np.int32)
        for row in range(self.B):
            start = 0
            for index, length in enumerate(self.segments[row] if self.segments else (self.T,)):
                if length > 0:
                    seen = self.seen if index == 0 else 0
                    number[row, start : start + length] = np.arange(length) + seen
                start += abs(length)
            assert start == self.T
        return number

    def arrays(self, seed=0):
        """Arguments of `attention` up to `initial_slots`."""
        rng = np.random.default_rng(seed)
        rows = self.T + self.P
        is_token = np.concatenate([np.ones((self.B, self.P), bool), self.number >= 0], axis=1)

        def normal(*shape):
            x = rng.standard_normal(shape)
            x[~is_token[:, -shape[1] :]] = 0
            return jnp.asarray(x, jnp.float32).astype(self.dtype)

        gate = -np.logaddexp(0, -rng.standard_normal((self.B, rows, self.K, self.M))) / 8
        if self.hard_gates:
            gate = rng.choice(HARD_GATES, size=gate.shape)
        gate[~is_token] = 0
        initial = None
        if self.seen:
            initial = rng.standard_normal((self.B, self.K, self.M, self.H + self.V)) * 0.3
            initial = jnp.asarray(initial, jnp.float32)
        return (
            normal(self.B, self.T, self.N, self.H),
            normal(self.B, rows, self.K, self.H),
            normal(self.B, rows, self.K, self.V),
            jnp.asarray(gate, jnp.float32),
            normal(self.B, self.T, self.N, self.H),
            normal(self.B, rows, self.K, self.H),
            jnp.asarray(self.number),
            initial,
        )

    @property
    def shapes(self):
        """Shapes and dtypes of `arrays`, without initial slots."""
        rows = self.T + self.P
        sizes = [
            ((self.T, self.N, self.H), self.dtype),
            ((rows, self.K, self.H), self.dtype),
            ((rows, self.K, self.V), self.dtype),
            ((rows, self.K, self.M), jnp.float32),
            ((self.T, self.N, self.H), self.dtype),
            ((rows, self.K, self.H), self.dtype),
            ((self.T,), jnp.int32),
        ]
        return (*(jax.ShapeDtypeStruct((self.B, *size), dtype) for size, dtype in sizes), None)

    @property
    def options(self):
        reads = self.window is not None
        return {
            "window": jnp.int32(self.window) if self.traced else self.window,
            "scale": self.H**-0.5,
            "sink": self.sink,
            "with_slots": reads and not self.traced,
            "use_slots": reads,
        }


# Places of the arguments of `attention` that are differentiated, by name.
DIFFERENTIABLE = {
    "query": 0,
    "key": 1,
    "value": 2,
    "log_gate": 3,
    "slot_query": 4,
    "slot_key": 5,
    "initial_slots": 7,
}


def judge(arguments, case: Contract):
    """(output, slot share, final slots) in the arguments' own precision."""
    query, key, value, log_gate, slot_query, slot_key, number, initial = arguments
    batch, length, num_heads, width = query.shape
    rows, num_kv_heads = key.shape[1:3]
    history = rows - length
    window = rows + 1 if case.window is None else case.window
    num_slots = log_gate.shape[3]
    scale = width**-0.5
    slots = jnp.zeros((batch, num_kv_heads, num_slots, width + value.shape[3]), query.dtype)
    written = jnp.concatenate([slot_key, value], axis=-1)
    row = jnp.arange(rows)[None]

    def by_group(x):
        return x.reshape(batch, num_kv_heads, num_heads // num_kv_heads, width)

    def step(slots, t):
        seen = number[:, t][:, None, None, None]
        slots = jnp.where(seen == 0, 0, slots)
        leaving = jnp.clip(t + history - window, 0, rows - 1)
        gate = log_gate[:, leaving][..., None]
        new = jnp.exp(gate) * slots - jnp.expm1(gate) * written[:, leaving][:, :, None]
        slots = jnp.where(seen >= window, new, slots)
        slot_logits = jnp.einsum("bkgh,bkmh->bkgm", by_group(slot_query[:, t]), slots[..., :width])
        logits = jnp.einsum("bkgh,bskh->bkgs", by_group(query[:, t]), key)
        here = t + history
        reach = jnp.minimum(number[:, t], window - 1)[:, None]
        visible = (row <= here) & (row >= here - reach) & (number[:, t] >= 0)[:, None]
        logits = jnp.where(visible[:, None, None], logits, -jnp.inf)
        covers = case.window is None or (case.traced and window >= length)
        readable = (seen >= 0) & ((seen >= window) | case.sink) & (not covers)
        slot_logits = jnp.where(readable, slot_logits, -jnp.inf)
        together = scale * jnp.concatenate([slot_logits, logits], axis=-1)
        top = jax.lax.stop_gradient(jnp.max(together, axis=-1, keepdims=True))
        weights = jnp.exp(together - jnp.where(jnp.isfinite(top), top, 0))
        total = jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights / jnp.where(total > 0, total, 1)
        slot_weights = weights[..., :num_slots]
        out = jnp.einsum("bkgm,bkmv->bkgv", slot_weights, slots[..., width:])
        out += jnp.einsum("bkgs,bskv->bkgv", weights[..., num_slots:], value)
        share = jnp.sum(slot_weights, axis=-1)
        return slots, (out.reshape(batch, num_heads, -1), share.reshape(batch, num_heads))

    start = slots if initial is None else initial
    slots, (out, share) = jax.lax.scan(step, start, jnp.arange(length))
    final = slots if case.options["with_slots"] else None
    return jnp.moveaxis(out, 0, 1), jnp.moveaxis(share, 0, 1), final


def cotangents(results):
    """A fixed random direction for each result; None stays."""
    rng = np.random.default_rng(99)
    return [None if x is None else rng.standard_normal(x.shape).astype(np.float32) for x in results]


def value_and_gradients(function, arguments):
    """Results of `function(arguments)`, and gradients by name of their sum along `cotangents`."""
    names = [name for name, place in DIFFERENTIABLE.items() if arguments[place] is not None]

    def loss(chosen):
        full = list(arguments)
        for name, x in chosen.items():
            full[DIFFERENTIABLE[name]] = x
        results = function(full)
        total = 0.0
        for x, direction in zip(results, cotangents(results), strict=True):
            if x is not None:
                wide = jnp.promote_types(x.dtype, jnp.float32)
                total += jnp.sum(x.astype(wide) * direction.astype(wide))
        return total, results

    chosen = {name: arguments[DIFFERENTIABLE[name]] for name in names}
    gradients, results = jax.grad(loss, has_aux=True)(chosen)
    return results, gradients


@functools.cache
def expected(case: Contract):
    """Results and gradients of the judge in float64, as NumPy arrays."""
    with jax.enable_x64(True):
        arguments = [
            x if x is None or x.dtype == jnp.int32 else jnp.asarray(np.asarray(x, np.float64))
            for x in case.arrays()
        ]
        run = jax.jit(lambda x: value_and_gradients(lambda y: judge(y, case), x))
        return jax.tree.map(np.asarray, run(arguments))
