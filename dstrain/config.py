"""Load a recipe.

`load_recipe` reads YAML, merges `section.key=value` overrides and returns a frozen `Recipe` whose local
paths are absolute. No torch, no network, and nothing is created on disk.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from dstrain.errors import UserError, nearest
from dstrain.recipe import Recipe, option_names

# Names of other tools. The value names the key here.
_TRANSLATIONS = {
    "per_device_train_batch_size": "train.train_micro_batch_size_per_gpu",
    "micro_batch_size": "train.train_micro_batch_size_per_gpu",
    "per_device_eval_batch_size": "eval.eval_micro_batch_size_per_gpu",
    "train_batch_size": "train.global_batch_size",
    "max_grad_norm": "train.gradient_clipping",
    "num_epochs": "train.num_train_epochs",
    "optim": "the optimizer block of the DeepSpeed JSON",
    "bf16": "train.precision: bf16",
    "fp16": "train.precision: fp16",
    "torch_dtype": "train.precision",
    "dtype": "train.precision",
    "base_model": "model.model_name_or_path",
    "dataset_name": "data.train",
    "datasets": "data.train",
    "train_file": "data.train",
    "validation_file": "data.eval",
    "dataset_text_field": "data.train: [{path: ..., text_column: ...}]",
    "dataset_num_proc": "data.preprocessing_num_workers",
    "max_length": "data.max_seq_length",
    "cutoff_len": "data.max_seq_length",
    "sequence_len": "data.max_seq_length",
    "block_size": "data.max_seq_length",
    "sample_packing": "data.packing",
    "eval_strategy": "eval.eval_steps",
    "save_strategy": "checkpoint.save_steps",
    "deepspeed_config": "deepspeed",
    "min_lr_rate": "train.min_lr_ratio",
}


class _StrictLoader(yaml.SafeLoader):
    """YAML that refuses duplicate keys and reads 1e-5 as a number, as JSON and YAML 1.2 do."""


def _mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if key in seen:
            raise UserError(f"{loader.name}:{line}: key {key!r} is given twice (first in line {seen[key]})")
        seen[key] = line
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _parse_yaml(text: str, name: str) -> Any:
    try:
        loader = _StrictLoader(text)
        loader.name = name
        return loader.get_single_data()
    except (yaml.YAMLError, TypeError) as error:  # TypeError: a key that is a list or a mapping
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        raise UserError(f"{where}: not valid YAML: {getattr(error, 'problem', error)}") from None


_WITH_VALUE = ("--deepspeed_config", "--zero_stage", "--precision", "--allow-change")  # of train.py's options


def overrides_of(words: Sequence[str]) -> list[str]:
    """Return those of train.py's arguments that are `section.key=value`."""
    found, before = [], ""
    for word in words:
        if "=" in word and not word.startswith("-") and before not in _WITH_VALUE:
            found.append(word)
        before = word
    return found


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Recipe, dict[str, Any]]:
    """Read a recipe and merge overrides such as `train.max_steps=10`.

    Returns the recipe, and the overrides of the DeepSpeed JSON (`deepspeed.KEY=value`) by dotted key.
    Paths in the file are relative to its folder, those in overrides to the working directory.
    Raises UserError for anything that is not a valid recipe.
    """
    file = recipe_file(path)
    try:
        raw = _parse_yaml(file.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise UserError(f"{path}: no such recipe{_nearest_file(file)}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: a recipe is a mapping of sections, such as 'train:' and 'data:'")
    _absolute_paths(raw, file.resolve().parent)
    ds_overrides: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise UserError(f"command line: {override!r} is not of the form section.key=value")
        value = _parse_yaml(text, f"command line, {key}")
        if key.startswith("deepspeed."):
            ds_overrides[key.removeprefix("deepspeed.")] = value
        else:
            branch = _branch(key, value)
            _absolute_paths(branch, Path.cwd())
            _merge(raw, branch, key)
    try:
        return Recipe.model_validate(raw), ds_overrides
    except ValidationError as error:
        raise UserError(f"{path}: {_first_error(error)}") from None


def recipe_file(path: str | Path) -> Path:
    """Return the recipe's file, of a file or of a folder that holds `recipe.yaml`."""
    return Path(path) / "recipe.yaml" if Path(path).is_dir() else Path(path)


def explicit_keys(section: BaseModel, prefix: str = "") -> set[str]:
    """Return the dotted keys that the user wrote, as opposed to defaults."""
    keys: set[str] = set()
    for name in section.model_fields_set:
        value = getattr(section, name)
        keys |= (
            explicit_keys(value, f"{prefix}{name}.") if isinstance(value, BaseModel) else {f"{prefix}{name}"}
        )
    return keys


def flat(recipe: Recipe) -> dict[str, Any]:
    """Return every option by its dotted key, in JSON's types; the sources stay lists."""
    values: dict[str, Any] = {}
    for name, value in recipe.model_dump(mode="json").items():
        values |= (
            {f"{name}.{key}": inner for key, inner in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
    return values


def dump_recipe(recipe: Recipe, **changes: str) -> str:
    """Return the recipe as YAML, with only the keys that the user wrote, and top-level `changes`."""
    body = recipe.model_dump(mode="json", exclude_unset=True) | changes
    return yaml.safe_dump(body, sort_keys=False, allow_unicode=True, width=110)


def _branch(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _merge(base: dict[str, Any], change: dict[str, Any], key: str) -> None:
    """Put the one leaf of `change` into `base`; a number addresses an item of a list."""
    for name, value in change.items():
        if isinstance(value, dict) and isinstance(base.get(name), list):
            index, item = next(iter(value.items()))
            items = base[name]
            if not (index.isdigit() and int(index) < len(items)):
                raise UserError(
                    f"command line: {key}: {name!r} is a list of {len(items)}; number its items from 0"
                )
            if isinstance(item, dict) and isinstance(items[int(index)], dict):
                _merge(items[int(index)], item, key)
            else:
                items[int(index)] = item
        elif isinstance(value, dict) and isinstance(base.get(name), dict):
            _merge(base[name], value, key)
        else:
            base[name] = value


def _absolute_paths(raw: dict[str, Any], folder: Path) -> None:
    """Make local paths absolute in place: always those of files, of models only where the folder exists."""

    def local(text: Any, must: bool) -> Any:
        if not isinstance(text, str) or not text:
            return text
        expanded = Path(text).expanduser()
        if must or text.startswith((".", "/", "~")) or (folder / expanded).exists():
            return str(folder / expanded) if not expanded.is_absolute() else str(expanded)
        return text

    model, data = raw.get("model"), raw.get("data")
    if isinstance(model, dict):
        for key, must in (
            ("model_name_or_path", False),
            ("tokenizer_name_or_path", False),
            ("chat_template", True),
        ):
            if key in model:
                model[key] = local(model[key], must)
    if isinstance(data, dict):
        if "cache_dir" in data:
            data["cache_dir"] = local(data["cache_dir"], True)
        for key in ("train", "eval"):
            if key in data and data[key] is not None:
                data[key] = _local_sources(data[key], folder, local)
    checkpoint = raw.get("checkpoint")
    if isinstance(checkpoint, dict) and checkpoint.get("resume_from_checkpoint") not in (
        "auto",
        "never",
        None,
    ):
        checkpoint["resume_from_checkpoint"] = local(checkpoint["resume_from_checkpoint"], True)
    if isinstance(raw.get("deepspeed"), str) and (folder / raw["deepspeed"]).is_file():
        raw["deepspeed"] = str(folder / raw["deepspeed"])


def _local_sources(value: Any, folder: Path, local: Any) -> Any:
    if isinstance(value, dict) and all(str(key).isdigit() for key in value):  # an override of one item
        return {index: _local_source(item, folder, local) for index, item in value.items()}
    return [_local_source(item, folder, local) for item in (value if isinstance(value, list) else [value])]


def _local_source(item: Any, folder: Path, local: Any) -> Any:
    source = {"path": item} if isinstance(item, str) else item
    if not isinstance(source, dict) or not isinstance(source.get("path"), str):
        return source
    text = source["path"]
    # A Hub name is "name" or "owner/name": no wildcard, no file ending that we read.
    looks_local = bool(re.search(r"[*?\[]", text)) or Path(text).suffix.lower() in _FILE_ENDINGS
    return source | {"path": local(text, looks_local)}


_FILE_ENDINGS = {".jsonl", ".json", ".parquet", ".csv", ".txt", ".gz", ".zst"}


def _nearest_file(file: Path) -> str:
    folder = file.parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return nearest(file.name, names)


def _first_error(error: ValidationError) -> str:
    """Return the first of pydantic's errors as one line that names the key and the nearest right one."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        return f"unknown key {key!r}{_suggestion(key)}{more}"
    if first["type"] == "missing":
        return f"{key!r} is missing{more}"
    value = first["input"]
    shown = f"={value!r}" if isinstance(value, str | int | float | bool) or value is None else ""
    return f"{key}{shown}: {first['msg'][0].lower()}{first['msg'][1:]}{more}"


def _suggestion(key: str) -> str:
    leaf = key.rsplit(".", 1)[-1]
    if leaf in _TRANSLATIONS:
        return f"; here it is {_TRANSLATIONS[leaf]!r}"
    names = [re.sub(r"^data\.train\.", "data.train.0.", name) for name in option_names()]
    same_leaf = [name for name in names if name.rsplit(".", 1)[-1] == leaf]
    return f"; did you mean {same_leaf[0]!r}?" if same_leaf else nearest(key, names)


if __name__ == "__main__":  # what launch scripts check first: RECIPE [train.py's other arguments]
    try:
        checked, _ = load_recipe(sys.argv[1], overrides_of(sys.argv[2:]))
    except UserError as fault:
        print(f"error: {fault}", file=sys.stderr)
        raise SystemExit(fault.status) from None
    print(Path(checked.output_dir).expanduser())
