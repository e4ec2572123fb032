"""The command line: one file per group of commands; `app` has the first."""

from .app import main

__all__ = ["main"]
