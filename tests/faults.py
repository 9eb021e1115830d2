"""Train as train.py does, with a fault in one rank: `FAULT={"kind": "sleep", "rank": 1, "step": 6}` faults.py --config ...

Started by launchers in the tests. It is train.py's own code, whose step is disturbed.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def plant(kind: str, rank: int, step: int) -> None:
    """Make a step of one rank go wrong."""
    import torch

    import train
    from dstrain import distributed

    original, mine, lost = train.train_step, int(os.environ.get("RANK", "0")) == rank, []

    def faulty(engine, *rest):
        if not mine or engine.global_steps + 1 != step:
            return original(engine, *rest)
        if kind == "sleep":
            time.sleep(3600)
        elif kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "raise":
            raise ValueError("the fault that was planted")
        elif kind == "eat":  # until the kernel ends this process, inside the group of processes with a limit
            Path(os.environ["MEMORY_GROUP"], "cgroup.procs").write_text(str(os.getpid()))
            while True:
                lost.append(torch.ones(2**24))
        elif kind == "skip":
            distributed.all_reduce_sum = lambda tensor: tensor
        return original(engine, *rest)

    train.train_step = faulty
    if kind == "own folder":
        watchdog._SHARED_S = 2.0
        sys.argv += (
            [f"output_dir={Path(os.environ['OWN_FOLDER'])}"] if mine and "OWN_FOLDER" in os.environ else []
        )
    if kind == "at start" and mine:
        train.model.build = lambda *rest: (_ for _ in ()).throw(ValueError("the fault that was planted"))
    if kind == "evaluation" and mine:
        train.eval_step = lambda *rest: time.sleep(3600)


if __name__ == "__main__":
    import train
    from dstrain import distributed, watchdog

    plant(**json.loads(os.environ["FAULT"]))
    try:
        status = train.main(train.parse_args(), distributed.prepare())
        watchdog.finish()
    except BaseException as error:
        status = watchdog.fail(error)
    distributed.leave(status)
