"""The command line: `app` has the first commands, a file for each group of others; `click_classes` is what they are made of."""

from .app import main

__all__ = ["main"]
