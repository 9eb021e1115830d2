"""The thread of one rank that looks after all of them."""

import contextlib
import faulthandler
import json
import sys
import threading
import time
import traceback
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import DistError, Store

from dstrain import distributed, failure
from dstrain.errors import Told
from dstrain.failure import DIED, HUNG, Failure
from dstrain.logs import RankLog
from dstrain.watchdog.look import behind, blame, dead, last_collective, memory_kills, text_of, where

BEAT_S, LOOK_S = 1.0, 0.25
SILENT_S = 60.0  # without a beat, a rank that cannot be looked at from here counts as gone ...
SILENT_LOST_S = 6.0  # ... and sooner if a connection broke
FLOOR_S, TIMES = 120.0, 10  # a learnt limit: so many times the longest so far, and never below the floor
FEW = 3  # so many steps are known before a limit is learnt from them
SUSPENDED_S = 10.0  # this thread has not run for so long: the process was stopped
_PLACES_S = 3.0  # for ranks to tell where they stand
_LINGER_S = 2.0  # the one that tells a failure lets the others read it
_TRACEBACK_LINES = 16  # on the screen; the log has all


class At(NamedTuple):
    """What a rank does, in which step, and since when (time.monotonic)."""

    phase: str
    step: int
    since: float


class Guard:
    """Watches over one run of this process until `stop`."""

    def __init__(self, place: distributed.World, init_s: float, step_s: float | None) -> None:
        """init_s: limit of a phase in seconds. step_s: of a step, None if it is learnt."""
        self.place, self.init_s, self.step_s = place, init_s, step_s
        self.folder: Path | None = None
        self.log: RankLog | None = None
        self.at = At("start-up", 0, time.monotonic())
        # Of saves nothing is learnt: most hold only a copy, but the last one waits until all is written.
        self.took = {"step": deque[float](maxlen=100), "evaluation": deque(maxlen=9)}
        self._steps = 0
        _, self.store, self.peers = distributed.meeting()
        own = self.peers[place.rank]["place"]
        self.near = [r for r, peer in enumerate(self.peers) if r != place.rank and peer["place"] == own]
        self.kills = memory_kills()
        self.lost = False  # a connection to another rank broke
        self._beats: dict[int, tuple[str, float]] = {}
        self._telling, self._over = threading.Lock(), threading.Event()
        self._told: Failure | None = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def keep_log(self, folder: Path) -> None:
        """Keep what this rank prints, and how the run failed, in a folder."""
        self.log, self.folder = RankLog(folder, self.place.rank), folder
        faulthandler.enable(self.log.file)

    def enter(self, phase: str, step: int) -> None:
        """Note that this rank goes on: what it does from now on, and in which step."""
        now, before = time.monotonic(), self.at
        self._steps += before.phase == "step"
        compiles = before.phase == "step" and self._steps == 1
        if before.phase in self.took and not compiles:
            self.took[before.phase].append(now - before.since)
        self.at = At(phase, step, now)

    def limit(self, phase: str) -> float:
        """Return how long a phase may last, in seconds."""
        took = self.took.get(phase, ())
        if phase == "step" and self.step_s is not None and took:
            return self.step_s
        if len(took) < (FEW if phase == "step" else 1):
            return self.init_s
        return min(self.init_s, max(FLOOR_S, TIMES * max(took)))

    # ---- the thread

    def _watch(self) -> None:
        beaten, unreachable_since, looked = 0.0, None, time.monotonic()
        while not self._over.wait(LOOK_S):
            now = time.monotonic()
            self._forgive(now - looked)
            looked = now
            try:
                if self.store:
                    if now - beaten > BEAT_S:
                        beaten = now
                        self._beat(self.store)
                    self._look(self.store)
                    unreachable_since = None
                if now - (at := self.at).since > self.limit(at.phase):
                    self._hung(at)
            except DistError:  # the store is in the first rank's process, or in its launcher
                unreachable_since = unreachable_since or now
                if now - unreachable_since > 3 * BEAT_S:
                    self.end(self._died(0, "it does not answer any more"))
            except Exception as error:  # what goes wrong here must not leave the run unwatched
                if self.log:
                    self.log.note("".join(traceback.format_exception(error)))

    def _forgive(self, gap: float) -> None:
        """Take out time in which this process was stopped, such as by a scheduler that suspends jobs."""
        if gap > SUSPENDED_S:
            self.at = self.at._replace(since=self.at.since + gap)
            self._beats = {rank: (text, since + gap) for rank, (text, since) in self._beats.items()}

    def _beat(self, store: Store) -> None:
        """Say that this rank is there, and notice who is not: the first hears all, all hear the first."""
        if self.log:  # for a rank whose threads cannot run any more, as some call holds Python's lock
            faulthandler.dump_traceback_later(SILENT_S, file=self.log.file)
        now, limit = time.monotonic(), SILENT_LOST_S if self.lost else SILENT_S
        store.set(f"beat/{self.place.rank}", str(now))
        ranks = range(self.place.size) if self.place.is_main or self.lost else range(1)
        keys = [f"beat/{rank}" for rank in ranks]
        if store.check(keys):
            texts = [text.decode() for text in store.multi_get(keys)]
        else:
            texts = [store.get(key).decode() if store.check([key]) else "" for key in keys]
        for rank, text in zip(ranks, texts, strict=True):
            if self._beats.get(rank, (None, 0.0))[0] != text:
                self._beats[rank] = (text, now)
            silent = now - self._beats[rank][1]
            if silent > limit and not self._has_left(store, rank):
                self.end(self._died(rank, f"no sign of life for {silent:.0f} s"))

    def _look(self, store: Store) -> None:
        if store.check(["failure"]):
            self.end(failure.from_json(store.get("failure")))
        if store.check(["stand"]) and not store.check([f"place/{self.place.rank}"]):
            store.set(f"place/{self.place.rank}", json.dumps(self._stands()))
        for rank in self.near:
            process = self.peers[rank]["pid"]
            if dead(process) and not self._has_left(store, rank):
                time.sleep(LOOK_S)  # it may have told why, and have gone then
                if not store.check(["failure"]):
                    self.end(self._died(rank, f"its process {process} has gone"))

    @staticmethod
    def _has_left(store: Store, rank: int) -> bool:
        return store.check([f"left/{rank}"])

    def _died(self, rank: int, how: str) -> Failure:
        kills = memory_kills() - self.kills
        why = "something killed it, or its host is gone (for lack of memory: dmesg on that host)"
        if rank in self.near:
            why = failure.UNKNOWN
            if kills > 0:
                why = (
                    f"the kernel ended {kills} process{'es' * (kills > 1)} here for lack of memory meanwhile"
                )
        error = f"ended without a word: {how}; {why}"
        return Failure("died", rank, error, DIED, self.peers[rank]["host"], self.at.step, self.at.phase)

    # ---- standing still

    def _stands(self) -> dict[str, Any]:
        number, name, ended = last_collective()
        text = f"in {where(threading.main_thread().ident or 0)}"
        if name:
            text += f", {'after' if ended else 'in'} collective {number} ({name})"
        return {"step": self.at.step, "number": number, "ended": ended, "name": name, "text": text}

    def _hung(self, at: At) -> None:
        waited = time.monotonic() - at.since
        what = f"step {at.step}" if at.phase == "step" else at.phase
        places = self._places()
        hosts = [peer["host"] for peer in self.peers]
        last = behind(places, self.place.size)
        error = f"hung in {what}, no progress for {waited:.0f} s: {blame(places, hosts)}"
        lines = [f"rank {rank} on {host}: {text_of(places, rank)}" for rank, host in enumerate(hosts)]
        here = (hosts[last[0]], at.step, at.phase)
        self.end(Failure("hung", last[0], error, HUNG, *here, traceback="\n".join(lines)))

    def _places(self) -> dict[int, dict[str, Any]]:
        """Ask all ranks where they stand."""
        places = {self.place.rank: self._stands()}
        if self.store is None:
            return places
        self.store.set("stand", "")
        self.store.set(f"place/{self.place.rank}", json.dumps(places[self.place.rank]))
        deadline = time.monotonic() + _PLACES_S
        while len(places) < self.place.size and time.monotonic() < deadline:
            for rank in range(self.place.size):
                if rank not in places and self.store.check([f"place/{rank}"]):
                    places[rank] = json.loads(self.store.get(f"place/{rank}"))
            time.sleep(0.05)
        return places

    # ---- the end

    def fail(self, error: BaseException) -> int:
        """Tell what this rank raised. Returns the status to leave with: that of the run's first failure.

        An error of a connection follows from another rank's end, whose own word counts: it is waited for.
        """
        if _is_lost_connection(error):
            self.lost = True
            deadline = time.monotonic() + SILENT_LOST_S + 10
            while time.monotonic() < deadline and self.store:
                time.sleep(LOOK_S)  # the thread ends the process
        status = status_of(error)
        text = "" if isinstance(error, Told) else "".join(traceback.format_exception(error))
        here = (self.peers[self.place.rank]["host"], self.at.step, self.at.phase)
        return self._tell(
            Failure("error", self.place.rank, one_line(error), status, *here, traceback=text)
        ).status

    def end(self, failed: Failure) -> None:
        """End this process for a failure of any rank."""
        if not self._over.is_set():
            try:
                failed = self._tell(failed)
            finally:
                distributed.leave(failed.status)

    def _tell(self, failed: Failure) -> Failure:
        """Tell a failure, unless another came first. Returns the one that counts."""
        with self._telling:
            if self._told:
                return self._told
            mine = True
            if self.store:
                with contextlib.suppress(DistError):  # without the store, the file decides
                    body = failure.to_json(failed)
                    known = self.store.compare_set("failure", "", body).decode()
                    mine, failed = known == body, failure.from_json(known)
            if mine and self.folder and not failure.record(self.folder, failed):
                mine, failed = False, failure.read(self.folder.parent) or failed
            self._told = failed
            if self.log:
                faulthandler.cancel_dump_traceback_later()
                self.log.note(f"{failed.traceback}\n{failed.text()}")
                with contextlib.suppress(OSError, ValueError):
                    faulthandler.dump_traceback(self.log.file, all_threads=True)
            if mine:
                self._show(failed)
            if self.store and (mine or self.place.is_main):  # whose process may hold what the others read
                time.sleep(_LINGER_S)
            return failed

    def _show(self, failed: Failure) -> None:
        lines = failed.traceback.rstrip().splitlines()[-_TRACEBACK_LINES:]
        text = "\n".join([*lines, failed.text()])
        if lines and self.folder:
            text += f" (logs of all ranks: {self.folder})"
        failure.for_torchrun(failed)
        if self.log:
            self.log.to_screen(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Leave the watch: from now on this process's silence is no fault."""
        if self.store:
            with contextlib.suppress(DistError):
                self.store.set(f"left/{self.place.rank}", "")
        self._over.set()
        self._thread.join(timeout=5)
        faulthandler.cancel_dump_traceback_later()
        if self.log:
            faulthandler.disable()
            self.log.close()


def status_of(error: BaseException) -> int:
    """Return the exit status that an error stands for."""
    if isinstance(error, Told):
        return error.status
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def one_line(error: BaseException) -> str:
    """Return an error as one line."""
    lines = str(error).strip().splitlines()
    if isinstance(error, Told):
        return lines[0] if lines else type(error).__name__
    if isinstance(error, KeyboardInterrupt):
        return "interrupted from the keyboard"
    return f"{type(error).__name__}: {lines[0][:600]}" if lines else type(error).__name__


def _is_lost_connection(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, DistError) or (
        isinstance(error, RuntimeError)
        and any(word in text for word in ("gloo", "connection", "nccl", "broken pipe"))
    )
