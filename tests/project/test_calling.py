"""Hostile arguments of public functions: some of the calls that tools/fuzz.py makes with ``--kind call``."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import calling
import kvbm
from kvbm._arguments import flag, listed, number, quoted, require_a, require_text, whole, wholes


@pytest.mark.slow
def test_each_public_call_works_or_is_refused_in_kvbm_s_words() -> None:
    """Red: 144 of 1,300 calls ended with another exception, some with the process: torch cannot print a freed tensor."""
    done, wrong = calling.tried(calling.found(), 0, 2)
    assert not wrong, "\n".join(f"{name} {number}: {said}" for name, number, said in wrong)
    assert done["works"] > 100 and done["refused"] > 50


@pytest.mark.slow
def test_what_no_call_may_do_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(error: BaseException) -> None:
        monkeypatch.setattr(kvbm.Pool, "units", property(lambda _: (_ for _ in ()).throw(error)))
        calling.found.cache_clear()

    for error in (
        AttributeError("x"),
        KeyError("x"),
        RuntimeError("x"),
        OverflowError("x"),
        RecursionError(),
        UserWarning("x"),
    ):
        breaks(error)
        with pytest.raises(calling.Violation, match=type(error).__name__):
            calling.call("kvbm.Pool.units", 0)
    calling.found.cache_clear()


class _Breaks:
    """Raises an error in whatever it is asked."""

    def __init__(self, error: type[Exception]) -> None:
        self._error = error

    def _raise(self, *_: Any) -> Any:
        raise self._error("own")

    __index__ = __len__ = __iter__ = __eq__ = __bool__ = __repr__ = __str__ = __lt__ = _raise
    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "error", [TypeError, ValueError, KeyError, RuntimeError, RecursionError, MemoryError, StopIteration]
)
def test_an_argument_s_own_code_raises_nothing(error: type[Exception]) -> None:
    given: Any = _Breaks(error)
    assert whole(given) is None and wholes(given) is None and wholes([given]) is None
    assert quoted(given) == f"<_Breaks, whose repr raises {error.__name__}>" and "_Breaks" in quoted([given])
    for call in (
        lambda: number("n", given, 0), lambda: listed("n", given, "a list"), lambda: flag("n", given),
        lambda: require_a(int, "n", given, "an int"), lambda: require_text("n", given, ["a"]),
    ):  # fmt: skip
        with pytest.raises(kvbm.BindError, match=r"^n: expected .*_Breaks"):
            call()


@pytest.mark.slow  # 0.5 s
def test_values_are_quoted_in_few_plain_characters() -> None:
    import torch

    freed = torch.zeros(4)
    freed.untyped_storage().resize_(0)
    loop: list[Any] = []
    loop.append(loop)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert quoted(freed) == "<Tensor of shape (4,), torch.float32>"
    assert quoted(10**5000) == "<an integer of 16610 bits>"
    assert quoted(-1) == "-1" and quoted("a") == "'a'" and quoted(True) == "True" and quoted((1, "a")) == "(1, 'a')"
    for value in (
        loop,
        deep,
        [10**5000],
        "x" * 10**7,
        b"x" * 10**7,
        range(10**5000),
        np.zeros(10**6),
        {1: freed},
        "\x1b[0m",
        "\ud800",
    ):
        text = quoted(value)
        assert len(text) <= 200 and text.isprintable() and text.encode(), type(value)


def test_numbers_are_read_up_to_a_limit() -> None:
    assert wholes(np.array([1, 2])) == (1, 2) and wholes({3}) == (3,) and wholes(range(3)) == (0, 1, 2)
    assert wholes(np.ma.masked_array([1, 2], [True, False])) is None and wholes([True]) is None and wholes("12") is None
    assert wholes(np.broadcast_to(np.int64(0), (1 << 40,))) is None and wholes(itertools.count(), 10) is None
    with pytest.raises(kvbm.BindError, match="n: expected numbers, at most 10, got more"):
        listed("n", itertools.count(), "numbers", most=10)


@pytest.mark.slow  # 1.0 s
def test_every_call_can_be_made_with_right_arguments() -> None:
    """A public function whose parameters `calling.VALID` does not know would only be refused."""
    import random

    for name in calling.found():
        rng = random.Random(name)
        function, described = calling._receiver(name, rng)
        calling._arguments(name, described and function, rng)
    while calling._ENDPOINTS:
        calling._ENDPOINTS.pop().close()
