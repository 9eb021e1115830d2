"""train.py under the real launchers: equal losses, exports that load, one line for a mistake."""

import itertools
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from running import LAUNCHERS, QUICKSTART, REPOSITORY, launch, losses, metrics, tiny_recipe

from dstrain import checkpoint

pytestmark = pytest.mark.slow

KEYS = {"step", "loss", "lr", "grad_norm", "tokens_seen", "tokens_per_s", "step_time_s", "data_wait_s"}


def good(process):
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-3000:]
    return process


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """One undisturbed run of the tiny recipe, which others are compared with."""
    recipe = tiny_recipe(tmp_path_factory.mktemp("straight"), checkpoint={"export": False, "save_steps": 2})
    process = good(launch("--config", recipe))
    return recipe.parent / "run", process


def test_what_a_run_shows_and_leaves(straight):
    run, process = straight
    rows = metrics(run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert set(rows[0]) == {"step", "tokens_seen", "eval_loss", "dtypes"}
    assert all(set(row) >= KEYS for row in rows[1:])
    assert ["eval_loss" in row for row in rows] == [True, False, False, False, True]
    assert rows[0]["eval_loss"] == pytest.approx(math.log(4096), rel=0.02)
    assert rows[4]["eval_loss"] < rows[0]["eval_loss"]
    assert rows[4]["tokens_seen"] == 4 * 2 * 64
    assert {path.name for path in run.iterdir()} >= {"recipe.yaml", "ds_config.json", "resolved", "logs"}
    assert {path.name for path in (run / "checkpoints").iterdir()} >= {"step-2", "step-4", "latest"}
    assert process.stderr == ""
    lines = process.stdout.splitlines()
    names = (
        *("model", "batch", "steps", "schedule", "deepspeed", "data", "eval", "device", "versions"),
        *("output", "dtypes"),
    )
    assert [line.split()[0] for line in lines[: len(names)]] == list(names)
    assert [line.split(" ")[0] for line in lines[len(names) :]] == [
        "eval",
        "step",
        "step",
        "step",
        "step",
        "eval",
        "last",
        "trained",
    ]
    assert (run / "logs" / "rank-0.log").read_text().splitlines()[2:] == lines


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers_give_the_same_losses(straight, tmp_path, launcher):
    recipe = tiny_recipe(tmp_path)
    process = good(launch("--config", recipe, launcher=launcher))
    assert losses(tmp_path / "run") == losses(straight[0])
    assert process.stdout.count("output ") == 1


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_two_ranks_equal_one(straight, tmp_path, launcher):
    """The same global batch over two ranks; evaluation covers uneven shares without waiting for ever."""
    shared = set(Path("/dev/shm").glob("deepspeed_*"))
    recipe = tiny_recipe(tmp_path, train={"train_micro_batch_size_per_gpu": 1})
    process = good(launch("--config", recipe, launcher=launcher, ranks=2))
    assert losses(tmp_path / "run") == pytest.approx(losses(straight[0]), rel=1e-5)
    ours, theirs = metrics(tmp_path / "run"), metrics(straight[0])
    for key, tolerance in (("grad_norm", 1e-4), ("tokens_seen", 0), ("eval_loss", 1e-5)):
        assert [r[key] for r in ours if key in r] == pytest.approx(
            [r[key] for r in theirs if key in r], rel=tolerance
        )
    assert process.stdout.count("step 4/4") == 1
    assert set(Path("/dev/shm").glob("deepspeed_*")) <= shared  # DeepSpeed leaves 66 MiB a rank


@pytest.mark.parametrize(("micro", "gas"), [(1, 4)])
def test_accumulation_equals_one_batch(tmp_path, micro, gas):
    whole = tiny_recipe(tmp_path / "a", train={"train_micro_batch_size_per_gpu": 4})
    split = tiny_recipe(
        tmp_path / "b", train={"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": gas}
    )
    for recipe in (whole, split):
        good(launch("--config", recipe))
    assert losses(tmp_path / "b" / "run") == pytest.approx(losses(tmp_path / "a" / "run"), rel=1e-5)


@pytest.mark.parametrize(
    ("stage", "precision", "ranks"),
    [(0, "fp32", 1), (1, "bf16", 1), (2, "fp32", 2), (3, "fp32", 1), (3, "bf16", 2)],
)
def test_export_loads_with_the_same_eval_loss(tmp_path, stage, precision, ranks):
    recipe = tiny_recipe(
        tmp_path, checkpoint={"export": True}, logging={"sample_prompt": "Geography", "sample_tokens": 4}
    )
    process = good(
        launch(
            "--config",
            recipe,
            "--zero_stage",
            stage,
            "--precision",
            precision,
            launcher="deepspeed",
            ranks=ranks,
        )
    )
    run = tmp_path / "run"
    final = metrics(run)[-1]["eval_loss"]
    assert hf_loss(run / "hf_model", tmp_path / "held_out.jsonl") == pytest.approx(
        final, rel=1e-6 if ranks == 1 else 1e-5
    )
    files = {path.name for path in (run / "hf_model").iterdir()}
    assert files >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = json.loads((run / "hf_model" / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["dtype"] == {"bf16": "bfloat16", "fp32": "float32"}[precision]
    from safetensors import safe_open

    with safe_open(run / "hf_model" / "model.safetensors", "pt") as tensors:
        assert "lm_head.weight" not in tensors.keys()  # noqa: SIM118
    assert "Geography" in process.stdout.splitlines()[-2] + process.stdout.splitlines()[-1]


def hf_loss(folder, held_out):
    """The held-out loss by Transformers alone: documents split into sequences, each token predicted once."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lm, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    stream, total, count = [], 0.0, 0
    for line in held_out.read_text().splitlines():
        ids = tokenizer(json.loads(line)["text"])["input_ids"] + [tokenizer.eos_token_id]
        stream += [(token, number) for number, token in enumerate(ids)]
    ends = [i for i, (_, number) in enumerate(stream) if number == 0] + [len(stream)]
    with torch.no_grad():
        for start, stop in itertools.pairwise(ends):
            cuts = sorted({start, stop, *(range(0, len(stream), 64))} & set(range(start, stop + 1)))
            for a, b in itertools.pairwise(cuts):
                ids = torch.tensor([[token for token, _ in stream[a:b]]])
                labels = torch.tensor(
                    [token for token, _ in stream[a + 1 : min(b + 1, stop)]], dtype=torch.long
                )
                logits = lm(ids).logits[0, : len(labels)].float()
                total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
                count += len(labels)
    return total / count


def test_resume_goes_on_as_if_never_stopped(straight, tmp_path):
    recipe = tiny_recipe(tmp_path, checkpoint={"export": False})
    good(launch("--config", recipe, "train.max_steps=2"))
    process = good(launch("--config", recipe))
    assert "resumed from step 2" in process.stdout
    assert losses(tmp_path / "run") == losses(straight[0])
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2, 3, 4]
    again = good(launch("--config", recipe))
    assert "finished at step 4" in again.stdout


def test_a_longer_run_has_its_own_schedule(tmp_path):
    """Raising max_steps stretches a schedule: after the resume the rates are those of the new one."""
    recipe = tiny_recipe(tmp_path, train={"lr_scheduler_type": "linear", "weight_decay": 0.3})
    good(launch("--config", recipe, "train.max_steps=2"))
    good(launch("--config", recipe, "train.max_steps=6"))
    rates = [row["lr"] for row in metrics(tmp_path / "run") if "lr" in row]
    assert rates == pytest.approx([1e-2, 0.0, 6e-3, 4e-3, 2e-3, 0.0], abs=1e-9)


def test_another_start_takes_the_new_rate_and_then_goes_on_by_itself(straight, tmp_path):
    recipe = tiny_recipe(tmp_path, train={"learning_rate": 1e-3})
    start = f"checkpoint.resume_from_checkpoint={straight[0]}"
    good(launch("--config", recipe, start, "train.max_steps=5"))
    assert [row["lr"] for row in metrics(tmp_path / "run")] == [1e-3]
    process = good(launch("--config", recipe, start, "train.max_steps=6"))
    assert "resumed from step 5" in process.stdout
    assert [row["step"] for row in metrics(tmp_path / "run")] == [5, 6]


def test_a_run_that_died_before_its_export_makes_it(tmp_path):
    recipe = tiny_recipe(tmp_path, checkpoint={"export": True}, train={"max_steps": 2})
    good(launch("--config", recipe))
    for name in ("hf_model", "loss.png"):
        path = tmp_path / "run" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    good(launch("--config", recipe))
    assert (tmp_path / "run" / "hf_model" / "model.safetensors").exists()
    assert (tmp_path / "run" / "loss.png").exists()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    config = json.loads((tmp_path / "run" / "hf_model" / "generation_config.json").read_text())
    assert config["eos_token_id"] == 0  # the tokenizer's, not Llama's


def test_a_killed_run_starts_again_from_its_checkpoint(straight, tmp_path):
    import os
    import signal
    import subprocess
    import sys
    import time

    recipe = tiny_recipe(tmp_path, train={"max_steps": 400}, checkpoint={"export": False, "save_steps": 2})
    command = [sys.executable, str(REPOSITORY / "train.py"), "--config", str(recipe)]
    both = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    deadline = time.monotonic() + 120
    while all(one.poll() is None for one in both) and time.monotonic() < deadline:
        time.sleep(0.05)
    process, second = sorted(both, key=lambda one: one.poll() is not None)
    assert second.returncode == 2
    assert "another run is writing there" in second.communicate()[1]
    while not (tmp_path / "run" / "checkpoints" / "step-4").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [path.name for path in (tmp_path / "run" / "logs").glob("*.json")] == []  # no word of the second
    assert (tmp_path / "run" / "logs" / "rank-0.log").read_text().count("--- in ") == 1
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    step = max(int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    good(launch("--config", recipe, f"train.max_steps={step + 2}"))
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(step + 3))
    assert losses(tmp_path / "run")[:4] == losses(straight[0])


def test_output_folder_is_a_recipe_that_reruns(straight, tmp_path):
    process = good(launch("--config", straight[0], f"output_dir={tmp_path / 'again'}", cwd=tmp_path))
    assert losses(tmp_path / "again") == losses(straight[0])
    assert "4/4" in process.stdout


def test_a_different_run_in_the_folder_is_refused(straight):
    before = (straight[0] / "metrics.jsonl").read_bytes()
    process = launch("--config", straight[0], "train.learning_rate=0.5")
    assert process.returncode == 2
    assert "holds a different run: train.learning_rate is 0.01 there and 0.5 here" in process.stderr
    assert (straight[0] / "metrics.jsonl").read_bytes() == before


def test_non_finite_loss_stops_and_keeps_a_checkpoint(tmp_path):
    recipe = tiny_recipe(tmp_path, train={"learning_rate": 1e30, "max_steps": 8})
    process = launch("--config", recipe, launcher="deepspeed")
    assert process.returncode != 0
    (line,) = [line for line in process.stderr.splitlines() if line.startswith("error:")]
    for text in (
        "non-finite",
        "at step",
        "on rank 0",
        "factbook_docs_eval.jsonl:",
        "try a lower train.learning_rate",
    ):
        assert text in line
    assert "Traceback" not in process.stderr
    kept = tmp_path / "run" / "checkpoints" / "step-1"
    assert checkpoint.problem(kept) is None
    assert checkpoint.Reader(kept).manifest["step"] == 1


def test_a_mistake_is_one_line_from_two_ranks(tmp_path):
    recipe = tiny_recipe(tmp_path)
    process = launch("--config", recipe, "train.max_step=3", launcher="torchrun", ranks=2)
    assert process.stderr.count("error: ") - process.stderr.count("exitcode") <= 1
    assert "unknown key 'train.max_step'; did you mean 'train.max_steps'?" in process.stderr
    assert not (tmp_path / "run").exists()
    process = launch("--config", recipe, "train.max_step=3", launcher="deepspeed", ranks=2)
    assert process.returncode == 2
    assert process.stderr.count("unknown key") == 1


def test_trackers_start_once_and_ask_nothing(tmp_path):
    recipe = tiny_recipe(tmp_path, logging={"report_to": ["wandb", "tensorboard"]}, train={"max_steps": 3})
    process = good(launch("--config", recipe, launcher="deepspeed", ranks=2))
    run = tmp_path / "run"
    assert len(list((run / "wandb").glob("offline-run-*"))) == 1
    assert len(list((run / "tensorboard").rglob("events.out.tfevents.*"))) >= 1
    assert "warning" not in process.stderr.lower()
    assert checkpoint.Reader(run / "checkpoints" / "step-3").manifest["trainer"]["wandb_id"]


def test_a_tracker_that_fails_does_not_stop_the_run(tmp_path):
    recipe = tiny_recipe(tmp_path, logging={"report_to": ["tensorboard"]})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").write_text("in the way")
    process = good(launch("--config", recipe))
    assert process.stderr.count("warning: tensorboard is off for the rest of the run") == 1
    assert len(losses(tmp_path / "run")) == 4


def test_all_cores_are_used_under_the_launcher(tmp_path):
    import os

    cores = len(os.sched_getaffinity(0))
    process = good(launch("--config", tiny_recipe(tmp_path), "--dry-run", launcher="deepspeed"))
    assert f"1 rank, {cores} CPU threads each" in process.stdout
    process = good(
        launch(
            "--config",
            tiny_recipe(tmp_path),
            "--dry-run",
            launcher="torchrun",
            ranks=2,
            env={"OMP_NUM_THREADS": "1"},
        )
    )
    assert f"2 ranks, {max(1, cores // 2)} CPU thread" in process.stdout


def test_dry_run_writes_nothing(tmp_path):
    process = good(launch("--config", tiny_recipe(tmp_path), "--dry-run"))
    assert not (tmp_path / "run").exists()
    assert "--- document 1:" in process.stdout
    assert "in the loss" in process.stdout


def test_golden_losses_of_the_quickstart(tmp_path):
    """A change that should not alter numerics reproduces these; another says why and stores new ones."""
    golden = json.loads((REPOSITORY / "tests" / "golden" / "quickstart.json").read_text())
    good(
        launch(
            *(
                "--config",
                QUICKSTART,
                f"output_dir={tmp_path / 'run'}",
                "train.max_steps=5",
                "logging.logging_steps=1",
            ),
            *("train.lr_scheduler_type=constant", "checkpoint.export=false", "eval.eval_steps=null"),
            launcher="deepspeed",
        )
    )
    rows = metrics(tmp_path / "run")
    assert losses(tmp_path / "run") == pytest.approx(golden["loss"], rel=1e-5)
    assert [row["grad_norm"] for row in rows[1:]] == pytest.approx(golden["grad_norm"], rel=1e-4)
    assert [row["eval_loss"] for row in rows if "eval_loss" in row] == pytest.approx(
        golden["eval_loss"], rel=1e-5
    )
