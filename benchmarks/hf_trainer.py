"""The quickstart under Hugging Face's Trainer, as its users write it. Started by `step_time.py`.

    deepspeed benchmarks/hf_trainer.py --deepspeed ds_configs/zero1_fp32.json --output FILE.json

The same model, DeepSpeed JSON, micro batch and text as our quickstart. Blocks are made as `run_clm.py` makes
them, so neighbouring documents see each other, and the model computes the loss from `labels=`.
"""

import argparse
import json
from pathlib import Path

import torch
import torch._dynamo  # zero.Init breaks a first import inside it
import yaml
from hf_timing import Stopwatch, timed
from run_clm_data import blocks
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "quickstart"


def main() -> None:
    """Train a few steps and write their times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deepspeed", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--cache_dir", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--local_rank", type=int)
    args = parser.parse_args()
    recipe = yaml.safe_load((RECIPE / "recipe.yaml").read_text(encoding="utf-8"))
    arguments = TrainingArguments(
        output_dir=str(args.output.with_suffix("")),
        deepspeed=str(args.deepspeed),
        bf16=json.loads(args.deepspeed.read_text(encoding="utf-8"))["bf16"]["enabled"],
        per_device_train_batch_size=recipe["train"]["train_micro_batch_size_per_gpu"],
        learning_rate=float(recipe["train"]["learning_rate"]),
        weight_decay=recipe["train"]["weight_decay"],
        adam_beta2=recipe["train"]["adam_beta2"],
        max_grad_norm=1.0,
        max_steps=args.steps,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    stopwatch = Stopwatch()
    trainer = timed(Trainer, stopwatch)(
        model=AutoModelForCausalLM.from_config(AutoConfig.for_model(**recipe["model"]["config"])),
        args=arguments,
        train_dataset=blocks(
            RECIPE / recipe["data"]["train"], RECIPE / "tokenizer", args.cache_dir, workers=1
        ),
        data_collator=default_data_collator,
        callbacks=[stopwatch],
    )
    trainer.train()
    stopwatch.write(args.output)


if __name__ == "__main__":
    main()
