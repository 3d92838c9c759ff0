"""Writes the configuration reference of README.md from the dataclasses and their docstrings.

    python -m scripts.configuration_reference

tests/test_readme.py fails where README.md is not what this writes.
"""

import dataclasses
import inspect
import re
import typing
from pathlib import Path
from typing import Any

from nha_jax.ops.rotary import RotaryScaling
from nha_jax.training.config import RunConfig

README = Path(__file__).parents[1] / "README.md"
BEGIN = "<!-- configuration reference: written by scripts/configuration_reference.py -->\n"
END = "<!-- end of the configuration reference -->\n"


def describe_fields(cls: type) -> dict[str, str]:
    """What the "Attributes:" part of a class's docstring says about each field.

    Raises:
        ValueError: if a field is not described, or what is described is no field.
    """
    _, found, attributes = (inspect.getdoc(cls) or "").partition("\nAttributes:\n")
    if not found:
        raise ValueError(f"The docstring of {cls.__name__} has no part 'Attributes:'.")
    attributes = re.split(r"\n\S", attributes)[0]
    descriptions: dict[str, str] = {}
    # An entry starts at the first indent, its further lines are indented more.
    for entry in re.split(r"^ {4}(?=\S)", attributes, flags=re.MULTILINE)[1:]:
        names, _, text = " ".join(entry.split()).partition(": ")
        descriptions |= dict.fromkeys(names.split(", "), text)
    fields = {field.name for field in dataclasses.fields(cls)}
    if fields != descriptions.keys():
        wrong = ", ".join(sorted(fields ^ descriptions.keys()))
        raise ValueError(f"{cls.__name__} and the 'Attributes:' of its docstring differ: {wrong}.")
    return descriptions


def _default(field: dataclasses.Field) -> str:
    if field.default is dataclasses.MISSING:
        return "required"
    return f"`{field.default!r}`".replace("|", r"\|")


def table(cls: type, section: str) -> str:
    """A Markdown table of the fields of one section."""
    descriptions = describe_fields(cls)
    lines = ["| field | default | |", "| --- | --- | --- |"]
    for field in dataclasses.fields(cls):
        text = descriptions[field.name].replace("|", r"\|")
        text = text[0].upper() + text[1:]
        lines.append(f"| `{section}.{field.name}` | {_default(field)} | {text} |")
    return "\n".join(lines) + "\n"


def reference() -> str:
    """The whole reference, from its first marker to its last."""
    sections: dict[str, Any] = typing.get_type_hints(RunConfig)
    tables = [f"### `{name}`\n\n{table(cls, name)}" for name, cls in sections.items()]
    # The one field of a section that has fields of its own.
    nested = "model.rotary_scaling"
    tables.insert(1, f"### `{nested}`, where it is not None\n\n{table(RotaryScaling, nested)}")
    return "\n".join([BEGIN, *tables, END])


def write(text: str) -> str:
    """Puts the reference into the text of a README, in the place of the one that is there."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + reference() + after


if __name__ == "__main__":
    README.write_text(write(README.read_text(encoding="utf-8")), encoding="utf-8")
