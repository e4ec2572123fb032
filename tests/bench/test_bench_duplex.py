"""`python -m benchmarks duplex`: rows, the check, and what waits for what.  Small sizes; no time is asserted."""

from __future__ import annotations

from typing import Any

import pytest

import benching
from benching import MODEL, ON_CPU, run
from benchmarks import duplex, race

pytestmark = pytest.mark.usefixtures("small_caches")


def test_each_direction_and_both() -> None:
    rows = benching.ran(duplex.duplex, *ON_CPU, "--num-blocks", "2,3")
    assert tuple(rows[0]) == race.COLUMNS
    keys = [(n, way, by) for n in ("2", "3") for way in duplex.WAYS for by in ("memcpy", "auto")]
    assert [(row["n"], row["case"], row["by"]) for row in rows] == keys
    for row in rows:
        assert int(row["total_bytes"]) == int(row["n"]) * MODEL.nbytes * (2 if row["case"] == "both" else 1)
        assert row["beside"] == "memcpy" and float(row["median_ms"]) > 0


@pytest.mark.parametrize("way", [0, 1])
def test_a_copy_that_is_wrong_while_the_other_runs_is_found(way: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = duplex._copy

    def half(move: Any, *rest: Any) -> None:
        if str(move).startswith("Transfer(universal") != bool(way):
            copy(move, *rest)

    monkeypatch.setattr(duplex, "_copy", half)
    found = run(duplex.duplex, *ON_CPU, "--num-blocks", "2")
    assert found.exit_code == 1 and f"{duplex.WAYS[way]}, auto, while the other direction runs" in str(found.exception)


def test_on_a_gpu_both_come_after_the_stream_and_it_waits_for_both() -> None:
    seen: list[tuple[Any, ...]] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait(self, other: Stream) -> None:
            seen.append((self.name, "waits for", other.name))

        def close(self) -> None:
            seen.append((self.name, "closed"))

    both = duplex.Both([Stream("a"), Stream("b")])
    both([lambda stream: seen.append(("store", stream.name)), lambda stream: seen.append(("load", stream.name))], Stream("clock"))
    forked, joined = [(name, "waits for", "clock") for name in "ab"], [("clock", "waits for", name) for name in "ab"]
    assert seen == [*forked, ("store", "a"), ("load", "b"), *joined]
    both.close()
    assert seen[-2:] == [("a", "closed"), ("b", "closed")]


def test_a_layout_that_cannot_be_copied_is_refused_before_anything_is_measured() -> None:
    found = run(duplex.duplex, *ON_CPU, "--pair", "nhd")
    assert "expected SRC:DST" in str(found.exception)
    assert "expected some of auto" in run(duplex.duplex, *ON_CPU, "--strategy", "fast").stderr
