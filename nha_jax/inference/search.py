"""Which layers should have wider windows: a search over settings of one trained model.

A setting is one window a layer. Every setting costs something (`nha_jax.inference.cost`) and is
good for something (a loss, an accuracy); wanted is the best one within a budget.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from nha_jax.ops.windows import Window

Setting = tuple[Window, ...]


class Evaluated(NamedTuple):
    """A setting and what was found.

    Attributes:
        windows: one window a layer.
        cost: what it costs, in the unit of the budget.
        score: what it is worth, smaller is better; of equals the second number decides, and so on.
    """

    windows: Setting
    cost: float
    score: tuple[float, ...]


def search_windows(
    num_layers: int,
    choices: Sequence[Window],
    evaluate: Callable[[Setting], tuple[float, ...]],
    cost: Callable[[Setting], float],
    budget: float,
    *,
    beam: int = 1,
    max_exhaustive: int = 256,
) -> list[Evaluated]:
    """Evaluates settings within a budget.

    All of them where there are at most `max_exhaustive` in all. Otherwise by insertion: it begins
    with the cheapest choice in every layer; each round widens one layer of each setting kept in
    every possible way, evaluates what that gives, and keeps the `beam` best, until nothing can be
    widened within the budget. The order is the same whenever the scores are, so that a search whose
    scores are remembered goes on where it stopped.

    Args:
        num_layers: layers of the model.
        choices: windows that a layer may have.
        evaluate: the score of a setting, smaller is better; called once for each.
        cost: what a setting costs; a wider window must not cost less.
        budget: the largest cost allowed.
        beam: settings kept from round to round; 1 is greedy insertion.
        max_exhaustive: up to how many settings in all everything is tried.

    Returns:
        All settings evaluated, in the order in which they were.

    Raises:
        ValueError: an argument is not valid, or not even the cheapest setting is within the budget.
    """
    if not choices:
        raise ValueError("choices is empty, but must hold at least one window.")
    if beam < 1:
        raise ValueError(f"beam is {beam}, but must be 1 or more.")
    ordered = sorted(set(choices), key=_width)
    cheapest = (ordered[0],) * num_layers
    if cost(cheapest) > budget:
        raise ValueError(
            f"The budget {budget:g} is less than what the cheapest setting costs, "
            f"{cost(cheapest):g}: raise it or add a smaller window to the choices."
        )
    found: dict[Setting, Evaluated] = {}

    def visit(settings: Iterable[Setting]) -> list[Evaluated]:
        """Evaluates those within the budget; returns them, whether they are new or not."""
        visited = []
        for setting in settings:
            price = cost(setting)
            if price > budget:
                continue
            if setting not in found:
                found[setting] = Evaluated(setting, price, evaluate(setting))
            visited.append(found[setting])
        return visited

    if len(ordered) ** num_layers <= max_exhaustive:
        visit(itertools.product(ordered, repeat=num_layers))
        return list(found.values())
    kept = visit([cheapest])
    while kept:
        wider = dict.fromkeys(
            (*one.windows[:layer], window, *one.windows[layer + 1 :])
            for one in kept
            for layer in range(num_layers)
            for window in ordered[ordered.index(one.windows[layer]) + 1 :]
        )
        kept = sorted(visit(wider), key=lambda one: (one.score, one.cost))[:beam]
    return list(found.values())


def best(evaluated: Sequence[Evaluated]) -> Evaluated:
    """The best setting; of equals the cheapest."""
    return min(evaluated, key=lambda one: (one.score, one.cost))


def pareto_front(evaluated: Sequence[Evaluated]) -> list[Evaluated]:
    """Settings that no other beats at the same or less cost, cheapest first."""
    front: list[Evaluated] = []
    for one in sorted(evaluated, key=lambda one: (one.cost, one.score)):
        if not front or one.score < front[-1].score:
            front.append(one)
    return front


def _width(window: Window) -> float:
    return float("inf") if window is None else window
