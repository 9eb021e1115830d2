"""The DeepSpeed JSON: who owns a value, what is refused, and that our list of keys is DeepSpeed's."""

import copy
import inspect
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import pytest

from dstrain.ds_config import apply_overrides, check_keys, find_json, load_json, resolve, shorthand
from dstrain.ds_keys import KEYS, ONLY, walk
from dstrain.ds_optim import OPTIMIZER_PARAMS, SCHEDULERS
from dstrain.errors import UserError

ROOT = Path(__file__).parent.parent
LIBRARY = ROOT / "ds_configs"

VALUES = {
    "train.train_micro_batch_size_per_gpu": 1,
    "train.gradient_accumulation_steps": None,
    "train.global_batch_size": None,
    "train.global_batch_tokens": None,
    "data.max_seq_length": 128,
    "train.gradient_clipping": 1.0,
    "train.learning_rate": 2e-5,
    "train.weight_decay": 0.0,
    "train.adam_beta1": 0.9,
    "train.adam_beta2": 0.999,
    "train.adam_epsilon": 1e-8,
    "train.lr_scheduler_type": "cosine",
    "train.warmup_steps": None,
    "train.warmup_ratio": 0.0,
    "train.min_lr_ratio": 0.0,
    "train.max_steps": None,
    "train.precision": "bf16",
    "model.gradient_checkpointing": None,
}


def fill(
    ds: dict,
    recipe: dict | None = None,
    *,
    dp_size: int = 1,
    hidden_size: int | None = 64,
    on_cpu: bool = True,
):
    """Resolve `ds` against a recipe in which the user wrote the keys of `recipe`."""
    recipe = {key if "." in key else f"train.{key}": value for key, value in (recipe or {}).items()}
    assert set(recipe) <= set(VALUES)
    return resolve(
        ds,
        ds_file="ds.json",
        recipe_file="recipe.yaml",
        values=VALUES | recipe,
        explicit=set(recipe),
        dp_size=dp_size,
        hidden_size=hidden_size,
        on_cpu=on_cpu,
    )


def nest(path: str, value: Any) -> dict:
    return apply_overrides({}, {path: value})


def autos(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "auto")


BATCH = autos("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
HF_FP16 = {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16}
HF_FP16 |= {"hysteresis": 2, "min_loss_scale": 1}
HF_ADAMW = {"type": "AdamW", "params": autos("lr", "betas", "eps", "weight_decay")}
STAGE3_AUTOS = autos(
    "reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"
)
STAGE3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    **STAGE3_AUTOS,
}
STAGE3 |= {"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}
STAGE3 |= {"stage3_gather_16bit_weights_on_model_save": True}
STAGE2 = {"stage": 2, "allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": True}
STAGE2 |= {"reduce_scatter": True, "reduce_bucket_size": 5e8, "contiguous_gradients": True}
CPU = {"device": "cpu", "pin_memory": True}
IDLE_CHECKPOINTING = {
    "partition_activations": False,
    "contiguous_memory_optimization": False,
    "profile": False,
}
IDLE_CHECKPOINTING |= {"cpu_checkpointing": False, "number_checkpoints": None}
WARMUP = autos("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")

# JSONs in the shape that the users of other trainers bring.
BROUGHT = {
    "hf_zero2": {
        "fp16": HF_FP16,
        "optimizer": HF_ADAMW,
        "scheduler": {"type": "WarmupLR", "params": WARMUP},
        "zero_optimization": STAGE2 | {"reduce_bucket_size": "auto", "offload_optimizer": CPU},
        **BATCH,
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    },
    "hf_zero3": {
        "fp16": HF_FP16,
        "bf16": {"enabled": "auto"},
        "optimizer": HF_ADAMW,
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": WARMUP | {"last_batch_iteration": -1, "total_num_steps": "auto"},
        },
        "zero_optimization": STAGE3 | {"offload_optimizer": CPU, "offload_param": CPU},
        **BATCH,
        "gradient_clipping": "auto",
        "steps_per_print": 1e5,
        "wall_clock_breakdown": False,
        "activation_checkpointing": IDLE_CHECKPOINTING,
        "amp": {"enabled": "auto", "opt_level": "auto"},
    },
    "axolotl_zero1": {
        "zero_optimization": {"stage": 1, "overlap_comm": True},
        "bf16": {"enabled": "auto"},
        "fp16": HF_FP16 | {"auto_cast": False, "initial_scale_power": 32},
        "gradient_clipping": "auto",
        **BATCH,
        "wall_clock_breakdown": False,
    },
    "axolotl_zero2": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True},
        "bf16": {"enabled": "auto"},
        "fp16": HF_FP16 | {"auto_cast": False},
        **BATCH,
        "gradient_clipping": "auto",
    },
    "axolotl_zero3": {
        "zero_optimization": STAGE3 | {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0},
        "bf16": {"enabled": "auto"},
        "fp16": HF_FP16,
        **BATCH,
        "gradient_clipping": "auto",
    },
    "axolotl_zero3_bf16_cpuoffload_all": {
        "zero_optimization": STAGE3 | {"offload_optimizer": CPU, "offload_param": CPU | {"buffer_size": 1e8}},
        "bf16": {"enabled": True},
        **BATCH,
        "gradient_clipping": "auto",
    },
    "llamafactory_z0": {
        "zero_allow_untested_optimizer": True,
        "fp16": HF_FP16,
        "bf16": {"enabled": "auto"},
        "zero_optimization": STAGE2 | {"stage": 0, "round_robin_gradients": True},
        **BATCH,
        "gradient_clipping": "auto",
    },
    "llamafactory_z2": {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "fp16": HF_FP16,
        "bf16": {"enabled": "auto"},
        "communication_data_type": "bf16",
        "zero_optimization": STAGE2 | {"round_robin_gradients": True},
        **BATCH,
        "gradient_clipping": "auto",
    },
    "llamafactory_z3_offload": {
        "zero_allow_untested_optimizer": True,
        "fp16": HF_FP16,
        "bf16": {"enabled": "auto"},
        "zero_optimization": STAGE3 | {"overlap_comm": False, "offload_optimizer": CPU, "offload_param": CPU},
        **BATCH,
        "gradient_clipping": "auto",
    },
}


