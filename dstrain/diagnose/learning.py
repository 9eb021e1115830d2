"""What went wrong with what is learned: spikes, divergence, a loss that stays, fp16's scale, layers."""

import math
import re
from collections.abc import Sequence
from statistics import median
from typing import Any

from dstrain.diagnose.run import Finding, Run

# Nats. A batch's loss differs by some tenths from another's; half a nat for good is none of that.
_RISE = 0.5
# A loss above ln(vocabulary) is worse than guessing; one nat above it is no noise.
_WORSE_THAN_GUESSING = 1.0
# Rows and steps below which nobody can tell whether a loss falls.
_LEAST_ROWS, _LEAST_STEPS = 8, 20
# A loss has fallen when its end is below its beginning by this share and by twice the noise of a mean.
_FALL = 0.01
_NOISE = 2.0
# AdamW moves a weight by about the learning rate a step, so the sum of all rates bounds its way. Weights
# begin at about 0.02; a hundredth of that changes nothing yet.
_LEAST_WAY = 0.01
_INITIALIZER_RANGE = 0.02
# Below it the loss is of so few tokens that most of the compute is for nothing.
_FEW_LABELS = 0.05
# DeepSpeed begins at 2^16 and halves; a sound run loses a few of these halvings at its start.
_HALVINGS = 6
_SKIPPED_SHARE = 0.05  # a dynamic scale tries a doubling each 1,000 steps, and skips one step for it
_LOW_SCALE = 1.0
# Blocks of one model have gradients within about ten times of one another.
_APART = 100.0
_GREW = 10.0
_PLACES = 6


def look(run: Run) -> list[Finding]:
    """Return what is wrong with losses, scale and gradients."""
    diverged = _diverged(run)
    found = [diverged, _scale(run), *_layers(run), None if diverged else _spikes(run)]
    if not diverged:
        found += [_flat(run)]
    if not any(one and one.kind == "flat" for one in found):
        found.append(_few_labels(run))
    return [one for one in found if one]


def losses(run: Run) -> list[float]:
    """Return the logged training losses."""
    return [row["loss"] for row in run.rows]


def label_share(run: Run) -> float | None:
    """Return which share of the tokens is in the loss."""
    tokens = valid = 0
    before = run.rows[0]["tokens_seen"] if run.rows else 0
    for row in run.rows[1:]:
        tokens, valid = tokens + row["tokens_seen"] - before, valid + row["valid_tokens"]
        before = row["tokens_seen"]
    return valid / tokens if tokens > 0 else None


def _before(run: Run, step: int, key: str, many: int = 20) -> float | None:
    values = [row[key] for row in run.rows if row["step"] < step and key in row][-many:]
    return median(values) if values else None


def _documents(event: dict[str, Any]) -> str:
    lines = []
    for rank, places in enumerate(event.get("documents") or ()):
        more = f" and {len(places) - _PLACES} more" if len(places) > _PLACES else ""
        lines.append(f"rank {rank}: {', '.join(places[:_PLACES])}{more}")
    return "documents in the batch: " + "; ".join(lines[:4])


_LOWER = (
    "look at these documents, and take bad ones out of the data",
    "more train.warmup_steps, or a lower train.gradient_clipping",
    "a lower train.learning_rate",
)


