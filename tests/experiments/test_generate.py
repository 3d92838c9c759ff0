"""`python -m experiments.generate` as a user meets it: text, files of prompts, kills, mistakes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from experiments.checkpoints import read_windows
from experiments.generation.prompt_file import read_prompts
from experiments.generation.speed import Speed
from nha_jax.configuration import ConfigurationError
from nha_jax.data.tokenizers import BytesTokenizer
from nha_jax.inference.generate import generate
from nha_jax.models.language_model import NHALanguageModel
from nha_jax.training.checkpoint_format import METADATA_FILE
from tests.experiments.tiny_checkpoint import MODEL, QUICK_TO_COMPILE, save_checkpoint
from tests.inference.small import params_of

REPOSITORY = Path(__file__).parents[2]
PROMPTS = [f"{'ab' * (number % 9)}{number}" for number in range(40)]

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "run")


@pytest.fixture(scope="module")
def start(checkpoint: Path) -> Iterator[Start]:
    """Starts the program: start("--flag=value", ..., input=text)."""
    started = []

    def run(*flags: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "experiments.generate", f"--checkpoint={checkpoint}", *flags],
            cwd=REPOSITORY,
            env=os.environ | QUICK_TO_COMPILE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        with process:
            process.kill()


def _finish(process: subprocess.Popen[str], code: int = 0, given: str | None = None) -> list[str]:
    """[standard output, standard error] of a program that ends with an exit code."""
    output, errors = process.communicate(given, timeout=300)
    assert process.returncode == code, output + errors
    assert "Traceback" not in errors
    return [output, errors]


def _texts(prompts: list[str], tokens: int, **call: object) -> list[str]:
    model, tokenizer = NHALanguageModel(MODEL), BytesTokenizer()
    generations = generate(
        model, params_of(MODEL), prompts, max_tokens=tokens, tokenizer=tokenizer, **call
    )
    return [generation.text for generation in generations]


def test_a_prompt_is_continued_with_other_windows(start: Start) -> None:
    flags = ("--prompt=def f", "--max_tokens=20", "--temperature=0", "--windows=full,2@0")
    output, errors = _finish(start(*flags))
    (expected,) = _texts(["def f"], 20, windows=(2, None))
    assert output == "def f" + expected + "\n"
    assert "20 tokens" in errors


def test_turns_go_on_in_the_state_and_mistakes_change_nothing(start: Start, tmp_path: Path) -> None:
    flags = ("--interactive", "--max_tokens=6", "--temperature=0", "--capacity=60")
    saved = tmp_path / "state"
    lines = ["d", "/reset", "ab", "", "c" * 50, f"/save {saved}", "d"]
    lines += ["/reset", "ab", f"/load {saved}", "d"]
    output, errors = _finish(start(*flags), given="\n".join(lines) + "\n")
    alone, first, second, again, loaded = output.splitlines()
    assert (first, second) == (again, loaded)
    assert "error: a prompt is empty text" in errors
    assert "holds at most 60 (its capacity)" in errors
    assert second != alone


def _write(path: Path, prompts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


def _results(path: Path) -> dict[int, dict[str, object]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["line"]: line for line in lines}
    assert len(found) == len(lines), "a prompt has two results"
    return found


def test_a_file_goes_on_after_a_kill_as_if_there_had_been_none(
    start: Start, tmp_path: Path
) -> None:
    prompts, output = _write(tmp_path / "prompts.jsonl", PROMPTS), tmp_path / "out.jsonl"
    flags = [f"--prompts={prompts}", f"--output={output}", "--max_tokens=300", "--num_sequences=2"]
    flags += ["--top_k=20", "--seed=3"]
    process = start(*flags)
    while not output.exists() or output.read_bytes().count(b"\n") < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    whole = output.read_bytes()
    kept = _results(output) if whole.endswith(b"\n") else None
    assert whole.count(b"\n") < len(PROMPTS), "it was not killed in time"
    with output.open("ab") as file:
        file.write(b'{"line": 39, "prom')  # as if killed in the middle of a line
    _, errors = _finish(start(*flags))
    assert "prompts are done; going on." in errors
    assert f"{len(PROMPTS)}/{len(PROMPTS)} prompts" in errors
    found = _results(output)
    assert sorted(found) == list(range(len(PROMPTS)))
    assert kept is None or kept.items() <= found.items()
    undisturbed = tmp_path / "undisturbed.jsonl"
    flags[1] = f"--output={undisturbed}"
    _finish(start(*flags))
    assert _results(undisturbed) == found
    assert len({str(result["text"]) for result in found.values()}) == len(PROMPTS)
    # Once more: nothing is left to do. With other settings: refused.
    _, errors = _finish(start(*flags))
    assert "All 40 prompts have their results" in errors
    _, errors = _finish(start(*flags, "--seed=4"), 1)
    assert "results with other settings (sampling)" in errors


def test_ctrl_c_ends_without_a_traceback(start: Start) -> None:
    process = start("--interactive")
    assert process.stderr is not None
    assert process.stderr.readline().startswith("Every line is continued")
    process.send_signal(signal.SIGINT)
    _, errors = _finish(process, 130)
    assert errors == "\nStopped.\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "Give one of --prompt, --prompts and --interactive, but found none."),
        (["--prompt="], "--prompt is empty"),
        (["--prompt=a", "--top_p=2"], "top_p is 2.0, but must be a number above 0 and at most 1."),
        (["--prompt=aaaaaa", "--capacity=9"], "a layer of full attention holds at most 9"),
    ],
)
def test_mistakes_are_one_sentence(start: Start, flags: list[str], message: str) -> None:
    output, errors = _finish(start(*flags), 1)
    assert message in errors
    assert errors.count("\n") == 1
    assert output == ""


def test_a_checkpoint_without_its_config_is_named(start: Start, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "run") / "checkpoints" / "step_00000001"
    (folder / METADATA_FILE).unlink()
    _, errors = _finish(start(f"--checkpoint={tmp_path / 'run'}", "--prompt=a"), 1)
    assert errors.splitlines()[-1].startswith("error: no wanted step in")
    assert "is missing" in errors


def test_windows_come_from_a_specification_or_a_config_file(tmp_path: Path) -> None:
    path = tmp_path / "chosen.py"
    path.write_text(
        "import ml_collections\n\n\ndef get_config():\n    return ml_collections.ConfigDict("
        '{"model": {"windows": "8,full@0"}})\n'
    )
    assert read_windows(str(path), MODEL) == (None, 8)
    assert read_windows("3,full@1", MODEL) == (3, None)
    with pytest.raises(ConfigurationError, match=r"--windows: .*'2' is not a layer"):
        read_windows("3,full@2", MODEL)
    with pytest.raises(ConfigurationError, match=r"none\.py does not exist"):
        read_windows("none.py", MODEL)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("", "has no line"),
        ('{"prompt": "a"}\nnot json\n', "line 2 of"),
        ('{"text": "a"}\n', "line 1 of"),
        ('{"prompt": ""}\n', "line 1 of"),
    ],
)
def test_a_bad_prompt_file_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match=message):
        read_prompts(path)


def test_speed_leaves_out_what_was_compiled() -> None:
    clock = iter([100.0, 150.0, 151.0, 152.0])
    speed = Speed(untimed=2, clock=lambda: next(clock))
    for tokens in (1, 16, 16):
        speed.count(tokens)
    assert speed.per_second() == 16
    assert str(speed) == "33 tokens, 16.0 tokens/s"
    assert str(Speed()) == "0 tokens"
