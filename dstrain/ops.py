"""DeepSpeed's compiled ops: built once, by one process, into a cache of this environment.

Left alone, DeepSpeed builds an op in every rank at its first use: ranks race, a killed build leaves a lock
that the next start waits on for ever, and environments that share the default cache rebuild each other's
ops. Here an op is built under a file lock, a finished build carries a stamp of what it was built for, and
ranks load it as it is, without compiler, ninja or lock.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from dstrain.errors import UserError

# Builder classes by the op's name.
_BUILDERS = {
    "deepspeed_shm_comm": "ShareMemCommBuilder",
    "cpu_adam": "CPUAdamBuilder",
    "cpu_lion": "CPULionBuilder",
    "cpu_adagrad": "CPUAdagradBuilder",
    "fused_adam": "FusedAdamBuilder",
    "async_io": "AsyncIOBuilder",
    "pin_memory": "PinMemoryBuilder",
    "fused_lion": "FusedLionBuilder",
    "fused_lamb": "FusedLambBuilder",
    "quantizer": "QuantizerBuilder",
    "gds": "GDSBuilder",
}
COLLECTIVES = ("deepspeed_shm_comm",)  # every process group on a CPU
NVME = ("pin_memory", "async_io")  # offload to files


def cache_dir() -> Path:
    """Return where ops are built: $TORCH_EXTENSIONS_DIR, else inside the virtual environment."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    if named:
        return Path(named)
    inside = sys.prefix != sys.base_prefix
    return Path(sys.prefix) / "torch_extensions" if inside else Path.home() / ".cache" / "dstrain" / "ops"


def ready(names: Sequence[str], build: bool = True) -> list[str]:
    """Make ops ready for this process, building those that are not. Returns the names that were built.

    Safe in any number of processes at once: one builds, the others wait. Raises UserError if a compiler is
    missing or a build fails.
    """
    cache = cache_dir()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(cache)
    built = []
    for name in names:
        if state(cache / name) != "ready":
            if not build:
                continue
            try:
                cache.mkdir(parents=True, exist_ok=True)
                (cache / f"{name}.dstrain.lock").touch()
            except OSError as error:
                raise UserError(f"op {name}: {cache} cannot be written: {error.strerror}") from None
            with FileLock(cache / f"{name}.dstrain.lock"):  # freed by the system if its holder dies
                if (now := state(cache / name)) != "ready":
                    if now != "missing":
                        print(f"op {name} is {now}: it is built anew", flush=True)
                    _build(name, cache / name)
                    built.append(name)
        _load(name, cache / name)
    return built


def _stamp() -> dict[str, str]:
    import deepspeed.git_version_info as deepspeed_version
    import torch

    flags = ""
    if Path("/proc/cpuinfo").exists():  # ops are built with -march=native
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "deepspeed": deepspeed_version.version,
        "cpu": " ".join(sorted(flags.partition(":")[2].split())),
    }


def state(folder: Path) -> str:
    """Say what lies in the folder of an op: `ready`, `missing`, or what is wrong with it."""
    if not folder.exists():
        return "missing"
    stamp = folder / "dstrain.json"
    if not stamp.exists() or not any(file.stat().st_size for file in folder.glob("*.so")):
        return "locked by a build that was stopped" if (folder / "lock").exists() else "half-built"
    try:
        built, now = json.loads(stamp.read_text(encoding="utf-8")), _stamp()
    except ValueError:
        return "half-built"
    changed = [key for key in now if built.get(key) != now[key]]
    return f"built for another {' and '.join(changed)}" if changed else "ready"


def has_libaio() -> bool:
    """Whether the header of libaio, which offload to NVMe files is built with, is installed."""
    compiler = shutil.which("g++")
    if compiler is None:
        return False
    command = [compiler, "-E", "-x", "c++", "-include", "libaio.h", os.devnull]
    return subprocess.run(command, capture_output=True).returncode == 0


def _build(name: str, folder: Path) -> None:
    scripts = str(Path(sys.executable).parent)
    if scripts not in os.environ["PATH"].split(os.pathsep):  # ninja lies beside python
        os.environ["PATH"] = scripts + os.pathsep + os.environ["PATH"]
    for command, package in (("g++", "g++"), ("ninja", "ninja-build")):
        if not shutil.which(command):
            raise UserError(f"op {name}: {command} is missing; install the package {package!r}")
    if name == "async_io" and not has_libaio():
        raise UserError(f"op {name}: libaio is missing; install the package 'libaio-dev'")
    # What lies here is stale: another version's, another processor's, or half of a build that was killed.
    shutil.rmtree(folder, ignore_errors=True)
    print(f"building DeepSpeed op {name}, once for this environment (about a minute) ...", flush=True)
    from deepspeed.accelerator import get_accelerator

    try:
        get_accelerator().create_op_builder(_BUILDERS[name]).load(verbose=False)
    except Exception as error:  # ninja's output is long; its last lines name the fault
        lines = [line for line in str(error).splitlines() if "error" in line.lower()] or str(
            error
        ).splitlines()
        reason = lines[-1].strip()
        if "Killed" in reason:
            reason += "; the system stopped the compiler, most likely for lack of memory (free -m)"
        raise UserError(f"op {name}: the build failed: {reason}") from None
    (folder / "dstrain.json").write_text(json.dumps(_stamp(), indent=2), encoding="utf-8")


def _load(name: str, folder: Path) -> None:
    """Give DeepSpeed the built module, so that its own loader neither locks nor asks for a compiler."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    loaded = OpBuilder._loaded_ops
    if name in loaded:
        return
    spec = importlib.util.spec_from_file_location(name, next(folder.glob("*.so")))
    assert spec is not None
    assert spec.loader is not None
    flags = sys.getdlopenflags()
    if name == "pin_memory":  # async_io finds symbols in it
        sys.setdlopenflags(flags | os.RTLD_GLOBAL)
    try:
        module = importlib.util.module_from_spec(spec)
    except ImportError as error:
        raise UserError(f"op {name}: {error}; delete {folder}, and it is built anew") from None
    finally:
        sys.setdlopenflags(flags)
    spec.loader.exec_module(module)
    loaded[name] = module
