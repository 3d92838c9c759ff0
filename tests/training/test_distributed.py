"""How processes find each other, as far as it takes no second process."""

import re

import jax
import pytest

from nha_jax.configuration import ConfigurationError
from nha_jax.training import distributed
from nha_jax.training.distributed import (
    DistributedConfig,
    check_platform,
    detected_cluster,
    initialize,
    peer_errors,
)
from nha_jax.training.sharding import MeshConfig, make_mesh, process_rows

ENVIRONMENT = {
    "JAX_COORDINATOR_ADDRESS": "host0:1234",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "2",
}


def test_flags_come_before_the_environment() -> None:
    assert DistributedConfig().with_environment({}) == DistributedConfig()
    found = DistributedConfig(process_id=3).with_environment(ENVIRONMENT)
    assert found == DistributedConfig("host0:1234", 4, 3)


@pytest.mark.parametrize(
    ("config", "environment", "message"),
    [
        (DistributedConfig(process_id=1), {}, "--coordinator_address and --num_processes must"),
        (DistributedConfig("host:1", 2, 2), {}, "from 0 to --num_processes - 1, found 2 of 2"),
        (DistributedConfig("host", 2, 0), {}, "must be host:port, found 'host'"),
        (
            DistributedConfig(),
            ENVIRONMENT | {"JAX_NUM_PROCESSES": "x"},
            "JAX_NUM_PROCESSES must be an integer, found 'x'",
        ),
    ],
)
def test_what_makes_no_sense_is_named(
    config: DistributedConfig, environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        config.with_environment(environment)


def test_timeouts_are_positive() -> None:
    with pytest.raises(ConfigurationError, match="--heartbeat_timeout must be 1 second or more"):
        DistributedConfig(heartbeat_timeout=0)


@pytest.mark.parametrize(
    ("environment", "cluster"),
    [
        ({}, None),
        ({"SLURM_NTASKS": "1"}, None),
        ({"SLURM_NTASKS": "16"}, "slurm"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "ompi"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, "k8s"),
    ],
)
def test_clusters_are_detected(environment: dict[str, str], cluster: str | None) -> None:
    assert detected_cluster(environment) == cluster


def test_a_process_alone_joins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ENVIRONMENT, "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    initialize(DistributedConfig())
    initialize(DistributedConfig("localhost:1", 1, 0))
    assert not jax.distributed.is_initialized()


def test_falling_back_to_the_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_platform({})  # this machine, where tests ask for the CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(distributed, "_asked_for_cpu", lambda environment: False)
    monkeypatch.setattr(distributed, "_has_nvidia_gpu", lambda: True)
    with pytest.raises(ConfigurationError, match="JAX_PLATFORMS=cpu"):
        check_platform({})
    monkeypatch.setattr(distributed, "_has_nvidia_gpu", lambda: False)
    check_platform({})


def test_other_errors_are_not_taken_for_a_lost_process() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError), peer_errors(1):
        raise jax.errors.JaxRuntimeError("INTERNAL: Gloo all-reduce failed")  # one process only
    with pytest.raises(ValueError, match="connection"), peer_errors(1):
        raise ValueError("a connection")


def test_one_process_reads_whole_batches() -> None:
    assert process_rows(make_mesh(MeshConfig(data=2, context=2, tensor=2)), 8) == (0, 1)
