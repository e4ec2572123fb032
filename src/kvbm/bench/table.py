"""CSV files as the commands of `kvbm bench` write them, read again: rows that know where they stand."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import SpecError

__all__ = ["Row", "Table", "read"]


class Row(dict[str, str]):
    """A line of a CSV file that knows where it stands."""

    def __init__(self, values: Mapping[str, str], where: str) -> None:
        super().__init__(values)
        self.where = where

    def number(self, column: str) -> float:
        """The number in a column; `SpecError` names file and line if there is none."""
        try:
            value = float(self[column])
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise SpecError(f"{self.where}: column {column!r}: expected a number, got {self[column]!r}")
        return value

    def positive(self, column: str) -> float:
        """The number in a column that is drawn on a logarithmic axis, or divided by."""
        value = self.number(column)
        if value <= 0:
            raise SpecError(f"{self.where}: column {column!r}: expected a number above 0, got {self[column]!r}")
        return value


@dataclass(frozen=True)
class Table:
    """One header row and what stands below it.

    Attributes
    ----------
    path : Path
    comments : tuple of str
        The comment lines above the header, without their ``#``: commit, machine, driver, date.
    columns : tuple of str
    rows : tuple of Row
    """

    path: Path
    comments: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


def read(path: Path) -> list[Table]:
    """The tables of a CSV file: a comment line begins a new one, as where runs were appended to one file.

    Raises
    ------
    SpecError
        Nothing but comments, a row with too few or too many cells, or text that is not UTF-8.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: expected a CSV file in UTF-8: {error}") from None
    parts: list[tuple[list[str], list[tuple[int, str]]]] = []
    for number, line in enumerate(lines, 1):
        is_comment = line.startswith("#")
        if not parts or (is_comment and parts[-1][1]):
            parts.append(([], []))
        if is_comment:
            parts[-1][0].append(line.lstrip("# ").rstrip())
        elif line.strip():
            parts[-1][1].append((number, line))
    tables = [_table(path, comments, held) for comments, held in parts if held]
    if not any(table.rows for table in tables):
        found = "a header and no rows" if tables else "none"
        raise SpecError(f"{path}: expected a header line and rows, as `kvbm bench` writes them, got {found}")
    return tables


def _table(path: Path, comments: Sequence[str], held: Sequence[tuple[int, str]]) -> Table:
    (_, header), *rest = held
    columns = tuple(next(csv.reader([header])))
    rows = []
    for number, line in rest:
        cells = next(csv.reader([line]))
        if len(cells) != len(columns):
            raise SpecError(f"{path}:{number}: expected {len(columns)} cells, as the header has, got {len(cells)}")
        rows.append(Row(dict(zip(columns, cells, strict=True)), f"{path}:{number}"))
    return Table(path, tuple(comments), columns, tuple(rows))
