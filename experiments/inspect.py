"""Shows what the memories of a trained model do with a text.

    python -m experiments.inspect --checkpoint runs/demo --text FILE [--windows=8] [--output=DIR]

Prints a table of the layers: the share of attention that falls on slots, how long the slots keep
what was written to them (half-lives in tokens), and the bytes of a sequence's state beside those of
full attention. Writes `slot_share.png`, a heat map by layer, head and position, and the numbers as
`memories.json`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from experiments import checkpoints, command_line, held_out
from nha_jax.configuration import ConfigurationError
from nha_jax.inference.memories import look_at_memories, state_bytes
from nha_jax.inference.plots import plot_slot_share

_FLAGS = flags.FLAGS


def _define_flags() -> None:
    checkpoints.define_flags()
    flags.DEFINE_string("text", None, "A text file.")
    flags.DEFINE_integer("max_tokens", 2048, "Tokens of the text to look at.", lower_bound=1)
    flags.DEFINE_integer("context", 8192, "Tokens that states are compared at.", lower_bound=1)
    flags.DEFINE_string("output", ".", "Folder for the picture and the numbers.")


def _quantiles(values: np.ndarray) -> list[float]:
    return [float(value) for value in np.quantile(values, (0.1, 0.5, 0.9))]


def main() -> int:
    """Looks at the model on the text that the command line names."""
    if not _FLAGS.text:
        raise ConfigurationError("--text is missing: give a text file.")
    output = Path(_FLAGS.output)
    if not output.is_dir():
        raise ConfigurationError(f"The folder --output {output} does not exist.")
    loaded = checkpoints.load()
    tokens = held_out.read_tokens(loaded, Path(_FLAGS.text))[: _FLAGS.max_tokens]
    memories = look_at_memories(loaded.model, loaded.params, np.asarray(tokens))
    windows = ["full" if window is None else str(window) for window in loaded.config.layer_windows]
    sizes, full_sizes = state_bytes(loaded.model, _FLAGS.context)
    rows: list[dict[str, Any]] = []
    for layer, window in enumerate(windows):
        row: dict[str, Any] = {
            "layer": layer,
            "window": window,
            "slot_share": float(memories.slot_share[layer].mean()),
            "slot_share_by_head": memories.slot_share[layer].mean(axis=-1).tolist(),
            "state_bytes": sizes[layer],
            "state_bytes_full_attention": full_sizes[layer],
        }
        # Full attention never writes to slots, whatever its gates say.
        if window != "full" and memories.half_life[layer].size:
            row["half_life_quantiles"] = _quantiles(memories.half_life[layer])
        rows.append(row)
    print(f"{len(tokens)} tokens of {_FLAGS.text}; states at {_FLAGS.context:,} tokens")
    print(
        f"{'layer':>5} {'window':>7} {'slot share':>11} {'half-life 10% / 50% / 90% of slots':>36} "
        f"{'state':>13} {'full attention':>15}"
    )
    for row in rows:
        lives = row.get("half_life_quantiles")
        shown = "-" if lives is None else " / ".join(f"{life:,.1f}" for life in lives)
        print(
            f"{row['layer']:>5} {row['window']:>7} {row['slot_share']:>11.3f} {shown:>36} "
            f"{row['state_bytes']:>11,} B {row['state_bytes_full_attention']:>13,} B"
        )
    share = sum(sizes) / sum(full_sizes)
    print(
        f"all layers: {sum(sizes):,} B, {share:.1%} of the {sum(full_sizes):,} B of full attention"
    )
    plot_slot_share(output / "slot_share.png", memories.slot_share, windows)
    result = {
        "text": _FLAGS.text,
        "tokens": len(tokens),
        "context": _FLAGS.context,
        "layers": rows,
    }
    path = output / "memories.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"{output / 'slot_share.png'}, {path}")
    return 0


if __name__ == "__main__":
    _define_flags()
    command_line.run(main, user_errors=checkpoints.USER_ERRORS)
