"""kvbm's log in a process of vLLM: ``vllm.kvbm``, with vLLM's handlers.  vLLM configures only loggers below ``vllm``."""

from __future__ import annotations

import copy
import logging

from vllm.logger import init_logger

from ...errors import escaping
from ...system import log

__all__ = ["logger"]

logger = escaping(init_logger("vllm.kvbm"))


class _Forward(logging.Handler):
    """Passes records of kvbm's own loggers on to vLLM's log."""

    def emit(self, record: logging.LogRecord) -> None:
        if logger.isEnabledFor(record.levelno):
            renamed = copy.copy(record)
            renamed.name = logger.name
            logger.handle(renamed)


def forward() -> None:
    """Show kvbm's own log in vLLM's, unless the program has given it handlers.  ``KVBM_LOG`` gives the level of both."""
    log.hide()
    root, least = logging.getLogger("kvbm"), log.level()
    if least is not None:
        logger.setLevel(least)
        root.setLevel(least)
    if not root.handlers:
        root.addHandler(_Forward())
        if root.level == logging.NOTSET:
            root.setLevel(logger.getEffectiveLevel())


forward()
