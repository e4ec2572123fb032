"""Links: every byte against the oracle over random placements, and each fault in its stated error, with no slot lost."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard_oracle
from kvbm import BindError, DigestError, PeerLostError, TransferError, TransferTimeoutError, wire
from kvbm.reshard import notes
from linking import LIMIT, Linked, ended, plain_case
from reshard_oracle import RefusedError, random_case

pytestmark = pytest.mark.threads


def linked(seed: int, **options: Any) -> Linked | None:
    case = random_case(seed)
    try:
        return Linked(case, **options)
    except (RefusedError, BindError):
        return None


@pytest.mark.parametrize("first", range(0, 200, 10))
def test_every_byte(first: int) -> None:
    """Random placements, layouts, ranges, origins; pushed and pulled, in windows of layers, in any order."""
    for seed in range(first, first + 10):
        found = linked(seed)
        if found is None:
            continue
        with found:
            try:
                handles = found.begin(random.Random(seed))
            except BindError as error:
                assert "without a block" in str(error) or "units" in str(error), error
                continue
            errors = ended(handles)
            if any(isinstance(error, TransferError) and "without a block" in str(error) for error in errors):
                continue
            assert not any(errors), (seed, errors)
            found.check()
            found.require_slots()
