"""Python, packages, build tools, ops, processor and memory of this host."""

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from dstrain import ops
from dstrain.doctor.check import Check, failure, ok, warning
from dstrain.errors import UserError
from dstrain.fingerprint import REPOSITORY

PYTHON = (3, 11)  # what the tests run with

# Packages without which train.py runs; all others of requirements.txt are imported by it.
_OPTIONAL = {"wandb", "tensorboard", "gguf", "ninja", "pytest", "ruff"}

_GIB = 2**30
_BUFFER_BYTES = 66 * 2**20  # DeepSpeed's for collectives in shared memory, a CPU rank
_NCCL_SHM_BYTES = 1 * _GIB  # NCCL's buffers, and those of tokenizing processes
_LEFTOVER_S = 600.0


def python(version: Sequence[int] = tuple(sys.version_info[:3])) -> Check:
    """Check the interpreter against the tested one."""
    seen = f"{'.'.join(map(str, version))}, {sys.executable}"
    tested = ".".join(map(str, PYTHON))
    if tuple(version[:2]) < PYTHON:
        return failure("python", seen, f"use Python {tested}: PYTHON=python{tested} ./launch/setup.sh")
    if tuple(version[:2]) != PYTHON:
        return warning(
            "python", seen, f"only Python {tested} is tested: ./launch/setup.sh makes .venv with it"
        )
    return ok("python", seen)


def pins(text: str) -> dict[str, str]:
    """Return the version of each package that a requirements.txt pins."""
    return dict(re.findall(r"(?m)^([A-Za-z0-9._-]+)==([^\s#]+)", text))


def installed(names: Sequence[str]) -> dict[str, str | None]:
    """Return the installed version of each package, without a local part such as `+cu128`, or None."""
    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def packages(requirements: Path = REPOSITORY / "requirements.txt") -> list[Check]:
    """Check the packages against the pinned set."""
    tested = pins(requirements.read_text(encoding="utf-8"))
    found = installed(list(tested))
    missing = [name for name, version in found.items() if version is None]
    needed = [name for name in missing if name not in _OPTIONAL]
    others = [
        f"{name} {v} (tested: {tested[name]})" for name, v in found.items() if v not in (None, tested[name])
    ]
    install = "pip install -r requirements.txt, or ./launch/setup.sh"
    checks = []
    if needed:
        checks.append(failure("packages", f"missing: {', '.join(needed)}", install))
    if len(missing) > len(needed):
        names = ", ".join(name for name in missing if name in _OPTIONAL)
        checks.append(warning("packages", f"missing: {names}; training does without", install))
    if others:
        checks.append(warning("packages", f"not the tested version: {', '.join(others)}", install))
    return checks or [ok("packages", f"the {len(tested)} of requirements.txt, in their tested versions")]


def libraries() -> list[Check]:
    """Import what training imports: a library that the system lacks shows here."""
    from dstrain import distributed

    names = distributed.versions().partition(", ")[2]  # Python has a line of its own
    checks = [ok("libraries", f"{names} import well")]
    try:
        distributed.prepare()  # quiets them
    except UserError as error:  # a launcher's variables that contradict each other
        checks.append(failure("environment", str(error), "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_SIZE"))
    return checks


def build_tools(needs_libaio: bool) -> Check:
    """Check compiler, ninja, Python's headers and libaio, which DeepSpeed's ops are built with."""
    import sysconfig

    beside = str(Path(sys.executable).parent)
    tools = {name: shutil.which(name) or shutil.which(name, path=beside) for name in ("g++", "ninja", "nvcc")}
    header = Path(sysconfig.get_path("include")) / "Python.h"
    libaio = ops.has_libaio() if tools["g++"] else False
    missing = {
        "g++": not tools["g++"],
        "ninja-build": not tools["ninja"],
        f"python{sys.version_info[0]}.{sys.version_info[1]}-dev": not header.is_file(),
        "libaio-dev": needs_libaio and not libaio,
    }
    wanted = [name for name, is_missing in missing.items() if is_missing]
    seen = "g++" if not tools["g++"] else f"g++ {_first_line([tools['g++'], '-dumpfullversion'])}"
    seen = seen if tools["g++"] else "no g++"
    seen += f", ninja {_first_line([tools['ninja'], '--version'])}" if tools["ninja"] else ", no ninja"
    seen += ", nvcc" if tools["nvcc"] else ""
    seen += ", libaio" if libaio else ", no libaio (offload to NVMe files needs it)"
    if not header.is_file():
        seen += f", no {header}"
    if wanted:
        return failure("build tools", seen, f"install the packages {' '.join(wanted)}")
    return ok("build tools", seen)


