"""Ranks, device, threads and the few collectives. The only module that touches `deepspeed.comm`."""

import contextlib
import io
import logging
import os
import socket
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers

from dstrain import clock, hosts, rendezvous
from dstrain.errors import UserError

os.environ.setdefault(
    "TOKENIZERS_PARALLELISM", "false"
)  # the processes of data preparation are the parallelism
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else the import warns that it found nothing else

import deepspeed
from deepspeed.accelerator import get_accelerator

_PATIENCE_S = 10.0
_GROUP_TIMEOUT = timedelta(hours=2)  # the watchdog comes first

_meeting: rendezvous.Meeting | None = None  # of this process's group
_OPENMPI = {
    "RANK": "RANK",
    "WORLD_SIZE": "SIZE",
    "LOCAL_RANK": "LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "LOCAL_SIZE",
    "LOCAL_SIZE": "LOCAL_SIZE",
}

UMASK = os.umask(0)  # can only be read by setting it, which is safe while there are no threads
os.umask(UMASK)


@dataclass(frozen=True)
class World:
    """This process's place, read from the environment that every launcher sets."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def is_main(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0


def world() -> World:
    """Read the launcher's environment variables; without a launcher, be one process.

    OpenMPI's own are given the names that libraries read. Raises UserError if they contradict each other.
    """
    env = os.environ
    if "RANK" not in env and "OMPI_COMM_WORLD_RANK" in env:
        for name, theirs in _OPENMPI.items():
            env[name] = env[f"OMPI_COMM_WORLD_{theirs}"]
    values = {}
    for name, names, default in (
        ("rank", ("RANK",), "0"),
        ("size", ("WORLD_SIZE",), "1"),
        ("local_rank", ("LOCAL_RANK",), "0"),
        ("local_size", ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"), "1"),
    ):
        text = next((env[key] for key in names if key in env), default)
        if not text.isdigit():
            raise UserError(f"environment: {names[0]}={text!r} is not a number")
        values[name] = int(text)
    if not values["rank"] < values["size"]:
        raise UserError(f"environment: RANK={values['rank']} is not below WORLD_SIZE={values['size']}")
    return World(**values)


def shrink(place: World, size: int) -> World:
    """Return this process's place among the first `size` ranks; the others say so and end, well."""
    if size == place.size:
        return place
    if place.rank >= size:
        print(
            f"rank {place.rank} stops: {size} of {place.size} ranks keep the run's global batch", flush=True
        )
        leave(0)
    local = min(place.local_size, size) if place.local_size == place.size else place.local_size
    os.environ.update(WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(local), LOCAL_SIZE=str(local))
    return World(place.rank, size, place.local_rank, local)


def prepare() -> World:
    """Quiet the libraries, take this rank's share of the cores, and return its place.

    Their own chatter is kept to warnings, and only the first rank speaks. Raises UserError as `world` does.
    """
    place = world()
    level = logging.WARNING if place.is_main else logging.ERROR
    logging.getLogger("DeepSpeed").setLevel(level)
    transformers.utils.logging.set_verbosity(level)
    transformers.utils.logging.disable_progress_bar()
    # DeepSpeed's calls of torch.distributed functions that got new names: nothing that a user can mend.
    warnings.filterwarnings("ignore", "`torch.distributed.", FutureWarning)
    if not place.is_main:
        warnings.simplefilter("ignore")
    use_cores(place)
    if place.size > place.local_size:
        hosts.use_interface(os.environ.get("MASTER_ADDR"))
    return place


