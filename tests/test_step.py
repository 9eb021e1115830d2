"""The optimizer step against a plain PyTorch loop, in one process, under every ZeRO stage."""

import copy
import math

import pytest
import torch
import transformers
from torch.optim.lr_scheduler import LambdaLR

from dstrain import model, schedule
from dstrain.step import NonFinite, eval_step, train_step, undo_first_update


def tiny(tie=True, dtype=torch.float32):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=tie,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def batches(steps, micro, gas, length=16, seed=1):
    """Batches with very different numbers of valid tokens, as (steps, gas) of micro batches."""
    generator = torch.Generator().manual_seed(seed)
    rows = steps * micro * gas
    ids = torch.randint(0, 96, (rows, length), generator=generator)
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    for row in range(rows):
        labels[row, : int(torch.randint(0, length - 2, (1,), generator=generator))] = -100
    whole = {
        "input_ids": ids,
        "labels": labels,
        "position_ids": torch.arange(length).expand(rows, -1).contiguous(),
        "document_ids": torch.ones(rows, length, dtype=torch.long),
    }
    shaped = {name: tensor.view(steps, gas, micro, length) for name, tensor in whole.items()}
    return [[{n: t[s, g] for n, t in shaped.items()} for g in range(gas)] for s in range(steps)]


def engine_of(lm, stage, micro=2, gas=1, precision="fp32", clip=0.5, at=lambda done: 1.0, decay=0.1):
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10**6},  # else 2 GB an engine
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-2, "betas": [0.9, 0.99], "torch_adam": True, "fused": True},
        },
        "bf16": {"enabled": precision == "bf16"},
    }
    engine, *_ = deepspeed.initialize(
        model=model.CausalLMLoss(lm),
        model_parameters=model.parameter_groups(lm, decay),
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, at),
        config=config,
    )
    undo_first_update(engine)
    return engine


def reference(lm, steps, clip=0.5, at=lambda done: 1.0, decay=0.1):
    """Train by hand: one backward over all rows of a step, mean over valid tokens."""
    groups = [
        {"params": [p for p in lm.parameters() if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in lm.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.99))
    scheduler = LambdaLR(optimizer, at)
    rows = []
    for micro_batches in steps:
        ids, labels = (torch.cat([b[name] for b in micro_batches]) for name in ("input_ids", "labels"))
        logits = lm(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100
        )
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(lm.parameters(), clip)
        rows.append((loss.item(), norm.item()))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return rows


def close(results, expected, loss_tolerance=1e-5, norm_tolerance=1e-4):
    for result, (loss, norm) in zip(results, expected, strict=True):
        assert result.loss == pytest.approx(loss, rel=loss_tolerance)
        assert result.grad_norm == pytest.approx(norm, rel=norm_tolerance)


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages_equal_plain_pytorch(process_group, stage, tie):
    steps = batches(8, 2, 2)
    lm = tiny(tie)
    expected = reference(copy.deepcopy(lm), steps)
    engine = engine_of(lm, stage, gas=2)
    close([train_step(engine, step) for step in steps], expected)
    assert expected[0][0] != pytest.approx(expected[-1][0], rel=1e-3)  # the losses move


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_stages_equal_fp32_masters(process_group, stage):
    """bf16 weights and gradients with fp32 masters, also at stage 0, whose engine updates once too often."""
    steps = batches(6, 2, 1)
    lm = tiny(dtype=torch.bfloat16)
    masters = copy.deepcopy(lm).float()
    half, rows = copy.deepcopy(lm), []
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in masters.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in masters.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.99),
    )
    for (batch,) in steps:
        logits = half(input_ids=batch["input_ids"], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
        loss.backward()
        for master, weight in zip(masters.parameters(), half.parameters(), strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        rows.append((loss.item(), torch.nn.utils.clip_grad_norm_(masters.parameters(), 0.5).item()))
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters.parameters(), half.parameters(), strict=True):
                weight.copy_(master)
    engine = engine_of(lm, stage, precision="bf16")
    close([train_step(engine, step) for step in steps], rows, 2e-3, 1e-2)


def test_stage_0_in_bf16_starts_untouched(process_group):
    lm = tiny(dtype=torch.bfloat16)
    before = [p.detach().clone() for p in lm.parameters()]
    engine = engine_of(lm, 0, precision="bf16", decay=0.5)
    masters = {id(m): m for group in engine.optimizer.fp32_groups for m in group}.values()
    assert not engine.optimizer.optimizer.state
    assert sum(m.double().abs().sum() for m in masters) == sum(p.double().abs().sum() for p in before)


def test_splits_of_a_global_batch_are_the_same_step(process_group):
    results = []
    for micro, gas in ((4, 1), (2, 2), (1, 4)):
        rows = [r for step in batches(5, 4, 1) for b in step for r in range(4)]
        assert len(rows) == 20
        whole = [step[0] for step in batches(5, 4, 1)]
        split = [
            [{n: t[g * micro : (g + 1) * micro] for n, t in b.items()} for g in range(gas)] for b in whole
        ]
        engine = engine_of(tiny(), 1, micro=micro, gas=gas)
        results.append([train_step(engine, step) for step in split])
    for other in results[1:]:
        close(other, [(r.loss, r.grad_norm) for r in results[0]], 1e-6, 1e-5)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("clip", [0.1, 1e9, 0.0])
def test_clipping_acts_on_the_whole_gradient(process_group, stage, clip):
    steps = batches(4, 2, 1)
    lm = tiny()
    expected = reference(copy.deepcopy(lm), steps, clip=clip or math.inf)
    close(
        [
            train_step(engine_of_clip, s)
            for engine_of_clip in [engine_of(lm, stage, clip=clip)]
            for s in steps
        ],
        expected,
    )


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_engine_applies_the_schedule(process_group, kind):
    at = schedule.multiplier(kind, 6, 2, 0.1)
    engine = engine_of(tiny(), 1, at=at)
    applied = [train_step(engine, step).lr for step in batches(6, 2, 1)]
    assert applied == pytest.approx([1e-2 * at(done) for done in range(6)])


def test_decay_is_on_matrices_alone(process_group):
    """A step without a gradient shrinks what decays and nothing else."""
    lm = tiny(tie=False)
    before = {name: p.detach().clone() for name, p in lm.named_parameters()}
    for group in model.parameter_groups(lm, 0.1):
        torch.optim.SGD(group["params"], lr=1e-2, weight_decay=0)  # a group is something an optimizer takes
    engine = engine_of(lm, 1, decay=0.5)
    for p in engine.module.parameters():
        p.grad = torch.zeros_like(p)
    loss, *_ = engine(**batches(1, 2, 1)[0][0])
    engine.backward(loss * 0.0)
    engine.step()
    for name, p in lm.named_parameters():
        changed = not torch.equal(p, before[name])
        assert changed == ("norm" not in name), name
    gpt = transformers.AutoModelForCausalLM.from_config(
        transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=9)
    )
    keep = {id(p) for p in model.parameter_groups(gpt, 0.1)[1]["params"]}
    assert {n for n, p in gpt.named_parameters() if id(p) in keep} == {
        n for n, _ in gpt.named_parameters() if n.endswith("bias") or ".ln_" in n
    }


