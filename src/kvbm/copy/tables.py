"""The tables of copy speeds that this process has read or measured, and the choice of a strategy by them.

`kvbm.copy.autotune` measures what is missing.  Nothing here does.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import escaping
from ..system import machine
from ..system.locks import Lock
from . import cost_model
from .cost_model import BUILT_IN, Choice, Table, Way, reason
from .strategies import STRATEGIES

_log = escaping(logging.getLogger(__name__))


@dataclass
class Known:
    """What is known of a GPU."""

    table: Table | None  # its table, if there is one
    #: Directions that could not be measured, and why.  They are not measured again.
    failed: dict[str, str] = field(default_factory=dict)
    waiting: dict[str, str] = field(default_factory=dict)  # directions that were not measured yet, and why

    def has(self, direction: str) -> bool:
        """True if the direction need not be measured: copies on one GPU never are."""
        return direction == "d2d" or (self.table is not None and direction in self.table.directions)


_by_device: dict[int, Known] = {}

#: Held while a table is read or measured, so that this happens once.
lock = Lock()


def reload() -> None:
    """Forget all tables and failed measurements of this process."""
    with lock:
        _by_device.clear()


def known(device: int) -> Known:
    """What is known of a GPU; reads its file once.  Call it with `lock`."""
    found = _by_device.get(device)
    if found is None:
        found = _by_device[device] = Known(cost_model.load(*machine.gpu_and_driver(device)))
    return found


def limits(direction: str, device: int, ways: Mapping[str, Way], block_bytes: int, chunk_bytes: int) -> Choice:
    """The fastest strategy per range of pair counts on this machine, and the reason.

    The contiguous bytes of `ways` are, for ``direct``, those on both sides; for ``staged``, those in the pieces that
    the copy engine moves; for ``engine``, those in the merged runs.  A defective table never raises an error.  Without
    a table, costs that were measured on another machine are used.
    """
    try:
        table, why = _find(direction, device)
        if table is not None:
            found = table.choose(direction, ways, block_bytes, chunk_bytes)
            if found is not None:
                return Choice(found.limits, f"measured on this machine ({table.title}): {found.why}")
            why = f"the table of {table.date} has no row for {direction}"
    except Exception as error:  # a defective cache file must not stop a server
        why = reason(error)
        text = traceback.format_exc()  # not the error: who keeps the record would keep the pools
        _log.warning("kvbm: the table of copy speeds cannot be used, the built-in rule is (%s)\n%s", why, text)
    if direction == "d2d":
        why = "one kernel on one GPU is the fastest way there"
    elif "direct" not in ways:
        why = f"the GPUs do not reach each other's memory; the built-in rule, because {why}"
    else:
        why = f"the built-in rule, because {why}"
    built_in = cost_model.choose(BUILT_IN, direction, ways, block_bytes, chunk_bytes)
    if built_in is None:
        return Choice(((0, next(name for name in STRATEGIES if name in ways)),), why)
    return Choice(built_in.limits, why)


def _find(direction: str, device: int) -> tuple[Table | None, str]:
    """The table with this direction; or None, and why there is none."""
    with lock:
        found = known(device)
        if found.has(direction):
            return found.table, ""
        if os.environ.get("KVBM_TUNE") == "0":
            return None, f"{direction} was never measured here and KVBM_TUNE=0 forbids to; `kvbm tune` does it"
        why = found.failed.get(direction) or found.waiting.get(direction)
        return None, why or f"{direction} was never measured here; `kvbm tune` does it"
