"""The doctor's checks, each with a machine that is well and one that is not."""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from filelock import FileLock
from running import QUICKSTART, REPOSITORY, tiny_recipe

from dstrain import doctor, ops
from dstrain.doctor import (
    check,
    disk,
    gpu,
    hosts,
    hub,
    links,
    machine,
    nccl,
    network,
    ranks,
    recipe,
    tracking,
)
from dstrain.doctor import worker as one_rank
from dstrain.doctor.check import Check, failure, guarded, ok, table, warning
from dstrain.errors import UserError
from dstrain.hosts import ssh_command

GIB = 2**30


def only(checks) -> Check:
    """The one check of a list, or the check itself."""
    if isinstance(checks, Check):
        return checks
    assert len(checks) == 1, checks
    return checks[0]


def state(checks) -> str:
    return only(checks).state


# ---- The table, and checks that go wrong themselves.


def test_the_table_has_states_and_remedies_within_its_width():
    long = "word " * 60
    checks = [ok("python", "3.11"), warning("disk", long, "make room"), failure("a longer name", "bad", long)]
    lines = table(checks).splitlines()
    assert max(map(len, lines)) <= 110
    assert lines[0] == "ok       python         3.11"
    assert lines[1].startswith("warning  disk           word word")
    assert lines[2].startswith(" " * 24 + "word"), "what goes on stands under what it goes on from"
    start = lines.index("what to do")
    assert lines[start + 1].startswith("a longer name  word"), "failures come first"
    assert "disk           make room" in lines
    assert lines[-1] == "1 ok, 1 warning, 1 failure"
    assert "what to do" not in table(checks[:1])


def test_a_check_that_crashes_or_hangs_is_a_failure_of_its_own():
    crashed = only(guarded("x", lambda: [][1]))
    assert (crashed.state, crashed.seen) == ("failure", "IndexError: list index out of range")
    left = only(guarded("x", lambda: sys.exit(3)))
    assert (left.state, left.seen) == ("failure", "SystemExit: 3")
    refused = only(guarded("x", lambda: (_ for _ in ()).throw(UserError("a.yaml: wrong"))))
    assert (refused.state, refused.seen) == ("failure", "a.yaml: wrong")
    gone = threading.Event()
    hung = only(guarded("x", lambda: gone.wait(60), limit_s=0.1))
    gone.set()
    assert (hung.state, hung.seen) == ("failure", "no answer within 0 s")
    assert guarded("x", lambda: [ok("a", "1"), ok("b", "2")]) == [ok("a", "1"), ok("b", "2")]


def test_json_comes_back_as_it_went():
    checks = [replace(warning("a", "b", "c"), hosts=("h1", "h2")), ok("d", "e")]
    assert check.from_json(json.loads(json.dumps(check.as_json(checks)))) == checks
    assert doctor.Report(checks, {}).status == 0
    assert doctor.Report([*checks, failure("f", "g", "h")], {}).status == 1


def test_the_same_on_several_hosts_is_one_line():
    same = warning("disk", "full", "make room")
    merged = check.on_hosts([("a", same), ("b", ok("disk", "fine")), ("c", same)])
    assert [(one.state, one.hosts) for one in merged] == [("warning", ("a", "c")), ("ok", ("b",))]
    many = check.on_hosts([(f"n{i}", same) for i in range(9)])
    assert "n0, n1, n2, n3 and 5 more: full" in table(many)


# ---- Machine.


def test_python_versions():
    assert state(machine.python((3, 11, 2))) == "ok"
    assert state(machine.python((3, 12, 0))) == "warning"
    assert state(machine.python((3, 10, 9))) == "failure"


def test_packages_against_the_pins(tmp_path, monkeypatch):
    file = tmp_path / "requirements.txt"
    installed = machine.installed(["pydantic"])["pydantic"]
    file.write_text(f"# the set\npydantic=={installed}  # the schema\n")
    assert only(machine.packages(file)) == ok(
        "packages", "the 1 of requirements.txt, in their tested versions"
    )
    file.write_text("pydantic==0.0.1\n")
    other = only(machine.packages(file))
    assert (other.state, f"pydantic {installed} (tested: 0.0.1)" in other.seen) == ("warning", True)
    file.write_text(f"pydantic=={installed}\nnone-such-package==1.0\n")
    assert only(machine.packages(file)).seen == "missing: none-such-package"
    assert state(machine.packages(file)) == "failure"
    # The build that an index has for this machine is the tested one.
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0+cu128")
    file.write_text("torch==2.13.0\n")
    assert state(machine.packages(file)) == "ok"


def test_a_package_that_training_does_without_is_a_warning(tmp_path, monkeypatch):
    file = tmp_path / "requirements.txt"
    file.write_text("wandb==1.0\n")
    monkeypatch.setattr(machine, "installed", lambda names: dict.fromkeys(names))
    assert only(machine.packages(file)).seen == "missing: wandb; training does without"
    assert state(machine.packages(file)) == "warning"


def test_build_tools(monkeypatch):
    assert state(machine.build_tools(needs_libaio=False)) == "ok"
    monkeypatch.setattr(ops, "has_libaio", lambda: False)
    assert state(machine.build_tools(needs_libaio=False)) == "ok"
    lacking = machine.build_tools(needs_libaio=True)
    assert (lacking.state, lacking.remedy) == ("failure", "install the packages libaio-dev")
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    bare = machine.build_tools(needs_libaio=False)
    assert (bare.state, bare.remedy) == ("failure", "install the packages g++ ninja-build")
    assert bare.seen.startswith("no g++, no ninja")


