"""The optimizer and scheduler blocks of a DeepSpeed JSON: what they mean here, what the recipe fills in."""

from dataclasses import dataclass
from typing import Any

from dstrain.ds_fill import Settings, show
from dstrain.errors import UserError, nearest

# Parameters that each optimizer's class takes, by DeepSpeed's choice of class. A test compares them.
_ADAMW = {"lr", "betas", "eps", "weight_decay"}
_TORCH = {"lr", "weight_decay", "foreach", "maximize", "differentiable"}
OPTIMIZER_PARAMS: dict[str, dict[str, set[str]]] = {
    "adam": {
        "torch": _ADAMW | _TORCH | {"amsgrad", "capturable", "fused"},
        "cpu": _ADAMW | {"bias_correction", "amsgrad", "fp32_optimizer_states"},
        "fused": _ADAMW | {"bias_correction", "amsgrad", "set_grad_none"},
    },
    "lion": {
        "cpu": {"lr", "betas", "weight_decay", "fp32_optimizer_states"},
        "fused": {"lr", "betas", "weight_decay", "set_grad_none"},
    },
    "adagrad": {
        "cpu": {"lr", "eps", "weight_decay", "amsgrad", "fp32_optimizer_states"},
        "torch": _TORCH | {"lr_decay", "initial_accumulator_value", "eps", "fused"},
    },
    "lamb": {"fused": _ADAMW | {"bias_correction", "eps_inside_sqrt", "max_coeff", "min_coeff", "amsgrad"}},
    # DeepSpeed splits these between Muon (matrices) and Adam (the rest).
    "muon": {"muon": _ADAMW | {"momentum", "ns_method", "muon_lr", "adam_lr"}},
    # torch.optim, by its exact name
    "SGD": {"torch": _TORCH | {"momentum", "dampening", "nesterov", "fused"}},
    "Adadelta": {"torch": _TORCH | {"rho", "eps", "capturable"}},
    "Adamax": {"torch": _TORCH | {"betas", "eps", "capturable"}},
    "NAdam": {"torch": _TORCH | {"betas", "eps", "momentum_decay", "decoupled_weight_decay", "capturable"}},
    "RAdam": {"torch": _TORCH | {"betas", "eps", "decoupled_weight_decay", "capturable"}},
    "RMSprop": {"torch": _TORCH | {"alpha", "eps", "momentum", "centered", "capturable"}},
}
OPTIMIZER_PARAMS["adamw"] = OPTIMIZER_PARAMS["adam"]
# Read by DeepSpeed itself before it makes the optimizer.
DEEPSPEED_PARAMS = {"adam": {"torch_adam", "adam_w_mode"}, "muon": {"torch_adam", "adam_w_mode"}}
DEEPSPEED_PARAMS["adamw"] = DEEPSPEED_PARAMS["adam"]

_NAMES = (
    "AdamW",
    "Adam",
    "Lion",
    "Adagrad",
    "Lamb",
    "Muon",
    *(name for name in OPTIMIZER_PARAMS if name[0].isupper()),
)
_REMOVED = ("onebitadam", "zerooneadam", "onebitlamb")
_MUP = ("muadam", "muadamw", "musgd")

# Type -> the schedule it is here, and its parameters.
_WARMUP = {"warmup_num_steps", "warmup_type", "last_batch_iteration"}
SCHEDULERS: dict[str, tuple[str, set[str]]] = {
    "WarmupLR": ("constant", _WARMUP | {"warmup_min_lr", "warmup_max_lr"}),
    "WarmupDecayLR": ("linear", _WARMUP | {"warmup_min_lr", "warmup_max_lr", "total_num_steps"}),
    "WarmupCosineLR": ("cosine", _WARMUP | {"warmup_min_ratio", "cos_min_ratio", "total_num_steps"}),
}
_OTHER_SCHEDULERS = {"LRRangeTest": "WarmupLR", "OneCycle": "WarmupCosineLR"}


def _number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float)


