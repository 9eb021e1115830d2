"""The library behind train.py. Each module does one thing; train.py wires them together."""

__version__ = "0.1.0"
