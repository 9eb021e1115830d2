"""Every kind of file, and what is said about one that cannot be read."""

import csv
import gzip
import io
import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from dstrain.data import sources
from dstrain.errors import UserError

ROWS = [{"text": "one", "n": 1}, {"text": "zwei\n\u00fc, \U0001f600", "n": 2}, {"text": "three", "n": 3}]
BOM = b"\xef\xbb\xbf"


def _csv(rows) -> bytes:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue().encode()


def _parquet(rows) -> bytes:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), stream)
    return stream.getvalue()


def _lines(rows) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


BODIES = {
    "jsonl": (".jsonl", _lines(ROWS)),
    "jsonl with BOM, blank lines and no last line end": (
        ".jsonl",
        BOM + _lines(ROWS).replace(b"\n", b"\r\n\n \n").rstrip(),
    ),
    "json array": (".json", json.dumps(ROWS, indent=1).encode()),
    "json with BOM": (".json", BOM + json.dumps(ROWS).encode()),
    "json data": (".json", json.dumps({"version": [1], "data": ROWS}).encode()),
    "json lines": (".json", BOM + _lines(ROWS)),
    "csv": (".csv", _csv(ROWS)),
    "csv with BOM": (".csv", BOM + _csv(ROWS)),
    "parquet": (".parquet", _parquet(ROWS)),
}
PACKERS = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": lambda data: pyarrow.Codec("zstd").compress(data, asbytes=True),
}


@pytest.mark.parametrize("compression", PACKERS)
@pytest.mark.parametrize("name", BODIES)
def test_rows_of_every_kind_of_file(tmp_path, name, compression):
    ending, body = BODIES[name]
    file = tmp_path / f"data{ending}{compression}"
    file.write_bytes(PACKERS[compression](body))
    (found,) = sources.find_files(str(file))
    rows = [row for _, row in sources.read_rows(found)]
    if ending == ".csv":
        rows = [row | {"n": int(row["n"])} for row in rows]
    assert rows == ROWS


@pytest.mark.parametrize("compression", PACKERS)
def test_txt_is_one_document(tmp_path, compression):
    file = tmp_path / f"a.txt{compression}"
    file.write_bytes(PACKERS[compression](BOM + "one\n\nzwei \u00fc\n".encode()))
    assert list(sources.read_rows(file)) == [(1, {"text": "one\n\nzwei \u00fc\n"})]


@pytest.mark.parametrize(("ending", "pack"), [(".gz", gzip.compress), (".zst", PACKERS[".zst"])])
def test_concatenated_compressed_files(tmp_path, ending, pack):
    file = tmp_path / f"a.jsonl{ending}"
    file.write_bytes(pack(_lines(ROWS[:1])) + pack(_lines(ROWS[1:])))
    assert [row for _, row in sources.read_rows(file)] == ROWS


def test_line_numbers_count_blank_lines(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\n{"text": "a"}\n\n\n{"text": "b"}\n')
    assert [number for number, _ in sources.read_rows(file)] == [2, 5]


def test_messages_in_parquet_are_lists_of_objects(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "c"}]}
    ]
    file = tmp_path / "a.parquet"
    file.write_bytes(_parquet(rows))
    ((_, row),) = sources.read_rows(file)
    assert row["messages"][1] == {"role": "assistant", "content": "b", "name": "c"}


def test_one_json_object_is_one_row(tmp_path):
    file = tmp_path / "a.json"
    row = {"messages": [{"role": "user", "content": "a"}]}
    file.write_text(json.dumps(row, indent=2))
    assert list(sources.read_rows(file)) == [(1, row)]


