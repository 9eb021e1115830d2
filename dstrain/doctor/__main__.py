"""The checks of one host, asked for from another: `python -m dstrain.doctor JSON` prints one line of JSON."""

import contextlib
import json
import sys
from pathlib import Path

from dstrain.doctor import one_host
from dstrain.doctor.check import as_json, failure
from dstrain.errors import UserError


def main() -> None:
    """Run the checks that the JSON asks for. A recipe that cannot be read here is a failure."""
    asked = json.loads(sys.argv[1])
    config = Path(asked["config"]) if asked["config"] else None
    facts = None
    with contextlib.redirect_stdout(sys.stderr):  # whatever libraries print
        try:
            checks, facts = one_host(
                config,
                asked["overrides"],
                ranks=asked["ranks"],
                world=asked["world"],
                hosts=asked["hosts"],
                skip=asked["skip"],
            )
        except UserError as error:
            remedy = "the recipe must lie at the same path on each host"
            checks = [failure("hosts", str(error), remedy)]
    print(json.dumps({"checks": as_json(checks), "facts": facts}), flush=True)


if __name__ == "__main__":
    main()
