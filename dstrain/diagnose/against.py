"""A run against a reference: where the curves part, by how much, and what differs between the two."""

from statistics import mean
from typing import Any

from dstrain.diagnose.run import Finding, Run

# What rounding explains, as a relative difference of one step's loss: as in the parity suite.
TOLERANCES = {"fp32": 1e-5, "bf16": 2e-3, "fp16": 2e-3}
# A lower precision that is used well ends within half a percent.
DROP = 0.005
_AFTER = 3  # rows in a row that must be apart, so that one noisy batch is no parting
_PATHS = (
    "output_dir",
    "deepspeed",
    "logging.",
    "checkpoint.",
    "data.cache_dir",
    "data.preprocessing",
    "train.max_steps",
)
# Options whose difference makes the steps of two runs incomparable.
_OTHER_TRAINING = ("seed", "data.train", "data.max", "data.packing", "model.", "in_force.global_batch")


def compare(run: Run, other: Run) -> dict[str, Any]:
    """Return steps in common, where the losses part, differences at the end, and all that differs."""
    ours, theirs = ({int(row["step"]): row["loss"] for row in one.rows} for one in (run, other))
    steps = sorted(ours.keys() & theirs.keys())
    kinds = [one.dtypes.get("compute") or one.dtypes.get("parameters", "fp32") for one in (run, other)]
    tolerance = max(TOLERANCES.get(kind, TOLERANCES["bf16"]) for kind in kinds)
    off = [(ours[step] - theirs[step]) / theirs[step] for step in steps]
    far = [abs(value) > tolerance for value in off]
    parted = next((n for n in range(len(far)) if all(far[n : n + _AFTER])), None)
    last = max(len(steps) // 10, 3)
    evals = dict(run.evals), dict(other.evals)
    return {
        "steps": steps,
        "tolerance": tolerance,
        "parted": steps[parted] if parted is not None else None,
        "off": off,
        "end": mean(off[-last:]) if off else 0.0,
        "ours_end": mean(ours[step] for step in steps[-last:]) if steps else None,
        "theirs_end": mean(theirs[step] for step in steps[-last:]) if steps else None,
        "evals": [
            (step, evals[0][step], evals[1][step]) for step in sorted(evals[0].keys() & evals[1].keys())
        ],
        "dtypes": _differences(run.dtypes, other.dtypes),
        "options": _differences(run.options, other.options),
        "ds": _differences(_leaves(run.ds), _leaves(other.ds)),
    }


def look(run: Run, other: Run) -> list[Finding]:
    """Return whether the run is worse than the reference `other`, or how they differ."""
    found = compare(run, other)
    if not found["steps"]:
        evidence = (f"rows up to step {run.last_step} here and {other.last_step} in {other.folder}",)
        return [Finding("different", 0.9, "no step in common with the reference", evidence, ())]
    evidence, worse = _curves(found), found["end"] > DROP
    if found["evals"]:
        step, ours, theirs = found["evals"][-1]
        worse = worse or ours / theirs - 1 > DROP
        evidence.append(
            f"held-out loss at step {step}: {ours:.4f} here, {theirs:.4f} there ({ours / theirs - 1:+.2%})"
        )
    elif run.evals or other.evals:
        evidence.append("no held-out loss at the same step")
    for name in ("dtypes", "options", "ds"):
        if listed := ", ".join(f"{key} {_brief(a)} here, {_brief(b)} there" for key, a, b in found[name][:8]):
            more = f", and {len(found[name]) - 8} more" if len(found[name]) > 8 else ""
            evidence.append(f"{name} that differ: {listed}{more}")
    if found["parted"] is None and not worse:
        return [Finding("different", 0.05, "no different from the reference", tuple(evidence), ())]
    incomparable = [key for key, *_ in found["options"] if key.startswith(_OTHER_TRAINING)]
    if incomparable:
        changes = (f"the same {', '.join(incomparable[:3])} in both: else steps cannot be compared",)
        title = "another training than the reference: steps cannot be compared one by one"
        return [Finding("different", 0.6, title, tuple(evidence), changes)]
    if not worse:
        title = f"apart from the reference from step {found['parted']} on, and no worse at the end"
        return [Finding("different", 0.3, title, tuple(evidence), ())]
    kind = "precision" if found["dtypes"] else "different"
    title = "precision lost against the reference" if found["dtypes"] else "worse than the reference"
    return [Finding(kind, 0.9, title, tuple(evidence), _changes(found))]


def _curves(found: dict[str, Any]) -> list[str]:
    off, steps = found["off"], found["steps"]
    most = max(range(len(off)), key=lambda n: abs(off[n]))
    lines = [
        f"{len(steps)} steps compared: off by {abs(off[0]):.1e} at step {steps[0]}, at most {off[most]:+.2%} "
        f"at step {steps[most]}; rounding explains {found['tolerance']:.0e}"
    ]
    if found["parted"] is not None:
        lines.append(f"they part at step {found['parted']}")
    lines.append(
        f"loss at the end {found['ours_end']:.4f} here, {found['theirs_end']:.4f} there ({found['end']:+.2%})"
    )
    return lines


def _changes(found: dict[str, Any]) -> tuple[str, ...]:
    ours = {key: here for key, here, _ in found["dtypes"]}
    changes = []
    if ours.get("master_weights", "fp32") != "fp32":
        changes.append("fp32 master weights: --precision bf16 has them; bf16 alone rounds small updates away")
    if ours.get("gradients", "fp32") != "fp32":
        changes.append("deepspeed.data_types.grad_accum_dtype=fp32 (ZeRO 1 to 3)")
    if ours.get("optimizer_states", "fp32") != "fp32":
        changes.append("optimizer states in fp32")
    if ours:
        changes.append(
            "--deepspeed_config zero2_fp32_grads.json, or --precision fp32 to see whether it is that"
        )
    keys = [key for name in ("options", "ds") for key, *_ in found[name]]
    others = [key for key in keys if not key.startswith(("bf16", "fp16", "data_types", "train.precision"))]
    if others and not ours:
        changes.append(f"one at a time, as the reference has it: {', '.join(dict.fromkeys(others))}")
    return tuple(changes)


def _differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    keys = [key for key in (ours | theirs) if not key.startswith(_PATHS)]
    return [(key, ours.get(key), theirs.get(key)) for key in keys if ours.get(key) != theirs.get(key)]


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _leaves(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, dict):
            found |= _leaves(inner, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = inner
    return found
