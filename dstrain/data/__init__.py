"""Sources -> tokens -> packs -> micro batches. Knows nothing of the engine."""

from collections.abc import Mapping, Sequence
from typing import Any

from dstrain.data.encode import Encoding
from dstrain.data.loader import Loader, eval_batches
from dstrain.data.pack import Sequences, sequences
from dstrain.data.prepare import SourceSpec, prepare

__all__ = ["Loader", "Sequences", "build", "describe", "eval_batches"]

COLUMNS = {
    "text": ("text_column",),
    "messages": ("messages_column",),
    "prompt_completion": ("prompt_column", "completion_column"),
}


def build(
    sources: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    max_seq_length: int,
    packing: bool,
    long_examples: str,
    empty_rows: str,
    cache_dir: str | None,
    preprocessing_num_workers: int | None,
    progress: bool,
) -> list[Sequences]:
    """Tokenize the sources, or find them in the cache, and arrange their documents into sequences.

    sources: the fields of `config.Source`. Raises UserError for data that cannot be used.
    """
    specs = [
        SourceSpec(
            path=source["path"],
            subset=source["subset"],
            split=source["split"],
            encoding=Encoding(
                source["format"], tuple(source[name] for name in COLUMNS[source["format"]]), empty_rows
            ),
            weight=source["weight"],
        )
        for source in sources
    ]
    tokens = prepare(specs, tokenizer, cache_dir, preprocessing_num_workers, progress)
    return [sequences(one, max_seq_length, packing, long_examples) for one in tokens]


def describe(arranged: Sequence[Sequences]) -> str:
    """Return one line on what the sources hold and what was left out."""
    documents = sum(len(one.tokens.ends) for one in arranged)
    tokens = sum(int(one.tokens.ends[-1]) for one in arranged)
    line = f"{documents:,} documents, {tokens:,} tokens -> {sum(map(len, arranged)):,} sequences"
    counts = {
        "empty rows skipped": sum(one.tokens.empty for one in arranged),
        "over the length": sum(one.too_long for one in arranged),
        "without a token in the loss": sum(one.without_loss for one in arranged),
    }
    return "; ".join([line, *(f"{count:,} {name}" for name, count in counts.items() if count)])
