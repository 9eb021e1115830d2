"""launch/slurm.sbatch on a real Slurm of this machine: munged, slurmctld and slurmd, started by the test."""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
from running import (
    REPOSITORY,
    clean_environment,
    free_port,
    last_step,
    losses,
    metrics,
    ranks_of,
    tiny_recipe,
    trains,
    wait_for,
)

pytestmark = pytest.mark.slow
LONG = {"max_steps": 5000, "train_micro_batch_size_per_gpu": 1}
_DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SchedulerParameters=bf_interval=2,sched_interval=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A cluster of this machine; gives the environment in which its commands find it."""
    path = f"{clean_environment()['PATH']}:/usr/sbin:/sbin"
    missing = [name for name in _DAEMONS if not shutil.which(name, path=path)]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    if os.geteuid() != 0:
        pytest.skip("slurmd needs root")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    ports = (free_port(), free_port())
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, host=host, ports=ports))
    environment = clean_environment() | {"PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}
    commands = [
        [
            *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"),
            *(f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log"),
            f"--seed-file={folder}/munged.seed",
        ],
        ["slurmctld", "-D", "-c"],
        ["slurmd", "-D", "-c", "-N", host],
    ]
    daemons = []
    try:
        for command in commands:
            daemons.append(
                subprocess.Popen(
                    [shutil.which(command[0], path=path), *command[1:]],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    stdout=(folder / f"{command[0]}.out").open("w"),
                    stderr=subprocess.STDOUT,
                )
            )
            time.sleep(1)
        deadline = time.monotonic() + 60
        while "idle" not in (said := run(environment, "sinfo", "-h", "-o", "%T")):
            logs = "".join(file.read_text()[-1500:] for file in folder.glob("*.out"))
            assert time.monotonic() < deadline, said + logs
            time.sleep(0.5)
        yield environment
    finally:
        subprocess.run(
            ["scancel", "--full", "--signal=KILL", "--user=root"], env=environment, capture_output=True
        )
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def run(environment, *words):
    """Run a command of Slurm, and return what it says."""
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


def submit(environment, folder, *words, **variables):
    """Submit launch/slurm.sbatch from a folder, and return the job's id."""
    command = ["sbatch", "--parsable", "--exclusive=user", f"--chdir={folder}", *words]
    done = subprocess.run(
        command, env=environment | {"REPOSITORY": str(REPOSITORY)} | variables,
        cwd=folder, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def state(environment, job):
    words = run(environment, "scontrol", "-o", "show", "job", job).split()
    return next((word.partition("=")[2] for word in words if word.startswith("JobState=")), "GONE")


SCRIPT = str(REPOSITORY / "launch" / "slurm.sbatch")


def test_a_job_that_is_preempted_goes_on_and_one_that_is_cancelled_has_saved(slurm, tmp_path):
    recipe = tiny_recipe(tmp_path, train=LONG, checkpoint={"export": False})
    job = submit(slurm, tmp_path, SCRIPT, str(recipe), NUM_GPUS="2")
    wait_for(lambda: trains(recipe), 200)
    assert len(ranks_of(recipe)) == 2
    run(slurm, "scancel", "--signal=USR1", "--batch", job)  # what Slurm itself sends before the time is up
    wait_for(lambda: last_step(recipe), 60)
    wait_for(lambda: ranks_of(recipe) == [], 60)
    saved = last_step(recipe)
    assert saved == metrics(tmp_path / "run")[-1]["step"]
    wait_for(lambda: metrics(tmp_path / "run")[-1]["step"] > saved + 5, 200)
    said = "".join(file.read_text() for file in tmp_path.glob("slurm-*.log"))
    assert "saved; the job is queued again" in said
    assert f"resumed from step {saved}" in said
    assert state(slurm, job) == "RUNNING"
    run(slurm, "scancel", job)
    wait_for(lambda: ranks_of(recipe) == [], 60)
    wait_for(lambda: state(slurm, job) in ("CANCELLED", "GONE"), 60)
    assert last_step(recipe) == metrics(tmp_path / "run")[-1]["step"] > saved


def test_an_array_is_a_run_for_each_task(slurm, tmp_path):
    recipe = tiny_recipe(tmp_path)
    (tmp_path / "grid.txt").write_text("train.learning_rate=0.01\ntrain.learning_rate=0.001 seed=7\n")
    job = submit(
        slurm, tmp_path, "--array=1-2", SCRIPT, str(recipe), "train.max_steps=3",
        OVERRIDES=str(tmp_path / "grid.txt"), OUTPUT=str(tmp_path / "runs"),
    )  # fmt: skip
    folders = [tmp_path / "runs" / f"task-{number}" for number in (1, 2)]
    finals = [folder / "checkpoints" / "step-3" for folder in folders]
    logs = lambda: "".join(file.read_text() for file in Path(tmp_path).glob("slurm-*.log"))  # noqa: E731
    deadline = time.monotonic() + 240
    while not all(final.exists() for final in finals):
        assert time.monotonic() < deadline, logs()[-3000:]
        time.sleep(0.3)
    wait_for(lambda: state(slurm, job) in ("COMPLETED", "GONE"), 60)
    first, second = (losses(folder) for folder in folders)
    assert len(first) == len(second) == 3
    assert first != second
    assert "seed: 7" in (folders[1] / "recipe.yaml").read_text()
