"""What the benchmarks share: starting contenders, reading what they measured, and the log."""

import datetime
import importlib.metadata
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).resolve().parent
WARMUP_STEPS = 5  # not counted: the first steps allocate memory and choose kernels

_PACKAGES = ("torch", "deepspeed", "transformers", "trl", "accelerate", "datasets", "tokenizers")


class Log:
    """Prints lines and appends them to `benchmarks/logs/NAME.log`, which starts anew."""

    def __init__(self, name: str) -> None:
        self.file = HERE / "logs" / f"{name}.log"
        self.file.parent.mkdir(exist_ok=True)
        self.file.write_text("", encoding="utf-8")

    def __call__(self, line: str = "") -> None:
        print(line, flush=True)
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Write columns, the first flush left and the others flush right."""
        widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
        for row in [head, ["-" * width for width in widths], *rows]:
            cells = [row[0].ljust(widths[0])]
            cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            self("  ".join(cells))

    def goal(self, what: str, reached: float, goal: float, at_most: bool = False) -> None:
        """Write a ratio against its goal, and say so if it is missed."""
        met = reached <= goal if at_most else reached >= goal
        word = "reached" if met else "MISSED"
        self(f"{what}: goal {'at most ' if at_most else ''}{goal:g}, {word} {reached:.2f}")

    def machine(self) -> None:
        """Write versions, machine, date and commit."""
        versions = [f"python {platform.python_version()}"]
        for package in _PACKAGES:
            try:
                versions.append(f"{package} {importlib.metadata.version(package)}")
            except importlib.metadata.PackageNotFoundError:
                versions.append(f"{package} not installed")
        self(", ".join(versions))
        self(f"{_cpu()}, {len(os.sched_getaffinity(0))} cores, {platform.system()} {platform.release()}")
        self(f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, commit {_commit()}")


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    dirty = git("status", "--porcelain", "--", "train.py", "dstrain", "ds_configs", "recipes")
    return git("rev-parse", "--short", "HEAD") + ("+dirty" if dirty else "")


def launcher() -> list[str]:
    """Return the command of this Python's `deepspeed` launcher, with a port that is free."""
    beside = Path(sys.executable).with_name("deepspeed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [str(beside) if beside.exists() else "deepspeed", "--master_port", str(port)]


def start(command: Sequence[str], threads: int | None) -> float:
    """Run a contender to its end; raise with its last lines if it fails.

    threads: OMP_NUM_THREADS; None leaves it unset, as a user's shell has it. Returns how many cores other
    processes used meanwhile: a measurement with much of it is disturbed.
    """
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    env |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
    env["PATH"] = str(Path(sys.executable).parent) + os.pathsep + env["PATH"]
    # Both sides load the compiled DeepSpeed op that the repository built, so that nobody compiles in a run.
    env.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    env["HF_HUB_OFFLINE"] = "1"
    wait_for_quiet()
    started, others = time.perf_counter(), others_s()
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return max(0.0, others_s() - others) / (time.perf_counter() - started)


def wait_for_quiet(limit_s: float = 60.0, cores: float = 0.2) -> None:
    """Wait until other processes leave the machine alone for two seconds, but not for ever."""
    end = time.perf_counter() + limit_s
    while time.perf_counter() < end:
        before = others_s()
        time.sleep(2)
        if others_s() - before < 2 * cores:
            return


def others_s() -> float:
    """Return the core seconds since boot of all processes but this one's children."""
    machine, mine = psutil.cpu_times(), psutil.Process().cpu_times()
    busy = sum(machine) - machine.idle - machine.iowait - machine.guest - machine.guest_nice
    return busy - mine.children_user - mine.children_system


def read_metrics(output_dir: Path) -> tuple[list[float], list[int]]:
    """Return step times in seconds and valid tokens of our run, one each a step, without the warm-up."""
    lines = (output_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines][WARMUP_STEPS:]
    return [row["step_time_s"] for row in rows], [row["valid_tokens"] for row in rows]


def read_contender(file: Path) -> tuple[list[float], list[int]]:
    """Return the same of a contender that wrote `{"step_s": [...], "valid_tokens": [...]}`."""
    body: Mapping[str, list[Any]] = json.loads(file.read_text(encoding="utf-8"))
    return body["step_s"][WARMUP_STEPS:], body["valid_tokens"][WARMUP_STEPS:]


def quarter(values: Sequence[float]) -> float:
    """Return the value that a quarter of them are below: other load only ever adds time."""
    return statistics.quantiles(values, n=4)[0] if len(values) > 1 else values[0]
