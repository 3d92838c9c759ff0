"""Several processes of one run: how they find each other, and what each must agree on.

Everything between processes is JAX's: `jax.distributed` and its coordination service, which process
0 hosts. This file decides whether there are several, turns their failures into sentences, and keeps
a job from waiting for a process that will not come.
"""

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from nha_jax.configuration import ConfigurationError, changed_fields
from nha_jax.training.checkpoint_format import CheckpointError

# What `jax.distributed.initialize` detects by itself, by the number of processes in its variables.
_CLUSTERS = {"slurm": "SLURM_NTASKS", "ompi": "OMPI_COMM_WORLD_SIZE"}
_KUBERNETES = ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")


class PeerError(Exception):
    """Another process of the run did not arrive, ended, or cannot be reached."""


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """How the processes of a run find each other.

    Each field that is None is taken from the environment variable of the same name after `JAX_`
    (`JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID`); with none given at all, from
    SLURM, Open MPI or Kubernetes where the job runs under one of them with more than one process.

    Attributes:
        coordinator_address: "host:port" of process 0, where it opens the port and others connect.
        num_processes: processes of the run.
        process_id: number of this process, from 0.
        initialization_timeout: seconds to wait for all processes to arrive.
        heartbeat_timeout: seconds after which a process that is silent counts as ended.
    """

    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    initialization_timeout: int = 300
    heartbeat_timeout: int = 100

    def __post_init__(self) -> None:
        for name in ("initialization_timeout", "heartbeat_timeout"):
            if getattr(self, name) < 1:
                raise ConfigurationError(
                    f"--{name} must be 1 second or more, found {getattr(self, name)}."
                )

    def with_environment(self, environment: Mapping[str, str]) -> "DistributedConfig":
        """Returns the configuration with what it leaves open taken from environment variables.

        Args:
            environment: such as `os.environ`.

        Raises:
            ConfigurationError: if only some of the three are given, or one is no valid number.
        """
        given: dict[str, Any] = {}
        for name in ("coordinator_address", "num_processes", "process_id"):
            value: Any = getattr(self, name)
            source = f"--{name}"
            if value is None and (text := environment.get(f"JAX_{name.upper()}")):
                value, source = text, f"JAX_{name.upper()}"
                if name != "coordinator_address":
                    try:
                        value = int(text)
                    except ValueError:
                        raise ConfigurationError(
                            f"{source} must be an integer, found {text!r}."
                        ) from None
            given[name] = value
        missing = [f"--{name}" for name, value in given.items() if value is None]
        if 0 < len(missing) < len(given):
            raise ConfigurationError(
                f"{' and '.join(missing)} must be given too: --coordinator_address, "
                "--num_processes and --process_id (or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES "
                "and JAX_PROCESS_ID) belong together."
            )
        if not missing:
            count, index = given["num_processes"], given["process_id"]
            if count < 1 or not 0 <= index < count:
                raise ConfigurationError(
                    f"--process_id must be from 0 to --num_processes - 1, found {index} of {count}."
                )
            host, _, port = given["coordinator_address"].rpartition(":")
            if not host or not port.isdecimal():
                raise ConfigurationError(
                    "--coordinator_address must be host:port, found "
                    f"{given['coordinator_address']!r}."
                )
        return dataclasses.replace(self, **given)


def detected_cluster(environment: Mapping[str, str]) -> str | None:
    """Returns the cluster whose job this process is one of several of: "slurm", "ompi", "k8s".

    Args:
        environment: such as `os.environ`.
    """
    for name, variable in _CLUSTERS.items():
        if environment.get(variable, "").isdecimal() and int(environment[variable]) > 1:
            return name
    return "k8s" if all(name in environment for name in _KUBERNETES) else None


def initialize(config: DistributedConfig) -> None:
    """Joins this process to the others of the run; does nothing where there are none.

    Must come before anything that asks JAX for its devices.

    Args:
        config: how to find them.

    Raises:
        ConfigurationError: if the configuration makes no sense.
        PeerError: if not all arrived in time.
    """
    config = config.with_environment(os.environ)
    cluster = None
    if config.coordinator_address is None:
        cluster = detected_cluster(os.environ)
        if cluster is None:
            return
    elif config.num_processes == 1:
        return
    where = config.coordinator_address or f"the processes of the {cluster} job"
    # JAX aborts the process with a stack trace when the time is over; this speaks first.
    watchdog = threading.Timer(config.initialization_timeout, _give_up, (config, where))
    watchdog.daemon = True
    watchdog.start()
    try:
        jax.distributed.initialize(
            coordinator_address=config.coordinator_address,
            num_processes=config.num_processes,
            process_id=config.process_id,
            cluster_detection_method=cluster,
            initialization_timeout=config.initialization_timeout + 60,
            heartbeat_timeout_seconds=config.heartbeat_timeout,
            # A process that ends with an error must not wait for those that it leaves behind.
            shutdown_timeout_seconds=config.heartbeat_timeout,
        )
    except (RuntimeError, ValueError) as error:
        raise PeerError(
            f"{_name(config)} could not join {where}: {_first_sentence(error)}"
        ) from error
    finally:
        watchdog.cancel()