@dataclass(frozen=True)
class Optimizer:
    """The optimizer block, and the values in force."""

    block: dict
    learning_rate: float
    betas: tuple[float, float] | None  # None: this optimizer has none, or keeps its own default
    eps: float | None
    weight_decay: float
    ops: tuple[str, ...]
    notes: tuple[str, ...]


def resolve_optimizer(ds: dict, settings: Settings, *, offload: bool, on_cpu: bool) -> Optimizer:
    """Fill the optimizer block of `ds`; without one it is AdamW with the recipe's values.

    Raises:
        UserError: unknown or removed type, a parameter that the type does not take, a recipe value that it
            would ignore, a value given twice differently, or an optimizer that this device lacks.
    """
    block = dict(ds.get("optimizer") or {})
    params = dict(block.get("params") or {})
    written = block.get("type", "auto")
    kind = "adamw" if written == "auto" else _optimizer_kind(written, settings.ds_file)
    notes: tuple[str, ...] = ()
    adam = kind in ("adam", "adamw")
    if "max_grad_norm" in params:
        raise UserError(
            f"{settings.ds_file}: optimizer.params.max_grad_norm is not read by DeepSpeed; "
            "write gradient_clipping at the top level"
        )
    torch_fits = set(params) <= OPTIMIZER_PARAMS["adam"]["torch"] | {"adam_w_mode"}
    if (adam or kind == "muon") and "torch_adam" not in params and not offload:
        if (written == "auto" and torch_fits) or (kind == "muon" and on_cpu):
            params["torch_adam"] = True  # FusedAdam would be compiled first
        elif on_cpu and torch_fits:
            params["torch_adam"] = True
            notes = (f"{settings.ds_file}: optimizer {written} with torch_adam=true, as there is no GPU",)
        if adam and params.get("torch_adam") is True and "foreach" not in params:
            params.setdefault("fused", True)  # one pass over the memory: 8 ms in place of 65 for 4M on a CPU

    variant = _variant(kind, torch_adam=params.get("torch_adam") is True, offload=offload)
    if params.get("lr", "auto") == "auto":  # the JSON may say it in the other block
        params["lr"] = settings.pick(ds, "scheduler.params.warmup_max_lr", "train.learning_rate")
    values = _fill_params(params, kind, written, OPTIMIZER_PARAMS[kind][variant], settings)
    block |= {"type": "AdamW" if written == "auto" else written, "params": params}
    return Optimizer(
        block=block, ops=_ops(kind, variant, params, offload, on_cpu, settings), notes=notes, **values
    )


def _optimizer_kind(written: str, file: str) -> str:
    lower = written.lower()
    if lower in _REMOVED:
        raise UserError(
            f"{file}: optimizer.type={written}: DeepSpeed has removed the 1-bit optimizers; write AdamW"
        )
    if lower in _MUP:
        raise UserError(
            f"{file}: optimizer.type={written} needs a model built by mup and is not supported; write AdamW"
        )
    kind = lower if lower in OPTIMIZER_PARAMS else written
    if kind not in OPTIMIZER_PARAMS:
        hint = nearest(lower, [name.lower() for name in _NAMES])
        right = next((name for name in _NAMES if hint.endswith(f"'{name.lower()}'?")), None)
        suffix = f"; did you mean {right!r}?" if right else f"; valid: {', '.join(_NAMES)}"
        raise UserError(f"{file}: unknown optimizer.type={written}{suffix}")
    return kind


def _variant(kind: str, *, torch_adam: bool, offload: bool) -> str:
    """Return which class DeepSpeed makes: its own for the CPU or for the GPU, or torch's."""
    variants = OPTIMIZER_PARAMS[kind]
    if torch_adam and "torch" in variants:
        return "torch"
    if offload and "cpu" in variants:
        return "cpu"
    return next(name for name in ("fused", "torch", "muon") if name in variants)


