"""A rank that sleeps, dies, raises, runs out of memory or skips a collective: one screen, and no process hangs."""

import io
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from running import REPOSITORY, launch, metrics, tiny_recipe

from dstrain import control, distributed, failure, logs
from dstrain.diagnose import diagnose
from dstrain.failure import DIED, HUNG, Failure
from dstrain.observe.meter import peak_tflops
from dstrain.observe.metrics import RowsFile
from dstrain.watchdog import guard, look

STEP = 6
QUICK = {"max_steps": 50, "train_timeout_seconds": 6.0, "init_timeout_seconds": 60.0}


def run(folder, kind, ranks=2, env=None, **train):
    """Train with a fault, and return the process, its failure, and how long after the fault it ended."""
    recipe = tiny_recipe(folder, train=QUICK | train)
    fault = {"FAULT": json.dumps({"kind": kind, "rank": ranks - 1, "step": STEP})}
    process = launch(
        "--config", recipe, launcher="deepspeed" if ranks > 1 else "python", ranks=ranks,
        script=REPOSITORY / "tests" / "faults.py", env=fault | (env or {}), timeout=200,
    )  # fmt: skip
    return process, failure.read(folder / "run")


def own_lines(process):
    """What a user sees on the screen without the launcher's line about its command."""
    return [
        line for line in process.stderr.splitlines() if "[launch.py" not in line and "accelerator" not in line
    ]


def diagnosed(folder):
    """What diagnose puts first."""
    return diagnose(folder / "run")["findings"][0]


def rank_log(folder, rank):
    return (folder / "run" / "logs" / f"rank-{rank}.log").read_text()


def gone(recipe_folder):
    """Whether no process of a run is left."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(recipe_folder).encode() in file.read_bytes() and b"faults.py" in file.read_bytes():
                return False
        except OSError:
            continue
    return True


@pytest.mark.slow
def test_a_rank_that_raises(tmp_path):
    """Its own traceback and one line are all that is on the screen; the log of the other says why it ended."""
    process, failed = run(tmp_path, "raise", ranks=3)
    assert process.returncode == 1
    lines = own_lines(process)
    assert lines[-1].startswith("error: rank 2 on ")
    assert f"step {STEP}: ValueError: the fault that was planted" in lines[-1]
    assert process.stderr.count("Traceback") == 1
    assert len(lines) < 25
    assert (failed.kind, failed.rank, failed.step, failed.status) == ("error", 2, STEP, 1)
    assert "Traceback" in failed.traceback
    assert diagnosed(tmp_path)["kind"] == "error"
    assert "raised in" in " ".join(diagnosed(tmp_path)["evidence"])
    for rank in range(3):
        assert f"error: rank 2 on {failed.host}, step {STEP}: ValueError: the fault" in rank_log(
            tmp_path, rank
        )
        assert "does not answer" not in rank_log(tmp_path, rank)  # though the store went with the first rank
    assert f"step {STEP - 1}/50" in rank_log(tmp_path, 0)
    assert gone(tmp_path)
    told = subprocess.run(
        [sys.executable, "-m", "dstrain", "last-failure", "--config", tmp_path / "recipe.yaml", "--zero_stage", "2"],
        cwd=REPOSITORY, capture_output=True, text=True,
    )  # fmt: skip
    assert told.stdout.strip() == failed.text()
    # A run that goes on and ends well has no failure any more.
    again = launch("--config", tmp_path / "recipe.yaml", "train.max_steps=5", launcher="torchrun", ranks=2)
    assert again.returncode == 0, again.stderr
    assert failure.read(tmp_path / "run") is None
    assert [one.error for one in failure.earlier(tmp_path / "run")] == [failed.error]
    assert "1, the last: rank 2" in diagnose(tmp_path / "run")["looked_at"]["failures of earlier starts"]


@pytest.mark.slow
def test_a_rank_that_raises_before_training(tmp_path):
    process, failed = run(tmp_path, "at start")
    assert process.returncode == 1
    assert own_lines(process)[-1].startswith("error: rank 1 on ")
    assert process.stderr.count("Traceback") == 1
    assert (failed.rank, failed.phase) == (1, "start-up")


@pytest.mark.slow
def test_a_rank_that_is_killed(tmp_path):
    process, failed = run(tmp_path, "die")
    assert process.returncode != 0
    (line,) = own_lines(process)
    assert line.startswith("error: rank 1 on ")
    assert "ended without a word: its process" in line
    assert "a signal or a crash ended it" in line  # which signal only the launcher knows
    assert (failed.kind, failed.rank, failed.status) == ("died", 1, DIED)
    assert (diagnosed(tmp_path)["kind"], diagnosed(tmp_path)["title"]) == ("died", "rank 1 died")
    assert gone(tmp_path)


@pytest.fixture
def memory_group():
    """A group of processes that may have 256 MiB of memory in all."""
    one, two = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    parent, limit = (one, "memory.limit_in_bytes") if one.is_dir() else (two, "memory.max")
    folder = parent / f"dstrain-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(256 * 2**20))
        (folder / "cgroup.procs").read_text()
    except OSError as error:
        pytest.skip(f"{folder}: no right to limit memory: {error.strerror}")
    yield folder
    for _ in range(50):
        try:
            folder.rmdir()
            break
        except OSError:
            time.sleep(0.1)


@pytest.mark.slow
def test_a_rank_without_memory(tmp_path, memory_group):
    """The kernel kills it, which is told apart from other signals."""
    process, failed = run(tmp_path, "eat", env={"MEMORY_GROUP": str(memory_group)})
    assert process.returncode != 0
    (line,) = own_lines(process)
    assert "the kernel ended 1 process here for lack of memory" in line
    assert (failed.kind, failed.rank, failed.step) == ("died", 1, STEP)
    found = diagnosed(tmp_path)
    assert found["title"] == "killed by the kernel: the host ran out of memory"
    assert "estimated need of a rank" in " ".join(found["evidence"])
    assert any("saves" in change for change in found["changes"]), found


@pytest.mark.slow
def test_a_rank_that_sleeps(tmp_path):
    """The one that is behind is named, with the line it is at; every rank's stacks are in its log."""
    process, failed = run(tmp_path, "sleep")
    assert process.returncode == HUNG
    lines = own_lines(process)
    assert lines[-1].startswith(f"error: hung in step {STEP}, no progress for 6 s: rank 1 on ")
    assert "is behind, in faulty (tests/faults.py:" in lines[-1]
    assert "in collective" in next(line for line in lines if line.startswith("rank 0 on "))
    assert "all_reduce_sum (dstrain/distributed.py" in lines[0]
    assert (failed.kind, failed.rank, failed.status) == ("hung", 1, HUNG)
    for rank in (0, 1):
        assert "most recent call first" in rank_log(tmp_path, rank)
    assert "faults.py" in rank_log(tmp_path, 1)
    assert diagnosed(tmp_path)["kind"] == "hung"
    assert "rank 1 on " in diagnosed(tmp_path)["evidence"][1]
    assert gone(tmp_path)


