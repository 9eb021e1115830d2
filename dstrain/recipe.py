"""The options of a recipe, and the tables made of them. What is trained, on what, for how long."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


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


def _without_weights(sources: tuple[Source, ...] | None) -> tuple[Source, ...] | None:
    if any("weight" in source.model_fields_set for source in sources or ()):
        raise ValueError("a held-out source has no weight: each example counts once")
    return sources


def _as_names(value: Any) -> Any:
    return () if value == "none" else (value,) if isinstance(value, str) else value


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
    add_tokens: tuple[str, ...] = Field(
        (), description="Special tokens that the tokenizer gets; the embedding grows by the mean of its rows"
    )
    pad_to_multiple_of: int | None = Field(
        None, ge=1, description="Grow the embedding to hold the tokenizer, to a multiple of this, such as 64"
    )
    chat_template: str | None = Field(
        None, description="Jinja file that replaces the tokenizer's chat template"
    )
    gradient_checkpointing: bool | None = Field(
        None, description="Recompute activations in the backward pass; unset, the JSON decides"
    )


class Data(_Section):
    train: Sources = Field(description="Training sources")
    eval: Annotated[Sources | None, AfterValidator(_without_weights)] = Field(
        None, description="Held-out sources; unset, nothing is evaluated"
    )
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
    init_timeout_seconds: float = Field(
        1800.0, gt=0, description="How long ranks wait at start-up, first steps, evaluation, saves and export"
    )
    train_timeout_seconds: float | None = Field(
        None, gt=0, description="The same for a step; unset, ten times the longest so far, at least 2 minutes"
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
    async_save: bool = Field(
        True, description="Write checkpoints in the background, from a copy in host memory"
    )
    save_optimizer: bool = Field(
        True, description="Save the optimizer's states; without them a run cannot be resumed exactly"
    )
    export: bool = Field(True, description="Write a Hugging Face folder after the last step")


class Logging(_Section):
    logging_steps: int = Field(1, ge=1, description="Steps between lines in metrics.jsonl and on the console")
    report_to: Annotated[tuple[str, ...], BeforeValidator(_as_names)] = Field(
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
    seed: int = Field(42, ge=0, lt=2**31, description="Seed of the weights, the data order and dropout")
    deepspeed: str = Field(description="DeepSpeed JSON, beside the recipe or in ds_configs/")
    model: Model = Field(description="Model and tokenizer")
    data: Data = Field(description="Sources and how they become sequences")
    train: Train = Field(Train(), description="Batch, optimizer and schedule")
    eval: Eval = Field(Eval(), description="When to evaluate")
    checkpoint: Checkpoint = Field(Checkpoint(), description="When to save, what to keep, where to resume")
    logging: Logging = Field(Logging(), description="What is reported where")


def option_names(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    """Yield the dotted name of every option, such as `train.learning_rate`; a source's once."""
    for name, field in model.model_fields.items():
        inner = Source if name in ("train", "eval") and model is Data else field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            if not (inner is Source and name == "eval"):
                yield from option_names(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def options_table(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the rows of a Markdown table of the options: key, default, meaning."""
    rows = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            rows += options_table(field.annotation, f"{prefix}{name}.")
            continue
        default = field.get_default(call_default_factory=True)
        shown = "required" if field.is_required() else f"`{yaml.safe_dump(_plain(default)).splitlines()[0]}`"
        rows.append(f"| `{prefix}{name}` | {shown} | {field.description} |")
    return rows


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


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