def test_ops_and_their_locks(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = tmp_path / "cpu_adam"
    command = "python -m dstrain doctor --build-ops"
    missing = only(machine.compiled_ops(["cpu_adam"], command))
    assert missing == warning("ops", "cpu_adam: missing", f"built at the first start, or now: {command}")
    folder.mkdir()
    (folder / "lock").touch()
    stale = only(machine.compiled_ops(["cpu_adam"], command))
    assert (stale.state, stale.seen) == ("warning", "cpu_adam: locked by a build that was stopped")
    with FileLock(tmp_path / "cpu_adam.dstrain.lock"):
        assert only(machine.compiled_ops(["cpu_adam"], command)).seen == "cpu_adam: being built"
    (folder / "cpu_adam.so").write_bytes(b"ELF")
    (folder / "dstrain.json").write_text(json.dumps(ops._stamp()))
    assert only(machine.compiled_ops(["cpu_adam"], command)) == ok("ops", f"cpu_adam ready in {tmp_path}")
    (folder / "dstrain.json").write_text(json.dumps(ops._stamp() | {"torch": "1.0"}))
    assert only(machine.compiled_ops(["cpu_adam"], command)).seen == "cpu_adam: built for another torch"
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert state(machine.compiled_ops(["cpu_adam"], command)) == "failure"
    assert state(machine.compiled_ops([], command)) == "ok"


def test_an_op_cache_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    monkeypatch.setattr("os.access", lambda path, mode: not str(path).startswith(str(tmp_path)))
    checks = machine.compiled_ops(["cpu_adam"], "build")
    assert [(one.name, one.state) for one in checks] == [("ops", "warning"), ("op cache", "failure")]


def test_processor(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr("os.getloadavg", lambda: (1.0, 1.0, 1.0))
    monkeypatch.setattr(machine, "_cgroup", lambda name: None)
    assert state(machine.processor(8, True)) == "ok"
    assert state(machine.processor(9, True)) == "warning"
    monkeypatch.setattr(machine, "_cgroup", lambda name: "200000 100000")  # a container's share: two cores
    assert machine.processor(2, True).seen.startswith("2 cores")
    assert state(machine.processor(4, True)) == "warning"
    monkeypatch.setattr("os.getloadavg", lambda: (30.0, 1.0, 1.0))
    assert state(machine.processor(1, True)) == "warning"
    assert state(machine.processor(1, False)) == "ok", "GPUs do the work"


def test_host_memory(monkeypatch):
    def has(available_gib, limit=None, used=0):
        there = {"memory.max": limit, "memory.current": used}
        monkeypatch.setattr(
            machine, "_cgroup", lambda name: None if there[name] is None else str(there[name])
        )
        memory = SimpleNamespace(total=64 * GIB, available=available_gib * GIB)
        monkeypatch.setattr("psutil.virtual_memory", lambda: memory)

    has(60)
    assert machine.host_memory(None).seen == "60.0 of 64.0 GiB free"
    assert state(machine.host_memory(30 * GIB, "states")) == "ok"
    assert state(machine.host_memory(61 * GIB, "states")) == "failure"
    has(3)
    assert state(machine.host_memory(None)) == "warning"
    has(60, limit=8 * GIB, used=1 * GIB)  # a container's limit counts
    assert machine.host_memory(None).seen == "7.0 of 8.0 GiB free"
    assert state(machine.host_memory(30 * GIB, "states")) == "failure"
    has(60, limit="max")
    assert machine.host_memory(None).seen == "60.0 of 64.0 GiB free"


def test_shared_memory(tmp_path, monkeypatch):
    def has(free):
        monkeypatch.setattr("psutil.disk_usage", lambda path: SimpleNamespace(free=free, total=64 << 20))

    has(64 << 20)  # what a container gets unless told otherwise
    assert state(machine.shared_memory(2, True, tmp_path)) == "failure"
    assert state(machine.shared_memory(8, False, tmp_path)) == "warning"
    has(8 * GIB)
    assert state(machine.shared_memory(2, True, tmp_path)) == "ok"
    assert state(machine.shared_memory(8, False, tmp_path)) == "ok"
    left = tmp_path / "deepspeed_allreduce_buffer_0_127.0.0.1_29500_0"
    left.write_bytes(b"x")
    assert len(machine.shared_memory(2, True, tmp_path)) == 1, "a run may be about to unlink it"
    os.utime(left, (time.time() - 3600, time.time() - 3600))
    assert machine.shared_memory(2, True, tmp_path)[1].seen == "1 buffers of runs that died, 0.00 GiB"
    assert state(machine.shared_memory(2, True, tmp_path / "none")) == "failure"


def test_locked_memory(monkeypatch):
    monkeypatch.setattr(machine, "_may_lock_anything", lambda: False)
    few, endless = 8 << 20, resource.RLIM_INFINITY
    assert state(machine.locked_memory("InfiniBand pins", (endless, endless))) == "ok"
    assert state(machine.locked_memory(None, (few, few))) == "ok"
    assert machine.locked_memory("InfiniBand pins", (few, endless)).remedy == "ulimit -l unlimited"
    assert "limits.conf" in machine.locked_memory("offload pins", (few, few)).remedy
    assert state(machine.locked_memory("offload pins", (few, few))) == "warning"
    monkeypatch.setattr(machine, "_may_lock_anything", lambda: True)
    assert state(machine.locked_memory("offload pins", (few, few))) == "ok"


# ---- GPUs.

H100 = "0, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 4, 9.0, 5, 16\n"
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tNV18\tPIX\t0-55\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tNV18\tSYS\t0-55\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tNV18\tSYS\t56-111\t1\t\tN/A
GPU3\tNV18\tNV18\tNV18\t X \tSYS\t56-111\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
"""
NVLINK = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
\t Link 2: <inactive>
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)
\t Link 0: 26.562 GB/s
"""


def gpus(count=1, **changes):
    (one,) = gpu.parse_gpus(H100)
    return [replace(one, index=index, **changes) for index in range(count)]


def test_what_nvidia_smi_prints_is_read():
    text = H100 + "1, Tesla V100-SXM2-16GB, 535.1, 16384, [N/A], 7.0, [N/A], [N/A]\nsome warning\n"
    first, second = gpu.parse_gpus(text)
    assert (first.name, first.memory_mib, first.capability, first.pcie_gen, first.pcie_lanes) == (
        *("NVIDIA H100 80GB HBM3", 81559.0, 9.0, 5, 16),
    )
    assert (second.capability, second.used_mib, second.pcie_gen) == (7.0, 0.0, None)
    assert gpu.parse_gpus("") == []
    line = "| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15   CUDA Version: 12.4     |"
    assert gpu.parse_cuda(line) == "12.4"
    assert gpu.parse_cuda("NVIDIA-SMI has failed") is None
    joined = gpu.parse_topology(TOPOLOGY)
    assert len(joined) == 6
    assert set(joined.values()) == {"NV18"}
    pcie = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPHB\t0-7\nGPU1\tPHB\t X \t0-7\n"
    assert gpu.parse_topology(pcie) == {(0, 1): "PHB"}
    assert gpu.parse_topology("") == {}
    assert gpu.parse_nvlink(NVLINK) == {0: pytest.approx(53.124e9), 1: pytest.approx(26.562e9)}


def test_facts_come_from_the_real_program(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/bash\ncase $1 in\n--query-gpu=*) printf '%s' '" + H100 + H100.replace("0,", "1,", 1) + "';;\n"
        "topo) printf 'x\\tGPU0\\tGPU1\\nGPU0\\t X \\tSYS\\nGPU1\\tSYS\\t X \\n' | sed 's/^x//';;\n*) exit 9;;\nesac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = gpu.facts()
    assert [one["index"] for one in found["gpus"]] == [0, 1]
    assert found["joined"] == {"0-1": "SYS"}
    assert found["nvlink_bytes_s"] == []
    assert gpu.is_broken(), "plain nvidia-smi fails here"
    monkeypatch.setenv("PATH", "")
    assert gpu.facts() == {"gpus": [], "joined": {}, "nvlink_bytes_s": []}
    assert not gpu.is_broken()


def test_driver():
    says = {"cuda": "12.8", "available": True, "why": "", "count": 1, "archs": ["sm_80", "sm_90"]}
    assert only(gpu.driver([], None, says, False)).seen.startswith("torch finds 1 GPUs")
    assert "runs on the CPU" in only(gpu.driver([], None, says | {"available": False}, False)).seen
    assert state(gpu.driver([], None, says, True)) == "failure"
    assert state(gpu.driver(gpus(), "12.8", says, False)) == "ok"
    cpu_build = only(gpu.driver(gpus(), "12.8", says | {"cuda": None}, False))
    assert (cpu_build.state, "CUDA build" in cpu_build.remedy) == ("failure", True)
    old = {"available": False, "why": "The NVIDIA driver on your system is too old (found version 11040)."}
    refused = only(gpu.driver(gpus(), "11.4", says | old, False))
    assert (refused.state, refused.remedy) == ("failure", "install a newer driver")
    assert "too old" in refused.seen
    checks = gpu.driver(gpus(capability=6.1), "12.8", says, False)
    assert [one.state for one in checks] == ["ok", "failure"]
    assert "no code for compute capability 6.1" in checks[1].seen
    assert gpu._has_kernels(8.6, ["sm_80"])
    assert gpu._has_kernels(12.0, ["compute_90"])
    assert not gpu._has_kernels(10.0, ["sm_90"])


def test_how_many_gpus_ranks_find():
    assert gpu.usable(gpus(4), {}) == 4
    assert gpu.usable(gpus(4), {"CUDA_VISIBLE_DEVICES": "1,3"}) == 2
    assert gpu.usable(gpus(4), {"DS_ACCELERATOR": "cpu"}) == 0
    assert gpu.usable([], {}) == 0


def test_gpu_memory_and_what_is_hidden():
    assert only(gpu.memory(gpus(8), None, {})).seen == "8 x NVIDIA H100 80GB HBM3, 79.6 GiB; free"
    assert gpu.memory([], None, {}) == []
    assert state(gpu.memory(gpus(2), 70 * GIB, {})) == "ok"
    assert state(gpu.memory(gpus(2), 90 * GIB, {})) == "failure"
    busy = gpus(1, used_mib=40_000.0)
    assert only(gpu.memory(busy, None, {})).seen == "in use by others: GPU 0: 39.1 GiB"
    mixed = [*gpus(1), replace(gpus()[0], index=1, name="NVIDIA A100", memory_mib=40960.0)]
    assert only(gpu.memory(mixed, None, {})).seen.startswith("unlike devices")
    assert state(gpu.memory(gpus(2), None, {"CUDA_VISIBLE_DEVICES": "0,1"})) == "ok"
    assert state(gpu.memory(gpus(2), None, {"CUDA_VISIBLE_DEVICES": "1,2"})) == "failure"
    assert state(gpu.memory(gpus(2), None, {"CUDA_VISIBLE_DEVICES": ""})) == "failure"


@pytest.mark.parametrize(
    ("capability", "asked", "expected"),
    [
        (9.0, "bf16", "ok"),
        (7.0, "bf16", "failure"),
        (7.0, "bf16 autocast", "failure"),
        (7.0, "fp16", "ok"),
        (6.1, "fp16", "warning"),
        (6.1, "fp32", "ok"),
        (7.0, None, "ok"),
        (None, "fp16", "failure"),
        (None, "bf16", "ok"),
        (None, None, "ok"),
    ],
)
def test_precision(capability, asked, expected):
    devices = [] if capability is None else gpus(1, capability=capability)
    assert state(gpu.precision(devices, asked)) == expected


def test_topology():
    assert gpu.topology({}, 1) == []
    assert state(gpu.topology({}, 2)) == "warning"
    assert only(gpu.topology({"0-1": "NV18"}, 2)).seen == "pairs of GPUs: 1 NV18"
    assert state(gpu.topology({"0-1": "NV4", "0-2": "SYS", "1-2": "SYS"}, 3)) == "warning"
    assert state(gpu.topology({"0-1": "PHB"}, 2)) == "ok"


# ---- Disks.


def test_space(tmp_path, monkeypatch):
    def has(free_gib, kind="ext4"):
        usage = SimpleNamespace(free=free_gib * GIB, total=100 * GIB)
        monkeypatch.setattr("psutil.disk_usage", lambda path: usage)
        monkeypatch.setattr(disk, "file_system", lambda path: kind)

    folder = tmp_path / "not" / "there"
    has(50)
    assert disk.space("output disk", folder, "output_dir").seen == f"{folder}: 50 of 100 GiB free (ext4)"
    assert state(disk.space("x", folder, "output_dir", 40 * GIB, "checkpoints")) == "ok"
    assert state(disk.space("x", folder, "output_dir", 60 * GIB, "checkpoints")) == "failure"
    has(5)
    assert state(disk.space("x", folder, "output_dir")) == "warning"
    has(0.5)
    assert state(disk.space("x", folder, "output_dir")) == "failure"
    has(50, "tmpfs")
    assert state(disk.space("x", folder, "output_dir")) == "warning"
    (tmp_path / "file").touch()
    wrong = disk.space("x", tmp_path / "file" / "run", "output_dir")
    assert (wrong.state, wrong.remedy) == ("failure", "choose another output_dir")
    assert not folder.exists()


def test_speed_is_measured_and_nothing_is_left(tmp_path, monkeypatch):
    written = []
    original = os.write
    monkeypatch.setattr(
        "os.write", lambda descriptor, data: written.append(original(descriptor, data)) or written[-1]
    )
    speed = disk.measure(tmp_path, size=16 << 20)
    assert sum(written) == 16 << 20
    assert speed.write > 0 and speed.read > 0
    assert list(tmp_path.iterdir()) == []
    # A disk that is full in the middle leaves nothing either.
    monkeypatch.setattr(
        "os.write", lambda descriptor, data: (_ for _ in ()).throw(OSError(28, "No space left"))
    )
    with pytest.raises(OSError):
        disk.measure(tmp_path, size=16 << 20)
    assert list(tmp_path.iterdir()) == []


def test_the_file_system_of_a_path():
    assert disk.file_system(Path("/proc")) == "proc"


def test_nvme(tmp_path, monkeypatch):
    def gives(write, read, kind="xfs"):
        monkeypatch.setattr(disk, "measure", lambda folder: disk.Speed(write, read, True))
        monkeypatch.setattr(disk, "file_system", lambda path: kind)
        usage = SimpleNamespace(free=500 * GIB, total=1000 * GIB)
        monkeypatch.setattr("psutil.disk_usage", lambda path: usage)

    gives(2.5e9, 5e9)
    good = only(disk.nvme(tmp_path))
    assert (good.state, "writes 2.50 GB/s, reads 5.00 GB/s" in good.seen) == ("ok", True)
    gives(0.2e9, 5e9)
    assert state(disk.nvme(tmp_path)) == "warning"
    gives(2.5e9, 0.3e9)
    assert state(disk.nvme(tmp_path)) == "warning"
    gives(2.5e9, 5e9, "nfs4")
    assert "network file system" in only(disk.nvme(tmp_path)).seen
    assert only(disk.nvme(tmp_path / "none")).seen == f"{tmp_path / 'none'}: no such folder"
    assert state(disk.nvme(tmp_path / "none")) == "failure"


# ---- Network.

LO = network.Interface("lo", ("127.0.0.1", "::1"), True, None, True)
ETH = network.Interface("eth0", ("10.0.0.5", "fe80::1"), True, 25_000, False)
DOWN = network.Interface("eth1", (), False, None, False)
DOCKER = network.Interface("docker0", ("172.17.0.1",), True, None, True)
ALL = [LO, ETH, DOWN, DOCKER]


def test_interfaces(tmp_path):
    assert network.describe(ALL).seen == "eth0 10.0.0.5 25 Gb/s; docker0 172.17.0.1; down: eth1"
    assert state(network.describe([LO])) == "warning"
    assert any(one.is_loopback for one in network.interfaces())
    assert (ETH.is_inner, DOCKER.is_inner, LO.is_inner) == (False, True, True)
    for name, speed, expected in (
        ("a", "25000", 25000),
        ("b", "-1", None),
        ("c", None, None),
        ("d", "x", None),
    ):
        (tmp_path / name / "device").mkdir(parents=True)
        if speed:
            (tmp_path / name / "speed").write_text(f"{speed}\n")
        assert network.link_mbps(tmp_path / name) == expected
    (tmp_path / "veth").mkdir()
    (tmp_path / "veth" / "speed").write_text("10000\n")
    assert network.link_mbps(tmp_path / "veth") is None


@pytest.mark.parametrize(
    ("address", "count", "expected", "says"),
    [
        (None, 1, "ok", "not set"),
        ("127.0.0.1", 1, "ok", "this host alone"),
        ("::1", 1, "ok", "this host alone"),
        ("127.0.0.1", 2, "failure", "2 hosts cannot meet there"),
        ("::1", 4, "failure", "4 hosts cannot meet there"),
        ("localhost", 2, "failure", "is loopback"),
        ("10.0.0.5", 2, "ok", "an address of this host"),
        ("[::1]", 1, "warning", "brackets"),
        ("10.0.0.5:29500", 1, "failure", "has a port"),
        ("", 1, "failure", "no address"),
        (" 10.0.0.5", 1, "failure", "no address"),
        ("no-such-host.invalid", 1, "failure", "cannot be resolved"),
        ("300.1.2.3", 1, "failure", "cannot be resolved"),
        ("a" * 70 + ".example", 1, "failure", "cannot be resolved"),
        ("fe80::2", 1, "failure", "link-local without its interface"),
    ],
)
def test_master_address(address, count, expected, says):
    environment = {} if address is None else {"MASTER_ADDR": address}
    found = only(network.master_address(environment, ALL, count))
    assert (found.state, says in found.seen) == (expected, True), found


def test_a_name_server_that_does_not_answer(monkeypatch):
    gone = threading.Event()
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: gone.wait(60))
    with pytest.raises(OSError, match="no answer within 0 s"):
        network.resolve("far.example", limit_s=0.1)
    gone.set()


def test_an_address_of_another_host_is_asked(monkeypatch):
    answers = {"reason": None}
    monkeypatch.setattr(network, "_reach", lambda address, port: answers["reason"])
    environment = {"MASTER_ADDR": "10.9.9.9", "MASTER_PORT": "29500"}
    assert only(network.master_address(environment, ALL)).seen == "10.9.9.9, another host, which answers"
    answers["reason"] = "no answer within 3 s"
    assert state(network.master_address(environment, ALL)) == "failure"


def test_a_refused_connection_is_an_answer(monkeypatch):
    port = network.free_port()
    assert network._reach("127.0.0.1", port) is None
    with socket.create_server(("127.0.0.1", port)):
        assert network._reach("127.0.0.1", port) is None

    def fails(error):
        monkeypatch.setattr("socket.create_connection", lambda *_, **__: (_ for _ in ()).throw(error))
        return network._reach("10.9.9.9", port)

    assert fails(TimeoutError("timed out")) == "no answer within 3 s"
    assert fails(OSError(113, "No route to host")) == "no route to host"


def test_master_port(monkeypatch):
    free = network.free_port()
    assert network.master_port({"MASTER_PORT": str(free)}, ALL).seen == f"{free}, free"
    with socket.create_server(("127.0.0.1", free)):
        taken = network.master_port({"MASTER_PORT": str(free)}, ALL)
        assert taken.state == "failure"
        assert f"(process {os.getpid()})" in taken.seen
        elsewhere = {"MASTER_PORT": str(free), "MASTER_ADDR": "10.9.9.9"}
        assert network.master_port(elsewhere, ALL).seen == f"{free}, on another host"
        monkeypatch.setattr(network, "DEFAULT_PORT", free)
        assert network.master_port({}, ALL).state == "warning", "launchers can be told to take another"
    for wrong in ("", "x", "0", "65536", "-1", "29500.5"):
        assert network.master_port({"MASTER_PORT": wrong}, ALL).state == "failure", wrong
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert network.master_port({"MASTER_PORT": "80"}, ALL).state == "failure"


def test_launcher_variables_left_in_the_shell():
    assert network.launcher_variables({}) == []
    left = only(network.launcher_variables({"RANK": "1", "WORLD_SIZE": "2"}))
    assert (left.state, left.seen.startswith("RANK=1 WORLD_SIZE=2 set")) == ("warning", True)


def test_gloo_address(monkeypatch):
    named = {"addresses": ["127.0.1.1"]}
    monkeypatch.setattr(network, "resolve", lambda host: named["addresses"])
    assert "takes the interface" in only(network.gloo_address({}, ALL, 2)).seen
    wrong = only(network.gloo_address({}, [LO, DOCKER], 2))
    assert (wrong.state, "GLOO_SOCKET_IFNAME" in wrong.remedy) == ("warning", True)
    assert network.gloo_address({}, ALL, 1) == []
    assert network.gloo_address({"GLOO_SOCKET_IFNAME": "eth0"}, ALL, 2) == []
    named["addresses"] = ["10.0.0.5"]
    assert state(network.gloo_address({}, ALL, 2)) == "ok"


def ib_tree(root, *ports):
    for device, port, status, physical, rate in ports:
        folder = root / device / "ports" / str(port)
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"{status}\n")
        (folder / "phys_state").write_text(f"{physical}\n")
        (folder / "rate").write_text(f"{rate}\n")
        (folder / "link_layer").write_text("InfiniBand\n")
    return network.infiniband_ports(root)


