"""Where the time of a run went: data, ranks that differ, transfers, saves.

Utilization is MFU where the device's peak is known. Elsewhere it is the share of the time in which ranks
compute: a step's time without waiting for data and without collectives, over steps and stalls of saves.
Evaluation is not counted.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from dstrain.diagnose.learning import row_steps
from dstrain.diagnose.run import Finding, Run

# Tokenized data comes from memory-mapped files; more than a few percent of waiting is a fault.
DATA_SHARE = 0.15
# Equal ranks of one kind of device differ by some percent. It must also cost a tenth of the step.
SLOWER = 1.25
SLOWER_BESIDE = 1.5  # CPU ranks of one host take turns on its cores, and with all else that runs there
STRAGGLER_SHARE = 0.10
SAME_RANK = 0.6  # of the rows, by weight: another rank each time is noise and no straggler
# Overlapped communication on a fitting interconnect stays below a tenth or two.
COLLECTIVE_SHARE = 0.30
# A save in the background stalls for a copy.
STALL_SHARE = 0.10
UTILIZATION = 0.70
GOOD_MFU = 0.50  # what well-tuned dense runs reach; 70 % of it is asked for
_LEAST_STEPS = 5  # after the first row, which holds what happens once


@dataclass(frozen=True)
class Times:
    """Seconds over all rows but the first."""

    steps: int
    step: float
    busy: float  # neither waiting for data nor in a collective, the mean over ranks
    data: float  # waiting for data, of the rank that waits longest in each row
    transfer: float  # in collectives, of the rank that waits least for others
    stall: float

    @property
    def wall(self) -> float:
        """Steps and stalls."""
        return self.step + self.stall

    @property
    def waiting(self) -> float:
        """In collectives, for ranks that compute longer."""
        return max(self.step - self.busy - self.data - self.transfer, 0.0)

    @property
    def computing(self) -> float:
        """Share of the time in which the mean rank computes."""
        return self.busy / self.wall if self.wall else 0.0


def times(run: Run) -> Times | None:
    """Return where the time went; None for a run of too few steps."""
    rows = [
        (row, count) for row, count in zip(run.rows, row_steps(run), strict=True) if "step_time_s" in row
    ][1:]
    steps = sum(count for _, count in rows)
    if steps < _LEAST_STEPS:
        return None

    def total(*keys: str) -> float:
        return sum(next((row[key] for key in keys if key in row), 0.0) * count for row, count in rows)

    return Times(
        steps,
        total("step_time_s"),
        total("busy_s", "step_time_s"),  # not in rows of earlier versions
        total("data_wait_max_s", "data_wait_s"),
        total("collective_min_s", "collective_s"),
        sum(row.get("checkpoint_stall_s", 0.0) for row, _ in rows),
    )


def look(run: Run) -> list[Finding]:
    """Return what made the run slow."""
    spent = times(run)
    if spent is None or not spent.step:
        return []
    found = [_data(run, spent), _straggler(run, spent), _collectives(run, spent), _stalls(run, spent)]
    return [one for one in (*found, _utilization(run, spent, [f for f in found if f])) if one]


def _score(share: float) -> float:
    """Return a score below those of failures and of learning, by the share of the time that is lost."""
    return 0.3 + 0.4 * min(share, 1.0)


def _data(run: Run, spent: Times) -> Finding | None:
    share = spent.data / spent.step
    if share < DATA_SHARE:
        return None
    per, whole = spent.data / spent.steps, spent.step / spent.steps
    evidence = [
        f"{share:.0%} of a step is waiting for data: {per:.3f} of {whole:.3f} s, over {spent.steps} steps"
    ]
    ranks = Counter(row["data_wait_max_rank"] for row in run.rows[1:] if "data_wait_max_rank" in row)
    if ranks:
        rank, count = ranks.most_common(1)[0]
        evidence.append(f"{run.host(int(rank))} waits longest in {count} of {sum(ranks.values())} rows")
    changes = (
        "look whether other jobs use the host's processor or disk",
        "data.cache_dir on a local disk: tokens are read from there as they are needed",
        "data.packing=true: fewer rows and no padding",
    )
    return Finding("data", _score(share), "slow data loading", tuple(evidence), changes)


def _straggler(run: Run, spent: Times) -> Finding | None:
    votes: Counter[int] = Counter()
    busy = others = 0.0
    rows = [(r, n) for r, n in zip(run.rows, row_steps(run), strict=True) if "busy_max_rank" in r][1:]
    for row, count in rows:
        votes[int(row["busy_max_rank"])] += count
        busy, others = busy + row["busy_max_s"] * count, others + row["busy_others_s"] * count
    if not votes or not others:
        return None
    (rank, votes_won), steps = votes.most_common(1)[0], sum(votes.values())
    lost = (busy - others) / spent.step
    on_cpu = run.facts.get("device") == "cpu"
    beside = on_cpu and len(set(run.facts.get("hosts") or [])) == 1
    if (
        busy / others < (SLOWER_BESIDE if beside else SLOWER)
        or lost < STRAGGLER_SHARE
        or votes_won / steps < SAME_RANK
    ):
        return None
    evidence = [
        f"{run.host(rank)} is busy for {busy / steps:.3f} s a step, the others for {others / steps:.3f} s: "
        f"{busy / others:.2f} times as long, slowest in {votes_won} of {steps} steps",
        f"each of the others waits for it in collectives, {lost:.0%} of a step",
    ]
    tools = "`top`" if on_cpu else "`nvidia-smi -q -d PERFORMANCE`, `top`"
    changes = (
        f"look on that host for another job, heat, a power limit, fewer cores: {tools}",
        *([] if beside else [
            "`python -m dstrain doctor --hostfile FILE` compares the hosts",
            "start without that host: the run goes on from its checkpoint on any number of ranks",
        ]),
    )  # fmt: skip
    return Finding(
        "straggler", _score(lost), f"{run.host(rank)} is slower than the others", tuple(evidence), changes
    )


def _collectives(run: Run, spent: Times) -> Finding | None:
    share = spent.transfer / spent.step
    if share < COLLECTIVE_SHARE:
        return None
    stage, gas = run.facts.get("zero_stage"), run.facts.get("gas")
    evidence = (
        f"{share:.0%} of a step is in collectives, on the rank that waits least for others: "
        f"{spent.transfer / spent.steps:.3f} of {spent.step / spent.steps:.3f} s",
        f"ZeRO {stage}, {gas} micro batches a step, {run.facts.get('dp')} ranks on "
        f"{len(set(run.facts.get('hosts') or [1]))} host(s)",
    )
    changes = [
        "`python -m dstrain doctor` measures the bandwidth and compares it with what the link should give",
        "a larger train.train_micro_batch_size_per_gpu or train.gradient_accumulation_steps: more work each",
    ]
    if stage == 3:
        changes.insert(1, "--zero_stage 2, if it fits: a third less to transfer")
    elif not run.ds.get("zero_optimization", {}).get("overlap_comm"):
        changes.append("--deepspeed_config zero2_overlap.json: reduces while the backward pass goes on")
    changes.append("fewer ranks: a small model does not gain from many")
    return Finding("communication", _score(share), "communication takes too long", evidence, tuple(changes))


def _stalls(run: Run, spent: Times) -> Finding | None:
    share = spent.stall / spent.wall
    if share < STALL_SHARE:
        return None
    saves = [row for row in run.rows[1:] if row.get("checkpoint_stall_s")]
    worst = max(saves, key=lambda row: row["checkpoint_stall_s"])
    evidence = (
        f"{share:.0%} of the time is waiting for saves: {spent.stall:.1f} s in {len(saves)} rows with saves",
        f"the longest {worst['checkpoint_stall_s']:.2f} s before step {worst['step']}, of "
        f"{worst.get('checkpoint_gib', 0):.2f} GiB",
    )
    every = run.options.get("checkpoint.save_steps")
    changes = [f"checkpoint.save_steps={every * 4}, in place of {every}"] if every else []
    if run.options.get("checkpoint.async_save") is False:
        changes.insert(0, "checkpoint.async_save=true: training waits for a copy in memory alone")
    changes.append("output_dir on a faster disk: a save waits until the one before it is written")
    return Finding("checkpoint", _score(share), "checkpoints stall training", evidence, tuple(changes))


def _utilization(run: Run, spent: Times, causes: list[Any]) -> Finding | None:
    rates = [row["mfu"] for row in run.rows[1:] if "mfu" in row]
    goal = UTILIZATION * GOOD_MFU if rates else UTILIZATION
    level = sum(rates) / len(rates) if rates else spent.computing
    if level >= goal:
        return None
    parts = {
        "waiting for data": spent.data,
        "transfers": spent.transfer,
        "waiting for slower ranks": spent.waiting,
        "stalls of saves": spent.stall,
    }
    listed = ", ".join(f"{name} {seconds / spent.wall:.0%}" for name, seconds in parts.items())
    what = f"MFU {level:.0%}" if rates else f"ranks compute in {level:.0%} of the time"
    asked = f"{goal:.0%} is asked for: 70 % of what tuned runs reach" if rates else f"{goal:.0%} is asked for"
    evidence = (f"{what}; {asked}", f"computing {spent.computing:.0%}, {listed}; means over the ranks")
    if causes:
        changes = [f"see: {', '.join(cause.title for cause in causes)}"]
    else:
        changes = [
            "a larger train.train_micro_batch_size_per_gpu, up to what memory holds",
            "data.packing=true; model.attn_implementation=flash_attention_2",
            "model.gradient_checkpointing=false, if it fits",
        ]
    lost = 1 - level / goal
    score = min([_score(lost) - 0.1, *(cause.score - 0.01 for cause in causes)])
    return Finding("utilization", score, "low utilization", evidence, tuple(changes))
