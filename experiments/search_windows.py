"""Searches the windows of a trained model's layers: the best ones within a budget.

    python -m experiments.search_windows --checkpoint runs/demo --output runs/demo/search
    [--choices=16,64,full] [--metric=recall] [--budget=0.5] [--beam=2] ...

The budget is a share: of the bytes of keys, values and slots that decoding a token moves where all
layers have full attention, at a context of --context tokens. All settings are one compiled program.
`evaluated.jsonl` in the output folder gets every setting as it is evaluated, and the same command
goes on where it stopped; `pareto.png` shows them, and `chosen.py` is a config file with the windows
chosen, for `experiments.train --config` and `experiments.generate --windows`.
"""

import dataclasses
import json
import math
import pprint
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import checkpoints, command_line, held_out
from experiments.checkpoints import Loaded
from nha_jax.configuration import ConfigurationError
from nha_jax.inference.cost import decode_cost
from nha_jax.inference.plots import plot_pareto
from nha_jax.inference.recall import make_recall_step, make_recall_task
from nha_jax.inference.search import Evaluated, Setting, best, pareto_front, search_windows
from nha_jax.ops.windows import format_windows, parse_window_choices, windows_array
from nha_jax.training.evaluation import evaluate, make_evaluation_step
from nha_jax.training.sharding import MeshConfig, batch_sharding, make_mesh

_FLAGS = flags.FLAGS


def _define_flags() -> None:
    checkpoints.define_flags()
    flags.DEFINE_string("output", None, "Folder for the results; made if it does not exist.")
    flags.DEFINE_string("choices", None, "Windows to choose from; 16,64,full unless given.")
    flags.DEFINE_enum("metric", "ppl", ["ppl", "recall"], "What decides which setting is better.")
    flags.DEFINE_float("budget", 0.5, "Largest share of the bytes of full attention.")
    flags.DEFINE_integer("context", 8192, "Tokens of context that costs are for.", lower_bound=1)
    flags.DEFINE_integer("beam", 1, "Settings kept from round to round.", lower_bound=1)
    flags.DEFINE_integer(
        "max_exhaustive", 64, "Up to how many settings in all every one is tried.", lower_bound=1
    )
    flags.DEFINE_string(
        "text", None, "For ppl: a text file; the run's validation text unless given."
    )
    flags.DEFINE_integer("max_batches", 8, "For ppl: batches of the text.", lower_bound=1)
    flags.DEFINE_integer("recall_rows", 16, "For recall: rows of the task.", lower_bound=1)
    flags.DEFINE_integer("recall_pairs", 32, "For recall: pairs in a row.", lower_bound=1)


def main() -> int:
    """Searches, and writes what was found."""
    if not _FLAGS.output:
        raise ConfigurationError("--output is missing: give a folder for the results.")
    if _FLAGS.windows is not None:
        raise ConfigurationError("--windows cannot be given here: give --choices to search in.")
    if not 0 < _FLAGS.budget <= 1:
        raise ConfigurationError(f"--budget is {_FLAGS.budget}, but must be above 0 and at most 1.")
    try:
        choices = parse_window_choices(_FLAGS.choices or "16,64,full")
    except ValueError as error:
        raise ConfigurationError(f"--choices: {error}") from error
    loaded = checkpoints.load()
    layers = loaded.config.num_layers
    full = decode_cost(loaded.config, (None,) * layers, _FLAGS.context).state_bytes

    def share(setting: Setting) -> float:
        return decode_cost(loaded.config, setting, _FLAGS.context).state_bytes / full

    output = Path(_FLAGS.output)
    log = _Log(output, _settings(loaded), loaded, share)
    measure = _recall_metrics(loaded) if _FLAGS.metric == "recall" else _ppl_metrics(loaded)
    try:
        evaluated = search_windows(
            layers,
            choices,
            lambda setting: log.score(setting, measure),
            share,
            _FLAGS.budget,
            beam=_FLAGS.beam,
            max_exhaustive=_FLAGS.max_exhaustive,
        )
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    _report(loaded, log, evaluated, output)
    return 0


def _settings(loaded: Loaded) -> dict[str, Any]:
    """What scores depend on; a search goes on only with the same."""
    names = ("metric", "context", "text", "max_batches", "recall_rows", "recall_pairs")
    return {
        "checkpoint": str(loaded.directory.absolute()),
        "step": loaded.step,
        **{name: _FLAGS[name].value for name in names},
    }


def _ppl_metrics(loaded: Loaded) -> Any:
    """A function from a setting to its loss on held-out text."""
    length = loaded.run_config["data"]["sequence_length"]
    if _FLAGS.text is not None:
        rows = loaded.run_config["data"]["batch_size"]
        batches = held_out.text_batches(
            loaded, Path(_FLAGS.text), length=length, rows=rows, max_batches=_FLAGS.max_batches
        )
    else:
        batches = held_out.validation_batches(loaded, _FLAGS.max_batches)
    lengths = np.zeros(loaded.config.vocab_size, np.int32)
    byte_lengths = loaded.tokenizer.token_byte_lengths()
    lengths[: len(byte_lengths)] = byte_lengths
    step = jax.jit(make_evaluation_step(loaded.model, jnp.asarray(lengths)))
    sharding = batch_sharding(make_mesh(MeshConfig(), jax.devices()[:1]))

    def measure(setting: Setting) -> dict[str, float]:
        windows = windows_array(setting)
        results = evaluate(
            lambda params, batch: step(params, batch, windows), loaded.params, batches, sharding
        )
        if results is None:
            raise ConfigurationError("The held-out text has no token to be judged on.")
        loss = results["loss"]
        return {"ppl": math.exp(min(loss, 700.0)), "bits_per_byte": results["bits_per_byte"]}

    return measure


