"""Check the types of public functions' arguments.  A wrong type raises `BindError` with the expected type."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._arguments import quoted, whole, wholes
from ..errors import BindError
from ..layout.layout import Layout
from ..layout.shapes import BlockShape, as_shape
from ..layout.spec import as_layout

__all__ = ["FLAG", "PROGRESS", "TEXTS", "Kind", "blocks_of", "layout_of", "num_blocks_of", "path_of", "require", "shape_of"]


class Kind(NamedTuple):
    """The types of an argument, their name in messages, and a hint for a wrong type."""

    types: Any
    expected: str
    advice: str = ""


FLAG = Kind((bool, np.bool_), "True or False")
PROGRESS = Kind(Callable, "a function of two numbers of bytes")
TEXTS = Kind(Mapping, "texts by name")


def require(kind: Kind, *, optional: bool = False, **given: Any) -> None:
    """Raise `BindError` for arguments that are not of a kind; the keywords are their names."""
    for name, one in given.items():
        if not isinstance(one, kind.types) and not (optional and one is None):
            raise BindError(f"{name}: expected {kind.expected}, got {quoted(one)}{kind.advice}")


def layout_of(name: str, given: Any) -> Layout:
    """The layout for a Layout, a name or the path of a file; `SpecError` for an unknown name."""
    if isinstance(given, Layout | str | Path):
        return as_layout(given)
    raise BindError(f"{name}: expected a Layout, a name or the path of a .yaml file, got {quoted(given)}")


def shape_of(given: Any) -> BlockShape:
    """The block shape for a BlockShape or its text; `SpecError` for a text that is not a shape."""
    if isinstance(given, BlockShape | str):
        return as_shape(given)
    raise BindError(f"shape: expected a BlockShape or its text, got {quoted(given)}")


def path_of(name: str, given: Any) -> Path:
    """A path that is legal in a file system."""
    with contextlib.suppress(Exception):  # the object's own code may raise anything
        found = Path(given)
        if b"\0" not in os.fsencode(found):
            return found
    raise BindError(f"{name}: expected a path, got {quoted(given)}")


def num_blocks_of(given: Any) -> int:
    """A number of blocks: an integer, of Python or of NumPy."""
    if (found := whole(given)) is not None:
        return found
    raise BindError(f"num_blocks: expected an integer, got {quoted(given)}")


def blocks_of(title: object, given: Any, num_blocks: int) -> list[int]:
    """Numbers of blocks, checked against `num_blocks`."""
    found = wholes(given, 1 << 26)
    if found is None:
        raise BindError(f"{title}: expected numbers of blocks, got {quoted(given)}")
    for block in found:
        if not 0 <= block < num_blocks:
            raise BindError(f"{title}: expected blocks from 0 to {num_blocks - 1}, got {quoted(block)}")
    return list(found)
