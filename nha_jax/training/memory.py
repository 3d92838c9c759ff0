"""What a training step needs on each device of a mesh, from XLA's own plan; no hardware needed."""

import dataclasses
import math
import re
from collections import Counter
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from nha_jax.training.config import RunConfig
from nha_jax.training.program import build_program

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
_ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
_ITEM_BYTES |= {"f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Bytes on each device, and what crosses between devices in a step.

    Attributes:
        parameters: of the master weights.
        optimizer: of the optimizer's moments and counters.
        batch: of the batch.
        temporary: XLA's plan for everything else at its peak: gradients, activations kept for the
            backward pass, workspace.
        collectives: kind -> (operations a step, bytes that their results have on one device).
    """

    parameters: int
    optimizer: int
    batch: int
    temporary: int
    collectives: dict[str, tuple[int, int]]

    @property
    def total(self) -> int:
        """Bytes on each device, all together; the new state takes the place of the old one."""
        return self.parameters + self.optimizer + self.batch + self.temporary


def step_memory(config: RunConfig, mesh: Mesh) -> StepMemory:
    """Compiles a training step for a mesh and reads off its memory and its collectives.

    XLA's plan is that of the platform it compiles for. A CPU keeps bfloat16 products in float32, so
    the temporary part of a plan made on a CPU is an upper bound for a GPU.

    Args:
        config: the run.
        mesh: devices, which may be virtual ones of the CPU.
    """
    program = build_program(config, mesh, np.zeros(0, np.int32))
    shape = (config.data.batch_size, config.data.sequence_length)
    names = ("tokens", "targets", "segment_ids", "positions", "loss_mask")
    batch = {
        name: jax.ShapeDtypeStruct(shape, np.int32, sharding=program.batch_sharding)
        for name in names
    }
    step: Any = program.train_step
    with jax.set_mesh(mesh):
        compiled = step.lower(program.abstract_state, batch).compile()
    parameters = _bytes_on_device(program.abstract_state.params)
    return StepMemory(
        parameters=parameters,
        optimizer=_bytes_on_device(program.abstract_state) - parameters,
        batch=_bytes_on_device(batch),
        temporary=compiled.memory_analysis().temp_size_in_bytes,
        collectives=count_collectives(compiled.as_text()),
    )


def _bytes_on_device(tree: Any) -> int:
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def count_collectives(hlo: str) -> dict[str, tuple[int, int]]:
    """Counts the collectives that one run of a compiled program executes.

    Those inside a loop count once for every round that XLA knows it to make.

    Args:
        hlo: the program, as from `compiled.as_text()`.

    Returns:
        kind -> (operations, bytes of their results on one device).
    """
    computations, entry = _computations(hlo)
    # How often each computation runs: the callers' numbers, passed on to what they call.
    runs: Counter[str] = Counter()

    def run(name: str, times: int) -> None:
        runs[name] += times
        for line in computations.get(name, ()):
            rounds = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
            inside = int(rounds[1]) if rounds and " while(" in line else 1
            for kind, called in re.findall(r"(body|condition|calls|to_apply)=%?([\w.-]+)", line):
                run(called, times * (inside if kind == "body" else 1))
            for called in re.findall(r"branch_computations=\{([^}]*)\}", line):
                for branch in called.split(","):
                    run(branch.strip().lstrip("%"), times)

    run(entry, 1)
    found: dict[str, tuple[int, int]] = {}
    pattern = re.compile(rf"= (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(")
    for name, times in runs.items():
        for line in computations.get(name, ()):
            match = pattern.search(line)
            if match:
                count, size = found.get(match[2], (0, 0))
                found[match[2]] = (count + times, size + times * _shape_bytes(match[1]))
    return dict(sorted(found.items()))


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation by its name, and the name of the one that is run."""
    found: dict[str, list[str]] = {}
    entry = name = ""
    for line in hlo.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.-]+) .*->.*\{$", line)
        if header and not line.startswith(" "):
            name = header[2]
            found[name] = []
            entry = name if header[1] else entry
        elif name:
            found[name].append(line)
    return found, entry


def _shape_bytes(shapes: str) -> int:
    """Bytes of an HLO shape, or of a tuple of them: "(f32[2,3]{1,0}, bf16[4])"."""
    total = 0
    for kind, sizes in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
        if kind in _ITEM_BYTES:
            total += _ITEM_BYTES[kind] * math.prod(int(size) for size in sizes.split(",") if size)
    return total
