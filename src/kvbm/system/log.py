"""``KVBM_LOG``: what kvbm's loggers show, and where.

All of kvbm's loggers are below the logger ``kvbm``.  Without the variable they are as Python leaves them: warnings and errors go
to stderr unless the program configures `logging`.
"""

from __future__ import annotations

import logging
import os
import sys

LEVELS = ("debug", "info", "warning", "error")


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to stderr, as long as the program has no handlers of its own, which get every record, too."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.stream = sys.stderr  # which programs and tests may replace
            super().emit(record)


_HANDLER = _Stderr()


def level() -> int | None:
    """The level that ``KVBM_LOG`` names; None without one.  A word that is no level is a warning."""
    word = os.environ.get("KVBM_LOG", "").strip().lower()
    if word in LEVELS:
        return logging.getLevelNamesMapping()[word.upper()]
    if word:
        logging.getLogger("kvbm").warning("KVBM_LOG: expected one of %s, got %.40r", ", ".join(LEVELS), word)
    return None


def show(word: str | None = None) -> None:
    """Write records from this level on to stderr; without a word from that of ``KVBM_LOG`` on, if it is set."""
    least = level() if word is None else logging.getLevelNamesMapping()[word.upper()]
    if least is None:
        return
    root = logging.getLogger("kvbm")
    root.setLevel(least)
    root.addHandler(_HANDLER)  # once, however often it is added


def hide() -> None:
    """Write nothing to stderr: another handler shows it."""
    logging.getLogger("kvbm").removeHandler(_HANDLER)
