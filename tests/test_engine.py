"""What a live engine holds: dtypes under every JSON, memory over many steps, weights that are loaded in parts."""

import gc
import json
import threading
from pathlib import Path

import pytest
import torch
import transformers
from running import REPOSITORY, tiny_recipe
from test_step import batches, engine_of, tiny
from torch.optim.lr_scheduler import LambdaLR

from dstrain import dtypes, model, ops, request, schedule
from dstrain.step import eval_step, train_step, undo_first_update

LIBRARY = REPOSITORY / "ds_configs"
# fp16 and ZeRO++ need a GPU. NVMe offload maps more memory than the machine has, after which this process could
# not fork any more: test_checkpoint.py launches it.
ELSEWHERE = ("fp16", "zeropp", "nvme")

FP32 = dict.fromkeys(("parameters", "gradients", "reduction", "master_weights", "optimizer_states"), "fp32")
BF16 = FP32 | dict.fromkeys(("parameters", "gradients", "reduction"), "bf16")
EXPECTED = {
    "zero2_bf16_states.json": dict.fromkeys(FP32, "bf16"),
    "zero2_fp32_grads.json": BF16 | {"gradients": "fp32", "reduction": "fp32"},
    "zero1_autocast.json": FP32 | {"compute": "bf16", "reduction": "bf16 and fp32"},
}
EXPECTED["zero3_autocast.json"] = EXPECTED["zero1_autocast.json"]


def names_on_a_cpu():
    return sorted(f.name for f in LIBRARY.glob("*.json") if not any(part in f.name for part in ELSEWHERE))


def make_engine(recipe, name, *overrides):
    """Make the engine that train.py would."""
    import deepspeed

    asked = request.load(recipe, overrides, dp_size=1, on_cpu=True, deepspeed_config=str(LIBRARY / name))
    ops.ready(asked.ds.ops)
    zero3 = asked.ds.config if asked.ds.zero_stage == 3 else None
    lm = model.build(asked.origin, asked.model_config, "sdpa", asked.ds.precision, 1, asked.rows, zero3)
    engine, *_ = deepspeed.initialize(
        model=model.CausalLMLoss(lm),
        model_parameters=model.parameter_groups(lm, asked.ds.weight_decay),
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda done: 1.0),
        config=asked.ds.config,
    )
    undo_first_update(engine)
    return engine


@pytest.mark.parametrize("name", names_on_a_cpu())
def test_dtypes_of_every_json(process_group, tmp_path, name):
    """The header's dtypes are those that the engine has before its first step, and after it."""
    import deepspeed.runtime.torch_autocast as autocast

    recipe = tiny_recipe(tmp_path)
    autocast.TORCH_AUTOCAST_INITIALIZED = False  # of an engine before this one
    engine = make_engine(recipe, name)
    expected = EXPECTED.get(name, FP32 if "fp32" in name else BF16)
    assert dtypes.held(engine) == expected
    train_step(engine, batches(1, 2, 1)[0])
    assert dtypes.held(engine) == expected
    assert bool(dtypes.notes(expected, 1)) == (name == "zero2_bf16_states.json")
    autocast.TORCH_AUTOCAST_INITIALIZED = False


def test_many_micro_batches_in_bf16_are_noted():
    assert not dtypes.notes(BF16, 8)
    assert "gradients of 64 micro batches are added up in bf16" in dtypes.notes(BF16, 64)[0]
    assert not dtypes.notes(FP32, 64)


def resident_mib(field="RssAnon"):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_memory_does_not_grow(process_group, stage):
    """200 steps with evaluations between them: the same number of tensors, and flat resident memory."""
    engine = engine_of(tiny(), stage, gas=2)
    step = batches(1, 2, 2)[0]

    def some_steps():
        for number in range(50):
            train_step(engine, step)
            if number % 25 == 0:
                eval_step(engine, step)
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()), resident_mib()

    readings = [some_steps() for _ in range(4)]
    tensors, memory = zip(*readings, strict=True)
    assert tensors[3] <= tensors[0]
    assert memory[3] - memory[1] < 8, memory  # 100 steps; one leaked gradient a step would be 10 times this


def test_a_skipped_step_does_not_delay_the_schedule(process_group, monkeypatch):
    """As after an overflow in fp16, which a CPU cannot train."""
    at = schedule.multiplier("linear", 6, 0, 0.0)
    engine = engine_of(tiny(), 1, at=at)
    applied = []
    for number, step in enumerate(batches(6, 2, 1)):
        engine.optimizer.overflow = number in (1, 2)
        if engine.optimizer.overflow:
            monkeypatch.setattr(engine.optimizer, "step", lambda *a, **k: None)
        result = train_step(engine, step)
        monkeypatch.undo()
        applied.append(result.lr)
        assert result.skipped == (number in (1, 2))
    assert applied == pytest.approx([1e-2 * at(done) for done in range(6)])


