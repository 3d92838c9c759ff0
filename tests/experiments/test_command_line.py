"""Config files and overrides, as far as they can be tested without a process of their own."""

import re
from pathlib import Path
from typing import Any

import pytest

from experiments.command_line import check_override_names, load_config
from nha_jax.configuration import ConfigurationError, from_mapping
from nha_jax.training.config import RunConfig

TINY = Path(__file__).with_name("tiny_run.py")


def test_a_config_file_is_completed_with_every_default() -> None:
    config = load_config(RunConfig, TINY)
    # Not in the file, and None: each can be overridden all the same.
    for path, value in {"optimizer.clip_norm": None, "evaluation.max_batches": 3}.items():
        section, field = path.split(".")
        config[section][field] = value
    run = from_mapping(RunConfig, config.to_dict())
    assert run.optimizer.clip_norm is None
    assert run.evaluation.max_batches == 3
    assert run.model.layer_windows == (4,)
    assert run.checkpoint.keep_last == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist"),
        ("def get_config(:", "SyntaxError in line 1"),
        (
            "import ml_collections\n\ndef get_config():\n    return undefined\n",
            "NameError in line 4: name 'undefined' is not defined",
        ),
        (
            "def get_config():\n    return {}\n",
            "must return an ml_collections.ConfigDict, found dict",
        ),
        ("CONFIG = 1\n", "AttributeError"),
    ],
)
def test_a_broken_config_file_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "config.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigurationError, match=re.escape(message)) as caught:
        load_config(RunConfig, path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"modle": {}}, "config.modle is not a field of RunConfig; did you mean config.model?"),
        ({"train": {"stps": 3}}, "config.train.stps is not a field of TrainConfig; did you mean"),
        ({"train": 3}, "config.train must be an ml_collections.ConfigDict, found 3"),
        ({}, "config.model.vocab_size is missing"),
    ],
)
def test_a_wrong_field_in_a_config_file_is_named(
    tmp_path: Path, content: dict[str, Any], message: str
) -> None:
    path = tmp_path / "config.py"
    path.write_text(
        "import ml_collections\n\n"
        f"def get_config():\n    return ml_collections.ConfigDict({content})\n"
    )
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        from_mapping(RunConfig, load_config(RunConfig, path).to_dict())


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "--config.modl.width=3",
            "config.modl is not a field of RunConfig; did you mean config.model?",
        ),
        ("-config.model.widht", "config.model.widht is not a field of NHAConfig; did you mean"),
        ("--noconfig.data.pakcing", "did you mean config.data.packing?"),
        ("--config.train.steps.x=3", "config.train.steps has no fields"),
        (
            "--config.model.rotary_scaling.factr=3",
            "did you mean config.model.rotary_scaling.factor?",
        ),
        ("--config..x=3", "config. is not a field of RunConfig"),
    ],
)
def test_a_wrong_override_is_named(argument: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        check_override_names(RunConfig, ["--workdir=config.a", "--config=config.b.py", argument])


def test_right_overrides_pass() -> None:
    check_override_names(
        RunConfig,
        [
            "--config=configs/demo_text.py",
            "--config.model.windows=64,full@3",
            "--config.model.rotary_scaling.factor=8",
            "--noconfig.data.packing",
            "--config.train.steps",
            "3",
        ],
    )
