"""Faults put into train.py, and what `python -m dstrain diagnose` says of the runs."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fault_worker import CUDA_WORDS
from running import REPOSITORY, metrics, tiny_recipe
from typer.testing import CliRunner

from dstrain import __main__ as commands
from dstrain.diagnose import KINDS, diagnose, memory, requested_layout, screen
from dstrain.errors import UserError
from dstrain.observe import health, meter
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
    rows = [{"prompt": "What is it that is asked here? " * 4 + str(n), "completion": "."} for n in range(200)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(folder / "pairs.jsonl"), "format": "prompt_completion"}


# name -> (fault of the worker, ranks, sections of the recipe as a function of the folder)
def faults() -> dict:
    train = {"max_steps": STEPS, "train_micro_batch_size_per_gpu": 4, "learning_rate": 5e-3}
    big = {"max_steps": 8, "train_micro_batch_size_per_gpu": 256}
    rounded = {"learning_rate": 3e-4, "max_steps": 60}  # of weights ten times as large as usual
    large = "model.config.initializer_range=0.2"
    return {
        "healthy": ("none", 1, lambda p: {"train": train | {"train_micro_batch_size_per_gpu": 8}}),
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
        "early": ("memory_at_start", 1, lambda p: {"train": train}),
        "raises": ("raises", 1, lambda p: {"train": train}),
        "stopped": ("stop_file", 1, lambda p: {"train": train}),
        "fp32": ("none", 1, lambda p: {"train": train | rounded}, large),
        "bf16_states": ("none", 1, lambda p: {"train": train | rounded, "deepspeed": "zero2_bf16_states.json"}, large),
        "bf16": ("none", 1, lambda p: {"train": train | rounded, "deepspeed": "zero1.json"}, large),
        "straggler": ("slow_rank_1", 2, lambda p: {"train": train | {"max_steps": 16}}),
        "late_data": ("slow_loader_of_rank_1", 2, lambda p: {"train": train | {"max_steps": 16}}),
        "transfers": ("none", 2, lambda p: {
            "train": train | {"max_steps": 16, "train_micro_batch_size_per_gpu": 1}, "deepspeed": "zero3_fp32.json"}),
    }  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """All faulty runs, made in two launches."""
    home, jobs = tmp_path_factory.mktemp("faults"), []
    for name, (fault, ranks, sections, *overrides) in faults().items():
        recipe = tiny_recipe(home / name, **sections(home / name))
        jobs.append(Job(home / name, ranks, (fault, "--config", str(recipe), *overrides)))
    errors = run_jobs(jobs, home / "launches", worker=WORKER)
    assert [error for error in errors if error] == []
    return home


def of(runs, name, reference=None):
    run = runs / name / "run"
    return diagnose(run, reference and runs / reference / "run", requested_layout(run))["findings"]


def kinds(findings):
    return [finding["kind"] for finding in findings]


def words(finding):
    return "\n".join((finding["title"], *finding["evidence"], *finding["changes"]))


@pytest.mark.slow
def test_a_good_run_gets_no_finding(runs):
    for name in ("healthy", "fp32"):
        result = diagnose(runs / name / "run")
        assert result["findings"] == []
        assert screen(result).startswith("nothing wrong found\nlooked at: steps ")
        assert {"loss", "gradient norm", "computing", "data", "transfers", "saves"} <= set(
            result["looked_at"]
        )


# Of each fault: the kind that must come first, and what its text must hold.
EXPECTED = {
    "rate_too_high": (
        "diverged",
        ("from step 2 on", "lr 3.00e+00", "before it 0.649", "train.learning_rate=3e-01"),
    ),
    "rate_too_low": ("flat", ("learning rates add up to 4.8e-08", "ln(vocabulary) = 8.318")),
    "bad_document": ("spike", ("loss spike at step", "median of 50 steps before", "mixed.jsonl:31")),
    "slow_data": ("data", ("of a step is waiting for data", "data.cache_dir")),
    "dead": ("dead_layer", ("no gradient in model.layers.1", "model.layers.1.self_attn.q_proj.weight")),
    "exploding": ("exploding_layer", ("exploding gradient in model.layers.1", "of the gradient")),
    "infinite": (
        "diverged",
        ("non-finite gradient at step 15 on rank 0", "factbook_docs_eval.jsonl:", "median of"),
    ),
    "stalls": ("checkpoint", ("waiting for saves", "checkpoint.async_save=true", "checkpoint.save_steps=4")),
    "peak": ("utilization", ("MFU 0%",)),
    "cuda_memory": ("out_of_memory", ("1.96 GiB with 1.02 GiB free of 23.64: 0.94 GiB short", "phase step")),
    "cpu_memory": ("out_of_memory", ("out of memory on the host", "at most that much short", "logits 0.50")),
    "early": (
        "out_of_memory",
        ("phase start-up", "0.94 GiB short", "estimated need of a rank", "zero3_offload.json"),
    ),
    "raises": ("error", ("No space left on device", "raised in", "save_total_limit=1")),
    "stopped": ("interrupted", ("by the file STOP", "newest checkpoint: step 1", "the same command again")),
    "straggler": ("straggler", ("rank 1 (", "times as long", "others waits for it")),
    "late_data": ("data", ("of a step is waiting for data", "rank 1 (")),
    "transfers": ("communication", ("of a step is in collectives", "ZeRO 3", "--zero_stage 2")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_a_fault_is_named_first(runs, name):
    kind, said = EXPECTED[name]
    findings = of(runs, name)
    assert kinds(findings)[0] == kind, findings
    assert set(kinds(findings)) <= set(KINDS)
    for part in said:
        assert part in words(findings[0]), words(findings[0])
    shown = screen({"findings": findings, "looked_at": {}})
    assert len(shown.splitlines()) < 50
    assert max(map(len, shown.splitlines())) <= 200  # a path may be long


@pytest.mark.slow
def test_few_labels_and_low_utilization(runs):
    (found,) = [finding for finding in of(runs, "masked") if finding["kind"] == "few_labels"]
    assert "of the tokens are in the loss" in words(found) and "--dry-run" in words(found)
    for name, part in (
        ("slow_data", "waiting for data"),
        ("stalls", "stalls of saves"),
        ("straggler", "slower ranks"),
    ):
        (low,) = [finding for finding in of(runs, name) if finding["kind"] == "utilization"]
        assert part in low["evidence"][1] and "70% is asked for" in words(low)


@pytest.mark.slow
def test_precision_against_a_reference(runs):
    """bf16 without fp32 master weights rounds the updates away; with them it ends where fp32 does."""
    (lost, *_) = of(runs, "bf16_states", "fp32")
    assert lost["kind"] == "precision"
    for part in (
        "they part at step",
        "held-out loss at step 60",
        "master_weights bf16 here, fp32 there",
        "fp32 master",
    ):
        assert part in words(lost)
    assert "no fp32 master weights" in words(next(f for f in of(runs, "bf16_states") if f["kind"] == "flat"))
    (same,) = of(runs, "bf16", "fp32")
    assert same["title"] == "no different from the reference"
    (other,) = [finding for finding in of(runs, "healthy", "fp32") if finding["kind"] == "different"]
    assert "in_force.global_batch" in words(other) and "cannot be compared" in other["title"]


@pytest.mark.slow
def test_failures_that_others_write(runs, tmp_path):
    """A rank that died, that the kernel killed, that hung: in the words of logs/failure.json, on a real run's folder."""
    run = tmp_path / "run"
    shutil.copytree(runs / "raises" / "run", run)
    failure = json.loads((run / "logs" / "failure.json").read_text())

    def found(**changes):
        (run / "logs" / "failure.json").write_text(json.dumps(failure | {"traceback": ""} | changes))
        return diagnose(run)["findings"][0]

    words_of_memory = (
        "ended without a word: its process 7 has gone; the kernel ended 1 process here for lack of memory"
    )
    killed = found(kind="died", rank=1, host="node7", error=words_of_memory, status=5, step=3)
    assert (killed["kind"], killed["evidence"][0]) == ("out_of_memory", "rank 1 (node7), step 3, phase step")
    assert any("model.gradient_checkpointing=true" in line for line in killed["changes"])
    died = found(
        kind="died",
        rank=1,
        host="node7",
        error="ended without a word: a signal or a crash ended it",
        status=5,
    )
    assert (died["kind"], died["title"]) == ("died", "rank 1 died")
    stands = "rank 0 on node7: in wait\nrank 2 on node7: in sleep"
    hung = found(
        kind="hung",
        rank=2,
        host="node7",
        error="hung in step 3: rank 2 is behind",
        status=4,
        traceback=stands,
    )
    assert (
        hung["kind"] == "hung"
        and "rank 2 is behind" in words(hung)
        and "rank 2 on node7: in sleep" in words(hung)
    )
    collapsed = found(
        error="Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."
    )
    assert (collapsed["kind"], collapsed["title"]) == ("scale", "the fp16 loss scale collapsed")
    assert (
        found(time="2020-01-01T00:00:00+00:00")["kind"] == "ended"
    )  # of an earlier start, so it tells nothing


