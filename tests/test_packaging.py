"""The wheel, its metadata and the pins, checked against the folders they are made from."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

import nha_jax

ROOT = Path(__file__).parents[1]
TOP_LEVEL = ("nha_jax", "pallas")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The project's wheel, built from a copy so that the tree gets no build folders."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("nha_jax", "pallas", "experiments", "configs", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index",
         "--quiet", "--wheel-dir", str(target), str(source)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_wheel_installs_the_two_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == set(TOP_LEVEL)


def test_wheel_holds_every_module_and_is_typed(wheel: zipfile.ZipFile) -> None:
    sources = {
        str(path.relative_to(ROOT))
        for package in TOP_LEVEL
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"nha_jax/py.typed", "pallas/py.typed", "nha_jax/__init__.py"} <= sources
    assert sources == {name for name in wheel.namelist() if ".dist-info/" not in name}


def test_metadata(metadata: Message) -> None:
    assert metadata["Requires-Python"] == ">=3.12"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Version"] == nha_jax.__version__
    assert {"cuda13", "hf", "dev"} <= set(metadata.get_all("Provides-Extra", []))


def _base_requirements(metadata: Message, environment: dict[str, str]) -> set[str]:
    requirements = map(Requirement, metadata.get_all("Requires-Dist", []))
    return {
        requirement.name
        for requirement in requirements
        if not requirement.marker or requirement.marker.evaluate(environment | {"extra": ""})
    }


@pytest.mark.parametrize(
    ("system", "machine", "expected"),
    [("linux", "x86_64", True), ("linux", "aarch64", False), ("darwin", "arm64", False)],
)
def test_triton_is_asked_for_where_it_exists(
    metadata: Message, system: str, machine: str, expected: bool
) -> None:
    environment = {"sys_platform": system, "platform_machine": machine}
    assert ("jax-triton" in _base_requirements(metadata, environment)) == expected


def _pins() -> dict[NormalizedName, str]:
    """Version by canonical name, as in requirements.txt; a line that is not a pin fails."""
    pins: dict[NormalizedName, str] = {}
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        match = re.fullmatch(r"([\w.-]+)==([\w.]+)( ; .+)?", line)
        assert match, f"requirements.txt has a line that pins nothing: {line!r}"
        pins[canonicalize_name(match[1])] = match[2]
    return pins


def test_pins_satisfy_the_ranges(metadata: Message) -> None:
    pins = _pins()
    for requirement in map(Requirement, metadata.get_all("Requires-Dist", [])):
        pin = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin), f"{requirement} against the pin {pin}"


def test_pins_are_closed() -> None:
    """Whatever a pinned package needs is pinned too, so that an environment is reproduced."""
    pins, missing, checked = _pins(), set(), 0
    for name in pins:
        try:
            requires = importlib.metadata.requires(name) or ()
        except importlib.metadata.PackageNotFoundError:
            continue  # Triton's packages are not installed on every platform.
        checked += 1
        for requirement in map(Requirement, requires):
            needed = not requirement.marker or requirement.marker.evaluate({"extra": ""})
            if needed and canonicalize_name(requirement.name) not in pins:
                missing.add(f"{requirement.name} (for {name})")
    assert not missing
    assert checked > len(pins) // 2


def test_imports_without_extras_and_gpu_stack() -> None:
    """Every module of the library imports where Triton and the tokenizer extras are absent.

    Nothing that has to do with a GPU is imported before it is asked for.
    """
    program = """
import importlib, pkgutil, sys
for absent in ("triton", "jax_triton", "tokenizers", "tiktoken", "huggingface_hub"):
    sys.modules[absent] = None
import nha_jax
names = [module.name for module in pkgutil.walk_packages(nha_jax.__path__, "nha_jax.")]
for name in names:
    importlib.import_module(name)
assert len(names) > 20, names
assert not [name for name in sys.modules if name.split(".")[0] == "pallas"], "pallas was imported"
"""
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