def _diverged(run: Run) -> Finding | None:
    text = str((run.failure or {}).get("error", ""))
    if stopped := re.search(r"non-finite (loss|gradient) at step (\d+)[^;]*", text):
        step = int(stopped.group(2))
        evidence = [stopped.group(0), *_near(run, step)]
        if documents := re.search(r"Documents in the batch: (.*?)\. Look at", text):
            evidence.append(f"documents in the batch: {documents.group(1)}")
        changes = (*_LOWER[:2], _lower_rate(run), "bf16 or fp32 in place of fp16")
        return Finding(
            "diverged", 1.0, f"the {stopped.group(1)} became infinite or NaN", tuple(evidence), changes
        )
    values, guess = losses(run), _guess(run)
    if len(values) < 4:
        return None
    smooth = [median(values[max(0, n - 2) : n + 3]) for n in range(len(values))]
    tail = median(values[-max(3, len(values) // 10) :])
    low = min(range(len(smooth)), key=smooth.__getitem__)
    worse = guess is not None and max(smooth[1:]) > max(guess, smooth[0]) + _WORSE_THAN_GUESSING
    if not worse and tail < smooth[low] + _RISE:
        return None
    if worse and tail < min(values[0], guess or math.inf) - _RISE:  # it came back
        return None
    if worse:
        limit, begin = max(guess or 0.0, smooth[0]) + _WORSE_THAN_GUESSING, 0
    else:
        limit, begin = smooth[low] + _RISE, low
    start = next((n for n in range(begin, len(values)) if values[n] > limit), low)
    step = int(run.rows[start]["step"])
    evidence = [
        f"loss {values[0]:.3f} at step {run.rows[0]['step']}, best {min(values):.3f} at step "
        f"{run.rows[values.index(min(values))]['step']}, {tail:.3f} at the end, {max(values):.3f} at most",
        *_near(run, step),
    ]
    if worse:
        evidence.append(
            f"guessing among all tokens costs ln(vocabulary) = {guess:.3f}: it got worse than that"
        )
    evidence += [
        _documents(event) for event in run.events if event["event"] == "spike" and event["step"] == step
    ]
    changes = (*_LOWER[1:2], _lower_rate(run), "the documents at that step, if it happened at once")
    return Finding("diverged", 0.95, f"the loss diverged from step {step} on", tuple(evidence), changes)


def _near(run: Run, step: int) -> list[str]:
    """Return learning rate and gradient norms at a step."""
    row = next((row for row in run.rows if row["step"] >= step), None)
    if row is None:
        last = run.rows[-1:]
        return [
            f"before it, at step {r['step']}: lr {r['lr']:.2e}, gradient norm {r['grad_norm']:.3g} with a "
            f"median of {_before(run, step, 'grad_norm'):.3g}"
            for r in last
        ]
    usual, before = _before(run, step, "grad_norm"), [r for r in run.rows if r["step"] < step][-1:]
    line = f"at step {row['step']}: lr {row['lr']:.2e}, gradient norm {row['grad_norm']:.3g}"
    if usual is not None and before:
        line += f"; before it {before[0]['grad_norm']:.3g}, with a median of {usual:.3g}"
    return [line]


def _lower_rate(run: Run) -> str:
    rate = max((row["lr"] for row in run.rows), default=run.options.get("in_force.learning_rate"))
    return f"train.learning_rate={rate / 10:.0e} in place of {rate:.0e}" if rate else _LOWER[2]


def _guess(run: Run) -> float | None:
    return math.log(run.facts["vocab"]) if run.facts.get("vocab") else None


def _spikes(run: Run) -> Finding | None:
    events = [event for event in run.events if event["event"] == "spike"]
    high = [e for e in events if e["loss"] > e["loss_median"] + max(_RISE, 6 * e["loss_spread"])]
    steep = [e for e in events if e["grad_norm"] > _GREW * e["grad_norm_median"]]
    if not high and not steep:
        return None
    worst = max(high or steep, key=lambda event: event["loss"] - event["loss_median"])
    evidence = [
        f"step {worst['step']}: loss {worst['loss']:.3f}, the median of {worst['over']} steps before "
        f"{worst['loss_median']:.3f}; gradient norm {worst['grad_norm']:.3g}, before "
        f"{worst['grad_norm_median']:.3g}; lr {worst['lr']:.2e}",
        _documents(worst),
    ]
    others = [str(event["step"]) for event in high or steep if event is not worst]
    if others:
        evidence.append(f"as well at step{'s' * (len(others) > 1)} {', '.join(others[:10])}")
    title = f"loss spike at step {worst['step']}; it came back down"
    if not high:
        title = f"gradient spike at step {worst['step']}, which the loss does not show"
    return Finding("spike", 0.7 if high else 0.4, title, tuple(evidence), _LOWER)


def _flat(run: Run) -> Finding | None:
    values = losses(run)
    steps = run.last_step - int(run.rows[0]["step"]) + 1 if run.rows else 0
    if len(values) < _LEAST_ROWS or steps < _LEAST_STEPS:
        return None
    part = max(len(values) // 4, 3)
    head, tail = values[:part], values[-part:]
    fall = median(head) - median(tail)
    spread = median([abs(v - median(tail)) for v in tail]) * 1.48 / math.sqrt(part)
    evals = [loss for _, loss in run.evals]
    if len(evals) > 1 and evals[-1] < evals[0] * (1 - _FALL):
        return None
    if fall > max(_FALL * median(head), _NOISE * spread):
        return None
    guess, rates = _guess(run), [row["lr"] for row in run.rows]
    evidence = [
        f"loss {median(head):.4f} in the first quarter and {median(tail):.4f} in the last, of {steps} steps"
    ]
    if guess:
        evidence.append(f"guessing among all tokens costs ln(vocabulary) = {guess:.3f}")
    if len(evals) > 1:
        evidence.append(f"held-out loss {evals[0]:.4f} before and {evals[-1]:.4f} after")
    causes: list[tuple[str, str]] = []
    way = sum(rate * count for rate, count in zip(rates, row_steps(run), strict=True))
    size = run.facts.get("initializer_range") or _INITIALIZER_RANGE
    if way < _LEAST_WAY * size:
        causes.append(
            (
                f"the learning rates add up to {way:.1e}: weights of about {size:g} hardly moved",
                _raise_rate(run),
            )
        )
    share = label_share(run)
    if share is not None and share < _FEW_LABELS:
        causes.append((_share_words(share), _SHOW_MASK))
    kept = run.dtypes.get("master_weights", "fp32")
    if kept in ("bf16", "fp16"):
        causes.append(
            (
                f"no fp32 master weights: {kept} rounds small updates away",
                "--precision bf16, which has fp32 master weights",
            )
        )
    norms = [row["grad_norm"] for row in run.rows]
    if median(norms) < 1e-6:
        causes.append(
            (
                f"the gradient norm is {median(norms):.1e}: nothing is learned from",
                "what is frozen, and the mask",
            )
        )
    warmup = run.options.get("in_force.warmup_steps") or 0
    if run.last_step < warmup:
        causes.append(
            (f"step {run.last_step} is still in the warm-up of {warmup}", "wait, or fewer train.warmup_steps")
        )
    rate = f"learning rate {min(rates):.1e} to {max(rates):.1e}, gradient norm {median(norms):.3g}"
    evidence += [rate, *(why for why, _ in causes)]
    changes = [change for _, change in causes] or [
        f"train.learning_rate={max(rates) * 3:.0e}, and if that diverges {max(rates) / 3:.0e}",
        "look at the data with --dry-run: [[ ]] encloses what is in the loss",
    ]
    return Finding("flat", 0.85, "the loss does not fall", tuple(evidence), tuple(changes))


_SHOW_MASK = (
    "look at the mask: train.py --dry-run encloses what is in the loss in [[ ]]; format and template decide"
)


def _share_words(share: float) -> str:
    return f"only {share:.1%} of the tokens are in the loss"


def row_steps(run: Run) -> list[int]:
    """Return how many steps each row stands for."""
    before, found = 0, []
    for row in run.rows:
        found.append(max(int(row["step"]) - before, 1))
        before = int(row["step"])
    return found


def _raise_rate(run: Run) -> str:
    return (
        f"train.learning_rate: {max(row['lr'] for row in run.rows):.1e} is too small; new models take 1e-4 "
        "to 3e-3, saved ones 1e-6 to 1e-4"
    )


def _few_labels(run: Run) -> Finding | None:
    share = label_share(run)
    if share is None or share >= _FEW_LABELS:
        return None
    evidence = (_share_words(share), f"{median(row['valid_tokens'] for row in run.rows):.0f} tokens a row")
    changes = (_SHOW_MASK, "a larger global batch, so that a step has more of them")
    return Finding("few_labels", 0.5, "almost all labels are masked", evidence, changes)


def _scale(run: Run) -> Finding | None:
    scales = [(int(row["step"]), row["loss_scale"]) for row in run.rows if "loss_scale" in row]
    ended = "loss scale already at minimum" in str((run.failure or {}).get("error", ""))
    if not scales and not ended:
        return None
    skipped = sum(row.get("skipped_steps", 0) for row in run.rows)
    steps = max(sum(row_steps(run)), 1)
    late = sum(row.get("skipped_steps", 0) for row in run.rows[len(run.rows) // 2 :])
    late_steps = max(sum(row_steps(run)[len(run.rows) // 2 :]), 1)
    highest, lowest = max((s for _, s in scales), default=0), min((s for _, s in scales), default=0)
    fell = bool(scales) and scales[-1][1] <= max(highest / 2**_HALVINGS, _LOW_SCALE)
    if not ended and not (fell and late / late_steps > _SKIPPED_SHARE):
        return None
    evidence = [f"{skipped} of {steps} steps skipped, {late} of the last {late_steps}"]
    if scales:
        evidence.append(
            f"loss scale {highest:g} at first, {lowest:g} at the lowest, {scales[-1][1]:g} at the end"
        )
    if ended:
        evidence.append("DeepSpeed stopped: the scale was at its minimum")
    worst = [row["step"] for row in run.rows if row.get("skipped_steps")]
    if worst:
        evidence.append(f"skipped in the rows of steps {', '.join(map(str, worst[-10:]))}")
    changes = (
        "--precision bf16: it has the range of fp32 and no scale (Ampere and newer)",
        _lower_rate(run),
        "--precision fp32, if the device has no bf16",
    )
    return Finding("scale", 0.95, "the fp16 loss scale collapsed", tuple(evidence), changes)


def _layers(run: Run) -> list[Finding]:
    rows = [row for row in run.rows if any(key.startswith("layer_norm.") for key in row)]
    if large := _exploding(run, rows):
        return [large]  # beside it the others look dead
    small = _dead(run, rows)
    return [small] if small else []


def _dead(run: Run, rows: Sequence[dict[str, Any]]) -> Finding | None:
    if len(rows) < 2:
        return None
    half = rows[len(rows) // 2 :]
    evidence = []
    if all(row.get("dead_parameters") for row in half):
        last = half[-1]
        evidence.append(
            f"no gradient at all in {last['dead_parameters']} matrices, in every row looked at from step "
            f"{half[0]['step']} to {last['step']}: {last['dead_parameter_names']}"
        )
    norms = _norms(half)
    blocks = {name: value for name, value in norms.items() if re.search(r"\.\d+$", name)}
    usual = median(blocks.values()) if blocks else 0.0
    weak = {name: value for name, value in blocks.items() if value < usual / _APART}
    if weak:
        listed = ", ".join(f"{name} {value:.1e}" for name, value in list(weak.items())[:8])
        evidence.append(f"running mean of the gradient, norm: {listed}; the median layer has {usual:.1e}")
    if not evidence:
        return None
    names = list(weak) or [evidence[0].rpartition(": ")[2]]
    changes = (
        "what keeps it from the loss, or the gradient from it: a hook, a detach, weights that are zero",
        "weights of a checkpoint that lacked it: compare the names in model.safetensors with the model's",
        "experts that get no token: model.config.output_router_logits=true trains the balance",
    )
    return Finding("dead_layer", 0.8, f"no gradient in {', '.join(names[:4])}", tuple(evidence), changes)


def _exploding(run: Run, rows: Sequence[dict[str, Any]]) -> Finding | None:
    if len(rows) < 4:
        return None
    early, late = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    shares = _shares(late)
    grown, evidence = {}, []
    usual = median(row["grad_norm"] for row in early)
    high = [row for row in late if row["grad_norm"] > _GREW * usual > 0]
    if high:
        highest = max(high, key=lambda row: row["grad_norm"])
        shares, before = _shares(high), _shares([row for row in rows if row["step"] < high[0]["step"]])
        grown = {name: share for name, share in shares.items() if share > 0.5 > 1.5 * before.get(name, 1.0)}
        for name, share in grown.items():
            evidence.append(
                f"{name} makes {share:.0%} of the gradient, {before[name]:.0%} in the rows before; whole "
                f"norm {highest['grad_norm']:.3g} at step {highest['step']}, the median before {usual:.3g}"
            )
    norms = _norms(late)
    blocks = sorted(value for name, value in norms.items() if re.search(r"\.\d+$", name))
    level = median(blocks) if blocks else 0.0
    for name, value in norms.items():
        if name not in grown and value > _APART * level > 0 and shares[name] > 0.9:
            grown[name] = shares[name]
            evidence.append(f"{name} has a gradient of {value:.2e}; the median layer has {level:.2e}")
    if not grown:
        return None
    changes = (
        "train.gradient_clipping=1.0 if it is off",
        _lower_rate(run),
        "the weights of that layer: its initialization, or a damaged file that they came from",
    )
    return Finding(
        "exploding_layer", 0.85, f"exploding gradient in {', '.join(grown)}", tuple(evidence), changes
    )


def _norms(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the median norm of each layer."""
    names = [key for key in rows[-1] if key.startswith("layer_norm.")]
    return {key[len("layer_norm.") :]: median(row.get(key, 0.0) for row in rows) for key in names}


def _shares(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return which share of the whole gradient each layer has, the median over rows."""
    found: dict[str, list[float]] = {}
    for row in rows:
        values = {key[len("layer_norm.") :]: v for key, v in row.items() if key.startswith("layer_norm.")}
        whole = math.sqrt(sum(value**2 for value in values.values()))
        for name, value in values.items():
            found.setdefault(name, []).append((value / whole) ** 2 if whole else 0.0)
    return {name: median(values) for name, values in found.items()}
