"""Helpers of the tests: a tiny recipe, and the real launchers."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
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


def free_port() -> int:
    """Return a port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def clean_environment() -> dict[str, str]:
    """Return this environment without what a launcher, W&B or a process group in the tests has set."""
    names = (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("CROSS_RANK", "CROSS_SIZE", "GLOO_SOCKET_IFNAME", "DSTRAIN_RESTARTS", "DS_ACCELERATOR"),
    )
    prefixes = ("WANDB", "TORCHELASTIC", "OMPI_", "SLURM_", "PMIX_")
    environment = {
        key: value for key, value in os.environ.items() if key not in names and not key.startswith(prefixes)
    }
    scripts = Path(sys.executable).parent
    environment["PATH"] = f"{scripts}{os.pathsep}{environment['PATH']}:/usr/sbin:/sbin"
    return environment


def launcher_command(launcher: str, ranks: int) -> list[str]:
    """Return the words of a launcher before the script."""
    scripts = Path(sys.executable).parent
    port = str(free_port())
    return {
        "python": [sys.executable],
        "deepspeed": [
            *(str(scripts / "deepspeed"), "--num_gpus", str(ranks), "--master_port", port),
            *("--log_level", "error"),
        ],
        "torchrun": [str(scripts / "torchrun"), "--nproc-per-node", str(ranks), "--master-port", port],
        "accelerate": [
            *(str(scripts / "accelerate"), "launch", "--cpu", "--num_processes", str(ranks)),
            *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
            *("--main_process_port", port),
        ],
    }[launcher]


def launch(
    *arguments, launcher: str = "python", ranks: int = 1, cwd: Path = REPOSITORY, env=None, timeout=300,
    script: Path = REPOSITORY / "train.py",
):  # fmt: skip
    """Run train.py, or a script that wraps it, under a real launcher. Returns the finished process."""
    return subprocess.run(
        [*launcher_command(launcher, ranks), str(script), *map(str, arguments)],
        cwd=cwd,
        env=clean_environment() | (env or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


class Started(subprocess.Popen):
    """A process whose output goes to files: it may say any amount before somebody asks."""

    def __init__(self, command, **how):
        self.out, self.err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
        super().__init__(
            command, stdin=subprocess.DEVNULL, stdout=self.out, stderr=self.err, text=True, **how
        )

    def communicate(self, timeout=None):
        """Wait until it has ended, and return what it said."""
        self.wait(timeout)
        for file in (self.out, self.err):
            file.seek(0)
        return self.out.read(), self.err.read()


def script(name: str, *arguments, **environment) -> Started:
    """Start a script of launch/ on this machine."""
    command = [str(REPOSITORY / "launch" / name), *map(str, arguments)]
    return Started(command, env=clean_environment() | environment)


def metrics(output_dir: Path) -> list[dict]:
    """Return the rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def losses(output_dir: Path) -> list[float]:
    """Return the training losses of a run, step by step."""
    return [row["loss"] for row in metrics(output_dir) if "loss" in row]


def ranks_of(recipe: Path) -> list[int]:
    """Return the process ids of the ranks that train a recipe on this machine."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        is_rank = any(word.endswith(b"train.py") for word in words[:4]) and str(recipe).encode() in words
        names = (b"deepspeed.launcher.launch", b"torch.distributed.run", b"accelerate.commands.launch")
        launcher = any(word in names or word.endswith((b"/deepspeed", b"/torchrun")) for word in words[:4])
        if is_rank and not launcher:
            found.append(int(folder.name))
    return sorted(found)


def wait_for(condition, seconds: float = 120) -> None:
    """Wait until a condition holds, or fail."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


def trains(recipe: Path, rows: int = 3) -> bool:
    """Whether a run has written more than `rows` rows."""
    run = recipe.parent / "run"
    return (run / "metrics.jsonl").exists() and len(metrics(run)) > rows


def last_step(recipe: Path) -> int | None:
    """Return the step of the newest checkpoint of a run."""
    from dstrain import checkpoint

    return checkpoint.newest_step(recipe.parent / "run" / "checkpoints")