def _give_up(config: DistributedConfig, where: str) -> None:
    """Ends the process because others did not arrive."""
    missing = "another process"
    if config.num_processes is not None:
        others = [i for i in range(config.num_processes) if i != config.process_id]
        listed = ", ".join(map(str, others[:16])) + (", ..." if len(others) > 16 else "")
        missing = f"process {listed}" if len(others) == 1 else f"at least one of processes {listed}"
    print(
        f"error: {_name(config)} waited {config.initialization_timeout} seconds "
        f"(--initialization_timeout) at {where}, but {missing} did not arrive.",
        file=sys.stderr,
    )
    sys.stderr.flush()
    os._exit(1)


def _name(config: DistributedConfig) -> str:
    if config.process_id is None:
        return "this process"
    return f"process {config.process_id} of {config.num_processes}"


def check_platform(environment: Mapping[str, str]) -> None:
    """Refuses a CPU on a machine with an NVIDIA GPU, unless the CPU was asked for.

    JAX falls back to the CPU with a warning when CUDA fails to start, and a run would train a
    thousand times slower than meant, or hang the others of its job.

    Args:
        environment: such as `os.environ`.

    Raises:
        ConfigurationError: if JAX fell back.
    """
    if jax.default_backend() != "cpu" or _asked_for_cpu(environment):
        return
    if _has_nvidia_gpu():
        raise ConfigurationError(
            "JAX runs on the CPU although this machine has an NVIDIA GPU and JAX's CUDA plugin: "
            "CUDA failed to start (its warning says why). Mend it, or set JAX_PLATFORMS=cpu to "
            "train on the CPU."
        )


def _asked_for_cpu(environment: Mapping[str, str]) -> bool:
    asked = f"{environment.get('JAX_PLATFORMS', '')},{jax.config.jax_platforms or ''}"
    return "cpu" in asked.split(",")


def _has_nvidia_gpu() -> bool:
    """Whether there is a GPU's driver, and a JAX that could use it."""
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    return Path("/proc/driver/nvidia/version").exists() and any(
        importlib.util.find_spec(name) is not None for name in plugins
    )


def check_agreement(run_config: dict[str, Any]) -> None:
    """Refuses a run whose processes were given different configurations; all must call it.

    Args:
        run_config: this process's configuration, as from `to_mapping`.

    Raises:
        ConfigurationError: on every process, naming the fields that differ from process 0's.
    """
    if jax.process_count() == 1:
        return
    text = json.dumps(run_config, sort_keys=True).encode()
    digest = np.frombuffer(hashlib.sha256(text).digest()[:8], np.uint32)
    digests = np.asarray(multihost_utils.process_allgather(digest)).reshape(-1, 2)
    others = [index for index, other in enumerate(digests) if (other != digests[0]).any()]
    if not others:
        return
    # Only now, because all have to agree on the size of what they send.
    sizes = multihost_utils.process_allgather(np.array(len(text)))
    buffer = np.zeros(int(np.max(sizes)), np.uint8)
    buffer[: len(text)] = np.frombuffer(text, np.uint8)
    first = np.asarray(multihost_utils.broadcast_one_to_all(buffer))
    expected = json.loads(bytes(first[: int(np.ravel(sizes)[0])]))
    fields = ", ".join(changed_fields(expected, run_config)) or "none here"
    raise ConfigurationError(
        "The processes of a run must have one configuration, but that of process "
        f"{', '.join(map(str, others))} is not that of process 0; fields that differ in this "
        f"process ({jax.process_index()}): {fields}."
    )


def from_first(flag: bool) -> bool:
    """Returns process 0's value of a flag, on every process; all must call it."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.broadcast_one_to_all(np.array(flag)))


@contextlib.contextmanager
def peer_errors(heartbeat_timeout: int) -> Iterator[None]:
    """Turns what JAX raises where another process is gone into one sentence.

    Of more than two processes only the coordination service knows which one is gone, once its
    heartbeats are missing: it then ends this process with a message that names it. So this waits
    for that, no longer than the heartbeats take.

    Args:
        heartbeat_timeout: that of the `DistributedConfig`, in seconds.

    Raises:
        PeerError: for such an error inside the block.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError, CheckpointError) as error:
        # A save is something that all processes do, and fails where one of them is gone.
        text = str(error).lower()
        signs = ("connection", "unavailable", "gloo", "heartbeat", "deadline", "nccl", "socket")
        is_user_error = isinstance(error, ConfigurationError)
        several = jax.process_count() > 1
        if is_user_error or not several or not any(sign in text for sign in signs):
            raise
        index, count = jax.process_index(), jax.process_count()
        lost = f"process {1 - index}"
        if count > 2:
            print(
                f"process {index} lost another process of the run ({_first_sentence(error)}); "
                f"waiting up to {heartbeat_timeout} seconds to hear which.",
                file=sys.stderr,
                flush=True,
            )
            time.sleep(heartbeat_timeout * 1.5)
            lost = f"one of the other {count - 1} processes"
        raise PeerError(
            f"{lost} of the run ended or cannot be reached, so this one ends too; start all again "
            f"to go on from the last checkpoint ({_first_sentence(error)})"
        ) from error


def exit_now(code: int) -> None:
    """Ends this process without waiting for the others, where there are others.

    The orderly way out is a barrier with all of them, and one that failed must not stand there.

    Args:
        code: the exit code.
    """
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _first_sentence(error: Exception) -> str:
    """The first line of an error's text, short enough for a line of one's own."""
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return line if len(line) <= 300 else line[:300] + " ..."