@pytest.mark.parametrize("name", BROUGHT)
def test_json_of_another_trainer_works_unchanged(name):
    ds = BROUGHT[name]
    resolved = fill(ds, dp_size=2)
    assert not [path for path, value in walk(resolved.config) if value == "auto"]
    assert resolved.precision == ("fp32" if name == "hf_zero2" else "bf16")
    assert resolved.global_batch == 2
    assert resolved.config["optimizer"]["params"]["lr"] == 2e-5
    assert not {"scheduler", "amp", "activation_checkpointing"} & set(resolved.config)
    assert resolved.gradient_checkpointing is False
    assert (
        resolved.config["zero_optimization"]["stage"]
        == ds["zero_optimization"]["stage"]
        == resolved.zero_stage
    )


def test_hf_zero3_is_filled_like_hf():
    recipe = {
        "learning_rate": 3e-4,
        "adam_beta2": 0.95,
        "weight_decay": 0.1,
        "adam_epsilon": 1e-6,
        "warmup_steps": 7,
    }
    resolved = fill(
        BROUGHT["hf_zero3"], recipe | {"gradient_clipping": 0.5, "precision": "bf16"}, hidden_size=100
    )
    zero, params = resolved.config["zero_optimization"], resolved.config["optimizer"]["params"]
    assert params == {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}
    assert (zero["reduce_bucket_size"], zero["stage3_prefetch_bucket_size"]) == (10000, 9000)
    assert zero["stage3_param_persistence_threshold"] == 1000
    assert resolved.config["gradient_clipping"] == 0.5
    assert (resolved.lr_scheduler_type, resolved.warmup_steps, resolved.warmup_ratio) == ("linear", 7, 0.0)
    assert "WarmupDecayLR -> lr_scheduler_type linear" in " ".join(resolved.notes)
    assert (resolved.config["bf16"]["enabled"], resolved.config["fp16"]["enabled"]) == (True, False)
    assert resolved.ops == ("cpu_adam",)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stage3_keys_do_nothing_below_stage_3(stage):
    resolved = fill(apply_overrides(BROUGHT["axolotl_zero3"], {"zero_optimization.stage": stage}))
    assert not [key for key in resolved.config["zero_optimization"] if key.startswith("stage3_")]
    assert f"no effect at ZeRO stage {stage}: stage3_max_live_parameters" in resolved.notes[0]


@pytest.mark.parametrize("json_name", sorted(path.name for path in LIBRARY.glob("*.json")))
def test_shipped_json_resolves_and_deepspeed_takes_it(json_name):
    from deepspeed.runtime.config import DeepSpeedConfig

    ds = load_json(LIBRARY / json_name)
    stage = int(json_name[4])
    precision = next((name for name in ("_fp32.", "_fp16.") if name in json_name), "bf16").strip("_.")
    in_force = "bf16 autocast" if "autocast" in json_name else precision
    ops = {"offload": ("cpu_adam",), "nvme": ("cpu_adam", "pin_memory", "async_io"), "zeropp": ("quantizer",)}
    resolved = fill(ds, {"train_micro_batch_size_per_gpu": 2, "precision": precision}, on_cpu=False)
    assert (resolved.zero_stage, resolved.precision) == (stage, in_force)
    assert all("turns gradient checkpointing on" in note for note in resolved.notes)
    assert resolved.ops == next((needed for part, needed in ops.items() if part in json_name), ())
    theirs = DeepSpeedConfig(copy.deepcopy(resolved.config))
    assert theirs.zero_optimization_stage == stage
    assert theirs.bfloat16_config.enabled == (in_force == "bf16")
    assert theirs.float16_config.enabled == (in_force == "fp16")
    assert theirs.torch_autocast_enabled == (in_force == "bf16 autocast")
    assert theirs.train_batch_size == 2


@pytest.mark.parametrize("name", BROUGHT)
def test_deepspeed_takes_what_others_bring(name):
    from deepspeed.runtime.config import DeepSpeedConfig

    DeepSpeedConfig(fill(BROUGHT[name]).config)


@pytest.mark.parametrize("name", BROUGHT)
def test_nothing_is_mutated(name):
    ds = copy.deepcopy(BROUGHT[name])
    config = fill(ds, dp_size=2).config
    for block in config.values():
        if isinstance(block, dict):
            block.clear()
    assert ds == BROUGHT[name]


OWNED = [  # JSON key, recipe key, what the JSON says, what the recipe says otherwise, attribute
    ("train_micro_batch_size_per_gpu", "train_micro_batch_size_per_gpu", 4, 8, "micro"),
    ("gradient_accumulation_steps", "gradient_accumulation_steps", 4, 8, "gas"),
    ("train_batch_size", "global_batch_size", 4, 8, "global_batch"),
    ("gradient_clipping", "gradient_clipping", 0.5, 2.0, "gradient_clipping"),
    ("optimizer.params.lr", "learning_rate", 1e-4, 1e-3, "learning_rate"),
    ("optimizer.params.eps", "adam_epsilon", 1e-7, 1e-6, "eps"),
    ("optimizer.params.weight_decay", "weight_decay", 0.1, 0.2, "weight_decay"),
]


@pytest.mark.parametrize(("ds_key", "key", "literal", "other", "attribute"), OWNED)
def test_ownership(ds_key, key, literal, other, attribute):
    assert getattr(fill({}, {key: other}), attribute) == other
    assert getattr(fill(nest(ds_key, "auto"), {key: other}), attribute) == other
    assert getattr(fill(nest(ds_key, literal)), attribute) == literal
    assert getattr(fill(nest(ds_key, literal), {key: literal}), attribute) == literal
    with pytest.raises(UserError) as error:
        fill(nest(ds_key, literal), {key: other})
    for part in ("ds.json", "recipe.yaml", f"{ds_key}={literal}", f"{key}={other}"):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_written_null_of_an_unset_value_is_no_conflict():
    recipe = {"gradient_accumulation_steps": None, "global_batch_size": None, "warmup_steps": None}
    assert fill({"gradient_accumulation_steps": 4, "train_batch_size": 4}, recipe).gas == 4


