"""What the launcher starts to compare configurations: train.py's own `main`, once for each job, in one go.

    deepspeed --num_gpus 2 dstrain/parity/worker.py JOBS.json

Starting Python, the libraries and a process group takes longer than ten steps of a small model, so jobs with
equally many ranks share them. What a job prints goes into `log-rankN` of its folder; when it is over,
`result.json` appears there, which tells whose fault a crash or a hang is.
"""

import argparse
import contextlib
import gc
import json
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train
from dstrain import distributed, watchdog
from dstrain.errors import UserError


def run(file: Path) -> None:
    """Run the jobs of a JSON list of {folder, arguments}."""
    world = distributed.prepare()
    for job in json.loads(file.read_text(encoding="utf-8")):
        folder = Path(job["folder"])
        error = None
        with (folder / f"log-rank{world.rank}").open("w", encoding="utf-8") as log, _into(log):
            try:
                train.main(train.parse_args(job["arguments"]), world)
            except UserError as fault:
                error = str(fault)
            except Exception as fault:
                traceback.print_exc()
                error = f"{type(fault).__name__}: {fault}"
            watchdog.stop()  # here, for it gives back the streams that it found
        if world.is_main or error:
            (folder / "result.json").write_text(json.dumps({"error": error}), encoding="utf-8")
        if error:  # the ranks may no longer be in step: the jobs behind this one get a start of their own
            distributed.leave(1)
        _forget()
    distributed.leave(0)


@contextlib.contextmanager
def _into(log):  # noqa: ANN001, ANN202
    with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        yield


def _forget() -> None:
    """Let the next job find the process as a new one would be."""
    import deepspeed.runtime.torch_autocast as autocast

    autocast.TORCH_AUTOCAST_INITIALIZED, autocast.TORCH_AUTOCAST_DTYPE = False, None
    gc.collect()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("jobs", type=Path)
    run(parser.parse_args().jobs)
