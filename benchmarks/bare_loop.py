"""The quickstart in a bare PyTorch loop: forward, backward, clip, AdamW. Started by `step_time.py`.

    python benchmarks/bare_loop.py --precision fp32 --output FILE.json

bf16 is what DeepSpeed's bf16 is: bf16 weights and gradients, fp32 masters in AdamW.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import yaml
from run_clm_data import blocks
from transformers import AutoConfig, AutoModelForCausalLM

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "quickstart"


def main() -> None:
    """Train a few steps and write their times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", choices=["fp32", "bf16"], required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--cache_dir", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(42)
    recipe = yaml.safe_load((RECIPE / "recipe.yaml").read_text(encoding="utf-8"))
    micro = recipe["train"]["train_micro_batch_size_per_gpu"]
    data = blocks(RECIPE / recipe["data"]["train"], RECIPE / "tokenizer", args.cache_dir, workers=1)
    loader = torch.utils.data.DataLoader(data.with_format("torch"), batch_size=micro, shuffle=True)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**recipe["model"]["config"]))
    masters = list(model.parameters())
    if args.precision == "bf16":
        masters = [parameter.detach().clone() for parameter in model.parameters()]
        model.bfloat16()
    optimizer = torch.optim.AdamW(masters, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    step_s: list[float] = []
    started = time.perf_counter()
    for batch in loader:
        model(input_ids=batch["input_ids"], labels=batch["labels"], use_cache=False).loss.backward()
        if args.precision == "bf16":
            for master, weight in zip(masters, model.parameters(), strict=True):
                master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if args.precision == "bf16":
            with torch.no_grad():
                for master, weight in zip(masters, model.parameters(), strict=True):
                    weight.copy_(master)
        now = time.perf_counter()
        step_s.append(now - started)
        started = now
        if len(step_s) == args.steps:
            break
    valid = [micro * (batch["labels"].shape[1] - 1)] * len(step_s)
    args.output.write_text(json.dumps({"step_s": step_s, "valid_tokens": valid}), encoding="utf-8")


if __name__ == "__main__":
    main()