def test_betas():
    ds = nest("optimizer.params.betas", [0.8, 0.9])
    assert fill(ds).betas == (0.8, 0.9)
    assert fill({}, {"adam_beta2": 0.95}).betas == (0.9, 0.95)
    with pytest.raises(UserError, match=r"betas\[1\]=0.9 but .*adam_beta2=0.95"):
        fill(ds, {"adam_beta2": 0.95})
    with pytest.raises(UserError, match="not a list of two"):
        fill(nest("optimizer.params.betas", 0.9))


def test_clipping_off_is_zero_for_deepspeed_and_always_said():
    assert fill({}).config["gradient_clipping"] == 1.0
    assert fill({}, {"gradient_clipping": None}).config["gradient_clipping"] == 0.0
    assert fill({"gradient_clipping": 0.0}, {"gradient_clipping": None}).gradient_clipping == 0.0
    with pytest.raises(UserError, match="gradient_clipping=1.0 but .*gradient_clipping=null"):
        fill({"gradient_clipping": 1.0}, {"gradient_clipping": None})


ON, OFF, AUTO = {"enabled": True}, {"enabled": False}, {"enabled": "auto"}
BOTH_AUTO = {"bf16": AUTO, "fp16": AUTO}


@pytest.mark.parametrize(
    ("ds", "precision", "expected"),
    [
        (BOTH_AUTO, None, "bf16"),
        (BOTH_AUTO, "bf16", "bf16"),
        (BOTH_AUTO, "fp16", "fp16"),
        (BOTH_AUTO, "fp32", "fp32"),
        ({"bf16": AUTO}, None, "bf16"),
        ({"bf16": AUTO}, "fp32", "fp32"),
        ({"bf16": AUTO}, "fp16", UserError),
        ({"fp16": AUTO}, None, "fp32"),
        ({"fp16": AUTO}, "bf16", UserError),
        ({"bf16": ON}, None, "bf16"),
        ({"bf16": ON}, "fp32", UserError),
        ({"bf16": ON, "fp16": AUTO}, None, "bf16"),
        ({"bfloat16": ON}, None, "bf16"),
        ({"fp16": ON}, None, "fp16"),
        ({"fp16": ON}, "bf16", UserError),
        ({"bf16": OFF, "fp16": OFF}, None, "fp32"),
        ({"bf16": OFF}, "bf16", UserError),
        ({"bf16": None}, None, "fp32"),
        ({}, None, "fp32"),
        ({}, "fp32", "fp32"),
        ({}, "bf16", UserError),
        ({"bf16": ON, "fp16": ON}, None, UserError),
        ({"bf16": ON, "bfloat16": ON}, None, UserError),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, None, "bf16 autocast"),
        ({"torch_autocast": {"enabled": True, "dtype": "bf16"}, **BOTH_AUTO}, "bf16", "bf16 autocast"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "fp16", "fp16 autocast"),
        ({"torch_autocast": {"enabled": True, "dtype": "bf16"}}, "fp32", UserError),
        ({"torch_autocast": {"enabled": True, "dtype": "bf16"}, "bf16": ON}, None, UserError),
        ({"torch_autocast": {"enabled": True}}, None, UserError),
        ({"torch_autocast": {"enabled": False}, "bf16": ON}, None, "bf16"),
    ],
)
def test_precision(ds, precision, expected):
    recipe = {} if precision is None else {"precision": precision}
    if expected is UserError:
        with pytest.raises(UserError):
            fill(ds, recipe, on_cpu=False)
        return
    resolved = fill(ds, recipe, on_cpu=False)
    assert resolved.precision == expected
    assert resolved.config.get("bf16", OFF)["enabled"] == (expected == "bf16")
    assert resolved.config.get("fp16", OFF)["enabled"] == (expected == "fp16")


@pytest.mark.parametrize(
    ("ds", "precision", "match"),
    [
        ({"bf16": ON}, "fp32", "ds.json: bf16.enabled=true but recipe.yaml: train.precision=fp32"),
        ({"bf16": OFF}, "bf16", "ds.json: bf16.enabled=false but recipe.yaml: train.precision=bf16"),
        ({}, "bf16", 'no bf16.enabled, .*train.precision=bf16; add "bf16": {"enabled": "auto"}'),
        ({"fp16": AUTO}, "bf16", "no bf16.enabled"),
        ({"torch_autocast": {"enabled": True, "dtype": "bf16"}}, "fp32", "torch_autocast.dtype=bf16 but"),
    ],
)
def test_precision_conflict_names_both_sides(ds, precision, match):
    with pytest.raises(UserError, match=match):
        fill(ds, {"precision": precision}, on_cpu=False)


def test_fp32_by_omission_is_said():
    assert "trains in fp32" in fill({}).notes[0]
    assert not fill({"bf16": OFF}).notes and not fill({}, {"precision": "fp32"}).notes


def test_fp16_needs_a_gpu():
    with pytest.raises(UserError, match="fp16 needs a GPU"):
        fill({"fp16": ON}, on_cpu=True)