def use_cores(place: World) -> int:
    """Give this rank its share of the machine's cores, and return how many threads that is.

    torchrun sets OMP_NUM_THREADS=1 for several ranks, which leaves CPU ranks at a fraction of their speed;
    the deepspeed launcher sets nothing, and ranks that each take all cores slow one another even more. A
    value above 1 is the user's own and stays.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "1")
    threads = int(asked) if asked.isdigit() and asked != "1" else 0
    if not threads:
        threads = max(1, len(os.sched_getaffinity(0)) // place.local_size)
    torch.set_num_threads(threads)
    return threads


def start(place: World, limit_s: float = 600.0) -> None:
    """Start the process group of all ranks, which wait at most `limit_s` for one another.

    One process alone needs no launcher. Does nothing in a process that has a group already. Raises UserError
    if the ranks do not come together or do not run the same code.
    """
    global _meeting
    os.environ.setdefault("LOCAL_SIZE", str(place.local_size))
    os.environ.setdefault("LOCAL_RANK", str(place.local_rank))
    if torch.distributed.is_initialized():
        return
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "64")  # the last collectives, for who stands where
    if not on_cpu():
        torch.cuda.set_device(place.local_rank)
    store = _store(place, limit_s)
    _meeting = rendezvous.meet(store, place.rank, place.size, limit_s)
    many_gpus = {} if on_cpu() or place.size == 1 else {"device_id": torch.device("cuda", place.local_rank)}
    torch.distributed.init_process_group(
        get_accelerator().communication_backend_name(),
        store=torch.distributed.PrefixStore("group", _meeting.store),
        rank=place.rank,
        world_size=place.size,
        timeout=_GROUP_TIMEOUT,
        **many_gpus,
    )
    with contextlib.redirect_stdout(io.StringIO()):  # it prints, on every rank, that it found its op
        # DeepSpeed takes the group that it finds. There is no MPI to discover.
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False, timeout=_GROUP_TIMEOUT)
    _unlink_shared_buffer(place)


def _store(place: World, limit_s: float) -> torch.distributed.TCPStore:
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun
    if place.size > 1 or served:
        return rendezvous.connect(place.is_main and not served, limit_s)
    os.environ.update(MASTER_ADDR="127.0.0.1", LOCAL_RANK="0", RANK="0", WORLD_SIZE="1")
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, True)  # at a port that is free
    os.environ["MASTER_PORT"] = str(store.port)
    return store


def meeting() -> rendezvous.Meeting:
    """Return who met in this run, with a connection of its own to their store; it has none for one rank."""
    if _meeting is None or len(_meeting.ranks) == 1:
        return rendezvous.Meeting("", None, _meeting.ranks if _meeting else [rendezvous.own_facts()])
    store = rendezvous.connect(False, _PATIENCE_S)
    return rendezvous.Meeting(
        _meeting.name, torch.distributed.PrefixStore(_meeting.name, store), _meeting.ranks
    )


def _unlink_shared_buffer(place: World) -> None:
    """Take the name off this rank's buffer for collectives in shared memory, once every rank has mapped it.

    DeepSpeed never does: each start would leave 66 MiB a rank in /dev/shm, until the machine has no memory
    left (0.19.8, csrc/cpu/comm/shm.cpp). The mapping lives on without a name and goes with the process.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{place.rank}"
    barrier()
    Path("/dev/shm", name).unlink(missing_ok=True)


def device_name() -> str:
    """Return the device's product name, such as `NVIDIA H100 80GB HBM3`, or `cpu`."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def on_cpu() -> bool:
    """Whether DeepSpeed will train on the CPU."""
    return not torch.cuda.is_available() or os.environ.get("DS_ACCELERATOR") == "cpu"


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over all ranks, in place."""
    with clock.collectives:
        torch.distributed.all_reduce(tensor)
    return tensor


def gather_numbers(values: Sequence[float], device: Any = None) -> list[list[float]]:
    """Return every rank's numbers, in rank order, on every rank. All give equally many."""
    table = torch.zeros(torch.distributed.get_world_size(), len(values), dtype=torch.float64, device=device)
    table[torch.distributed.get_rank()] = torch.tensor(values, dtype=torch.float64)
    return all_reduce_sum(table).tolist()


def gather(value: Any) -> list[Any]:
    """Return every rank's value, in rank order, on every rank."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def ranks_where(condition: bool) -> list[int]:
    """Return the ranks on which `condition` holds."""
    return [rank for rank, holds in enumerate(gather(condition)) if holds]


def clock_collectives() -> None:
    """Let `clock.collectives` count from now on what DeepSpeed's and our own collectives take."""
    clock.install(deepspeed.comm.comm.cdb, on_cpu())


def barrier() -> None:
    """Wait for all ranks, at most the process group's time-out."""
    torch.distributed.barrier()


def describe(place: World) -> str:
    """Return the devices in words."""
    ranks = f"{place.size} rank{'s' if place.size > 1 else ''}"
    return f"{device_name()}, {ranks}, {torch.get_num_threads()} CPU threads each"


def versions() -> str:
    """Return what the numbers of a run depend on."""
    python = ".".join(map(str, sys.version_info[:3]))
    packages = {"torch": torch, "deepspeed": deepspeed, "transformers": transformers}
    return f"python {python}, " + ", ".join(
        f"{name} {package.__version__}" for name, package in packages.items()
    )


def say(place: World, line: str) -> None:
    """Print on the first rank."""
    if place.is_main:
        print(line, flush=True)


def say_error(line: str) -> None:
    """Print an error of one line, of the first rank if it has it as well."""
    be_patient()
    rank = os.environ.get("RANK", "0")
    where = "" if rank == "0" else f"rank {rank} on {socket.gethostname()}: "
    print(f"error: {where}{line}", file=sys.stderr, flush=True)


def be_patient() -> None:
    """Let the first rank speak first.

    If it failed as well, as it does with a mistake in a recipe, the launcher ends the others meanwhile; if it
    did not, the error is theirs alone and they say it.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(_PATIENCE_S)


def leave(status: int) -> NoReturn:
    """End the process without the exit handlers of C++ libraries.

    Threads of the process group race with them: now and then a rank that had done all its work died of
    "terminate called without an active exception", and the launcher called the run a failure.
    """
    logging.shutdown()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
