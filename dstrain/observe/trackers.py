"""W&B, TensorBoard, MLflow and the others, through Accelerate's trackers. They never stop a run."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrain.errors import UserError, nearest


def check(names: Sequence[str]) -> None:
    """Raise UserError if a tracker is unknown or its package is not installed."""
    if not names:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    installed = {str(getattr(name, "value", name)) for name in get_available_trackers()}
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise UserError(
                f"logging.report_to={name!r}: unknown tracker{nearest(name, LOGGER_TYPE_TO_CLASS)}"
            )
        if name not in installed:
            raise UserError(f"logging.report_to={name!r}: its package is not installed (pip install {name})")


class Trackers:
    """The trackers of one run. On ranks other than the first it holds none."""

    def __init__(
        self,
        names: Sequence[str],
        project: str,
        run_name: str,
        output_dir: Path,
        config: Mapping[str, Any],
        wandb_id: str | None,
    ) -> None:
        """Start the trackers. wandb_id: the run to continue. config: flat, shown as hyperparameters."""
        self._started: dict[str, Any] = {}
        if not names:
            return
        from accelerate import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        PartialState()  # the trackers' logger asks for it
        for name in names:
            kind = LOGGER_TYPE_TO_CLASS[name]
            options: dict[str, Any] = (
                {"logging_dir": str(output_dir / name)} if kind.requires_logging_directory else {}
            )
            if name == "wandb":
                options = _wandb_options(run_name, output_dir, wandb_id)
            self._try(name, lambda: self._start(name, kind, project, options, config))  # noqa: B023

    def _start(
        self, name: str, kind: Any, project: str, options: Mapping[str, Any], config: Mapping[str, Any]
    ) -> None:
        tracker = kind(project, **options)
        tracker.start()
        simple = {
            key: value if isinstance(value, bool | int | float | str) else str(value)
            for key, value in config.items()
        }
        tracker.store_init_configuration(simple)
        if (
            name == "wandb"
        ):  # points whose step goes back, after a resume, are dropped unless the axis is ours
            tracker.tracker.define_metric("train/step")
            tracker.tracker.define_metric("*", step_metric="train/step")
        self._started[name] = tracker

    @property
    def wandb_id(self) -> str | None:
        """The id of the W&B run, to be continued after a resume."""
        return self._started["wandb"].tracker.id if "wandb" in self._started else None

    def log(self, values: Mapping[str, float]) -> None:
        """Send one logged step. Evaluation goes under `eval/`, all else under `train/`."""
        named = {
            f"eval/{key[5:]}" if key.startswith("eval_") else f"train/{key}": v for key, v in values.items()
        }
        for name, tracker in list(self._started.items()):
            step = {} if name == "wandb" else {"step": int(values["step"])}
            self._try(name, lambda: tracker.log(named, **step))  # noqa: B023

    def mark_preempting(self) -> None:
        """Tell W&B that this run was stopped to go on later."""
        if "wandb" in self._started:
            self._try("wandb", self._started["wandb"].tracker.mark_preempting)

    def finish(self) -> None:
        """End the runs, sending what is left."""
        for name, tracker in list(self._started.items()):
            self._try(name, tracker.finish)

    def _try(self, name: str, call: Any) -> None:
        try:
            call()
        except Exception as error:  # whatever a tracker raises, an outage must not cost the training
            self._started.pop(name, None)
            print(f"warning: {name} is off for the rest of the run: {error}", file=sys.stderr, flush=True)


def _wandb_options(run_name: str, output_dir: Path, wandb_id: str | None) -> dict[str, Any]:
    import wandb

    settings = wandb.Settings(silent=True, console="off")
    options = {"name": run_name, "dir": str(output_dir), "settings": settings}
    if "WANDB_MODE" not in os.environ and not wandb.login(prompt=False, verify=False):
        options["mode"] = "offline"  # a job has nobody to type a key
    return options | ({"id": wandb_id, "resume": "allow"} if wandb_id else {})
