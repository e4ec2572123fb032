"""The version of kvbm."""

__version__ = "0.1.0"
