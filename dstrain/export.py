"""The trained model as a Hugging Face folder, and a sample of what it writes."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from dstrain.distributed import UMASK


def export(engine: Any, tokenizer: Any, folder: Path, writer: bool) -> None:
    """Write a Hugging Face folder (safetensors, config, tokenizer, chat template) from every ZeRO stage.

    All ranks call it; the one with `writer` writes. Partitioned weights are gathered one at a time.
    """
    import deepspeed

    engine.empty_partition_cache()  # of ZeRO 3: weights that a forward pass has fetched ahead
    model: PreTrainedModel = engine.module.model
    state: dict[str, torch.Tensor] = {}
    tied = set(model.all_tied_weights_keys) if getattr(model, "all_tied_weights_keys", None) else set()
    for name, parameter in model.named_parameters():
        if name in tied:
            continue
        partitioned = [parameter] if hasattr(parameter, "ds_id") else []
        with deepspeed.zero.GatheredParameters(partitioned):
            if writer:
                state[name] = parameter.detach().to("cpu", copy=True)
    if writer:
        saved = model.state_dict().keys()  # buffers that are made anew on loading are not in it
        state |= {name: buffer.detach().cpu() for name, buffer in model.named_buffers() if name in saved}
        temporary = folder.with_name(f"{folder.name}.tmp")
        model.save_pretrained(temporary, state_dict=state, safe_serialization=True)
        finish_folder(temporary, tokenizer)
        os.replace(temporary, folder) if not folder.exists() else _swap(temporary, folder)


def finish_folder(folder: Path, tokenizer: Any) -> None:
    """Add the tokenizer to a folder of weights and config, and make it fit for use."""
    tokenizer.save_pretrained(folder)
    _keep_use_cache(folder / "config.json")
    for file in folder.iterdir():
        file.chmod(0o666 & ~UMASK)  # safetensors are written for the owner alone


def _keep_use_cache(file: Path) -> None:
    body = json.loads(file.read_text(encoding="utf-8"))
    body["use_cache"] = True  # generation wants it, whatever training set
    file.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def _swap(new: Path, old: Path) -> None:
    aside = old.with_name(f"{old.name}.old")
    shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed just here
    old.rename(aside)
    new.rename(old)
    shutil.rmtree(aside)


def sample(folder: Path, trust_remote_code: bool, prompt: str, new_tokens: int, seed: int) -> str:
    """Load an exported model as any user would, and return `prompt` with a sampled continuation."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(seed)
    ids = model.generate(
        **inputs,
        max_new_tokens=new_tokens,
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        pad_token_id=tokenizer.eos_token_id,
    )
    return tokenizer.decode(ids[0], skip_special_tokens=True)