@pytest.mark.slow
def test_a_rank_that_skips_a_collective(tmp_path):
    process, failed = run(tmp_path, "skip")
    assert process.returncode == HUNG
    assert "the ranks are in different collectives: all_reduce of " in own_lines(process)[-1]
    assert failed.kind == diagnosed(tmp_path)["kind"] == "hung"


@pytest.mark.slow
def test_an_evaluation_that_stands_still_alone(tmp_path):
    process, failed = run(tmp_path, "evaluation", ranks=1, init_timeout_seconds=15.0)
    assert process.returncode == HUNG
    assert "hung in evaluation, no progress for 15 s: in <lambda> (tests/faults.py:" in own_lines(process)[-1]
    assert (failed.phase, failed.rank) == ("evaluation", 0)


def later(watch, seconds):
    """Let a phase have lasted so long."""
    watch.at = watch.at._replace(since=watch.at.since - seconds)


@pytest.fixture
def watch(process_group):
    """The watch over one process, whose limit for a start is half an hour."""
    guarded = guard.Guard(distributed.World(0, 1, 0, 1), 1800.0, None)
    yield guarded
    guarded.stop()


def test_limits_are_learnt(watch):
    """Of a step: ten times the longest so far, at least two minutes, without the first, which compiles."""
    assert watch.limit("start-up") == 1800.0
    for step, seconds in enumerate((500.0, 1.0, 30.0, 20.0, 0.0), 1):
        watch.enter("step", step)
        assert watch.limit("step") == pytest.approx(1800.0 if step < 5 else 300.0, abs=1)
        later(watch, seconds)
    watch.enter("evaluation", 5)
    assert watch.limit("evaluation") == 1800.0
    later(watch, 2)
    watch.enter("saving", 5)
    assert watch.limit("evaluation") == guard.FLOOR_S
    watch.enter("saving", 6)  # most hold a copy; the last one waits until everything is written
    assert watch.limit("saving") == watch.limit("export") == watch.limit("report") == 1800.0
    watch.step_s = 7.0
    assert watch.limit("step") == 7.0


