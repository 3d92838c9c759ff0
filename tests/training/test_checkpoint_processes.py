"""Two processes that save and restore one checkpoint together."""

import socket
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_two_processes_agree(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    runs = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.training.checkpoint_two_processes"),
                *(str(process), str(port), str(tmp_path)),
            ],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    try:
        texts = [run.communicate(timeout=120)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [0, 0]
    # Gloo, which connects the processes, prints as well.
    outputs = [
        [line for line in text.splitlines() if not line.startswith("[Gloo]")] for text in texts
    ]
    halves = (sum(range(500)), sum(range(500, 1000)))
    failures = (
        ("the disk is full", "params/w: found float32[1000]"),
        ("process 0 did not commit it", "process 0 could not restore"),
    )
    for output, half, (not_saved, not_restored) in zip(outputs, halves, failures, strict=True):
        assert output[0] == "latest 3"
        # Step 3 lost the data position of process 1: both go back to step 2.
        assert output[1] == f"restored 2 {float(half)} True"
        assert "saving step 4 in" in output[2]
        assert "the last good step is 2" in output[2]
        assert not_saved in output[2]
        assert not_restored in output[3]
        assert output[4] == "finished 5"
