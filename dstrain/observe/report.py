"""The loss curve of a run as a picture, from its metrics.jsonl."""

import json
from pathlib import Path


def plot_loss(output_dir: Path) -> None:
    """Draw `loss.png` from `metrics.jsonl`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [
        json.loads(line) for line in (output_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for key, style, label in (("loss", "-", "training"), ("eval_loss", "o-", "held-out")):
        points = [(row["step"], row[key]) for row in rows if key in row]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1.2, markersize=4)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=output_dir.name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(output_dir / "loss.png", dpi=120)
    plt.close(figure)
