"""The pages of the documentation (README, CONTRIBUTING and everything under docs/) and their code blocks."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Paths from the root, with slashes.
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *sorted(path.relative_to(ROOT).as_posix() for folder in ("docs", "examples") for path in (ROOT / folder).rglob("*.md")),
]
FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r' title="([^"]*)"$')


def read(page: str) -> str:
    """The text of a page, by its path from the root."""
    return (ROOT / page).read_text(encoding="utf-8")


def fences(text: str) -> list[tuple[str, str, str]]:
    """All blocks: language, title (empty if there is none), text."""
    found = []
    for indent, info, body in FENCE.findall(text):
        title = TITLE.search(info)
        body = re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)
        found.append((TITLE.sub("", info).strip(), title[1] if title else "", body))
    return found


def blocks(text: str, language: str) -> list[str]:
    """The blocks of one language."""
    return [body for spoken, _, body in fences(text) if spoken == language]


def pattern(shown: str) -> str:
    """A regular expression of what a page shows.

    ``…`` on a line of its own stands for any lines, inside a line for any text.  Spaces at the end of a line do not count.
    """
    pieces = re.split(r"(^…$|…)", "\n".join(line.rstrip() for line in shown.splitlines()), flags=re.MULTILINE)
    return "".join("(?s:.*)" if i % 2 and _alone(pieces, i) else ".*" if i % 2 else re.escape(p) for i, p in enumerate(pieces))


def _alone(pieces: list[str], i: int) -> bool:
    """True if this ``…`` is all of its line."""
    return (not pieces[i - 1] or pieces[i - 1].endswith("\n")) and (not pieces[i + 1] or pieces[i + 1].startswith("\n"))
