"""Layouts by name and by file: the shipped ones, and those of a folder or a path."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath

from .._arguments import quoted, require_a
from ..errors import SpecError
from .grammar import parse as parse
from .layout import Layout
from .naming import suggestion
from .resolved import legal
from .shapes import data_dir, is_file, load_shape
from .slips import meant_order
from .yamlfile import read_text


def layouts_dir() -> Path:
    """Folder of the shipped layouts."""
    return data_dir()


def layouts() -> list[str]:
    """Names of the shipped layouts, sorted."""
    return sorted(layout.name for layout in load_dir(layouts_dir()))


def load_dir(folder: str | Path, broken: Callable[[SpecError], None] | None = None) -> list[Layout]:
    """Every layout under a folder, sorted by name.  The name of a layout is the path of its file.  ``shapes/`` is skipped.

    `broken` is called with the error of each file that is no layout; without it, the error is raised.
    """
    root = Path(folder)
    if not root.is_dir():
        raise SpecError(f"{root}: expected a folder of layouts, but this folder does not exist")
    files = [path for path in root.rglob("*.yaml") if path.relative_to(root).parts[0] != "shapes"]
    found = []
    for path in sorted(files):
        try:
            found.append(_read(path, path.relative_to(root).with_suffix("").as_posix()))
        except SpecError as error:
            if broken is None:
                raise
            broken(error)
    return sorted(found, key=lambda layout: layout.name)


def load_all(paths: Iterable[str | Path], broken: Callable[[SpecError], None] | None = None) -> list[Layout]:
    """Every layout of some files and folders, in that order; each folder is sorted by name.

    A file that occurs twice counts once.
    `broken` is called with the error of each file in a folder that is no layout; without it, the error is raised.
    Raises `SpecError` if two files have the same name.

    >>> load_all([layouts_dir()]) == load_dir(layouts_dir())
    True
    """
    by_name: dict[str, tuple[Path, Layout]] = {}
    for path in map(Path, paths):
        for layout in load_dir(path, broken) if path.is_dir() else [load(path)]:
            file = (path / f"{layout.name}.yaml" if path.is_dir() else path).resolve()
            first, _ = by_name.setdefault(layout.name, (file, layout))
            if first != file:
                raise SpecError(
                    f"{_display(file)}: its name is {layout.name!r}, which is also the name of {_display(first)}; expected "
                    "different names: rename one of the two files, or move one into a subfolder"
                )
    return [layout for _, layout in by_name.values()]


def load(name: str | Path) -> Layout:
    """Load a layout by its name or by the path of its file.

    Parameters
    ----------
    name : str or Path
        A name such as ``"nhd"`` or ``"vllm/LBHNC"``, or a path that ends in ``.yaml``.

    Returns
    -------
    Layout
        The layout.

    Raises
    ------
    SpecError
        There is no such layout, or the file is wrong; the message has file and line.

    Examples
    --------
    >>> load("universal").order_text
    '[b] h l o t d'
    """
    require_a((str, PurePath), "layout", name, "a name that `kvbm layouts` lists, or the path of a .yaml file", SpecError)
    text = str(name)
    if text.endswith((".yaml", ".yml")):
        return _read(Path(name), Path(name).stem)
    if (layout := load_shipped(text)) is None:
        raise SpecError(
            f"layout {text!r:.200}: expected a name that `kvbm layouts` lists, or the path of a .yaml file.{_meant(text)}"
        )
    return layout


def _meant(text: str) -> str:
    """The end of a message about a text that is no name of a layout."""
    if re.match(r"\s*n[lohtd]=|\s*hd=", text):
        return " This is the shape of a block, which is another argument"
    if is_file(Path(f"{text}.yaml")):
        return f" There is a file {text}.yaml: give its whole name"
    if is_file(Path(text)):
        return " There is a file of this name: its name must end in .yaml"
    order = re.sub(r"^\s*order:\s*|[\"']", "", text).strip()
    if " " in order:
        with contextlib.suppress(SpecError):
            parse(f'order: "{meant_order(order)}"')
            return f' This is an order: write  order: "{meant_order(order)}"  to a .yaml file, and give its path'
    folder, known = f"{text.rstrip('/')}/", layouts()
    if any(name.startswith(folder) for name in known):
        return f" {folder} is a folder of layouts: `kvbm layouts {folder}` lists them"
    return suggestion(text, known)


def as_layout(given: Layout | str | Path, what: str = "layout") -> Layout:
    """The layout for a Layout, a name, or the path of a file (`load`); `SpecError` for anything else."""
    if isinstance(given, Layout):
        return given
    if isinstance(given, str | Path):
        return load(given)
    raise SpecError(f"{what}: expected a Layout, a name such as 'nhd' or the path of a .yaml file, got {quoted(given)}")


def load_shipped(name: str) -> Layout | None:
    """The shipped layout of a name; None if there is none.  The name is never used as a path."""
    path = _shipped_path(name)
    return None if path is None else _read(path, name)


def _shipped_path(name: str) -> Path | None:
    path = layouts_dir() / f"{name}.yaml"
    return None if name.startswith(("/", "shapes/")) or ".." in name or not is_file(path) else path


#: Example shapes for layouts: a model with heads, a narrow V, a latent, a latent with scales of a power of two, an indexer.
_HEADS = ("llama-3.1-8b", "llama-3.1-8b,nt=128", "llama-3.1-8b,no=1,hd=192")
_LATENTS = ("deepseek-v3", "nl=61,no=1,nh=1,nt=64,hd=512,dtype=bfloat16")
_INDEXERS = ("nl=61,no=1,nh=1,nt=64,hd=128,dtype=bfloat16",)


#: Scale factors of a matrix of 256 rows, each with 16 groups.
_SCALES = "nl=1,no=1,nh=1,nt=256,hd=16,dtype=float8_e4m3fn"


def example_shape(layout: Layout) -> str | None:
    """An example shape for a layout, as a text for `load_shape`: the first legal one of a short list.

    >>> example_shape(load("nhd")), example_shape(load("vllm/dsa_indexer"))
    ('llama-3.1-8b', 'nl=61,no=1,nh=1,nt=64,hd=128,dtype=bfloat16')
    """
    dtypes = {plane.dtype for plane in layout.planes}
    candidates: tuple[str, ...]
    if "h" in layout.present:
        candidates = _HEADS
    elif "l" not in layout.present:
        candidates = (_SCALES,)
    elif any(plane.name == "key" for plane in layout.planes):
        candidates = _INDEXERS
    else:
        candidates = _LATENTS[::-1] if "float8_e8m0fnu" in dtypes else _LATENTS
    for text in candidates:
        if legal(layout, load_shape(text), 1024) is not None:
            return text
    return None


def _read(path: Path, name: str) -> Layout:
    file = _display(path)
    text = read_text(path, file)
    if "like" in text:  # the other file may have changed
        return parse(text, file, name, base_of)
    return _parse_cached(text, file, name)


def base_of(name: str, file: str) -> tuple[str, str]:
    """The text and the file of the layout that a file is like: a shipped one, or a path from the file's folder."""
    if name.endswith((".yaml", ".yml")):
        path = Path(os.path.normpath(Path(file).parent / name))
    elif (found := _shipped_path(name)) is not None:
        path = found
    else:
        raise SpecError(
            f"{quoted(name)}: expected a name that `kvbm layouts` lists, or the path of a .yaml file from this file's folder."
            f"{suggestion(name, layouts())}"
        )
    return read_text(path, _display(path)), _display(path)


def _display(path: Path) -> str:
    """The path for messages: for shipped files, from ``layouts/`` on."""
    root = layouts_dir()
    return f"layouts/{path.relative_to(root).as_posix()}" if path.is_relative_to(root) else str(path)


@functools.lru_cache(maxsize=4096)
def _parse_cached(text: str, file: str, name: str) -> Layout:
    return parse(text, file, name)
