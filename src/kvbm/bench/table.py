"""CSV files: writing and reading the rows of the commands of `kvbm bench`."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TextIO

from ..errors import SpecError


class Row(dict[str, str]):
    """A line of a CSV file, with its file and line number."""

    def __init__(self, values: Mapping[str, str], where: str) -> None:
        super().__init__(values)
        self.where = where

    def number(self, column: str) -> float:
        """The number in a column.  If it is not a number, a `SpecError` names file and line."""
        try:
            value = float(self[column])
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise SpecError(f"{self.where}: column {column!r}: expected a number, got {self[column]!r}")
        return value

    def positive(self, column: str) -> float:
        """The positive number in a column, for a logarithmic axis or a division."""
        value = self.number(column)
        if value <= 0:
            raise SpecError(f"{self.where}: column {column!r}: expected a number above 0, got {self[column]!r}")
        return value


@dataclass(frozen=True)
class Table:
    """One header row, the rows below it, and the comment lines above it, without their ``#``: commit, machine, driver, date."""

    path: Path
    comments: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


def read(path: Path) -> list[Table]:
    """The tables of a CSV file.  A comment line begins a new table: several runs may have been appended to one file.

    Raises `SpecError`: the file has only comments, a row has too few or too many cells, or the text is not UTF-8.
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


@dataclass(frozen=True)
class Record:
    """One row of the sweep's CSV; its fields are the columns."""

    tokens_per_block: int
    num_blocks: int
    pattern: str  # ``fc_to_fc``, ``lw_to_fc``, … or ``nhd:universal``
    direction: str  # of `copies.DIRECTIONS`
    backend: str  # name of the backend; ``memcpy`` is the yardstick
    total_bytes: int  # of the batch
    inner_bytes: int  # of one layer's K or V in one block
    copy_size: int  # bytes of the shortest run that is contiguous on both sides
    num_copies: int  # number of such runs in the batch
    median_ms: float
    #: `total_bytes` over the median.  Every byte counts once, even if it is read and written in the same memory.
    bandwidth_gbps: float
    min_ms: float
    max_ms: float
    memcpy_ms: float  # the yardstick's median time in the same run
    ratio: float  # this time over `median_ms`
    timing: str  # "events", "replay" or "clock"
    kernel: str
    shape: str
    gpu: str
    driver: str
    commit: str


class Rows:
    """Writes each row at once, so that no measurement is lost if the run ends early.

    Below a comment, by default the fields of `Record`.
    """

    def __init__(self, out: TextIO, comment: str, columns: Sequence[str] | None = None) -> None:
        names = list(columns) if columns is not None else [field.name for field in fields(Record)]
        self._out = out
        self._writer = csv.DictWriter(out, names, lineterminator="\n")
        out.write(comment + "\n")
        self._writer.writeheader()
        out.flush()

    def write(self, row: Record | dict[str, Any]) -> None:
        """Append one row."""
        self._writer.writerow({f.name: getattr(row, f.name) for f in fields(row)} if isinstance(row, Record) else row)
        self._out.flush()
