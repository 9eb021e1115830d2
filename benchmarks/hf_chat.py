"""The chat data under Hugging Face's Trainer or TRL's SFTTrainer. Started by `chat.py`.

    deepspeed benchmarks/hf_chat.py --mode padded --settings FILE.json --output FILE.json

Modes: `padded` pads each micro batch to its longest row, `grouped` draws rows of like length together as
well, `trl` is SFTTrainer's packing. The loss is on the assistant's text and the end of its turn.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from hf_timing import Stopwatch, timed
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
)

# The tokenizer's own template, with the markers that assistant-only loss needs in these libraries.
TEMPLATE = """{% for message in messages %}\
{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n\
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}\
{{ '<|im_start|>' + message['role'] + '\n' }}\
{% if message['role'] == 'assistant' %}\
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}\
{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}\
{{ '\n' }}{% endfor %}"""


def main() -> None:
    """Train a few steps and write their times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=["padded", "grouped", "trl"], required=True)
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--local_rank", type=int)
    args = parser.parse_args()
    settings = json.loads(args.settings.read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(settings["tokenizer"])
    tokenizer.chat_template = TEMPLATE
    chats = load_dataset("json", data_files=settings["data"], cache_dir=settings["cache_dir"], split="train")
    options: dict[str, Any] = {
        "output_dir": str(args.output.with_suffix("")),
        "deepspeed": settings["deepspeed"],
        "bf16": settings["bf16"],
        "learning_rate": 1e-4,
        "max_grad_norm": 1.0,
        "max_steps": settings["steps"],
        "use_cpu": not torch.cuda.is_available(),
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    stopwatch = Stopwatch()
    if args.mode == "trl":
        from trl import SFTConfig, SFTTrainer

        trainer = timed(SFTTrainer, stopwatch)(
            model=AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings["model"])),
            args=SFTConfig(
                **options,
                per_device_train_batch_size=settings["packed_rows"],
                max_length=settings["max_seq_length"],
                packing=True,
                assistant_only_loss=True,
                gradient_checkpointing=False,  # as the others have it
            ),
            processing_class=tokenizer,
            train_dataset=chats,
            callbacks=[stopwatch],
        )
    else:

        def encode(row: dict[str, Any]) -> dict[str, list[int]]:
            encoded = tokenizer.apply_chat_template(
                row["messages"], return_dict=True, return_assistant_tokens_mask=True
            )
            pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
            return {
                "input_ids": encoded["input_ids"],
                "labels": [token if inside else -100 for token, inside in pairs],
            }

        rows = chats.map(encode, remove_columns=chats.column_names)
        trainer = timed(Trainer, stopwatch)(
            model=AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings["model"])),
            args=TrainingArguments(
                **options,
                per_device_train_batch_size=settings["padded_rows"],
                gradient_accumulation_steps=settings["padded_gas"],
                train_sampling_strategy="group_by_length" if args.mode == "grouped" else "random",
            ),
            train_dataset=rows.filter(lambda row: len(row["input_ids"]) <= settings["max_seq_length"]),
            data_collator=DataCollatorForSeq2Seq(tokenizer),
            callbacks=[stopwatch],
        )
    trainer.train()
    stopwatch.write(args.output)


if __name__ == "__main__":
    main()
