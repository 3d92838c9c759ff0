"""The program that decodes: what it may not do with its memory."""

import dataclasses

import jax
import jax.numpy as jnp

from nha_jax.inference.decode import Sequences, decode
from nha_jax.inference.sampling import GREEDY, SamplingArrays
from nha_jax.inference.sequences import layer_bytes
from nha_jax.models.language_model import NHALanguageModel
from tests.inference.small import MIXED, params_of


def test_a_donated_state_is_changed_in_place() -> None:
    """A copy of the states, kept for rows that have ended, would double a long context's memory."""
    config = dataclasses.replace(MIXED, num_layers=2, windows="full")
    model, batch = NHALanguageModel(config), 2

    def shape(*sizes: int, dtype: jax.typing.DTypeLike = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    state = jax.eval_shape(lambda: model.init_state(batch, capacity=100_000))
    settings = SamplingArrays.of([GREEDY] * batch)
    sequences = Sequences(
        state=state,
        token=shape(batch),
        count=shape(batch),
        limit=shape(batch),
        active=shape(batch, dtype=bool),
        sampling=jax.tree.map(lambda x: shape(*x.shape, dtype=x.dtype), settings),
        end_ids=shape(batch, 4),
        seen=shape(batch, config.vocab_size, dtype=bool),
    )
    memory = decode.lower(model, params_of(config), sequences, 16).compile().memory_analysis()
    assert memory is not None
    one_layer, other = layer_bytes(state)
    assert memory.alias_size_in_bytes >= one_layer + other
    # The layers are computed one after the other; each needs its logits and masked values.
    assert memory.temp_size_in_bytes < 1.5 * one_layer