@pytest.mark.parametrize(
    ("ds", "recipe", "dp_size", "expected"),
    [
        ({}, {}, 1, (1, 1, 1)),
        ({}, {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, 2, (4, 2, 16)),
        ({}, {"train_micro_batch_size_per_gpu": 4, "global_batch_size": 32}, 2, (4, 4, 32)),
        ({}, {"train_micro_batch_size_per_gpu": 4, "global_batch_tokens": 32 * 128}, 2, (4, 4, 32)),
        ({}, {"gradient_accumulation_steps": 2, "global_batch_size": 32}, 2, (8, 2, 32)),
        (BATCH, {"train_micro_batch_size_per_gpu": 2, "global_batch_size": 8}, 2, (2, 2, 8)),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, {}, 2, (4, 4, 32)),
        ({"train_batch_size": 32.0, "gradient_accumulation_steps": 4}, {}, 2, (4, 4, 32)),
        ({"train_batch_size": 32}, {"global_batch_size": 32, "global_batch_tokens": 4096}, 2, (1, 16, 32)),
        (
            {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            {},
            2,
            (4, 2, 16),
        ),
    ],
)
def test_batch(ds, recipe, dp_size, expected):
    resolved = fill(ds, recipe, dp_size=dp_size)
    assert (resolved.micro, resolved.gas, resolved.global_batch) == expected
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    assert tuple(resolved.config[key] for key in keys) == expected


@pytest.mark.parametrize(
    ("ds", "recipe", "dp_size", "match"),
    [
        ({}, {"train_micro_batch_size_per_gpu": 4, "global_batch_size": 10}, 2, "nearest: 8 or 16"),
        ({}, {"train_micro_batch_size_per_gpu": 4, "global_batch_size": 3}, 2, "nearest: 8$"),
        ({}, {"global_batch_tokens": 1000}, 2, "multiple of data.max_seq_length=128; nearest: 768 or 1024"),
        ({}, {"global_batch_tokens": 128 * 3}, 2, "nearest: 256 or 512"),
        ({}, {"global_batch_tokens": 256, "global_batch_size": 4}, 1, "2 sequences of 128, but"),
        ({"train_batch_size": 4}, {"global_batch_tokens": 256}, 1, "train_batch_size of ds.json"),
        (
            {},
            {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "global_batch_size": 8},
            1,
            "it would be 4",
        ),
        (
            {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
            {},
            2,
            "2 x 2 data-parallel ranks x gas 2 = 8",
        ),
        ({"train_micro_batch_size_per_gpu": 0}, {}, 1, "at least 1"),
        ({"data_parallel_size": 4}, {}, 2, "data_parallel_size=4"),
    ],
)
def test_batch_that_does_not_divide(ds, recipe, dp_size, match):
    with pytest.raises(UserError, match=match) as error:
        fill(ds, recipe, dp_size=dp_size)
    assert "\n" not in str(error.value)


def optimizer(kind: str, **params: Any) -> dict:
    return {"optimizer": {"type": kind, "params": params}}


OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize(
    ("ds", "on_cpu", "torch_adam", "ops"),
    [
        ({}, False, True, ()),
        ({"optimizer": {}}, False, True, ()),
        ({"optimizer": ""}, False, True, ()),
        ({"optimizer": None}, False, True, ()),
        ({"optimizer": {"type": "auto", "params": autos("lr")}}, False, True, ()),
        (OFFLOAD, False, None, ("cpu_adam",)),
        (OFFLOAD | optimizer("AdamW", torch_adam=True), False, True, ()),
        (optimizer("AdamW"), False, None, ("fused_adam",)),
        (optimizer("AdamW"), True, True, ()),
        (optimizer("Adam", torch_adam=False), True, False, ("fused_adam",)),
        (optimizer("AdamW", bias_correction=True), True, None, ("fused_adam",)),
        (optimizer("Lion", betas="auto", eps="auto"), False, None, ("fused_lion",)),
        (OFFLOAD | optimizer("Lion"), True, None, ("cpu_lion",)),
        (OFFLOAD | optimizer("Adagrad"), True, None, ("cpu_adagrad",)),
        (optimizer("Adagrad"), True, None, ()),
        (optimizer("Lamb"), False, None, ("fused_lamb",)),
        (optimizer("Muon", momentum=0.9), False, None, ("fused_adam",)),
        (optimizer("Muon", muon_lr=0.01), True, True, ()),
        (optimizer("SGD", momentum=0.9), True, None, ()),
    ],
)
def test_optimizer(ds, on_cpu, torch_adam, ops):
    resolved = fill(ds, {"learning_rate": 1e-3, "weight_decay": 0.1}, on_cpu=on_cpu)
    block = resolved.config["optimizer"]
    written = (ds.get("optimizer") or {}).get("type", "auto")
    assert block["type"] == ("AdamW" if written == "auto" else written)
    assert block["params"].get("torch_adam") == torch_adam
    assert (block["params"]["lr"], block["params"]["weight_decay"]) == (1e-3, 0.1)
    assert resolved.ops == ops
    has_eps = "eps" in OPTIMIZER_PARAMS[block["type"].lower()]["fused"] if ops == ("fused_lion",) else True
    assert has_eps or "eps" not in block["params"]


def test_optimizer_keeps_its_own_betas_unless_told():
    assert fill(optimizer("Lion"), on_cpu=False).betas is None
    assert fill(optimizer("Lion"), {"adam_beta2": 0.95}, on_cpu=False).betas == (0.9, 0.95)


def test_torch_adam_on_a_cpu_is_said():
    assert "torch_adam=true" in " ".join(fill(optimizer("AdamW")).notes)


@pytest.mark.parametrize(
    ("ds", "recipe", "match"),
    [
        (optimizer("AdamWW"), {}, "did you mean 'AdamW'"),
        (optimizer("sgd"), {}, "did you mean 'SGD'"),
        (optimizer("Foo"), {}, "valid: AdamW"),
        (optimizer("OneBitAdam"), {}, "has removed"),
        (optimizer("ZeroOneAdam"), {}, "has removed"),
        (optimizer("OneBitLamb"), {}, "has removed"),
        (optimizer("MuAdam"), {}, "mup"),
        (optimizer("AdamW", max_grad_norm=1.0), {}, "gradient_clipping"),
        (optimizer("AdamW", weight_deca=0.1), {}, "did you mean 'weight_decay'"),
        (optimizer("AdamW", lr="1e-4"), {}, "not a number"),
        (optimizer("Lion", eps=1e-8), {}, "no parameter 'eps'"),
        (OFFLOAD | optimizer("Lion"), {"adam_epsilon": 1e-6}, "has no effect"),
        (optimizer("Lion"), {}, "needs a GPU"),
        (optimizer("Lamb"), {}, "needs a GPU"),
    ],
)
def test_optimizer_errors(ds, recipe, match):
    with pytest.raises(UserError, match=match):
        fill(ds, recipe, on_cpu=True)


def scheduler(kind: str, **params: Any) -> dict:
    return {"scheduler": {"type": kind, "params": params}, "bf16": ON}


@pytest.mark.parametrize(
    ("ds", "recipe", "expected"),
    [
        (scheduler("WarmupLR"), {}, ("constant", 0, 0.0, 0.0)),
        (scheduler("WarmupDecayLR", warmup_num_steps=5), {}, ("linear", 5, 0.0, 0.0)),
        (scheduler("WarmupDecayLR", warmup_num_steps="auto"), {"warmup_ratio": 0.1}, ("linear", 0, 0.1, 0.0)),
        (scheduler("WarmupDecayLR", total_num_steps=9), {"max_steps": 9}, ("linear", 0, 0.0, 0.0)),
        (scheduler("WarmupCosineLR", cos_min_ratio=0.1), {"warmup_steps": 3}, ("cosine", 3, 0.0, 0.1)),
        (scheduler("WarmupCosineLR", cos_min_ratio="auto"), {"min_lr_ratio": 0.2}, ("cosine", 0, 0.0, 0.2)),
        (
            scheduler("WarmupLR", warmup_type="log"),
            {"lr_scheduler_type": "constant"},
            ("constant", 0, 0.0, 0.0),
        ),
    ],
)
def test_scheduler(ds, recipe, expected):
    resolved = fill(ds, recipe)
    values = (resolved.lr_scheduler_type, resolved.warmup_steps, resolved.warmup_ratio, resolved.min_lr_ratio)
    assert values == expected
    assert "scheduler" not in resolved.config
    assert len(resolved.notes) == 1
    assert ("logarithmic" in resolved.notes[0]) == (ds["scheduler"]["params"].get("warmup_type") == "log")


def test_no_scheduler_block_is_the_recipes():
    recipe = {"lr_scheduler_type": "wsd", "warmup_ratio": 0.1, "min_lr_ratio": 0.1}
    for ds in ({}, {"scheduler": None}, {"scheduler": {}}, {"scheduler": ""}):
        resolved = fill(ds | {"bf16": ON}, recipe)
        assert (resolved.lr_scheduler_type, resolved.warmup_ratio, resolved.notes) == ("wsd", 0.1, ())
    assert fill({}, {"warmup_ratio": 0.1, "warmup_steps": 0}).warmup_ratio == 0.0


@pytest.mark.parametrize(
    ("ds", "recipe", "match"),
    [
        (scheduler("WarmupLR"), {"lr_scheduler_type": "cosine"}, "constant.* but .*lr_scheduler_type=cosine"),
        (scheduler("LRRangeTest"), {}, "write WarmupLR"),
        (scheduler("OneCycle"), {}, "write WarmupCosineLR"),
        (scheduler("WarmupDecay"), {}, "did you mean 'WarmupDecayLR'"),
        (scheduler("WarmupLR", total_num_steps=5), {}, "takes no parameter 'total_num_steps'"),
        (
            scheduler("WarmupDecayLR", total_num_steps=5),
            {"max_steps": 6},
            "total_num_steps=5 but .*max_steps=6",
        ),
        (scheduler("WarmupDecayLR", total_num_steps=5), {}, "max_steps=null"),
        (scheduler("WarmupLR", warmup_min_lr=1e-6), {}, "only 0"),
        (scheduler("WarmupLR", warmup_type="cubic"), {}, "linear or log"),
        (scheduler("WarmupLR", warmup_num_steps=5), {"warmup_steps": 6}, "warmup_num_steps=5 but .*steps=6"),
        (
            scheduler("WarmupLR", warmup_num_steps=5),
            {"warmup_ratio": 0.1},
            "warmup_num_steps=5 but .*ratio=0.1",
        ),
        (scheduler("WarmupLR", warmup_num_steps="5"), {}, "not a number"),
        (
            scheduler("WarmupLR", warmup_max_lr=1e-3),
            {"learning_rate": 1e-4},
            "0.001 but .*learning_rate=0.0001",
        ),
        (scheduler("WarmupLR", warmup_max_lr=1e-3) | optimizer("AdamW", lr=1e-4), {}, "lr=0.0001"),
        (scheduler("WarmupCosineLR", cos_min_ratio=0.1), {"min_lr_ratio": 0.2}, "cos_min_ratio=0.1 but"),
        ({"scheduler": {"params": {"warmup_num_steps": 5}}}, {}, "no type"),
    ],
)
def test_scheduler_errors(ds, recipe, match):
    with pytest.raises(UserError, match=match):
        fill(ds, recipe)


def test_warmup_max_lr_is_the_learning_rate():
    resolved = fill(scheduler("WarmupLR", warmup_max_lr=1e-3))
    assert resolved.learning_rate == resolved.config["optimizer"]["params"]["lr"] == 1e-3


@pytest.mark.parametrize(
    ("block", "recipe", "expected"),
    [
        (None, None, (False, False)),
        (None, True, (True, False)),
        (IDLE_CHECKPOINTING, None, (False, False)),
        (IDLE_CHECKPOINTING, True, (True, False)),
        (IDLE_CHECKPOINTING, False, (False, False)),
        ({"partition_activations": True}, None, (True, False)),
        ({"number_checkpoints": 4}, True, (True, False)),
        ({"cpu_checkpointing": True}, None, (True, True)),
    ],
)
def test_gradient_checkpointing(block, recipe, expected):
    given = {} if recipe is None else {"model.gradient_checkpointing": recipe}
    resolved = fill({"activation_checkpointing": block, "bf16": ON}, given)
    assert (resolved.gradient_checkpointing, resolved.offload_activations) == expected
    assert "activation_checkpointing" not in resolved.config
    assert bool(resolved.notes) == any((block or {}).values())


def test_gradient_checkpointing_conflict():
    with pytest.raises(
        UserError, match="cpu_checkpointing=true but recipe.yaml: model.gradient_checkpointing=false"
    ):
        fill(
            nest("activation_checkpointing.cpu_checkpointing", True), {"model.gradient_checkpointing": False}
        )


NVME = {"device": "nvme", "nvme_path": "disk"}


@pytest.mark.parametrize(
    ("zero", "ops"),
    [
        (
            {"stage": 3, "offload_param": NVME, "offload_optimizer": NVME},
            ("cpu_adam", "pin_memory", "async_io"),
        ),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, ()),
        ({"stage": 0, "offload_param": {"device": "none"}, "offload_optimizer": None}, ()),
        ({"stage": 1, "cpu_offload": True}, ("cpu_adam",)),
        ({"stage": 3, "cpu_offload": False, "cpu_offload_param": True}, ()),
        ({"stage": 3, "zero_quantized_weights": True}, ("quantizer",)),
        (True, ()),
        (False, ()),
    ],
)
def test_offload(zero, ops):
    resolved = fill({"zero_optimization": zero}, on_cpu=False)
    assert resolved.ops == ops
    stage = int(zero) if isinstance(zero, bool) else zero["stage"]
    assert resolved.zero_stage == resolved.config["zero_optimization"]["stage"] == stage


def test_old_name_of_gathering():
    zero = fill({"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}}).config
    assert zero["zero_optimization"] == {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}


STAGE = "zero_optimization.stage"
PARAM, OPTIM = "zero_optimization.offload_param.device", "zero_optimization.offload_optimizer.device"


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        # unknown, misplaced, misspelt
        ({"zero_optimisation": {}}, "did you mean 'zero_optimization'"),
        ({"zero_optimization.stge": 2}, "unknown key 'zero_optimization.stge'; did you mean 'stage'"),
        ({"zero_optimization.offload_param.devise": "cpu"}, "did you mean 'device'"),
        ({"overlap_comm": True}, "belongs in 'zero_optimization'"),
        ({"activation_checkpointing.partitioned_activations": True}, "'partition_activations'"),
        ({"bf16.check_overflow": True}, "check_grad_overflow"),
        ({"checkpoint.tag_validate": "Warn"}, "did you mean 'tag_validation'"),
        ({"timers.throughput.enable": True}, "did you mean 'enabled'"),
        ({"compile.backend": "inductor"}, "unknown key 'compile.backend'"),
        ({"max_grad_norm": 1.0}, "write 'gradient_clipping'"),
        ({"per_device_train_batch_size": 1}, "write 'train_micro_batch_size_per_gpu'"),
        ({"allgather_size": 1}, "allgather_bucket_size"),
        ({"zero_optimization.cpu_offload_use_pin_memory": True}, "ignores it; write .*pin_memory"),
        # wrong values
        ({STAGE: "2"}, 'zero_optimization.stage="2" is not one of 0, 1, 2, 3'),
        ({STAGE: 4}, "stage=4 is not one of"),
        ({STAGE: True}, "stage=true is not one of"),
        ({STAGE: "auto"}, 'stage="auto"'),
        ({"bf16.enabled": "true"}, 'bf16.enabled="true" is not true or false'),
        ({"bf16": True}, "bf16=true is not a block"),
        ({"train_batch_size": 1.5}, "not a whole number"),
        ({"steps_per_print": float("inf")}, "not a whole number"),
        ({"gradient_clipping": "1"}, "not a number"),
        ({OPTIM: "disk"}, 'one of "none", "cpu", "nvme"'),
        # auto that nobody fills
        ({"fp16.loss_scale": "auto"}, 'fp16.loss_scale="auto" is filled by nothing'),
        ({"zero_optimization.overlap_comm": "auto"}, "filled by nothing"),
        ({"wall_clock_breakdown": "auto"}, "filled by nothing"),
        ({OPTIM: "auto", STAGE: 2}, "filled by nothing"),
        ({"aio.block_size": "auto"}, "filled by nothing"),
        # what DeepSpeed removed
        ({"amp": {"enabled": True}}, "removed"),
        ({"sparse_gradients": True}, "removed"),
        ({"elasticity": {"enabled": True}}, "global_batch_size"),
        ({"curriculum_learning": {"curriculum_type": "seqlen"}}, "removed"),
        ({"sparse_attention": {"mode": "fixed"}}, "attn_implementation"),
        ({"zero_optimization.mics_shard_size": 8}, "MiCS"),
        # what this project cannot honour
        ({"gradient_allreduce_op": "sum"}, "mean"),
        ({"prescale_gradients": True}, "mean"),
        ({"gradient_predivide_factor": 2.0}, "mean"),
        ({"managed_gradient_accumulation": False}, "mean"),
        ({"wandb.enabled": True}, "logging.report_to"),
        ({"tensorboard.enabled": True}, "logging.report_to"),
        ({"csv_monitor.enabled": True}, "logging.report_to"),
        ({"comet.enabled": True}, "logging.report_to"),
        ({"data_efficiency": {"enabled": True}}, "data_efficiency.enabled"),
        ({"autotuning.enabled": True}, "autotuning"),
        ({"hybrid_engine.enabled": True}, "RLHF"),
        ({"pipeline": {"stages": 2}}, "pipeline"),
        ({"tensor_parallel.autotp_size": 2}, "only 1"),
        ({"sequence_parallel_size": 2}, "only 1"),
        ({"expert_parallel": {"enabled": True}}, "not supported yet"),
        ({"compile.deepcompile": True}, "DeepCompile"),
        ({"zero_optimization.zenflow": {"topk_ratio": 0.1}}, "ZenFlow"),
        ({"checkpoint.writer": {"type": "FAST"}}, "default writer"),
        ({"datastates_ckpt": {"host_cache_size": 1}}, "checkpoint engine"),
        ({"dataloader_drop_last": True}, "data loader"),
        ({"disable_allgather": True}, "ignores"),
        ({"activation_checkpointing.profile": True}, "Transformers"),
        ({"activation_checkpointing.contiguous_memory_optimization": True}, "Transformers"),
        ({"zero_optimization.compute_grad_norm": False, STAGE: 1}, "norm"),
        # blocks that do not fit together
        ({PARAM: "cpu", STAGE: 2}, "needs zero_optimization.stage=3, not 2"),
        ({OPTIM: "cpu", STAGE: 0}, "needs zero_optimization.stage=1 or 2 or 3"),
        ({OPTIM: "nvme", STAGE: 3}, "nvme_path"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": NVME}}, "stage=3"),
        ({OPTIM: "cpu", STAGE: 2, "zero_optimization.offload_optimizer.ratio": 0.5}, "ratio=0.5 needs"),
        ({OPTIM: "cpu", STAGE: 2, "zero_optimization.cpu_offload": True}, "old name"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "stage=1, 2 or 3"),
        (
            {"bf16": {"enabled": True, "bf16_optimizer_states": True}, STAGE: 1},
            "bf16_master_weights_and_grads",
        ),
        ({"data_types.param_dtype": "bf16"}, "model is in fp32"),
        ({"data_types.grad_accum_dtype": "fp32", "bf16": {"enabled": True}}, "at ZeRO stage 0"),
        ({"aio.use_gds": True, "zero_optimization": {"stage": 3, "offload_param": NVME}}, "needs a GPU"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}, "needs a GPU"),
    ],
)
def test_refused(overrides, match):
    with pytest.raises(UserError, match=match) as error:
        fill(apply_overrides({}, overrides), on_cpu=True)
    assert str(error.value).startswith("ds.json: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", [path for path, (allowed, _) in ONLY.items() if allowed != ({},)])
def test_refused_key_at_its_allowed_value_is_fine(path):
    for value in ONLY[path][0]:
        fill(nest(path, value))


@pytest.mark.parametrize(
    "ds",
    [
        {
            "wandb": {"enabled": False, "project": "x"},
            "tensorboard": {"output_path": "x"},
            "autotuning": {"fast": True},
        },
        {"elasticity": {"enabled": False}, "sparse_gradients": False, "data_efficiency": {"enabled": False}},
        {"tensor_parallel": {"autotp_size": 1}, "sequence_parallel_size": 1, "data_parallel_size": 1},
        {"expert_parallel": {"enabled": False, "top_k": "auto"}},
    ],
)
def test_idle_block_is_dropped(ds):
    assert not set(ds) & set(fill(ds).config)


def test_deepspeeds_own_auto_is_kept():
    config = fill({"data_types": {"keep_in_fp32_modules": "auto"}}).config
    assert config["data_types"]["keep_in_fp32_modules"] == "auto"


def test_hidden_size_is_only_needed_by_auto():
    assert fill({"zero_optimization": {"stage": 3}}, hidden_size=None).zero_stage == 3
    with pytest.raises(UserError, match='reduce_bucket_size="auto" needs a model with a hidden_size'):
        fill({"zero_optimization": STAGE3}, hidden_size=None)
    assert (
        fill({"zero_optimization": STAGE3}, hidden_size=1).config["zero_optimization"][
            "stage3_prefetch_bucket_size"
        ]
        == 1
    )


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"bf16": {},\n "fp16": {\n "enabled": true, "enabled": false}}', ':3: duplicate key "enabled"'),
        ('{\n // no\n "bf16": {}}', ":2: .*comments"),
        ('{"bf16": {},\n}', ":[12]: .*trailing commas"),
        ("[]", "must be an object"),
        ('{\n"a:b": "NaN",\n"steps_per_print": Infinity}', ":3: Infinity is not JSON"),
        ('{"gradient_clipping": NaN}', ":1: NaN"),
        ("", ":1: "),
    ],
)
def test_strict_json(tmp_path, text, match):
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(UserError, match=match):
        load_json(tmp_path / "ds.json")


