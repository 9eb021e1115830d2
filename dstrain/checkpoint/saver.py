"""Write checkpoints while training goes on: a copy in host memory, and a thread that writes it."""

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dstrain import distributed, fragments, rng
from dstrain.checkpoint import store
from dstrain.errors import UserError

_PATIENCE_S = 1800.0  # for the slowest rank's file
_SPARE = 64 * 2**20  # bytes on the disk beside a checkpoint


class Saver:
    """Saves the state of an engine into `checkpoints/`, one checkpoint at a time. All ranks call its methods.

    Files are written into `tmp-STEP`, flushed and listed with their checksums; then the folder gets its name,
    and `latest` is replaced last. Ranks tell one another through the folder itself, which all must share.
    """

    def __init__(
        self,
        output_dir: Path,
        place: distributed.World,
        *,
        save_total_limit: int | None,
        async_save: bool,
        save_optimizer: bool,
    ) -> None:
        """save_total_limit: checkpoints that stay, None for all. save_optimizer: also its states."""
        self.root, self.place, self.keep = output_dir / "checkpoints", place, save_total_limit
        self.background, self.with_states = async_save, save_optimizer
        # Of the last save; what was written in a second is of the last one that is written whole.
        self.measured: dict[str, float] = {}
        self._rate: float | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._step: int | None = None
        if place.is_main:
            store.sweep(self.root)
            if self.keep:  # kills after a save and before its pruning would leave more and more of them
                store.prune(self.root, self.keep)

    def save(self, engine: Any, step: int, trainer: Mapping[str, Any]) -> None:
        """Save the engine as it is after `step`, with `trainer`: plain numbers and strings of the loop.

        Returns when the state is copied. Raises UserError if the save before this one failed; a disk that is
        full is said, and training goes on with the checkpoints that it has.
        """
        started = time.perf_counter()
        self.wait()
        self.measured = {}
        if self._step == step:
            return
        tensors, listed = self._copy(engine)
        own = sum(tensor.nbytes for tensor in tensors.values())
        temporary = self.root / f"tmp-{step}"
        free = 0
        if self.place.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            free = shutil.disk_usage(self.root).free
        sizes, frees = zip(*distributed.gather((own, free)), strict=True)  # and the folder is there
        if sum(sizes) + _SPARE > frees[0]:
            gib = (sum(sizes) / 2**30, frees[0] / 2**30)
            self._warn(f"step {step} is not saved: it takes {gib[0]:.2f} GiB, and {gib[1]:.2f} GiB are free")
            if self.place.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            return
        body = {
            "format": store.FORMAT,
            "step": step,
            "trainer": dict(trainer),
            "layout": layout(engine, self.place),
            "optimizer": {
                "step": fragments.read_step(engine),
                "type": type(fragments.optimizer_of(engine)).__name__,
                "loss_scale": fragments.loss_scale(engine),
            },
            "parameters": {
                name: list(getattr(p, "ds_shape", p.shape))
                for name, p in engine.module.model.named_parameters()
            },
        }
        self._step, self._error = step, None
        self._thread = threading.Thread(
            target=self._write, args=(temporary, tensors, listed, body), name="checkpoint", daemon=True
        )
        self._thread.start()
        if not self.background:
            self.wait()
            if self._step is None:  # the disk was full
                return
        self.measured = {
            "checkpoint_stall_s": time.perf_counter() - started,
            "checkpoint_gib": sum(sizes) / 2**30,
        } | ({} if self._rate is None else {"checkpoint_gib_per_s": self._rate})

    def wait(self) -> None:
        """Wait until the last checkpoint is written. Raises UserError if that failed, on all ranks."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        errors = [(rank, error) for rank, error in enumerate(distributed.gather(_say(self._error))) if error]
        if not errors:
            if self._rate is not None:
                self.measured["checkpoint_gib_per_s"] = self._rate
            return
        self.measured = {}
        rank, (full, reason) = errors[0]
        temporary, step, self._step = self.root / f"tmp-{self._step}", self._step, None
        if self.place.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        if not full:
            raise UserError(f"{self.root}: step {step} could not be saved: rank {rank}: {reason}")
        self._warn(
            f"step {step} is not saved: {reason}; training goes on with the checkpoints that are there"
        )

    def _warn(self, line: str) -> None:
        distributed.say(self.place, f"warning: {self.root}: {line}")

    @torch.no_grad()
    def _copy(self, engine: Any) -> tuple[dict[str, torch.Tensor], list[tuple[str, str, int, int]]]:
        """Copy what this rank is to write: tensors by key, and (kind, parameter, first element, number)."""
        tensors: dict[str, torch.Tensor] = {}
        listed = []
        for group in fragments.subgroups(engine, write=False):
            for piece in group:
                low, high = 0, piece.numel
                if piece.replicated:  # each rank writes its share
                    low, high = (
                        piece.numel * r // self.place.size for r in (self.place.rank, self.place.rank + 1)
                    )
                if low == high:
                    continue
                kinds = [None, *piece.moments] if self.with_states else [None]
                for kind in kinds:
                    key = (kind or store.MASTER, piece.name, piece.start + low)
                    tensors[":".join(map(str, key))] = piece.view(kind)[low:high].to("cpu", copy=True)
                    listed.append((*key, high - low))
        if self.place.is_main:
            saved = engine.module.model.state_dict().keys()
            for name, buffer in engine.module.model.named_buffers():
                if name in saved:
                    tensors[f"buffer:{name}"] = buffer.detach().to("cpu", copy=True).contiguous()
        tensors |= {f"rng:{name}": tensor for name, tensor in rng.rng_state().items()}
        return tensors, listed

    def _write(
        self, temporary: Path, tensors: dict[str, torch.Tensor], listed: list, body: dict[str, Any]
    ) -> None:
        started = time.perf_counter()
        try:
            file = temporary / file_of(self.place.rank)
            save_file(tensors, file)
            file.chmod(0o666 & ~distributed.UMASK)  # safetensors are written for the owner alone
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
            part = {"size": file.stat().st_size, "sha256": store.digest(file), "fragments": listed}
            if self.place.is_main:
                size = self._complete(temporary, part, body)
                self._rate = size / 2**30 / (time.perf_counter() - started)
            else:
                store.write_text(temporary / _part(self.place.rank), json.dumps(part))
        except BaseException as error:  # told to all ranks by `wait`
            self._error = error

    def _complete(self, temporary: Path, own: dict[str, Any], body: dict[str, Any]) -> int:
        """Wait for the other ranks' files, write the manifest, and give the folder its name.

        Returns the bytes of all ranks' files.
        """
        parts = {0: own}
        deadline = time.monotonic() + _PATIENCE_S
        while len(parts) < self.place.size:
            for rank in range(self.place.size):
                if rank not in parts and (file := temporary / _part(rank)).exists():
                    parts[rank] = json.loads(file.read_text(encoding="utf-8"))
            if len(parts) < self.place.size:
                if time.monotonic() > deadline:
                    late = [rank for rank in range(self.place.size) if rank not in parts]
                    raise TimeoutError(
                        f"no file of rank {', '.join(map(str, late))} within {_PATIENCE_S:.0f} s"
                    )
                time.sleep(0.02)
        found: dict[str, dict[str, list]] = {}
        for rank, part in sorted(parts.items()):
            for kind, name, start, numel in part["fragments"]:
                found.setdefault(kind, {}).setdefault(name, []).append([rank, start, numel])
        files = {file_of(rank): {k: part[k] for k in ("size", "sha256")} for rank, part in parts.items()}
        for rank in range(1, self.place.size):
            (temporary / _part(rank)).unlink()
        store.write_manifest(temporary, body | {"files": files, "fragments": found})
        final = store.folder_of(self.root, body["step"])
        store.delete(final)  # of another time line, or damaged
        temporary.rename(final)
        store.sync_folder(self.root)
        store.write_text(self.root / "latest", f"{final.name}\n")
        if self.keep:
            store.prune(self.root, self.keep)
        return sum(part["size"] for part in parts.values())


def file_of(rank: int) -> str:
    """Return the name of a rank's file. Their order is that of the ranks."""
    return f"rank-{rank:05d}.safetensors"


def _part(rank: int) -> str:
    return f"part-{rank}.json"


def layout(engine: Any, place: distributed.World) -> dict[str, Any]:
    """Return what the pieces of a checkpoint came from."""
    precision = "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32"
    return {"ranks": place.size, "zero_stage": engine.zero_optimization_stage(), "precision": precision}


def _say(error: BaseException | None) -> tuple[bool, str] | None:
    if error is None:
        return None
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    full = full or "No space left" in str(error)  # as safetensors says it
    return full, f"{type(error).__name__}: {error}"