def test_infiniband(tmp_path):
    assert only(network.infiniband(network.infiniband_ports(tmp_path / "none"))).seen == "no adapter"
    up = ("mlx5_0", 1, "4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)")
    assert (
        only(network.infiniband(ib_tree(tmp_path / "a", up))).seen == "active: mlx5_0:1 400 Gb/s InfiniBand"
    )
    down = ("mlx5_1", 1, "1: DOWN", "3: Disabled", "10 Gb/sec (4X SDR)")
    mixed = only(network.infiniband(ib_tree(tmp_path / "b", up, down)))
    assert (mixed.state, mixed.seen.endswith("not: mlx5_1:1 DOWN (Disabled)")) == ("warning", True)
    waiting = ("mlx5_0", 1, "2: INIT", "5: LinkUp", "400 Gb/sec (4X NDR)")
    alone = only(network.infiniband(ib_tree(tmp_path / "c", waiting)))
    assert alone.seen.startswith("no link: mlx5_0:1 INIT")
    assert "subnet manager" in alone.remedy


MACHINE = {
    "gpus": [{"capability": 9.0}, {"capability": 9.0}],
    "joined": {"0-1": "NV18"},
    "infiniband": [{"device": "mlx5_0", "state": "ACTIVE", "gbps": 400.0}],
}
PCIE = MACHINE | {"gpus": [{"capability": 8.0}] * 2, "joined": {"0-1": "PHB"}, "infiniband": []}