@pytest.mark.slow
def test_a_run_that_goes_on_and_one_that_was_killed(tmp_path):
    recipe = tiny_recipe(
        tmp_path, train={"max_steps": 100_000}, checkpoint={"export": False, "save_steps": 5}
    )
    command = [sys.executable, str(REPOSITORY / "train.py"), "--config", str(recipe)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run, deadline = tmp_path / "run", time.monotonic() + 200
    while not (run / "metrics.jsonl").exists() or len(metrics(run)) < 12:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    assert "running" in kinds(diagnose(run)["findings"])
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    ended = diagnose(run)["findings"][0]
    assert ended["kind"] == "ended" and "of 100000; no failure was written" in words(ended)
    assert "newest checkpoint: step" in words(ended)


@pytest.mark.slow
def test_the_command(runs, tmp_path):
    run = runs / "dead" / "run"
    shown = CliRunner().invoke(commands.app, ["diagnose", str(run)])
    assert shown.exit_code == 0 and shown.output.startswith("1. no gradient in model.layers.1\n   - ")
    asked = ["diagnose", str(runs / "bf16_states" / "run"), "--against", str(runs / "fp32" / "run"), "--json"]
    parsed = json.loads(CliRunner().invoke(commands.app, asked).output)
    assert parsed["findings"][0]["kind"] == "precision" and parsed["looked_at"]["steps"] == "60 of 60"
    # A run that failed before it wrote anything but its failure: the recipe of the command gives the estimate.
    logs = tmp_path / "early" / "logs"
    logs.mkdir(parents=True)
    failure = {
        "rank": 0,
        "host": "a",
        "kind": "error",
        "step": None,
        "phase": "start-up",
        "error": CUDA_WORDS,
    }
    (logs / "failure.json").write_text(
        json.dumps(failure | {"traceback": "", "status": 1, "time": "2026-01-01T00:00:00"})
    )
    for rank in range(2):
        (logs / f"rank-{rank}.log").write_text("")
    (bare,) = diagnose(logs.parent)["findings"]
    assert "phase start-up" in words(bare) and "--config RECIPE" in words(bare)
    layout = requested_layout(
        logs.parent, runs / "dead" / "recipe.yaml", ["train.train_micro_batch_size_per_gpu=512"]
    )
    assert (layout.dp, layout.micro, layout.parameters) == (2, 512, 151_712)
    (told,) = diagnose(logs.parent, layout=layout)["findings"]
    assert "estimated need of a rank" in words(told) and "--config RECIPE" not in words(told)


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        diagnose(tmp_path / "nowhere")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="not a run's folder.*did you mean .*mine"):
        diagnose(tmp_path)


