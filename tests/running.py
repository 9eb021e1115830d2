"""Helpers of the tests: a tiny recipe, and the real launchers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parent.parent
QUICKSTART = REPOSITORY / "recipes" / "quickstart"
LAUNCHERS = ("python", "deepspeed", "torchrun", "accelerate")


def tiny_recipe(folder: Path, **sections) -> Path:
    """Write a recipe of a very small model on the quickstart's text, which trains in seconds."""
    body = {
        "output_dir": str(folder / "run"),
        "deepspeed": "zero1_fp32.json",
        "model": {
            "tokenizer_name_or_path": str(QUICKSTART / "tokenizer"),
            "config": {
                "model_type": "llama",
                "vocab_size": 4096,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
                "tie_word_embeddings": True,
            },
        },
        "data": {
            "train": str(QUICKSTART / "data" / "factbook_docs_eval.jsonl"),
            "eval": str(folder / "held_out.jsonl"),
            "max_seq_length": 64,
        },
        "train": {
            "max_steps": 4,
            "train_micro_batch_size_per_gpu": 2,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
        },
        "checkpoint": {"export": False},
    }
    for name, values in sections.items():
        if isinstance(values, dict):
            body[name] = body.get(name, {}) | values
        else:
            body[name] = values
    folder.mkdir(parents=True, exist_ok=True)
    lines = (QUICKSTART / "data" / "factbook_docs_eval.jsonl").read_text().splitlines()
    short = [{"text": json.loads(line)["text"][:400]} for line in lines]
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in short))
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(body))
    return file


def launch(
    *arguments, launcher: str = "python", ranks: int = 1, cwd: Path = REPOSITORY, env=None, timeout=300,
    script: Path = REPOSITORY / "train.py",
):  # fmt: skip
    """Run train.py, or a script that wraps it, under a real launcher. Returns the finished process."""
    scripts = Path(sys.executable).parent
    port = str(20000 + os.getpid() % 20000)
    command = {
        "python": [sys.executable],
        "deepspeed": [
            str(scripts / "deepspeed"),
            "--num_gpus",
            str(ranks),
            "--master_port",
            port,
            "--log_level",
            "error",
        ],
        "torchrun": [str(scripts / "torchrun"), "--nproc-per-node", str(ranks), "--master-port", port],
        "accelerate": [
            *(str(scripts / "accelerate"), "launch", "--cpu", "--num_processes", str(ranks)),
            *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
            *("--main_process_port", port),
        ],
    }[launcher]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "RANK"))}
    for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)  # a process group inside the tests sets them
    environment["PATH"] = f"{scripts}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        [*command, str(script), *map(str, arguments)],
        cwd=cwd,
        env=environment | (env or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def metrics(output_dir: Path) -> list[dict]:
    """Return the rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def losses(output_dir: Path) -> list[float]:
    """Return the training losses of a run, step by step."""
    return [row["loss"] for row in metrics(output_dir) if "loss" in row]
