"""A file of prompts through the engine: results as they finish, and on after a kill."""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from experiments.checkpoints import Loaded
from experiments.generation.speed import Speed
from nha_jax.configuration import ConfigurationError
from nha_jax.inference.engine import Engine
from nha_jax.inference.generate import Generation, encode_prompt
from nha_jax.inference.sampling import Sampling
from nha_jax.ops.windows import format_windows

_SECONDS_BETWEEN_LINES = 10.0  # of progress, where it is not rewritten in place


@dataclasses.dataclass(frozen=True)
class Options:
    """How the prompts are continued.

    Attributes:
        max_tokens: most tokens generated for a prompt.
        sampling: how tokens are chosen; line n has the seed `sampling.seed + n`.
        stop: strings that end a text.
        capacity: most tokens of prompt and text; None is what the longest prompt needs.
        prefill_chunk: tokens of a prompt that are read at once.
        num_sequences: texts that are generated at once.
        log_probabilities: whether results have them.
    """

    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    capacity: int | None
    prefill_chunk: int
    num_sequences: int
    log_probabilities: bool


def read_prompts(path: Path) -> list[str]:
    """Reads the field "prompt" of every line.

    Raises:
        ConfigurationError: the file cannot be read, or a line is no object with a prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--prompts: {path} cannot be read ({error}).") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            prompt = None
        if not isinstance(prompt, str) or not prompt:
            raise ConfigurationError(
                f'--prompts: line {number} of {path} is not a JSON object whose field "prompt" is '
                "text of at least one character."
            )
        prompts.append(prompt)
    if not prompts:
        raise ConfigurationError(f"--prompts: {path} has no line.")
    return prompts


def run(loaded: Loaded, prompts: Sequence[str], output: Path, options: Options) -> int:
    """Continues every prompt that has no result in the output file yet.

    A result is a line: "line" (of the prompt, from 0), "prompt", "text", "tokens" (their number),
    "finish_reason" and, where asked for, "log_probabilities". Lines are in the order in which they
    finished. Beside the file stands OUTPUT.settings.json, with what the results depend on.

    Returns:
        The exit code.

    Raises:
        ConfigurationError: the output belongs to other prompts or settings, or a prompt is longer
            than the capacity allows.
    """
    ids = [encode_prompt(prompt, loaded.tokenizer, begins=True) for prompt in prompts]
    longest = max(range(len(ids)), key=lambda line: len(ids[line]))
    max_prompt = len(ids[longest])
    if options.capacity is not None and max_prompt + options.max_tokens > options.capacity:
        raise ConfigurationError(
            f"The prompt in line {longest + 1} has {max_prompt} tokens, which with --max_tokens "
            f"{options.max_tokens} is more than --capacity {options.capacity}."
        )
    _check_settings(output, _settings(loaded, options))
    done = _read_results(output, prompts)
    left = [line for line in range(len(prompts)) if line not in done]
    if not left:
        print(f"All {len(prompts)} prompts have their results in {output}.", file=sys.stderr)
        return 0
    if done:
        print(f"{len(done)} of {len(prompts)} prompts are done; going on.", file=sys.stderr)
    engine = Engine(
        loaded.model,
        loaded.params,
        num_sequences=options.num_sequences,
        max_prompt=max_prompt,
        max_output=options.max_tokens,
        tokenizer=loaded.tokenizer,
        prefill_chunk=options.prefill_chunk,
    )
    progress = _Progress(len(prompts), len(done), sys.stderr)
    lines = {}
    for line in left:
        seed = (options.sampling.seed + line) % 2**32
        sampling = dataclasses.replace(options.sampling, seed=seed)
        number = engine.submit(
            ids[line], sampling=sampling, stop=options.stop, on_tokens=progress.tokens
        )
        lines[number] = line
    with output.open("a", encoding="utf-8") as file:
        for number, generation in engine.run():
            line = lines[number]
            file.write(json.dumps(_result(line, prompts[line], generation, options)) + "\n")
            # Out of the process at once: a kill loses nothing that was written.
            file.flush()
            progress.finished()
    progress.end()
    return 0


def _result(line: int, prompt: str, generation: Generation, options: Options) -> dict[str, Any]:
    result = {
        "line": line,
        "prompt": prompt,
        "text": generation.text,
        "tokens": len(generation.tokens),
        "finish_reason": generation.finish_reason,
    }
    if options.log_probabilities:
        result["log_probabilities"] = generation.log_probabilities
    return result


def _settings(loaded: Loaded, options: Options) -> dict[str, Any]:
    """What the results depend on."""
    return {
        "checkpoint": str(loaded.directory.absolute()),
        "step": loaded.step,
        "windows": format_windows(loaded.config.layer_windows),
        "max_tokens": options.max_tokens,
        "sampling": dataclasses.asdict(options.sampling),
        "stop": list(options.stop),
        "log_probabilities": options.log_probabilities,
    }


def _check_settings(output: Path, settings: dict[str, Any]) -> None:
    """Writes the settings beside the output, or refuses to go on with others."""
    path = output.with_name(output.name + ".settings.json")
    if not output.parent.is_dir():
        raise ConfigurationError(f"The folder of --output {output} does not exist.")
    if output.exists():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise ConfigurationError(
                f"--output {output} exists, but {path.name} does not stand beside it, so it is not "
                "known what it holds: give another file."
            ) from None
        changed = [name for name in settings if before.get(name) != settings[name]]
        if changed:
            raise ConfigurationError(
                f"--output {output} has results with other settings ({', '.join(changed)}): give "
                "another file, or the same settings to go on."
            )
        return
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def _read_results(output: Path, prompts: Sequence[str]) -> set[int]:
    """Lines that have a result; a last one that was not written to its end is cut off."""
    if not output.exists():
        return set()
    content = output.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    done = set()
    for row in whole.splitlines():
        result = json.loads(row)
        line = result["line"]
        if line >= len(prompts) or prompts[line] != result["prompt"]:
            raise ConfigurationError(
                f"--output {output} has results of other prompts: give another file."
            )
        done.add(line)
    if whole != content:
        os.truncate(output, len(whole))
    return done


class _Progress:
    """How many prompts are done, and how fast: one line, rewritten where there is a terminal."""

    def __init__(self, total: int, done: int, stream: TextIO) -> None:
        self._total = total
        self._done = done
        self._stream = stream
        self._in_place = stream.isatty()
        self._speed = Speed()
        self._since = 0.0

    def tokens(self, _: int, tokens: list[int], text: str) -> None:
        """Counts tokens of any prompt."""
        self._speed.count(len(tokens))

    def finished(self) -> None:
        """Counts a prompt that is done."""
        self._done += 1
        if self._in_place:
            self._stream.write(f"\r{self._line()}\x1b[K")
            self._stream.flush()
        elif self._speed.seconds() - self._since >= _SECONDS_BETWEEN_LINES:
            self._since = self._speed.seconds()
            self._stream.write(self._line() + "\n")
            self._stream.flush()

    def end(self) -> None:
        """Leaves the last line standing."""
        self._stream.write(("\r" if self._in_place else "") + self._line() + "\n")

    def _line(self) -> str:
        share = self._done / self._total
        bar = "#" * round(20 * share)
        return f"[{bar:<20}] {self._done}/{self._total} prompts, {self._speed}"
