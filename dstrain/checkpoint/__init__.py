"""Checkpoints that are whole or not there, and resume on any number of ranks and under any ZeRO stage."""

from dstrain.checkpoint.resume import find, load, newest_good, newest_step
from dstrain.checkpoint.saver import Saver
from dstrain.checkpoint.store import Reader, describe, problem, steps

__all__ = ["Reader", "Saver", "describe", "find", "load", "newest_good", "newest_step", "problem", "steps"]
