"""Read rows from local files and Hub datasets, in bounded memory, with the place of every fault.

A row is a dict of columns. Local files: jsonl, json, csv, parquet, txt, each also as .gz or .zst. A txt
file is one document.
"""

import csv
import glob
import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from dstrain.errors import UserError, nearest

FORMATS = (".jsonl", ".json", ".csv", ".parquet", ".txt")
COMPRESSIONS = (".gz", ".zst")

Row = dict[str, Any]


def kind(file: Path) -> str:
    """Return the format's ending, such as `.jsonl` of `a.jsonl.gz`, or an empty string."""
    suffixes = [suffix.lower() for suffix in file.suffixes[-2:]]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS else ""


def find_files(path: str) -> list[Path] | None:
    """Return the files of a path, glob or folder in a stable order, or None if `path` names a Hub dataset.

    Raises UserError if the path is local and holds no readable file.
    """
    local = Path(path)
    if local.is_dir():
        files = sorted(file for file in local.rglob("*") if file.is_file() and kind(file))
        if not files:
            raise UserError(f"{path}: the folder holds no {', '.join(FORMATS)} file")
        return files
    if local.is_file():
        if not kind(local):
            raise UserError(
                f"{path}: unknown file format; known are {', '.join(FORMATS)}, also as .gz or .zst"
            )
        return [local]
    if glob.has_magic(path):
        files = sorted(Path(name) for name in glob.glob(path, recursive=True) if kind(Path(name)))
        if not files:
            raise UserError(f"{path}: no file matches")
        return files
    if local.is_absolute():
        siblings = [file.name for file in local.parent.iterdir()] if local.parent.is_dir() else []
        raise UserError(f"{path}: no such file or folder{nearest(local.name, siblings)}")
    return None


def fingerprint(file: Path, memo: dict[str, str]) -> str:
    """Return a hash of a file's content. `memo` saves reading it again while size and time stay the same."""
    stat = file.stat()
    key = f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    if key not in memo:
        digest = xxhash.xxh3_128()
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
        memo[key] = digest.hexdigest()
    return memo[key]


def read_rows(file: Path) -> Iterator[tuple[int, Row]]:
    """Yield (line or row number from 1, row) of one local file.

    Raises UserError that names file and line for anything that cannot be read.
    """
    ending = kind(file)
    try:
        if ending == ".parquet":
            yield from _parquet(file)
        elif ending == ".jsonl":
            yield from _json_lines(file)
        elif ending == ".json":
            yield from _json(file)
        elif ending == ".csv":
            yield from _csv(file)
        else:
            yield 1, {"text": _decode(_open(file).read(), file, 1)}
    except (EOFError, gzip.BadGzipFile, OSError) as error:
        raise UserError(f"{file}: cannot be read to its end: {error}") from None


def hub_dataset(path: str, subset: str | None, split: str) -> Any:
    """Return the `datasets.Dataset` of a Hub name. Raises UserError if it cannot be had."""
    import datasets

    try:
        return datasets.load_dataset(path, subset, split=split)
    except Exception as error:  # the library raises a dozen kinds, network errors among them
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"{path}: no such file, and not loadable as a Hub dataset: {reason}") from None


def _open(file: Path) -> io.BufferedIOBase:
    ending = file.suffix.lower()
    if ending == ".gz":
        return gzip.open(file, "rb")  # type: ignore[return-value]
    if ending == ".zst":
        import zstandard

        return _Zstd(
            zstandard.ZstdDecompressor().stream_reader(file.open("rb"), read_across_frames=True), file
        )
    return file.open("rb")


class _Zstd(io.BufferedReader):
    """A zstandard stream whose faults are OSErrors, as those of other files are."""

    def __init__(self, stream: Any, file: Path) -> None:
        super().__init__(_ZstdRaw(stream, file.stat().st_size), buffer_size=1 << 20)


class _ZstdRaw(io.RawIOBase):
    def __init__(self, stream: Any, size: int) -> None:
        self.stream, self.size = stream, size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        import zstandard

        try:
            return self.stream.readinto(buffer)
        except zstandard.ZstdError as error:
            raise OSError(str(error)) from None


def _decode(data: bytes, file: Path, line: int) -> str:
    try:
        return data.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        where = line + data[: error.start].count(b"\n")
        raise UserError(
            f"{file}:{where}: not UTF-8 (byte {data[error.start]:#04x} at offset {error.start})"
        ) from None


def _json_lines(file: Path) -> Iterator[tuple[int, Row]]:
    with _open(file) as stream:
        for number, line in enumerate(stream, start=1):
            text = _decode(line, file, number)
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{file}:{number}: not valid JSON: {error.msg} (column {error.colno})"
                ) from None
            yield number, _object(row, f"{file}:{number}")


def _json(file: Path) -> Iterator[tuple[int, Row]]:
    text = _decode(_open(file).read(), file, 1)
    try:
        body = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # one object a line, under the name .json
            yield from _json_lines(file)
            return
        raise UserError(
            f"{file}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno})"
        ) from None
    if isinstance(body, dict):
        lists = [value for value in body.values() if isinstance(value, list)]
        body = lists[0] if len(lists) == 1 else [body]  # {"data": [...]}, as SQuAD and others have it
    for number, row in enumerate(body, start=1):
        yield number, _object(row, f"{file}, item {number}")


def _object(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row is a JSON object, not {type(row).__name__}")
    return row


def _csv(file: Path) -> Iterator[tuple[int, Row]]:
    csv.field_size_limit(1 << 30)
    with _open(file) as stream:
        lines = (_decode(line, file, number) for number, line in enumerate(stream, start=1))
        reader = csv.DictReader(lines, restkey="", strict=True)
        try:
            for row in reader:
                if row.pop("", None) is not None or None in row.values():
                    raise UserError(
                        f"{file}:{reader.line_num}: {len(reader.fieldnames or ())} columns expected"
                    )
                yield reader.line_num, row
        except csv.Error as error:
            raise UserError(f"{file}:{reader.line_num}: not valid CSV: {error}") from None


def _parquet(file: Path) -> Iterator[tuple[int, Row]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        if file.suffix.lower() == ".parquet":
            table = pyarrow.parquet.ParquetFile(file)
        else:
            table = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(_open(file).read()))
        for batch in table.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except pyarrow.ArrowException as error:
        raise UserError(f"{file}: not valid parquet: {error}") from None
