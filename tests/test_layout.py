"""The shape of the code: import directions, sizes, and documents that say what is true."""

import ast
import re
import shlex
from pathlib import Path

import pytest
from running import REPOSITORY

from dstrain import recipe

MODULES = [REPOSITORY / "train.py", *sorted((REPOSITORY / "dstrain").rglob("*.py"))]

# What a part of the library may import of the library. Only train.py and __main__.py wire parts together.
ALLOWED = {
    "errors": set(),
    "recipe": set(),
    "config": {"errors", "recipe"},
    "ds_keys": {"errors"},
    "ds_fill": {"errors", "ds_keys"},
    "ds_optim": {"errors", "ds_keys", "ds_fill"},
    "ds_config": {"errors", "ds_keys", "ds_fill", "ds_optim"},
    "fingerprint": set(),
    "rendezvous": {"errors", "fingerprint"},
    "clock": set(),
    "rng": set(),
    "distributed": {"clock", "errors", "hosts", "rendezvous"},
    "failure": set(),
    "logs": set(),
    "watchdog": {"distributed", "errors", "failure", "fingerprint", "logs", "watchdog"},
    "hosts": {"errors", "fingerprint"},
    "remote": {"control", "errors", "failure", "hosts"},
    "on_host": {"control", "fingerprint"},
    "data": {"errors", "data"},
    "loss": set(),
    "weights": {"errors"},
    "model": {"errors", "loss", "probe", "weights"},
    "export": {"distributed"},
    "dtypes": set(),
    "probe": {"errors"},
    "schedule": set(),
    "step": {"clock", "distributed", "errors"},
    "control": {"failure"},
    "fragments": set(),
    "checkpoint": {"errors", "distributed", "fragments", "rng", "checkpoint"},
    "run_folder": {"errors", "distributed", "checkpoint", "failure"},
    "ops": {"errors"},
    "observe": {"errors", "distributed", "fragments", "observe"},
    "tokenizer": {"errors"},
    "gguf": {"errors"},
    # What train.py and the commands have in common, and what launches train.py.
    "request": {"config", "ds_config", "errors", "model", "run_folder"},
    "convert": {"checkpoint", "errors", "export", "request", "weights"},
    "doctor": {
        *("checkpoint", "config", "data", "distributed", "doctor", "ds_config", "errors", "fingerprint"),
        *("hosts", "model", "observe", "ops", "request", "run_folder"),
    },
    "diagnose": {"errors", "failure", "request", "diagnose"},
    "parity": {"errors", "data", "distributed", "model", "request", "parity", "watchdog"},
}


def part(file: Path) -> str:
    return file.relative_to(REPOSITORY / "dstrain").parts[0].removesuffix(".py")


def imported_parts(file: Path) -> set[str]:
    parts = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dstrain":
            names = node.module.split(".")[1:2] or [alias.name for alias in node.names]
            parts |= set(names)
        elif isinstance(node, ast.Import):
            parts |= {a.name.split(".")[1] for a in node.names if a.name.startswith("dstrain.")}
    return parts


@pytest.mark.parametrize("file", MODULES[1:], ids=lambda file: str(file.relative_to(REPOSITORY)))
def test_imports_go_one_way(file):
    name = part(file)
    if name not in ("__main__", "__init__"):
        assert imported_parts(file) <= ALLOWED[name]


def test_only_one_module_uses_deepspeed_comm():
    users = [
        file.name for file in MODULES if re.search(r"deepspeed\.comm|init_distributed", file.read_text())
    ]
    assert users == ["distributed.py"]


def test_no_function_takes_the_whole_recipe():
    for file in MODULES[1:]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and file.name not in (
                "config.py",
                "recipe.py",
                "__main__.py",
            ):
                hints = [ast.unparse(a.annotation) for a in node.args.args if a.annotation]
                assert "Recipe" not in hints, f"{file.name}: {node.name}"


def test_train_py_is_short():
    assert len((REPOSITORY / "train.py").read_text().splitlines()) <= 200


@pytest.mark.parametrize("file", MODULES[1:], ids=lambda file: str(file.relative_to(REPOSITORY)))
def test_modules_and_functions_stay_small(file):
    text = file.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 90, node.name


def test_public_functions_say_what_they_do():
    for file in MODULES:
        tree = ast.parse(file.read_text())
        assert ast.get_docstring(tree), file
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                exempt = file.name in ("train.py", "recipe.py")  # numbered comments; a description a field
                assert ast.get_docstring(node) or exempt, f"{file.name}: {node.name}"


def test_options_page_is_current():
    text = (REPOSITORY / "docs" / "options.md").read_text()
    for model in (recipe.Recipe, recipe.Source):
        assert "\n".join(recipe.options_table(model)) in text, "run: python -m dstrain options"


def documents():
    return [
        p
        for p in REPOSITORY.rglob("*.md")
        if not {".venv", "runs", "models"} & set(p.relative_to(REPOSITORY).parts)
    ]


@pytest.mark.parametrize("document", documents(), ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_links_and_commands_of_documents_exist(document):
    text = document.read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        if not link.startswith("http"):
            assert (document.parent / link).exists(), link
    for line in re.findall(
        r"(?m)^(?:\./launch/\S+|(?:python|deepspeed|torchrun|accelerate launch) .*)$", text
    ):
        for word in shlex.split(line, comments=True):
            if (
                word.startswith(("./launch/", "recipes/", "benchmarks/", "ds_configs/"))
                and "NAME" not in word
            ):
                assert (REPOSITORY / word).exists(), f"{document.name}: {line}"


def test_each_row_of_what_you_lose_has_a_test():
    text = (REPOSITORY / "docs" / "checkpoints.md").read_text()
    written = "".join(file.read_text() for file in (REPOSITORY / "tests").glob("test_*.py"))
    rows = [row for row in text.splitlines() if row.startswith("|")][2:]
    assert len(rows) > 10
    for row in rows:
        names = re.findall(r"`(test_\w+)`", row.split("|")[3])
        assert names, row
        for name in names:
            assert f"def {name}(" in written, name


def test_readme_names_the_two_commands():
    text = (REPOSITORY / "README.md").read_text()
    assert "./launch/quickstart.sh" in text
    assert "./launch/test.sh" in text
    assert "./launch/test.sh" in (REPOSITORY / ".ci" / "run").read_text()


def test_readme_file_tree_is_true():
    tree = re.search(r"## Files\n\n```\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.S).group(1)
    for line in tree.splitlines():
        inside = line.startswith("  ")
        for name in re.findall(r"[\w/]+(?:\.py|/)(?= |$)", line[:22]):
            base = REPOSITORY / "dstrain" if inside else REPOSITORY
            assert (base / name.replace("NAME/", "")).exists(), name
