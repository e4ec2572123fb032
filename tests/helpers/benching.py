"""Helpers for tests of benchmarks: a small model, commands on the CPU, and the rows that they print."""

from __future__ import annotations

import csv
import os

import click
from click.testing import CliRunner, Result

import kvbm

MODEL = kvbm.load_shape("nl=2,no=2,nh=8,nt=16,hd=16,dtype=bfloat16")
ON_CPU = ("--device", "cpu", "--iters", "1", "--shape", str(MODEL))


def run(command: click.Command, *arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments))


def read(text: str) -> tuple[str, list[dict[str, str]]]:
    """Return the comment and the rows; every row has every column."""
    comment, *lines = text.splitlines()
    rows = list(csv.DictReader(lines))
    assert comment.startswith(f"# kvbm {os.environ.get('KVBM_COMMIT', '')}")
    assert all(None not in row and None not in row.values() for row in rows)
    return comment, rows


def ran(command: click.Command, *arguments: str) -> list[dict[str, str]]:
    result = run(command, *arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return read(result.stdout)[1]
