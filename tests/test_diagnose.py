"""Faults put into train.py, and what `python -m dstrain diagnose` says of the runs."""

import json
import random
from pathlib import Path

import pytest
from running import REPOSITORY, tiny_recipe
from typer.testing import CliRunner

from dstrain import __main__ as commands
from dstrain.diagnose import diagnose
from dstrain.parity.jobs import Job, run_jobs

WORKER = REPOSITORY / "tests" / "fault_worker.py"
STEPS = 48


def garbage_corpus(folder: Path) -> str:
    """The quickstart's text, with a long document of random words in the middle of it."""
    lines = (REPOSITORY / "recipes/quickstart/data/factbook_docs_eval.jsonl").read_text().splitlines()
    text = json.loads(lines[0])["text"]
    rows = [{"text": text[:400]}] * 60
    rows.insert(30, {"text": "".join(map(chr, random.Random(1).choices(range(0x4E00, 0x9FFF), k=200)))})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "mixed.jsonl")


def few_answers(folder: Path) -> dict:
    rows = [{"prompt": "What is it that is asked here? " * 6, "completion": f"{n}"} for n in range(200)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(folder / "pairs.jsonl"), "format": "prompt_completion"}


# name -> (fault of the worker, ranks, sections of the recipe as a function of the folder)
def faults() -> dict:
    train = {"max_steps": STEPS, "train_micro_batch_size_per_gpu": 4, "learning_rate": 5e-3}
    big = {"max_steps": 8, "train_micro_batch_size_per_gpu": 256}
    rounded = {"learning_rate": 2e-5, "max_steps": 150}
    return {
        "healthy": ("none", 1, lambda p: {"train": train}),
        "rate_too_high": ("none", 1, lambda p: {"train": train | {"learning_rate": 3.0}}),
        "rate_too_low": ("none", 1, lambda p: {"train": train | {"learning_rate": 1e-9}}),
        "bad_document": ("none", 1, lambda p: {
            "train": train | {"train_micro_batch_size_per_gpu": 1, "max_steps": 150}, "data": {"train": garbage_corpus(p)}}),
        "masked": ("none", 1, lambda p: {"train": train, "data": {"train": [few_answers(p)]}}),
        "slow_data": ("slow_loader", 1, lambda p: {"train": train | {"max_steps": 16}}),
        "dead": ("dead_layer", 1, lambda p: {"train": train | {"max_steps": 16}}),
        "exploding": ("exploding_layer", 1, lambda p: {"train": train | {"gradient_clipping": None, "max_steps": 40}}),
        "infinite": ("infinite_gradient", 1, lambda p: {"train": train}),
        "stalls": ("none", 1, lambda p: {
            "train": train | {"max_steps": 16}, "checkpoint": {"save_steps": 1, "async_save": False}}),
        "peak": ("known_peak", 1, lambda p: {"train": train | {"max_steps": 16}}),
        "cuda_memory": ("cuda_memory", 1, lambda p: {"train": train}),
        "cpu_memory": ("cpu_memory", 1, lambda p: {"train": big}),
        "raises": ("raises", 1, lambda p: {"train": train}),
        "stopped": ("stop_file", 1, lambda p: {"train": train}),
        "fp32": ("none", 1, lambda p: {"train": train | rounded}),
        "bf16_states": ("none", 1, lambda p: {"train": train | rounded, "deepspeed": "zero2_bf16_states.json"}),
        "bf16": ("none", 1, lambda p: {"train": train | rounded, "deepspeed": "zero1.json"}),
        "straggler": ("slow_rank_1", 2, lambda p: {"train": train | {"max_steps": 16}}),
        "late_data": ("slow_loader_of_rank_1", 2, lambda p: {"train": train | {"max_steps": 16}}),
        "transfers": ("none", 2, lambda p: {
            "train": train | {"max_steps": 16, "train_micro_batch_size_per_gpu": 1}, "deepspeed": "zero3_fp32.json"}),
    }  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """All faulty runs, made in two launches."""
    home, jobs = tmp_path_factory.mktemp("faults"), []
    for name, (fault, ranks, sections) in faults().items():
        recipe = tiny_recipe(home / name, **sections(home / name))
        jobs.append(Job(home / name, ranks, (fault, "--config", str(recipe))))
    errors = run_jobs(jobs, home / "launches", worker=WORKER)
    assert [error for error in errors if error] == []
    return home


def of(runs, name, **more):
    return diagnose(runs / name / "run", **more)["findings"]


def kinds(findings):
    return [finding["kind"] for finding in findings]
