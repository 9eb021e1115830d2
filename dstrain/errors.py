"""Errors that a user can mend: one line, exit status 2, never a traceback."""

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import NoReturn


class Told(Exception):
    """An end of the run that is told in one line, with an exit status of its own."""

    status = 1  # of the process


class UserError(Told):
    """A mistake in a recipe, a DeepSpeed JSON, the data or the command line.

    The message is a single line that names the file, the key, the value and the nearest valid one.
    """

    status = 2  # of the process


def nearest(word: str, valid: Iterable[str]) -> str:
    """Return `; did you mean 'X'?` for the closest of `valid`, or an empty string if none is close."""
    match = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else ""


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are a UserError, and that takes overrides before and after options."""

    def parse_args(self, args: Sequence[str] | None = None) -> argparse.Namespace:  # type: ignore[override]
        """Parse the command line. Raises UserError for what is no option."""
        known, unknown = self.parse_known_intermixed_args(args)
        if unknown:
            self.error(f"{unknown[0]!r} is no option; a recipe's keys are given as section.key=value")
        return known

    def error(self, message: str) -> NoReturn:
        """Raise the message as a UserError."""
        raise UserError(f"command line: {message}")
