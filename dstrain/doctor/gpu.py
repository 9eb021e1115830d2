"""NVIDIA GPUs by nvidia-smi and torch: driver, memory, compute capability, and how they are joined."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dstrain.doctor.check import Check, failure, ok, warning

_FIELDS = (
    "index,name,driver_version,memory.total,memory.used,compute_cap,pcie.link.gen.max,pcie.link.width.max"
)
_LANE_BYTES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}  # PCIe, one direction
_BUSY_SHARE = 0.05  # of a device's memory in use before a run


@dataclass(frozen=True)
class Gpu:
    """One device as nvidia-smi lists it."""

    index: int
    name: str
    driver: str
    memory_mib: float
    used_mib: float
    capability: float  # compute capability, such as 9.0
    pcie_gen: int | None
    pcie_lanes: int | None


def _number(text: str) -> float | None:
    match = re.search(r"[\d.]+", text)
    return float(match[0]) if match else None  # `[N/A]` on some devices


def parse_gpus(text: str) -> list[Gpu]:
    """Read `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`."""
    gpus = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 8 or not cells[0].isdigit():
            continue
        total, used, capability, gen, lanes = (_number(cell) for cell in cells[3:])
        whole = [int(value) if value else None for value in (gen, lanes)]
        gpus.append(Gpu(int(cells[0]), *cells[1:3], total or 0.0, used or 0.0, capability or 0.0, *whole))
    return gpus


def parse_cuda(text: str) -> str | None:
    """Return the newest CUDA that the driver can run, from the header that plain `nvidia-smi` prints."""
    match = re.search(r"CUDA(?: UMD)? Version:\s*([\d.]+)", text)
    return match[1] if match else None


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Return how each pair of GPUs is joined (NV18, PIX, PHB, SYS, ...), from `nvidia-smi topo -m`."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    header = next((line.split() for line in lines if re.match(r"\s*GPU0\b", line)), [])
    columns = [int(name[3:]) for name in header if re.fullmatch(r"GPU\d+", name)]
    pairs = {}
    for line in lines:
        cells = line.split()
        if not cells or not re.fullmatch(r"GPU\d+", cells[0]) or cells == header:
            continue
        row = int(cells[0][3:])
        for column, link in zip(columns, cells[1 : 1 + len(columns)], strict=False):
            if row < column and link != "X":
                pairs[row, column] = link
    return pairs


def parse_nvlink(text: str) -> dict[int, float]:
    """Return each GPU's NVLink rate in bytes/s and direction, all its links, from `nvidia-smi nvlink -s`."""
    rates: dict[int, float] = {}
    gpu = None
    for line in text.splitlines():
        if match := re.match(r"GPU (\d+):", line):
            gpu = int(match[1])
            rates[gpu] = 0.0
        elif gpu is not None and (match := re.search(r"Link \d+: ([\d.]+) GB/s", line)):
            rates[gpu] += float(match[1]) * 1e9
    return rates


def ask(*arguments: str) -> str | None:
    """Return what nvidia-smi prints, or None if there is none or it fails."""
    if not shutil.which("nvidia-smi"):
        return None
    done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30)
    return done.stdout if done.returncode == 0 else None


def is_broken() -> bool:
    """Whether nvidia-smi is there but does not work, which means a driver that is not loaded."""
    return bool(shutil.which("nvidia-smi")) and ask() is None


