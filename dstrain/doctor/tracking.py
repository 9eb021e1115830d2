"""W&B: reached, offline, or off."""

import netrc
import os
import socket
from collections.abc import Mapping, Sequence
from urllib.parse import urlparse

from dstrain.doctor.check import Check, failure, ok, warning
from dstrain.errors import UserError

_TIMEOUT_S = 4.0


def trackers(names: Sequence[str]) -> list[Check]:
    """Check that each tracker of a recipe is known and installed."""
    from dstrain.observe import check_trackers

    try:
        check_trackers(names)
    except UserError as error:
        return [failure("trackers", str(error), "install its package, or logging.report_to=none")]
    others = [name for name in names if name != "wandb"]
    return [ok("trackers", ", ".join(others))] if others else []


def wandb(names: Sequence[str], environment: Mapping[str, str] = os.environ) -> Check:
    """Say what W&B will do with a run, and check that its server answers. names: the recipe's trackers."""
    asked = "wandb" in names
    mode = environment.get("WANDB_MODE", "").lower()
    if environment.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes"):
        mode = "disabled"
    if mode in ("disabled", "dryrun", "offline"):
        what = "off" if mode == "disabled" else "offline: the run stays in its folder until `wandb sync`"
        return ok("W&B", f"WANDB_MODE={mode}: {what}")
    if mode not in ("", "online", "run", "shared"):
        return failure("W&B", f"WANDB_MODE={mode!r} is none of online, offline, disabled", "unset WANDB_MODE")
    if not asked:
        return ok("W&B", "not asked for (logging.report_to)")
    url = environment.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    place = urlparse(url)
    host = place.hostname
    if not host or place.scheme not in ("http", "https"):
        return failure("W&B", f"WANDB_BASE_URL={url!r} is no address", "export WANDB_BASE_URL=https://HOST")
    if not (environment.get("WANDB_API_KEY") or _in_netrc(host, environment)):
        remedy = "wandb login, or WANDB_MODE=offline to say so"
        return warning("W&B", f"no key for {host}: the run will be offline, until `wandb sync`", remedy)
    problem = _reach(host, place.port or (443 if place.scheme == "https" else 80), environment)
    if problem:
        remedy = "WANDB_MODE=offline and `wandb sync` later, or mend the network or proxy"
        return warning("W&B", f"logged in, but {host} cannot be reached: {problem}", remedy)
    return ok("W&B", f"logged in, {host} answers")


def _in_netrc(host: str, environment: Mapping[str, str]) -> bool:
    file = environment.get("NETRC") or os.path.expanduser("~/.netrc")
    try:
        return netrc.netrc(file).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _reach(host: str, port: int, environment: Mapping[str, str]) -> str | None:
    """Return why a server does not answer, or None. Behind a proxy, it is the proxy that must answer."""
    proxy = environment.get("https_proxy") or environment.get("HTTPS_PROXY")
    if proxy and (place := urlparse(proxy)).hostname:
        host, port = place.hostname or host, place.port or 80
    try:
        socket.create_connection((host, port), timeout=_TIMEOUT_S).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return None
