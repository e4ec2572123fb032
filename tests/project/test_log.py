"""kvbm's log: the loggers of the page, the levels, and ``KVBM_LOG``."""

from __future__ import annotations

import ast
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import kvbm
from kvbm.cli.app import main
from kvbm.system import log as _log

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/reference/logging.md").read_text(encoding="utf-8")


@pytest.mark.slow  # 1 s
def test_the_page_names_every_logger_and_level() -> None:
    found = set()
    for path in Path(kvbm.__file__).parent.rglob("*.py"):
        name = ".".join(["kvbm", *path.relative_to(Path(kvbm.__file__).parent).with_suffix("").parts])
        text = path.read_text(encoding="utf-8")
        for one in ast.walk(ast.parse(text)) if "ogger(" in text else ():
            if isinstance(one, ast.Call) and ast.unparse(one.func) in ("logging.getLogger", "init_logger") and one.args:
                given = one.args[0]
                found.add(str(given.value) if isinstance(given, ast.Constant) else name)
    table = PAGE.partition("| logger |")[2]
    assert set(re.findall(r"`((?:kvbm|vllm|lmcache)\.[\w.]+)`", table.partition("\n\n")[0])) == found - {"kvbm"}
    assert all(f"| `{level}` |" in PAGE for level in _log.LEVELS)


SAY = (
    "import kvbm, logging\n"
    "log = logging.getLogger('kvbm.copy.tables')\n"
    "for level in ('debug', 'info', 'warning', 'error'): getattr(log, level)('said %s', level)\n"
)


def said(code: str, level: str | None = None) -> str:
    env = {name: value for name, value in os.environ.items() if name != "KVBM_LOG"}
    env |= {} if level is None else {"KVBM_LOG": level}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    return done.stderr


@pytest.mark.parametrize(("level", "count"), [(None, 2), ("debug", 4), ("INFO", 3), ("warning", 2), ("error", 1)])
def test_levels(level: str | None, count: int) -> None:
    lines = said(SAY, level).splitlines()
    assert len(lines) == count and lines[-1].endswith("said error")
    assert level is None or re.fullmatch(r"ERROR \d{4}-.* kvbm\.copy\.tables: said error", lines[-1])


def test_a_level_that_is_none() -> None:
    text = said("import kvbm", "loud")
    assert text == "KVBM_LOG: expected one of debug, info, warning, error, got 'loud'\n"


def test_the_handlers_of_the_program_are_used() -> None:
    """Red: every record was there twice."""
    lines = said(f"import logging; logging.basicConfig(format='mine: %(message)s')\n{SAY}", "info").splitlines()
    assert lines == [f"mine: said {level}" for level in ("info", "warning", "error")]


def test_verbose_is_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger("kvbm")
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    for words, level in (("-v", logging.INFO), ("-vv", logging.DEBUG)):
        assert CliRunner().invoke(main, ["layouts", "nhd", words]).exit_code == 0
        assert root.getEffectiveLevel() == level and _log._HANDLER in root.handlers
    root.manager._clear_cache()  # type: ignore[attr-defined]
