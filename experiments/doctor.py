"""Prints what this machine and environment offer, and which implementation would be used.

    python -m experiments.doctor [--require_gpu]

The first thing to run where something does not work, and the thing to paste into a bug report.
With `--require_gpu` it fails where JAX sees no GPU, so that a job stops before it trains on a CPU
by mistake.
"""

import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
from absl import flags
from packaging.requirements import Requirement
from packaging.version import Version

from experiments import command_line, machine
from nha_jax.ops import api

_REQUIRE_GPU = flags.DEFINE_bool("require_gpu", False, "Fail where JAX sees no GPU.")

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "jax-triton",
    "triton",
)

# A release of these goes with the same release of jaxlib.
PLUGINS = (
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "jax-rocm7-plugin",
    "jax-rocm7-pjrt",
)

VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_ENABLE_X64",
    "JAX_PLATFORMS",
    "LD_LIBRARY_PATH",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
)


class DoctorError(Exception):
    """JAX cannot start, or what the caller requires is not there; the message is one sentence."""


def version_problems(
    versions: Mapping[str, str], requirements: Mapping[str, Sequence[str]]
) -> list[str]:
    """One sentence for each pair of installed packages that do not go together.

    Args:
        versions: Installed version by distribution name.
        requirements: By distribution name, what it asks for, as in its metadata.
    """
    jaxlib = versions["jaxlib"]
    # Releases are compared because a plugin may have a post-release of its own (0.11.2.post1).
    problems = [
        f"{plugin} {versions[plugin]} does not go with jaxlib {jaxlib}."
        for plugin in PLUGINS
        if plugin in versions and Version(versions[plugin]).release != Version(jaxlib).release
    ]
    for name, lines in requirements.items():
        for requirement in map(Requirement, lines):
            found = versions.get(requirement.name)
            if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
                continue
            if found and not requirement.specifier.contains(found, prereleases=True):
                asked = f"{requirement.name} {requirement.specifier}"
                problems.append(f"{name} {versions[name]} needs {asked}, but {found} is installed.")
    return problems


def _has_nvidia_gpu() -> bool:
    """Whether the operating system shows an NVIDIA GPU, whatever JAX sees."""
    return Path("/dev/nvidia0").exists()


def report(devices: Sequence[jax.Device]) -> list[str]:
    """What there is and what is wrong with it, as lines to print.

    Args:
        devices: The devices that JAX sees.
    """
    versions = machine.installed_versions((*PACKAGES, *PLUGINS))
    lines = ["Versions"]
    lines += [f"  python {platform.python_version()} on {platform.platform()}"]
    lines += [f"  {name} {versions.get(name, 'is not installed')}" for name in PACKAGES]
    lines += [f"  {name} {versions[name]}" for name in PLUGINS if name in versions]

    lines += ["Environment"]
    lines += [f"  {name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    unset = [name for name in VARIABLES if name not in os.environ]
    lines += [f"  not set: {', '.join(unset)}"] if unset else []

    lines += ["Devices", f"  {machine.core_count()} CPU cores"]
    lines += [f"  {machine.describe_device(device)}" for device in devices]

    chosen, choices = api.explain_choice()
    lines += ["Implementations of native_hybrid_attention"]
    for name, available, reason in choices:
        verdict = "chosen" if name == chosen else "available" if available else "not available"
        lines += [f"  {name} ({verdict}): {reason}"]

    requirements = {name: importlib.metadata.requires(name) or () for name in versions}
    problems = version_problems(versions, requirements)
    if _has_nvidia_gpu() and not any(map(machine.is_gpu, devices)):
        problems.append(
            "This machine has an NVIDIA GPU, but JAX sees none: install the cuda13 extra, and "
            "look at JAX_PLATFORMS and CUDA_VISIBLE_DEVICES above."
        )
    lines += ["Problems", *(f"  {problem}" for problem in problems or ["none found"])]
    return lines


def main() -> None:
    """Prints the report.

    Raises:
        DoctorError: if JAX cannot start, or a GPU is required and there is none.
    """
    try:
        devices = jax.devices()
    except (AssertionError, RuntimeError) as error:  # a platform without a plugin is an assertion
        platforms = os.environ.get("JAX_PLATFORMS", "not set")
        reason = str(error) or "the platform is not installed."
        raise DoctorError(f"JAX cannot start (JAX_PLATFORMS is {platforms}): {reason}") from error
    print("\n".join(report(devices)))
    if _REQUIRE_GPU.value and not any(map(machine.is_gpu, devices)):
        kinds = ", ".join(sorted({device.platform for device in devices}))
        raise DoctorError(f"A GPU is required (--require_gpu), but JAX sees only: {kinds}.")


if __name__ == "__main__":
    command_line.run(main, user_errors=(DoctorError,))
