"""What a command line asks for: recipe, DeepSpeed config, tokenizer, model config. No weights, no data."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain import config, ds_config, model, run_folder
from dstrain.errors import UserError

LIBRARY = Path(__file__).resolve().parents[1] / "ds_configs"


@dataclass(frozen=True)
class Request:
    """A recipe and what follows from it on a number of data-parallel ranks."""

    recipe: config.Recipe
    ds_file: Path
    ds_json: dict[str, Any]  # as given
    ds: ds_config.Resolved
    dp_size: int  # fewer than asked for where a run that goes on cannot use all with its global batch
    origin: model.Origin
    tokenizer: Any
    model_config: Any
    rows: int  # of the embedding

    @property
    def options(self) -> dict[str, Any]:
        """All that decides the losses, flat: the recipe's options and the values in force."""
        return config.flat(self.recipe) | self.ds.in_force

    def keep(self, output_dir: Path) -> None:
        """Write what makes the output folder a recipe that reruns, and what a resume is compared with.

        Raises UserError for a run that a launcher has started again too often.
        """
        run_folder.guard_restarts(output_dir)
        saved = config.dump_recipe(self.recipe, output_dir=str(output_dir), deepspeed="ds_config.json")
        run_folder.describe(output_dir, self.options, saved, self.ds_json, self.ds.config)

    def describe(
        self, parameters: int, max_steps: int, epoch_steps: float, warmup_steps: int
    ) -> dict[str, str]:
        """Return lines for the header of a run. epoch_steps: steps in a pass over the data."""
        ds, tokens = self.ds, self.ds.global_batch * self.recipe.data.max_seq_length
        warm_up = f"{warmup_steps} warm-up steps"
        warm_up += ": the peak is not reached" if warmup_steps > max_steps else ""
        checkpointing = ", gradient checkpointing" if ds.gradient_checkpointing else ""
        return {
            "model": f"{self.origin.title} ({self.model_config.model_type}), {parameters:,} parameters",
            "batch": f"{ds.micro} micro x {ds.gas} gas x {self.dp_size} dp = {ds.global_batch} sequences"
            f" = {tokens:,} tokens",
            "steps": f"{max_steps:,} = {max_steps / epoch_steps:.2f} epochs = {max_steps * tokens:,} tokens",
            "schedule": f"{ds.lr_scheduler_type}, peak lr {ds.learning_rate:g}, {warm_up}",
            "deepspeed": f"ZeRO {ds.zero_stage}, {ds.precision}, {self.ds_file.name}{checkpointing}",
        }


def load(
    recipe_file: str | Path,
    overrides: Sequence[str] = (),
    deepspeed_config: str | None = None,
    zero_stage: int | None = None,
    precision: str | None = None,
    *,
    dp_size: int,
    on_cpu: bool,
) -> Request:
    """Read a recipe with its overrides, find its DeepSpeed JSON, and fill the one from the other.

    deepspeed_config, zero_stage, precision: name a JSON in place of the recipe's. Raises UserError for what
    is wrong in any of them, and for a tokenizer or model config that cannot be found.
    """
    recipe, ds_overrides = config.load_recipe(recipe_file, overrides)
    ds_file, ds_json = ds_config.choose(
        *(recipe.deepspeed, deepspeed_config, zero_stage, precision, ds_overrides),
        recipe_dir=config.recipe_file(recipe_file).resolve().parent,
        library_dir=LIBRARY,
    )
    own = recipe.model
    origin = model.Origin(own.model_name_or_path, own.revision, own.trust_remote_code)
    tokenizer = model.load_tokenizer(origin, own.tokenizer_name_or_path, own.chat_template, own.add_tokens)
    model_config = model.load_config(origin, own.config, tokenizer)
    rows = model.vocabulary_rows(model_config, tokenizer, own.add_tokens, own.pad_to_multiple_of)

    def resolve(json: dict[str, Any], values: dict[str, Any], ranks: int) -> ds_config.Resolved:
        return ds_config.resolve(
            json,
            ds_file=str(ds_file),
            recipe_file=str(recipe_file),
            values=values,
            explicit=config.explicit_keys(recipe),
            dp_size=ranks,
            hidden_size=model_config.get_text_config().hidden_size,
            on_cpu=on_cpu,
        )

    values = config.flat(recipe)
    held = run_folder.held_batch(Path(recipe.output_dir).expanduser(), values, ds_json)
    try:
        resolved = resolve(ds_json, values, dp_size)
    except UserError:
        if held is None:
            raise
        resolved = None
    if held is not None and (resolved is None or resolved.global_batch != held):
        dp_size = max(ranks for ranks in range(1, dp_size + 1) if held % ranks == 0)
        resolved = resolve(*_with_batch(ds_json, values, held, dp_size), dp_size)
    assert resolved is not None
    return Request(recipe, ds_file, ds_json, resolved, dp_size, origin, tokenizer, model_config, rows)


def _with_batch(
    ds_json: dict[str, Any], values: dict[str, Any], total: int, ranks: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return JSON and values that ask for a global batch, with micro batches no larger than before."""
    literal = ds_json.get("train_micro_batch_size_per_gpu", "auto")
    most = values["train.train_micro_batch_size_per_gpu"] if literal == "auto" else literal
    micro = max(size for size in range(1, most + 1) if total // ranks % size == 0)
    batch = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": total // (ranks * micro)}
    recipe = {f"train.{key}": value for key, value in batch.items()}
    recipe |= {"train.global_batch_size": total, "train.global_batch_tokens": None}
    return ds_json | batch | {"train_batch_size": total}, values | recipe