def test_same_key_in_two_blocks_is_no_duplicate(tmp_path):
    text = (
        '{"bf16": {"enabled": true}, "fp16": {"enabled": false}, "aio": {"x": [{"a": 1}, {"a": "\\" {a:"}]}}'
    )
    (tmp_path / "ds.json").write_text(text)
    assert load_json(tmp_path / "ds.json") == json.loads(text)


def test_find_json(tmp_path):
    recipe, library = tmp_path / "recipe", tmp_path / "library"
    for folder in (recipe / "sub", library):
        folder.mkdir(parents=True)
    for path in (recipe / "a.json", recipe / "sub/c.json", library / "a.json", library / "zero2.json"):
        path.write_text("{}")

    def find(name: str) -> Path:
        return find_json(name, recipe_dir=recipe, library_dir=library)

    assert find("a.json") == recipe / "a.json"
    assert find("zero2.json") == library / "zero2.json"
    assert find("sub/c.json") == recipe / "sub/c.json"
    assert find(str(library / "a.json")) == library / "a.json"
    assert find("../library/zero2.json").samefile(library / "zero2.json")
    with pytest.raises(UserError, match="did you mean 'zero2.json'") as error:
        find("zero22.json")
    assert str(recipe) in str(error.value) and str(library) in str(error.value)


