"""Seconds a step of the quickstart: ours, Hugging Face's Trainer and a bare PyTorch loop, side by side.

    python benchmarks/step_time.py [--rounds 3] [--configs zero1_fp32 zero2]

Every contender is a process of its own; rounds go A B C A B C, since machines are noisy. A contender's time
is that of its best round, where a run counts by the lower quartile of its steps, since other
load only adds time. Same model, text, micro batch, precision and DeepSpeed JSON.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from common import HERE, ROOT, Log, launcher, quarter, read_contender, read_metrics, start

CONFIGS = [f"zero{stage}{suffix}" for suffix in ("_fp32", "") for stage in range(4)]
AS_STARTED = ["zero1_fp32", "zero2"]  # the quickstart's own, and the usual one in bf16
CORES = 2

Run = tuple[float, float]  # seconds a step, cores that other processes used meanwhile


def ours(config: str, threads: int | None, steps: int, scratch: Path) -> Run:
    """Run our quickstart under a DeepSpeed JSON."""
    output = Path(tempfile.mkdtemp(dir=scratch))
    overrides = {
        "output_dir": output,
        "train.max_steps": steps,
        "data.eval": "null",
        "eval.eval_steps": "null",
        "data.cache_dir": scratch / "tokens",
        "checkpoint.save_steps": "null",
        "checkpoint.export": "false",
        "logging.logging_steps": 1,
    }
    command = [*launcher(), "train.py", "--config", "recipes/quickstart/recipe.yaml"]
    command += ["--deepspeed_config", f"{config}.json"]
    others = start(command + [f"{key}={value}" for key, value in overrides.items()], threads)
    return quarter(read_metrics(output)[0]), others


def hf(config: str, threads: int | None, steps: int, scratch: Path) -> Run:
    """Run Hugging Face's Trainer."""
    output = Path(tempfile.mkdtemp(dir=scratch)) / "hf.json"
    command = [
        *launcher(),
        str(HERE / "hf_trainer.py"),
        "--deepspeed",
        str(ROOT / f"ds_configs/{config}.json"),
    ]
    command += ["--steps", str(steps), "--cache_dir", str(scratch / "blocks"), "--output", str(output)]
    others = start(command, threads)
    return quarter(read_contender(output)[0]), others


def bare(precision: str, threads: int | None, steps: int, scratch: Path) -> Run:
    """Run the bare loop, which needs no launcher."""
    output = Path(tempfile.mkdtemp(dir=scratch)) / "bare.json"
    command = [sys.executable, str(HERE / "bare_loop.py"), "--precision", precision, "--steps", str(steps)]
    others = start([*command, "--cache_dir", str(scratch / "blocks"), "--output", str(output)], threads)
    return quarter(read_contender(output)[0]), others


def main() -> None:
    """Run all rounds, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--configs", nargs="+", default=CONFIGS, choices=CONFIGS)
    args = parser.parse_args()
    precisions = {config: "fp32" if config.endswith("_fp32") else "bf16" for config in args.configs}
    started = [config for config in AS_STARTED if config in args.configs]
    plan = [(bare, precision, CORES) for precision in sorted(set(precisions.values()))]
    plan += [(contender, config, CORES) for config in args.configs for contender in (ours, hf)]
    plan += [(contender, config, None) for config in started for contender in (ours, hf)]
    runs: dict[tuple[str, str, int | None], list[Run]] = {}
    log = Log("step_time")
    log("Seconds a step, quickstart (4.2M-parameter Llama, micro batch 8 x 256 tokens), one rank.")
    log(f"{args.rounds} rounds of {args.steps} steps; a run counts by the lower quartile of its steps")
    log("after the fifth, a contender by its best run.")
    log("")
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, args.rounds + 1):
            for contender, config, threads in plan:
                run = contender(config, threads, args.steps, Path(folder))
                runs.setdefault((contender.__name__, config, threads), []).append(run)
                what = f"{contender.__name__:5} {config:11} threads {threads}"
                print(f"round {number}  {what}  {run[0]:.4f} s, others {run[1]:.2f} cores", flush=True)
    best = {key: min(rounds)[0] for key, rounds in runs.items()}

    log(f"Same number of threads (OMP_NUM_THREADS={CORES})")
    rows, goals = [], []
    for config in args.configs:
        mine, theirs = best["ours", config, CORES], best["hf", config, CORES]
        floor = best["bare", precisions[config], CORES]
        rows.append(
            [config, *(f"{value:.4f}" for value in (floor, mine, theirs))]
            + [f"{floor / mine:.2f}", f"{theirs / mine:.2f}"]
        )
        goals.append((f"{config}: HF Trainer / ours", theirs / mine, 1.0))
        if config.startswith(("zero0", "zero1")):
            goals.append((f"{config}: bare / ours", floor / mine, 0.95))
    log.table(["DeepSpeed JSON", "bare", "ours", "HF Trainer", "bare / ours", "HF / ours"], rows)
    log("")
    if started:
        log("As users start both: the deepspeed launcher, nothing set")
        rows = []
        for config in started:
            mine, theirs = best["ours", config, None], best["hf", config, None]
            rows.append([config, f"{mine:.4f}", f"{theirs:.4f}", f"{theirs / mine:.2f}"])
            goals.append((f"{config}: HF Trainer / ours, nothing set", theirs / mine, 1.5))
        log.table(["DeepSpeed JSON", "ours", "HF Trainer", "HF / ours"], rows)
        log("")
    for what, reached, goal in goals:
        log.goal(what, reached, goal)
    log("")
    log("All rounds, in order; in brackets the cores that other processes used meanwhile")
    for (name, config, threads), rounds in runs.items():
        shown = "  ".join(f"{seconds:.4f} ({others:.1f})" for seconds, others in rounds)
        log(f"  {name:5} {config:11} threads {threads or 'unset':5}  {shown}")
    log("")
    log.machine()


if __name__ == "__main__":
    main()
