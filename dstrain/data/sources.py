"""Read rows from local files and Hub datasets, with the place of every fault.

A row is a dict of columns. Local files: jsonl, json, csv, parquet, txt, each also as .gz or .zst. A txt
file is one document, one over 16 MiB several, cut at line ends; a json file is a list of objects,
{"data": [...]}, one object, or one object a line. Memory is bounded, but for json and compressed parquet
files, which are read whole.
"""

import csv
import glob
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from dstrain.errors import UserError, nearest

FORMATS = (".jsonl", ".json", ".csv", ".parquet", ".txt")
COMPRESSIONS = (".gz", ".zst")

Row = dict[str, Any]
Batch = tuple[int, str, list[tuple[int, Row]]]  # file's number, its name, rows with their places in it

_TXT_BYTES = 16 << 20

_BATCH_CHARACTERS = 1_000_000
_BATCH_ROWS = 2_000


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
        found = (file for file in local.rglob("*") if file.is_file() and kind(file))
        # Not hidden ones, such as .ipynb_checkpoints, which a glob does not match either.
        files = sorted(file for file in found if not any(p[0] == "." for p in file.relative_to(local).parts))
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
        matches = [Path(name) for name in glob.glob(path, recursive=True) if Path(name).is_file()]
        files = sorted(file for file in matches if kind(file))
        if not files:
            others = f"; {len(matches)} others do, such as {min(matches).name}" if matches else ""
            raise UserError(f"{path}: no {', '.join(FORMATS)} file matches{others}")
        return files
    if local.is_absolute():
        siblings = [file.name for file in local.parent.iterdir()] if local.parent.is_dir() else []
        raise UserError(f"{path}: no such file or folder{nearest(local.name, siblings)}")
    return None


def fingerprint(file: Path, memo: dict[str, str]) -> str:
    """Return a hash of a file's content. `memo` saves reading it again while size and time stay the same."""
    try:
        stat = file.stat()
        key = f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
        if key not in memo:
            digest = xxhash.xxh3_128()
            with file.open("rb") as stream:
                while block := stream.read(1 << 22):
                    digest.update(block)
            memo[key] = digest.hexdigest()
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
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
            yield from _txt(file)
    except OSError as error:
        raise UserError(f"{file}: cannot be read to its end: {error}") from None


def file_batches(files: Sequence[Path]) -> Iterator[Batch]:
    """Yield the rows of files in batches of about a million characters, the unit of work of a process."""
    for number, file in enumerate(files):
        for batch in _batches(read_rows(file)):
            yield number, str(file), batch


def hub_batches(dataset: Any, name: str) -> Iterator[Batch]:
    """Yield the rows of a Hub dataset in such batches."""
    for batch in _batches(enumerate(dataset, start=1)):
        yield 0, name, batch


def _batches(rows: Iterable[tuple[int, Row]]) -> Iterator[list[tuple[int, Row]]]:
    batch: list[tuple[int, Row]] = []
    characters = 0
    for number, row in rows:
        batch.append((number, row))
        characters += _characters(row)
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_ROWS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_characters, items))


def hub_dataset(path: str, subset: str | None, split: str) -> Any:
    """Return the `datasets.Dataset` of a Hub name. Raises UserError if it cannot be had."""
    import datasets

    try:
        return datasets.load_dataset(path, subset, split=split)
    except Exception as error:  # the library raises a dozen kinds, network errors among them
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(f"{path}: no such file, and not loadable as a Hub dataset: {reason}") from None


def _open(file: Path) -> io.BufferedReader:
    """Open a file, decompressed. Faults in the compression, a missing end too, are OSErrors of `read`."""
    import pyarrow

    compression = {".gz": "gzip", ".zst": "zstd"}.get(file.suffix.lower())
    return io.BufferedReader(pyarrow.input_stream(str(file), compression=compression), 1 << 20)


def _read(file: Path) -> bytes:
    with _open(file) as stream:
        return stream.read()


def _decode(data: bytes, file: Path, line: int) -> str:
    """Decode the lines of `file` from `line` on."""
    try:
        return data.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        before = error.object[: error.start]
        where, column = line + before.count(b"\n"), len(before) - before.rfind(b"\n")
        raise UserError(
            f"{file}:{where}: not UTF-8: byte {error.object[error.start]:#04x} is the line's byte {column}"
        ) from None


def _txt(file: Path) -> Iterator[tuple[int, Row]]:
    line = 1
    with _open(file) as stream:
        while data := stream.read(_TXT_BYTES):
            data += stream.readline()
            yield line, {"text": _decode(data, file, line)}
            line += data.count(b"\n")


def _json_lines(file: Path) -> Iterator[tuple[int, Row]]:
    with _open(file) as stream:
        for number, line in enumerate(stream, start=1):
            text = _decode(line, file, number).strip()
            if not text:
                continue
            try:
                row = json.loads(text)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{file}:{number}: not valid JSON: {error.msg} (column {error.colno})"
                ) from None
            yield number, _object(row, f"{file}:{number}")


def _json(file: Path) -> Iterator[tuple[int, Row]]:
    text = _decode(_read(file), file, 1)
    if not text.strip():
        return
    try:
        body = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # one object a line, under the name .json
            yield from _json_lines(file)
            return
        raise UserError(
            f"{file}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno})"
        ) from None
    if isinstance(body, dict) and isinstance(body.get("data"), list):  # as SQuAD and others have it
        body = body["data"]
    if not isinstance(body, list):
        body = [body]
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
        reader = csv.DictReader(lines, strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():  # too many values, or too few
                    columns = len(reader.fieldnames or ())
                    raise UserError(f"{file}:{reader.line_num}: the row has not {columns} columns")
                yield reader.line_num, row
        except csv.Error as error:
            raise UserError(f"{file}:{reader.reader.line_num}: not valid CSV: {error}") from None


def _parquet(file: Path) -> Iterator[tuple[int, Row]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        if file.suffix.lower() == ".parquet":
            table = pyarrow.parquet.ParquetFile(file)
        else:
            table = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(_read(file)))
        for batch in table.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except pyarrow.ArrowException as error:
        raise UserError(f"{file}: not valid parquet: {' '.join(str(error).split())}") from None