@pytest.mark.parametrize(
    ("stage", "precision", "current", "expected"),
    [
        (2, None, {"bf16": ON}, "zero2.json"),
        (2, None, {"fp16": ON}, "zero2_fp16.json"),
        (2, None, BOTH_AUTO, "zero2.json"),
        (2, None, {}, "zero2_fp32.json"),
        (None, "fp32", {"zero_optimization": {"stage": 3}}, "zero3_fp32.json"),
        (None, "bf16", {}, "zero0.json"),
        (1, "fp16", {}, "zero1_fp16.json"),
        (4, None, {}, UserError),
        (None, "fp8", {}, UserError),
    ],
)
def test_shorthand(stage, precision, current, expected):
    if expected is UserError:
        with pytest.raises(UserError, match="is not one of"):
            shorthand(stage, precision, current)
    else:
        name = shorthand(stage, precision, current)
        assert name == expected and (LIBRARY / name).is_file()


def test_overrides_copy():
    ds = {"zero_optimization": {"stage": 1}, "bf16": None}
    value = {"device": "cpu"}
    merged = apply_overrides(
        ds, {STAGE: 2, "bf16.enabled": True, "zero_optimization.offload_optimizer": value}
    )
    assert merged == {
        "zero_optimization": {"stage": 2, "offload_optimizer": value},
        "bf16": {"enabled": True},
    }
    merged["zero_optimization"]["offload_optimizer"]["device"] = "none"
    assert ds == {"zero_optimization": {"stage": 1}, "bf16": None} and value == {"device": "cpu"}
    with pytest.raises(UserError, match="zero_optimization.stage=1 is not a block"):
        apply_overrides(ds, {"zero_optimization.stage.x": 1})