def _fill_params(
    params: dict, kind: str, written: str, accepted: set[str], settings: Settings
) -> dict[str, Any]:
    """Fill `params` in place by the ownership rule and return the values in force."""
    v = settings.values
    recipe: dict[str, tuple[Any, tuple[str, ...]]] = {
        "lr": (v["train.learning_rate"], ("train.learning_rate",)),
        "betas": ([v["train.adam_beta1"], v["train.adam_beta2"]], ("train.adam_beta1", "train.adam_beta2")),
        "eps": (v["train.adam_epsilon"], ("train.adam_epsilon",)),
        "weight_decay": (v["train.weight_decay"], ("train.weight_decay",)),
    }
    for name, (value, keys) in recipe.items():
        given = [key for key in keys if settings.given(key)]
        literal = params.get(name, "auto")
        if name not in accepted:
            if given:
                raise UserError(
                    f"{settings.recipe_file}: {given[0]}={show(v[given[0]])} has no effect: "
                    f"optimizer.type={written} of {settings.ds_file} takes no {name}; remove it"
                )
            if literal == "auto":
                params.pop(name, None)
        elif literal != "auto":
            _check_literal(name, literal, settings, given)
        elif name in params or given or name in ("lr", "weight_decay") or kind in ("adam", "adamw", "muon"):
            params[name] = value
    valid = accepted | DEEPSPEED_PARAMS.get(kind, set())
    for name in params:
        if name not in valid:
            raise UserError(
                f"{settings.ds_file}: optimizer.type={written} takes no parameter {name!r} here"
                f"{nearest(name, valid)}"
            )
    betas = params.get("betas")
    return {
        "learning_rate": params["lr"],
        "betas": tuple(betas) if betas is not None else None,
        "eps": params.get("eps"),
        "weight_decay": params["weight_decay"],
    }


def _check_literal(name: str, literal: Any, settings: Settings, given: list[str]) -> None:
    path = f"optimizer.params.{name}"
    if name == "betas":
        if not (
            isinstance(literal, list | tuple) and len(literal) == 2 and all(_number(beta) for beta in literal)
        ):
            raise UserError(f"{settings.ds_file}: {path}={show(literal)} is not a list of two numbers")
        for i, key in enumerate(("train.adam_beta1", "train.adam_beta2")):
            if key in given and settings.values[key] != literal[i]:
                raise settings.conflict(f"{path}[{i}]", literal[i], key)
        return
    if not _number(literal):
        raise UserError(f"{settings.ds_file}: {path}={literal!r} is not a number")
    for key in given:
        if settings.values[key] != literal:
            raise settings.conflict(path, literal, key)


def _ops(
    kind: str, variant: str, params: dict, offload: bool, on_cpu: bool, settings: Settings
) -> tuple[str, ...]:
    if variant == "muon":  # its auxiliary Adam
        variant = "torch" if params.get("torch_adam") is True else "cpu" if offload else "fused"
    if variant == "torch":
        return ()
    op = f"{variant}_{'adam' if kind in ('adamw', 'muon') else kind}"
    if on_cpu and op in ("fused_lion", "fused_lamb"):
        raise UserError(
            f"{settings.ds_file}: optimizer.type={_pretty(kind)} without offload needs a GPU; set "
            "zero_optimization.offload_optimizer.device=cpu (Lion) or optimizer.type=AdamW"
        )
    return (op,)


def _pretty(kind: str) -> str:
    return next(name for name in _NAMES if name.lower() == kind)


@dataclass(frozen=True)
class Schedule:
    """The schedule that the scheduler block or the recipe asks for."""

    lr_scheduler_type: str
    warmup_steps: int  # these first, then warmup_ratio of all steps: one of the two is 0
    warmup_ratio: float
    min_lr_ratio: float
    notes: tuple[str, ...]