@pytest.mark.parametrize(
    ("name", "value", "on", "expected", "says"),
    [
        ("NCCL_ALGO", "Ring", MACHINE, "ok", "only rings: best for large sums"),
        ("NCCL_ALGO", "^Tree", MACHINE, "ok", "no trees"),
        ("NCCL_ALGO", "Ring,Tree", MACHINE, "ok", "algorithms that may be used"),
        ("NCCL_ALGO", "allreduce:tree;broadcast:ring", MACHINE, "ok", "algorithms"),
        ("NCCL_ALGO", "Rnig", MACHINE, "failure", "did you mean 'ring'?"),
        ("NCCL_ALGO", "", MACHINE, "failure", "names none"),
        ("NCCL_ALGO", "Tree", MACHINE, "warning", "leaves broadcast without an algorithm"),
        ("NCCL_ALGO", "NVLS,Ring", MACHINE, "ok", ""),
        ("NCCL_ALGO", "NVLS,Ring", PCIE, "failure", "Hopper"),
        ("NCCL_PROTO", "Simple", MACHINE, "ok", "only most bandwidth"),
        ("NCCL_PROTO", "LL", MACHINE, "warning", "quarter"),
        ("NCCL_PROTO", "LL128", PCIE, "warning", "wrong sums"),
        ("NCCL_PROTO", "LL128", MACHINE, "ok", "needs NVLink"),
        ("NCCL_PROTO", "LL256", MACHINE, "failure", "no such one"),
        ("NCCL_P2P_DISABLE", "1", MACHINE, "warning", "NVLink between GPUs lies idle"),
        ("NCCL_P2P_DISABLE", "1", PCIE, "warning", "PCIe between GPUs lies idle"),
        ("NCCL_P2P_DISABLE", "0", MACHINE, "ok", ""),
        ("NCCL_P2P_LEVEL", "LOC", MACHINE, "warning", "never talk directly"),
        ("NCCL_SHM_DISABLE", "1", PCIE, "warning", "through the network"),
        ("NCCL_SHM_DISABLE", "1", MACHINE, "ok", ""),
        ("NCCL_IB_DISABLE", "1", MACHINE, "warning", "400 Gb/s, lie idle"),
        ("NCCL_IB_DISABLE", "1", PCIE, "ok", "TCP instead"),
        ("NCCL_NET", "IB", PCIE, "failure", "no port is active"),
        ("NCCL_NET", "Socket", MACHINE, "warning", "lie idle"),
        ("NCCL_IB_HCA", "mlx5", MACHINE, "ok", "adapters"),
        ("NCCL_IB_HCA", "=mlx5_0:1", MACHINE, "ok", "adapters"),
        ("NCCL_IB_HCA", "=mlx5", MACHINE, "failure", "no adapter mlx5; there are: mlx5_0"),
        ("NCCL_IB_HCA", "^mlx5_9", MACHINE, "warning", "no adapter mlx5_9"),
        ("NCCL_NVLS_ENABLE", "1", PCIE, "warning", "cannot"),
        ("NCCL_DEBUG", "INFO", MACHINE, "warning", "hundreds of lines"),
        ("NCCL_DEBUG", "WARN", MACHINE, "ok", "what NCCL prints"),
        ("NCCL_ALOG", "Ring", MACHINE, "warning", "did you mean 'NCCL_ALGO'?"),
        ("NCCL_BLOCKING_WAIT", "1", MACHINE, "warning", "does nothing any more"),
        ("NCCL_COMM_ID", "10.0.0.1:5", MACHINE, "warning", "not at MASTER_ADDR"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", MACHINE, "warning", "for ever"),
    ],
)
def test_nccl_variables(name, value, on, expected, says):
    found = only(nccl.variables({name: value}, on))
    assert (found.state, says in found.seen) == (expected, True), found


def test_nccl_variables_do_nothing_on_a_cpu():
    found = only(nccl.variables({"NCCL_ALGO": "Rnig"}, {"gpus": [], "joined": {}, "infiniband": []}))
    assert (found.state, "no effect" in found.seen) == ("ok", True)
    assert "no NCCL_* variable is set" in only(nccl.variables({"PATH": "x"}, MACHINE)).seen


@pytest.mark.parametrize(
    ("name", "value", "count", "expected", "says"),
    [
        ("NCCL_SOCKET_IFNAME", "eth0", 2, "ok", "eth0 10.0.0.5"),
        ("NCCL_SOCKET_IFNAME", "eth", 2, "ok", "eth0 10.0.0.5"),
        ("NCCL_SOCKET_IFNAME", "=eth", 2, "failure", "no such interface"),
        ("NCCL_SOCKET_IFNAME", "eno1", 2, "failure", "there are: lo, eth0, docker0"),
        ("NCCL_SOCKET_IFNAME", "^lo,docker", 2, "ok", "eth0 10.0.0.5"),
        ("NCCL_SOCKET_IFNAME", "eth1", 1, "failure", "eth1 is down or has no address"),
        ("NCCL_SOCKET_IFNAME", "lo", 2, "failure", "other hosts cannot be reached"),
        ("NCCL_SOCKET_IFNAME", "lo", 1, "ok", "lo 127.0.0.1"),
        ("NCCL_SOCKET_IFNAME", "docker0", 2, "failure", "other hosts cannot be reached"),
        ("GLOO_SOCKET_IFNAME", "eth0", 2, "ok", "eth0"),
        ("GLOO_SOCKET_IFNAME", "eth", 2, "failure", "did you mean 'eth0'?"),
        ("GLOO_SOCKET_IFNAME", "eth0,eth7", 2, "failure", "no such interface"),
    ],
)
def test_socket_interfaces(name, value, count, expected, says):
    found = only(nccl.socket_interfaces({name: value}, ALL, count))
    assert (found.name, found.state, says in found.seen) == (name, expected, True), found


# ---- Ranks.


def host_facts(**changes):
    base = {
        "gpus": [],
        "joined": {},
        "nvlink_bytes_s": [],
        "infiniband": [],
        "interfaces": network.facts(ALL),
    }
    return base | changes


def eight(**changes):
    return host_facts(gpus=[vars(one) for one in gpus(2)], joined={"0-1": "NV18"}, **changes)


def test_what_a_link_should_give():
    ib = [
        {"device": "mlx5_0", "state": "ACTIVE", "gbps": 400.0},
        {"device": "x", "state": "DOWN", "gbps": 400.0},
    ]

    def between(hosts_, names, on_gpu, tcp_only=False):
        return links.between(hosts_, names, on_gpu=on_gpu, tcp_only=tcp_only)

    assert between([host_facts()], ["lo"], False).bytes_s is None
    nvlink = between([eight(nvlink_bytes_s=[450e9, 425e9])], ["lo"], True)
    assert (nvlink.kind, nvlink.bytes_s) == ("nvlink", 425e9)
    pcie = between([eight() | {"joined": {"0-1": "SYS"}}], ["lo"], True)
    assert (pcie.kind, pcie.bytes_s) == ("pcie", pytest.approx(63e9, rel=0.01))
    two = [eight(infiniband=ib), eight(infiniband=ib)]
    assert between(two, ["eth0", "eth0"], True).bytes_s == 50e9
    assert between(two, ["eth0", "eth0"], True, tcp_only=True).bytes_s == 25e9 / 8
    assert between([eight(infiniband=ib), eight()], ["eth0", "eth0"], True).kind == "ethernet"
    assert between([host_facts()] * 2, ["eth0", "eth0"], False).bytes_s == 25e9 / 8
    assert between([host_facts()] * 2, ["eth0", "docker0"], False).bytes_s is None
    assert links.bus_bandwidth(1e9, 0.5, 4) == (2e9, 3e9)


def ranks_of(count=2, several=False, status=0, **changes):
    base = {"barrier_s": 0.001, "small_s": 1e-4, "large_s": 0.1, "offset_s": 0.0, "uncertainty_s": 1e-4}
    base |= {"address": "10.0.0.5", "interface": "eth0"}
    made = []
    for number in range(count):
        name = f"h{number}" if several else ""
        made.append(ranks.Rank(number, name, None, at="done", result=base | changes, status=status))
    return made


def judged(ended, facts, on_gpu=False):
    return {one.name: one for one in ranks.judge(ended, facts, on_gpu=on_gpu, tcp_only=False)}


def test_speeds_are_compared_with_the_link():
    local = judged(ranks_of(), [host_facts()])
    assert {one.state for one in local.values()} == {"ok"}
    assert "0.67 GB/s bus" in local["all-reduce bandwidth"].seen, "64 MiB in 0.1 s"
    assert "nothing to compare it with" in local["all-reduce bandwidth"].seen
    # 25 Gb/s are 3.1 GB/s, of which half is expected.
    two = [host_facts()] * 2
    slow = judged(ranks_of(several=True), two)["all-reduce bandwidth"]
    assert (slow.state, "expected above 1.56 GB/s" in slow.seen) == ("warning", True)
    assert judged(ranks_of(several=True, large_s=0.03), two)["all-reduce bandwidth"].state == "ok"
    assert judged(ranks_of(several=True, small_s=0.01), two)["all-reduce latency"].state == "warning"
    assert judged(ranks_of(several=True, small_s=0.001), two)["all-reduce latency"].state == "ok"
    nvlink = [eight(nvlink_bytes_s=[450e9, 450e9])]
    assert judged(ranks_of(large_s=0.1), nvlink, True)["all-reduce bandwidth"].state == "warning"
    assert judged(ranks_of(large_s=0.003), nvlink, True)["all-reduce bandwidth"].state == "ok"


def test_clocks():
    two, ended = [host_facts()] * 2, ranks_of(several=True)
    ended[1].result |= {"offset_s": -3.0, "uncertainty_s": 0.01}
    wrong = judged(ended, two)["clocks"]
    assert (wrong.state, wrong.seen.startswith("rank 1 on h1 is 3,000.0 ms behind rank 0")) == (
        "warning",
        True,
    )
    ended[1].result |= {"offset_s": -3.0, "uncertainty_s": 2.5}
    assert judged(ended, two)["clocks"].state == "ok", "the round trip was too long to know"


def test_who_is_to_blame():
    def blamed(*ended):
        return ranks._what_is_missing(ended).seen

    def rank(number, at, **changes):
        return ranks.Rank(number, "n1" if number else "n0", None, at=at, **changes)

    waits = rank(0, "store", missing=[1])
    assert blamed(waits, rank(1, "start")) == "did not come: rank 1 on n1, last seen at 'start'"
    died = rank(1, "store", status=-9, last_words="Killed")
    assert blamed(waits, died) == "rank 1 on n1 died by signal 9 after 'store': Killed"
    timed_out = rank(0, "process group", error="RuntimeError: Timed out", status=1)
    assert blamed(timed_out, rank(1, "process group")).startswith("rank 1 on n1, stuck after 'process group'")
    first = rank(1, "barrier", error="OSError: x", error_at=1.0)
    timed_out.error_at = 2.0
    assert blamed(timed_out, first) == "rank 1 on n1 failed after 'barrier': OSError: x"
    refused = rank(1, "torch imported", error="DistNetworkError: timed out")
    assert blamed(waits, refused).endswith("last seen at 'torch imported': DistNetworkError: timed out")
    still = blamed(rank(0, "store"), rank(1, "start"))
    assert still == "nothing moved any more: rank 1 on n1, stuck after 'start'"


def test_a_barrier_with_a_limit_names_who_is_missing():
    import torch.distributed as dist

    store = dist.HashStore()
    others = [threading.Thread(target=one_rank.wait_for_all, args=(store, "b", n, 3, 0.5)) for n in (0, 2)]
    for thread in others:
        thread.start()
    began = time.monotonic()
    store.set("b/0", "here")
    assert one_rank.wait_for_all(store, "other", 0, 3, 0.3) == [1, 2]
    assert time.monotonic() - began < 5
    for thread in others:
        thread.join()
    assert one_rank.wait_for_all(store, "b", 1, 3, 5) == []


def test_clock_skew_is_measured_over_a_store(monkeypatch):
    import torch.distributed as dist

    assert one_rank.clock_offset(100.0, 105.5, 101.0) == 5.0
    store, found = dist.HashStore(), {}
    ahead = {"r0": 0.0, "r1": 7.0, "r2": -2.0}
    monkeypatch.setattr(one_rank, "now", lambda: time.time() + ahead[threading.current_thread().name])

    def one(rank):
        found[rank] = one_rank.measure_clock(store, rank, 3, 20.0)

    threads = [threading.Thread(target=one, args=(rank,), name=f"r{rank}") for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found[0] == (0.0, 0.0)
    for rank, offset in ((1, 7.0), (2, -2.0)):
        assert abs(found[rank][0] - offset) <= found[rank][1] + 0.001


# ---- Recipe.


def section(**changes):
    base = {"model_name_or_path": None, "tokenizer_name_or_path": None, "revision": None, "config": {}}
    base |= {
        "trust_remote_code": False,
        "chat_template": None,
        "add_tokens": (),
        "attn_implementation": "sdpa",
    }
    return base | changes


def source(path, **changes):
    base = {"path": str(path), "format": "text", "text_column": "text", "messages_column": "messages"}
    return base | {"prompt_column": "prompt", "completion_column": "completion"} | changes


def save_weights(folder, names=("model.safetensors",)):
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    for name in names:
        save_file({name: np.zeros(1000, np.float32)}, folder / name)
    return folder


def test_weight_files(tmp_path):
    folder = save_weights(tmp_path / "whole")
    assert state(recipe.weight_files(folder)) == "ok"
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    cut = recipe.weight_files(folder)
    assert (cut.state, str(file) in cut.seen) == ("failure", True)
    assert recipe.weight_files(tmp_path / "none").seen == f"{tmp_path / 'none'}: no such folder"
    shards = save_weights(tmp_path / "shards", ("a.safetensors", "b.safetensors"))
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "2 files" in recipe.weight_files(shards).seen
    (shards / "b.safetensors").unlink()
    assert state(recipe.weight_files(shards)) == "failure"
    (shards / "config.json").unlink()
    assert recipe.weight_files(shards).seen.endswith("holds no config.json")


def test_tokenizer_and_model(tmp_path):
    there = str(QUICKSTART / "tokenizer")
    assert recipe.tokenizer(section(tokenizer_name_or_path=there)).seen.endswith("4,096 tokens")
    gone = recipe.tokenizer(section(tokenizer_name_or_path=str(tmp_path / "none")))
    assert (gone.state, gone.seen) == ("failure", f"{tmp_path / 'none'}: no such folder")
    assert state(recipe.tokenizer(section())) == "failure"
    assert state(recipe.tokenizer(section(tokenizer_name_or_path=str(tmp_path)))) == "failure"
    assert state(recipe.model(section(config={"model_type": "llama"}))) == "ok"
    checks = recipe.model(section(config={}, attn_implementation="flash_attention_3"))
    assert checks[0].seen == "attn_implementation flash_attention_3: no package flash_attn_interface"


def test_data(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "x"}\n')
    assert state(recipe.data(source(file), "data.train")) == "ok"
    wrong = recipe.data(source(file, format="messages"), "data.train")
    assert (wrong.state, wrong.seen) == ("failure", f"{file}: no column 'messages'; the columns are: text")
    assert state(recipe.data(source(tmp_path / "b.jsonl"), "data.train")) == "failure"
    file.write_text("{broken\n")
    assert recipe.data(source(file), "data.train").seen.startswith(f"{file}:1: not valid JSON")
    file.write_text("")
    assert recipe.data(source(file), "data.train").seen == f"{file}: empty"


def test_hub_names_offline_and_in_the_cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = section(model_name_or_path="owner/name", tokenizer_name_or_path=str(QUICKSTART / "tokenizer"))
    offline = recipe.model(asked)[0]
    assert (offline.state, "HF_HUB_OFFLINE is set" in offline.seen) == ("failure", True)
    folder = tmp_path / "models--owner--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots").mkdir()
    save_weights(folder / "snapshots" / "abc")
    import huggingface_hub

    find = huggingface_hub.try_to_load_from_cache
    monkeypatch.setattr(
        huggingface_hub,
        "try_to_load_from_cache",
        lambda name, file, revision: find(name, file, tmp_path, revision),
    )
    assert recipe.model(asked) == [ok("model", "owner/name: in the Hub cache, offline")]
    (folder / "snapshots" / "abc" / "model.safetensors").unlink()
    assert recipe.model(asked)[0].seen.startswith("weights of owner/name is not in the Hub cache")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder / "snapshots" / "abc" / "model.safetensors.index.json").write_text(json.dumps(index))
    save_weights(folder / "snapshots" / "abc", ("a.safetensors",))
    assert recipe.model(asked)[0].state == "failure", "one of two"
    save_weights(folder / "snapshots" / "abc", ("b.safetensors",))
    assert recipe.model(asked)[0].state == "ok"
    assert hub.is_hub_name("owner/name")
    assert not hub.is_hub_name(str(tmp_path))


