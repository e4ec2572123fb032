"""The tuning table: its costs against simulated machines and against measurements of an H200, and its file."""

from __future__ import annotations

import csv
import itertools
import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.copy import autotune, cost_model, strategies
from kvbm.copy.cost_model import BUILT_IN, Cost, Row, Way

GPU, DRIVER = "Test GPU 80GB (PCIe)", "580.1"
KIB, MIB = 1 << 10, 1 << 20
ROOT = Path(__file__).resolve().parents[2]
PLAIN = cost_model.Table(
    GPU,
    DRIVER,
    "2026-01-31",
    "0.0.7",
    tuple(
        Row("d2h", name, run, MIB, total, float(f"{fixed + total * slope:.4g}"))
        for name, fixed, slope in (("direct", 5e-6, 2e-11), ("staged", 20e-6, 1.8e-11), ("engine", 1e-5, 9e-11))
        for run in (4 * KIB, MIB)
        for total in (MIB, 64 * MIB)
    ),
)


@pytest.mark.quick
def test_strategies_have_the_numbers_of_the_compiled_half() -> None:
    header = (ROOT / "cuda" / "kvbm.h").read_text("utf-8")
    numbers = {name: int(number) for name, number in re.findall(r"\bKVBM_(DIRECT|STAGED|ENGINE) = (\d)", header)}
    assert numbers == {name.upper(): number for number, name in enumerate(strategies.STRATEGIES)}
    text = (ROOT / "src" / "kvbm" / "core" / "routes.pxi").read_text("utf-8")
    assert f"STRATEGIES = {strategies.STRATEGIES!r}".replace("'", '"') in text



@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBM_CACHE_DIR", str(tmp_path / "cache"))


def chosen(choice: cost_model.Choice, n: int) -> str:
    return next((name for limit, name in choice.limits[:-1] if n <= limit), choice.limits[-1][1])


# ---- what a batch costs --------------------------------------------------------------------------------------------

#: Microseconds a MiB of runs from long to short: of kernels, of the copy engine.
rising = st.lists(st.floats(0, 60), min_size=4, max_size=4).map(lambda more: np.cumsum([18.0, *more])[1:][::-1])


@st.composite
def machines(draw: Any) -> tuple[str, dict[str, Cost]]:
    """A direction, and the costs of the strategies in it."""
    direction = draw(st.sampled_from(("d2h", "h2d", "p2p")))
    found = {}
    for name in strategies.STRATEGIES:
        staged = name == "staged"
        slopes = tuple((run, float(us) / 1e6 / MIB) for run, us in zip(autotune.RUNS, draw(rising), strict=True))
        fixed, group, exposed = (draw(st.floats(0, most)) for most in (4e-5, 1e-5 * staged, 3e-12 * staged))
        found[name] = Cost(name, direction != "h2d", fixed, group, exposed, slopes)
    return direction, found


