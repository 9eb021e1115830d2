"""The token cache: its key, many processes at once, killed ones, order and memory."""

import gzip
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import datasets
import numpy as np
import pytest
from conftest import QUICKSTART
from transformers import AutoTokenizer

from dstrain.data import sources
from dstrain.data.encode import Encoder, Encoding
from dstrain.data.prepare import SourceSpec, prepare
from dstrain.errors import UserError

module = sys.modules["dstrain.data.prepare"]  # the package's attribute of this name is the function

TEXT = Encoding("text", ("text",), "skip")


def write(file: Path, texts) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"text": text, "other": text}) + "\n" for text in texts))
    return file


def run(path, tokenizer, cache, encoding=TEXT, workers=1):
    return prepare([SourceSpec(str(path), None, "train", encoding)], tokenizer, str(cache), workers, False)[0]


def documents(tokens, tokenizer) -> list[str]:
    return [tokenizer.decode(ids) for ids in np.split(np.asarray(tokens.stream), tokens.ends[:-1])]


@pytest.fixture
def no_tokenizing(monkeypatch):
    """Call the fixture to make any tokenizing from then on fail."""

    def forbid():
        def encode(*_):
            raise AssertionError("tokenized again")

        monkeypatch.setattr(Encoder, "encode", encode)

    return forbid


def test_documents_counts_and_places(tmp_path, tokenizer):
    write(tmp_path / "data" / "a.jsonl", ["one", "", "two"])
    write(tmp_path / "data" / "b.jsonl", ["three", " "])
    tokens = run(tmp_path / "data", tokenizer, tmp_path / "cache")
    assert documents(tokens, tokenizer) == ["one<|endoftext|>", "two<|endoftext|>", "three<|endoftext|>"]
    assert tokens.empty == 2
    assert [tokens.place(number) for number in range(3)] == [
        f"{tmp_path}/data/a.jsonl:1",
        f"{tmp_path}/data/a.jsonl:3",
        f"{tmp_path}/data/b.jsonl:1",
    ]
    assert tokens.stream.dtype == np.uint16


def test_the_cache_is_used_and_files_may_move(tmp_path, tokenizer, no_tokenizing):
    file = write(tmp_path / "a.jsonl", ["one", "two"])
    first = run(file, tokenizer, tmp_path / "cache")
    no_tokenizing()
    again = run(file, tokenizer, tmp_path / "cache")
    assert np.array_equal(first.stream, again.stream)
    os.utime(file, (1, 1))
    run(file, tokenizer, tmp_path / "cache")
    moved = file.rename(tmp_path / "b.jsonl")
    again = run(moved, tokenizer, tmp_path / "cache")
    assert np.array_equal(first.stream, again.stream)
    assert again.place(1) == f"{moved}:2"  # not where it was when it was tokenized
    run(moved, AutoTokenizer.from_pretrained(QUICKSTART / "tokenizer"), tmp_path / "cache")


def test_the_key_holds_all_that_decides_the_tokens(tmp_path, tokenizer, no_tokenizing):
    file = write(tmp_path / "a.jsonl", ["one", "two"])

    def change(how):
        mine = AutoTokenizer.from_pretrained(QUICKSTART / "tokenizer")
        how(mine)
        return mine

    mine = change(lambda t: setattr(t, "chat_template", "{{ messages }}"))
    no_template = change(lambda t: setattr(t, "chat_template", "{{ messages }} "))
    chats = Encoding("messages", ("text",), "skip")
    variants = [
        (file, tokenizer, TEXT),
        (file, tokenizer, Encoding("text", ("other",), "skip")),
        (file, tokenizer, Encoding("text", ("text",), "error")),
        (file, tokenizer, Encoding("prompt_completion", ("text", "other"), "skip")),
        (file, change(lambda t: t.add_tokens(["zz"])), TEXT),
        (file, change(lambda t: t.add_special_tokens({"bos_token": "<s>"})), TEXT),
        (file, change(lambda t: setattr(t, "eos_token", "!")), TEXT),
        (file, mine, chats),
        (file, no_template, chats),
        (write(tmp_path / "b.jsonl", ["one", "too"]), tokenizer, TEXT),
        (write(tmp_path / "two" / "a.jsonl", ["one"]).parent, tokenizer, TEXT),
    ]
    keys = [
        module._key(module._fingerprints(sources.find_files(str(path)), tmp_path), encoding, one)
        for path, one, encoding in variants
    ]
    assert len(set(keys)) == len(keys)
    # Text does not depend on the chat template.
    prints = module._fingerprints([file], tmp_path)
    assert module._key(prints, TEXT, mine) == module._key(prints, TEXT, no_template) == keys[0]


