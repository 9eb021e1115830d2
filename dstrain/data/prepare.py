"""Tokenize each source once per machine, before any process group, into a cache that all ranks map.

A cache entry is a folder named by a hash of the files' content, the tokenizer and the settings:

    tokens.bin   every document's token ids, one after the other (uint16 or uint32)
    in_loss.bin  one bit a token, where not every token is in the loss
    ends.npy     where each document ends in the stream (int64)
    first.npy    the first token of each document that is in the loss, -1 for none (int64)
    places.npy   file number << 40 | line of each document, to name it in an error
    meta.json    counts and file names; the folder gets its name when all of it is written
"""

import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from filelock import FileLock
from tqdm import tqdm

from dstrain.data import sources
from dstrain.data.encode import Encoded, Encoder, Encoding, token_dtype
from dstrain.errors import UserError

_VERSION = 1  # of the cache's layout and of how rows become tokens
_BATCH_CHARACTERS = 1_000_000
_BATCH_ROWS = 2_000
_PLACE_BITS = 40

_encoder: Encoder | None = None  # of a worker process


@dataclass(frozen=True)
class SourceSpec:
    """A source with the values that decide its tokens. `columns` in the order the format reads them."""

    path: str
    subset: str | None
    split: str
    encoding: Encoding
    weight: float = 1.0


@dataclass(frozen=True)
class Tokens:
    """A tokenized source, mapped from its cache entry."""

    name: str
    weight: float
    stream: np.ndarray  # (tokens,) unsigned
    in_loss: np.ndarray | None  # (tokens / 8,) packed bits, little end first; None where all are
    ends: np.ndarray  # (documents,) int64
    first: np.ndarray  # (documents,) int64, the first token in the loss from a document's start, or -1
    places: np.ndarray  # (documents,) int64
    files: tuple[str, ...]
    empty: int
    folder: Path
    whole: bool  # a document is one example, not to be split

    def place(self, document: int) -> str:
        """Return `file:line` of a document."""
        place = int(self.places[document])
        return f"{self.files[place >> _PLACE_BITS]}:{place & ((1 << _PLACE_BITS) - 1)}"


def prepare(
    specs: Sequence[SourceSpec], tokenizer: Any, cache_dir: str | None, workers: int | None, progress: bool
) -> list[Tokens]:
    """Return the tokens of each source, tokenizing those that no cache entry holds.

    Safe in any number of processes at once: one does the work, the others wait for it.
    Raises UserError for data that cannot be read.
    """
    root = Path(cache_dir or os.environ.get("DSTRAIN_CACHE") or Path.home() / ".cache" / "dstrain")
    _check_tokenizer(specs, tokenizer)
    root.mkdir(parents=True, exist_ok=True)
    return [_prepare_one(spec, tokenizer, root, workers, progress) for spec in specs]


def _check_tokenizer(specs: Sequence[SourceSpec], tokenizer: Any) -> None:
    name = tokenizer.name_or_path
    if tokenizer.eos_token_id is None:
        raise UserError(f"{name}: the tokenizer has no eos_token to end a document with")
    if any(spec.encoding.format == "messages" for spec in specs) and not tokenizer.chat_template:
        raise UserError(f"{name}: the tokenizer has no chat template; name one in model.chat_template")


def _prepare_one(spec: SourceSpec, tokenizer: Any, root: Path, workers: int | None, progress: bool) -> Tokens:
    files = sources.find_files(spec.path)
    hub = sources.hub_dataset(spec.path, spec.subset, spec.split) if files is None else None
    content = [hub._fingerprint] if files is None else _fingerprints(files, root)
    folder = root / f"tokens-{_key(content, spec.encoding, tokenizer)}"
    if not (folder / "meta.json").exists():
        with FileLock(f"{folder}.lock"):
            if not (folder / "meta.json").exists():
                rows = _hub_rows(hub, spec.path) if files is None else _file_rows(files)
                names = [spec.path] if files is None else [str(file) for file in files]
                _write(folder, rows, names, spec, tokenizer, workers or os.cpu_count() or 1, progress)
    return _load(folder, spec, token_dtype(len(tokenizer)))


def _fingerprints(files: Sequence[Path], root: Path) -> list[str]:
    memo_file = root / "fingerprints.json"
    with FileLock(f"{memo_file}.lock"):
        memo = json.loads(memo_file.read_text()) if memo_file.exists() else {}
        known = len(memo)
        prints = [sources.fingerprint(file, memo) for file in files]
        if len(memo) > known:
            _replace(memo_file, json.dumps(memo))
    return prints


def _replace(file: Path, text: str) -> None:
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)


def _key(content: Sequence[str], encoding: Encoding, tokenizer: Any) -> str:
    template = tokenizer.chat_template if encoding.format == "messages" else None
    settings = [
        _VERSION,
        list(content),
        encoding.format,
        list(encoding.columns),
        encoding.empty_rows,
        tokenizer.backend_tokenizer.to_str(),
        [tokenizer.bos_token, tokenizer.eos_token],
        template,
    ]
    return xxhash.xxh3_128_hexdigest(json.dumps(settings, sort_keys=True).encode())


def _file_rows(files: Sequence[Path]) -> Iterator[tuple[int, str, list[tuple[int, sources.Row]]]]:
    for number, file in enumerate(files):
        for batch in _batches(sources.read_rows(file)):
            yield number, str(file), batch


def _hub_rows(dataset: Any, name: str) -> Iterator[tuple[int, str, list[tuple[int, sources.Row]]]]:
    for batch in _batches(enumerate(dataset, start=1)):
        yield 0, name, batch


