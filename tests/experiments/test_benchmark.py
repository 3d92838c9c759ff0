"""The benchmark command: what it writes, and that it shows no speed where numbers are wrong."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from experiments.benchmarking import decode, operator, timing
from nha_jax.ops import api
from tests.experiments.tiny_checkpoint import QUICK_TO_COMPILE

ROOT = Path(__file__).parents[2]
CASE = operator.Case(
    batch=1,
    length=24,
    num_heads=2,
    num_kv_heads=1,
    key_width=8,
    value_width=4,
    num_slots=3,
    window=5,
    dtype="float32",
)


def _run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "experiments.benchmark", *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | QUICK_TO_COMPILE,
        capture_output=True,
        text=True,
        check=False,
    )


def test_operator_command_prints_and_writes_every_measurement(tmp_path: Path) -> None:
    run = _run(
        "op", "--lengths=8", "--heads=2", "--kv_heads=1", "--key_width=8", "--value_width=4",
        "--slots=3", "--window=5", "--rounds=2", f"--output={tmp_path / 'op.json'}",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    result = json.loads((tmp_path / "op.json").read_text())
    assert result["case"]["window"] == 5
    assert result["machine"]["versions"]["jax"] == jax.__version__
    measured = {(m["implementation"], m["length"]): m for m in result["measurements"]}
    assert measured.keys() == {("reference", 8), ("xla", 8)}
    for measurement in measured.values():
        assert set(measurement["seconds"]) == {"forward", "forward+backward"}
        assert min(measurement["seconds"].values()) > 0
        assert {f"grad {name}" for name in operator.INPUTS} < set(measurement["errors"])
        assert all(error < 1e-4 for error in measurement["errors"].values())
    assert "  T=8: xla is" in run.stdout


def test_ratios_of_lengths_and_implementations() -> None:
    seconds = {("a", 10): 3.0, ("a", 20): 8.0, ("b", 10): 1.0, ("b", 20): 2.0}
    measurements = [
        operator.Measurement(name, length, {}, {}, {"forward": 1.0, "forward+backward": both})
        for (name, length), both in seconds.items()
    ]
    assert operator.ratios(measurements) == [
        "Ratios of forward+backward",
        "  a: T=20 takes 2.67 times T=10",
        "  b: T=20 takes 2.00 times T=10",
        "  T=10: b is 3.00 times as fast as a",
        "  T=20: b is 4.00 times as fast as a",
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "benchmark takes a subject first (op, decode), but found none."),
        (["ops"], "benchmark takes a subject first (op, decode), but found 'ops'."),
        (["op", "--lengths=64,0"], "--lengths takes integers from 1, but found '0'."),
        (["op", "--heads=3", "--kv_heads=2"], "--heads must be a multiple of --kv_heads"),
        (["op", "--implementations=xla,flash"], "but found 'flash'."),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], sentence: str) -> None:
    run = _run(*arguments)
    assert run.returncode == 1
    assert sentence in run.stderr.splitlines()[-1]
    assert "Traceback" not in run.stderr


def _with_fault(fault: Any) -> Any:
    """The operator, with `fault` applied to the query of "xla" alone."""
    operation = api.native_hybrid_attention

    def faulty(query: jax.Array, *arguments: Any, **named: Any) -> Any:
        if named["implementation"] == "xla":
            query = fault(query)
        return operation(query, *arguments, **named)

    return faulty


@jax.custom_vjp
def _nan_gradient(x: jax.Array) -> jax.Array:
    return x


_nan_gradient.defvjp(lambda x: (x, None), lambda _, g: (g.at[0, 0, 0, 0].set(jnp.nan),))


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [
        (lambda query: query * 1.01, {"out", *(f"grad {name}" for name in operator.INPUTS)}),
        (_nan_gradient, {"grad query"}),
    ],
)
def test_no_speed_where_numbers_are_wrong(
    monkeypatch: pytest.MonkeyPatch, fault: Any, wrong: set[str]
) -> None:
    monkeypatch.setattr(api, "native_hybrid_attention", _with_fault(fault))
    (xla,) = operator.measure([CASE], ["xla"], rounds=1)
    assert xla.seconds is None
    assert wrong <= set(xla.wrong())
    lines = operator.table([xla])
    (row,) = (line for line in lines if line.startswith("xla"))
    assert "ms" not in row
    assert any(line.startswith("WRONG: xla at T=24: grad query is off") for line in lines)
    assert operator.ratios([xla]) == []


def test_bfloat16_inputs_are_judged_as_rounded() -> None:
    case = dataclasses.replace(CASE, dtype="bfloat16")
    (measured,) = operator.measure([case], ["xla"], rounds=1)
    assert not measured.wrong()
    assert measured.seconds is not None


def test_medians_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = [0.0], []

    def program(name: str, seconds: list[float]) -> Any:
        def run() -> None:
            order.append(name)
            clock[0] += seconds.pop(0)

        return run

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    programs = {"a": program("a", [99, 1, 5, 2]), "b": program("b", [99, 4, 4, 9])}
    assert timing.medians(programs, rounds=3) == {"a": 2, "b": 4}
    assert order == ["a", "b"] * 4


def test_decode_command_prints_and_writes_every_measurement(tmp_path: Path) -> None:
    run = _run(
        "decode", "--shape=small", "--settings=hybrid,full", "--batches=2", "--contexts=256",
        "--attention_batches=2", "--engine_prompts=2", "--engine_tokens=3", "--rounds=1",
        f"--output={tmp_path / 'decode.json'}",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    result = json.loads((tmp_path / "decode.json").read_text())
    hybrid, full = result["measurements"]
    assert (hybrid["setting"], full["setting"]) == ("hybrid", "full")
    assert hybrid["state_bytes"] < full["state_bytes"]
    assert hybrid["moved_bytes"] < full["moved_bytes"]
    assert min(hybrid["seconds"], full["seconds"], result["attention"][0]["seconds"]) > 0
    assert set(result["engine_tokens_per_second"]) == {"one by one", "engine"}
    assert "batch 2, context 256: hybrid has" in run.stdout


def test_decode_comparisons_and_what_does_not_fit() -> None:
    def one(setting: str, context: int, seconds: float | None) -> decode.Measurement:
        size = {"hybrid": 100, "full": 800, "windowed": 10}[setting]
        return decode.Measurement(setting, 16, context, size, 2000, seconds)

    measurements = [
        one("hybrid", 4, 1.0),
        one("hybrid", 8, 1.0),
        one("full", 4, 5.0),
        one("full", 8, None),
        one("windowed", 4, 1.0),
        one("windowed", 8, 1.25),
    ]
    compared, flat = decode.comparisons(measurements)
    assert "batch 16, context 4: hybrid has 5.00 times the tokens/s" in compared
    assert compared.endswith("1/8.0 of its state")
    assert "batch 16: windowed layers alone take 1.250 times as long" in flat
    # The floor is 2000 bytes at 1000 bytes a second.
    assert decode.line(measurements[2], 1000.0).split()[-3:] == ["2000.000", "ms", "40.0%"]
    assert "does not fit" in decode.line(measurements[3], 1000.0)
