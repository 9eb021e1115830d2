"""Signals, request files, a launcher that dies, and SIGKILL at any moment: nothing is lost, no process is left."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import drill
import pytest
from running import (
    REPOSITORY,
    clean_environment,
    last_step,
    launch,
    launcher_command,
    losses,
    metrics,
    ranks_of,
    script,
    tiny_recipe,
    trains,
    wait_for,
)

from dstrain import checkpoint
from dstrain.control import PREEMPTED
from dstrain.failure import DIED

pytestmark = pytest.mark.slow
LONG = {"max_steps": 5000, "train_micro_batch_size_per_gpu": 1}


def start(recipe, launcher, ranks):
    """Start a long run, and return its process and the ranks' process ids once it trains."""
    process = subprocess.Popen(
        [*launcher_command(launcher, ranks), str(REPOSITORY / "train.py"), "--config", str(recipe)],
        env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(lambda: trains(recipe))
    return process, ranks_of(recipe)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The losses of a run on so many ranks that nobody disturbed; each number of ranks is run once."""

    @functools.cache
    def run(ranks):
        folder = tmp_path_factory.mktemp(f"straight-{ranks}")
        recipe = tiny_recipe(folder, train=LONG | {"max_steps": 400}, checkpoint={"export": False})
        done = launch("--config", recipe, launcher="torchrun", ranks=ranks)
        assert done.returncode == 0, done.stderr
        return losses(folder / "run")

    return run


@pytest.mark.parametrize(
    ("launcher", "ranks", "name", "to"),
    [
        ("python", 1, signal.SIGTERM, "rank"),
        ("torchrun", 2, signal.SIGUSR1, "rank"),
        ("deepspeed", 2, signal.SIGTERM, "launcher"),
        ("deepspeed", 2, signal.SIGKILL, "launcher"),
    ],
)
def test_a_signal_saves_and_ends_all_ranks(tmp_path, straight, launcher, ranks, name, to):
    """To one rank, or to the launcher, whose death alone makes the ranks save; the run then goes on as if never."""
    recipe = tiny_recipe(tmp_path, train=LONG, checkpoint={"export": False})
    process, pids = start(recipe, launcher, ranks)
    assert len(pids) == ranks
    os.kill(pids[-1] if to == "rank" else process.pid, name)
    wait_for(lambda: not ranks_of(recipe), 30)
    said, wrong = process.communicate(timeout=60)
    if launcher == "python":
        assert process.returncode == PREEMPTED
        assert wrong == ""
        assert "by a signal; saved, and the same command goes on" in said
    step, rows = last_step(recipe), metrics(tmp_path / "run")
    assert step == rows[-1]["step"]
    assert checkpoint.problem(tmp_path / "run" / "checkpoints" / f"step-{step}") is None
    again = launch("--config", recipe, f"train.max_steps={step + 2}", launcher="torchrun", ranks=ranks)
    assert again.returncode == 0, again.stderr
    found, expected = losses(tmp_path / "run"), straight(ranks)
    assert found[: len(expected)] == expected[: len(found)]
    assert step < len(expected), "the undisturbed run is too short to compare what came after"


def test_files_ask_for_a_save_and_a_stop(tmp_path):
    recipe = tiny_recipe(tmp_path, train=LONG, checkpoint={"export": False})
    process, _ = start(recipe, "python", 1)
    run = tmp_path / "run"
    (run / "SAVE").touch()
    wait_for(lambda: not (run / "SAVE").exists() and last_step(recipe))
    saved = last_step(recipe)
    wait_for(lambda: metrics(run)[-1]["step"] > saved + 2)  # it goes on
    (run / "STOP").touch()
    said, wrong = process.communicate(timeout=60)
    assert (process.returncode, wrong) == (0, "")
    assert "by the file STOP; saved" in said
    assert last_step(recipe) == metrics(run)[-1]["step"] > saved
    assert not (run / "STOP").exists()
    (row,) = [row for row in metrics(run) if row.get("checkpoint_stall_s")][:1]
    assert row["checkpoint_gib"] > 0
    last = json.loads((run / "logs" / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["by"]) == ("interrupted", "the file STOP")
    assert min(last[f"checkpoint_{name}"] for name in ("stall_s", "gib", "gib_per_s")) > 0
    assert "last save" in said


def test_a_second_signal_ends_at_once(tmp_path):
    """One that follows within two seconds is the same: launchers pass on what the ranks have got already."""
    code = (
        "import pathlib, time; from dstrain.control import Control\n"
        f"control = Control(pathlib.Path({str(tmp_path)!r}), True)\n"
        "print('ready', flush=True)\n"
        "while True:\n    time.sleep(0.01); print(control.poll()[0], flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGTERM)
    while process.stdout.readline() != "True\n":
        pass
    assert process.poll() is None
    time.sleep(2.2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == PREEMPTED


def test_short_drill(tmp_path):
    """SIGKILL at eight random moments in steps, saves, deletions and loads; see drill.py for the long form."""
    assert len(drill.drill(8, seed=1, folder=tmp_path, times=2)) >= 8


def test_the_launch_script_waits_for_the_save(tmp_path):
    recipe = tiny_recipe(tmp_path, train=LONG, checkpoint={"export": False})
    process = script("single_node.sh", recipe, NUM_GPUS="2")
    run = tmp_path / "run"
    wait_for(lambda: trains(recipe))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == PREEMPTED
    assert not ranks_of(recipe)
    assert last_step(recipe) == metrics(run)[-1]["step"]


@pytest.mark.parametrize(
    ("name", "dies", "status"),
    [
        ("torchrun.sh", "train.py", DIED),
        ("mpirun.sh", "train.py", DIED),
        ("torchrun.sh", "torchrun.py", PREEMPTED),
        ("single_node.sh", "deepspeed.launcher.launch", PREEMPTED),
    ],
)
def test_a_launch_script_ends_with_the_status_of_the_ranks(tmp_path, name, dies, status):
    """Whoever is killed, and whatever the launcher makes of it; ranks that lost their launcher are waited for."""
    if name == "mpirun.sh" and not shutil.which("mpirun"):
        pytest.skip("openmpi-bin not installed")
    recipe = tiny_recipe(tmp_path, train=LONG, checkpoint={"export": False})
    process = script(name, recipe, NUM_GPUS="2", NP="2")
    wait_for(lambda: trains(recipe))
    if dies == "train.py":
        victim = ranks_of(recipe)[-1]
    else:
        found = subprocess.run(
            ["pgrep", "-f", f"{dies} .*{recipe}"], capture_output=True, text=True
        ).stdout.split()
        victim = int(found[-1])
    os.kill(victim, signal.SIGKILL)
    _, wrong = process.communicate(timeout=90)
    assert process.returncode == status, wrong
    assert not ranks_of(recipe)
    if status == DIED:
        assert re.match(
            r"error: rank 1 on .*, step \d+: ended without a word: its process", wrong.splitlines()[-1]
        )
        assert wrong.splitlines()[-1].endswith("; its launcher saw SIGKILL")
        assert "Traceback" not in wrong
    else:
        assert "error" not in wrong
        assert last_step(recipe) == metrics(tmp_path / "run")[-1]["step"]


def test_the_launch_script_starts_a_run_again(tmp_path):
    recipe = tiny_recipe(
        tmp_path, train=LONG | {"max_steps": 300}, checkpoint={"export": False, "save_steps": 20}
    )
    process = script("single_node.sh", recipe, NUM_GPUS="2", RESTARTS="2")
    wait_for(lambda: last_step(recipe))
    os.kill(ranks_of(recipe)[-1], signal.SIGKILL)
    said, wrong = process.communicate(timeout=200)
    assert process.returncode == 0, wrong[-2000:]
    assert "starting it again (1 of 2)" in wrong
    assert "resumed from step" in said
    assert [row["step"] for row in metrics(tmp_path / "run")] == list(range(301))


def restarting(recipe, code, ranks):
    """Run train.py under torchrun with restarts, with `code` before it in every rank."""
    script = recipe.parent / "wrapped.py"
    script.write_text(
        f"import sys, os, signal\nsys.path.insert(0, {str(REPOSITORY)!r})\nimport train\n"
        f"from dstrain import distributed, watchdog\n{code}\n"
        "train.main(train.parse_args(), distributed.prepare())\nwatchdog.finish()\ndistributed.leave(0)\n"
    )
    command = [*launcher_command("torchrun", ranks), "--max-restarts", "3", "--monitor-interval", "0.2"]
    return subprocess.run(
        [*command, str(script), "--config", str(recipe)],
        env=clean_environment(), capture_output=True, text=True, timeout=400,
    )  # fmt: skip


def test_torchrun_restarts_a_job_whose_rank_died(tmp_path):
    recipe = tiny_recipe(tmp_path, train={"max_steps": 8}, checkpoint={"export": False, "save_steps": 2})
    code = (
        "steps, once = train.train_step, os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "def dies(engine, *rest):\n"
        "    if once and engine.global_steps == 5 and os.environ['RANK'] == '1':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return steps(engine, *rest)\n"
        "train.train_step = dies"
    )
    process = restarting(recipe, code, 2)
    assert process.returncode == 0, process.stderr[-3000:]
    assert "resumed from step 4" in process.stdout
    straight = tiny_recipe(tmp_path / "straight", train={"max_steps": 8}, checkpoint={"export": False})
    assert launch("--config", straight, launcher="torchrun", ranks=2).returncode == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "straight" / "run")


def test_a_job_that_fails_at_the_same_step_is_not_started_for_ever(tmp_path):
    recipe = tiny_recipe(tmp_path, train={"max_steps": 8}, checkpoint={"export": False, "save_steps": 2})
    code = (
        "steps = train.train_step\n"
        "def dies(engine, *rest):\n"
        "    if engine.global_steps == 5:\n        os._exit(9)\n"
        "    return steps(engine, *rest)\n"
        "train.train_step = dies"
    )
    process = restarting(recipe, code, 1)
    assert process.returncode != 0
    assert "the run failed 3 times in a row after step 5; it is not started again by itself" in process.stderr
    assert last_step(recipe) == 4
