"""The recipe: what to train, on what, for how long. How it is trained belongs to the DeepSpeed JSON.

`load_recipe` reads YAML, merges `section.key=value` overrides and returns a frozen `Recipe` whose local
paths are absolute. No torch, no network, and nothing is created on disk.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from dstrain.errors import UserError, nearest


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Source(_Section):
    """One data source. A plain string in a recipe is short for `path: STRING`."""

    path: str = Field(
        description="File, glob, folder (jsonl, json, parquet, csv, txt; .gz, .zst) or Hub dataset name"
    )
    subset: str | None = Field(None, description="Configuration of a Hub dataset, such as `wikitext-2-v1`")
    split: str = Field("train", description="Split of a Hub dataset; slices such as `train[:90%]` work")
    format: Literal["text", "messages", "prompt_completion"] = Field("text", description="How a row is read")
    weight: float = Field(
        1.0, gt=0, description="Passes over this source per epoch: 2 repeats it, 0.5 takes half"
    )
    text_column: str = Field("text", description="Column of format `text`")
    messages_column: str = Field(
        "messages", description="Column of format `messages`: a list of role and content"
    )
    prompt_column: str = Field(
        "prompt", description="Column of format `prompt_completion` that is not in the loss"
    )
    completion_column: str = Field(
        "completion", description="Column of format `prompt_completion` in the loss"
    )


def _as_sources(value: Any) -> Any:
    items = value if isinstance(value, list) else [value]
    return [{"path": item} if isinstance(item, str) else item for item in items]


Sources = Annotated[tuple[Source, ...], BeforeValidator(_as_sources), Field(min_length=1)]


class Model(_Section):
    model_name_or_path: str | None = Field(
        None, description="Hub name or local folder with weights to start from"
    )
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="Transformers config fields: overrides, or with `model_type` those of a new model",
    )
    tokenizer_name_or_path: str | None = Field(None, description="Tokenizer, if it is not the model's own")
    revision: str | None = Field(None, description="Branch, tag or commit of a Hub model")
    trust_remote_code: bool = Field(False, description="Run Python code that the model's repository contains")
    attn_implementation: Literal[
        "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"
    ] = Field("sdpa", description="Attention kernel of Transformers")
    chat_template: str | None = Field(
        None, description="Jinja file that replaces the tokenizer's chat template"
    )
    gradient_checkpointing: bool | None = Field(
        None, description="Recompute activations in the backward pass; unset, the JSON decides"
    )


class Data(_Section):
    train: Sources = Field(description="Training sources")
    eval: Sources | None = Field(None, description="Held-out sources; unset, nothing is evaluated")
    max_seq_length: int = Field(1024, ge=2, description="Tokens in a sequence")
    packing: bool = Field(True, description="Fill sequences with several documents, isolated from each other")
    long_examples: Literal["drop", "truncate", "error"] = Field(
        "drop", description="What happens to a chat or prompt_completion example over max_seq_length"
    )
    empty_rows: Literal["skip", "error"] = Field("skip", description="What happens to a null or empty row")
    preprocessing_num_workers: int | None = Field(
        None, ge=1, description="Tokenizing processes; unset, all cores"
    )
    cache_dir: str | None = Field(None, description="Token cache; unset, $DSTRAIN_CACHE or ~/.cache/dstrain")


class Train(_Section):
    max_steps: int | None = Field(None, ge=1, description="Optimizer steps; unset, num_train_epochs decides")
    num_train_epochs: float = Field(1.0, gt=0, description="Passes over the training data")
    train_micro_batch_size_per_gpu: int = Field(1, ge=1, description="Sequences per device and forward pass")
    gradient_accumulation_steps: int | None = Field(
        None, ge=1, description="Micro batches per optimizer step"
    )
    global_batch_size: int | None = Field(
        None, ge=1, description="Sequences per optimizer step over all devices"
    )
    global_batch_tokens: int | None = Field(None, ge=1, description="The same in tokens, padding counted")
    learning_rate: float = Field(2e-5, gt=0, description="Peak learning rate")
    lr_scheduler_type: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "cosine", description="Schedule's shape"
    )
    warmup_ratio: float = Field(0.0, ge=0, le=1, description="Warm-up as a share of all steps")
    warmup_steps: int | None = Field(None, ge=0, description="Warm-up in steps; overrides warmup_ratio")
    decay_ratio: float = Field(0.2, gt=0, le=1, description="Share of all steps in which `wsd` decays")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Learning rate of the last step over the peak")
    weight_decay: float = Field(
        0.0, ge=0, description="AdamW's decay of matrices; norms and biases have none"
    )
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's first moment")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="AdamW's second moment")
    adam_epsilon: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    gradient_clipping: float | None = Field(
        1.0, gt=0, description="Largest norm of the whole gradient; null is off"
    )
    precision: Literal["bf16", "fp16", "fp32"] = Field(
        "bf16", description='What "auto" in the JSON stands for'
    )


class Eval(_Section):
    eval_steps: int | None = Field(
        None, ge=1, description="Steps between evaluations, beside the first and the last"
    )
    eval_micro_batch_size_per_gpu: int | None = Field(
        None, ge=1, description="Unset, the training micro batch"
    )


class Checkpoint(_Section):
    save_steps: int | None = Field(
        None, ge=1, description="Steps between checkpoints, beside the last step's"
    )
    save_total_limit: int | None = Field(2, ge=1, description="Checkpoints that are kept; null keeps all")
    resume_from_checkpoint: str = Field(
        "auto", description="`auto`, `never`, or an output folder or its step folder"
    )
    export: bool = Field(True, description="Write a Hugging Face folder after the last step")


class Logging(_Section):
    logging_steps: int = Field(1, ge=1, description="Steps between lines in metrics.jsonl and on the console")
    report_to: tuple[str, ...] = Field(
        (), description="Trackers of Accelerate: wandb, tensorboard, mlflow, ..."
    )
    project: str = Field("dstrain", description="Project name for the trackers")
    run_name: str | None = Field(
        None, description="Run name for the trackers; unset, the output folder's name"
    )
    sample_prompt: str | None = Field(None, description="Text that the trained model continues at the end")
    sample_tokens: int = Field(64, ge=1, description="Length of that continuation")


class Recipe(_Section):
    """All that decides what is trained."""

    output_dir: str = Field(description="Folder of the run, relative to the working directory")
    seed: int = Field(42, ge=0, description="Seed of the weights, the data order and dropout")
    deepspeed: str = Field(description="DeepSpeed JSON, beside the recipe or in ds_configs/")
    model: Model = Field(description="Model and tokenizer")
    data: Data = Field(description="Sources and how they become sequences")
    train: Train = Field(Train(), description="Batch, optimizer and schedule")
    eval: Eval = Field(Eval(), description="When to evaluate")
    checkpoint: Checkpoint = Field(Checkpoint(), description="When to save, what to keep, where to resume")
    logging: Logging = Field(Logging(), description="What is reported where")


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
    loader = _StrictLoader(text)
    loader.name = name
    try:
        return loader.get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        raise UserError(f"{where}: not valid YAML: {getattr(error, 'problem', error)}") from None


def option_names(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    """Yield the dotted name of every option, such as `train.learning_rate`; a source's once."""
    for name, field in model.model_fields.items():
        inner = Source if name in ("train", "eval") and model is Data else field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            if not (inner is Source and name == "eval"):
                yield from option_names(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a recipe, for editors."""
    body = Recipe.model_json_schema()
    source = body["$defs"]["Source"]
    for name in ("train", "eval"):
        shorthand = {"anyOf": [{"type": "string"}, source | {"type": "object"}]}
        field = body["$defs"]["Data"]["properties"][name]
        kept = {key: value for key, value in field.items() if key in ("description", "title")}
        field.clear()
        field.update(kept, anyOf=[*shorthand["anyOf"], {"type": "array", "items": shorthand}])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **body}


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