def test_csv_written_by_pandas_with_its_index(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text(",text\n0,one\n1,two\n")
    assert [row["text"] for _, row in sources.read_rows(file)] == ["one", "two"]


def test_folders_and_globs_in_a_stable_order(tmp_path):
    names = ["b.jsonl", "a.txt", "deep/er/c.json.gz", "deep/d.PARQUET", "e.jsonl.zst"]
    for name in [*names, "README.md", "x.jsonl.lock", ".hidden/a.jsonl", ".c.jsonl"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = [str(file.relative_to(tmp_path)) for file in sources.find_files(str(tmp_path))]
    assert found == sorted(names)
    found = [str(file.relative_to(tmp_path)) for file in sources.find_files(f"{tmp_path}/**/*.*")]
    assert found == sorted(names)
    assert [file.name for file in sources.find_files(f"{tmp_path}/[be].*")] == ["b.jsonl", "e.jsonl.zst"]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("trian.jsonl", "{}/trian.jsonl: no such file or folder; did you mean 'train.jsonl'?"),
        ("nowhere/a.jsonl", "{}/nowhere/a.jsonl: no such file or folder"),
        ("notes.md", "{}/notes.md: unknown file format; known are .jsonl, .json, .csv, .parquet, .txt, also"),
        ("docs", "{}/docs: the folder holds no .jsonl, .json, .csv, .parquet, .txt file"),
        ("*.json", "{}/*.json: no .jsonl, .json, .csv, .parquet, .txt file matches"),
        (
            "*.md",
            "{}/*.md: no .jsonl, .json, .csv, .parquet, .txt file matches; 1 others do, such as notes.md",
        ),
    ],
)
def test_what_is_said_of_a_path_without_data(tmp_path, path, said):
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "notes.md").touch()
    (tmp_path / "docs").mkdir()
    with pytest.raises(UserError) as caught:
        sources.find_files(str(tmp_path / path))
    assert str(caught.value).startswith(said.format(tmp_path))


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', ":2: not valid JSON: Expecting value (column 6)"),
        ("a.jsonl", b'{"a": 1}\n[1]\n', ":2: a row is a JSON object, not list"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xe9"}', ":2: not UTF-8: byte 0xe9 is the line's byte 8"),
        ("a.jsonl", "{}".encode("utf-16"), ":1: not UTF-8: byte 0xff is the line's byte 1"),
        ("a.json", b'[\n{"a": 1},\n{"a" 2}]', ":3: not valid JSON: Expecting ':' delimiter (column 6)"),
        ("a.json", b'[{"a": 1}, 5]', ", item 2: a row is a JSON object, not int"),
        ("a.json", b"5", ", item 1: a row is a JSON object, not int"),
        ("a.json", b'{"a": 1}\n{"a"}\n', ":2: not valid JSON: Expecting ':' delimiter (column 5)"),
        ("a.txt", b"one\ntwo \xff", ":2: not UTF-8: byte 0xff is the line's byte 5"),
        ("a.csv", b"a,b\n1,2\n1,2,3\n", ":3: the row has not 2 columns"),
        ("a.csv", b"a,b\n1\n", ":2: the row has not 2 columns"),
        ("a.csv", b'a,b\n"1,2\n', ":2: not valid CSV: unexpected end of data"),
        ("a.csv", b"a,b\n\xe9,2\n", ":2: not UTF-8: byte 0xe9 is the line's byte 1"),
        ("a.parquet", b"PAR1 no parquet file at all", ": not valid parquet: "),
        ("a.parquet", b"", ": not valid parquet: "),
        ("a.jsonl.gz", b"no gzip", ": cannot be read to its end: "),
        ("a.jsonl.zst", b"no zstd", ": cannot be read to its end: "),
    ],
)
def test_a_fault_is_told_in_one_line_with_its_place(tmp_path, name, body, said):
    file = tmp_path / name
    file.write_bytes(body)
    with pytest.raises(UserError) as caught:
        list(sources.read_rows(file))
    assert str(caught.value).startswith(f"{file}{said}")
    assert "\n" not in str(caught.value)


def test_large_txt_is_cut_at_line_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_TXT_BYTES", 64)
    lines = [f"line {number} \N{SNOWMAN}" for number in range(20)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    rows = list(sources.read_rows(tmp_path / "a.txt"))
    assert len(rows) > 3
    assert "".join(row["text"] for _, row in rows) == "\n".join(lines)
    assert all(row["text"].startswith(lines[number - 1]) for number, row in rows)


@pytest.mark.parametrize("missing", [1, 5, 2_000])
@pytest.mark.parametrize("ending", [".jsonl", ".txt"])
@pytest.mark.parametrize("compression", [".gz", ".zst"])
def test_a_cut_off_file(tmp_path, ending, compression, missing):
    body = _lines([{"text": f"line {number * 7919 % 1_000_003}"} for number in range(10_000)])
    file = tmp_path / f"a{ending}{compression}"
    file.write_bytes(PACKERS[compression](body)[:-missing])
    with pytest.raises(UserError) as caught:
        list(sources.read_rows(file))
    assert str(caught.value).startswith(f"{file}: cannot be read to its end: ")
    assert "\n" not in str(caught.value)


def test_a_damaged_gzip_file(tmp_path):
    body = bytearray(gzip.compress(_lines([{"text": f"line {n * 7919 % 1_000_003}"} for n in range(10_000)])))
    body[len(body) // 2] ^= 255
    (tmp_path / "a.jsonl.gz").write_bytes(body)
    with pytest.raises(UserError):
        list(sources.read_rows(tmp_path / "a.jsonl.gz"))


def test_rows_are_read_as_they_are_used(tmp_path):
    """A fault far behind does not hinder the rows before it: the file is not read at once."""
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"a": 1}\n{"a": 2}\nfault\n')
    rows = sources.read_rows(file)
    assert [next(rows)[1], next(rows)[1]] == [{"a": 1}, {"a": 2}]
    with pytest.raises(UserError):
        next(rows)


def test_a_hub_name_goes_through_datasets(monkeypatch):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert sources.find_files("owner/name") is None
    dataset = sources.hub_dataset("owner/name", "subset", "train[:10%]")
    assert asked == [(("owner/name", "subset"), {"split": "train[:10%]"})]
    ((number, name, rows),) = sources.hub_batches(dataset, "owner/name")
    assert (number, name) == (0, "owner/name")
    assert rows == list(enumerate(ROWS, start=1))


@pytest.mark.parametrize(
    "fault", [ValueError("Unknown split\nmany\nlines"), ConnectionError(), KeyError("x")]
)
def test_a_hub_dataset_that_does_not_load(monkeypatch, fault):
    def load_dataset(*args, **kwargs):
        raise fault

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(UserError) as caught:
        sources.hub_dataset("owner/name", None, "train")
    reason = str(fault).split("\n")[0] or "ConnectionError"
    assert str(caught.value) == f"owner/name: no such file, and not loadable as a Hub dataset: {reason}"


def test_batches_are_bounded_by_characters_and_rows(tmp_path):
    long = [{"messages": [{"role": "user", "content": "x" * 300_000}]} for _ in range(8)]
    short = [{"text": "x"} for _ in range(4_500)]
    for name, rows in (("a.jsonl", long), ("b.jsonl", short)):
        (tmp_path / name).write_bytes(_lines(rows))
    batches = list(sources.file_batches(sources.find_files(str(tmp_path))))
    assert [(number, len(rows)) for number, _, rows in batches] == [
        (0, 4),
        (0, 4),
        (1, 2000),
        (1, 2000),
        (1, 500),
    ]