def test_a_micro_batch_without_labels(process_group):
    """It adds nothing, and the other micro batches count as ever."""
    step = batches(1, 2, 2)[0]
    step[1]["labels"].fill_(-100)
    lm = tiny()
    expected = reference(copy.deepcopy(lm), [step[:1]])
    for stage in (0, 2, 3):
        close([train_step(engine_of(copy.deepcopy(lm), stage, gas=2), step)], expected)


def test_eval_weights_by_token(process_group):
    lm = tiny()
    (step,) = batches(1, 1, 6)
    engine = engine_of(lm, 0, micro=1)
    logits = [lm(input_ids=b["input_ids"], use_cache=False).logits[0] for b in step]
    sums = [
        torch.nn.functional.cross_entropy(x, b["labels"][0], reduction="sum")
        for x, b in zip(logits, step, strict=True)
    ]
    expected = sum(sums).item() / sum(int((b["labels"] >= 0).sum()) for b in step)
    assert eval_step(engine, step) == pytest.approx(expected, rel=1e-6)
    assert engine.module.training


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_non_finite_loss_stops_before_the_update(process_group, stage):
    lm = tiny()
    engine = engine_of(lm, stage)
    (step,) = batches(1, 2, 1)
    handle = engine.module.register_forward_hook(lambda module, args, out: (out[0] * math.nan, *out[1:]))
    with pytest.raises(NonFinite) as fault:
        train_step(engine, step)
    handle.remove()
    assert fault.value.ranks == [0]
    assert not fault.value.applied
    fault.value.tell(3, [["a.jsonl:7"]])
    assert "loss at step 3 on rank 0; step 2 is saved" in str(fault.value)
    assert "a.jsonl:7" in str(fault.value)


@pytest.mark.parametrize("offload", [False, True])
def test_gradient_checkpointing_recomputes_and_changes_nothing(process_group, recwarn, offload):
    steps = batches(3, 2, 1)
    results, calls = [], []
    for checkpointing in (False, True):
        lm = tiny()
        if checkpointing:
            model.checkpoint_activations(lm, offload)
        count = [0]
        # Of the attention: the recomputation of a layer stops as soon as it has what it needs.
        lm.model.layers[0].self_attn.register_forward_hook(
            lambda *_, count=count: count.__setitem__(0, count[0] + 1)
        )
        engine = engine_of(lm, 1)
        results.append([train_step(engine, step) for step in steps])
        calls.append(count[0])
    assert results[0] == results[1]
    assert calls[1] == 2 * calls[0]
    assert not [w for w in recwarn if "checkpoint" in str(w.message)]
