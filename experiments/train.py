"""Trains a Native Hybrid Attention language model.

    python -m experiments.train --config configs/demo_text.py --workdir runs/demo
    [--config.train.steps=100 ...]

The same command resumes a run from its workdir. With several processes every one gets the same
command, and where no cluster is detected its own --process_id (docs/launching.md). Exit codes: 0
the run is complete, 75 it was stopped by SIGTERM, has saved and wants to be started again, 130 the
same for Ctrl-C, 1 an error.
"""

from pathlib import Path

from absl import flags

from experiments import command_line
from nha_jax.configuration import ConfigurationError
from nha_jax.data.errors import DataError
from nha_jax.training.checkpoint import CheckpointError
from nha_jax.training.config import RunConfig
from nha_jax.training.distributed import DistributedConfig, PeerError, initialize, peer_errors
from nha_jax.training.loop import Outcome, TrainingDivergedError, train
from nha_jax.training.program import OutOfMemoryError
from nha_jax.training.workdir import WorkdirError

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run: checkpoints, metrics, curves.")
_COORDINATOR = flags.DEFINE_string(
    "coordinator_address",
    None,
    "host:port of process 0 of several (or JAX_COORDINATOR_ADDRESS; SLURM, Open MPI and "
    "Kubernetes are detected).",
)
_NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", None, "Processes of the run (or JAX_NUM_PROCESSES)."
)
_PROCESS_ID = flags.DEFINE_integer(
    "process_id", None, "Number of this process, from 0 (or JAX_PROCESS_ID)."
)
_INITIALIZATION_TIMEOUT = flags.DEFINE_integer(
    "initialization_timeout", 300, "Seconds to wait for all processes to arrive."
)
_HEARTBEAT_TIMEOUT = flags.DEFINE_integer(
    "heartbeat_timeout", 100, "Seconds after which a silent process counts as ended."
)

# 75 is EX_TEMPFAIL of sysexits.h: try again. 130 is what shells report for Ctrl-C.
_EXIT_CODES = {Outcome.COMPLETE: 0, Outcome.PREEMPTED: 75, Outcome.INTERRUPTED: 130}


def main() -> int:
    """Runs the training that the command line asks for."""
    if not _WORKDIR.value:
        raise ConfigurationError("--workdir is missing: give the folder of the run.")
    config = command_line.read_config(RunConfig)
    initialize(
        DistributedConfig(
            _COORDINATOR.value,
            _NUM_PROCESSES.value,
            _PROCESS_ID.value,
            _INITIALIZATION_TIMEOUT.value,
            _HEARTBEAT_TIMEOUT.value,
        )
    )
    with peer_errors(_HEARTBEAT_TIMEOUT.value):
        return _EXIT_CODES[train(config, Path(_WORKDIR.value))]


if __name__ == "__main__":
    command_line.define_config(RunConfig)
    command_line.run(
        main,
        config=RunConfig,
        user_errors=(
            DataError,
            WorkdirError,
            CheckpointError,
            OutOfMemoryError,
            PeerError,
            TrainingDivergedError,
        ),
    )