def test_changed_content_is_tokenized_anew(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", ["one"])
    run(file, tokenizer, tmp_path / "cache")
    write(file, ["another"])
    assert documents(run(file, tokenizer, tmp_path / "cache"), tokenizer) == ["another<|endoftext|>"]


def test_the_same_bytes_read_in_another_way(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", ["one"])
    text = tmp_path / "a.txt"
    text.write_bytes(file.read_bytes())
    assert documents(run(file, tokenizer, tmp_path / "cache"), tokenizer) == ["one<|endoftext|>"]
    assert documents(run(text, tokenizer, tmp_path / "cache"), tokenizer) == [
        text.read_text() + "<|endoftext|>"
    ]


def test_a_hub_dataset_is_cached(tmp_path, tokenizer, monkeypatch, no_tokenizing):
    dataset = datasets.Dataset.from_list([{"text": "one"}, {"text": None}, {"text": "two"}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: dataset)
    tokens = run("owner/name", tokenizer, tmp_path / "cache")
    assert documents(tokens, tokenizer) == ["one<|endoftext|>", "two<|endoftext|>"]
    assert (tokens.empty, tokens.place(1)) == (1, "owner/name:3")
    no_tokenizing()
    run("owner/name", tokenizer, tmp_path / "cache")


@pytest.mark.parametrize(
    ("texts", "said"), [([], "(0 empty rows)"), (["", " "], "(2 empty rows)")], ids=["no rows", "empty rows"]
)
def test_an_empty_data_set(tmp_path, tokenizer, texts, said):
    file = write(tmp_path / "a.jsonl", texts)
    with pytest.raises(UserError) as caught:
        run(file, tokenizer, tmp_path / "cache")
    assert str(caught.value) == f"{file}: empty data set: no row gives a token {said}"
    assert not list((tmp_path / "cache").glob("tokens-*.tmp"))


def test_tokenizers_that_cannot_do_it(tmp_path):
    file = write(tmp_path / "a.jsonl", ["one"])
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "tokenizer")
    chats = Encoding("messages", ("text",), "skip")
    with pytest.raises(UserError, match=r"no chat template; name one in model.chat_template"):
        run(file, tokenizer, tmp_path / "cache", chats)
    tokenizer.chat_template = {"tools": "{{ messages }}", "rag": "{{ messages }}"}
    with pytest.raises(UserError, match=r"no chat template; name one in model.chat_template"):
        run(file, tokenizer, tmp_path / "cache", chats)
    tokenizer.eos_token = None
    with pytest.raises(UserError, match=r"no eos_token"):
        run(file, tokenizer, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", ["one"])
    (tmp_path / "cache").touch()
    with pytest.raises(UserError, match=r"cache: the token cache \(data.cache_dir\) cannot be written: "):
        run(file, tokenizer, tmp_path / "cache")


def test_what_a_killed_process_left_is_replaced(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", ["one"])
    folder = run(file, tokenizer, tmp_path / "cache").folder
    left = folder.with_name(f"{folder.name}.tmp")
    folder.rename(left)
    (left / "tokens.bin").write_bytes(b"half")
    (left / "meta.json").unlink()
    assert documents(run(file, tokenizer, tmp_path / "cache"), tokenizer) == ["one<|endoftext|>"]
    assert not left.exists()


def _one_of_many(start, path, cache, results):
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "tokenizer")
    written = []
    original = module._write
    module._write = lambda *args: (written.append(1), original(*args), time.sleep(0.2))
    start.wait()
    tokens = run(path, tokenizer, cache, workers=2)
    results.put((len(written), hash(tokens.stream.tobytes()), tokens.ends.tolist()))


def test_many_processes_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    file = write(tmp_path / "a.jsonl", [f"text {number}" for number in range(2_500)])
    for attempt in range(3):
        start, results = context.Barrier(4), context.Queue()
        arguments = (start, file, tmp_path / f"cache{attempt}", results)
        processes = [context.Process(target=_one_of_many, args=arguments) for _ in range(4)]
        for process in processes:
            process.start()
        found = [results.get(timeout=20) for _ in processes]
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0] * 4
        assert sorted(written for written, *_ in found) == [0, 0, 0, 1]
        assert all(one[1:] == found[0][1:] for one in found)


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(sources, "_BATCH_ROWS", 3)


def test_the_order_does_not_depend_on_the_processes(tmp_path, tokenizer, small_batches):
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "tokenizer")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    for number in range(3):
        rows = [
            {
                "text": f"{number}-{row} " * (1 + (row * 7) % 13),
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": f"{row}" * row},
                ],
            }
            for row in range(20)
        ]
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for encoding in (TEXT, Encoding("messages", ("messages",), "skip")):
        one, two = (
            run(tmp_path / "data", tokenizer, tmp_path / f"c{n}", encoding, workers=n) for n in (1, 2)
        )
        names = {file.name for file in one.folder.iterdir()}
        assert names == {file.name for file in two.folder.iterdir()} >= {"tokens.bin", "ends.npy"}
        assert all((one.folder / name).read_bytes() == (two.folder / name).read_bytes() for name in names)
        shown = documents(one, tokenizer)
        assert len(shown) == 60
        if encoding is TEXT:
            assert [text.split(" ")[0] for text in shown] == [f"{n}-{r}" for n in range(3) for r in range(20)]