def test_fp16_scale_collapse(tmp_path):
    """Rows as the meter and the observer write them; a real one needs a GPU: test_gpu.py."""
    one = meter.Meter(1, None, None)
    rows, scale = [], 2.0**16
    for step in range(1, 61):
        skipped = step > 30
        one.add(4.0, 100, 100, 0.1, 0.001, 0.0, skipped)
        scale = max(scale / 2, 1.0) if skipped else scale
        last = {"step": step, "epoch": 0.0, "lr": 1e-3, "grad_norm": 1.0, "tokens_seen": 100 * step}
        rows.append(last | one.read() | meter.over_ranks([(0.1, 0.001, 0.0)]) | {"loss_scale": scale})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (collapsed, *_) = diagnose(tmp_path)["findings"]
    assert collapsed["kind"] == "scale"
    for part in ("30 of 60 steps skipped", "loss scale 65536 at first, 1 at the lowest", "--precision bf16"):
        assert part in words(collapsed)
    sound = [{**row, "loss_scale": 2.0**12 if row["step"] > 4 else 2.0**16} for row in rows]
    for row in sound:
        row.pop("skipped_steps", None)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sound))
    assert "scale" not in kinds(diagnose(tmp_path)["findings"])


LARGE = memory.Layout(
    parameters=8_000_000_000, trainable=8_000_000_000, layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8,
    head_dim=128, vocab=128_256, seq_length=4096, micro=4, gas=1, dp=8, zero_stage=1, checkpointing=False,
    offload_optimizer="none", offload_param="none", reduce_bucket=5e8, weight_bytes=2, gradient_bytes=2,
    master_bytes=4, state_bytes=8,
)  # fmt: skip


