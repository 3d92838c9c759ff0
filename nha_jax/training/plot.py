"""The loss curve of a run as a picture."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from nha_jax.training.metrics import read_metrics


def plot_loss(metrics_path: Path, image_path: Path, title: str) -> bool:
    """Draws training and validation bits per byte over steps into a PNG file.

    Args:
        metrics_path: a metrics.jsonl.
        image_path: the file to write.
        title: text above the plot.

    Returns:
        False if there was nothing to draw.
    """
    curves = {split: read_metrics(metrics_path, split) for split in ("train", "validation")}
    if not any(curves.values()):
        return False
    # A figure of its own, without pyplot: no display and no global state are needed.
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for split, lines in curves.items():
        steps = [line["step"] for line in lines]
        values = [
            float("nan") if line["bits_per_byte"] is None else line["bits_per_byte"]
            for line in lines
        ]
        if steps:
            style = (
                {"marker": "o", "linewidth": 2.0} if split == "validation" else {"linewidth": 1.0}
            )
            axes.plot(steps, values, label=split, **style)
    axes.set_xlabel("step")
    axes.set_ylabel("bits per byte")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(image_path)
    return True
