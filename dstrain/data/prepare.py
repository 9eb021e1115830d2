"""Tokenize each source once per machine, before any process group, into a cache that all ranks map.

A cache entry is a folder named by a hash of the files' content, the tokenizer and the settings:

    tokens.bin   every document's token ids, one after the other (uint16 or uint32)
    in_loss.bin  one bit a token, where not every token is in the loss
    ends.npy     where each document ends in the stream (int64)
    first.npy    the first token of each document that is in the loss, -1 for none (int64)
    places.npy   file number << 40 | line of each document, to name it in an error
    meta.json    counts; the folder gets its name when all of it is written
"""

import json
import os
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
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

_VERSION = 2  # of the cache's layout and of how rows become tokens
_PLACE_BITS = 40

_encoder: Encoder | None = None  # of a worker process


@dataclass(frozen=True)
class SourceSpec:
    """A source with the values that decide its tokens."""

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
    try:
        root.mkdir(parents=True, exist_ok=True)
        return [_prepare_one(spec, tokenizer, root, workers, progress) for spec in specs]
    except OSError as error:
        raise UserError(f"{root}: the token cache (data.cache_dir) cannot be written: {error}") from None


def _check_tokenizer(specs: Sequence[SourceSpec], tokenizer: Any) -> None:
    name = tokenizer.name_or_path
    if tokenizer.eos_token_id is None:
        raise UserError(f"{name}: the tokenizer has no eos_token to end a document with")
    if any(spec.encoding.format == "messages" for spec in specs):
        try:
            tokenizer.get_chat_template()
        except ValueError:  # none, or several and none of them the default
            raise UserError(
                f"{name}: the tokenizer has no chat template; name one in model.chat_template"
            ) from None


def _prepare_one(spec: SourceSpec, tokenizer: Any, root: Path, workers: int | None, progress: bool) -> Tokens:
    files = sources.find_files(spec.path)
    hub = sources.hub_dataset(spec.path, spec.subset, spec.split) if files is None else None
    content = [hub._fingerprint] if files is None else _fingerprints(files, root)
    names = [spec.path] if files is None else [str(file) for file in files]
    folder = root / f"tokens-{_key(content, spec.encoding, tokenizer)}"
    if not folder.exists():
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                rows = sources.hub_batches(hub, spec.path) if files is None else sources.file_batches(files)
                workers = workers or len(os.sched_getaffinity(0))
                temporary = folder.with_name(f"{folder.name}.tmp")
                shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
                temporary.mkdir()
                try:
                    _write(temporary, rows, spec, tokenizer, workers, progress)
                    temporary.replace(folder)
                finally:
                    shutil.rmtree(temporary, ignore_errors=True)
    return _load(folder, spec, names, token_dtype(len(tokenizer)))


def _fingerprints(files: Sequence[Path], root: Path) -> list[str]:
    """Return the content of each file and how it is read; the same bytes may be .txt or .jsonl."""
    memo_file = root / "fingerprints.json"
    with FileLock(f"{memo_file}.lock"):
        memo = json.loads(memo_file.read_text()) if memo_file.exists() else {}
        known = len(memo)
        prints = [f"{sources.fingerprint(file, memo)}{sources.kind(file)}" for file in files]
        if len(memo) > known:
            _replace(memo_file, json.dumps(memo))
    return prints


def _replace(file: Path, text: str) -> None:
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)


def _key(content: Sequence[str], encoding: Encoding, tokenizer: Any) -> str:
    template = tokenizer.get_chat_template() if encoding.format == "messages" else None
    settings = [
        _VERSION,
        list(content),
        encoding.format,
        list(encoding.columns),
        encoding.empty_rows,
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.special_tokens_map,
        template,
    ]
    return xxhash.xxh3_128_hexdigest(json.dumps(settings, sort_keys=True).encode())


def _start_worker(encoder: Encoder) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _encoder = encoder


def _work(number: int, file: str, rows: list[tuple[int, sources.Row]]) -> tuple[int, Encoded]:
    assert _encoder is not None
    return number, _encoder.encode(file, rows)


def _encoded(
    rows: Iterator[sources.Batch],
    spec: SourceSpec,
    tokenizer: Any,
    workers: int,
) -> Iterator[tuple[int, Encoded]]:
    """Encode batches in order. No more than a few batches are in memory at once."""
    first = next(rows, None)
    second = next(rows, None)
    if first is None:
        return
    encoder = Encoder(tokenizer, spec.encoding)
    if second is None or workers == 1:  # not worth a process
        for number, file, batch in chain([first], [second] if second else [], rows):
            yield number, encoder.encode(file, batch)
        return
    # Forked processes share the encoder and need not import anything.
    with ProcessPoolExecutor(workers, get_context("fork"), _start_worker, (encoder,)) as pool:
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
        except BrokenProcessPool:
            raise UserError(
                f"{spec.path}: a tokenizing process was killed, perhaps for lack of memory; "
                f"lower data.preprocessing_num_workers (now {workers})"
            ) from None
        finally:
            for future in waiting:
                future.cancel()


def _write(
    folder: Path,
    rows: Iterator[sources.Batch],
    spec: SourceSpec,
    tokenizer: Any,
    workers: int,
    progress: bool,
) -> None:
    lengths, places, first, empty, tokens = [], [], [], 0, 0
    with ExitStack() as stack:
        stream = stack.enter_context((folder / "tokens.bin").open("wb"))
        bits = _BitWriter(stack.enter_context((folder / "in_loss.bin").open("wb")))
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
        (folder / "in_loss.bin").unlink()
    np.save(folder / "ends.npy", np.cumsum(np.concatenate(lengths)))
    np.save(folder / "first.npy", np.concatenate(first))
    np.save(folder / "places.npy", np.concatenate(places))
    (folder / "meta.json").write_text(json.dumps({"empty": empty, "tokens": tokens}), encoding="utf-8")


def _first_in_loss(encoded: Encoded) -> np.ndarray:
    """Return for each document its first token, after the one at its start, that is in the loss."""
    if encoded.in_loss is None:
        return np.where(encoded.lengths > 1, 1, -1)
    starts = np.cumsum(encoded.lengths) - encoded.lengths
    in_loss = encoded.in_loss.copy()
    in_loss[starts[encoded.lengths > 0]] = False  # nothing comes before it to predict it from
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


def _load(folder: Path, spec: SourceSpec, names: Sequence[str], dtype: type[np.unsignedinteger]) -> Tokens:
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    masked = folder / "in_loss.bin"
    return Tokens(
        name=spec.path,
        weight=spec.weight,
        stream=np.memmap(folder / "tokens.bin", dtype=dtype, mode="r"),
        in_loss=np.memmap(masked, dtype=np.uint8, mode="r") if masked.exists() else None,
        ends=np.load(folder / "ends.npy", mmap_mode="r"),
        first=np.load(folder / "first.npy", mmap_mode="r"),
        places=np.load(folder / "places.npy", mmap_mode="r"),
        files=tuple(names),
        empty=meta["empty"],
        folder=folder,
        whole=spec.encoding.format != "text",
    )
