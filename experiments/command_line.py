"""What the command lines share: config flags, and errors of the user's side as one sentence.

A mistake in a flag, a config file, the data or a checkpoint ends the program with one sentence on
standard error and exit code 1. Any other exception is a fault of the program and keeps its
traceback.
"""

import dataclasses
import importlib.util
import re
import sys
import traceback
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_collections
from absl import app, flags, logging
from ml_collections import config_flags

from nha_jax.configuration import ConfigurationError, from_mapping, unknown_name_message
from nha_jax.training.distributed import exit_now

USER_ERROR_EXIT_CODE = 1

Config = typing.TypeVar("Config")


def define_config(cls: type) -> None:
    """Defines `--config FILE` and `--config.section.field=value` for a config dataclass.

    The file is Python with a function `get_config()` that returns an `ml_collections.ConfigDict`.
    Every field of the dataclass can be set on the command line, whether or not the file mentions
    it.

    Args:
        cls: a dataclass whose fields are the sections, dataclasses themselves.
    """
    config_flags.DEFINE_config_file("config", None, "The config file, configs/NAME.py.")
    flags.FLAGS["config"].parser = _ConfigParser(cls)


def read_config(cls: type[Config]) -> Config:
    """Returns the configuration that the command line gives.

    Raises:
        ConfigurationError: for a field that is unknown, missing or has no valid value.
    """
    config = flags.FLAGS.config
    if config is None:
        raise ConfigurationError("--config is missing: give a config file, configs/NAME.py.")
    return from_mapping(cls, config.to_dict(), "config")


def run(
    main: Callable[[], int | None],
    *,
    config: type | None = None,
    user_errors: Sequence[type[Exception]] = (),
) -> typing.NoReturn:
    """Parses the flags, runs `main` and exits with what it returns.

    Args:
        main: the program.
        config: the dataclass given to `define_config`, if any.
        user_errors: exceptions, beside `ConfigurationError`, whose message is meant for the user.
    """
    shown: tuple[type[Exception], ...] = (ConfigurationError, flags.Error, *user_errors)
    # app.run would raise the default to INFO, and Orbax tells a lot at that level.
    verbosity = logging.WARNING

    def parse(argv: list[str]) -> list[str]:
        nonlocal verbosity
        try:
            arguments = flags.FLAGS.read_flags_from_files(argv, force_gnu=False)
            if config is not None:
                check_override_names(config, arguments[1:])
            positional = _parse(argv, config)
        except shown as error:
            _fail(error)
        if not flags.FLAGS["verbosity"].using_default_value:
            verbosity = flags.FLAGS.verbosity
        return positional

    def guarded(arguments: list[str]) -> int | None:
        try:
            if len(arguments) > 1:
                raise ConfigurationError(
                    f"{arguments[1]!r} is not a flag: flags are written --name=value."
                )
            logging.set_verbosity(verbosity)
            return main()
        except shown as error:
            _fail(error)
        except Exception:
            # A fault of the program keeps its traceback; but the other processes of a run must
            # not wait for this one, nor this one for them.
            if jax.distributed.is_initialized():
                traceback.print_exc()
                exit_now(USER_ERROR_EXIT_CODE)
            raise

    app.run(guarded, flags_parser=parse)
    raise AssertionError("app.run exits")


def _fail(error: Exception) -> typing.NoReturn:
    sentence = " ".join(str(error).split())
    several = jax.distributed.is_initialized() and jax.process_count() > 1
    who = f"process {jax.process_index()}: " if several else ""
    print(f"error: {who}{sentence}", file=sys.stderr)
    exit_now(USER_ERROR_EXIT_CODE)
    sys.exit(USER_ERROR_EXIT_CODE)


def _parse(argv: list[str], config: type | None) -> list[str]:
    """Parses like absl, but for `--help` and for what ml_collections raises on a bad override."""
    if any(re.fullmatch(r"--?(help|helpshort|helpfull|h|\?)", argument) for argument in argv[1:]):
        _help(argv[0])
    try:
        return flags.FLAGS(argv)
    except flags.UnrecognizedFlagError as error:
        raise ConfigurationError(
            unknown_name_message("a flag", error.flagname, list(flags.FLAGS), "--")
        ) from None
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        # Overrides of known fields that cannot be applied, such as a text that does not parse.
        if config is not None:
            _check_no_field_of_none(config, argv[1:])
        raise ConfigurationError(f"an override of --config cannot be applied: {error}") from error


def _help(program: str) -> typing.NoReturn:
    """Prints what the program does and its flags."""
    print(sys.modules["__main__"].__doc__)
    if "config" in flags.FLAGS:
        # Defined here, so that absl does not count it among the program's own flags.
        flags.FLAGS.register_key_flag_for_module(program, flags.FLAGS["config"])
        print("Every field of the configuration is a flag too: --config.section.field=value.\n")
    print(flags.FLAGS.module_help(program))
    sys.exit(0)