def facts() -> dict[str, Any]:
    """Return what is known of the GPUs as plain values, for JSON and for `links`."""
    gpus = parse_gpus(ask(f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits") or "")
    several = len(gpus) > 1
    joined = parse_topology(ask("topo", "-m") or "") if several else {}
    return {
        "gpus": [asdict(gpu) for gpu in gpus],
        "joined": {f"{a}-{b}": link for (a, b), link in joined.items()},
        "nvlink_bytes_s": list(parse_nvlink(ask("nvlink", "-s") or "").values()) if several else [],
    }


def torch_facts() -> dict[str, Any]:
    """Return what torch says of CUDA: its version, whether it works and why not, devices, architectures."""
    import torch

    why = ""
    if torch.version.cuda and not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except Exception as error:  # the driver's own words
            why = str(error).split("\n")[0]
    return {
        "cuda": torch.version.cuda,
        "available": torch.cuda.is_available(),
        "why": why,
        "count": torch.cuda.device_count(),
        "archs": torch.cuda.get_arch_list(),
    }


def driver(gpus: Sequence[Gpu], cuda: str | None, torch_says: Mapping[str, Any], failed: bool) -> list[Check]:
    """Check that torch can use the GPUs that the driver lists.

    cuda: the newest that the driver runs. failed: nvidia-smi is there but does not work.
    """
    if failed:
        remedy = (
            "load or install the driver (nvidia-smi names the fault); in a container: docker run --gpus all"
        )
        return [failure("GPU driver", "nvidia-smi is there but finds no working driver", remedy)]
    if not gpus and torch_says["available"]:
        return [
            ok("GPU driver", f"torch finds {torch_says['count']} GPUs; without nvidia-smi no more is known")
        ]
    if not gpus:
        return [ok("GPU driver", "no NVIDIA GPU: training runs on the CPU")]
    seen = (
        f"{gpus[0].driver}, runs CUDA up to {cuda or '?'}; torch built for {torch_says['cuda'] or 'the CPU'}"
    )
    if not torch_says["cuda"]:
        remedy = "install the CUDA build of the torch that requirements.txt pins"
        return [failure("GPU driver", seen, remedy)]
    if not torch_says["available"]:
        older = cuda and _version(cuda) < _version(torch_says["cuda"])[:1]
        remedy = "install a newer driver" if older else "mend what torch says; look at CUDA_VISIBLE_DEVICES"
        return [failure("GPU driver", f"{seen}; torch finds no GPU: {torch_says['why']}", remedy)]
    checks = [ok("GPU driver", f"{seen}, {torch_says['count']} of {len(gpus)} GPUs in use")]
    for gpu in gpus:
        if not _has_kernels(gpu.capability, torch_says["archs"]):
            seen = f"GPU {gpu.index} ({gpu.name}): torch has no code for compute capability {gpu.capability}"
            checks.append(failure("GPU driver", seen, "use another GPU, or a torch built for this one"))
            break
    return checks


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def _has_kernels(capability: float, archs: Sequence[str]) -> bool:
    """Whether code for the device is in torch: of its major version, or as PTX of an older one."""
    number = round(capability * 10)
    for arch in archs:
        match = re.fullmatch(r"(sm|compute)_(\d+)[af]?", arch)
        if (
            match
            and int(match[2]) <= number
            and (match[1] == "compute" or int(match[2]) // 10 == number // 10)
        ):
            return True
    return not archs


def usable(gpus: Sequence[Gpu], environment: Mapping[str, str] = os.environ) -> int:
    """Return how many of the devices ranks will find: none under DS_ACCELERATOR=cpu."""
    if environment.get("DS_ACCELERATOR") == "cpu":
        return 0
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    return len(gpus) if listed is None else min(len(gpus), len([p for p in listed.split(",") if p.strip()]))


def visible(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> list[Check]:
    """Check CUDA_VISIBLE_DEVICES against the devices that exist."""
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is None or not gpus:
        return []
    numbers = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [n for n in numbers if n.lstrip("-").isdigit() and not 0 <= int(n) < len(gpus)]
    if unknown or not numbers:
        what = f"no GPU {', '.join(unknown)}; those after it are hidden" if unknown else "hides every GPU"
        remedy = f"unset CUDA_VISIBLE_DEVICES, or list some of 0 to {len(gpus) - 1}"
        return [failure("GPU memory", f"CUDA_VISIBLE_DEVICES={text!r}: {what}", remedy)]
    return []


def memory(
    gpus: Sequence[Gpu], needed_bytes: float | None = None, environment: Mapping[str, str] = os.environ
) -> list[Check]:
    """Check each device's memory: how much, the same on all, and free.

    needed_bytes: a rank's model states, where a recipe tells them.
    """
    if not gpus:
        return []
    names = sorted({f"{gpu.name}, {gpu.memory_mib / 1024:.1f} GiB" for gpu in gpus})
    seen = f"{len(gpus)} x {names[0]}" if len(names) == 1 else "; ".join(names)
    checks = visible(gpus, environment)
    if len(names) > 1:
        remedy = "choose like ones with CUDA_VISIBLE_DEVICES: the smallest and slowest sets the pace"
        checks.append(warning("GPU memory", f"unlike devices: {seen}", remedy))
    busy = [gpu for gpu in gpus if gpu.memory_mib and gpu.used_mib > _BUSY_SHARE * gpu.memory_mib]
    if busy:
        used = ", ".join(f"GPU {gpu.index}: {gpu.used_mib / 1024:.1f} GiB" for gpu in busy)
        checks.append(warning("GPU memory", f"in use by others: {used}", "end them (nvidia-smi lists them)"))
    smallest = min(gpu.memory_mib for gpu in gpus) * 2**20
    if needed_bytes is not None:
        seen += f"; model states alone take {needed_bytes / 2**30:.1f} GiB a GPU"
        if needed_bytes > smallest:
            remedy = "a higher ZeRO stage, offload (ds_configs/README.md), more GPUs or a smaller model"
            checks.append(failure("GPU memory", seen, remedy))
    return checks or [ok("GPU memory", f"{seen}; free")]


def precision(gpus: Sequence[Gpu], asked: str | None) -> Check:
    """Check compute capability against the precision that is asked for, or say which the devices have."""
    if not gpus:
        if asked is None:
            return ok("precision", "on a CPU: bf16 and fp32; fp16 needs a GPU")
        if asked.startswith("fp16"):
            return failure("precision", f"{asked} on a CPU", "--precision bf16, or fp32")
        return ok("precision", f"{asked} on a CPU")
    lowest = min(gpu.capability for gpu in gpus)
    has = [name for name, least in (("bf16", 8.0), ("fp16", 7.0), ("fp32", 0.0)) if lowest >= least]
    seen = f"compute capability {lowest}: {', '.join(has)}"
    if asked is None:
        return ok("precision", seen)
    seen = f"{asked} asked for; {seen}"
    if asked.startswith("bf16") and lowest < 8.0:
        return failure("precision", seen, "--precision fp16, or train.precision=fp16 in the recipe")
    if asked.startswith("fp16") and lowest < 7.0:
        return warning("precision", seen, "this device is no faster in fp16: --precision fp32")
    if asked.startswith("fp16") and lowest >= 8.0:
        return ok("precision", f"{seen} (bf16 needs no loss scaling)")
    return ok("precision", seen)


def topology(joined: Mapping[str, str], count: int) -> list[Check]:
    """Say how the GPUs of this host are joined. joined: `parse_topology`, keys as `0-1`."""
    if count < 2:
        return []
    if not joined:
        return [warning("topology", "nvidia-smi topo -m says nothing", "update the driver")]
    kinds = sorted(set(joined.values()))
    words = {
        "PIX": "one PCIe bridge",
        "PXB": "several PCIe bridges",
        "PHB": "the processor's PCIe bridge",
        "NODE": "between bridges of one NUMA node",
        "SYS": "between NUMA nodes, the slowest",
    }
    counted = ", ".join(
        f"{list(joined.values()).count(kind)} {kind}" + (f" ({words[kind]})" if kind in words else "")
        for kind in kinds
    )
    nvlink = [kind for kind in kinds if kind.startswith("NV")]
    if nvlink and len(nvlink) < len(kinds):
        remedy = "pick GPUs that share NVLink with CUDA_VISIBLE_DEVICES (nvidia-smi topo -m)"
        return [warning("topology", f"pairs of GPUs: {counted}", remedy)]
    return [ok("topology", f"pairs of GPUs: {counted}")]


def pcie_bytes_s(gpu: Gpu) -> float | None:
    """Return the rate of a device's PCIe slot in bytes/s and direction, or None where it is not known."""
    if not (gpu.pcie_gen and gpu.pcie_lanes):
        return None
    return _LANE_BYTES.get(gpu.pcie_gen, 0.0) * gpu.pcie_lanes or None
