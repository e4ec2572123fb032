"""Inputs that are almost right: five thousand of the million that tools/fuzz.py can run."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import fuzzing
import kvbm
from kvbm import BlockShape, LayoutError
from kvbm.layout import address_map, resolved, spec
from kvbm.store import header

#: Cases of a kind.
CASES = {
    "layout": 1000, "shape": 250, "shape file": 150, "placement": 400, "preset": 250, "file": 250, "arrays": 250, "ids": 250
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", fuzzing.KINDS)
def test_inputs_are_taken_or_refused(kind: str) -> None:
    taken = sum(fuzzing.try_case(kind, number) for number in range(CASES[kind]))
    assert 0.05 < taken / CASES[kind] < 0.9, "hardly an input is taken, or refused: the rest of the law is not tried"


def _as_it_is(name: str, said: Any, start: int) -> header.Entry:
    return header.Entry(said["dtype"], said["shape"], start + said["data_offsets"][0], start + said["data_offsets"][1])


def _merge_all(loops: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """One loop, as if each loop continued where the one before it ends."""
    extents, strides = zip(*((extent, strides) for extent, *strides in loops), strict=True)
    return [(math.prod(extents), *strides[0])]


CHECKS: dict[str, tuple[str, Any, str, Any, Any]] = {
    "splits cover an axis": ("layout", resolved, "_require_cover", lambda *_: None, AssertionError),
    "planes are apart": ("layout", resolved, "_require_disjoint", lambda *_: None, AssertionError),
    "digits go on": ("layout", address_map, "coalesce", _merge_all, AssertionError),
    "a header holds numbers": ("file", header, "_entry", _as_it_is, (LookupError, TypeError, ValueError)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_a_check_that_is_gone_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kind, home, check, instead, error = CHECKS[name]
    fuzzing.seeds(), fuzzing.stored_files()
    monkeypatch.setattr(home, check, instead)
    with pytest.raises(error):
        all(fuzzing.try_case(kind, number) is not None for number in range(CASES[kind]))


# ---- what was found ------------------------------------------------------------------------------------------------


@pytest.mark.sanitize
def test_k_and_v_of_planes_are_two() -> None:
    """Red: no=3 was accepted although only K and V had orders, and the third part was never copied."""
    layout = spec.parse(
        "order: b o <data scale>\nplanes: {data: {order: {k: h t d, v: h d t}}, scale: {order: t h, dtype: float32}}"
    )
    layout.resolve(BlockShape(nl=1, no=2, nh=2, nt=2, hd=2), 1)
    with pytest.raises(LayoutError, match="K and V have orders of their own, so no must be 1 or 2, got 3"):
        layout.resolve(BlockShape(nl=1, no=3, nh=2, nt=2, hd=2), 1)


@pytest.mark.sanitize
@pytest.mark.parametrize("blocks", [np.array([1, 2]), "2", 2.0, True, [2], type])
def test_a_number_of_blocks_that_is_none(blocks: Any) -> None:
    with pytest.raises(kvbm.BindError, match="one: num_blocks: expected an integer"):
        kvbm.Pool(fuzzing.ONE, fuzzing._SMALL, np.zeros((2, 2, 2, 2, 2, 4), "int16"), num_blocks=blocks)


@pytest.mark.sanitize
@pytest.mark.parametrize("name", ["__cuda_array_interface__", "__dlpack__", "__dlpack_device__", "device", "dtype"])
@pytest.mark.parametrize("error", [OSError, ZeroDivisionError, AssertionError, StopIteration])
def test_objects_whose_own_code_fails(name: str, error: type[Exception]) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise error("for a reason")

    said: dict[str, Any] = {"__dlpack__": fails, "__dlpack_device__": lambda _: (1, 0)}
    if name in ("device", "dtype"):
        said = {"__cuda_array_interface__": {"shape": (1,), "typestr": "<i2", "data": (64, False), "version": 3}}
    given = type("Given", (), {**said, name: fails if name in said else property(fails)})()
    with pytest.raises(kvbm.BindError, match=r"one: array 0: .*for a reason"):
        kvbm.Pool(fuzzing.ONE, fuzzing._SMALL, given)
    (src, _), (dst, _) = fuzzing._pair()
    with pytest.raises(kvbm.BindError, match="src_ids: "):
        kvbm.convert(src, dst, given, [0])


@pytest.mark.sanitize
def test_a_case_is_its_number() -> None:
    made = [fuzzing.layout_text(random.Random("layout 5")) for _ in range(2)]
    assert made[0] == made[1]