def check_override_names(cls: type, arguments: Sequence[str]) -> None:
    """Checks the names in every `--config.a.b` of a command line.

    Args:
        cls: the dataclass given to `define_config`.
        arguments: the command line without the program's name.

    Raises:
        ConfigurationError: naming the first that is not a field, and the nearest one that is.
    """
    for names in _overrides(arguments):
        kind: Any = cls
        path = "config"
        for name in names:
            if kind is None:
                raise ConfigurationError(f"{path} has no fields, found --{path}.{name}.")
            fields = [field.name for field in dataclasses.fields(kind)]
            if name not in fields:
                what = f"a field of {kind.__name__}"
                raise ConfigurationError(unknown_name_message(what, name, fields, f"{path}."))
            path = f"{path}.{name}"
            kind = _dataclass_of(typing.get_type_hints(kind)[name])


def _overrides(arguments: Sequence[str]) -> list[list[str]]:
    """The names in every `--config.a.b`, split at the dots."""
    found = [re.match(r"--?(?:no)?config\.([^=\s]*)", argument) for argument in arguments]
    return [match[1].split(".") for match in found if match is not None]


def _check_no_field_of_none(cls: type, arguments: Sequence[str]) -> None:
    """Refuses an override within a section that may be None and that the config file leaves out."""
    for names in _overrides(arguments):
        kind: Any = cls
        for depth, name in enumerate(names[:-1], start=1):
            hint = typing.get_type_hints(kind)[name]
            kind = _dataclass_of(hint)
            if kind is not None and hint is not kind:
                path = ".".join(["config", *names[:depth]])
                fields = ", ".join(repr(field.name) for field in dataclasses.fields(kind))
                raise ConfigurationError(
                    f"{path} is None in the config file, so its fields cannot be set one by one: "
                    f'give all of it as --{path}="{{...}}", a dictionary of {fields}.'
                )


def _dataclass_of(hint: Any) -> type | None:
    """The dataclass in a type hint, alone or in a union with None."""
    options = typing.get_args(hint) or (hint,)
    return next((option for option in options if dataclasses.is_dataclass(option)), None)  # type: ignore[return-value]


class _ConfigParser(flags.ArgumentParser):
    """Makes the flag's value from the path of a config file."""

    def __init__(self, cls: type) -> None:
        self._cls = cls

    def parse(self, argument: str) -> ml_collections.ConfigDict:
        return load_config(self._cls, Path(argument))

    def flag_type(self) -> str:
        return "config file"


def load_config(cls: type, path: Path) -> ml_collections.ConfigDict:
    """Reads a config file, and completes it with the fields that it leaves at their defaults.

    Args:
        cls: the dataclass given to `define_config`.
        path: a Python file with a function `get_config()`.

    Raises:
        ConfigurationError: if the file does not exist, fails, or has a section or field that is
        unknown.
    """
    if not path.is_file():
        raise ConfigurationError(f"The config file {path} does not exist.")
    spec = importlib.util.spec_from_file_location("nha_config_file", path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"The config file {path} is not a Python file (.py).")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.get_config()
    except Exception as error:
        raise ConfigurationError(
            f"The config file {path} cannot be read: {type(error).__name__} in line "
            f"{_line(error, path)}: {error}."
        ) from error
    if not isinstance(config, ml_collections.ConfigDict):
        raise ConfigurationError(
            f"get_config() of {path} must return an ml_collections.ConfigDict, "
            f"found {type(config).__name__}."
        )
    return _complete(cls, config, "config")


def _line(error: Exception, path: Path) -> int | str:
    """The line of the config file in which an error arose."""
    if isinstance(error, SyntaxError):
        return error.lineno or "?"
    line: int | str = "?"
    frame = error.__traceback__
    while frame is not None:
        if Path(frame.tb_frame.f_code.co_filename) == path:
            line = frame.tb_lineno
        frame = frame.tb_next
    return line


def _complete(cls: type, config: Any, path: str) -> ml_collections.ConfigDict:
    """Returns a ConfigDict with every field of a dataclass, so that each can be overridden.

    Fields take any literal on the command line (`from_mapping` checks the type): ml_collections
    would refuse to change a field whose default is None or a list. Strings stay strings, so that
    `--config.x=1` need not be quoted.
    """
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name in config:
        if name not in fields:
            kind = f"a field of {cls.__name__}"
            raise ConfigurationError(unknown_name_message(kind, str(name), fields, f"{path}."))
    complete = ml_collections.ConfigDict()
    for name, field in fields.items():
        section = dataclasses.is_dataclass(hints[name])
        if section:
            given = config.get(name, ml_collections.ConfigDict())
            if not isinstance(given, ml_collections.ConfigDict):
                raise ConfigurationError(
                    f"{path}.{name} must be an ml_collections.ConfigDict, found {given!r}."
                )
            complete[name] = _complete(hints[name], given, f"{path}.{name}")
            continue
        if name in config:
            value = config[name]
            if isinstance(value, ml_collections.ConfigDict):
                value = value.to_dict()
        elif field.default is not dataclasses.MISSING:
            value = field.default
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        else:
            # Left out: `from_mapping` reports it, unless the command line sets it.
            continue
        keeps_strings = hints[name] is str and isinstance(value, str)
        complete[name] = ml_collections.FieldReference(
            value, field_type=str if keeps_strings else object
        )
    return complete
