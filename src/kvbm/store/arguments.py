"""Arguments of what users call: one of another type is a `BindError` that says what was expected."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import BindError
from ..layout import Layout
from ..shapes import BlockShape

__all__ = ["FLAG", "LAYOUT", "PROGRESS", "SHAPE", "TEXTS", "Kind", "blocks_of", "number_of", "path_of", "require"]


class Kind(NamedTuple):
    """What an argument may be, in code and in words, and what to do where it is not."""

    types: Any
    expected: str
    advice: str = ""


FLAG = Kind((bool, np.bool_), "True or False")
LAYOUT = Kind(Layout, "a kvbm.Layout", "; kvbm.load makes one of a name or a file")
PROGRESS = Kind(Callable, "a function of two numbers of bytes")
SHAPE = Kind(BlockShape, "a kvbm.BlockShape", "; kvbm.load_shape makes one of a name or a text")
TEXTS = Kind(Mapping, "texts by name")


def require(kind: Kind, *, optional: bool = False, **given: Any) -> None:
    """Refuse arguments, by name, that are not of a kind."""
    for name, one in given.items():
        if not isinstance(one, kind.types) and not (optional and one is None):
            raise BindError(f"{name}: expected {kind.expected}, got {one!r:.200}{kind.advice}")


def path_of(name: str, given: Any) -> Path:
    """A path that a file system may have."""
    try:
        found = Path(given)
        if b"\0" not in os.fsencode(found):
            return found
    except (TypeError, ValueError):
        pass
    raise BindError(f"{name}: expected a path, got {given!r:.200}")


def number_of(name: str, given: Any) -> int:
    """An integer, of Python or of NumPy."""
    if not isinstance(given, bool) and not getattr(given, "shape", ()):
        try:
            return operator.index(given)
        except TypeError:
            pass
    raise BindError(f"{name}: expected an integer, got {given!r:.200}")


def blocks_of(title: object, given: Any, num_blocks: int) -> list[int]:
    """Numbers of blocks that there are."""
    try:
        listed = list(given)
        if hasattr(given, "filled") or any(isinstance(block, bool) for block in listed):  # a mask is no list of numbers
            raise TypeError
        found = [operator.index(block) for block in listed]
    except TypeError:
        raise BindError(f"{title}: expected numbers of blocks, got {given!r:.200}") from None
    for block in found:
        if not 0 <= block < num_blocks:
            raise BindError(f"{title}: expected blocks from 0 to {num_blocks - 1}, got {block}")
    return found
