"""Data as this repository prepares it: tokenized into a token cache and arranged into packed sequences.

python benchmarks/dstrain_data.py FILE.jsonl TOKENIZER CACHE_DIR OUTPUT.json
"""

import argparse
import json
import sys
import time
from pathlib import Path

from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dstrain import data
from dstrain.recipe import Source


def main() -> None:
    """Prepare with two processes, and write how long it took and how many tokens it gave."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("file", "tokenizer", "cache_dir", "output"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args()
    started = time.perf_counter()
    arranged = data.build(
        [Source(path=str(args.file)).model_dump()],
        AutoTokenizer.from_pretrained(args.tokenizer),
        max_seq_length=256,
        packing=True,
        long_examples="drop",
        empty_rows="skip",
        cache_dir=str(args.cache_dir),
        preprocessing_num_workers=2,
        progress=False,
    )
    body = {"seconds": time.perf_counter() - started, "tokens": int(arranged[0].tokens.ends[-1])}
    args.output.write_text(json.dumps(body), encoding="utf-8")


if __name__ == "__main__":
    main()
