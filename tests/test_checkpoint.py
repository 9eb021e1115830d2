"""Checkpoints: exact on the same layout, within rounding on any other, whole or not there, and never code."""

import json
import pickle
import shutil
import subprocess
import sys

import pytest
import torch
from running import REPOSITORY, launch, losses, metrics, tiny_recipe
from test_step import batches, tiny
from torch.optim.lr_scheduler import LambdaLR

from dstrain import checkpoint, distributed, fragments, model, ops
from dstrain.checkpoint import store
from dstrain.errors import UserError
from dstrain.parity.jobs import Job, run_jobs
from dstrain.step import train_step, undo_first_update

ALONE = distributed.World(0, 1, 0, 1)
LAYOUTS = [(stage, None) for stage in range(4)] + [(stage, "cpu") for stage in (1, 2, 3)]


def engine_of(stage, offload=None, precision="fp32", large=False):
    import deepspeed

    lm = tiny(dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    if large:
        torch.manual_seed(0)
        config = lm.config
        config.hidden_size, config.intermediate_size, config.vocab_size = 384, 768, 1024
        lm = type(lm)(config)
    zero = {"stage": stage, "reduce_bucket_size": 10**6}  # the default maps 2 GB an engine
    params = {"lr": 1e-2, "betas": [0.9, 0.99]}
    if offload:
        zero["offload_optimizer"] = {"device": offload}
    else:
        params |= {"torch_adam": True, "fused": True}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": params},
        "bf16": {"enabled": precision == "bf16"},
    }
    engine, *_ = deepspeed.initialize(
        model=model.CausalLMLoss(lm),
        model_parameters=model.parameter_groups(lm, 0.1),
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda done: 1 / (1 + done)),
        config=config,
    )
    undo_first_update(engine)
    return engine


def saver(folder, **options):
    options = {"save_total_limit": None, "async_save": True, "save_optimizer": True} | options
    return checkpoint.Saver(folder, ALONE, **options)


def straight(folder, *layout, **options):
    """Train 6 steps, saving after the third; return the last three results."""
    engine, results = engine_of(*layout, **options), []
    saves = saver(folder)
    for number, step in enumerate(batches(6, 2, 1), start=1):
        results.append(train_step(engine, step))
        if number == 3:
            saves.save(engine, 3, {"tokens_seen": 7})
    saves.wait()
    return results[3:]


def resumed(folder, *layout, **options):
    engine = engine_of(*layout, **options)
    state = checkpoint.load(engine, folder / "checkpoints" / "step-3", ALONE)
    assert (state["step"], state["tokens_seen"]) == (3, 7)
    return engine, [train_step(engine, step) for step in batches(6, 2, 1)[3:]]


@pytest.fixture(scope="module")
def saved(process_group, tmp_path_factory):
    """A run of each layout, and its last three steps."""
    ops.ready(("cpu_adam",))
    runs = {}
    for layout in LAYOUTS:
        folder = tmp_path_factory.mktemp("saved")
        runs[layout] = folder, straight(folder, *layout)
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("before", LAYOUTS, ids=str)
def test_any_layout_goes_on_under_any_other(saved, before):
    """All pairs of ZeRO stages, and of an optimizer on the CPU and not: CPUAdam to torch's AdamW and back."""
    folder, expected = saved[before]
    for after in LAYOUTS:
        engine, results = resumed(folder, *after)
        exact = 0.0 if after == before else 1e-6
        for result, other in zip(results, expected, strict=True):
            assert result.loss == pytest.approx(other.loss, rel=exact, abs=0), (before, after)
            assert result.grad_norm == pytest.approx(other.grad_norm, rel=10 * exact, abs=0), (before, after)
            assert result.lr == other.lr
        groups = fragments.optimizer_of(engine).param_groups
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
        assert [list(group["betas"]) for group in groups] == [[0.9, 0.99]] * 2
        assert fragments.read_step(engine) == 6


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_resumes_to_the_bit(process_group, tmp_path, stage):
    expected = straight(tmp_path, stage, precision="bf16")
    assert resumed(tmp_path, stage, precision="bf16")[1] == expected


# ---- Damage.


