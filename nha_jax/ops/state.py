"""The decoding state of one attention layer: slots, the window's tokens, counters."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


@struct.dataclass
class NHAState:
    """Everything needed to go on after the last token (DESIGN section 1, "State").

    A pytree, the same for every implementation. Token number i of the current segment lies in
    row i % C of the window arrays; rows outside the last `window` tokens hold nothing that is
    read. For full attention (`window` None) C is the maximum number of tokens, and the arrays
    of slot keys and gates have no rows, since no token ever leaves.

    Attributes:
        slot_key: [B, K, M, H], float32 (float64 for a float64 state).
        slot_value: [B, K, M, V], like `slot_key`.
        window_key: [B, C, K, H], rotated keys.
        window_slot_key: [B, C, K, H] ([B, 0, K, H] for full attention), keys as the slots take
            them.
        window_value: [B, C, K, V].
        window_log_gate: [B, C, K, M] ([B, 0, K, M] for full attention), float32.
        length: [B] int32, tokens seen of the current segment.
        segment_id: [B] int32, id of the current segment; 0 before the first token.
        window: The window W this state is for, None for full attention. Static.
    """

    slot_key: Float[Array, "B K M H"]
    slot_value: Float[Array, "B K M V"]
    window_key: Float[Array, "B C K H"]
    window_slot_key: Float[Array, "B C K H"]
    window_value: Float[Array, "B C K V"]
    window_log_gate: Float[Array, "B C K M"]
    length: Int[Array, " B"]
    segment_id: Int[Array, " B"]
    window: int | None = struct.field(pytree_node=False)

    @classmethod
    def init(
        cls,
        batch: int,
        num_kv_heads: int,
        key_width: int,
        value_width: int,
        num_slots: int,
        *,
        window: int | None,
        capacity: int | None = None,
        dtype: DTypeLike = jnp.float32,
    ) -> "NHAState":
        """An empty state.

        Args:
            batch: Number of sequences B.
            num_kv_heads: Key/value heads K.
            key_width: Width H of a key head.
            value_width: Width V of a value head.
            num_slots: Slots M per key/value head; 0 is legal.
            window: Window W in tokens, or None for full attention.
            capacity: Rows C of the window arrays. At least W, which is the default; for full
                attention the largest number of tokens the state will see, and required.
            dtype: Of the window's keys and values. Slots and gates are float32 (float64 if
                this is float64).

        Raises:
            ValueError: for a negative or missing size, or a capacity below the window.
        """
        given = dict(batch=batch, num_kv_heads=num_kv_heads, key_width=key_width)
        given |= dict(value_width=value_width, num_slots=num_slots)
        given |= {} if window is None else {"window": window}
        given |= {} if capacity is None else {"capacity": capacity}
        for name, size in given.items():
            if isinstance(size, bool) or not isinstance(size, int | np.integer):
                raise ValueError(f"NHAState.init: {name} must be an integer, but was {size!r}.")
        for name in ("batch", "num_kv_heads", "key_width", "value_width"):
            if given[name] < 1:
                raise ValueError(
                    f"NHAState.init: {name} must be at least 1, but was {given[name]}."
                )
        if num_slots < 0:
            raise ValueError(f"NHAState.init: num_slots must not be negative, but was {num_slots}.")
        if window is None:
            if capacity is None or capacity < 1:
                raise ValueError(
                    "NHAState.init: full attention (window=None) needs capacity, the maximum "
                    f"number of tokens, to be at least 1, but it was {capacity}."
                )
            leaving_rows = 0
        else:
            if window < 0:
                raise ValueError(f"NHAState.init: window must not be negative, but was {window}.")
            capacity = window if capacity is None else capacity
            if capacity < window:
                raise ValueError(
                    f"NHAState.init: capacity must be at least the window {window}, but was "
                    f"{capacity}."
                )
            leaving_rows = capacity
        try:
            is_floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
        except TypeError:
            is_floating = False
        if not is_floating or dtype is None:
            raise ValueError(f"NHAState.init: dtype must be floating point, but was {dtype!r}.")
        dtype = jnp.dtype(dtype)
        if dtype == jnp.float64 and not jax.config.jax_enable_x64:
            raise ValueError("NHAState.init: dtype float64 needs 64 bits enabled in JAX.")
        wide = jnp.promote_types(dtype, jnp.float32)
        return cls(
            slot_key=jnp.zeros((batch, num_kv_heads, num_slots, key_width), wide),
            slot_value=jnp.zeros((batch, num_kv_heads, num_slots, value_width), wide),
            window_key=jnp.zeros((batch, capacity, num_kv_heads, key_width), dtype),
            window_slot_key=jnp.zeros((batch, leaving_rows, num_kv_heads, key_width), dtype),
            window_value=jnp.zeros((batch, capacity, num_kv_heads, value_width), dtype),
            window_log_gate=jnp.zeros((batch, leaving_rows, num_kv_heads, num_slots), wide),
            length=jnp.zeros((batch,), jnp.int32),
            segment_id=jnp.zeros((batch,), jnp.int32),
            window=window,
        )

    @property
    def capacity(self) -> int:
        """Rows C of the window arrays."""
        return self.window_key.shape[1]

    def slots(self) -> tuple[Float[Array, "B K M H"], Float[Array, "B K M V"]]:
        """Slot keys and values as section 1 defines them after the last token."""
        return self.slot_key, self.slot_value
