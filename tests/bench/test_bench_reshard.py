"""`python -m benchmarks reshard`: cases, rows and the check.  Small sizes; no time is asserted."""

from __future__ import annotations

import contextlib
import sys

import pytest

import benching
from benching import MODEL, ON_CPU, run
from benchmarks import messages, race, reshard
from kvbm.bench.check import WrongCopyError

pytestmark = pytest.mark.usefixtures("small_caches")
PLACES = ("cpu", "cpu")


def ran(*arguments: str) -> list[dict[str, str]]:
    rows = benching.ran(reshard.reshard, *ON_CPU, *arguments)
    assert tuple(rows[0]) == race.COLUMNS
    return rows


@pytest.mark.parametrize("case", messages.cases(MODEL), ids=lambda case: case.name)
def test_every_case_is_copied_right_and_a_wrong_copy_is_seen(case: messages.Case) -> None:
    with contextlib.ExitStack() as stack:
        bound = messages.Bound(case, PLACES, 8, stack)
        bound.check(bound.move.copy, 8, "kvbm")
        if "torch" in sys.modules:
            copy = reshard.by_torch(bound)
            bound.check(lambda *ids: copy(*ids, None), 8, "torch")
        with pytest.raises(WrongCopyError, match="was to arrive"):
            bound.check(lambda src_ids, dst_ids: bound.move.copy(src_ids[::-1].copy(), dst_ids), 8, "kvbm")
        with pytest.raises(WrongCopyError, match="was to stay"):
            # As many units again, which nobody asked for.
            bound.check(lambda src_ids, dst_ids: bound.move.copy(*others(bound, src_ids, dst_ids)), 8, "kvbm")


def others(bound: messages.Bound, src_ids, dst_ids):  # type: ignore[no-untyped-def]
    """The pairs, and all other units of the destination."""
    src, dst = (section.num_ids for section in bound.sections)
    more = [unit for unit in range(dst) if unit not in set(dst_ids.tolist())]
    return [*src_ids.tolist(), *(i % src for i in range(len(more)))], [*dst_ids.tolist(), *more]


@pytest.mark.slow
def test_rows_say_what_was_asked_for() -> None:
    rows = ran("--what", "messages,equal", "--quick")
    assert {row["by"] for row in rows if row["beside"] == "memcpy"} >= {"kvbm", "pools"}
    assert [row["asked"] for row in rows if row["by"] == "kvbm"] == [">= 0.9", ">= 0.9"]
    assert {row["asked"] for row in rows if row["beside"] == "pools"} == {">= 0.995"}
    assert all(row["reached"] in ("yes", "no") for row in rows if row["asked"])


def test_host_times_stand_beside_todays_calls() -> None:
    rows = ran("--what", "host,plan", "--quick")
    assert [row["asked"] for row in rows] == ["<= 1.3"] * 3 + ["<= 5 ms", "<= 50 ms"]
    assert all(float(row["median_ms"]) > 0 for row in rows)


def test_a_second_gpu_that_is_not_there_is_said(tmp_path) -> None:  # type: ignore[no-untyped-def]
    found = run(reshard.reshard, *ON_CPU, "--what", "peer,plan", "--quick", "--out", str(tmp_path / "out.csv"))
    assert found.exit_code == 0 and "it needs two GPUs" in found.stderr
    assert "reached" in found.stdout and "plan and proof" in found.stdout
