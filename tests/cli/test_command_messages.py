"""Wrong inputs of somebody new at the command line, and what is said: tests/data/messages/commands.txt, a line each.

Messages of click's own, such as ``Missing argument``, are not among them: they differ by its version.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

import kvbm
from kvbm import store
from kvbm.cli.app import main

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/data/messages/commands.txt"
UPDATE = os.environ.get("KVBM_UPDATE_GOLDEN") == "1"


def cases() -> list[tuple[str, str]]:
    """The command lines of the file, and their expected lines."""
    found = []
    for line in GOLDEN.read_text(encoding="utf-8").splitlines():
        command, _, _ = line.removeprefix("$ kvbm ").partition("  # ")
        if line.startswith("$ "):
            found.append((command, ""))
        else:
            found[-1] = (found[-1][0], line)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("messages")
    (folder / "mine.yaml").write_text('title: mine\norder: "[b l o] t h d"\n', encoding="utf-8")
    (folder / "config.json").write_bytes((ROOT / "tests/data/models/llama-3.1-8b.json").read_bytes())
    (folder / "nomodel.json").write_text('{"a": 1}', encoding="utf-8")
    (folder / "text.safetensors").write_text("hello\n", encoding="utf-8")
    (folder / "adir").mkdir()
    for name in ("empty.yaml", "empty.safetensors"):
        (folder / name).touch()
    shape = kvbm.load_shape("nl=2,no=2,nh=4,nt=16,hd=32,dtype=bfloat16")
    with store.create(folder / "in.safetensors", kvbm.load("vllm/LBHNC"), shape, 4) as pool:
        for array in pool.arrays:
            array[...] = 1
    return folder


def said(command: str) -> str:
    done = CliRunner().invoke(main, shlex.split(command), prog_name="kvbm", env={"COLUMNS": "200"})
    assert isinstance(done.exception, SystemExit), (command, done.exception)
    lines = [line for line in done.stderr.splitlines() if line.startswith(("error: ", "refused: "))]
    assert lines, (command, done.output)
    assert done.stdout == "" or lines[0].startswith("refused: "), command
    return f"{done.exit_code}  {lines[0].replace(os.getcwd(), '.')}"  # noqa: PTH109  (a text)


@pytest.mark.slow  # 6 s
def test_messages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each says where, what was expected and what was given; and nothing is written."""
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    found = [(command, said(command)) for command, _ in cases()]
    assert sorted(folder.rglob("*")) == before
    if UPDATE:
        GOLDEN.write_text("".join(f"$ kvbm {command}\n{line}\n" for command, line in found), encoding="utf-8")
    assert found == cases(), "read the difference; KVBM_UPDATE_GOLDEN=1 accepts it"


def test_messages_have_what_a_reader_needs() -> None:
    """An expectation, or what else is wrong and what to do; no number of an errno, no name of a class of Python."""
    lines = dict(cases())
    assert len(lines) >= 90
    wrong = (
        r"missing|no such|No such|, not |not in |not part of|goes with|are the same|twice|shared by|only a cast|no dtype|cut short|"
        "does not know"
    )
    for command, line in lines.items():
        assert re.search(rf"expected|{wrong}", line), line
        assert not re.search(r"Errno|Traceback|Error\b|NoneType", line), (command, line)
    assert sum("expected" in line for line in lines.values()) > 0.8 * len(lines)
