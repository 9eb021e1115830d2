"""Find the newest checkpoint that is whole, and put it into an engine of whatever layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dstrain import distributed, fragments, rng
from dstrain.checkpoint import store
from dstrain.checkpoint.saver import file_of, layout
from dstrain.errors import UserError


def find(output_dir: Path, resume_from: str) -> Path | None:
    """Return the folder that holds the checkpoints to resume from, or one of them, or None to start anew.

    `auto` and a run's own checkpoints go before anything named. Raises UserError if a named place holds no
    checkpoint, or with `never` if output_dir does.
    """
    own = output_dir / "checkpoints"
    if resume_from == "never":
        if found := store.steps(own):
            raise UserError(
                f"checkpoint.resume_from_checkpoint='never', but output_dir={str(output_dir)!r} holds "
                f"step-{found[-1]}; choose another output_dir"
            )
        return None
    if store.steps(own):
        return own
    if resume_from == "auto":
        return None
    named = Path(resume_from)
    for folder in (named, named / "checkpoints"):
        if (folder / store.MANIFEST).exists() or store.steps(folder):
            return folder
    raise UserError(
        f"checkpoint.resume_from_checkpoint={resume_from!r}: holds no checkpoint; "
        "give an output folder or one of its checkpoints/step-N"
    )


def newest_step(place: Path | None) -> int | None:
    """Return the step of the newest checkpoint in what `find` returned, unverified."""
    if place is None:
        return None
    if (place / store.MANIFEST).exists():
        return store.read_manifest(place)["step"]
    found = store.steps(place)
    return found[-1] if found else None


def newest_good(found: Path, place: distributed.World) -> Path:
    """Return the newest checkpoint whose every file is as it was written. All ranks call it, and agree.

    Ranks share the work of reading. One that is damaged is said and set aside as `damaged-step-N`, and the
    one before it is tried. Raises UserError if none is left.
    """
    single = (found / store.MANIFEST).exists()
    folders = [found] if single else [store.folder_of(found, step) for step in reversed(store.steps(found))]
    wrong = ""
    for folder in folders:
        own = store.problem(folder, slice(place.rank, None, place.size))
        problems = [problem for problem in distributed.gather(own) if problem]
        if not problems:
            return folder
        wrong = problems[0]
        if not single:
            distributed.say(place, f"warning: {wrong}; going back to the checkpoint before it")
            if place.is_main:
                aside = folder.with_name(f"damaged-{folder.name}")
                store.delete(aside)
                folder.rename(aside)
            distributed.barrier()
    raise UserError(f"{wrong}; no other checkpoint is there to resume from")


@torch.no_grad()
def load(engine: Any, folder: Path, place: distributed.World) -> dict[str, Any]:
    """Put a checkpoint into the engine, and return what the loop saved with it, and its `step`.

    Each rank reads its own part, whatever the layout was that it was saved from. Learning rate, betas,
    epsilon and weight decay stay those that the engine was made with: the recipe decides, not the file. The
    random generators are restored where the number of ranks is the same.
    """
    engine.empty_partition_cache()  # of ZeRO 3: no weight may be on its way while it is written
    reader = store.Reader(folder)
    manifest = reader.manifest
    expected = _hyperparameters(engine)
    parameters = manifest["parameters"]
    for name, parameter in engine.module.model.named_parameters():
        shape = list(getattr(parameter, "ds_shape", parameter.shape))
        if parameters.get(name) != shape:
            raise UserError(f"{folder}: {name} is {parameters.get(name)} there and {shape} in this model")
    own = sum(piece.numel for piece in _local(engine))
    bar = tqdm(total=own, unit="el", unit_scale=True, desc="resuming", disable=not place.is_main, delay=2)
    for group in fragments.subgroups(engine, write=True):
        for piece in group:
            reader.read(store.MASTER, piece.name, piece.start, piece.view())
            for kind in reader.states:
                if not isinstance(piece.state.get(kind), torch.Tensor):
                    piece.state[kind] = torch.zeros_like(piece.owner.data)
                reader.read(kind, piece.name, piece.start, piece.view(kind))
            if reader.states:
                fragments.write_step(engine, piece.state, manifest["optimizer"]["step"])
            bar.update(piece.numel)
    bar.close()
    fragments.refresh(engine)
    fragments.replay(engine, manifest["optimizer"]["step"])
    for name, tensor in reader.tensors(file_of(0), "buffer:").items():
        engine.module.model.get_buffer(name).copy_(tensor)
    fragments.set_loss_scale(engine, manifest["optimizer"]["loss_scale"])
    _set_position(engine, manifest["step"])
    if manifest["layout"]["ranks"] == place.size:
        rng.set_rng_state(reader.tensors(file_of(place.rank), "rng:"))
    _check(engine, expected, manifest)
    same = manifest["layout"] == layout(engine, place)
    return manifest["trainer"] | {"step": manifest["step"], "same_layout": same, "layout": manifest["layout"]}


def _local(engine: Any) -> list[fragments.Piece]:
    if engine.zero_optimization_stage() == 3:  # may lie in files: counted when they are there
        return []
    return [piece for group in fragments.subgroups(engine, write=False) for piece in group]


def _set_position(engine: Any, step: int) -> None:
    """Set the engine's and the schedule's counters to what they are after `step`."""
    engine.global_steps, engine.micro_steps = step, step * engine.gradient_accumulation_steps()
    engine.global_samples = step * engine.train_batch_size()
    scheduler = engine.lr_scheduler
    scheduler.last_epoch, scheduler._step_count = step, step + 1
    for group, peak, at in zip(
        scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
    ):
        group["lr"] = peak * at(step)
    scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]


def _hyperparameters(engine: Any) -> list[dict[str, Any]]:
    names = ("betas", "eps", "weight_decay", "momentum", "initial_lr")
    groups = fragments.optimizer_of(engine).param_groups
    return [{name: group[name] for name in names if name in group} for group in groups]


def _check(engine: Any, expected: list[dict[str, Any]], manifest: Mapping[str, Any]) -> None:
    """Raise RuntimeError if loading changed what belongs to the recipe, or left the optimizer's count."""
    if _hyperparameters(engine) != expected:
        raise RuntimeError(
            f"loading changed the optimizer's groups: {_hyperparameters(engine)}, not {expected}"
        )
    step = manifest["optimizer"]["step"]
    if len(manifest["fragments"]) > 1 and fragments.read_step(engine) != step:
        raise RuntimeError(f"the optimizer counts {fragments.read_step(engine)} updates, not {step}")
