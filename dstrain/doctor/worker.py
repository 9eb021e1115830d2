"""One rank of the doctor's run: `python -m dstrain.doctor.worker JSON`, started by `ranks`.

It meets the others, waits for them with a limit, measures all-reduce and its clock, and says on standard
output how far it came, so that whoever started it knows where a rank stands that never ends.
"""

import datetime
import faulthandler
import json
import os
import socket
import statistics
import sys
import threading
import time
from typing import Any

from dstrain.doctor.ranks import MARK

_PINGS = 8
_MEASURE_S = 3.0  # for all repetitions of one size


def say(**values: Any) -> None:
    """Tell `ranks` something."""
    print(MARK + json.dumps(values), flush=True)


def now() -> float:
    """Return this host's clock, in seconds since 1970."""
    return time.time()


def _end_with_parent() -> None:
    """End as soon as whoever started this rank is gone, also when it hangs in a collective: over ssh no
    signal comes, but standard input ends."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def wait_for_all(store: Any, name: str, rank: int, size: int, limit_s: float) -> list[int]:
    """Meet all ranks at a store, for at most `limit_s` seconds. Returns the ranks that did not come."""
    store.set(f"{name}/{rank}", "here")
    keys, deadline = [f"{name}/{other}" for other in range(size)], time.monotonic() + limit_s
    while not store.check(keys):
        if time.monotonic() > deadline:
            return [other for other, key in enumerate(keys) if not store.check([key])]
        time.sleep(0.001)
    return []


def clock_offset(asked: float, there: float, answered: float) -> float:
    """Return how far the other clock is ahead, in seconds, if the answer took as long as the question.

    asked, answered: this clock; there: the other one in between. It is off by at most half the round trip.
    """
    return there - (asked + answered) / 2


def measure_clock(store: Any, rank: int, size: int, limit_s: float) -> tuple[float, float]:
    """Return how far this clock is ahead of rank 0's, and half the shortest round trip, in seconds.

    Rank 0 answers the others, one after the other.
    """
    best = (0.0, float("inf"))
    wait = datetime.timedelta(seconds=limit_s)
    for other in range(1, size):
        for turn in range(_PINGS):
            question, answer = f"clock/{other}/{turn}/asked", f"clock/{other}/{turn}/told"
            if rank == 0:
                store.wait([question], wait)
                store.set(answer, repr(now()))
            elif rank == other:
                asked = now()
                store.set(question, "?")
                store.wait([answer], wait)
                there = float(store.get(answer))
                answered = now()
                if answered - asked < best[1]:
                    best = (-clock_offset(asked, there, answered), answered - asked)
    return (0.0, 0.0) if rank == 0 else (best[0], best[1] / 2)


def _time_all_reduce(tensor: Any, synchronize: Any) -> float:
    """Return the median seconds of an all-reduce, over as many as fit into the time, all ranks the same."""
    import torch.distributed as dist

    def once() -> float:
        synchronize()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        synchronize()
        return time.perf_counter() - began

    once()  # connections are made in the first
    slowest = tensor.new_tensor([once()])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    times = max(3, min(50, int(_MEASURE_S / max(float(slowest), 1e-6))))
    return statistics.median(once() for _ in range(times))


def _own_address(master: str, port: int) -> str:
    """Return the address of this host from which the master is reached."""
    family = socket.getaddrinfo(master, port, 0, socket.SOCK_DGRAM)[0]
    with socket.socket(family[0], socket.SOCK_DGRAM) as probe:
        probe.connect(family[4])
        return str(probe.getsockname()[0]).partition("%")[0]


def _interface_of(address: str) -> str | None:
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None


def measure(options: dict[str, Any]) -> None:
    """Go through all phases. options: start_s, limit_s, small_bytes, large_bytes, on_gpu, several_hosts."""
    say(at="start")
    import torch
    import torch.distributed as dist

    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    master, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    address = _own_address(master, port)
    interface = _interface_of(address)
    if options["several_hosts"] and interface:
        # Else gloo takes the address of the host's own name, which is often loopback; `gloo address` warns.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    say(at="torch imported")
    wait = datetime.timedelta(seconds=options["start_s"])
    store = dist.TCPStore(master, port, size, rank == 0, timeout=wait, wait_for_workers=False)
    say(at="store")
    # Ranks that import more slowly than others are no fault: the limit runs from here.
    missing = wait_for_all(store, "met", rank, size, options["start_s"])
    began = time.perf_counter()
    missing = missing or wait_for_all(store, "barrier", rank, size, options["limit_s"])
    if missing:
        say(missing=missing)
        os._exit(1)
    barrier_s = time.perf_counter() - began
    say(at="barrier")
    on_gpu = options["on_gpu"]
    if on_gpu:
        torch.cuda.set_device(local)
    limit = datetime.timedelta(seconds=options["limit_s"])
    backend = "nccl" if on_gpu else "gloo"
    group_store = dist.PrefixStore("group", store)
    dist.init_process_group(backend, store=group_store, rank=rank, world_size=size, timeout=limit)
    say(at="process group")
    device = f"cuda:{local}" if on_gpu else "cpu"
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    seconds = {}
    for name in ("small", "large"):
        tensor = torch.zeros(options[f"{name}_bytes"] // 4, device=device)
        seconds[name] = _time_all_reduce(tensor, synchronize)
        say(at=f"{name} all-reduce")
    offset_s, uncertainty_s = measure_clock(store, rank, size, options["limit_s"])
    say(at="clock")
    store.set(f"end/{rank}", "here")
    if rank == 0:  # it holds the store
        missing = wait_for_all(store, "end", rank, size, options["limit_s"])
    result = {"barrier_s": barrier_s, "small_s": seconds["small"], "large_s": seconds["large"]}
    result |= {
        "offset_s": offset_s,
        "uncertainty_s": uncertainty_s,
        "address": address,
        "interface": interface,
    }
    say(at="done", result=result, missing=missing)


def main() -> None:
    """Measure, and say in one line what went wrong."""
    faulthandler.enable()
    _end_with_parent()
    status = 0
    try:
        measure(json.loads(sys.argv[1]))
    except Exception as error:  # the others are told by whoever started us
        say(error=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
        status = 1
    sys.stdout.flush()
    os._exit(status)  # not through the exit handlers of a group whose other ranks may be gone


if __name__ == "__main__":
    main()
