"""Kill a training run again and again with SIGKILL, start it again, and compare it with one that was left alone.

    python tests/drill.py --points 200 --seed 0     # half an hour or more; writes benchmarks/logs/drill.log

Each point is a moment inside a step, inside a phase of a save, while an old checkpoint is deleted, or while a
checkpoint is loaded, on a random rank or on all; the process kills itself there, so that moments of microseconds
are hit. Whatever happened: the loss curve ends up bit-equal, and no checkpoint that was good is lost.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests"), str(REPOSITORY / "benchmarks")]

STEPS, EVERY, RANKS = 24, 3, 2

# Where to die: module, attribute, and whether before, after or in the middle of that call.
PHASES = {
    "inside a step": ("train", "train_step", "before"),
    "after a step": ("train", "train_step", "after"),
    "while the state is copied": ("dstrain.checkpoint.saver", "Saver._copy", "before"),
    "with the state copied": ("dstrain.checkpoint.saver", "Saver._copy", "after"),
    "before a file": ("dstrain.checkpoint.saver", "save_file", "before"),
    "with a file half written": ("dstrain.checkpoint.saver", "save_file", "half"),
    "with a file written": ("dstrain.checkpoint.saver", "save_file", "after"),
    "before the manifest": ("dstrain.checkpoint.store", "write_manifest", "before"),
    "with the manifest written": ("dstrain.checkpoint.store", "write_manifest", "after"),
    "before an old folder goes": ("dstrain.checkpoint.store", "delete", "before"),
    "with the folder named": ("dstrain.checkpoint.store", "sync_folder", "after"),
    "while latest is replaced": ("dstrain.checkpoint.store", "write_text", "before"),
    "with latest replaced": ("dstrain.checkpoint.store", "write_text", "after"),
    "while old ones are deleted": ("dstrain.checkpoint.store", "prune", "before"),
    "with old ones deleted": ("dstrain.checkpoint.store", "prune", "after"),
    "while a checkpoint is loaded": ("dstrain.checkpoint.store", "Reader.read", "after"),
    "while weights are made anew": ("dstrain.fragments", "refresh", "before"),
}


def plant(phase: str, nth: int) -> None:
    """Make this process kill itself with SIGKILL at the nth time it comes to a phase."""
    import importlib

    module, attribute, when = PHASES[phase]
    holder = importlib.import_module(module)
    *parents, name = attribute.split(".")
    for parent in parents:
        holder = getattr(holder, parent)
    original, calls = getattr(holder, name), 0

    def die(*args, **kwargs):
        nonlocal calls
        calls += 1
        last = calls == nth
        if last and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        value = original(*args, **kwargs)
        if last and when == "half":
            file = args[1]
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    setattr(holder, name, die)


def start(recipe: Path, *arguments: str, order: dict | None = None) -> subprocess.CompletedProcess:
    """Start the run under the real launcher; `order` tells ranks where to die."""
    from running import clean_environment, launcher_command

    environment = clean_environment() | {"DRILL": json.dumps(order or {})}
    return subprocess.run(
        [*launcher_command("deepspeed", RANKS), str(Path(__file__)), "--config", str(recipe), *arguments],
        env=environment, capture_output=True, text=True, timeout=1800, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def drill(
    points: int, seed: int, folder: Path, say: Callable[[str], None] = print, times: int = 4
) -> list[str]:
    """Run the drill and return a line for each point. Raises AssertionError for the first thing that is lost.

    times: a process dies at most so many times after it first came to its phase; a run may end before that.
    """
    from running import metrics, tiny_recipe

    from dstrain import checkpoint

    recipe = tiny_recipe(
        folder, train={"max_steps": STEPS, "train_micro_batch_size_per_gpu": 1, "lr_scheduler_type": "cosine"},
        checkpoint={"export": False, "save_steps": EVERY, "save_total_limit": 2},
    )  # fmt: skip
    left_alone = folder / "left-alone"
    done = start(recipe, f"output_dir={left_alone}")
    assert done.returncode == 0, done.stderr[-2000:]
    expected = metrics(left_alone)
    chance = random.Random(seed)
    run, lines, number = folder / "run", [], 0
    phases: list[str] = []
    while number < points:
        if not phases:
            phases = chance.sample(list(PHASES), len(PHASES))
        phase = phases.pop()
        who = chance.choice([*range(RANKS), "all"])
        if PHASES[phase][0].endswith("store") and "read" not in PHASES[phase][1].lower():
            who = chance.choice([0, "all"])  # the first rank alone does these
        order = {"phase": phase, "rank": who, "nth": chance.randint(1, times)}
        root = run / "checkpoints"
        good = [s for s in checkpoint.steps(root) if checkpoint.problem(root / f"step-{s}") is None]
        began = time.perf_counter()
        process = start(recipe, f"output_dir={run}", order=order)
        after = [s for s in checkpoint.steps(root) if checkpoint.problem(root / f"step-{s}") is None]
        # What is there, or newer ones of which so many are kept.
        assert not good or (after and max(after) >= max(good)), (order, good, after)
        killed = process.returncode != 0
        lines.append(
            f"{number + 1:>4} {phase} (time {order['nth']}, rank {who}): "
            f"{'killed' if killed else 'ran to its end'}, newest good {max(good, default=0)} -> {max(after, default=0)}, "
            f"{time.perf_counter() - began:.0f} s"
        )
        say(lines[-1])
        if killed:
            number += 1
        if not killed:
            finished(run, expected)
            shutil.rmtree(run)
    if run.exists():
        process = start(recipe, f"output_dir={run}")
        assert process.returncode == 0, process.stderr[-2000:]
        finished(run, expected)
    return lines


def finished(run: Path, expected: list[dict]) -> None:
    """Compare a finished run with the one that was left alone."""
    from running import metrics

    rows = metrics(run)
    keys = ("step", "loss", "grad_norm", "lr", "tokens_seen", "eval_loss")
    for key in keys:
        assert [row[key] for row in rows if key in row] == [row[key] for row in expected if key in row], key
    root = run / "checkpoints"
    kept, wanted = (
        {path.name for path in root.iterdir()},
        {f"step-{STEPS}", f"step-{STEPS - EVERY}", "latest"},
    )
    # One that was killed after its last save, and so found nothing left to do, may not have deleted the old one.
    # Starts delete what earlier kills have left.
    assert kept in (wanted, wanted | {f"step-{STEPS - 2 * EVERY}"}), kept


def main() -> None:
    """Run the drill, or, when a launcher starts it with a recipe, train."""
    if "DRILL" in os.environ:
        import train
        from dstrain import distributed, watchdog

        order = json.loads(os.environ.pop("DRILL"))
        if order and order["rank"] in ("all", int(os.environ["RANK"])):
            plant(order["phase"], order["nth"])
        train.main(train.parse_args(), distributed.prepare())
        watchdog.finish()
        distributed.leave(0)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    from common import Log

    log, started = Log("drill"), time.perf_counter()
    log(f"python tests/drill.py --points {args.points} --seed {args.seed}")
    with tempfile.TemporaryDirectory(prefix="drill-") as folder:
        drill(args.points, args.seed, Path(folder), say=log)
    log(f"{args.points} kills, nothing lost, loss curve bit-equal; {time.perf_counter() - started:.0f} s")
    log.machine()


if __name__ == "__main__":
    main()
