"""Ops that are built once, tokenizers, and the command line of `python -m dstrain`."""

import json
import os
import re
import subprocess
import sys

import pytest
from running import QUICKSTART, REPOSITORY

from dstrain import ops
from dstrain.errors import UserError
from dstrain.tokenizer import train_tokenizer


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "dstrain", *arguments], cwd=REPOSITORY, capture_output=True, text=True
    )


def test_a_build_without_a_stamp_or_with_another_is_stale(tmp_path):
    folder = tmp_path / "op"
    folder.mkdir()
    (folder / "op.so").write_bytes(b"")
    assert ops.state(folder) == "half-built"
    (folder / "lock").touch()
    assert ops.state(folder) == "locked by a build that was stopped"
    (folder / "dstrain.json").write_text(json.dumps(ops._stamp()))
    assert ops.state(folder) == "ready"
    (folder / "dstrain.json").write_text(json.dumps(ops._stamp() | {"torch": "1.0"}))
    assert ops.state(folder) == "built for another torch"
    (folder / "dstrain.json").write_text("{")
    assert ops.state(folder) == "half-built"
    assert ops.state(tmp_path / "none") == "missing"


def test_a_missing_compiler_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name: None if name == "g++" else name)
    with pytest.raises(UserError, match=r"op cpu_adam: g\+\+ is missing; install the package 'g\+\+'"):
        ops.ready(["cpu_adam"])


def test_the_cache_belongs_to_the_environment(monkeypatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    assert ops.cache_dir().is_relative_to(sys.prefix)


def test_tokenizer_of_the_quickstart_is_reproducible(tmp_path):
    rows = (QUICKSTART / "data" / "factbook_docs_train.jsonl").read_text().splitlines()
    assert train_tokenizer((json.loads(row)["text"] for row in rows), 4096, tmp_path) == 4096
    shipped = json.loads((QUICKSTART / "tokenizer" / "tokenizer.json").read_text())
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"] == shipped["model"]
    with pytest.raises(UserError, match="need at least 257"):
        train_tokenizer(iter(["a"]), 256, tmp_path)


@pytest.mark.slow
def test_commands():
    assert "train-tokenizer" in command("--help").stdout
    assert command("options").stdout.startswith("| key | default | meaning |")
    assert json.loads(command("schema").stdout)["title"] == "Recipe"
    assert re.search("cpu_adam +ready", command("doctor", "--build-ops").stdout)
    shown = command("unigram", "--config", str(QUICKSTART / "recipe.yaml")).stdout
    assert "uniform  8.3178" in shown
    readme = (QUICKSTART / "README.md").read_text()
    assert re.search(r"unigram  (\S+)", shown)[1] in readme
    wrong = command("train-tokenizer", "--data", str(QUICKSTART / "dat"), "--output", os.devnull)
    assert wrong.returncode == 2
    assert wrong.stderr == f"error: {QUICKSTART / 'dat'}: no such file or folder; did you mean 'data'?\n"