def test_estimates_by_hand():
    """An 8B model: 16 GB of weights, 16 of gradients, 96 of optimizer over 8 ranks; logits of 16,384 tokens."""
    parts = {name: gib * 2**30 / 1e9 for name, gib in memory.parts_gib(LARGE).items()}
    assert parts["weights"] == pytest.approx(16) and parts["gradients"] == pytest.approx(16)
    assert parts["optimizer"] == pytest.approx(12)
    assert parts["logits"] == pytest.approx(16384 * 128_256 * 10 / 1e9)
    found = memory.changes(LARGE, 5.0, on_cpu=False)
    how = [change.how for change in found]
    assert how[:4] == [
        "--zero_stage 2", "train.train_micro_batch_size_per_gpu=2 train.gradient_accumulation_steps=2",
        "model.gradient_checkpointing=true", "--zero_stage 3",
    ]  # fmt: skip
    saves = {change.how: change.saves_gib * 2**30 / 1e9 for change in found}
    assert saves["--zero_stage 2"] == pytest.approx(14) and saves["--zero_stage 3"] == pytest.approx(28)
    assert "offload" not in " ".join(change.how for change in memory.changes(LARGE, 5.0, on_cpu=True))
    assert (
        memory.changes(LARGE, 5.0, on_cpu=False, key_for_gas=False)[1].how
        == "train.train_micro_batch_size_per_gpu=2"
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_estimated_activations_are_those_that_are_kept(checkpointing):
    """Against what autograd really keeps of a Llama's forward pass, weights aside."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from dstrain.model import CausalLMLoss

    shape = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "vocab_size": 4096}
    config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa")
    model = AutoModelForCausalLM.from_config(config).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    weights, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address is used twice
        return tensor

    ids = torch.randint(4096, (2, 64))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        CausalLMLoss(model)(ids, ids, torch.arange(64).expand(2, 64), torch.ones_like(ids))
    own = memory.Layout(
        parameters=1, trainable=1, layers=4, hidden=128, intermediate=344, heads=4, kv_heads=2, head_dim=32, vocab=4096,
        seq_length=64, micro=2, gas=1, dp=1, zero_stage=0, checkpointing=checkpointing, offload_optimizer="none",
        offload_param="none", reduce_bucket=0, weight_bytes=4, gradient_bytes=4, master_bytes=0, state_bytes=8,
    )  # fmt: skip
    parts = memory.parts_gib(own)
    measured = sum(size for size, _ in kept.values()) / 2**30
    softmax = parts["logits"] / 2  # the logits themselves are gone after the forward pass
    assert parts["activations"] + softmax == pytest.approx(measured, rel=0.15)
    if not checkpointing:
        assert parts["activations"] == pytest.approx(measured - softmax, rel=0.05)


def test_what_stands_out():
    watch = health.Watch()
    for step in range(20):
        assert watch.add(4.0 - step / 100 + step % 3 / 10, 1.0 + step % 2 / 2) is None
    usual = watch.add(9.0, 1.2)
    assert usual["loss_median"] == pytest.approx(4.0, abs=0.2) and usual["over"] == 20
    assert watch.add(4.0, 1.0) is None
    assert watch.add(4.0, 20.0)["grad_norm_median"] == pytest.approx(1.25, abs=0.3)
    early = health.Watch()
    assert [early.add(loss, 1.0) for loss in (8.0, 20.0, 5.0)] == [None] * 3


def test_times_over_ranks():
    over = meter.over_ranks([(1.0, 0.1, 0.5), (1.0, 0.0, 0.1), (1.0, 0.0, 0.6)])
    assert over["busy_max_rank"] == 1 and over["busy_max_s"] == pytest.approx(0.9)
    assert over["busy_others_s"] == pytest.approx(0.4) and over["collective_min_s"] == pytest.approx(0.1)
    assert over["busy_s"] == pytest.approx(1.7 / 3)
    assert (over["data_wait_max_rank"], over["data_wait_max_s"]) == (0, 0.1)
    assert set(meter.over_ranks([(1.0, 0.1, 0.0)])) == {"busy_s", "collective_s"}


def test_layers_and_what_is_dead():
    squares = {
        "model.layers.0.a.weight": 9.0,
        "model.layers.0.b.weight": 16.0,
        "model.layers.11.a.weight": 0.0,
    }
    found = health.summary(squares | {"lm_head.weight": 1.0, "model.layers.11.k.bias": 0.0})
    assert found["layer_norm.model.layers.0"] == 5.0 and found["layer_norm.lm_head"] == 1.0
    assert (found["dead_parameters"], found["dead_parameter_names"]) == (1, "model.layers.11.a.weight")