def big_llama():
    return transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=24,
        num_attention_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )


def peak_while(function):
    """Return the most private memory in MiB that `function` added while it ran, and what it returned."""
    gc.collect()
    before, most, done = resident_mib(), 0.0, threading.Event()

    def watch():
        nonlocal most
        while not done.wait(0.002):
            most = max(most, resident_mib() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    value = function()
    done.set()
    watcher.join()
    return max(most, resident_mib() - before), value


def test_partitioned_weights_are_read_a_tensor_at_a_time(process_group, tmp_path):
    """One rank's partition is the whole model, and beside it there is never a second copy."""
    torch.manual_seed(0)
    lm = transformers.AutoModelForCausalLM.from_config(big_llama())
    size_mib = sum(p.numel() * 4 for p in lm.parameters()) / 2**20
    lm.save_pretrained(tmp_path, max_shard_size="20MB")
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    origin = model.Origin(str(tmp_path))
    peak, loaded = peak_while(
        lambda: model.build(
            origin, big_llama(), "sdpa", "fp32", 0, 512, config | {"bf16": {"enabled": False}}
        )
    )
    assert size_mib > 90
    assert peak < 1.4 * size_mib, (peak, size_mib)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(
            parameter.ds_tensor.view(-1)[: parameter.ds_numel], lm.get_parameter(name).view(-1)
        )


def test_a_head_of_its_own_is_not_lost(process_group, tmp_path):
    """Saved weights with an output head, a config that says it is the embedding: an error under every stage."""
    config = big_llama()
    config.num_hidden_layers, config.tie_word_embeddings = 1, False
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    config.tie_word_embeddings = True
    zero3 = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    for zero3_config in (None, zero3):
        with pytest.raises(model.UserError, match="set model.config.tie_word_embeddings=false"):
            model.build(model.Origin(str(tmp_path)), config, "sdpa", "fp32", 0, 512, zero3_config)


def test_missing_weights_are_an_error_under_every_stage(process_group, tmp_path):
    from safetensors.torch import load_file, save_file

    config = big_llama()
    config.num_hidden_layers = 1
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    zero3 = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    for zero3_config in (None, zero3):
        with pytest.raises(model.UserError, match=r"1 weights are not in .*, first 'model.norm.weight'"):
            model.build(model.Origin(str(tmp_path)), config, "sdpa", "fp32", 0, 512, zero3_config)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2", "qwen3"])
def test_buffers_are_what_transformers_made(process_group, kind, stage, precision):
    """Rotary frequencies and the like stay in fp32, whatever DeepSpeed does to the model."""
    import deepspeed

    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    small = {"n_embd": 8, "n_head": 2, "n_layer": 1} if kind == "gpt2" else small
    config = transformers.AutoConfig.for_model(kind, vocab_size=64, **small)
    expected = dict(transformers.AutoModelForCausalLM.from_config(config).named_buffers())
    ds = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10**6},
        "bf16": {"enabled": precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    }
    lm = model.build(model.Origin(None), config, "sdpa", precision, 0, 64, ds if stage == 3 else None)
    with model.keep_buffers(lm):
        deepspeed.initialize(model=lm, model_parameters=model.parameter_groups(lm, 0.1), config=ds)
    found = dict(lm.named_buffers())
    assert found.keys() == expected.keys()
    for name, buffer in expected.items():
        if name.endswith("embed_scale"):  # Gemma's, which is cast to the weights' dtype where it is used
            buffer = buffer.to(found[name].dtype)
        assert found[name].dtype == buffer.dtype, name
        assert torch.equal(found[name], buffer), name
    assert {p.dtype for p in lm.parameters()} == {torch.bfloat16 if precision == "bf16" else torch.float32}


def test_metrics_and_header_say_the_dtypes(process_group, tmp_path, capsys, monkeypatch):
    import train
    from dstrain import distributed, watchdog

    recipe = tiny_recipe(tmp_path, train={"max_steps": 1}, deepspeed="zero2_bf16_states.json")
    monkeypatch.chdir(tmp_path)
    try:
        train.main(train.parse_args(["--config", str(recipe)]), distributed.prepare())
    finally:
        watchdog.stop()
    shown = capsys.readouterr().out
    assert "dtypes     parameters bf16, gradients bf16, reduction bf16, master weights bf16" in shown
    assert "note       no fp32 master weights" in shown
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["dtypes"] == EXPECTED["zero2_bf16_states.json"]
