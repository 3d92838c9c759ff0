"""The plan of a step: what is split is smaller, and what crosses between devices is counted."""

import jax

from nha_jax.models.language_model import count_parameters
from nha_jax.training.memory import count_collectives, step_memory
from nha_jax.training.sharding import make_mesh
from tests.training.tiny import tiny_config

HLO = """HloModule jit_step

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body (state: (s32[], f32[4])) -> (s32[], f32[4]) {
  %gathered = (f32[2,3]{1,0}, bf16[4]{0}) all-gather-start(%x, %y), dimensions={0}
  ROOT %out = (s32[], f32[4]) tuple(%i, %z)
}

%condition (state: (s32[], f32[4])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n)
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %loop = f32[4] while(%i), condition=%condition, body=%body, "known_trip_count":{"n":"5"}
  ROOT %all = f32[8,2]{1,0} all-reduce(%p), to_apply=%add
}
"""


def test_collectives_in_a_loop_count_for_every_round() -> None:
    found = count_collectives(HLO)
    assert found == {"all-gather": (5, 5 * (24 + 8)), "all-reduce": (1, 64)}


def test_splitting_parameters_divides_them() -> None:
    changes = {"mesh.data": 1, "mesh.fsdp": 2, "model.width": 32}
    config = tiny_config(**changes)
    memory = step_memory(config, make_mesh(config.mesh, jax.devices()[:2]))
    whole = 4 * count_parameters(config.model)
    # Each device holds half of all but norms and the like, in float32, and both moments.
    assert 0.5 * whole <= memory.parameters < 0.6 * whole
    assert 0.5 * 2 * whole <= memory.optimizer < 0.6 * 2 * whole
    assert memory.batch == 5 * 4 * config.data.batch_size * config.data.sequence_length // 2
    assert memory.temporary > memory.parameters  # the gradient, to begin with
    assert memory.total == (memory.parameters + memory.optimizer + memory.batch + memory.temporary)
    # Every parameter that is split is gathered for its use.
    assert memory.collectives["all-gather"][1] > 0.9 * whole