def test_a_fault_in_a_process_is_one_clear_error(tmp_path, tokenizer, small_batches):
    file = write(tmp_path / "a.jsonl", ["one"] * 20)
    with file.open("a") as stream:
        stream.write('{"text": 5}\n' + '{"text": "six"}\n' * 20)
    with pytest.raises(UserError) as caught:
        run(file, tokenizer, tmp_path / "cache", workers=2)
    assert str(caught.value) == f"{file}:21: column 'text' is int, not text"
    assert not list((tmp_path / "cache").glob("tokens-*.tmp"))


def test_a_killed_process_is_one_clear_error(tmp_path, tokenizer, small_batches, monkeypatch):
    file = write(tmp_path / "a.jsonl", ["one"] * 20)
    monkeypatch.setattr(Encoder, "encode", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(
        UserError, match=r"a.jsonl: a tokenizing process was killed.*preprocessing_num_workers"
    ):
        run(file, tokenizer, tmp_path / "cache", workers=2)


@pytest.mark.parametrize("workers", [1, 2])
def test_few_batches_are_in_memory(tokenizer, workers):
    pulled = []

    def rows():
        for number in range(60):
            pulled.append(number)
            yield 0, "f", [(number, {"text": "x"})]

    spec = SourceSpec("f", None, "train", TEXT)
    for used, _ in enumerate(module._encoded(rows(), spec, tokenizer, workers), start=1):
        assert len(pulled) - used <= 2 * workers + 1
    assert used == 60


def test_compressed_files_give_the_same_tokens(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", ["one", "two"])
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    plain, other = (run(path, tokenizer, tmp_path / "cache") for path in (file, packed))
    assert np.array_equal(plain.stream, other.stream)


def test_masks_and_first_tokens_survive_the_bits(tokens_of, tokenizer):
    rows = [{"prompt": "a " * (n % 5), "completion": "b " * (1 + n % 3)} for n in range(50)]
    tokens = tokens_of(rows, "prompt_completion", ("prompt", "completion"))
    bits = np.unpackbits(tokens.in_loss, bitorder="little")[: len(tokens.stream)].astype(bool)
    for number, row in enumerate(rows):
        start, stop = (tokens.ends[number - 1] if number else 0), tokens.ends[number]
        ids, mask = tokens.stream[start:stop], bits[start:stop]
        assert tokenizer.decode(ids) == row["prompt"] + row["completion"] + "<|endoftext|>"
        assert tokenizer.decode(ids[mask]).strip() == (row["completion"] + "<|endoftext|>").strip()
        assert tokens.first[number] == np.flatnonzero(mask[1:])[0] + 1