def _recall_metrics(loaded: Loaded) -> Any:
    """A function from a setting to how well the model says values whose keys it saw."""
    ids = np.flatnonzero(loaded.tokenizer.token_byte_lengths() > 0)
    try:
        task = make_recall_task(
            ids, loaded.tokenizer.bos_id, rows=_FLAGS.recall_rows, pairs=_FLAGS.recall_pairs
        )
    except ValueError as error:
        raise ConfigurationError(f"--recall_{error}") from error
    step = jax.jit(make_recall_step(loaded.model))

    def measure(setting: Setting) -> dict[str, float]:
        metrics = step(loaded.params, task, windows_array(setting))
        return {name: float(value) for name, value in metrics.items()}

    return measure


class _Log:
    """Settings that were evaluated, on disk as soon as they are."""

    def __init__(self, folder: Path, settings: dict[str, Any], loaded: Loaded, share: Any) -> None:
        self._path = folder / "evaluated.jsonl"
        self._loaded = loaded
        self._share = share
        self.metrics: dict[str, dict[str, float]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "settings.json"
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            changed = [name for name in settings if before.get(name) != settings[name]]
            if changed:
                raise ConfigurationError(
                    f"--output {folder} has a search with other settings ({', '.join(changed)}): "
                    "give another folder, or the same settings to go on."
                )
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        if self._path.exists():
            content = self._path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]  # a kill may have cut the last line
            self._path.write_bytes(whole)
            for line in whole.splitlines():
                entry = json.loads(line)
                self.metrics[entry["windows"]] = entry["metrics"]

    def score(self, setting: Setting, measure: Any) -> tuple[float, ...]:
        """The score of a setting, measured or remembered; smaller is better."""
        name = format_windows(setting)
        if name not in self.metrics:
            self.metrics[name] = measure(setting)
            cost = decode_cost(self._loaded.config, setting, _FLAGS.context)
            entry = {
                "windows": name,
                "metrics": self.metrics[name],
                "share_of_full_attention": self._share(setting),
                "cost": dataclasses.asdict(cost),
            }
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
            print(
                f"{len(self.metrics):>5}  {_shown(self.metrics[name])}  "
                f"{self._share(setting):6.1%} of the bytes  {name}",
                file=sys.stderr,
                flush=True,
            )
        metrics = self.metrics[name]
        if "ppl" in metrics:
            return (_or_worst(metrics["ppl"]),)
        return (-metrics["accuracy"], _or_worst(metrics["nats"]))


def _or_worst(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _shown(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def _report(loaded: Loaded, log: _Log, evaluated: list[Evaluated], output: Path) -> None:
    """Writes the picture and the config file, and prints the settings that are not beaten."""
    chosen, front = best(evaluated), pareto_front(evaluated)
    name = "accuracy" if _FLAGS.metric == "recall" else "ppl"
    plot_pareto(
        output / "pareto.png",
        [one.cost for one in evaluated],
        [log.metrics[format_windows(one.windows)][name] for one in evaluated],
        [evaluated.index(one) for one in front],
        evaluated.index(chosen),
        budget=_FLAGS.budget,
        cost_label=f"share of full attention's bytes a token, at {_FLAGS.context:,} tokens",
        value_label="recall accuracy" if _FLAGS.metric == "recall" else "perplexity",
    )
    windows = format_windows(chosen.windows)
    run_config = loaded.run_config | {"model": loaded.run_config["model"] | {"windows": windows}}
    (output / "chosen.py").write_text(_config_file(run_config, loaded), encoding="utf-8")
    print(f"{len(evaluated)} settings within the budget; not beaten at their cost:")
    for one in front:
        cost = decode_cost(loaded.config, one.windows, _FLAGS.context)
        mark = "*" if one is chosen else " "
        print(
            f"{mark} {one.cost:6.1%} of the bytes  {cost.state_bytes:>14,} B  {cost.flops:>14,} "
            f"FLOPs a token  {_shown(log.metrics[format_windows(one.windows)])}  "
            f"{format_windows(one.windows)}"
        )
    print(f"chosen: {windows}, in {output / 'chosen.py'}; picture: {output / 'pareto.png'}")


def _config_file(run_config: dict[str, Any], loaded: Loaded) -> str:
    text = pprint.pformat(run_config, sort_dicts=False, width=96)
    return (
        f'"""Windows that experiments.search_windows chose for step {loaded.step} of a run."""\n\n'
        "import ml_collections\n\n\n"
        "def get_config() -> ml_collections.ConfigDict:\n"
        f"    return ml_collections.ConfigDict(\n{_indented(text)}\n    )\n"
    )


def _indented(text: str) -> str:
    return "\n".join("        " + line for line in text.splitlines())


if __name__ == "__main__":
    _define_flags()
    command_line.run(main, user_errors=checkpoints.USER_ERRORS)