def test_import_needs_no_torch():
    slow = ("torch", "deepspeed", "pydantic")
    code = f"import sys, dstrain.ds_config; sys.exit(any(name in sys.modules for name in {slow}))"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT, timeout=60).returncode == 0


def pydantic_blocks() -> dict[str, Any]:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    return {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
        "bf16": DeepSpeedBF16Config,
        "bfloat16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "comms_logger": CommsLoggerConfig,
        "compile": CompileConfig,
        "tensorboard": TensorBoardConfig,
        "csv_monitor": CSVConfig,
        "wandb": WandbConfig,
        "comet": CometConfig,
        "tensor_parallel": TPTrainingConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
    }


def test_keys_of_pydantic_blocks():
    for path, model in pydantic_blocks().items():
        theirs: dict[str, Any] = {}
        for name, field in model.model_fields.items():
            theirs |= dict.fromkeys(filter(None, (name, field.alias)), field.annotation)
        assert set(KEYS[path]) == set(theirs), path
        for name, kind in KEYS[path].items():
            annotation = theirs[name]
            if get_origin(annotation) in (Union, types.UnionType):
                annotation = next(arg for arg in get_args(annotation) if arg is not type(None))
            if annotation in (bool, int, float, str):
                assert kind is annotation, f"{path}.{name}"


