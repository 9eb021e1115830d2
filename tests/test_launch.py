"""launch/ on several hosts, made of namespaces, and with the launchers on one: real ssh, pdsh, torchrun, mpirun."""

import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import hosts
import pytest
import yaml
from running import (
    REPOSITORY,
    Started,
    clean_environment,
    free_port,
    last_step,
    launch,
    losses,
    metrics,
    ranks_of,
    script,
    tiny_recipe,
    trains,
    wait_for,
)

from dstrain.control import PREEMPTED

pytestmark = pytest.mark.slow
LONG = {"max_steps": 5000, "train_micro_batch_size_per_gpu": 1}
NOTICED_S = 45  # README of launch/: a host that dies is noticed, and the run ended, within this
KEY = "wb-6c1f0e-not-a-real-key"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Four hosts, each with an sshd, that this machine reaches as a login host does."""
    reason = hosts.missing()
    if reason:
        pytest.skip(reason)
    made = hosts.Hosts(tmp_path_factory.mktemp("hosts"))
    try:
        yield made.start(4)
    finally:
        made.stop()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The losses of one node with two ranks."""
    recipe = tiny_recipe(tmp_path_factory.mktemp("reference"))
    done = launch("--config", recipe, launcher="deepspeed", ranks=2)
    assert done.returncode == 0, done.stderr
    return losses(recipe.parent / "run")


def command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def command_lines():
    """Return every command line on this machine, those on its hosts among them."""
    return [command_line(folder.name) for folder in Path("/proc").glob("[0-9]*")]


def nothing_left(cluster, of):
    return [line for host in of for line in cluster.processes(host)] == []


def test_two_hosts_train_as_one_host_does(cluster, reference, tmp_path):
    """The same losses; arguments with blanks and quotes arrive; a secret does, and shows in no process list or log."""
    recipe = tiny_recipe(tmp_path / "two hosts")
    odd = """it's "two" hosts, $HOME `id` {"a": [1, 2]}; *"""
    (tmp_path / ".deepspeed_env").write_text(
        "# of the user\n\nOWN_VARIABLE=own\nOWN_TOKEN=own-hidden-token\n"
    )
    process = cluster.launch(
        recipe, f"logging.run_name={json.dumps(odd)}", count=2, cwd=tmp_path,
        WANDB_API_KEY=KEY, HF_HUB_USER_AGENT_ORIGIN='a "b" $c', NCCL_DEBUG="WARN",
    )  # fmt: skip
    shown, seen = [], {}
    while process.poll() is None:
        shown += [line for line in command_lines() if KEY in line or "own-hidden-token" in line]
        for pid in ranks_of(recipe):
            try:
                words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
            except OSError:
                continue
            values = dict(word.split("=", 1) for word in words if "=" in word)
            if "HF_HUB_USER_AGENT_ORIGIN" in values:  # not before it has become the rank
                seen[values["RANK"]] = values
        time.sleep(0.02)
    said, wrong = process.communicate(timeout=60)
    assert process.returncode == 0, wrong
    assert losses(recipe.parent / "run") == pytest.approx(reference, abs=1e-6)
    ran = yaml.safe_load((recipe.parent / "run" / "recipe.yaml").read_text())
    assert ran["logging"]["run_name"] == odd
    assert shown == []
    assert KEY not in said + wrong
    assert not any(KEY in file.read_text(errors="replace") for file in tmp_path.rglob("*") if file.is_file())
    assert sorted(seen) == ["0", "1"]
    for values in seen.values():
        assert values["WANDB_API_KEY"] == KEY
        assert values["HF_HUB_USER_AGENT_ORIGIN"] == 'a "b" $c'
        assert (values["OWN_VARIABLE"], values["OWN_TOKEN"]) == ("own", "own-hidden-token")
        assert values["NCCL_DEBUG"] == "WARN"
    assert "launch.py" not in said + wrong
    assert list((Path.home() / ".cache" / "dstrain" / "launch").glob("*.json")) == []


def test_a_host_that_dies_is_noticed_and_the_run_goes_on_when_it_is_back(cluster, tmp_path):
    recipe = tiny_recipe(tmp_path, train=LONG, checkpoint={"export": False, "save_steps": 5})
    first, second = cluster.hosts[:2]
    process = cluster.launch(recipe, count=2)
    wait_for(lambda: last_step(recipe), 200)
    died = time.monotonic()
    second.die()
    try:
        _, wrong = process.communicate(timeout=NOTICED_S + 60)
        assert time.monotonic() - died < NOTICED_S
        assert process.returncode not in (0, 2, 3, PREEMPTED)
        assert f"host {second.address}: the connection to it was lost; ending the run" in wrong
        assert nothing_left(cluster, [first])
    finally:
        cluster.revive(second)
    saved = last_step(recipe)
    process = cluster.launch(recipe, count=2)
    wait_for(lambda: last_step(recipe) > saved + 5, 200)
    process.send_signal(signal.SIGTERM)
    said, wrong = process.communicate(timeout=60)
    assert process.returncode == PREEMPTED, wrong
    assert "resumed from step" in said
    assert "by a signal; saved, and the same command goes on" in said
    assert last_step(recipe) == metrics(tmp_path / "run")[-1]["step"]
    assert nothing_left(cluster, [first, second])


