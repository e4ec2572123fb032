"""Sequences carried in chunks: every byte by an oracle, digests of parts that add up, and what is refused."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import processes
import reshard_oracle
from chunking import Carried, is_sendable
from memory import aligned


def room(nbytes: int) -> np.ndarray:
    """A slot at a multiple of 16, full of noise."""
    return aligned(np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8))


def sendable(first: int, count: int) -> list[reshard_oracle.Case]:
    found: list[reshard_oracle.Case] = []
    seed = first
    while len(found) < count:
        case = reshard_oracle.replace(reshard_oracle.random_case(seed), clear_tail=False)
        found += [case] if is_sendable(case) else []
        seed += 1
    return found


@pytest.mark.parametrize("number", range(40))
def test_every_byte(number: int) -> None:
    """In the chunks, where a reader that shares no code finds every element, and in the destination's pools."""
    rng = random.Random(number)
    for case in sendable(70_000 + 100 * number, 4):
        try:
            run = reshard_oracle.Run(case, aligned, reshard_oracle.host_arrays)
            Carried(run, room, rng)(lambda slot: slot.tobytes(), rng.choice(["after", "before"]))
        except reshard_oracle.RefusedError:
            continue
        run.check(np.asarray)
