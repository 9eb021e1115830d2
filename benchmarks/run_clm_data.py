"""Data as Transformers' `run_clm.py` prepares it: load_dataset, map(tokenize), map(group_texts).

python benchmarks/run_clm_data.py FILE.jsonl TOKENIZER CACHE_DIR OUTPUT.json
"""

import argparse
import json
import time
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
from transformers import AutoTokenizer

BLOCK_TOKENS = 256


def blocks(file: Path, tokenizer_dir: Path, cache_dir: Path, workers: int) -> datasets.Dataset:
    """Return blocks of 256 tokens: documents concatenated, not isolated, the rest of each batch dropped."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    raw = datasets.load_dataset("json", data_files=str(file), cache_dir=str(cache_dir), split="train")

    def tokenize(examples: dict[str, list[str]]) -> Any:
        return tokenizer(examples["text"])

    def group_texts(examples: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {name: list(chain(*values)) for name, values in examples.items()}
        total = len(next(iter(joined.values()))) // BLOCK_TOKENS * BLOCK_TOKENS
        result = {
            name: [values[start : start + BLOCK_TOKENS] for start in range(0, total, BLOCK_TOKENS)]
            for name, values in joined.items()
        }
        result["labels"] = result["input_ids"].copy()
        return result

    tokens = raw.map(tokenize, batched=True, num_proc=workers, remove_columns=raw.column_names)
    return tokens.map(group_texts, batched=True, num_proc=workers)


def main() -> None:
    """Prepare with two processes, and write how long it took and how many tokens it gave."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("file", "tokenizer", "cache_dir", "output"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args()
    started = time.perf_counter()
    result = blocks(args.file, args.tokenizer, args.cache_dir, workers=2)
    body = {"seconds": time.perf_counter() - started, "tokens": len(result) * BLOCK_TOKENS}
    args.output.write_text(json.dumps(body), encoding="utf-8")


if __name__ == "__main__":
    main()
