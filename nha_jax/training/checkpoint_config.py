"""When a run saves checkpoints and which of them it keeps."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save and what to keep.

    A step is kept if it is among the last `keep_last` or the best `keep_best`; the others are
    deleted, but only after the step that replaces them is committed.

    Attributes:
        every_steps: optimizer steps from one save to the next.
        keep_last: how many of the latest steps to keep, at least 1.
        keep_best: how many of the best steps to keep besides, 0 for none.
        best_metric: the metric, of those given to `save`, that decides which are best; steps saved
            without it, or with NaN, are never among the best.
        best_mode: "min" or "max", which of its values is best.
        asynchronous: write in the background of training; False makes every save wait for its end.
    """

    every_steps: int = 1000
    keep_last: int = 3
    keep_best: int = 1
    best_metric: str = "validation/bits_per_byte"
    best_mode: str = "min"
    asynchronous: bool = True

    def __post_init__(self) -> None:
        for name, least in (("every_steps", 1), ("keep_last", 1), ("keep_best", 0)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"{name} must be an integer of at least {least}, found {getattr(self, name)}."
                )
        if self.best_mode not in ("min", "max"):
            raise ValueError(f"best_mode must be 'min' or 'max', found {self.best_mode!r}.")
