"""Run train.py many times in few launches of the real launcher."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True)
class Job:
    """One call of train.py. folder: an existing one for its log and result. Output goes where it says."""

    folder: Path
    ranks: int
    arguments: tuple[str, ...]


def run_jobs(
    jobs: Sequence[Job], folder: Path, *, worker: Path = WORKER, seconds_each: float = 60.0
) -> list[str | None]:
    """Run jobs, those with equally many ranks in one launch, and return the error of each, or None.

    folder: an empty one. A launch that takes longer than two minutes and `seconds_each` a job is ended.
    """
    errors: list[str | None] = [None] * len(jobs)
    folder.mkdir(parents=True, exist_ok=True)
    for ranks in sorted({job.ranks for job in jobs}):
        numbers = [number for number, job in enumerate(jobs) if job.ranks == ranks]
        while numbers:
            orders = [{"folder": str(jobs[n].folder), "arguments": list(jobs[n].arguments)} for n in numbers]
            file = folder / f"jobs-{ranks}-{numbers[0]}.json"
            file.write_text(json.dumps(orders), encoding="utf-8")
            said = _start(file, ranks, worker, 120 + seconds_each * len(numbers))
            place = 0
            for place, number in enumerate(numbers):  # noqa: B007  those behind a failure get another launch
                errors[number] = _error(jobs[number].folder, said)
                if errors[number]:
                    break
            numbers = numbers[place + 1 :]
    return errors


def _error(home: Path, said: str) -> str | None:
    result = home / "result.json"
    if result.exists():
        return json.loads(result.read_text(encoding="utf-8"))["error"]
    logs = [log.read_text(encoding="utf-8") for log in sorted(home.glob("log-rank*"))]
    lines = [line for text in (*logs, said) for line in text.splitlines() if line.strip()]
    return f"ended without a result; last: {lines[-1].strip()[:300]}" if lines else "never started"


def _start(file: Path, ranks: int, worker: Path, timeout: float) -> str:
    """Launch the worker, and return what was printed outside of jobs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    scripts = Path(sys.executable).parent
    command = [
        str(scripts / "deepspeed"),
        *("--num_gpus", str(ranks), "--master_port", str(port), "--log_level", "error"),
        *(str(worker), str(file)),
    ]
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in foreign}
    environment["PATH"] = f"{scripts}{os.pathsep}{environment['PATH']}"
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return f"no end after {timeout:.0f} s"
    return said