def _first_line(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return (done.stdout.strip().splitlines() or ["?"])[0]


def compiled_ops(names: Sequence[str], build_command: str) -> list[Check]:
    """Check that each op is built for this environment, and that no lock is in the way of a build."""
    cache = ops.cache_dir()
    states = {name: ops.state(cache / name) for name in names}
    can_build = bool(shutil.which("g++"))
    checks, is_ready = [], [name for name, state in states.items() if state == "ready"]
    for name, state in states.items():
        if state == "ready":
            continue
        seen = f"{name}: {state}"
        if _is_held(cache / f"{name}.dstrain.lock"):
            remedy = "another process builds it right now: wait for it, a minute or two"
            checks.append(warning("ops", f"{name}: being built", remedy))
        elif not can_build:
            checks.append(failure("ops", seen, "install the package g++: a run cannot build it without"))
        else:
            checks.append(warning("ops", seen, f"built at the first start, or now: {build_command}"))
    if is_ready or not names:
        which = ", ".join(is_ready) if names else "this recipe needs none"
        checks.insert(0, ok("ops", f"{which} {'ready ' if names else ''}in {cache}"))
    if not os.access(_existing(cache), os.W_OK):
        seen, remedy = f"{cache} cannot be written", "set TORCH_EXTENSIONS_DIR to a folder of your own"
        missing = len(is_ready) < len(states)
        checks.append((failure if missing else warning)("op cache", seen, remedy))
    return checks


def _existing(path: Path) -> Path:
    return next((parent for parent in (path, *path.parents) if parent.exists()), Path("/"))


def _is_held(lock: Path) -> bool:
    if not lock.exists():
        return False
    try:
        with FileLock(lock, timeout=0):
            return False
    except Timeout:
        return True


def processor(ranks: int, on_cpu: bool) -> Check:
    """Check that there is a core for each rank."""
    cores = len(os.sched_getaffinity(0))
    quota = _cgroup("cpu.max")
    if quota and quota.split()[0].isdigit():
        share = int(quota.split()[0]) / int(quota.split()[1])
        cores = min(cores, max(1, int(share)))
    load = os.getloadavg()[0]
    seen = f"{cores} core{'s' if cores > 1 else ''}, {platform.machine()}, load {load:.1f}"
    if cores < ranks:
        return warning("processor", f"{seen}; {ranks} ranks", f"start at most {cores} ranks on this host")
    if on_cpu and load > 1.5 * cores:
        return warning("processor", seen, "other processes use the cores: end them, or expect slow steps")
    return ok("processor", seen)


def _cgroup(name: str) -> str | None:
    file = Path("/sys/fs/cgroup", name)
    return file.read_text().strip() if file.is_file() else None


def host_memory(needed_bytes: float | None, why: str = "") -> Check:
    """Check available host memory, a container's limit counted. needed_bytes: what is known of a recipe."""
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    limit = _cgroup("memory.max")
    if limit and limit.isdigit() and int(limit) < total:
        used = int(_cgroup("memory.current") or 0)
        total, available = int(limit), min(available, int(limit) - used)
    seen = f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    if needed_bytes is not None:
        seen += f"; {why}: at least {needed_bytes / _GIB:.1f} GiB"
        if needed_bytes > available:
            remedy = (
                "take a smaller model, more hosts, or a JSON that keeps less in host memory (ds_configs/)"
            )
            return failure("host memory", seen, remedy)
    if available < 4 * _GIB:
        return warning("host memory", seen, "end what uses it; imports alone take 1 GiB a rank")
    return ok("host memory", seen)


def shared_memory(ranks: int, on_cpu: bool, folder: Path = Path("/dev/shm")) -> list[Check]:
    """Check room in /dev/shm, through which ranks of a host talk, and buffers that dead runs left there."""
    if not folder.is_dir():
        return [failure("/dev/shm", "missing", "mount it: mount -t tmpfs tmpfs /dev/shm")]
    usage = psutil.disk_usage(str(folder))
    needed = ranks * _BUFFER_BYTES if on_cpu else _NCCL_SHM_BYTES
    seen = f"{usage.free / _GIB:.2f} of {usage.total / _GIB:.2f} GiB free, {needed / _GIB:.2f} needed"
    remedy = (
        "give the container more: docker run --shm-size=8g, on Kubernetes an emptyDir with medium: Memory"
    )
    # NCCL dies of a bus error only once it fills up; a CPU rank maps its buffer at once.
    checks = [ok("/dev/shm", seen)]
    if usage.free < needed:
        checks = [(failure if on_cpu else warning)("/dev/shm", seen, remedy)]
    now = time.time()
    left = [
        file
        for file in folder.glob("deepspeed_allreduce_buffer_*")
        if now - file.stat().st_mtime > _LEFTOVER_S
    ]
    if left:
        size = sum(file.stat().st_size for file in left) / _GIB
        seen = f"{len(left)} buffers of runs that died, {size:.2f} GiB"
        remedy = f"rm {folder}/deepspeed_allreduce_buffer_*, if no run is going on here"
        checks.append(warning("/dev/shm", seen, remedy))
    return checks


def locked_memory(why: str | None, limits: tuple[int, int] | None = None) -> Check:
    """Check how much memory a process may pin. why: who pins here, such as InfiniBand, or None.

    limits: soft and hard, in bytes; else those of this process.
    """
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    seen = "unlimited" if unlimited else f"{soft / 2**20:.0f} MiB (ulimit -l)"
    if why is None or unlimited:
        return ok("pinned memory", seen + ("" if why or unlimited else "; nothing here pins more"))
    if _may_lock_anything() and "InfiniBand" not in why:
        return ok("pinned memory", f"{seen}; this user may exceed it")
    raise_it = (
        "ulimit -l unlimited"
        if hard == resource.RLIM_INFINITY
        else (
            "memlock unlimited in /etc/security/limits.conf; docker run --ulimit memlock=-1; "
            "Slurm: PropagateResourceLimitsExcept=MEMLOCK"
        )
    )
    return warning("pinned memory", f"{seen}; {why}", raise_it)


def _may_lock_anything() -> bool:
    """Whether this process has CAP_IPC_LOCK, with which the kernel asks for no limit."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    effective = re.search(r"CapEff:\s*([0-9a-f]+)", status)
    return bool(effective and int(effective[1], 16) >> 14 & 1)