def test_the_hub_is_asked_and_may_refuse(monkeypatch):
    import httpx
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    response = httpx.Response(404, request=httpx.Request("GET", "https://hub.invalid"))
    answer = {"error": None}

    class Api:
        def model_info(self, name, **_):
            if answer["error"]:
                raise answer["error"]
            files = [SimpleNamespace(rfilename=n, size=2 * GIB) for n in ("config.json", "model.safetensors")]
            return SimpleNamespace(siblings=files, gated=False)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    there = hub.model("owner/none", None, ("config.json",))
    assert there.words == "owner/none: on the Hub, 2.00 GiB of weights to be downloaded"
    for error, says in (
        (RepositoryNotFoundError("x", response=response), "no such model on the Hub"),
        (GatedRepoError("x", response=response), "gated"),
        (OSError("Name or service not known"), "the Hub does not answer: Name or service not known"),
    ):
        answer["error"] = error
        assert says in hub.model("owner/none", None, ("config.json",)).problem


def test_bytes_of_the_model_states():
    def states(stage, precision="bf16", zero=None, on_cpu=False):
        return recipe.states_bytes(1000, stage, precision, 4, zero or {}, on_cpu=on_cpu)

    assert states(0) == (16_000, 0)
    assert states(1) == (2_000 + 2_000 + 3_000, 0)
    assert states(2) == (2_000 + 500 + 3_000, 0)
    assert states(3) == (4_000, 0)
    assert states(0, "fp32") == (16_000, 0)
    assert states(2, zero={"offload_optimizer": {"device": "cpu"}}) == (2_500, 3_000)
    nvme = {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "cpu"}}
    assert states(3, zero=nvme) == (500, 500)
    assert states(1, on_cpu=True) == (0, 7_000)


