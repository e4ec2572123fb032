"""What the shell completes: names of layouts, shapes, dtypes and devices, and the words that an option knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem

from ..layout import spec
from ..layout.shapes import ITEMSIZE, shape_names

__all__ = [
    "Complete", "complete_any_device", "complete_device", "complete_dtype", "complete_engine", "complete_layout", "complete_pair",
    "complete_shape", "items_of", "some_of",
]  # fmt: skip

#: A callback of click.
Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def some_of(*words: str, names: Callable[[], Iterable[str]] = tuple, files: bool = False) -> Complete:
    """Complete one of the words, or of the names, which are looked up when they are needed; with `files` also a file's path."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
        found = [CompletionItem(word) for word in (*words, *names()) if word.startswith(incomplete)]
        return found or ([CompletionItem(incomplete, type="file")] if files else [])

    return complete


def items_of(*words: str, names: Callable[[], Iterable[str]] = tuple, separator: str = ",") -> Complete:
    """Complete the last item of a list such as ``d2d,h2d``."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
        before, found, last = incomplete.rpartition(separator)
        given = before.split(separator)
        some = (word for word in (*words, *names()) if word.startswith(last) and word not in given)
        return [CompletionItem(f"{before}{found}{word}") for word in some]

    return complete


def complete_shape(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """A preset; behind its comma a size or ``dtype=``, and the dtype."""
    before, comma, last = incomplete.rpartition(",")
    if not comma:
        return some_of(names=shape_names, files=True)(ctx, param, incomplete)
    keys = ("nl=", "no=", "nh=", "nt=", "hd=", *(f"dtype={name}" for name in ITEMSIZE))
    return [CompletionItem(f"{before},{key}") for key in keys if key.startswith(last)]


def _engines() -> set[str]:
    return {name.partition("/")[0] for name in spec.layouts() if "/" in name}


def complete_pair(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """``SRC:DST``: the source, then ``:`` and the destination."""
    before, colon, last = incomplete.rpartition(":")
    names = some_of(names=spec.layouts)(ctx, param, last)
    return [CompletionItem(f"{before}{colon}{one.value}") for one in names]


complete_layout = some_of(names=spec.layouts, files=True)
complete_dtype = some_of(*ITEMSIZE)
complete_engine = some_of(names=_engines)
complete_device = some_of("cuda:0", "cuda:1")
complete_any_device = some_of("cpu", "cuda:0", "cuda:1")
