"""torchrun, without its own report and traceback after a rank that failed; it ends with that rank's status.

The ranks tell who failed first, and why, and the script that starts this repeats it.
"""

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

if __name__ == "__main__":
    try:
        main()
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        status = failure.exitcode
        raise SystemExit(status if status >= 0 else 128 - status) from None
