"""Generates text with a trained model.

    python -m experiments.generate --checkpoint runs/demo --prompt "def "
    python -m experiments.generate --checkpoint runs/demo --prompts FILE.jsonl --output OUT.jsonl
    python -m experiments.generate --checkpoint runs/demo --interactive

`--windows` runs the model with other windows than those it was trained with. With `--prompts` every
line of the file is a JSON object with the field "prompt"; results are written as they finish, and
the same command goes on where a killed one stopped. Text goes to standard output, progress and
speed to standard error.
"""

import sys
from pathlib import Path
from typing import TextIO

from absl import flags

from experiments import checkpoints, command_line
from experiments.generation import interactive, prompt_file
from experiments.generation.speed import Speed
from nha_jax.configuration import ConfigurationError
from nha_jax.inference.generate import generate
from nha_jax.inference.sampling import Sampling

_FLAGS = flags.FLAGS


def _define_flags() -> None:
    checkpoints.define_flags()
    flags.DEFINE_string("prompt", None, "Text to continue.")
    flags.DEFINE_string("prompts", None, "A .jsonl file with a prompt in each line.")
    flags.DEFINE_bool("interactive", False, "Read prompts from the terminal, turn by turn.")
    flags.DEFINE_string("output", None, "With --prompts: the .jsonl file for the results.")
    flags.DEFINE_integer("max_tokens", 200, "Most tokens to generate for a prompt.", lower_bound=1)
    flags.DEFINE_float("temperature", 0.8, "0 takes the likeliest token.")
    flags.DEFINE_integer("top_k", None, "Sample from this many of the likeliest tokens.")
    flags.DEFINE_float("top_p", 1.0, "Sample from the likeliest tokens up to this probability.")
    flags.DEFINE_float("min_p", 0.0, "Leave out what is less likely than this times the likeliest.")
    flags.DEFINE_float("repetition_penalty", 1.0, "Above 1 makes tokens that occurred less likely.")
    flags.DEFINE_integer("seed", 0, "Seed of the samples; line n of --prompts has seed + n.")
    flags.DEFINE_multi_string("stop", [], "A string that ends the text; may be given repeatedly.")
    flags.DEFINE_integer(
        "capacity",
        None,
        "Most tokens of prompt and text together, for which layers of full attention have memory; "
        "what the prompts need unless given (4096 with --interactive).",
        lower_bound=2,
    )
    flags.DEFINE_integer(
        "prefill_chunk", 512, "Tokens of a prompt that are read at once.", lower_bound=1
    )
    flags.DEFINE_integer("num_sequences", 16, "With --prompts: texts at once.", lower_bound=1)
    flags.DEFINE_bool("log_probabilities", False, "With --prompts: write them for each token.")


def _sampling() -> Sampling:
    try:
        return Sampling(
            temperature=_FLAGS.temperature,
            top_k=_FLAGS.top_k,
            top_p=_FLAGS.top_p,
            min_p=_FLAGS.min_p,
            repetition_penalty=_FLAGS.repetition_penalty,
            seed=_FLAGS.seed,
        )
    except ValueError as error:
        raise ConfigurationError(f"--{error}") from error


def main() -> int:
    """Generates what the command line asks for; returns 130 after Ctrl-C, as shells do."""
    try:
        return _generate()
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130


def _generate() -> int:
    modes = [name for name in ("prompt", "prompts", "interactive") if _FLAGS[name].present]
    if len(modes) != 1:
        found = " and ".join(f"--{name}" for name in modes) or "none"
        raise ConfigurationError(
            f"Give one of --prompt, --prompts and --interactive, but found {found}."
        )
    sampling = _sampling()
    if modes == ["prompt"]:
        return _one_prompt(sampling, sys.stdout)
    if modes == ["prompts"]:
        if not _FLAGS.output:
            raise ConfigurationError("--output is missing: give the .jsonl file for the results.")
        options = prompt_file.Options(
            max_tokens=_FLAGS.max_tokens,
            sampling=sampling,
            stop=tuple(_FLAGS.stop),
            capacity=_FLAGS.capacity,
            prefill_chunk=_FLAGS.prefill_chunk,
            num_sequences=_FLAGS.num_sequences,
            log_probabilities=_FLAGS.log_probabilities,
        )
        prompts = prompt_file.read_prompts(Path(_FLAGS.prompts))
        return prompt_file.run(checkpoints.load(), prompts, Path(_FLAGS.output), options)
    return interactive.run(
        checkpoints.load(),
        sampling,
        capacity=_FLAGS.capacity or interactive.CAPACITY,
        max_tokens=_FLAGS.max_tokens,
        stop=tuple(_FLAGS.stop),
        prefill_chunk=_FLAGS.prefill_chunk,
    )


def _one_prompt(sampling: Sampling, output: TextIO) -> int:
    """Writes the prompt and its continuation as it comes."""
    if not _FLAGS.prompt:
        raise ConfigurationError("--prompt is empty: give at least one character.")
    loaded = checkpoints.load()
    speed = Speed(untimed=2)

    def show(_: int, tokens: list[int], text: str) -> None:
        if not speed.tokens:
            output.write(_FLAGS.prompt)
        speed.count(len(tokens))
        output.write(text)
        output.flush()

    try:
        (generation,) = generate(
            loaded.model,
            loaded.params,
            [_FLAGS.prompt],
            max_tokens=_FLAGS.max_tokens,
            sampling=sampling,
            tokenizer=loaded.tokenizer,
            stop=tuple(_FLAGS.stop),
            capacity=_FLAGS.capacity,
            prefill_chunk=_FLAGS.prefill_chunk,
            on_tokens=show,
        )
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    output.write("\n")
    print(f"{speed} ({generation.finish_reason})", file=sys.stderr)
    return 0


if __name__ == "__main__":
    _define_flags()
    command_line.run(main, user_errors=checkpoints.USER_ERRORS)