def test_a_recipe_as_a_whole(tmp_path, monkeypatch):
    file = tiny_recipe(tmp_path)
    checks, needs = recipe.examine(file, ["train.max_steps=3"], 2, 2)
    assert {one.state for one in checks} == {"ok"}, checks
    assert [one.name for one in checks] == [
        *("DeepSpeed JSON", "tokenizer", "model", "data", "data", "output folder")
    ]
    assert (needs.precision, needs.ops, needs.nvme_paths) == ("fp32", (), ())
    assert needs.checkpoint_bytes == 12 * needs.parameters * 3
    assert 4096 * 32 < needs.parameters < 4096 * 32 * 2
    assert not (tmp_path / "run").exists(), "nothing is written"
    # What can be told without the tokenizer is, and the lack is said once.
    offload = ["model.tokenizer_name_or_path=/none", "deepspeed=zero3_nvme.json"]
    checks, needs = recipe.examine(file, offload, 2, 2)
    by_name = {one.name: one.state for one in checks}
    assert (by_name["DeepSpeed JSON"], by_name["tokenizer"]) == ("warning", "failure")
    assert needs.nvme_paths == ("/local_nvme",)
    # Batch sizes that do not divide, a run of another recipe in the folder.
    checks, _ = recipe.examine(file, ["train.global_batch_size=3"], 2, 2)
    assert checks[0].state == "failure"
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    checks, _ = recipe.examine(file, [], 2, 2)
    assert [(one.name, one.state) for one in checks if one.state != "ok"] == [("output folder", "failure")]
    with pytest.raises(UserError, match="unknown key 'train.max_step'"):
        recipe.examine(file, ["train.max_step=3"], 2, 2)


