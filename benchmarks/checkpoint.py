"""How long a save holds training up: in the background and not, and how fast it writes.

    python benchmarks/checkpoint.py

The quickstart's model in a wider form, of about 400 MB a checkpoint, saved after every third step.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

from common import ROOT, Log, start

WIDE = ["hidden_size=512", "intermediate_size=1536", "num_hidden_layers=8"]
STEPS = 12


def measure(folder: Path, background: bool) -> tuple[list[float], float]:
    """Train with saves, and return the stalls in seconds and the size of a checkpoint in GiB."""
    how = [
        *(f"model.config.{size}" for size in WIDE),
        f"train.max_steps={STEPS}",
        "checkpoint.save_steps=3",
        "checkpoint.export=false",
        "logging.logging_steps=1",
    ]
    how += [f"checkpoint.async_save={str(background).lower()}", f"output_dir={folder}", "data.eval=null"]
    start([sys.executable, "train.py", "--config", "recipes/quickstart", *how], None)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    saves = [row for row in rows if "checkpoint_stall_s" in row]
    return [row["checkpoint_stall_s"] for row in saves], saves[0]["checkpoint_gib"]


def main() -> None:
    """Measure both in turn, twice, and write the log."""
    log = Log("checkpoint")
    stalls: dict[bool, list[float]] = {True: [], False: []}
    size = 0.0
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        for round_number in range(2):
            for background in (False, True):
                place = Path(folder) / f"{round_number}-{background}"
                own, size = measure(place, background)
                stalls[background] += own
    mean = {key: statistics.median(values) for key, values in stalls.items()}
    log.table(
        ("save", "stall, s", "saves", "GiB/s"),
        [
            ("synchronous", f"{mean[False]:.3f}", str(len(stalls[False])), f"{size / mean[False]:.2f}"),
            ("background", f"{mean[True]:.3f}", str(len(stalls[True])), ""),
        ],
    )
    log(f"a checkpoint is {size:.3f} GiB; medians of all saves")
    log.goal("synchronous stall / background stall", mean[False] / mean[True], 2.0)
    log.machine()


if __name__ == "__main__":
    main()
