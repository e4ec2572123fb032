"""docs/howto/files.md and docs/reference/file-format.md are correct: their Python runs, and their commands print what they show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvbm import store
from kvbm.cli.app import main

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = "\n".join((DOCS / page).read_text(encoding="utf-8") for page in ("howto/files.md", "reference/file-format.md"))


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands use the files of the first example; the second one damages one, the third opens one."""
    monkeypatch.chdir(tmp_path)
    first, second, third = blocks("python")
    names: dict[str, object] = {}
    exec(first, names)
    (shown,) = blocks("console")
    said = ""
    for line in shown.splitlines():
        if line.startswith("$ kvbm "):
            result = CliRunner().invoke(main, shlex.split(line)[2:])
            assert result.exit_code == 0, result.output
            said += f"{line}\n{result.output}"
    assert said == shown
    exec(second, names)
    exec(third, names)


def test_the_tables_name_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(blocks("python")[0], {})
    stored = store.read("blocks.safetensors")
    assert {"kvbm.digests", "kvbm.digests.layers", "kvbm.digests.tokens", "alloc_00000"} == set(stored.tensors)
    listed = set(re.findall(r"`(kvbm\.[a-z_]+)`", TEXT.split("| metadata |")[1].split("\n\n")[0]))
    assert listed == set(stored.metadata) | {"kvbm.planes", "kvbm.formats", "kvbm.cast"}, "these three are in some files only"
    functions = set(re.findall(r"^\| `(\w+)\(", TEXT, re.MULTILINE))
    assert functions == {name for name in store.__all__ if name.islower()}