class _Keys:
    def __init__(self, block: "_Recorder"):
        self.block = block

    def __contains__(self, key: str) -> bool:
        return key in self.block

    def __iter__(self):
        return dict.__iter__(self.block)


class _Recorder(dict):
    """A JSON block that notes which keys DeepSpeed asks it for."""

    def __init__(self, seen: dict[str, set[str]], path: str, **items: Any):
        super().__init__(items)
        self.asked = seen.setdefault(path, set())

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)

    def keys(self):
        return _Keys(self)

    def __copy__(self):
        return self


def test_keys_that_deepspeed_asks_for():
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfig

    seen: dict[str, set[str]] = {}
    plain = ("aio", "flops_profiler", "torch_autocast", "data_types", "activation_checkpointing", "timers")
    blocks = {name: _Recorder(seen, name) for name in plain}
    blocks["optimizer"] = _Recorder(seen, "optimizer", type="AdamW")
    blocks["scheduler"] = _Recorder(seen, "scheduler", type="WarmupLR")
    write = _Recorder(seen, "checkpoint.parallel_write")
    blocks["checkpoint"] = _Recorder(seen, "checkpoint", parallel_write=write)
    DeepSpeedConfig(_Recorder(seen, "", train_batch_size=1, **blocks))

    source = inspect.getsource(deepspeed.initialize)
    mesh = {"sequence_parallel_size", "data_parallel_size"}
    assert all(f'"{key}" in config' in source for key in mesh)
    assert seen[""] | mesh == set(KEYS[""]) | {path for path in ONLY if "." not in path}
    for path, asked in seen.items():
        if path:
            assert asked == set(KEYS[path]), path


def test_removed_keys():
    from deepspeed.runtime import config

    assert set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS) == {path for path in ONLY if "." not in path} - set(
        KEYS[""]
    )
    removed = {f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS}
    known = {f"zero_optimization.{key}" for key in KEYS["zero_optimization"]}
    assert removed == {path for path in ONLY if path.startswith("zero_optimization.")} - known


def test_every_block_is_compared():
    asked = {"", "optimizer", "scheduler", "aio", "flops_profiler", "torch_autocast", "data_types", "timers"}
    asked |= {"activation_checkpointing", "checkpoint", "checkpoint.parallel_write"}
    assert set(KEYS) == asked | set(pydantic_blocks())


def test_optimizers():
    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    classes = {
        ("adam", "torch"): torch.optim.AdamW,
        ("adam", "cpu"): DeepSpeedCPUAdam,
        ("adam", "fused"): FusedAdam,
        ("lion", "cpu"): DeepSpeedCPULion,
        ("lion", "fused"): FusedLion,
        ("adagrad", "cpu"): DeepSpeedCPUAdagrad,
        ("adagrad", "torch"): torch.optim.Adagrad,
        ("lamb", "fused"): FusedLamb,
    }
    classes |= {(name, "torch"): getattr(torch.optim, name) for name in OPTIMIZER_PARAMS if name[0].isupper()}
    for (kind, variant), cls in classes.items():
        theirs = set(inspect.signature(cls.__init__).parameters) - {"self", "params", "model_params"}
        # DeepSpeed sets or refuses these itself.
        theirs -= {"adam_w_mode", "adamw_mode", "max_grad_norm"}
        assert OPTIMIZER_PARAMS[kind][variant] == theirs, kind
    ours = {name for name in OPTIMIZER_PARAMS if name.islower()}
    assert ours == set(DEEPSPEED_OPTIMIZERS) - {"muadam", "muadamw", "musgd"}


def test_schedulers():
    from deepspeed.runtime import lr_schedules

    assert set(SCHEDULERS) | {"LRRangeTest", "OneCycle"} == set(lr_schedules.VALID_LR_SCHEDULES)
    for name, (_, params) in SCHEDULERS.items():
        theirs = set(inspect.signature(getattr(lr_schedules, name).__init__).parameters) - {
            "self",
            "optimizer",
        }
        assert params == theirs, name


def test_check_keys_takes_nulls():
    check_keys({"bf16": None, "zero_optimization": {"stage": 2, "offload_param": None}}, "ds.json")
