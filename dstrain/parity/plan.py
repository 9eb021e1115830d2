"""Which configurations of one recipe to compare."""

import math
from collections.abc import Sequence
from pathlib import Path

from dstrain import distributed, request
from dstrain.errors import UserError, nearest
from dstrain.parity import Case

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def cases(
    recipe_file: Path,
    overrides: Sequence[str],
    stages: Sequence[str],
    precisions: Sequence[str],
    ranks: Sequence[str],
    steps: int,
) -> list[Case]:
    """Return a case for each stage, precision and number of ranks that divides the recipe's global batch.

    stages: of 0, 1, 2, 3 and `own`, the recipe's JSON as it is. precisions: of bf16, fp32 and `own`. Raises
    UserError for another value, and as train.py does for mistakes in the recipe.
    """
    for values, valid, option in (
        (stages, ("own", "0", "1", "2", "3"), "--stages"),
        (precisions, ("own", "bf16", "fp32"), "--precisions"),
    ):
        for value in values:
            if value not in valid:
                raise UserError(f"{option}={value}: not one of {', '.join(valid)}{nearest(value, valid)}")
    if wrong := [value for value in ranks if not value.isdecimal() or value == "0"]:
        raise UserError(f"--ranks={wrong[0]}: not a number of ranks")
    own = request.load(recipe_file, overrides, dp_size=1, on_cpu=distributed.on_cpu())
    found = []
    for stage in stages:
        for precision in precisions:
            for count in map(int, ranks):
                if own.ds.global_batch % count:
                    continue
                micro = math.gcd(own.ds.micro, own.ds.global_batch // count)
                batch = [
                    f"train.global_batch_size={own.ds.global_batch}",
                    f"train.train_micro_batch_size_per_gpu={micro}",
                    f"train.max_steps={steps}",
                    "train.gradient_accumulation_steps=null",
                    "train.global_batch_tokens=null",
                    *(f"deepspeed.{key}=auto" for key in _BATCH),
                ]
                how = ["--zero_stage", stage] if stage != "own" else []
                how += ["--precision", precision] if precision != "own" else []
                name = own.ds_file.name if not how else " ".join(how).replace("--", "")
                found.append(Case(name, count, ("--config", str(recipe_file), *how, *overrides, *batch)))
    if not found:
        raise UserError(f"--ranks={','.join(ranks)}: none divides the global batch of {own.ds.global_batch}")
    return found
