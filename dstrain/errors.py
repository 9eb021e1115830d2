"""Errors that a user can mend: one line, exit status 2, never a traceback."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in a recipe, a DeepSpeed JSON, the data or the command line.

    The message is a single line that names the file, the key, the value and the nearest valid one.
    """

    status = 2  # of the process


def nearest(word: str, valid: Iterable[str]) -> str:
    """Return `; did you mean 'X'?` for the closest of `valid`, or an empty string if none is close."""
    match = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else ""
