"""`python -m dstrain doctor` as a user runs it: one machine, hosts behind ssh, and ranks that misbehave."""

import json
import os
import re
import subprocess
import sys

import pytest
from running import QUICKSTART, REPOSITORY, tiny_recipe

from dstrain.doctor import hosts, network, ranks

pytestmark = pytest.mark.slow

# A host is whatever this says: `dead` refuses, `slow` never answers, `old` has other packages, the rest are here.
SSH = """\
#!/bin/bash
echo "$@" >>{log}
while [[ $1 == -* ]]; do shift 2; done
host=$1
shift
case $host in
dead) echo "ssh: connect to host dead port 22: Connection refused" >&2; exit 255 ;;
old) export PYTHONPATH={old} ;;
esac
echo "Welcome to $host"
exec bash -c "$*"
"""

# A worker of the doctor, but one rank of it does something else.
WORKER = """\
import os, signal, sys, time
sys.path.insert(0, {repository!r})
from dstrain.doctor import worker
import torch.distributed as dist

def instead(module, name, act):
    original = getattr(module, name)
    def other(*arguments, **more):
        act(*arguments)
        return original(*arguments, **more)
    setattr(module, name, other)

if os.environ["RANK"] == "1":
    {fault}
worker.main()
"""


def doctor(*arguments, path=None, **variables):
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "MASTER"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"):
        environment.pop(name, None)
    if path:
        environment["PATH"] = f"{path}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        [sys.executable, "-m", "dstrain", "doctor", *map(str, arguments)],
        cwd=REPOSITORY,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=400,
    )


def test_doctor_of_the_quickstart():
    done = doctor("--config", QUICKSTART, "train.max_steps=5")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 110
    assert len(lines) <= 50, "about one screen"
    states = {line.split()[0] for line in lines[: lines.index("")]} - {"failure"}
    assert "ok" in states
    for name in (
        "python",
        "packages",
        "ops",
        "output disk",
        "DeepSpeed JSON",
        "tokenizer",
        "data",
        "barrier",
    ):
        assert re.search(f"(?m)^ok +{name}  ", done.stdout), name
    assert re.search(r"all-reduce bandwidth +[\d.]+ GB/s bus", done.stdout)
    assert re.search(r"all-reduce latency +[\d,]+ us for 4 KiB, 2 ranks \(gloo", done.stdout)


def test_doctor_of_what_is_wrong(tmp_path):
    recipe = tiny_recipe(tmp_path, deepspeed="zero3_nvme.json")
    wrong = {"MASTER_ADDR": "::1::2", "MASTER_PORT": "70000", "GLOO_SOCKET_IFNAME": "none0"}
    done = doctor(
        *("--json", "--skip", "ranks", "--config", recipe),
        *("data.train=none.jsonl", "logging.report_to=wandb"),
        **wrong,
        TORCH_EXTENSIONS_DIR=str(tmp_path / "ops"),
        HF_HUB_OFFLINE="1",
        WANDB_MODE="offline",
    )
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["state"] == "failure"
    failed = {one["name"]: one for one in report["checks"] if one["state"] == "failure"}
    assert set(failed) == {*wrong, "data", "NVMe disk"}
    assert failed["NVMe disk"]["seen"] == "/local_nvme: no such folder"
    assert failed["data"]["seen"] == f"{REPOSITORY / 'none.jsonl'}: no such file or folder"
    assert all(one["remedy"] for one in report["checks"] if one["state"] != "ok")
    missing = {one["seen"] for one in report["checks"] if one["name"] == "ops"}
    assert "cpu_adam: missing" in missing and "async_io: missing" in missing
    offline = next(one for one in report["checks"] if one["name"] == "W&B")
    assert (offline["state"], "offline" in offline["seen"]) == ("ok", True)
    assert report["facts"]["interfaces"]
    assert not (tmp_path / "run").exists()