def test_four_hosts(cluster, tmp_path):
    """A rank that dies ends all soon, and the run starts again by itself; killed where it was started, it ends everywhere."""
    recipe = tiny_recipe(tmp_path, train=LONG, checkpoint={"export": False, "save_steps": 10})
    process = cluster.launch(recipe, RESTARTS="1")
    wait_for(lambda: last_step(recipe), 200)
    ranks = ranks_of(recipe)
    assert len(ranks) == 4
    os.kill(ranks[-1], signal.SIGKILL)
    wait_for(lambda: not set(ranks) & set(ranks_of(recipe)), 30)
    saved = last_step(recipe)
    wait_for(lambda: last_step(recipe) > saved, 200)
    assert len(ranks_of(recipe)) == 4
    (launcher,) = [pid for pid in descendants(process.pid) if "dstrain.remote" in command_line(pid)]
    os.kill(launcher, signal.SIGKILL)
    wait_for(lambda: ranks_of(recipe) == [], 60)
    said, wrong = process.communicate(timeout=60)
    assert process.returncode == PREEMPTED  # the ranks noticed, and saved
    assert "starting it again (1 of 1)" in wrong
    assert "resumed from step" in said
    steps = [row["step"] for row in metrics(tmp_path / "run")]
    assert steps == list(range(len(steps)))
    assert last_step(recipe) == steps[-1]
    wait_for(lambda: nothing_left(cluster, cluster.hosts), 20)


def started_on(cluster, number, command, **environment):
    """Start a script of launch/ on a host, by hand as it were."""
    words = " ".join(f"{name}='{value}'" for name, value in environment.items())
    path = clean_environment()["PATH"]
    return Started(
        ["ssh", "-F", str(cluster.folder / "config"), cluster.hosts[number].address,
         f"cd {REPOSITORY} && PATH={path} {words} launch/{command}"]
    )  # fmt: skip


@pytest.mark.parametrize("name", ["multi_node.sh --no_ssh", "torchrun.sh"])
def test_hosts_started_by_hand(cluster, reference, tmp_path, name):
    recipe, master = tiny_recipe(tmp_path), cluster.hosts[0].address
    processes = []
    for number in (0, 1):
        if name == "torchrun.sh":
            place = {"NNODES": 2, "NODE_RANK": number, "MASTER_ADDR": master, "MASTER_PORT": 29611}
            processes.append(started_on(cluster, number, f"torchrun.sh {recipe}", **place))
        else:
            options = f"--hostfile {cluster.hostfile(1, 2)} --no_ssh --node_rank {number}"
            options += f" --master_addr {master} --master_port 29612"
            processes.append(started_on(cluster, number, f"multi_node.sh {recipe} {options}"))
    for process in processes:
        _, wrong = process.communicate(timeout=200)
        assert process.returncode == 0, wrong
    assert losses(tmp_path / "run") == pytest.approx(reference, abs=1e-6)


