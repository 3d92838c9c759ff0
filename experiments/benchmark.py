"""Measures this machine.

    python -m experiments.benchmark op [--implementations=reference,xla] [--lengths=2048,4096] ...

`op` times forward and forward+backward of the attention operator, in each implementation and at
each length, beside the error against a float64 evaluation. Where an error is too large it prints
no speed and exits with code 1. `--output FILE` writes the same as JSON.

    python -m experiments.benchmark decode [--shape=llama3_8b] [--batches=1,16] ...

`decode` times steps of decoding of a whole model with random weights: with the windows of the
shape, with full attention in all layers, and with windows in all layers, beside the bytes of their
states and the floor (weights and state moved once at the rate of a copy); then the attention of one
windowed layer alone, and the engine against one prompt after the other.
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from absl import flags

from experiments import command_line, machine
from experiments.benchmarking import decode, operator
from nha_jax.configuration import ConfigurationError
from nha_jax.ops import api
from nha_jax.ops import windows as windows_spec

_FLAGS = flags.FLAGS


def _define_op_flags() -> None:
    flags.DEFINE_list("implementations", ["reference", "xla"], "Names, the first is compared with.")
    flags.DEFINE_list("lengths", ["2048", "4096"], "Lengths T in tokens.")
    flags.DEFINE_integer("batch", 1, "Sequences B.", lower_bound=1)
    flags.DEFINE_integer("heads", 4, "Query heads N.", lower_bound=1)
    flags.DEFINE_integer("kv_heads", 4, "Key/value heads K.", lower_bound=1)
    flags.DEFINE_integer("key_width", 64, "Width H of a query or key head.", lower_bound=1)
    flags.DEFINE_integer("value_width", 64, "Width V of a value head.", lower_bound=1)
    flags.DEFINE_integer("slots", 64, "Slots M.", lower_bound=0)
    flags.DEFINE_string("window", "64", "Window W in tokens, or full.")
    flags.DEFINE_enum("dtype", "float32", list(operator.TOLERANCES), "Dtype of the inputs.")
    flags.DEFINE_integer("rounds", 7, "Times each program is timed.", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Seed of the inputs.")
    flags.DEFINE_string("output", None, "JSON file to write.")


def _parse_integer(flag: str, text: str, minimum: int) -> int:
    if not text.strip().isdecimal() or int(text) < minimum:
        raise ConfigurationError(
            f"--{flag} takes integers from {minimum}, but found {text.strip()!r}."
        )
    return int(text)


def _describe_machine() -> dict[str, Any]:
    return {
        "device": machine.describe_device(jax.devices()[0]),
        "cores": machine.core_count(),
        "versions": machine.installed_versions(("jax", "jaxlib", "jax-triton", "triton", "numpy")),
    }


def _op() -> int:
    """Measures the operator; returns the exit code."""
    window = _FLAGS.window.strip()
    case = operator.Case(
        batch=_FLAGS.batch,
        length=0,
        num_heads=_FLAGS.heads,
        num_kv_heads=_FLAGS.kv_heads,
        key_width=_FLAGS.key_width,
        value_width=_FLAGS.value_width,
        num_slots=_FLAGS.slots,
        window=None if window == "full" else _parse_integer("window", window, 0),
        dtype=_FLAGS.dtype,
        seed=_FLAGS.seed,
    )
    if case.num_heads % case.num_kv_heads:
        raise ConfigurationError(
            f"--heads must be a multiple of --kv_heads, but found {case.num_heads} and "
            f"{case.num_kv_heads}."
        )
    lengths = sorted({_parse_integer("lengths", text, 1) for text in _FLAGS.lengths})
    cases = [dataclasses.replace(case, length=length) for length in lengths]
    implementations = list(dict.fromkeys(_FLAGS.implementations))
    for name in implementations:
        if name not in api.IMPLEMENTATIONS:
            raise ConfigurationError(
                f"--implementations takes {', '.join(api.IMPLEMENTATIONS)}, but found {name!r}."
            )
    if _FLAGS.output and not Path(_FLAGS.output).parent.is_dir():
        raise ConfigurationError(f"The folder of --output {_FLAGS.output} does not exist.")
    head = _describe_machine()
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    print(f"{head['device']}; {head['cores']} CPU cores; {versions}")
    print(f"{case}; medians of {_FLAGS.rounds}", flush=True)
    measurements = operator.measure(cases, implementations, rounds=_FLAGS.rounds)
    print("\n".join([*operator.table(measurements), *operator.ratios(measurements)]))
    if _FLAGS.output:
        shape = dataclasses.asdict(case)
        del shape["length"]
        result = {
            "machine": head,
            "case": shape,
            "rounds": _FLAGS.rounds,
            "measurements": [dataclasses.asdict(measured) for measured in measurements],
        }
        Path(_FLAGS.output).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 1 if any(measured.wrong() for measured in measurements) else 0


def _define_decode_flags() -> None:
    flags.DEFINE_enum("shape", None, list(decode.SHAPES), "Small on a CPU, llama3_8b on a GPU.")
    flags.DEFINE_integer(
        "layers",
        None,
        "Only the first layers of the shape: what is compiled quickly.",
        lower_bound=1,
    )
    flags.DEFINE_list("settings", ["hybrid", "full", "windowed"], "Windows to compare.")
    flags.DEFINE_list("batches", None, "Sequences; 1,4 with the small shape, else 1,16.")
    flags.DEFINE_list("contexts", None, "Tokens; 256,1024, or 4096,32768,131072.")
    flags.DEFINE_list("attention_batches", None, "For attention alone; 4, or 64,256.")
    flags.DEFINE_integer("engine_prompts", 16, "Prompts for the engine; 0 for none.", lower_bound=0)
    flags.DEFINE_integer("engine_tokens", 32, "Tokens for each.", lower_bound=1)
    flags.DEFINE_integer("rounds", 5, "Calls of 16 steps that are timed.", lower_bound=1)
    flags.DEFINE_string("implementation", None, "Of the operator; the best unless given.")
    flags.DEFINE_string("output", None, "JSON file to write.")


def _decode() -> int:
    """Measures decoding; returns the exit code."""
    on_gpu = machine.is_gpu(jax.devices()[0])
    shape = _FLAGS.shape or ("llama3_8b" if on_gpu else "small")
    small = shape == "small"
    config = decode.SHAPES[shape]
    layers = min(_FLAGS.layers or config.num_layers, config.num_layers)
    config = dataclasses.replace(
        config,
        num_layers=layers,
        windows=config.layer_windows[:layers],
        implementation=_FLAGS.implementation,
    )
    for name in _FLAGS.settings:
        if name not in decode.settings_of(config):
            raise ConfigurationError(
                f"--settings takes {', '.join(decode.settings_of(config))}, but found {name!r}."
            )
    sizes = {
        name: [_parse_integer(name, text, 1) for text in _FLAGS[name].value or default.split(",")]
        for name, default in (
            ("batches", "1,4" if small else "1,16"),
            ("contexts", "256,1024" if small else "4096,32768,131072"),
            ("attention_batches", "4" if small else "64,256"),
        )
    }
    if _FLAGS.output and not Path(_FLAGS.output).parent.is_dir():
        raise ConfigurationError(f"The folder of --output {_FLAGS.output} does not exist.")
    head = _describe_machine()
    bandwidth = decode.copy_bandwidth(2**30 if on_gpu else 2**27, rounds=_FLAGS.rounds)
    print(f"{head['device']}; {head['cores']} CPU cores; jax {head['versions']['jax']}")
    windows = windows_spec.format_windows(config.layer_windows)
    print(
        f"{shape}, {layers} layers, {config.dtype}, windows {windows}; a copy moves "
        f"{bandwidth / 1e9:,.1f} GB/s"
    )
    params = decode.random_params(config)
    print(decode.header(), flush=True)
    measurements = decode.measure(
        config,
        params,
        settings=_FLAGS.settings,
        batches=sizes["batches"],
        contexts=sizes["contexts"],
        rounds=_FLAGS.rounds,
        on_measured=lambda one: print(decode.line(one, bandwidth), flush=True),
    )
    print("\n".join(decode.comparisons(measurements)))
    attention = decode.measure_attention(config, sizes["attention_batches"], rounds=_FLAGS.rounds)
    for one in attention:
        rate = one.moved_bytes / one.seconds
        print(
            f"attention of a windowed layer, batch {one.batch}: {1e6 * one.seconds:,.1f} us a "
            f"step, {rate / 1e9:,.1f} GB/s, {rate / bandwidth:.1%} of the copy"
        )
    engine: dict[str, float] = {}
    if _FLAGS.engine_prompts:
        engine = decode.measure_engine(
            config,
            params,
            prompts=_FLAGS.engine_prompts,
            num_sequences=min(16, _FLAGS.engine_prompts),
            tokens=_FLAGS.engine_tokens,
        )
        rates = ", ".join(f"{name} {rate:,.0f} tokens/s" for name, rate in engine.items())
        print(f"{_FLAGS.engine_prompts} prompts, {_FLAGS.engine_tokens} tokens each: {rates}")
    if _FLAGS.output:
        result = {
            "machine": head,
            "shape": shape,
            "layers": layers,
            "windows": windows,
            "copy_bytes_per_second": bandwidth,
            "measurements": [dataclasses.asdict(one) for one in measurements],
            "attention": [dataclasses.asdict(one) for one in attention],
            "engine_tokens_per_second": engine,
        }
        Path(_FLAGS.output).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


# By name: what defines the flags, and what runs.
_SUBJECTS: dict[str, tuple[Callable[[], None], Callable[[], int]]] = {
    "op": (_define_op_flags, _op),
    "decode": (_define_decode_flags, _decode),
}


def main(argv: list[str]) -> None:
    """Runs the subject that the command line names first."""
    subject = argv[1] if len(argv) > 1 else None
    if subject not in _SUBJECTS:
        found = "found none" if subject is None else f"found {subject!r}"
        sys.exit(f"error: benchmark takes a subject first ({', '.join(_SUBJECTS)}), but {found}.")
    define_flags, run = _SUBJECTS[subject]
    define_flags()
    del argv[1]
    command_line.run(run, user_errors=(NotImplementedError,))


if __name__ == "__main__":
    main(sys.argv)