def measured(direction: str, costs: dict[str, Cost], noise: float = 0.0, seed: int = 1) -> cost_model.Table:
    """The result of `tuner.measure` on such a machine."""
    random = np.random.default_rng(seed)
    rows = [
        Row(direction, name, run, block, total, float(cost.seconds(total // block, block, Way(run))) * factor)
        for name, cost in costs.items()
        for run, block, totals in autotune.grid()
        for total in totals
        for factor in [float(random.uniform(1 - noise, 1 + noise))]
    ]
    return cost_model.Table(GPU, DRIVER, "2026-01-31", "0", tuple(rows))


#: Blocks and pieces that are not in the grid: Llama 3.1 8B, 70B, 70B on four GPUs, DeepSeek; whole, an array a layer, …
UNTUNED = [
    (block, dict(zip(strategies.STRATEGIES, map(Way, runs), strict=True)))
    for block, pieces in ((2 * MIB, 32), (5 * MIB, 80), (1310720, 80), (4497408, 61))
    for runs in (
        (256, block, 256),
        (block // pieces,) * 3,
        (block // pieces // 2, block // pieces, block // pieces // 2),
    )
]
BATCHES = (1, 2, 4, 8, 16, 64, 256)


@settings(max_examples=60, deadline=None)
@given(machines(), st.sampled_from(UNTUNED))
def test_the_choice_is_within_2_percent_of_the_best_also_away_from_what_was_measured(machine: Any, way: Any) -> None:
    (direction, costs), (block, ways) = machine, way
    for noise in (0.0, 0.002):
        choice = measured(direction, costs, noise).choose(direction, ways, block)
        for n in BATCHES:
            times = {name: float(costs[name].seconds(n, block, ways[name])) for name in costs}
            assert times[chosen(choice, n)] <= 1.02 * min(times.values()), (n, noise, times, choice)


@pytest.mark.slow  # half a second
@settings(max_examples=60, deadline=None)
@given(machines(), st.sampled_from(UNTUNED), st.lists(st.integers(1, 1 << 20), max_size=20), st.sampled_from([8, 32]))
def test_the_predicted_time_of_the_choice_is_the_least(machine: Any, way: Any, some: Any, chunk: int) -> None:
    (direction, costs), (block, ways) = machine, way
    every = {(direction, name): cost for name, cost in costs.items()}
    choice = cost_model.choose(every, direction, ways, block, chunk * MIB)
    ends = [limit for limit, _ in choice.limits]
    assert 1 <= len(ends) <= 8 and ends == sorted(set(ends))
    if len(ends) == 8:
        return  # where there were more, the narrowest are given up
    for n in {*range(1, 300), *some, *(end + k for end in ends for k in (0, 1) if end + k > 0)}:
        times = {name: float(cost.seconds(n, block, ways[name], chunk * MIB)) for name, cost in costs.items()}
        # Between the places that are looked at, groups of the ring may win and lose again by a hair.
        assert times[chosen(choice, n)] <= min(times.values()) * (1.002 if n > 100 else 1 + 1e-9), (n, times, choice)


@given(
    st.lists(
        st.builds(Row, st.just("d2h"), st.just("staged"), st.sampled_from((1, 300, 4096, MIB)), st.just(MIB),
                  st.integers(1, 100).map(lambda n: n * MIB), st.floats(1e-7, 10)), min_size=1, max_size=12,
    )
)  # fmt: skip
def test_no_rows_make_a_cost_that_falls_with_bytes_or_with_pieces(rows: list[Row]) -> None:
    cost = Cost.fit(rows)
    assert min(cost.fixed, cost.group, cost.exposed, *(slope for _, slope in cost.slopes)) >= 0
    # A batch that is packed at once exposes all of its bytes, one block more only those of a small group.
    times = replace(cost, exposed=0.0).seconds(np.arange(1, 2000), MIB, Way(500))
    assert np.isfinite(times).all() and (np.diff(times) >= 0).all()
    by_run = [cost.seconds_a_byte(run) for run in (1, 2, 200, 300, 1000, 4096, 10**5, MIB, 10**9)]
    assert all(a >= b * (1 - 1e-12) for a, b in itertools.pairwise(by_run))


def test_a_fit_finds_what_made_the_rows() -> None:
    slopes = tuple(zip(autotune.RUNS, (9e-11, 3e-11, 2e-11, 1.8e-11), strict=True))
    for direction in ("d2h", "h2d"):
        cost = Cost("staged", direction == "d2h", 9e-6, 4e-6, 1e-12, slopes)
        found = measured(direction, {"staged": cost}).costs[direction, "staged"]
        assert found.fixed == pytest.approx(9e-6) and found.group == pytest.approx(4e-6)
        assert found.exposed == pytest.approx(1e-12) and dict(found.slopes) == pytest.approx(dict(slopes))


def test_between_runs_the_number_of_pieces_counts() -> None:
    """Half as many pieces cost half; with logarithmic interpolation, a run of 1.3 MB seemed as slow as one of 0.96."""
    cost = Cost("staged", True, 0, 0, 0, ((256 * KIB, 2e-11), (4 * MIB, 1.8e-11)))
    assert cost.seconds_a_byte(512 * KIB) == pytest.approx(1.8e-11 + 2e-12 * 7 / 15)
    assert cost.seconds_a_byte(64 << 20) == 1.8e-11, "the longest"
    assert cost.seconds_a_byte(128 * KIB) == pytest.approx(1.8e-11 + 2e-12 * 31 / 15), "twice as many"
    assert Cost("direct", True, 0, 0, 0, cost.slopes).seconds_a_byte(64) == 2e-11, "a kernel does not mind"
    assert Cost("engine", True, 0, 0, 0, ((MIB, 1e-11),)).seconds_a_byte(MIB // 4) == 4e-11


@pytest.mark.parametrize(
    ("block", "chunk"), [(MIB, 32 * MIB), (5 * MIB, 32 * MIB), (48 * MIB, 32 * MIB), (1000, 8 * MIB)]
)
@pytest.mark.parametrize("gathers", [False, True])
def test_groups_are_those_of_the_engine(block: int, chunk: int, gathers: bool) -> None:
    """As staging.cpp counts them, with the same constants."""
    text = (ROOT / "cuda" / "staging.cpp").read_text(encoding="utf-8")
    small_bytes = re.search(r"kSmallGroupBytes = (\d+) << 20", text)
    at_once = re.search(r"<= (\d+) \* kSmallGroupBytes", text)
    assert small_bytes and int(small_bytes[1]) << 20 == cost_model._SMALL_GROUP
    assert at_once and int(at_once[1]) == cost_model._AT_ONCE
    counts = [*range(1, 40), 64, 1000]
    found = cost_model._groups(counts, block, chunk, gathers=gathers)
    for n, groups, exposed in zip(counts, *found, strict=True):
        most = max(chunk // block, 1)
        if gathers and n <= most and n * block <= 8 * MIB:
            assert (groups, exposed) == (0, n * block)
            continue
        size, left, sizes = min(most, max(2 * MIB // block, 1)), n, []
        while left > 0:
            sizes.append(min(size, left))
            left -= sizes[-1]
            size = most
        assert (groups, exposed) == (len(sizes), sizes[0] * block)


@pytest.mark.parametrize("direction", ["d2h", "h2d"])
def test_the_built_in_costs_are_those_of_an_h200(direction: str) -> None:
    """Compared with `benchmarks/results`: every time within 4 %, and each choice within 2 % of the best one."""
    with (ROOT / "benchmarks" / "results" / f"{direction}.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    points: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        if row["backend"] in ("direct", "staged") and "paged" not in row["pattern"]:
            points.setdefault((row["pattern"], int(row["num_blocks"])), {})[row["backend"]] = (
                float(row["median_ms"]) / 1e3
            )
    assert len(points) >= 4
    for (pattern, n), times in points.items():
        block = 5 * MIB
        ways = {"direct": Way(256), "staged": Way(32 * KIB if "flash" in pattern else block)}
        for name, seconds in times.items():
            predicted = float(BUILT_IN[direction, name].seconds(n, block, ways[name]))
            assert predicted == pytest.approx(seconds, rel=0.04), (pattern, n, name)
        choice = cost_model.choose(BUILT_IN, direction, ways, block)
        assert times[chosen(choice, n)] <= 1.02 * min(times.values()), (pattern, n, choice)


@pytest.mark.parametrize("direction", ["d2h", "h2d"])
def test_on_a_noisy_h200_the_choice_is_still_within_2_percent(direction: str) -> None:
    """With 1 % noise; the former thresholds, with logarithmic times, missed by up to 11 % without noise."""
    costs = {name: BUILT_IN[direction, name] for name in ("direct", "staged")}
    for seed, (block, ways) in itertools.product(range(3), UNTUNED):
        choice = measured(direction, costs, 0.01, seed).choose(direction, {name: ways[name] for name in costs}, block)
        for n in BATCHES:
            times = {name: float(cost.seconds(n, block, ways[name])) for name, cost in costs.items()}
            assert times[chosen(choice, n)] <= 1.02 * min(times.values()), (seed, block, ways, n, choice)


def test_on_one_gpu_the_engine_must_be_ahead() -> None:
    for ahead, name in ((1.049, "direct"), (1.051, "engine")):
        made = cost_model.Table(GPU, DRIVER, "", "", tuple(
            Row("d2d", strategy, MIB, MIB, total, total * 1e-12 * factor)
            for strategy, factor in (("direct", ahead), ("engine", 1.0)) for total in (MIB, 4 * MIB)
        ))  # fmt: skip
        assert made.choose("d2d", dict.fromkeys(strategies.STRATEGIES, Way(MIB)), MIB).limits == ((0, name),)


def test_what_was_not_measured_is_not_taken() -> None:
    ways = dict.fromkeys(strategies.STRATEGIES, Way(MIB))
    assert PLAIN.choose("h2d", ways, MIB) is None
    assert PLAIN.choose("d2h", {"engine": Way(MIB)}, MIB).limits == ((0, "engine"),)
    assert PLAIN.directions == ("d2h",)
    choice = PLAIN.choose("d2h", ways, MIB)
    (last, first), (_, then) = choice.limits
    assert (first, then) == ("direct", "staged")
    assert choice.why.startswith(f"up to {last} MiB direct (") and ", beyond that staged (" in choice.why


def test_several_launches_cost_several_times_the_fixed_time() -> None:
    one, two = (PLAIN.costs["d2h", "direct"].seconds(1, MIB, Way(MIB, launches)) for launches in (1, 2))
    assert two - one == pytest.approx(PLAIN.costs["d2h", "direct"].fixed)


def test_at_most_eight_entries_are_left() -> None:
    made = [(2**i + i % 3, ("direct", "staged")[i % 2]) for i in range(20)]
    found = cost_model._few(list(made))
    assert 2 < len(found) <= 8 and [limit for limit, _ in found] == sorted({limit for limit, _ in found})
    assert all(one[1] != behind[1] for one, behind in itertools.pairwise(found)) and found[-1] == made[-1]


# ---- the file ------------------------------------------------------------------------------------------------------


def test_round_trip() -> None:
    where = cost_model.save(PLAIN)
    assert cost_model.load(GPU, DRIVER) == PLAIN
    assert where == cost_model.path(GPU, DRIVER) and where.name == "tuning-test-gpu-80gb-pcie-580.1-v2.json"
    assert [p.name for p in where.parent.iterdir()] == [where.name]
    assert cost_model.load(GPU, "580.2") is None and cost_model.load("another", DRIVER) is None


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def folder() -> str:
        return str(cost_model.path(GPU, DRIVER).parent)

    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.setenv("KVBM_CACHE_DIR", "/mine")
    assert folder() == "/mine"
    monkeypatch.delenv("KVBM_CACHE_DIR")
    assert folder() == "/somewhere/kvbm"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert folder() == "/home/me/.cache/kvbm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert folder() == "/home/me/.cache/kvbm"


def change(**given: Any) -> Callable[[str], str]:
    return lambda text: json.dumps({**json.loads(text), **given})


@pytest.mark.parametrize(
    "broken",
    [
        lambda _: "",
        lambda _: "[]",
        lambda _: "[" * 100_000,
        lambda _: "null",
        lambda text: text + "{",
        lambda _: json.dumps({}),
        change(version=1),
        change(gpu="another"),
        change(driver="another"),
        change(date=None),
        change(rows=[]),
        change(rows={}),
        change(rows=[["d2h", "direct", 4096, 4096, 4096]]),
        change(rows=[["d2h", "direct", 4096, 4096, 4096, 0.0]]),
        change(rows=[["d2h", "direct", 4096, 4096, 4096, float("nan")]]),
        change(rows=[["d2h", "direct", 4096, 4096, 4096, float("inf")]]),
        change(rows=[["d2h", "direct", 4096, 4096, 4096, "1"]]),
        change(rows=[["d2h", "direct", 0, 4096, 4096, 1e-4]]),
        change(rows=[["d2h", "sideways", 4096, 4096, 4096, 1e-4]]),
        change(rows=[["up", "direct", 4096, 4096, 4096, 1e-4]]),
    ],
)
def test_a_file_that_is_not_a_table(broken: Callable[[str], str], caplog: pytest.LogCaptureFixture) -> None:
    where = cost_model.save(PLAIN)
    where.write_text(broken(where.read_text(encoding="utf-8")), encoding="utf-8")
    assert cost_model.load(GPU, DRIVER) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(where) in record.getMessage() and "`kvbm tune` remakes it" in record.getMessage()


@pytest.mark.slow  # half a second
def test_a_file_cut_anywhere(caplog: pytest.LogCaptureFixture) -> None:
    where = cost_model.save(PLAIN)
    whole = where.read_bytes().rstrip()
    for length in range(len(whole)):
        where.write_bytes(whole[:length])
        assert cost_model.load(GPU, DRIVER) is None
    assert len(caplog.records) == len(whole)
    where.write_bytes(b"\xff" + whole)
    assert cost_model.load(GPU, DRIVER) is None
    where.unlink()
    where.mkdir()
    assert cost_model.load(GPU, DRIVER) is None and "remakes" in caplog.records[-1].getMessage()


def test_a_file_appears_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    where = cost_model.save(PLAIN)

    def fails(self: Path, target: Path) -> None:
        assert where.exists() and cost_model.load(GPU, DRIVER) == PLAIN
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        cost_model.save(replace(PLAIN, date=""))
    assert cost_model.load(GPU, DRIVER) == PLAIN
    assert [p.name for p in where.parent.iterdir()] == [where.name]


@pytest.mark.slow  # half a second
@pytest.mark.quick
def test_two_processes_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """Readers get one of the two tables, never a mixture or a part."""
    program = Path(__file__).resolve().parents[1] / "programs" / "save_tables.py"
    writers = [subprocess.Popen([sys.executable, program, str(n), GPU, DRIVER], stdin=subprocess.PIPE) for n in (1, 2)]
    seen: set[tuple[str, int]] = set()
    end = time.monotonic() + 120
    while len(seen) < 2 and time.monotonic() < end and all(writer.poll() is None for writer in writers):
        found = cost_model.load(GPU, DRIVER)
        if found is not None:
            seen.add((found.date, len(found.rows)))
    for writer in writers:
        writer.communicate()
    assert [writer.returncode for writer in writers] == [0, 0]
    assert seen == {("1", 500), ("2", 1000)} and not caplog.records
    assert len(list(cost_model.path(GPU, DRIVER).parent.iterdir())) == 1