# ---- W&B.


def test_wandb(monkeypatch, tmp_path):
    none = {"NETRC": str(tmp_path / "netrc")}
    reached = {"reason": None}
    monkeypatch.setattr(tracking, "_reach", lambda host, port, environment: reached["reason"])

    def seen(names=("wandb",), **variables):
        return tracking.wandb(names, none | variables)

    assert seen(()).seen == "not asked for (logging.report_to)"
    assert seen().state == "warning" and "will be offline" in seen().seen
    key = {"WANDB_API_KEY": "x" * 40}
    assert seen(**key).seen == "logged in, api.wandb.ai answers"
    assert "xxxx" not in seen(**key).seen
    reached["reason"] = "timed out"
    assert (seen(**key).state, "cannot be reached: timed out" in seen(**key).seen) == ("warning", True)
    assert seen(WANDB_MODE="offline").state == "ok"
    assert seen(WANDB_MODE="disabled").seen == "WANDB_MODE=disabled: off"
    assert seen(WANDB_MODE="ofline").state == "failure"
    assert seen(**key, WANDB_BASE_URL="wandb.local").state == "failure"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password y\n")
    (tmp_path / "netrc").chmod(0o600)
    reached["reason"] = None
    assert seen().state == "ok"


def test_a_server_is_reached_or_not():
    port = network.free_port()
    assert tracking._reach("127.0.0.1", port, {}) == "Connection refused"
    with socket.create_server(("127.0.0.1", port)):
        assert tracking._reach("127.0.0.1", port, {}) is None
        assert tracking._reach("none.invalid", 443, {"HTTPS_PROXY": f"http://127.0.0.1:{port}"}) is None


def test_unknown_trackers():
    assert state(tracking.trackers(("wnadb",))) == "failure"
    assert tracking.trackers(("wandb",)) == []
    assert only(tracking.trackers(("tensorboard",))).seen == "tensorboard"