@pytest.fixture(scope="module")
def whole(process_group, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    straight(folder, 1)
    return folder / "checkpoints" / "step-3"


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def plant(file):
    """A pickle that would leave a mark if anything ran it."""

    class Mark:
        def __reduce__(self):
            return open, (str(file.parent.parent.parent / "ran"), "w")

    file.write_bytes(pickle.dumps(Mark()))


@pytest.mark.parametrize(
    "damage", [flip, cut, plant, lambda file: file.unlink()], ids=["flip", "cut", "pickle", "gone"]
)
@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.safetensors"])
def test_damage_is_found_and_the_one_before_is_taken(whole, tmp_path, capsys, name, damage):
    root = tmp_path / "checkpoints"
    shutil.copytree(whole, root / "step-3")
    shutil.copytree(whole, root / "step-5")
    damage(root / "step-5" / name)
    assert str(root / "step-5") in checkpoint.problem(root / "step-5")
    assert name in checkpoint.problem(root / "step-5")
    assert checkpoint.newest_good(root, ALONE) == root / "step-3"
    assert name in capsys.readouterr().out
    assert (root / "damaged-step-5").is_dir()
    assert not (tmp_path / "ran").exists()
    damage(root / "step-3" / name)
    with pytest.raises(UserError, match="no other checkpoint is there to resume from"):
        checkpoint.newest_good(root, ALONE)
    assert not (tmp_path / "ran").exists()


def test_a_link_that_leads_outside_is_refused(whole, tmp_path):
    folder = tmp_path / "step-3"
    shutil.copytree(whole, folder)
    (folder / "rank-00000.safetensors").unlink()
    (folder / "rank-00000.safetensors").symlink_to(whole / "rank-00000.safetensors")
    assert "a link that leads outside" in checkpoint.problem(folder)
    (folder / "extra.pt").write_bytes(b"")
    assert checkpoint.problem(folder).endswith("extra.pt: not in the manifest")


def test_no_file_of_a_checkpoint_is_a_pickle(whole):
    assert {file.suffix for file in whole.iterdir()} == {".json", ".safetensors"}


def test_another_model_is_named(whole, process_group):
    engine = engine_of(1, large=True)
    with pytest.raises(UserError, match=r"model.embed_tokens.weight is \[96, 32\] there and \[1024, 384\]"):
        checkpoint.load(engine, whole, ALONE)


# ---- Writing.


def test_the_oldest_go_and_the_rest_stay(process_group, tmp_path):
    engine = engine_of(1)
    saves = saver(tmp_path, save_total_limit=2)
    for step in (1, 2, 3):
        saves.save(engine, step, {})
    saves.wait()
    root = tmp_path / "checkpoints"
    assert {path.name for path in root.iterdir()} == {"step-2", "step-3", "latest"}
    assert (root / "latest").read_text() == "step-3\n"
    assert min(saves.measured[f"checkpoint_{name}"] for name in ("stall_s", "gib", "gib_per_s")) > 0
    assert [row["problem"] for row in checkpoint.describe(root)] == [None, None]
    saver(tmp_path, save_total_limit=1)  # as after kills between a save and its pruning
    assert checkpoint.steps(root) == [3]


def test_a_disk_that_is_full_is_foreseen(process_group, tmp_path, monkeypatch, capsys):
    engine = engine_of(1)
    saves = saver(tmp_path)
    saves.save(engine, 1, {})
    saves.wait()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    saves.save(engine, 2, {})
    saves.wait()
    assert "step 2 is not saved: it takes" in capsys.readouterr().out
    assert store.steps(tmp_path / "checkpoints") == [1]


@pytest.mark.parametrize("background", [True, False])
def test_a_disk_that_fills_up_is_survived_and_other_failures_stop(
    process_group, tmp_path, monkeypatch, capsys, background
):
    from dstrain.checkpoint import saver as module

    engine = engine_of(1)
    saves = saver(tmp_path, async_save=background)
    saves.save(engine, 1, {})
    saves.wait()

    def fails(error):
        def save_file(tensors, file):
            file.write_bytes(b"half")
            raise error

        return save_file

    monkeypatch.setattr(module, "save_file", fails(OSError(28, "No space left on device")))
    saves.save(engine, 2, {})
    saves.wait()
    assert "step 2 is not saved: OSError: [Errno 28] No space left on device" in capsys.readouterr().out
    monkeypatch.setattr(module, "save_file", fails(ValueError("bad luck")))

    def save_and_wait():
        saves.save(engine, 3, {})
        saves.wait()

    with pytest.raises(UserError, match="step 3 could not be saved: rank 0: ValueError: bad luck"):
        save_and_wait()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-1", "latest"}


def test_what_a_killed_save_left_is_swept(process_group, tmp_path):
    root = tmp_path / "checkpoints"
    (root / "tmp-4").mkdir(parents=True)
    (root / "trash-step-2").mkdir()
    saver(tmp_path)
    assert not list(root.iterdir())


def test_weights_alone(process_group, tmp_path):
    engine = engine_of(1)
    train_step(engine, batches(1, 2, 1)[0])
    saves = saver(tmp_path, save_optimizer=False)
    saves.save(engine, 1, {})
    saves.wait()
    reader = checkpoint.Reader(tmp_path / "checkpoints" / "step-1")
    assert reader.states == []
    for name, parameter in engine.module.model.named_parameters():
        assert torch.equal(reader.whole("master", name), parameter)


def test_files_have_the_users_mask(whole):
    for file in whole.iterdir():
        assert file.stat().st_mode & 0o777 == 0o666 & ~distributed.UMASK


# ---- The real launcher, on other numbers of ranks.

RECIPE = {
    "train": {
        "max_steps": 6,
        "global_batch_size": 4,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "cosine",
        "weight_decay": 0.1,
    },
    "checkpoint": {"export": False, "save_steps": 3},
}


# A pass is a few steps long, and the sources are drawn by weight.
WORDS = " ".join(str(number) for number in range(90))
SEVERAL_EPOCHS = "data.train=[{path: short.jsonl, weight: 2}, {path: long.jsonl, weight: 0.5}]"


def write_sources(folder):
    """Two sources that are drawn by weight: few sequences, so that epochs end within a few steps."""
    for name, rows in (("short", 2), ("long", 4)):
        lines = [json.dumps({"text": f"{name} {row} {WORDS}"}) + "\n" for row in range(rows)]
        (folder / f"{name}.jsonl").write_text("".join(lines))


def truncated(run, target):
    """Copy a finished run as it was after its third step."""
    shutil.copytree(run, target)
    shutil.rmtree(target / "checkpoints" / "step-6")
    return target


@pytest.mark.slow
def test_ranks_and_stages_change_on_the_way(tmp_path, monkeypatch):
    """1, 2 and 4 ranks, all stages, offload and not, dropout and not; no sample twice and none left out."""
    recipe = str(tiny_recipe(tmp_path / "recipe", **RECIPE))
    write_sources(tmp_path)
    monkeypatch.chdir(tmp_path)  # paths on the command line are relative to it
    dropout = "model.config.attention_dropout=0.1"
    starts = {
        "plain": (2, ("--zero_stage", "1")),
        "zero3": (2, ("--zero_stage", "3")),
        "dropout": (2, ("--zero_stage", "2", dropout)),
        "bf16": (2, ("--deepspeed_config", "zero1.json")),
        "epochs": (2, ("--zero_stage", "1", SEVERAL_EPOCHS)),
    }
    goes_on = [  # from, ranks, how, exact
        ("plain", 2, ("--zero_stage", "1"), True),
        ("plain", 1, ("--zero_stage", "0"), False),
        ("plain", 4, ("--zero_stage", "2"), False),
        ("plain", 3, ("--zero_stage", "3"), False),  # 4 sequences a step: the third rank stops
        ("zero3", 2, ("--zero_stage", "3"), True),
        ("zero3", 1, ("--zero_stage", "1"), False),
        ("zero3", 4, ("--zero_stage", "3"), False),
        ("zero3", 2, ("--deepspeed_config", "zero2_offload.json", "deepspeed.bf16.enabled=false"), False),
        ("dropout", 2, ("--zero_stage", "2", dropout), True),
        ("bf16", 2, ("--deepspeed_config", "zero1.json"), True),
        ("epochs", 2, ("--zero_stage", "1", SEVERAL_EPOCHS), True),
        ("epochs", 1, ("--zero_stage", "1", SEVERAL_EPOCHS), False),
    ]

    def job(name, ranks, how):
        home = tmp_path / name
        home.mkdir(exist_ok=True)
        return Job(home, ranks, ("--config", recipe, *how, f"output_dir={home / 'run'}"))

    errors = run_jobs([job(name, *start) for name, start in starts.items()], tmp_path / "launches-1")
    assert errors == [None] * len(starts)
    jobs = []
    for number, (name, ranks, how, _) in enumerate(goes_on):
        (tmp_path / f"on-{number}").mkdir()
        truncated(tmp_path / name / "run", tmp_path / f"on-{number}" / "run")
        jobs.append(job(f"on-{number}", ranks, how))
    assert run_jobs(jobs, tmp_path / "launches-2") == [None] * len(jobs)
    for number, (name, ranks, _, exact) in enumerate(goes_on):
        before, after = metrics(tmp_path / name / "run"), metrics(tmp_path / f"on-{number}" / "run")
        assert [row["step"] for row in after] == [row["step"] for row in before], number
        for key in ("loss", "grad_norm", "lr", "tokens_seen", "eval_loss"):
            ours, theirs = ([row[key] for row in rows if key in row] for rows in (after, before))
            tolerance = 0 if exact or key in ("lr", "tokens_seen") else 1e-4 if key == "grad_norm" else 1e-5
            assert ours == pytest.approx(theirs, rel=tolerance, abs=0), (number, key)
        manifests = [
            checkpoint.Reader(tmp_path / folder / "run" / "checkpoints" / "step-6").manifest
            for folder in (name, f"on-{number}")
        ]
        assert manifests[0]["trainer"]["loader"] == manifests[1]["trainer"]["loader"]
        if exact:  # the final weights and states, to the bit
            assert manifests[0]["files"] == manifests[1]["files"]
        if ranks == 3:
            assert manifests[1]["layout"]["ranks"] == 2
            assert "rank 2 stops" in (tmp_path / f"on-{number}" / "log-rank2").read_text()


@pytest.mark.slow
@pytest.mark.skipif(not ops.has_libaio(), reason="needs libaio")
def test_nvme_resumes_to_the_bit(tmp_path):
    """DeepSpeed 0.19.8 loses the optimizer's step and its smaller states here."""
    config = {"model_type": "llama", "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    recipe = str(tiny_recipe(tmp_path / "recipe", model={"config": config}, **RECIPE))
    block = "deepspeed.zero_optimization.offload"
    nvme = ["--deepspeed_config", "zero3_nvme.json", f"{block}_param.buffer_size=3000000"]
    nvme += [f"{block}_{part}.nvme_path={tmp_path / 'nvme'}" for part in ("optimizer", "param")]
    (tmp_path / "nvme").mkdir()

    def job(name, *how):
        (tmp_path / name).mkdir(exist_ok=True)
        return Job(tmp_path / name, 1, ("--config", recipe, *how, f"output_dir={tmp_path / name / 'run'}"))

    assert run_jobs([job("straight", *nvme)], tmp_path / "launches-1") == [None]
    assert [file for file in (tmp_path / "nvme").rglob("*.swp") if file.stat().st_size]
    jobs = [job("same", *nvme), job("elsewhere", "--deepspeed_config", "zero1.json")]
    for again in jobs:
        truncated(tmp_path / "straight" / "run", again.folder / "run")
    assert run_jobs(jobs, tmp_path / "launches-2") == [None, None]
    expected = losses(tmp_path / "straight" / "run")
    assert losses(tmp_path / "same" / "run") == expected
    held = metrics(tmp_path / "straight" / "run")[0]["dtypes"]
    assert (held["parameters"], held["master_weights"], held["optimizer_states"]) == ("bf16", "fp32", "fp32")
    assert losses(tmp_path / "elsewhere" / "run") == pytest.approx(expected, rel=2e-3)
    manifests = [
        checkpoint.Reader(tmp_path / name / "run" / "checkpoints" / "step-6").manifest["files"]
        for name in ("straight", "same")
    ]
    assert manifests[0] == manifests[1]


# ---- Commands.


def command(*arguments):
    process = subprocess.run(
        [sys.executable, "-m", "dstrain", *map(str, arguments)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    return process.returncode, process.stdout, process.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_export_of_a_checkpoint_is_the_export_of_the_run(tmp_path, kind):
    """In shards that are smaller than the model, loaded as any user would; experts under their names on disk."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    config = {"model_type": kind, "vocab_size": 4096, "hidden_size": 32, "intermediate_size": 64}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config |= {"tie_word_embeddings": kind == "llama"} | (
        {"num_local_experts": 4} if kind == "mixtral" else {}
    )
    recipe = tiny_recipe(
        tmp_path, model={"config": config, "add_tokens": ["<|x|>"]}, checkpoint={"export": True}
    )
    process = launch("--config", recipe, "--zero_stage", "3", launcher="torchrun", ranks=2)
    assert process.returncode == 0, process.stderr
    run = tmp_path / "run"
    status, said, wrong = command("export", run, "--dtype", "fp32", "--max-shard-size", "300KB")
    assert (status, wrong) == (0, ""), wrong
    assert said == f"exported to {run / 'export-step-4'}\n"
    files = sorted((run / "export-step-4").glob("*.safetensors"))
    assert len(files) > 1
    ours = {name: tensor for file in files for name, tensor in load_file(file).items()}
    theirs = load_file(run / "hf_model" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    lm, report = AutoModelForCausalLM.from_pretrained(run / "export-step-4", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    ids = torch.arange(20)[None]
    expected = AutoModelForCausalLM.from_pretrained(run / "hf_model")(ids).logits
    assert torch.equal(lm(ids).logits, expected)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert json.loads((run / "export-step-4" / name).read_text()) == json.loads(
            (run / "hf_model" / name).read_text()
        )
    assert command("export", run)[2] == f"error: --output={run / 'export-step-4'}: exists already\n"
    listed = command("checkpoints", run)[1].splitlines()
    assert [line.split()[0] for line in listed] == ["step", "4"]
    assert listed[1].endswith("verified")
    flip(run / "checkpoints" / "step-4" / "rank-00001.safetensors")
    assert "rank-00001.safetensors: damaged" in command("checkpoints", run)[1]
    status, _, wrong = command("export", run, "--output", tmp_path / "other")
    assert status == 2
    assert "rank-00001.safetensors: damaged (its checksum is wrong)" in wrong
    assert not (tmp_path / "other").exists()
    assert command("export", run, "--step", "3")[2].endswith("no step 3; there are 4\n")
