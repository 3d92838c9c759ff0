"""Pictures of what a model remembers and of what its windows cost, as PNG files."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def plot_pareto(
    path: Path,
    costs: Sequence[float],
    values: Sequence[float],
    front: Sequence[int],
    chosen: int,
    *,
    budget: float,
    cost_label: str,
    value_label: str,
) -> None:
    """Draws settings by what they cost and what they are worth.

    Args:
        path: the file to write.
        costs: of each setting.
        values: of each setting.
        front: places of those that no other beats, cheapest first.
        chosen: place of the one that was chosen.
        budget: the largest cost allowed.
        cost_label: name of the horizontal axis.
        value_label: name of the vertical axis.
    """
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.scatter(costs, values, s=14, alpha=0.5, label="evaluated")
    axes.plot(
        [costs[place] for place in front],
        [values[place] for place in front],
        color="tab:orange",
        marker="o",
        label="not beaten",
    )
    axes.scatter([costs[chosen]], [values[chosen]], marker="*", s=180, color="tab:red", zorder=3)
    axes.axvline(budget, color="gray", linestyle="--", linewidth=1, label="budget")
    axes.set_xlabel(cost_label)
    axes.set_ylabel(value_label)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def plot_slot_share(
    path: Path, slot_share: Float[np.ndarray, "L N T"], windows: Sequence[str]
) -> None:
    """Draws the share of the attention that falls on slots, one heat map a layer.

    Args:
        path: the file to write.
        slot_share: by layer, query head and position, from 0 to 1.
        windows: name of each layer's window.
    """
    layers, heads, length = slot_share.shape
    columns = 1 if layers <= 4 else 2 if layers <= 16 else 4
    rows = -(-layers // columns)
    figure = Figure(figsize=(6 * columns + 1, 1.5 * rows + 0.8), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    grid = np.atleast_2d(figure.subplots(rows, columns, sharex=True, squeeze=False))
    image = None
    for layer, axes in enumerate(grid.ravel()):
        if layer >= layers:
            axes.set_axis_off()
            continue
        image = axes.imshow(
            slot_share[layer],
            aspect="auto",
            interpolation="nearest",
            vmin=0,
            vmax=1,
            cmap="viridis",
            extent=(0, length, heads - 0.5, -0.5),
        )
        axes.set_title(f"layer {layer}, window {windows[layer]}", fontsize=8)
        axes.set_ylabel("head", fontsize=7)
        axes.set_yticks(range(0, heads, -(-heads // 8)))
        axes.tick_params(labelsize=7)
    for axes in grid[-1]:
        axes.set_xlabel("position", fontsize=7)
    assert image is not None
    figure.colorbar(image, ax=grid, label="slot share")
    figure.savefig(path)
