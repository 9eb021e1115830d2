"""Every command of docs/troubleshooting.md, run on a small real run."""

import gc
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from running import REPOSITORY
from typer.testing import CliRunner

import train
from dstrain import __main__ as commands
from dstrain import distributed, watchdog
from dstrain.parity.jobs import Job, run_jobs

pytestmark = pytest.mark.slow
WORKER = REPOSITORY / "tests" / "fault_worker.py"
DOCUMENT = REPOSITORY / "docs" / "troubleshooting.md"
SMALL = [
    "model.config.num_hidden_layers=1",
    "model.config.hidden_size=64",
    "train.train_micro_batch_size_per_gpu=2",
]


def documented() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    return list(dict.fromkeys(line for block in blocks for line in block.splitlines() if line))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A working directory that looks like the repository, with a smaller quickstart and two runs of it."""
    folder = tmp_path_factory.mktemp("place")
    for path in REPOSITORY.iterdir():
        if path.name not in ("runs", "recipes", ".git"):
            (folder / path.name).symlink_to(path)
    recipe = folder / "recipes" / "quickstart" / "recipe.yaml"
    shutil.copytree(REPOSITORY / "recipes" / "quickstart", recipe.parent)
    body = yaml.safe_load(recipe.read_text())
    body["model"]["config"] |= {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}
    body["data"] |= {"train": "data/factbook_docs_eval.jsonl", "eval": "data/few.jsonl", "max_seq_length": 64}
    lines = (recipe.parent / "data" / "factbook_docs_eval.jsonl").read_text().splitlines()
    few = [json.dumps({"text": json.loads(line)["text"][:200]}) for line in lines]
    (recipe.parent / "data" / "few.jsonl").write_text("\n".join(few))
    recipe.write_text(yaml.safe_dump(body))
    jobs = []
    for name in ("quickstart", "reference"):
        (folder / "jobs" / name).mkdir(parents=True)
        more = (f"output_dir={folder / 'runs' / name}", "train.max_steps=4", "checkpoint.export=false")
        arguments = ("none", "--config", str(recipe.parent), "logging.logging_steps=1", *more)
        jobs.append(Job(folder / "jobs" / name, 1, arguments))
    assert run_jobs(jobs, folder / "jobs" / "launches", worker=WORKER) == [None, None]
    return folder


def test_every_section_has_commands():
    sections = DOCUMENT.read_text().split("\n## ")[1:]
    assert [section.splitlines()[0] for section in sections] == [
        "Out of memory", "No convergence", "Slow steps and slow synchronisation", "Hangs and ranks that die",
        "Precision loss", "Launch failures",
    ]  # fmt: skip
    assert all("```bash" in section for section in sections)


@pytest.mark.parametrize("line", documented())
def test_a_documented_command_runs(place, monkeypatch, capsys, line):
    monkeypatch.chdir(place)
    words = shlex.split(line)
    if words[:2] == ["python", "train.py"]:
        output = in_process(monkeypatch, capsys, words[2:])
        assert "[[" in output and "--- document 1:" in output
    elif words[:3] == ["python", "-m", "dstrain"]:
        quick = ["--skip", "ranks"] if words[3] == "doctor" else []  # test_doctor_runs.py starts its ranks
        result = CliRunner().invoke(commands.app, words[3:] + quick)
        may_find_faults = words[3] == "doctor"  # with this machine
        assert result.exit_code in ((0, 1) if may_find_faults else (0,)), result.output
        assert result.output or words[3] == "last-failure"
        if words[3] == "diagnose" and "--against" in words:
            assert "no different from the reference" in result.output
    else:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        process = subprocess.run(
            words, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=300
        )
        assert process.returncode == 0, process.stderr
    if words[0] == "tail" and words[-1].endswith("metrics.jsonl"):
        row = json.loads(process.stdout)
        assert {"step_time_s", "data_wait_s", "busy_s", "collective_s"} <= set(row)


def in_process(monkeypatch, capsys, words) -> str:
    """Run train.py's main without another start of Python."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "1")):
        monkeypatch.setenv(name, value)
    gc.collect()
    try:
        train.main(train.parse_args(words), distributed.World(0, 1, 0, 1))
    finally:
        watchdog.stop()
    return capsys.readouterr().out


def test_limits_are_those_of_the_code():
    from dstrain.recipe import Train
    from dstrain.watchdog import guard

    text = DOCUMENT.read_text()
    assert Train().init_timeout_seconds == 30 * 60 and "(30 minutes)" in text
    assert (guard.FLOOR_S, guard.TIMES) == (
        120,
        10,
    ) and "ten times the longest so far, at least 2 minutes" in text
    assert (guard.SILENT_S, guard.SILENT_LOST_S) == (60, 6) and "a minute; 6 seconds" in text


def test_thresholds_are_those_of_the_code():
    from dstrain.diagnose import against, speed

    text = DOCUMENT.read_text()
    assert (speed.DATA_SHARE, speed.SLOWER, speed.SLOWER_BESIDE) == (0.15, 1.25, 1.5)
    assert (speed.COLLECTIVE_SHARE, speed.STALL_SHARE) == (0.3, 0.1)
    for words in (
        "15 % of a step",
        "1.25 times as long (1.5 for CPU ranks of one host)",
        "30 % of a step",
        "10 % of the time",
    ):
        assert words in text
    assert pytest.approx(0.35) == speed.UTILIZATION * speed.GOOD_MFU and "MFU below 35 %" in text
    assert against.TOLERANCES["fp32"] == 1e-5 and against.TOLERANCES["bf16"] == 2e-3 and against.DROP == 0.005
