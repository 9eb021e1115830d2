"""Runs that did not end well: out of memory, died, hung, raised, stopped."""

import re
from typing import Any

from dstrain.diagnose import memory
from dstrain.diagnose.run import Finding, Run

_MARGIN = 1.1  # an estimate must save this much more than is short: it is not exact
_UNITS = {"B": 1, "BYTES": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = r"([\d.]+) ?(GiB|MiB|KiB|TiB|bytes)"
_CUDA = re.compile(rf"out of memory\. Tried to allocate {_SIZE}", re.IGNORECASE)
_FREE = re.compile(rf"of which {_SIZE} is free", re.IGNORECASE)
_TOTAL = re.compile(rf"total capacity of {_SIZE}", re.IGNORECASE)
_RESERVED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated", re.IGNORECASE)
_CPU = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes", re.IGNORECASE)
_OTHER = re.compile(r"MemoryError|out of memory|Cannot allocate memory|std::bad_alloc|OutOfMemoryError")
_KILLED = re.compile(r"the kernel ended \d+ process|oom.?kill", re.IGNORECASE)  # the watchdog's words
_NON_FINITE = re.compile(r"non-finite (loss|gradient) at step (\d+)")
_SCALE = "loss scale already at minimum"


def look(run: Run, spare: memory.Layout | None = None) -> list[Finding]:
    """Return how the run ended, if not well. spare: its layout where it left none itself."""
    failure = run.failure
    text = _text(run)
    if _CUDA.search(text) or _CPU.search(text) or (failure and _OTHER.search(text)):
        return [_out_of_memory(run, text, spare)]
    if failure:
        kind = failure.get("kind")
        if kind == "died" and _KILLED.search(text):
            return [_killed(run, spare)]
        if _NON_FINITE.search(text) or _SCALE in text:
            return []  # learning.py says more
        if kind in ("died", "hung"):
            return [_died(run) if kind == "died" else _hung(run)]
        return [_raised(run)]
    return _stopped(run)


def _text(run: Run) -> str:
    """Return the failure's words; without them the end of the logs, unless the run ended well."""
    if run.failure:
        return f"{run.failure.get('error', '')}\n{run.failure.get('traceback', '')}"
    if run.live or run.event("finished") or run.event("interrupted"):
        return ""
    return "\n".join(run.logs.values())


def _where(run: Run) -> str:
    failure = run.failure or {}
    rank, host = failure.get("rank"), failure.get("host")
    who = f"rank {rank} ({host})" if host else run.host(rank)
    step = failure.get("step")
    at = f", step {step}" if step else f", after step {run.last_step}" if run.rows else ""
    return f"{who}{at}, phase {failure['phase']}" if failure.get("phase") else f"{who}{at}"


def _gib(pattern: re.Pattern[str], text: str) -> float | None:
    found = pattern.search(text)
    return float(found.group(1)) * _UNITS[found.group(2).upper()] / 2**30 if found else None


def _out_of_memory(run: Run, text: str, spare: memory.Layout | None) -> Finding:
    on_cpu = _CUDA.search(text) is None
    evidence = [_where(run)]
    tried = _gib(_CUDA, text)
    if found := _CPU.search(text):
        tried = int(found.group(1)) / 2**30
    free, total, reserved = (_gib(pattern, text) for pattern in (_FREE, _TOTAL, _RESERVED))
    short = tried - (free or 0.0) if tried is not None else None
    if tried is not None and free is not None:
        evidence.append(
            f"tried to allocate {tried:.2f} GiB with {free:.2f} GiB free of {total or 0:.2f}: "
            f"{short:.2f} GiB short"
        )
    elif tried is not None:
        evidence.append(f"tried to allocate {tried:.2f} GiB: at most that much short")
    first = []
    if short is not None and reserved is not None and reserved >= short:
        evidence.append(f"{reserved:.2f} GiB are reserved but in pieces that are too small")
        first = [
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment (no cost): frees up to "
            f"{reserved:.2f} GiB, fits"
        ]
    where = "on the host" if on_cpu else "on the GPU"
    return Finding(
        "out_of_memory",
        1.0,
        f"out of memory {where}",
        *_estimated(run, evidence, first, short, on_cpu, spare),
    )


def _killed(run: Run, spare: memory.Layout | None) -> Finding:
    failure = run.failure or {}
    evidence = [_where(run), f"said at the end: {_short(failure.get('error'))}"]
    if run.rows and "peak_memory_gib" in run.rows[-1] and run.facts.get("device") == "cpu":
        hosts = run.facts.get("hosts") or [""]
        peak, ranks = run.rows[-1]["peak_memory_gib"], max(hosts.count(host) for host in hosts)
        evidence.append(
            f"rank 0 held {peak:.1f} GiB at most before; {ranks} ranks on a host of "
            f"{run.facts.get('host_gib', 0):.1f} GiB"
        )
    on_cpu = run.facts.get("device", "cpu") == "cpu"
    found = _estimated(run, evidence, ["see in `dmesg | grep -i oom` on that host"], None, on_cpu, spare)
    return Finding("out_of_memory", 1.0, "killed by the kernel: the host ran out of memory", *found)


def _estimated(
    run: Run, evidence: list[str], first: list[str], short: float | None, on_cpu: bool, spare: Any
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Add the estimate, and the single changes that would have made it fit, to evidence and changes."""
    length = run.facts.get("seq_length") or run.options.get("data.max_seq_length")
    own = memory.layout(run.facts | {"seq_length": length}) or spare
    if own is None:
        again = f"python -m dstrain diagnose {run.folder} --config RECIPE"
        evidence.append("it ended before it wrote its shape, so that nothing can be estimated")
        return tuple(evidence), (*first, f"{again} (with the overrides of that run) estimates what would fit")
    capacity = run.facts.get("device_gib")
    if on_cpu and run.facts.get("host_gib"):
        hosts = run.facts["hosts"]
        capacity = run.facts["host_gib"] / max(hosts.count(host) for host in hosts)
    parts, total = memory.parts_gib(own), memory.total_gib(own)
    listed = ", ".join(f"{name} {gib:.2f}" for name, gib in parts.items() if gib >= 0.005)
    evidence.append(f"estimated need of a rank: {total:.2f} GiB ({listed})")
    starting = (run.failure or {}).get("phase") == "start-up"
    held = memory.total_gib(own, starting)
    needed = max(short or 0.0, held - capacity if capacity else 0.0)
    if starting:
        evidence.append(f"before the first step there are no activations yet: {held:.2f} GiB of it")
    key = not (run.options.get("train.global_batch_size") or run.options.get("train.global_batch_tokens"))
    found = memory.changes(own, needed * _MARGIN, on_cpu=on_cpu, key_for_gas=key, starting=starting)
    lines = []
    for change in found:
        fits = needed and change.saves_gib >= needed * _MARGIN
        verdict = ", fits" if fits else ", not enough alone" if needed else ""
        lines.append((not fits, f"{change.how} ({change.cost}): saves {change.saves_gib:.2f} GiB{verdict}"))
    lines.sort(key=lambda line: line[0])  # those that fit first; each kind stays in order of cost
    return tuple(evidence), (*first, *(line for _, line in lines))


def _died(run: Run) -> Finding:
    said = (run.failure or {}).get("error")
    evidence = [_where(run), f"said at the end: {_short(said)}", *_saved(run)]
    changes = [
        f"{run.folder}/logs/: that rank's log ends with the stacks of a crash, but SIGKILL leaves none; "
        "the others have theirs",
        "`dmesg | tail` on that host: the kernel names what it killed for memory and what crashed",
        "`python -m dstrain doctor` checks memory, /dev/shm, compiled ops and the host",
        "start the same command again: it goes on from the newest checkpoint",
    ]
    return Finding(
        "died", 1.0, f"rank {(run.failure or {}).get('rank')} died", tuple(evidence), tuple(changes)
    )


def _hung(run: Run) -> Finding:
    failure = run.failure or {}
    stands = str(failure.get("traceback", "")).splitlines()[:8]
    evidence = [_where(run), _short(failure.get("error")), *map(_short, stands), *_saved(run)]
    changes = [
        f"the stacks of all ranks are in {run.folder}/logs/rank-N.log: look at the rank that is not in a "
        "collective",
        "`python -m dstrain doctor` finds a rank that does not answer and a link that is slow",
        "start the same command again: it goes on from the newest checkpoint",
    ]
    return Finding("hung", 1.0, "the run hung", tuple(evidence), tuple(changes))


_KNOWN = (
    (r"EADDRINUSE|address already in use|MASTER_PORT", "another job has the port: deepspeed --master_port N"),
    (r"NCCL|ncclSystemError|connectFullMesh|Connection (refused|reset|closed)|Gloo|timed out",
     "ranks could not reach one another: `python -m dstrain doctor` looks at interfaces and variables"),
    (r"No space left|ENOSPC", "the disk is full: make room, or checkpoint.save_total_limit=1"),
    (r"index out of range|device-side assert|IndexError",
     "a token id beyond the embedding: model.pad_to_multiple_of=64"),
)  # fmt: skip


def _raised(run: Run) -> Finding:
    failure = run.failure or {}
    evidence = [_where(run), _short(failure.get("error"))]
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', str(failure.get("traceback", "")))
    if frames:
        file, line, name = frames[-1]
        evidence.append(f"raised in {file}:{line}, {name}()")
    text = _text(run)
    changes = [advice for pattern, advice in _KNOWN if re.search(pattern, text)]
    changes.append(f"the whole traceback is in {run.folder}/logs/")
    return Finding("error", 1.0, "a rank raised an error", (*evidence, *_saved(run)), tuple(changes))


def _stopped(run: Run) -> list[Finding]:
    if run.event("finished") or not run.facts:
        return []
    goal = run.facts.get("max_steps")
    again = ("start the same command again: it goes on from the newest checkpoint",)
    if asked := run.event("interrupted"):
        evidence = (f"stopped after step {asked['step']} of {goal} by {asked['by']}", *_saved(run))
        return [
            Finding("interrupted", 0.9, "stopped on request, and saved; nothing is wrong", evidence, again)
        ]
    if run.live:
        evidence = (f"step {run.last_step} of {goal}, a process holds the folder",)
        return [Finding("running", 0.1, "the run is still going", evidence, ("wait, or touch RUN/STOP",))]
    evidence = (f"last row: step {run.last_step} of {goal}; no failure was written", *_saved(run))
    changes = (
        *again,
        "look for `oom` in dmesg, and for a time limit in the scheduler's log: all ranks went at once",
    )
    return [Finding("ended", 0.8, "the run ended without a word", evidence, changes)]


def _saved(run: Run) -> list[str]:
    if run.saved is None:
        return ["no checkpoint was saved"]
    return [f"newest checkpoint: step {run.saved}"]


def _short(text: Any) -> str:
    return " ".join(str(text or "nothing").split())[:300]
