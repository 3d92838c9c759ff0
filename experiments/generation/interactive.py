"""Turns at the terminal: what was said stays in the state, and only what is new is read."""

import sys
from pathlib import Path
from typing import Any

from experiments.checkpoints import Loaded
from experiments.generation.speed import Speed
from nha_jax.inference.generate import generate
from nha_jax.inference.sampling import Sampling
from nha_jax.inference.state_file import load_state, save_state

CAPACITY = 4096
"""Tokens that layers of full attention have memory for, unless --capacity says."""

_HELP = (
    "Every line is continued; /reset forgets all, /save FILE and /load FILE keep and restore what "
    "was said, /quit or the end of the input ends."
)


def run(
    loaded: Loaded,
    sampling: Sampling,
    *,
    capacity: int,
    max_tokens: int,
    stop: tuple[str, ...],
    prefill_chunk: int,
) -> int:
    """Reads lines from standard input and continues them until the input ends.

    A turn that cannot be done (an empty line, a conversation longer than `capacity`, a file that is
    no state) is answered by a sentence on standard error, and changes nothing.

    Returns:
        The exit code.
    """
    print(_HELP, file=sys.stderr)
    state: Any = None
    while (line := _read_line()) is not None:
        command, _, argument = line.partition(" ")
        try:
            if command == "/quit":
                break
            if command == "/reset":
                state = None
            elif command == "/save":
                if state is None:
                    raise ValueError("Nothing was said yet, so there is nothing to save.")
                save_state(Path(argument), state)
            elif command == "/load":
                state = load_state(Path(argument), loaded.model)
            else:
                given: dict[str, Any] = {"state": state}
                if state is None:
                    given = {"capacity": capacity}
                state = _turn(
                    loaded,
                    line,
                    max_tokens=max_tokens,
                    sampling=sampling,
                    stop=stop,
                    prefill_chunk=prefill_chunk,
                    **given,
                )
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
    return 0


def _turn(loaded: Loaded, line: str, **options: Any) -> Any:
    """Continues a line as it comes; returns the state after it."""
    speed = Speed(untimed=2)

    def show(_: int, tokens: list[int], text: str) -> None:
        speed.count(len(tokens))
        print(text, end="", flush=True)

    _, state = generate(
        loaded.model,
        loaded.params,
        [line],
        tokenizer=loaded.tokenizer,
        on_tokens=show,
        return_state=True,
        **options,
    )
    print(flush=True)
    print(f"[{speed}; {int(state.length[0]):,} tokens in the state]", file=sys.stderr)
    return state


def _read_line() -> str | None:
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.removesuffix("\n") if line else None
