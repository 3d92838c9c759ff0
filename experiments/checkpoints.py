"""The flags with which a command line names a trained model, and the model that they name."""

import dataclasses
from pathlib import Path
from typing import Any

from absl import flags

from experiments import command_line
from nha_jax.configuration import ConfigurationError, from_mapping
from nha_jax.data.config import DataConfig
from nha_jax.data.errors import DataError
from nha_jax.data.tokenizers import Tokenizer, load_tokenizer
from nha_jax.inference.params import cast_params
from nha_jax.models.config import NHAConfig
from nha_jax.models.language_model import NHALanguageModel
from nha_jax.ops.windows import parse_windows
from nha_jax.training.checkpoint import CheckpointError, load_params
from nha_jax.training.config import RunConfig

USER_ERRORS = (CheckpointError, DataError)
"""What `load` raises beside ConfigurationError, for `command_line.run`."""

_FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines --checkpoint, --step, --best and --windows."""
    flags.DEFINE_string("checkpoint", None, "A run's workdir, or the checkpoint folder in it.")
    flags.DEFINE_integer("step", None, "The step to read; the latest unless given.", lower_bound=0)
    flags.DEFINE_bool("best", False, "Read the best step instead of the latest.")
    flags.DEFINE_string(
        "windows",
        None,
        'Windows of the layers, such as "64,full@3,11", or a config file that says them; those '
        "that the model was trained with unless given.",
    )


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A trained model.

    Attributes:
        model: the model, with the windows that --windows asks for.
        params: its parameters, in the dtypes in which they are used.
        tokenizer: its tokenizer.
        run_config: configuration of its training run, plain.
        directory: the checkpoint folder.
        step: the step that was read.
    """

    model: NHALanguageModel
    params: Any
    tokenizer: Tokenizer
    run_config: dict[str, Any]
    directory: Path
    step: int

    @property
    def config(self) -> NHAConfig:
        """The model's configuration."""
        return self.model.config


def load() -> Loaded:
    """Reads the model that the flags name.

    Raises:
        ConfigurationError: --checkpoint is missing, the windows do not fit, or the checkpoint's
            configuration is not that of a model.
        CheckpointError: there is no sound checkpoint.
        DataError: the tokenizer cannot be made.
    """
    if not _FLAGS.checkpoint:
        raise ConfigurationError("--checkpoint is missing: give the workdir of a run.")
    if _FLAGS.best and _FLAGS.step is not None:
        raise ConfigurationError("--best and --step exclude each other: give one of them.")
    directory = Path(_FLAGS.checkpoint)
    if (directory / "checkpoints").is_dir():
        directory = directory / "checkpoints"
    params, run_config, step = load_params(directory, step=_FLAGS.step, best=_FLAGS.best)
    for section in ("model", "data"):
        if section not in run_config:
            raise ConfigurationError(
                f"The run config in {directory} has no section {section!r}: it is not a checkpoint "
                "of a language model that was trained on text."
            )
    config = NHAConfig.from_dict(run_config["model"])
    if _FLAGS.windows is not None:
        config = dataclasses.replace(config, windows=read_windows(_FLAGS.windows, config))
    data = from_mapping(DataConfig, run_config["data"], "data")
    tokenizer = load_tokenizer(
        data.tokenizer,
        bos_token=data.bos_token,
        eos_token=data.eos_token,
        pad_token=data.pad_token,
    )
    return Loaded(
        model=NHALanguageModel(config),
        params=cast_params(params, config),
        tokenizer=tokenizer,
        run_config=run_config,
        directory=directory,
        step=step,
    )


def read_windows(text: str, config: NHAConfig) -> tuple[int | None, ...]:
    """Windows from a specification, or from the `model.windows` of a config file (.py).

    Raises:
        ConfigurationError: it is neither, or does not fit the model.
    """
    spec: Any = text
    try:
        if text.endswith(".py"):
            spec = command_line.load_config(RunConfig, Path(text)).model.windows
        return parse_windows(spec, config.num_layers)
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(f"--windows: {error}") from error