def test_a_process_that_was_suspended_is_not_hung(watch):
    """A scheduler may stop a job for an hour; the clock of the machine goes on."""
    watch.enter("step", 5)
    since = watch.at.since
    watch._forgive(0.3)
    assert watch.at.since == since
    watch._forgive(3600.0)
    assert watch.at.since == since + 3600.0


def test_a_full_disk_does_not_hide_a_failure(watch, tmp_path, capfd, monkeypatch):
    """Neither log nor failure.json can be written; the screen says what happened, and the status counts."""
    watch.folder, watch.log = tmp_path / "gone" / "logs", logs.RankLog(tmp_path, 0)
    watch.log.file.close()
    watch.log.file = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115
    left = []
    monkeypatch.setattr(distributed, "leave", left.append)
    watch.end(Failure("hung", 0, "hung in step 3", HUNG, traceback="rank 0: there"))
    sys.stdout, sys.stderr = sys.stdout.screen, sys.stderr.screen
    watch.log.close()  # nothing is raised either
    watch.log = None
    assert left == [HUNG]
    assert "error: hung in step 3" in capfd.readouterr().err


def test_errors_of_others_are_no_statuses(watch, capfd):
    """Exceptions of libraries may have a `status` too, such as HTTP's 503."""
    from urllib.error import HTTPError

    assert watch.fail(HTTPError("http://x", 503, "unavailable", None, None)) == 1
    assert "503" in capfd.readouterr().err


def place(step, number, ended, name="all_reduce of 4 elements"):
    return {"step": step, "number": number, "ended": ended, "name": name, "text": f"at {number}"}


@pytest.mark.parametrize(
    ("places", "last", "says"),
    [
        ({0: place(5, 9, False), 1: place(5, 8, True)}, [1], "rank 1 on b is behind, at 8"),
        ({0: place(5, 9, False), 1: place(4, 9, False)}, [1], "rank 1 on b is behind"),
        ({0: place(5, 9, False), 1: place(5, 9, True)}, [0], "rank 0 on a is behind"),
        ({0: place(5, 9, False)}, [1], "rank 1 on b is behind, not even its watchdog can run"),
        ({0: place(5, 9, False), 1: place(5, 9, False)}, [0, 1], "all ranks stand alike, at 9"),
        (
            {0: place(5, 9, False), 1: place(5, 9, False, "barrier")}, [0, 1],
            "the ranks are in different collectives: all_reduce of 4 elements and barrier",
        ),
    ],
)  # fmt: skip
def test_who_is_behind(places, last, says):
    assert look.behind(places, 2) == last
    assert look.blame(places, ["a", "b"]).startswith(says)


def test_where_a_thread_stands():
    def sleeps():
        started.set()
        threading.Event().wait(5)

    started = threading.Event()
    thread = threading.Thread(target=sleeps, daemon=True)
    thread.start()
    started.wait()
    time.sleep(0.1)
    assert "wait (python3.11/threading.py" in (text := look.where(thread.ident)), text
    assert "sleeps (tests/test_watchdog.py:" in text


