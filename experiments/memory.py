"""Prints what a training step needs on each device of a mesh, without the hardware.

    python -m experiments.memory --config configs/nha_1_3b.py --devices 8 --config.mesh.fsdp=8

Compiles the step for virtual devices of the CPU and prints the bytes of parameters, optimizer and
activations on each device, and the collectives of a step. A CPU keeps bfloat16 products in float32,
so the activations are an upper bound of what a GPU needs.
"""

import time

import jax
from absl import flags

from experiments import command_line
from nha_jax.configuration import ConfigurationError
from nha_jax.models.language_model import count_parameters
from nha_jax.training.config import RunConfig
from nha_jax.training.memory import step_memory
from nha_jax.training.sharding import check_divisible, make_mesh

_DEVICES = flags.DEFINE_integer("devices", 8, "Devices of the mesh.", lower_bound=1)


def main() -> None:
    """Prints the table that the command line asks for."""
    config = command_line.read_config(RunConfig)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", _DEVICES.value)
    mesh = make_mesh(config.mesh)
    check_divisible(
        mesh,
        config.model,
        config.data.batch_size,
        config.train.microbatches,
        config.data.sequence_length,
    )
    if config.model.implementation in ("pallas", "triton"):
        raise ConfigurationError(
            f"config.model.implementation is {config.model.implementation!r}, whose kernels cannot "
            "be compiled for a CPU: leave it None."
        )
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    tokens = config.data.batch_size * config.data.sequence_length
    print(f"model       {count_parameters(config.model):,} parameters")
    print(f"mesh        {mesh.size} devices ({axes})")
    print(
        f"batch       {config.data.batch_size} x {config.data.sequence_length} = {tokens:,} tokens "
        f"in {config.train.microbatches} microbatches, remat {config.model.remat!r}"
    )
    began = time.monotonic()
    memory = step_memory(config, mesh)
    print(f"compiled    in {time.monotonic() - began:.0f} s for {jax.devices()[0].device_kind}")
    for name in ("parameters", "optimizer", "batch", "temporary", "total"):
        print(f"{name:<11} {getattr(memory, name) / 2**30:8.3f} GiB a device")
    for kind, (count, size) in memory.collectives.items():
        print(f"{kind:<18} {count:>6} a step, {size / 2**30:8.3f} GiB a device")
    if not memory.collectives:
        print("no collectives")


if __name__ == "__main__":
    command_line.define_config(RunConfig)
    command_line.run(main, config=RunConfig)
