"""Ops that are built once, tokenizers, and the command line of `python -m dstrain`."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from running import QUICKSTART, REPOSITORY, launch, losses, tiny_recipe

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
    (folder / "op.so").write_bytes(b"ELF")
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


def test_a_missing_libaio_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(ops, "has_libaio", lambda: False)
    with pytest.raises(UserError, match="op async_io: libaio is missing; install the package 'libaio-dev'"):
        ops.ready(["async_io"])


@pytest.mark.slow
def test_two_launches_at_once_on_an_empty_cache(tmp_path):
    """One builds and the other waits; what a stopped build left behind holds neither up."""
    left = tmp_path / "ops" / "deepspeed_shm_comm"
    left.mkdir(parents=True)
    (left / "lock").touch()
    (left / "build.ninja").write_text("half")
    with ThreadPoolExecutor() as pool:
        environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "ops")}
        starts = [
            pool.submit(
                launch,
                *("--config", tiny_recipe(tmp_path / name), "train.max_steps=1"),
                launcher="torchrun" if name == "b" else "python",
                ranks=2 if name == "b" else 1,
                env=environment,
            )
            for name in "ab"
        ]
        ended = [start.result() for start in starts]
    assert [process.returncode for process in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    said = ended[0].stdout + ended[1].stdout
    assert said.count("building DeepSpeed op deepspeed_shm_comm") == 1
    assert "op deepspeed_shm_comm is locked by a build that was stopped: it is built anew" in said
    assert len(losses(tmp_path / "a" / "run")) == len(losses(tmp_path / "b" / "run")) == 1


@pytest.mark.slow
def test_doctor_builds_what_a_recipe_needs(tmp_path, monkeypatch):
    recipe = tiny_recipe(tmp_path, deepspeed="zero1_fp32.json")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    empty = command("doctor", "--config", str(recipe), "--skip", "ranks")
    assert re.search(r"(?m)^warning +ops +deepspeed_shm_comm: missing$", empty.stdout)
    assert f"python -m dstrain doctor --build-ops --config {recipe}" in " ".join(empty.stdout.split())
    built = command("doctor", "--build-ops", "--config", str(recipe))
    assert built.returncode == 0, built.stderr
    assert re.search("deepspeed_shm_comm +ready", built.stdout)
    assert {path.name for path in (tmp_path / "ops").iterdir() if path.is_dir()} == {"deepspeed_shm_comm"}
    offload = tiny_recipe(tmp_path, deepspeed="zero3_nvme.json")
    shown = command("doctor", "--config", str(offload), "--skip", "ranks").stdout
    assert re.findall(r"(?m)^\w+ +ops +(\w+)", shown) == [
        "deepspeed_shm_comm",
        "cpu_adam",
        "pin_memory",
        "async_io",
    ]


@pytest.mark.slow
def test_a_wrong_nvme_path_is_named(tmp_path):
    recipe = tiny_recipe(tmp_path, deepspeed="zero3_nvme.json")
    process = launch("--config", recipe)
    assert process.returncode == 2
    assert process.stderr == (
        "error: nvme_path='/local_nvme': no such folder; name one on a local NVMe disk\n"
    )


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
