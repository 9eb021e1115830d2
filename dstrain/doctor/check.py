"""What a check found, checks that cannot raise or hang, and the table of all of them."""

import textwrap
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dstrain.errors import UserError

WIDTH = 110  # columns of the table
_STATES = ("failure", "warning", "ok")


@dataclass(frozen=True)
class Check:
    """One line of the table. remedy: what to do about a warning or failure; empty where all is well."""

    name: str
    state: Literal["ok", "warning", "failure"]
    seen: str
    remedy: str = ""
    hosts: tuple[str, ...] = ()  # those that it was seen on, where there are several


def ok(name: str, seen: str) -> Check:
    """Return a check that found nothing wrong."""
    return Check(name, "ok", seen)


def warning(name: str, seen: str, remedy: str) -> Check:
    """Return a check that found what costs speed or may fail later."""
    return Check(name, "warning", seen, remedy)


def failure(name: str, seen: str, remedy: str) -> Check:
    """Return a check that found what stops a run."""
    return Check(name, "failure", seen, remedy)


def guarded(name: str, function: Callable[[], Any], limit_s: float = 60.0) -> list[Check]:
    """Call a function that returns a Check or several, and turn all that goes wrong in it into a failure.

    A call that takes longer than the limit, such as one into a network file system that is gone, is left
    behind in its thread.
    """
    found: list[Check] = []

    def work() -> None:
        try:
            result = function()
            found.extend([result] if isinstance(result, Check) else result)
        except UserError as error:
            found.append(failure(name, str(error), "mend what the line names"))
        except BaseException as error:  # also SystemExit: one broken check must not hide the others
            reason = " ".join(str(error).split())[:300] or "no reason given"
            remedy = "this check could not be made; the reason is the system's"
            found.append(failure(name, f"{type(error).__name__}: {reason}", remedy))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        remedy = "look for a file system or an address that does not answer"
        return [failure(name, f"no answer within {limit_s:.0f} s", remedy)]
    return found


def on_hosts(found: Sequence[tuple[str, Check]]) -> list[Check]:
    """Merge checks of several hosts: what is the same on several becomes one check that names them all."""
    merged: dict[tuple[str, str, str, str], list[str]] = {}
    for host, check in found:
        merged.setdefault((check.name, check.state, check.seen, check.remedy), []).append(host)
    return [Check(*key, hosts=tuple(hosts)) for key, hosts in merged.items()]  # type: ignore[arg-type]


def worst(checks: Sequence[Check]) -> str:
    """Return the worst state of checks."""
    return next((state for state in _STATES if any(check.state == state for check in checks)), "ok")


def summary(checks: Sequence[Check]) -> str:
    """Return how many checks are in which state, such as `20 ok, 1 warning`."""
    counts = {state: sum(check.state == state for check in checks) for state in reversed(_STATES)}
    return ", ".join(
        f"{count} {state}{'s' if count > 1 and state != 'ok' else ''}"
        for state, count in counts.items()
        if count
    )


def table(checks: Sequence[Check]) -> str:
    """Return state, name and what was seen, a check a line, and then the remedies, within 110 columns."""
    names = max(len(check.name) for check in checks)
    lines = _columns([(check.state, check.name, _with_hosts(check)) for check in checks], (7, names))
    wrong = sorted(
        (check for check in checks if check.state != "ok"), key=lambda check: _STATES.index(check.state)
    )
    remedies = list(dict.fromkeys((check.name, check.remedy) for check in wrong))
    if remedies:
        lines += ["", "what to do", *_columns(remedies, (max(len(name) for name, _ in remedies),))]
    return "\n".join([*lines, "", summary(checks)])


def _with_hosts(check: Check) -> str:
    if not check.hosts:
        return check.seen
    shown = ", ".join(check.hosts[:4]) + (f" and {len(check.hosts) - 4} more" if len(check.hosts) > 4 else "")
    return f"{shown}: {check.seen}"


def _columns(rows: Sequence[tuple[str, ...]], widths: Sequence[int]) -> list[str]:
    lines, indent = [], sum(widths) + 2 * len(widths)
    for *cells, text in rows:
        start = "".join(f"{cell:<{width}}  " for cell, width in zip(cells, widths, strict=True))
        lines += textwrap.wrap(
            text,
            WIDTH,
            initial_indent=start,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [start.rstrip()]
    return lines


def as_json(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """Return checks as JSON objects; `from_json` reads them."""
    return [asdict(check) for check in checks]


def from_json(objects: Sequence[dict[str, Any]]) -> list[Check]:
    """Return the checks of another host."""
    return [Check(**{**values, "hosts": tuple(values.get("hosts", ()))}) for values in objects]
