"""Random cases of the operator: sizes, inputs, gates."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

HARD_GATES = (0.0, -1e-4, -0.3, -9.0, -60.0, -1e4)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of the operator, by size and options; letters as in the design."""

    window: int | None
    T: int = 45
    B: int = 2
    N: int = 4
    K: int = 2
    H: int = 8
    V: int = 6
    M: int = 5
    segments: tuple[tuple[int, ...], ...] | None = None  # lengths a row; negative = padding
    rotary: bool = True
    slot_inputs: bool = False
    empty_slots: str = "masked"
    scale: float | None = None
    hard_gates: bool = False

    def segment_ids(self):
        """Ids from 1, counted up over the row; [B, T] int32, or None."""
        if self.segments is None:
            return None
        rows = []
        for lengths in self.segments:
            row, next_id = [], 1
            for length in lengths:
                row += [next_id if length > 0 else 0] * abs(length)
                next_id += length > 0
            assert len(row) == self.T
            rows.append(row)
        return np.array(rows, np.int32)

    def arrays(self, dtype=jnp.float32, seed=0):
        """Differentiable inputs by name, rounded to `dtype` (the gate stays float32)."""
        rng = np.random.default_rng(seed)

        def normal(*shape):
            return jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(dtype)

        gate_dtype = jnp.promote_types(dtype, jnp.float32)
        shape = (self.B, self.T, self.K, self.M)
        gate = jnp.asarray(rng.standard_normal(shape), gate_dtype)
        gate = jax.nn.log_sigmoid(gate) / 8
        if self.hard_gates:
            gate = jnp.asarray(rng.choice(HARD_GATES, size=shape), gate_dtype)
        arrays = {
            "query": normal(self.B, self.T, self.N, self.H),
            "key": normal(self.B, self.T, self.K, self.H),
            "value": normal(self.B, self.T, self.K, self.V),
            "log_gate": gate,
        }
        if self.slot_inputs:
            arrays["slot_query"] = normal(self.B, self.T, self.N, self.H)
            arrays["slot_key"] = normal(self.B, self.T, self.K, self.H)
        return arrays

    def options(self):
        """Keyword arguments that are not differentiated, `window` left out."""
        options = {"empty_slots": self.empty_slots, "scale": self.scale}
        options["segment_ids"] = self.segment_ids()
        if self.rotary:
            angles = np.arange(self.T)[:, None] * 0.5 ** np.arange(self.H // 2)[None]
            options["rotary"] = (
                np.cos(angles).astype(np.float32),
                np.sin(angles).astype(np.float32),
            )
        return options


PACKED = ((20, 1, 17, -7), (-4, 9, 2, -3, 27))
CASES = {
    "gated-slots": Case(window=0),
    "window-1": Case(window=1, rotary=False),
    "window-5": Case(window=5, slot_inputs=True, scale=0.7),
    "window-16-packed": Case(window=16, segments=PACKED),
    "window-7-packed-slot-inputs": Case(window=7, segments=PACKED, slot_inputs=True, M=24),
    "gated-slots-packed": Case(window=0, segments=PACKED),
    "window-just-short": Case(window=44),
    "window-exactly-T": Case(window=45),
    "window-beyond-T": Case(window=1000),
    "full": Case(window=None),
    "full-packed": Case(window=None, segments=PACKED),
    "sink": Case(window=6, empty_slots="sink"),
    "sink-beyond-T": Case(window=64, empty_slots="sink"),
    "sink-full": Case(window=None, empty_slots="sink"),
    "sink-packed": Case(window=6, empty_slots="sink", segments=PACKED),
    "no-slots": Case(window=6, M=0),
    "one-token": Case(window=3, T=1),
    "one-token-gated-slots": Case(window=0, T=1),
    "length-of-one-chunk": Case(window=9, T=32, B=1, N=1, K=1),
    "many-chunks": Case(window=33, T=131, B=1, N=6, K=2, H=4, V=10, M=40),
    "one-head-width-2": Case(window=2, T=17, N=1, K=1, H=2, V=1, M=1),
    "hard-gates": Case(window=4, T=70, hard_gates=True, M=12),
    "hard-gates-gated-slots-packed": Case(window=0, segments=PACKED, hard_gates=True),
}