def resolve_schedule(ds: dict, settings: Settings, learning_rate: float) -> Schedule:
    """Map a scheduler block to the recipe's schedule; without one the recipe's own is returned.

    Raises:
        UserError: a type or parameter that has no counterpart here, or a value given twice differently.
    """
    file, v = settings.ds_file, settings.values
    steps, ratio = v["train.warmup_steps"], v["train.warmup_ratio"]
    min_lr_ratio, name, notes = v["train.min_lr_ratio"], v["train.lr_scheduler_type"], ()
    block = ds.get("scheduler") or {}
    params = block.get("params") or {}
    written = block.get("type", "auto")
    if written != "auto":
        name = _scheduler_name(written, settings)
        _check_scheduler_params(written, params, settings, learning_rate)
        literal = params.get("warmup_num_steps", "auto")
        if literal != "auto":
            for key in ("train.warmup_steps", "train.warmup_ratio"):
                if (
                    settings.given(key)
                    and v[key] is not None
                    and (key.endswith("ratio") or v[key] != literal)
                ):
                    raise settings.conflict("scheduler.params.warmup_num_steps", literal, key)
            steps = int(literal)
        if "cos_min_ratio" in params:
            min_lr_ratio = settings.pick(ds, "scheduler.params.cos_min_ratio", "train.min_lr_ratio")
        warmup = f"{steps} steps" if steps is not None else f"warmup_ratio {ratio}"
        shape = (
            "a linear warm-up, not DeepSpeed's logarithmic one"
            if _logarithmic(params)
            else "a linear warm-up"
        )
        notes = (f"{file}: scheduler {written} -> lr_scheduler_type {name} with {shape} ({warmup})",)
    elif params:
        raise UserError(f"{file}: scheduler has params but no type; valid: {', '.join(SCHEDULERS)}")
    return Schedule(name, steps or 0, ratio if steps is None else 0.0, min_lr_ratio, notes)


def _logarithmic(params: dict) -> bool:
    return params.get("warmup_type") == "log"


def _scheduler_name(written: str, settings: Settings) -> str:
    if written in _OTHER_SCHEDULERS:
        raise UserError(
            f"{settings.ds_file}: scheduler.type={written} has no counterpart here; write "
            f"{_OTHER_SCHEDULERS[written]}, or remove the block and set train.lr_scheduler_type in "
            f"{settings.recipe_file}"
        )
    if written not in SCHEDULERS:
        raise UserError(f"{settings.ds_file}: unknown scheduler.type={written}{nearest(written, SCHEDULERS)}")
    name = SCHEDULERS[written][0]
    if settings.given("train.lr_scheduler_type") and settings.values["train.lr_scheduler_type"] != name:
        raise settings.conflict("scheduler.type", f"{written} ({name})", "train.lr_scheduler_type")
    return name


def _check_scheduler_params(written: str, params: dict, settings: Settings, learning_rate: float) -> None:
    file, accepted = settings.ds_file, SCHEDULERS[written][1]
    only = {
        "warmup_min_lr": (0,),
        "warmup_min_ratio": (0,),
        "last_batch_iteration": (-1,),
        "warmup_type": ("linear", "log"),
    }
    for name, literal in params.items():
        path = f"scheduler.params.{name}"
        if name not in accepted:
            raise UserError(
                f"{file}: scheduler.type={written} takes no parameter {name!r}{nearest(name, accepted)}"
            )
        if literal == "auto":
            continue
        if name in only:
            if literal not in only[name]:
                valid = " or ".join(str(value) for value in only[name])
                raise UserError(f"{file}: {path}={show(literal)}: only {valid} is supported here")
        elif not _number(literal) or (name.endswith("num_steps") and (literal % 1 or literal < 0)):
            raise UserError(f"{file}: {path}={literal!r} is not a number of steps or a rate")
    peak = params.get("warmup_max_lr", "auto")
    if peak != "auto" and peak != learning_rate:
        raise UserError(
            f"{file}: scheduler.params.warmup_max_lr={peak} but optimizer.params.lr={learning_rate}; "
            'make them equal or write "auto"'
        )
    total = params.get("total_num_steps", "auto")
    max_steps = settings.values["train.max_steps"]
    if total != "auto" and total != max_steps:
        raise UserError(
            f"{file}: scheduler.params.total_num_steps={total} but {settings.recipe_file}: train.max_steps="
            f'{show(max_steps)}; make them equal, or write "auto" in the JSON'
        )
