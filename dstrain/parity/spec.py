"""What the reference needs to know of a case: initial weights, batches, optimizer and schedule."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import train
from dstrain import data, distributed, model, request
from dstrain.errors import UserError


def reference_spec(arguments: Sequence[str], ranks: int, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the reference's orders for train.py's `arguments` on `ranks`, and arguments to add to these.

    The batches are written into `folder`. Dropout, which no two implementations draw alike, is turned off.
    Raises UserError for what the reference cannot do, and as train.py does for mistakes.
    """
    args = train.parse_args(list(arguments))
    how = (args.deepspeed_config, args.zero_stage, args.precision)
    asked = request.load(args.config, args.overrides, *how, dp_size=ranks, on_cpu=distributed.on_cpu())
    recipe, ds, tokenizer, model_config = asked.recipe, asked.ds, asked.tokenizer, asked.model_config
    model.check_fit(model_config, recipe.data.max_seq_length)
    optimizer = ds.config["optimizer"]["type"]
    if optimizer.lower() not in ("adamw", "adam"):
        raise UserError(f"{asked.ds_file}: optimizer.type={optimizer}: the reference knows AdamW alone")
    options = recipe.data.model_dump(exclude={"train", "eval"}) | {"progress": False}
    sources = data.build([source.model_dump() for source in recipe.data.train], tokenizer, **options)
    width = recipe.data.max_seq_length if recipe.data.packing else None
    # All ranks' rows in one batch: how they are dealt out is what is to be checked.
    loader = data.Loader(sources, recipe.seed, ds.global_batch, 1, 0, 1, width, tokenizer.eos_token_id)
    steps = recipe.train.max_steps or math.ceil(
        recipe.train.num_train_epochs * loader.epoch_sequences / ds.global_batch
    )
    batches = folder / "batches.safetensors"
    save_file(_stacked([loader.next_step()[0] for _ in range(steps)]), batches)
    described = json.loads(json.dumps(model_config.to_dict(), default=str))
    drops = [name for name, value in described.items() if _is_dropout(name) and value]
    if asked.origin.name is None:
        described["vocab_size"] = asked.rows
    else:  # the folder's own, but for what the recipe changes
        described = dict(recipe.model.config)
    described |= dict.fromkeys(drops, 0.0)
    mixture = getattr(model_config, "output_router_logits", False)
    spec = {
        "folder": asked.origin.name,
        **asked.origin.options,
        "config": described,
        "rows": asked.rows,
        "seed": recipe.seed,
        "precision": ds.precision.split()[0],
        "autocast": ds.precision.endswith("autocast"),
        "bf16_states": bool((ds.config.get("bf16") or {}).get("bf16_optimizer_states")),
        "batches": str(batches),
        "steps": steps,
        "micro": ds.micro if mixture else ds.global_batch,
        "aux_coef": model_config.router_aux_loss_coef if mixture else None,
        "experts": getattr(model_config, "num_local_experts", getattr(model_config, "num_experts", 0)),
        "lr": ds.learning_rate,
        "betas": ds.betas,
        "eps": ds.eps,
        "weight_decay": ds.weight_decay,
        "clip": ds.gradient_clipping,
        "schedule": ds.lr_scheduler_type,
        "max_steps": steps,
        "warmup_steps": ds.warmup_steps or round(ds.warmup_ratio * steps),
        "min_lr_ratio": ds.min_lr_ratio,
        "decay_ratio": recipe.train.decay_ratio,
    }
    return spec, [f"model.config.{name}=0.0" for name in drops]


def _is_dropout(name: str) -> bool:
    return "dropout" in name or name.endswith("pdrop")


def _stacked(batches: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return (steps, rows, tokens) of each tensor, rows that are shorter padded as documents of number 0."""
    names = ("input_ids", "labels", "document_ids")
    width = max(batch["labels"].shape[1] for batch in batches)
    fill = {"input_ids": 0, "labels": -100, "document_ids": 0}
    return {
        name: torch.stack(
            [
                torch.nn.functional.pad(b[name], (0, width - b[name].shape[1]), value=fill[name])
                for b in batches
            ]
        )
        for name in names
    }
