"""Fixtures that several test files share."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from dstrain.data.encode import Encoding
from dstrain.data.prepare import SourceSpec, Tokens, prepare

QUICKSTART = Path(__file__).parent.parent / "recipes" / "quickstart"


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The byte-level BPE of the quickstart recipe. Not to be changed: build another one from its folder."""
    return AutoTokenizer.from_pretrained(QUICKSTART / "tokenizer")


@pytest.fixture
def tokens_of(tokenizer, tmp_path) -> Callable[..., Tokens]:
    """Write rows to a jsonl file and prepare them: `tokens_of(rows, "messages", ("messages",))`."""

    def tokens_of(rows, format="text", columns=("text",), tokenizer=tokenizer, weight=1.0) -> Tokens:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        spec = SourceSpec(str(file), None, "train", Encoding(format, columns, "skip"), weight)
        return prepare([spec], tokenizer, str(tmp_path / "cache"), 1, False)[0]

    return tokens_of


@pytest.fixture(scope="session")
def process_group() -> Iterator[None]:
    """One process as all ranks, as train.py starts it without a launcher."""
    from dstrain import distributed, ops

    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            patch.setenv(name, "0")
            patch.delenv(name)
        distributed.prepare()
        ops.ready(ops.COLLECTIVES)
        distributed.start(distributed.World(0, 1, 0, 1))
        yield
