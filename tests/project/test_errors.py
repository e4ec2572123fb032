"""Texts of other programs in messages."""

from __future__ import annotations

import ast
import logging
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvbm
from kvbm.compile import nvrtc
from kvbm.copy import tables
from kvbm.copy.cost_model import Way
from kvbm.errors import escaping, printable

SOURCES = sorted(Path(kvbm.__file__).parent.rglob("*.py"))

#: Calls that write to the terminal.
TERMINAL = {"print", "click.echo", "click.secho", "print_prose", "sys.stderr.write", "sys.stdout.write", "console.print"}


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of names; of anything else its last names alone."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([*([node.id] if isinstance(node, ast.Name) else [""]), *reversed(names)])


def calls(tree: ast.AST, names: set[str]) -> Iterator[ast.Call]:
    yield from (one for one in ast.walk(tree) if isinstance(one, ast.Call) and dotted(one.func) in names)


@pytest.mark.slow  # 0.9 s
def test_what_is_printable_has_no_control_character_and_no_mark_of_direction() -> None:
    """Every character that Unicode has; printable ones are left as they are."""
    for code in range(sys.maxunicode + 1):
        shown = printable(chr(code))
        assert shown.isprintable()
        shown.encode()
        if chr(code).isprintable():
            assert shown == chr(code)
    for text in ("\x1b[31mred\x1b[0m", "a\nb", "a\r\x08b", "\u202egnp.exe", "\u2028", "\x9b2J", "\ud800", "\u200b\ufeff"):
        shown = printable(text)
        assert shown.isprintable() and shown.encode("utf-8") and not set(shown) & {"\x1b", "\n", "\u202e", "\x9b"}
    assert printable("a\nb\x1b") == "a\\nb\\x1b"
    assert printable("décodage 解码 ↔ …") == "décodage 解码 ↔ …"


def test_what_is_printable_is_as_short_as_asked() -> None:
    for most in (1, 2, 5, 200):
        for text in ("", "x" * most, "x" * (most + 1), "\n" * most, "\U000e0001" * 9, "x" * 10**6):
            shown = printable(text, most)
            assert len(shown) <= most
            assert (shown == text) is (len(text) <= most and text.isprintable())


def _records_of_errors(text: str) -> Iterator[int]:
    """Lines where an error, and not its text, is passed to a log."""
    levels = ("debug", "info", "warning", "error", "exception", "critical", "log")

    def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
        for one in ast.walk(tree):
            if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr in levels:
                yield one, one.func.attr

    if not any(f".{level}(" in text for level in levels):
        return
    tree = ast.parse(text)
    for call, level in calls(tree):
        if level == "exception" or any(given.arg in ("exc_info", "stack_info") for given in call.keywords):
            yield call.lineno
    for handler in ast.walk(tree):
        if isinstance(handler, ast.ExceptHandler) and handler.name:
            for call, _ in calls(handler):
                if any(isinstance(given, ast.Name) and given.id == handler.name for given in call.args):
                    yield call.lineno


@pytest.mark.slow  # 0.8 s
def test_no_record_of_a_log_holds_an_error() -> None:
    """Who keeps the records (pytest, collectors of errors) would keep its traceback, the frames there, and the pools in them."""
    assert list(_records_of_errors("try: f()\nexcept E as e: log.error('x', e)\nlog.info('y', exc_info=True)\n")) == [3, 2]
    folder = Path(kvbm.__file__).parent
    found = {str(path): list(_records_of_errors(path.read_text())) for path in folder.rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}


class _Memory:
    """As a pool."""


def test_a_failed_search_for_a_compiler_keeps_no_memory_of_its_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_found", None)
    monkeypatch.setattr(nvrtc, "is_off", lambda: False)
    monkeypatch.setattr(nvrtc, "_remembered", lambda: None)

    def ask() -> None:
        raise nvrtc.BuildError("there is none")

    monkeypatch.setattr(nvrtc, "_ask", ask)

    def copy() -> weakref.ref[_Memory]:
        memory = _Memory()
        assert nvrtc.why_not(0) == nvrtc.why_not(0) == "there is none"
        return weakref.ref(memory)

    assert copy()() is None


def test_a_failed_choice_keeps_no_memory_of_its_callers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the record of the log is kept."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError("of the table")

    monkeypatch.setattr(tables, "_find", fail)

    def copy() -> weakref.ref[_Memory]:
        memory = _Memory()
        tables.limits("d2d", 0, {"direct": Way(1)}, 1, 1)
        return weakref.ref(memory)

    with caplog.at_level(logging.WARNING):
        found = copy()
    assert "ZeroDivisionError: of the table" in caplog.text and found() is None


@pytest.mark.slow  # 0.8 s
def test_every_logger_escapes_what_it_says() -> None:
    """Whoever the text is from: each logger that a module keeps is made by `escaping`."""
    found = 0
    for source in SOURCES:
        tree = ast.parse(source.read_text())
        for one in tree.body:
            if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) in ("_log", "logger", "log"):
                assert ast.unparse(one.value).startswith("escaping("), f"{source}:{one.lineno}: {ast.unparse(one)}"
                found += 1
        for one in calls(tree, {"logging.warning", "logging.error", "logging.info", "logging.debug"}):
            raise AssertionError(f"{source}:{one.lineno}: expected a logger of the module")
    assert found >= 9


def test_a_line_of_the_log_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    log = escaping(escaping(logging.getLogger("kvbm.test")))
    log.warning("%s and %d", "\x1b[31m\nERROR forged", 7)
    log.warning("100 % of it")
    assert [record.getMessage() for record in caplog.records] == ["\\x1b[31m\\nERROR forged and 7", "100 % of it"]
    assert len(log.filters) == 1


@pytest.mark.slow  # 0.8 s
def test_no_error_goes_to_the_terminal_as_it_is() -> None:
    """Texts of errors may be those of peers, files and cards: `print_error` escapes them, or the caller does."""
    for source in SOURCES:
        for handler in ast.walk(ast.parse(source.read_text())):
            if not isinstance(handler, ast.ExceptHandler) or not handler.name:
                continue
            for call in calls(handler, TERMINAL):
                escaped = {id(name) for one in calls(call, {"printable"}) for name in ast.walk(one)}
                names = [one for one in ast.walk(call) if isinstance(one, ast.Name) and one.id == handler.name]
                raw = [one for one in names if id(one) not in escaped]
                assert not raw, f"{source}:{call.lineno}: {ast.unparse(call)}"