# ---- Hosts.


def test_differences_between_hosts(tmp_path):
    recipe_file = tmp_path / "recipe.yaml"
    recipe_file.write_text("a: 1\n")
    here = hosts.identity(recipe_file)
    assert hosts.identity(tmp_path) == here, "a folder stands for its recipe.yaml"
    assert hosts.differences(here, here) == []
    packages = here["packages"]
    there = here | {"python": "3.10.1", "code": "x", "packages": packages | {"torch": "2.0.0", "numpy": None}}
    lines = [line for line, _ in hosts.differences(here, there)]
    assert lines == [
        f"Python 3.10.1, here {here['python']}",
        f"torch 2.0.0, here {packages['torch']}; numpy missing, here {packages['numpy']}",
        "another version of train.py or dstrain/ than here",
    ]
    recipe_file.write_text("a: 2\n")
    assert (
        hosts.differences(here, hosts.identity(recipe_file))[0][0]
        == "another recipe or DeepSpeed JSON than here"
    )
    again = hosts.identity(recipe_file)
    (tmp_path / "ds_config.json").write_text("{}")
    assert hosts.identity(recipe_file)["recipe"] != again["recipe"]


@pytest.mark.parametrize(
    ("code", "said", "seen", "remedy"),
    [
        (255, "ssh: connect to host n1 port 22: Connection refused", "Connection refused", "start sshd"),
        (255, "u@n1: Permission denied (publickey).", "Permission denied", "ssh-copy-id n1"),
        (255, "Host key verification failed.", "verification", "ssh-keyscan n1"),
        (255, "ssh: Could not resolve hostname n1: Name or service not known", "resolve", "hostfile"),
        (127, "env: '/x/python': No such file or directory", "No such file", "at the same paths"),
        (None, "", "no answer within 20 s", "ssh -o BatchMode=yes n1 true"),
    ],
)
def test_why_a_host_cannot_be_used(code, said, seen, remedy):
    one = hosts._unreached("n1", code, f"Warning: Permanently added 'n1'\n{said}\n", 20)
    assert one.state == "failure"
    assert seen in one.seen and remedy in one.remedy, one


def test_no_secret_is_forwarded(monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "secret-value")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    sent = hosts.forwarded()
    assert sent["NCCL_DEBUG"] == "WARN"
    assert "secret-value" not in sent.values()
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-p 2222 -i 'a key'")
    command = ssh_command("n1")
    assert command[-1] == "n1"
    assert command[5:-1] == ("-p", "2222", "-i", "a key")
    assert "BatchMode=yes" in command


def test_where_hosts_meet(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    first = hosts.Host("n1", 1, facts={"interfaces": network.facts([LO, DOCKER, ETH])})
    named = {"n1": ["127.0.1.1"]}
    monkeypatch.setattr(network, "resolve", lambda name: named[name])
    assert hosts.first_address(first) == "10.0.0.5", (
        "a name that is loopback at home, and no container's bridge"
    )
    both = network.Interface("eth2", ("10.1.0.5", "fd00::5"), True, None, False)
    first.facts = {"interfaces": network.facts([LO, ETH, both])}
    named["n1"] = ["10.1.0.5"]
    assert hosts.first_address(first) == "10.1.0.5"
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.9")
    assert hosts.first_address(first) == "10.0.0.9"


def test_no_ssh_on_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    listed = [hosts.Host("a", 1), hosts.Host("b", 1)]
    hosts.examine(listed, {})
    assert [only(host.checks).seen.startswith("FileNotFoundError") for host in listed] == [True, True]
    assert only(hosts.launcher_tools(2)).state == "warning"


def test_report_of_hosts():
    identity = {"python": "3.11.2", "packages": {"torch": "1"}, "code": "c", "recipe": None}
    facts = {"identity": identity, "gpus": [vars(one) for one in gpus(2)], "devices": 2}
    good = [hosts.Host(f"n{i}", 2, [ok("x", "y")], facts) for i in (1, 2)]
    lines = hosts.report(good, identity)
    assert [(one.name, one.state, one.hosts) for one in lines] == [
        ("hosts", "ok", ("n1", "n2")),
        ("same versions", "ok", ()),
    ]
    good[1].slots = 4
    good[1].facts = facts | {"identity": identity | {"code": "d"}}
    wrong = [one for one in hosts.report(good, identity) if one.state == "failure"]
    assert [(one.hosts, one.seen) for one in wrong] == [
        (("n2",), "slots=4, but 2 GPUs"),
        (("n2",), "another version of train.py or dstrain/ than here"),
    ]


# ---- The command line.


def test_mistakes_on_the_command_line(tmp_path):
    with pytest.raises(UserError, match="--skip netwrok: not one of .*; did you mean 'network'"):
        doctor.examine(None, [], None, None, ["netwrok"])
    with pytest.raises(UserError, match="'a.b=1': an override needs --config"):
        doctor.examine(None, ["a.b=1"], None, None, [])
    with pytest.raises(UserError, match="--ranks 0: at least 1"):
        doctor.examine(None, [], None, 0, [])
    (tmp_path / "hosts").write_text("a slots=1\n")
    with pytest.raises(UserError, match="--ranks and --hostfile"):
        doctor.examine(None, [], tmp_path / "hosts", 2, [])
    with pytest.raises(UserError, match="no such recipe"):
        doctor.examine(tmp_path / "none.yaml", [], None, None, [])


def test_a_broken_check_hides_no_other(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "processor", lambda *_: 1 / 0)
    monkeypatch.setattr(gpu, "facts", lambda: 1 / 0)
    monkeypatch.setattr(network, "interfaces", lambda: 1 / 0)
    monkeypatch.setattr(network, "infiniband_ports", lambda: 1 / 0)
    monkeypatch.setattr(recipe, "examine", lambda *_: 1 / 0)
    file = tiny_recipe(tmp_path)
    checks, facts = doctor.one_host(file, [], ranks=1, world=1, hosts=1, skip=[])
    by_name = {one.name: one for one in checks}
    assert by_name["processor"].seen == "ZeroDivisionError: division by zero"
    assert by_name["network"].seen == by_name["recipe"].seen == "ZeroDivisionError: division by zero"
    assert by_name["host memory"].seen
    assert facts["gpus"] == []


def test_one_rank_has_nobody_to_wait_for():
    skip = [name for name in doctor.GROUPS if name != "ranks"]
    report = doctor.examine(None, [], None, 1, skip)
    assert report.checks == [ok("barrier", "one rank: there is nobody to wait for")]


def test_a_process_in_the_way_is_ended():
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(100)"],
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    ranks._end(process)
    assert process.returncode == -signal.SIGKILL
    assert not psutil.pid_exists(process.pid)


# ---- Documentation.


def test_each_check_is_in_the_documentation():
    page = (REPOSITORY / "docs" / "doctor.md").read_text()
    documented = set(re.findall(r"(?m)^\| `([^`]+)` \|", page))
    written = "".join(file.read_text() for file in sorted(Path(REPOSITORY, "dstrain", "doctor").glob("*.py")))
    named = set(re.findall(r"\b(?:ok|warning|failure)\(\s*\"([^\"]+)\"", written))
    named |= set(re.findall(r"guarded\(\s*\"([^\"]+)\"", written)) - {"facts", "recipe"}
    assert named <= documented, named - documented