def _batches(rows: Iterable[tuple[int, sources.Row]]) -> Iterator[list[tuple[int, sources.Row]]]:
    """Group rows into batches of about a million characters, the unit of work of a process."""
    batch: list[tuple[int, sources.Row]] = []
    characters = 0
    for number, row in rows:
        batch.append((number, row))
        characters += sum(len(value) if isinstance(value, str) else 500 for value in row.values())
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_ROWS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _start_worker(tokenizer: Any, encoding: Encoding) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _encoder = Encoder(tokenizer, encoding)


def _work(number: int, file: str, rows: list[tuple[int, sources.Row]]) -> tuple[int, Encoded]:
    assert _encoder is not None
    return number, _encoder.encode(file, rows)


def _encoded(
    rows: Iterator[tuple[int, str, list[tuple[int, sources.Row]]]],
    spec: SourceSpec,
    tokenizer: Any,
    workers: int,
) -> Iterator[tuple[int, Encoded]]:
    """Encode batches in order. No more than a few batches are in memory at once."""
    first = next(rows, None)
    second = next(rows, None)
    if first is None:
        return
    if second is None or workers == 1:  # not worth a process
        encoder = Encoder(tokenizer, spec.encoding)
        for number, file, batch in chain([first], [second] if second else [], rows):
            yield number, encoder.encode(file, batch)
        return
    with ProcessPoolExecutor(workers, get_context("fork"), _start_worker, (tokenizer, spec.encoding)) as pool:
        waiting: deque[Future[tuple[int, Encoded]]] = deque(
            [pool.submit(_work, *first), pool.submit(_work, *second)]
        )
        try:
            for batch in rows:
                waiting.append(pool.submit(_work, *batch))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _write(
    folder: Path,
    rows: Iterator[tuple[int, str, list[tuple[int, sources.Row]]]],
    names: Sequence[str],
    spec: SourceSpec,
    tokenizer: Any,
    workers: int,
    progress: bool,
) -> None:
    temporary = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    lengths, places, first, empty, tokens = [], [], [], 0, 0
    with ExitStack() as stack:
        stream = stack.enter_context((temporary / "tokens.bin").open("wb"))
        bits = _BitWriter(stack.enter_context((temporary / "in_loss.bin").open("wb")))
        label = f"tokenizing {Path(spec.path).name}"
        bar = stack.enter_context(
            tqdm(
                desc=label,
                unit=" tokens",
                unit_scale=True,
                disable=None if progress else True,
                leave=False,
                mininterval=1,
            )
        )
        for number, encoded in _encoded(rows, spec, tokenizer, workers):
            stream.write(encoded.ids.tobytes())
            if encoded.in_loss is not None:
                bits.write(encoded.in_loss)
            lengths.append(encoded.lengths)
            first.append(_first_in_loss(encoded))
            places.append(encoded.places | (number << _PLACE_BITS))
            empty += encoded.empty
            tokens += len(encoded.ids)
            bar.update(len(encoded.ids))
        bits.close()
    if not tokens:
        raise UserError(f"{spec.path}: empty data set: no row gives a token ({empty} empty rows)")
    if spec.encoding.format == "text":
        (temporary / "in_loss.bin").unlink()
    np.save(temporary / "ends.npy", np.cumsum(np.concatenate(lengths)))
    np.save(temporary / "first.npy", np.concatenate(first))
    np.save(temporary / "places.npy", np.concatenate(places))
    meta = {"files": list(names), "empty": empty, "tokens": tokens}
    (temporary / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    temporary.replace(folder)


def _first_in_loss(encoded: Encoded) -> np.ndarray:
    """Return for each document its first token, after the one at its start, that is in the loss."""
    if encoded.in_loss is None:
        return np.where(encoded.lengths > 1, 1, -1)
    starts = np.cumsum(encoded.lengths) - encoded.lengths
    in_loss = encoded.in_loss.copy()
    in_loss[starts] = False  # nothing comes before it to predict it from
    hits = np.append(np.flatnonzero(in_loss), len(in_loss))
    following = hits[np.searchsorted(hits, starts)]
    return np.where(following < starts + encoded.lengths, following - starts, -1)


class _BitWriter:
    """Append booleans to a file, eight a byte."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.rest = np.zeros(0, dtype=bool)

    def write(self, bits: np.ndarray) -> None:
        bits = np.concatenate([self.rest, bits])
        whole = len(bits) // 8 * 8
        self.stream.write(np.packbits(bits[:whole], bitorder="little").tobytes())
        self.rest = bits[whole:]

    def close(self) -> None:
        self.stream.write(np.packbits(self.rest, bitorder="little").tobytes())


def _load(folder: Path, spec: SourceSpec, dtype: type[np.unsignedinteger]) -> Tokens:
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    masked = folder / "in_loss.bin"
    map_file: Callable[..., np.ndarray] = np.memmap
    return Tokens(
        name=spec.path,
        weight=spec.weight,
        stream=map_file(folder / "tokens.bin", dtype=dtype, mode="r"),
        in_loss=map_file(masked, dtype=np.uint8, mode="r") if masked.exists() else None,
        ends=np.load(folder / "ends.npy", mmap_mode="r"),
        first=np.load(folder / "first.npy", mmap_mode="r"),
        places=np.load(folder / "places.npy", mmap_mode="r"),
        files=tuple(meta["files"]),
        empty=meta["empty"],
        folder=folder,
        whole=spec.encoding.format != "text",
    )