def test_a_mistake_is_one_line_and_status_2(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("one slots=1\none slots=2\n")
    done = doctor("--hostfile", file)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {file}:2: one is there twice; give it one line with all its slots\n"


@pytest.fixture
def ssh(tmp_path):
    """A folder for PATH with an ssh that reaches hosts of another kind, and a list of its calls."""
    folder, old = tmp_path / "bin", tmp_path / "old" / "psutil-1.0.dist-info"
    folder.mkdir()
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: psutil\nVersion: 1.0\n")
    program = folder / "ssh"
    program.write_text(SSH.format(log=tmp_path / "calls", old=old.parent))
    program.chmod(0o755)
    return folder


QUICK = ("--skip", "machine", "--skip", "gpu", "--skip", "recipe")  # without imports of libraries


def test_hosts_of_a_hostfile(tmp_path, ssh):
    file = tmp_path / "hosts"
    file.write_text("one slots=1\n\n# the second\ntwo slots=2\n")
    done = doctor(*QUICK, "--hostfile", file, path=ssh, NCCL_DEBUG="WARN", HF_TOKEN="hf_secret")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"(?m)^ok +hosts +one: reached.* slots=1", done.stdout), done.stdout
    assert re.search(r"(?m)^ok +hosts +two: reached.* slots=2", done.stdout)
    assert re.search(r"(?m)^ok +same versions ", done.stdout)
    assert re.search(r"(?m)^ok +barrier +3 ranks on 2 hosts met", done.stdout)
    assert re.search(r"(?m)^ok +clocks +rank \d on (one|two)", done.stdout)
    calls = (tmp_path / "calls").read_text()
    assert "BatchMode=yes" in calls and "NCCL_DEBUG=WARN" in calls
    assert "hf_secret" not in calls


def test_hosts_that_are_unreachable_or_differ(tmp_path, ssh):
    file = tmp_path / "hosts"
    file.write_text("one slots=1\ndead slots=1\nold slots=1\n")
    done = doctor(*QUICK, "--json", "--hostfile", file, path=ssh)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    failed = {
        (one["name"], *one["hosts"]): one["seen"] for one in report["checks"] if one["state"] == "failure"
    }
    assert failed == {
        ("hosts", "dead"): "cannot be reached: ssh: connect to host dead port 22: Connection refused",
        (
            "same versions",
            "old",
        ): f"psutil 1.0, here {report['facts']['one']['identity']['packages']['psutil']}",
        ("barrier",): "no ranks were started: not every host can be used",
    }
    assert report["facts"]["dead"] is None


def test_a_host_that_never_answers(tmp_path, monkeypatch):
    program = tmp_path / "ssh"
    program.write_text("#!/bin/bash\nsleep 300 & wait\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(hosts, "_REACH_S", 1.0)
    listed = [hosts.Host("far", 1)]
    hosts.examine(listed, {})
    assert listed[0].facts is None
    assert listed[0].checks[0].seen == "far: no answer within 1 s"


def started(tmp_path, fault, **how):
    """Run two ranks of which the second does something else, and return the first check of them."""
    file = tmp_path / "worker.py"
    file.write_text(WORKER.format(repository=str(REPOSITORY), fault=fault))
    place = ranks.Place("", 2)
    port = network.free_port()
    ended = ranks.run([place], "127.0.0.1", port, on_gpu=False, worker=(sys.executable, str(file)), **how)
    facts = {"gpus": [], "joined": {}, "nvlink_bytes_s": [], "infiniband": [], "interfaces": []}
    checks = ranks.judge(ended, [facts], on_gpu=False, tcp_only=False)
    assert all(rank.process.poll() is not None for rank in ended), "nothing is left"
    return {one.name: one for one in checks}


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        # Ranks met, then one does not come to the barrier.
        (
            "instead(worker, 'wait_for_all', lambda store, name, *_: name == 'barrier' and time.sleep(300))",
            "did not come: rank 1, last seen at 'store'",
        ),
        # It comes, and then hangs inside a collective, where the other runs into its limit.
        ("instead(dist, 'all_reduce', lambda *_: time.sleep(300))", "rank 1, stuck after 'process group'"),
        # The kernel kills it.
        (
            "instead(dist, 'init_process_group', lambda *_: os.kill(os.getpid(), signal.SIGKILL))",
            "rank 1 died by signal 9 after 'barrier'",
        ),
    ],
    ids=["late", "stuck", "killed"],
)
def test_a_rank_that_misbehaves_is_named_within_the_limit(tmp_path, fault, says):
    found = started(tmp_path, fault, start_s=60.0, limit_s=3.0)
    assert list(found) == ["barrier"]
    assert (found["barrier"].state, says in found["barrier"].seen) == ("failure", True), found


def test_a_clock_that_is_off_is_named(tmp_path):
    found = started(tmp_path, "worker.now = lambda: time.time() + 5")
    assert found["barrier"].state == found["all-reduce bandwidth"].state == "ok"
    assert found["clocks"].state == "warning"
    assert re.match(r"rank 1 is (5,00|4,99)\d\.\d ms ahead of rank 0", found["clocks"].seen), found[
        "clocks"
    ].seen