def test_a_process_is_dead_before_its_parent_knows():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert not look.dead(process.pid)
    process.kill()
    deadline = time.monotonic() + 10
    while not look.dead(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.wait()
    assert look.dead(process.pid)


def test_a_lack_of_files_is_no_death(monkeypatch):
    monkeypatch.setattr(
        Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(OSError(24, "too many open files"))
    )
    assert not look.dead(1)


@pytest.mark.parametrize(
    ("command", "is_launcher"),
    [
        (["python", "/venv/bin/deepspeed", "--num_gpus", "2", "train.py"], True),
        (["/venv/bin/python3", "-u", "-m", "deepspeed.launcher.launch", "--world_info=x", "train.py"], True),
        (["python", "/venv/bin/torchrun", "train.py"], True),
        (["python", "-P", "/recipes/launch/torchrun.py", "--nnodes", "1", "train.py"], True),
        (["python", "-m", "torch.distributed.run", "train.py"], True),
        (["mpirun", "-np", "2", "python"], True),
        (["bash", "run_deepspeed.sh"], False),
        (["bash", "-c", "python train.py --deepspeed_config x.json"], False),
        (["bash", "/home/me/deepspeed-recipes/all.sh"], False),
        (["python", "-m", "pytest", "tests/test_deepspeed.py"], False),
    ],
)
def test_what_is_a_launcher(monkeypatch, command, is_launcher):
    """A run ends with its launcher, but not with a script that merely has its name in a path."""
    monkeypatch.setattr(Path, "read_bytes", lambda _: "\0".join([*command, ""]).encode())
    assert bool(control._programs(7) & set(control._LAUNCHERS)) == is_launcher


def test_rows_wait_for_room_on_the_disk(tmp_path, monkeypatch, capsys):
    """A full disk costs no row and no training, and is said once."""
    rows = RowsFile(tmp_path / "metrics.jsonl", None)
    rows.write({"step": 1})
    opened = Path.open
    monkeypatch.setattr(
        Path, "open", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    rows.write({"step": 2})
    rows.write({"step": 3})
    monkeypatch.setattr(Path, "open", opened)
    rows.write({"step": 4})
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2, 3, 4]
    assert capsys.readouterr().err.count("cannot be written for now: No space left on device") == 1


@pytest.mark.parametrize(
    ("device", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA A100-SXM4-80GB", 311.8),
        ("NVIDIA L40", 181.0), ("NVIDIA L40S", 362.0), ("NVIDIA L4", 121.0), ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA RTX A1000", None), ("cpu", None),
    ],
)  # fmt: skip
def test_peaks_belong_to_whole_names(device, tflops):
    assert peak_tflops(device) == tflops


@pytest.mark.parametrize("links", [True, False])
def test_the_first_failure_stays(tmp_path, monkeypatch, links):
    """Also on file systems that know no hard links, such as mounted buckets."""
    if not links:
        monkeypatch.setattr(os, "link", lambda *paths: (_ for _ in ()).throw(PermissionError(1, "no links")))
    first = Failure("error", 3, "ValueError: x", 1, host="b", step=7, phase="step")
    assert failure.record(tmp_path, first)
    assert not failure.record(tmp_path, Failure("died", 0, "y", DIED, host="a"))
    assert [path.name for path in tmp_path.iterdir()] == ["failure.json"]
    (tmp_path / "logs").mkdir()
    (tmp_path / "failure.json").rename(tmp_path / "logs" / "failure.json")
    assert failure.read(tmp_path) == first
    assert first.text() == "error: rank 3 on b, step 7: ValueError: x"
    failure.clear(tmp_path)
    failure.clear(tmp_path)
    (tmp_path / "logs" / "failures.jsonl").open("a").write("{")  # cut off by a full disk
    assert failure.earlier(tmp_path) == [first]
    (tmp_path / "logs" / "failure.json").write_text("{")
    assert failure.read(tmp_path) is None


def test_a_log_that_closes_late_leaves_a_new_screen_alone(tmp_path, monkeypatch):
    """As in one process that trains twice, whose first screen is closed by then."""
    log, screen = logs.RankLog(tmp_path, 0), io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    log.close()
    assert sys.stdout is screen
    assert not isinstance(sys.stderr, logs.Tee)


def test_a_log_has_the_last_form_of_a_line(tmp_path, capsys):
    log = logs.RankLog(tmp_path, 0)
    try:
        sys.stdout.write("a bar  10 %\ra bar  90 %\ra bar 100 %\n")
        print("done")
    finally:
        log.close()
    print("not in it")
    text = (tmp_path / "rank-0.log").read_text().splitlines()
    assert text[2:] == ["a bar 100 %", "done"]
    assert "10 %" in capsys.readouterr().out


@pytest.mark.slow
def test_two_ranks_are_not_held_up(tmp_path):
    """A run with all its phases ends well under the shortest limits that it keeps."""
    recipe = tiny_recipe(
        tmp_path, train=QUICK | {"max_steps": 8, "train_timeout_seconds": 30.0},
        checkpoint={"save_steps": 3, "export": True}, eval={"eval_steps": 4},
    )  # fmt: skip
    process = launch("--config", recipe, launcher="torchrun", ranks=2)
    assert process.returncode == 0, process.stderr
    assert len(metrics(tmp_path / "run")) == 9
    assert rank_log(tmp_path, 1).count("\n") == 2  # who it is, and nothing that other ranks say as well
