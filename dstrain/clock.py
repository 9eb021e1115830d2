"""How long this rank spends in collectives: the transfer, and waiting for ranks that come later."""

import time
from typing import Any

import torch

# Methods of DeepSpeed's backend.
_CLOCKED = (
    *("all_reduce", "inference_all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "barrier"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_gather", "all_gather_into_tensor"),
    *("all_gather_coalesced", "all_to_all", "all_to_all_single"),
)


class Clock:
    """A context; the seconds inside it add up. Inside itself it counts once.

    On a CPU, what the host spends in the call and in wait(). On a GPU, what the stream that asked for it
    spends, read from events without a synchronisation; what other streams do meanwhile costs no time and is
    not counted, nor are the gathers that ZeRO 3 runs ahead of the layers on a stream of its own.
    """

    def __init__(self) -> None:
        self.on_cpu, self.depth = True, 0
        self._seconds, self._began = 0.0, 0.0
        self._start: Any = None
        self._events: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        self.depth += 1
        if self.depth == 1 and self.on_cpu:
            self._began = time.perf_counter()
        elif self.depth == 1:
            self._start = _event()

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
        if self.depth == 0 and self.on_cpu:
            self._seconds += time.perf_counter() - self._began
        elif self.depth == 0:
            self._events.append((self._start, _event()))

    def read(self) -> float:
        """Return the seconds so far; on a GPU without what it has not done yet."""
        while self._events and self._events[0][1].query():
            first, last = self._events.pop(0)
            self._seconds += first.elapsed_time(last) / 1000
        return self._seconds


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class _Work:
    """An asynchronous collective whose wait() is clocked."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, *args: Any, **more: Any) -> Any:
        with collectives:
            return self._work.wait(*args, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


collectives = Clock()


def install(backend: Any, on_cpu: bool) -> None:
    """Clock the collectives of DeepSpeed's backend from now on; once is enough."""
    collectives.on_cpu = on_cpu
    for name in _CLOCKED:
        call = getattr(backend, name, None)
        if call is not None and not hasattr(call, "clocked"):
            setattr(backend, name, _clocked(call))


def _clocked(call: Any) -> Any:
    def clocked(*args: Any, **more: Any) -> Any:
        with collectives:
            result = call(*args, **more)
        return _Work(result) if hasattr(result, "wait") else result

    clocked.clocked = True  # type: ignore[attr-defined]
    return clocked