def errors_of(cluster, tmp_path, hostfile, *arguments, recipe=""):
    """Return the lines that multi_node.sh says before it ends, for a mistake that it must find before it starts."""
    recipe = recipe or str(tiny_recipe(tmp_path / "good"))
    command = [str(REPOSITORY / "launch" / "multi_node.sh"), recipe, "--hostfile", str(hostfile), *arguments]
    done = subprocess.run(
        command, cwd=tmp_path, env=cluster.environment(), capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_what_is_wrong_with_a_host_is_one_line(cluster, tmp_path):
    one, two = (host.address for host in cluster.hosts[:2])
    good = cluster.hostfile(1, 2)
    bad = tmp_path / "hosts"
    bad.write_text(f"{one} slots=1\n{two} slot=1\n")
    assert errors_of(cluster, tmp_path, bad) == [
        f"error: {bad}:2: 'slot=1' is not slots=N; did you mean 'slots'?"
    ]
    absent = f"{one.rpartition('.')[0]}.99"
    bad.write_text(f"{one} slots=1\n{absent} slots=1\n")
    (line,) = errors_of(cluster, tmp_path, bad)
    assert line.startswith(f"error: host {absent}: cannot be reached by ssh: ")
    (line,) = errors_of(cluster, tmp_path, good, "--master_addr", "192.0.2.7")
    assert line == f"error: host {one}: 192.0.2.7 is no address of it; its addresses: {one}"
    (line,) = errors_of(cluster, tmp_path, good, "--master_port", "22")
    assert line.startswith(f"error: host {one}: port 22 is in use there")
    cluster.on(cluster.hosts[1], "ip route add prohibit " + one)
    (line,) = errors_of(cluster, tmp_path, good)
    cluster.on(cluster.hosts[1], "ip route delete prohibit " + one)
    assert re.match(rf"error: host {two}: cannot reach rank 0 at {one} port \d+: ", line), line


def test_another_version_on_a_host_is_one_line(cluster, tmp_path):
    """Another code, another package, no repository: what a host has lies over the files that it shares with us."""
    host, good = cluster.hosts[1], cluster.hostfile(1, 2)
    package = importlib.metadata.distribution("torch").locate_file("")
    metadata = next(Path(package).glob("torch-*.dist-info")) / "METADATA"
    for file, change, said in (
        (REPOSITORY / "dstrain" / "loss.py", lambda text: text + "\n", r"code is \w+ there and \w+ here"),
        (
            metadata,
            lambda text: re.sub(r"(?m)^Version: .*", "Version: 2.1.0", text),
            "torch is 2.1.0 there and 2.*",
        ),
    ):
        other = tmp_path / file.name
        other.write_text(change(file.read_text()))
        inside = ["nsenter", "-t", first_process(host), "-m", "-p"]
        subprocess.run([*inside, "mount", "--bind", str(other), str(file)], check=True)
        (line,) = errors_of(cluster, tmp_path, good)
        subprocess.run([*inside, "umount", str(file)], check=True)
        assert re.fullmatch(rf"error: host {host.address}: {said}", line), line
    empty = tmp_path / "empty"
    empty.mkdir()
    subprocess.run([*inside, "mount", "--bind", str(empty), str(REPOSITORY)], check=True)
    (line,) = errors_of(cluster, tmp_path, good)
    subprocess.run([*inside, "umount", str(REPOSITORY)], check=True)
    assert line.startswith(f"error: host {host.address}: no {REPOSITORY}/train.py there")
    checked = subprocess.run(
        ["python", "-m", "dstrain", "check-hosts", "--hostfile", str(good)],
        cwd=REPOSITORY, env=cluster.environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stderr
    assert "all 2 hosts have the same Python, packages and code; rank 0 at " in checked.stdout


def first_process(host):
    """Return the process id, on this machine, of a host's first process."""
    return Path(f"/proc/{host.process.pid}/task/{host.process.pid}/children").read_text().split()[0]


def test_torchrun_goes_on_with_a_node_that_leaves_and_one_that_comes_back(tmp_path):
    recipe = tiny_recipe(tmp_path, train=LONG, checkpoint={"export": False, "save_steps": 5})
    place = {
        "NNODES": "1:2",
        "RDZV": f"127.0.0.1:{free_port()}",
        "RESTARTS": "10",
        "RDZV_CONF": "last_call_timeout=3",
    }
    stays = script("torchrun.sh", recipe, **place)
    time.sleep(2)  # it is the one that serves the rendezvous
    leaves = script("torchrun.sh", recipe, **place)

    def train(ranks):
        before = metrics(tmp_path / "run")[-1]["step"] if trains(recipe, 0) else -1
        wait_for(lambda: len(ranks_of(recipe)) == ranks and trains(recipe, 0), 200)
        wait_for(lambda: metrics(tmp_path / "run")[-1]["step"] > before + 10, 200)

    train(2)
    for process in descendants(leaves.pid):
        os.kill(process, signal.SIGKILL)
    leaves.communicate(timeout=60)
    wait_for(lambda: len(ranks_of(recipe)) == 1, 120)
    train(1)
    leaves = script("torchrun.sh", recipe, **place)
    train(2)
    for process in (leaves, stays):
        process.send_signal(signal.SIGTERM)
    said = [process.communicate(timeout=90)[0] for process in (leaves, stays)]
    assert (leaves.returncode, stays.returncode) == (PREEMPTED, PREEMPTED)
    batches = re.findall(r"batch +\d+ micro x \d+ gas x (\d+) dp = (\d+) sequences", "".join(said))
    assert {ranks for ranks, _ in batches} == {"1", "2"}
    assert {total for _, total in batches} == {"2"}  # whatever the ranks
    assert ranks_of(recipe) == []
    assert last_step(recipe) == metrics(tmp_path / "run")[-1]["step"]


def descendants(pid):
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
    return [int(child) for child in found] + [one for child in found for one in descendants(child)]


@pytest.mark.skipif(not shutil.which("mpirun"), reason="openmpi-bin not installed")
def test_mpirun(reference, tmp_path):
    """Two ranks here, each with its share of the cores, to the losses of the deepspeed launcher; and none left."""
    recipe = tiny_recipe(tmp_path)
    process = script("mpirun.sh", recipe, "logging.run_name=two words", NP="2", WANDB_API_KEY=KEY)
    shown = []
    while process.poll() is None:
        shown += [line for line in command_lines() if KEY in line]
        time.sleep(0.1)
    said, wrong = process.communicate(timeout=200)
    assert process.returncode == 0, wrong
    assert shown == []
    assert losses(tmp_path / "run") == pytest.approx(reference, abs=1e-6)
    assert f"2 ranks, {max(1, len(os.sched_getaffinity(0)) // 2)} CPU threads each" in said
    assert ranks_of(recipe) == []
