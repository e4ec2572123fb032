"""Loops inside one test: an error names the case in which it occurred."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def in_case(*case: object) -> Iterator[None]:
    """Add the case to an error of the block; pytest prints it below the error."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case: {', '.join(map(str, case))}")
        raise
