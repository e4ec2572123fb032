"""`kvbm bench`: pools, ids, clocks, the bitwise check, peers, the sweep and its CSV."""

from __future__ import annotations

import csv
import ctypes
import dataclasses
import itertools
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result
from test_import import fresh

import kvbm
import matrix
import pages
from benchmarks import __main__ as studies
from benchmarks import targets
from coordinates import in_case
from kvbm.bench import backends, copies, measure, peers, table
from kvbm.bench import cli as bench_cli
from kvbm.bench.check import Check, WrongCopyError, _Blocks
from kvbm.cli.app import main
from kvbm.system import clock

SHAPE_TEXT = "nl=3,no=2,nh=4,nt=16,hd=32,dtype=bfloat16"
SHAPE = kvbm.load_shape(SHAPE_TEXT)

#: Rows, tiles, plain copies, K and V apart, opaque on either side, a table on either side.
PAIRS = [
    "nhd:universal",
    "universal:nhd",
    "nhd:operational",
    "operational:hnd",
    "operational:operational",
    "universal:vllm/paged_attn_v0",
    "vllm/paged_attn_v0:nhd",
    "vllm/LBHNC:hf/dynamic_cache",
]


@pytest.fixture(autouse=True)
def small(small_caches: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KVBM_TUNE", "0")  # no measuring for `auto`, and nothing written to the cache of whoever tests
    copies._names.cache_clear()
    yield
    copies._names.cache_clear()


def two_pools(
    stack: ExitStack, pair: str, src_blocks: int = 9, dst_blocks: int = 11, shape: kvbm.BlockShape = SHAPE
) -> tuple[kvbm.Pool, kvbm.Pool]:
    _, src, dst = copies.Pair.parse(pair)
    return (
        stack.enter_context(measure.random_pool(src, shape, src_blocks, "cpu", seed=1)),
        stack.enter_context(measure.random_pool(dst, shape, dst_blocks, "cpu", seed=2)),
    )


def bench(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["bench", *(str(a) for a in args)], env={"COLUMNS": "200"})


def swept(*args: str | Path, device: str = "cpu") -> Result:
    """The sweep runs on the CPU, even with a GPU present."""
    return bench("--shape", SHAPE_TEXT, "--iters", "2", "--warmup", "1", "--device", device, *args)


def swept_on_gpu(*args: str | Path) -> Result:
    return swept(*args, device="cuda:0")


def rows_of(text: str) -> list[dict[str, str]]:
    comment, *lines = text.splitlines()
    assert comment.startswith("# kvbm ")
    return list(csv.DictReader(lines))


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write a module with a function ``copy_blocks`` to the working directory, where it is searched for; return its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    numbers = itertools.count()

    def write(body: str) -> str:
        name = f"peer_{tmp_path.name.replace('-', '_')}_{next(numbers)}"
        (tmp_path / f"{name}.py").write_text("import kvbm\n" + textwrap.dedent(body), encoding="utf-8")
        return f"{name}:copy_blocks"

    return write


RIGHT = """
    def copy_blocks(src, dst):
        return lambda src_ids, dst_ids, stream: kvbm.Transfer(src, dst).copy(src_ids, dst_ids, stream=stream)
"""
WRONG = """
    def copy_blocks(src, dst):
        move = kvbm.Transfer(src, dst)
        return lambda src_ids, dst_ids, stream: move.copy(src_ids[::-1].copy(), dst_ids, stream=stream)
"""


# ---- pools, ids ----------------------------------------------------------------------------------------------------


def test_stacked_chunks_lie_as_an_engine_has_them() -> None:
    with measure.random_pool(kvbm.load("nhd"), SHAPE, 5, "cpu") as pool:
        chunk = SHAPE.nbytes // SHAPE.nl // SHAPE.no
        base = int(pool.addresses.min())
        for b, layer, o in itertools.product(range(5), range(SHAPE.nl), range(SHAPE.no)):
            entry, _ = pool.resolved.address(b, l=layer, o=o)
            assert int(pool.addresses[entry]) - base == ((layer * SHAPE.no + o) * 5 + b) * chunk


@pytest.mark.parametrize("name", ["nhd", "universal", "vllm/LBHNC", "vllm/paged_attn_v0"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float32"])
def test_pools_are_full_of_noise(name: str, dtype: str) -> None:
    shape = kvbm.load_shape(f"nl=3,no=2,nh=4,nt=16,hd=32,dtype={dtype}")
    with measure.random_pool(kvbm.load(name), shape, 6, "cpu") as pool:
        blocks = _Blocks(pool, pool.resolved, ())
        loaded = [blocks.load(b) for b in range(6)]
        for one in loaded:
            assert len(np.unique(one)) == 256  # a stretch that was left empty would be zeros
            assert np.bincount(one.reshape(-1), minlength=256).max() < one.size // 64
        for one, other in itertools.combinations(loaded, 2):
            assert (one != other).mean() > 0.98


def test_pools_are_larger_than_the_cache_and_twice_the_batch() -> None:
    layout = kvbm.load("universal")
    assert measure.held_blocks(layout, SHAPE, 100, "cpu") == 200
    assert measure.held_blocks(layout, SHAPE, 1, "cpu") * SHAPE.nbytes >= 2 * measure.cache_bytes("cpu")


def test_ids_are_random_and_take_turns() -> None:
    ids = measure.Ids(50, 70, 8)
    assert len(ids.sets) >= 6
    seen = [next(ids) for _ in range(len(ids.sets) + 1)]
    assert seen[0][0] is seen[-1][0]
    for src, dst in ids.sets:
        assert len(set(src.tolist())) == len(set(dst.tolist())) == 8
        assert max(src) < 50 and max(dst) < 70
    assert len({tuple(src.tolist()) for src, _ in ids.sets}) == len(ids.sets)
    assert len({int(dst.max()) for _, dst in ids.sets}) > 1
    for one, other in itertools.pairwise(
        measure.Ids(16, 16, 8, least=20).sets
    ):  # a cache may hold what came just before
        assert not set(one[0].tolist()) & set(other[0].tolist())
        assert not set(one[1].tolist()) & set(other[1].tolist())
    assert len(measure.Ids(10, 10, 8).sets[1][0]) == 8  # too few for that
    assert measure.Ids.for_cache(1 << 10, "cpu") * 2 * (1 << 10) >= 4 * measure.cache_bytes("cpu")


# ---- clocks --------------------------------------------------------------------------------------------------------


def test_cpu_clock_counts_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 5.0, 10.0, 11.0, 20.0, 22.0])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(ticks))
    calls: list[object] = []
    assert clock.CpuClock().time(calls.append, iters=3, warmup=2) == (2.0, 1.0, 5.0, "clock")
    assert calls == [None] * 5


def test_a_status_that_is_not_success_is_an_error() -> None:
    class Status(int):
        name = "CUDA_ERROR_INVALID_VALUE"

    assert clock.cuda((0, 7), "x") == 7
    assert clock.cuda((0,), "x") is None
    with pytest.raises(kvbm.CudaError, match="asking: CUDA_ERROR_INVALID_VALUE") as caught:
        clock.cuda((Status(1), 7), "asking")
    assert caught.value.code == 1


# ---- the check -----------------------------------------------------------------------------------------------------


def test_formula_is_the_address() -> None:
    """The vectorised formula must equal the scalar one."""
    for name in sorted(set(kvbm.layouts()) - set(matrix.planar())):
        with in_case(name):
            _check_formula_is_the_address(name)


def _check_formula_is_the_address(name: str) -> None:
    random = np.random.default_rng(0)
    layout = kvbm.load(name)
    shape = SHAPE if "h" in layout.order_text else dataclasses.replace(SHAPE, no=1, nh=1)  # latents have no heads
    shape = shape if "l" in layout.order_text else dataclasses.replace(shape, nl=1, nt=128)  # nor scales layers
    with measure.random_pool(layout, shape, 4, "cpu") as pool:
        blocks = _Blocks(pool, pool.resolved, ())
        for element in random.integers(blocks.entry.size, size=50).tolist():
            at = dict(zip(blocks.axes, (int(i) for i in np.unravel_index(element, blocks.sizes)), strict=True))
            entry, offset = pool.resolved.address(2, **at)
            assert int(blocks._at(2, blocks.entry[element], blocks.offset[element])) == int(pool.addresses[entry]) + offset
            assert blocks.coordinate(element) == " ".join(f"{axis}={i}" for axis, i in at.items())


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("batch", [1, 5])
def test_check_passes_what_is_right(pair: str, batch: int) -> None:
    with ExitStack() as stack:
        src, dst = two_pools(stack, pair)
        asked: list[int] = []

        def copy(src_ids: Any, dst_ids: Any) -> None:
            asked.append(len(src_ids))
            kvbm.convert(src, dst, src_ids, dst_ids)

        Check(src, dst)(copy, batch, "x")
        assert asked == [batch]


def _nothing(src: kvbm.Pool, dst: kvbm.Pool, src_ids: Any, dst_ids: Any) -> None:
    """Copies nothing at all."""


def _other_block(src: kvbm.Pool, dst: kvbm.Pool, src_ids: Any, dst_ids: Any) -> None:
    """Copies from a neighbour."""
    kvbm.convert(src, dst, (src_ids + 1) % src.num_blocks, dst_ids)


def _too_many(src: kvbm.Pool, dst: kvbm.Pool, src_ids: Any, dst_ids: Any) -> None:
    """Also writes all blocks that were not requested."""
    kvbm.convert(src, dst, src_ids, dst_ids)
    others = np.setdiff1d(np.arange(dst.num_blocks), dst_ids)
    kvbm.convert(src, dst, np.arange(len(others)), others)


def _into_source(src: kvbm.Pool, dst: kvbm.Pool, src_ids: Any, dst_ids: Any) -> None:
    """Makes both sides equal by copying in the wrong direction."""
    kvbm.convert(dst, src, dst_ids, src_ids)


def _one_byte(src: kvbm.Pool, dst: kvbm.Pool, src_ids: Any, dst_ids: Any) -> None:
    """Turns one bit of one element of every block."""
    kvbm.convert(src, dst, src_ids, dst_ids)
    for block in dst_ids.tolist():
        entry, offset = dst.resolved.address(block, l=2, o=1, h=3, t=7, d=11)
        ctypes.c_uint8.from_address(int(dst.addresses[entry]) + offset).value ^= 1


def _late_block(src: kvbm.Pool, dst: kvbm.Pool, src_ids: Any, dst_ids: Any) -> None:
    """Omits one block of many: the last of the check's random ids."""
    kvbm.convert(src, dst, src_ids[:-1], dst_ids[:-1])


@pytest.mark.parametrize("wrong", [_nothing, _other_block, _too_many, _into_source, _one_byte, _late_block])
@pytest.mark.parametrize("pair", ["nhd:universal", "vllm/LBHNC:vllm/paged_attn_v0", "nhd:operational"])
def test_check_catches_what_is_wrong(wrong: Callable[..., None], pair: str) -> None:
    with ExitStack() as stack:
        src, dst = two_pools(stack, pair, 30, 30)
        if wrong is _into_source and "operational" in pair:
            pair = "x"  # opaque copies go both ways, too
        check = Check(src, dst)
        batch = 25 if wrong is _late_block else 8
        check(lambda i, j: kvbm.convert(src, dst, i, j), batch, "x")
        with pytest.raises(WrongCopyError, match="nhd by me: wrong") as caught:
            check(lambda i, j: wrong(src, dst, i, j), batch, "nhd by me")
        assert caught.value.exit_code == 1
        if wrong is _one_byte and pair == "nhd:universal":
            assert "l=2 o=1 h=3 t=7 d=11 of block" in str(caught.value)
        if wrong is _too_many:
            assert "was not asked for" in str(caught.value)


def test_what_stood_there_before_does_not_pass_for_a_copy() -> None:
    with ExitStack() as stack:
        src, dst = two_pools(stack, "nhd:universal", 1, 1)
        check = Check(src, dst)
        check(lambda i, j: kvbm.convert(src, dst, i, j), 1, "x")
        with pytest.raises(WrongCopyError):
            check(lambda i, j: None, 1, "x")  # noqa: ARG005


def test_every_set_of_ids_is_seen_before_the_clock_starts(
    plug_in: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = plug_in("""
        seen = []
        def copy_blocks(src, dst):
            move = kvbm.Transfer(src, dst)
            def copy(src_ids, dst_ids, stream):
                seen.append(id(src_ids))
                move.copy(src_ids, dst_ids)
            return copy
    """)
    counts = []
    real = clock.CpuClock.time

    def time(self: clock.CpuClock, call: clock.Call, **rest: Any) -> clock.Timed:
        module = sys.modules.get(name.partition(":")[0])
        counts.append((len(set(module.seen)), measure.Ids.for_cache(SHAPE.nbytes, "cpu")) if module else (0, 0))
        return real(self, call, **rest)

    monkeypatch.setattr(clock.CpuClock, "time", time)
    assert swept("--num-blocks", "1", "--pair", "nhd:universal", "--no-peers", "--peer", name).exit_code == 0
    seen, sets = max(counts)
    assert seen == max(sets, 6) + 1  # and those of the check


def test_check_reads_and_writes_exactly_a_block() -> None:
    with ExitStack() as stack:
        src, _ = two_pools(stack, "vllm/LBHNC:nhd")
        blocks = _Blocks(src, src.resolved, ())
        before = [blocks.load(b) for b in range(9)]
        blocks.spoil(4, seed=1)
        for b in range(9):
            assert np.array_equal(blocks.load(b), before[b]) == (b != 4)
        assert (blocks.load(4) != before[4]).mean() > 0.98


# ---- runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS)
def test_runs_copied_one_by_one_are_the_copy(pair: str) -> None:
    with ExitStack() as stack:
        src, dst = two_pools(stack, pair)
        made = kvbm.plan(src.layout, dst.layout, SHAPE, num_blocks=(9, 11))
        counts = []

        def copy(src_ids: Any, dst_ids: Any) -> None:
            for part in backends.runs(src, dst, made, src_ids, dst_ids):
                counts.append(len(part.src) * part.size)
                for a, b in zip(part.src.tolist(), part.dst.tolist(), strict=True):
                    ctypes.memmove(b, a, part.size)

        Check(src, dst)(copy, 3, pair)
        assert sum(counts) == 3 * SHAPE.nbytes


# ---- targets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pair", "shape", "direction", "backend", "batch", "timing", "ratio"),
    [
        ("nhd:universal", "llama-3.1-70b", "d2d", "direct", 256, "events", 0.97),
        ("nhd:universal", "llama-3.1-70b", "d2d", "direct", 63, "events", 0.95),
        ("nhd:universal", "llama-3.1-70b", "d2d", "direct", 4, "events", 0.90),
        ("nhd:universal", "llama-3.1-70b", "d2d", "direct", 1, "events", None),
        ("nhd:universal", "llama-3.1-70b", "d2d", "direct", 1, "replay", 0.90),
        ("nhd:operational", "llama-3.1-70b", "d2d", "direct", 64, "events", 0.97),
        ("nhd:vllm/paged_attn_v0", "llama-3.1-70b", "d2d", "direct", 64, "events", 0.93),
        ("nhd:vllm/paged_attn_v0", "llama-3.1-70b", "d2d", "direct", 16, "events", None),
        ("nhd:universal", "llama-3.1-8b,hd=64,dtype=float8_e4m3fn", "d2d", "direct", 64, "events", 0.90),
        ("nhd:universal", "llama-3.1-70b", "d2d", "staged", 64, "events", None),
        ("nhd:universal", "llama-3.1-70b", "d2d", "torch", 64, "events", None),
        ("nhd:universal", "llama-3.1-70b", "d2h", "auto", 64, "events", 0.985),
        ("nhd:universal", "llama-3.1-70b", "h2d", "auto", 63, "events", 0.95),
        ("nhd:universal", "llama-3.1-70b", "h2d", "auto", 1, "events", 0.90),
        ("nhd:universal", "llama-3.1-70b", "h2d", "direct", 64, "events", None),
        ("nhd:universal", "llama-3.1-70b", "p2p", "auto", 64, "events", 0.95),
        ("nhd:universal", "llama-3.1-70b", "h2h", "host", 1, "clock", 0.90),
    ],
)
def test_targets(pair: str, shape: str, direction: str, backend: str, batch: int, timing: str, ratio: float) -> None:
    _, src, dst = copies.Pair.parse(pair)
    made = kvbm.plan(src, dst, kvbm.load_shape(shape))
    row = {"direction": direction, "backend": backend, "num_blocks": str(batch), "timing": timing}
    row |= {"kernel": " ".join(made.kernels()), "copy_size": str(min(part.run_bytes for part in made.parts))}
    assert targets.target(row) == ratio


# ---- peers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_built_in_peers_are_right(pair: str, name: str) -> None:
    pytest.importorskip(name)
    with ExitStack() as stack:
        src, dst = two_pools(stack, pair)
        copy = dict(peers.installed("h2h"))[name](src, dst)
        check = Check(src, dst)
        check(lambda i, j: copy(i, j, None), 4, name)
        check(lambda i, j: copy(i, j, None), 1, name)


def test_peers_say_what_they_do_not_take(tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    for text, reason in (
        ('order: "[b] l o h t d"\npitch: {h: "nt*hd + 8"}', "has pitches"),
        ('order: "[b] l o (h d)/16 t (h d)%16"', None),
        ('order: "[b] l o h t/4 d t%4"', None),
    ):
        other.write_text(text, encoding="utf-8")
        with ExitStack() as stack:
            src, dst = two_pools(stack, f"nhd:{other}")
            if reason is None:
                copy = peers.numpy_take(src, dst)
                Check(src, dst)(lambda i, j, copy=copy: copy(i, j, None), 4, "numpy")
                continue
            with pytest.raises(peers.NotApplicable, match=reason):
                peers.numpy_take(src, dst)


def test_peers_refuse_irregular_allocations() -> None:
    layout = kvbm.load("universal")
    memory = np.zeros((8, 4, 3, 2, 16, 32), "int16")
    held = [memory[i] for i in (0, 1, 2, 3, 4, 5, 7)]
    with measure.random_pool(layout, SHAPE, 7, "cpu") as src, pytest.raises(peers.NotApplicable, match="regular"):
        peers.numpy_take(src, kvbm.Pool(layout, SHAPE, held))


@pytest.mark.parametrize("place", ["docstring", "page"])
def test_the_example_of_a_peer_runs(plug_in: Callable[[str], str], place: str) -> None:
    """The code in the module's docstring and in docs/howto/tune.md runs as the file that they describe."""
    assert peers.__doc__
    code = "\n".join(re.findall(r"^(?:>>>|\.\.\.) ?(.*)$", peers.__doc__, re.MULTILINE))
    if place == "page":
        (code,) = pages.blocks(pages.read("docs/howto/tune.md"), "python")
    name = plug_in(code).partition(":")[0] + ":block_by_block"
    result = swept("--direction", "h2h", "--pair", "universal:universal", "--num-blocks", "1,2", "--peer", name)
    assert result.exit_code == 0, result.output
    assert [row["backend"] for row in rows_of(result.stdout)].count(name) == 2
    refused = swept("--direction", "h2h", "--pair", "nhd:universal", "--num-blocks", "1", "--peer", name)
    assert refused.exit_code == 1 and "whole blocks of one layout" in refused.stderr


def test_a_wrong_peer_fails_the_run(plug_in: Callable[[str], str]) -> None:
    name = plug_in(WRONG)
    result = swept("--pair", "nhd:universal", "--num-blocks", "4", "--peer", name)
    assert result.exit_code == 1
    assert re.search(
        rf"h2h nhd:universal by {name}, 4 blocks: wrong at l=\d o=\d h=\d t=\d+ d=\d+ of block", result.stderr
    )


def test_a_right_peer_is_a_row(plug_in: Callable[[str], str]) -> None:
    name = plug_in(RIGHT)
    result = swept("--pair", "nhd:universal", "--num-blocks", "4", "--no-peers", "--peer", name)
    assert result.exit_code == 0, result.output
    assert [row["backend"] for row in rows_of(result.stdout)] == ["memcpy", "host", name]


def test_a_peer_that_fails_is_named(plug_in: Callable[[str], str]) -> None:
    name = plug_in("def copy_blocks(src, dst):\n    return lambda *_: 1 // 0\n")
    result = swept("--pair", "nhd:universal", "--num-blocks", "1", "--peer", name)
    assert result.exit_code == 1 and f"peer {name}: ZeroDivisionError" in result.stderr


def test_peers_that_cannot_be_loaded(plug_in: Callable[[str], str]) -> None:
    good = plug_in("number = 3\n")
    for name, reason in (
        ("nowhere_at_all:f", "No module named"),
        (good, "copy_blocks"),
        (good.replace("copy_blocks", "number"), "expected a function"),
        ("justaname", "expected module:function"),
    ):
        result = swept("--peer", name)
        assert result.exit_code == 1 and reason in result.stderr, result.output


# ---- the sweep and its CSV -----------------------------------------------------------------------------------------


def test_csv() -> None:
    result = swept(
        "--num-blocks",
        "4,1",
        "--pair",
        "nhd:universal,universal:vllm/paged_attn_v0",
        "--pattern",
        "lw_to_fc",
        "--no-peers",
    )
    assert result.exit_code == 0, result.output
    comment = result.stdout.splitlines()[0]
    assert comment.startswith("# kvbm abc1234, ") and "nl=3 no=2 nh=4 nt=16 hd=32 dtype=bfloat16" in comment
    rows = rows_of(result.stdout)
    assert list(rows[0]) == [field.name for field in fields(table.Record)]
    assert ",".join(rows[0]) == (
        "tokens_per_block,num_blocks,pattern,direction,backend,total_bytes,inner_bytes,copy_size,num_copies,median_ms,"
        "bandwidth_gbps,min_ms,max_ms,memcpy_ms,ratio,timing,kernel,shape,gpu,driver,commit"
    )
    kinds = [(row["pattern"], row["backend"], row["num_blocks"]) for row in rows]
    patterns = ["lw_to_fc", "nhd:universal", "universal:vllm/paged_attn_v0"]
    assert sorted(kinds) == sorted(
        [("contiguous", "memcpy", n) for n in "14"] + [(pattern, "host", n) for pattern in patterns for n in "14"]
    )
    for row in rows:
        total, seconds = int(row["total_bytes"]), float(row["median_ms"]) / 1e3
        assert total == int(row["num_blocks"]) * SHAPE.nbytes
        assert float(row["bandwidth_gbps"]) == pytest.approx(total / seconds / 1e9, rel=1e-3)
        assert float(row["ratio"]) == pytest.approx(float(row["memcpy_ms"]) / 1e3 / seconds, rel=2e-3, abs=6e-4)
        assert float(row["min_ms"]) <= float(row["median_ms"]) <= float(row["max_ms"])
        assert (row["timing"], row["direction"], row["commit"]) == ("clock", "h2h", "abc1234")
        assert int(row["inner_bytes"]) == 16 * 4 * 32 * 2
        assert kvbm.load_shape(row["shape"].replace(" ", ",")) == SHAPE
    runs = {(row["pattern"], row["num_blocks"]): (int(row["copy_size"]), int(row["num_copies"])) for row in rows}
    assert runs["lw_to_fc", "4"] == (4096, 4 * 3 * 2)
    assert runs["nhd:universal", "1"] == (64, 3 * 2 * 4 * 16)
    # Half of it is V, whose elements move one by one; K goes in words of 16 bytes.
    assert runs["universal:vllm/paged_attn_v0", "1"] == (2, SHAPE.nbytes // 2 // 2 + SHAPE.nbytes // 2 // 16)
    assert [row["ratio"] for row in rows if row["backend"] == "memcpy"] == ["1.0", "1.0"]
    kernel = next(row["kernel"] for row in rows if row["pattern"] == "nhd:universal")
    assert kernel.startswith("rows_")


def test_tokens_are_swept() -> None:
    result = swept("--tokens-per-block", "32,16", "--num-blocks", "1", "--pair", "nhd:universal", "--no-peers")
    assert result.exit_code == 0, result.output
    assert [(row["tokens_per_block"], row["total_bytes"]) for row in rows_of(result.stdout)] == [
        (nt, str(SHAPE.nbytes * int(nt) // 16)) for nt in ("16", "16", "32", "32")
    ]


def test_out_is_a_file_and_a_table(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.csv"
    result = swept("--num-blocks", "1", "--pair", "nhd:universal", "--no-peers", "--out", path)
    assert result.exit_code == 0, result.output
    assert [row["backend"] for row in rows_of(path.read_text(encoding="utf-8"))] == ["memcpy", "host"]
    assert "of a memcpy" in result.stdout and "nhd:universal" in result.stdout
    judged = CliRunner().invoke(targets.targets, [str(path)])
    assert judged.exit_code in (0, 1) and "0.9" in judged.stdout and ("yes" in judged.stdout) is (judged.exit_code == 0)
    assert "tokens_per_block" not in result.stdout


def test_what_does_not_fit_is_left_out_and_the_rest_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "free_bytes", lambda _: 300 * SHAPE.nbytes)
    result = swept("--num-blocks", "1,2,1000", "--pair", "nhd:universal,universal:nhd", "--no-peers")
    assert result.exit_code == 0, result.output
    assert {row["num_blocks"] for row in rows_of(result.stdout)} == {"1", "2"}
    assert result.stderr.count("left out") == 1 and "1000 blocks" in result.stderr and "are free" in result.stderr


def test_memory_that_runs_out_ends_a_pair_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    real = measure.random_pool

    def scarce(layout: Any, *rest: Any, **more: Any) -> Any:
        if layout.name == "hnd":
            raise MemoryError("no more")
        return real(layout, *rest, **more)

    monkeypatch.setattr(measure, "random_pool", scarce)
    result = swept("--num-blocks", "1", "--pair", "hnd:universal,nhd:universal", "--no-peers")
    assert result.exit_code == 0, result.output
    assert {row["pattern"] for row in rows_of(result.stdout)} == {"contiguous", "nhd:universal"}
    assert "h2h hnd:universal: left out: no more" in result.stderr


def test_ctrl_c_keeps_the_rows(plug_in: Callable[[str], str], tmp_path: Path) -> None:
    name = plug_in("""
        def copy_blocks(src, dst):
            def copy(src_ids, dst_ids, stream):
                if len(src_ids) == 2:
                    raise KeyboardInterrupt
                kvbm.convert(src, dst, src_ids, dst_ids)
            return copy
    """)
    args = ("--num-blocks", "1,2", "--pair", "nhd:universal", "--no-peers", "--peer", name)
    result = swept(*args, "--out", tmp_path / "a.csv")
    assert result.exit_code == 130 and "interrupted: 3 rows are kept" in result.stderr
    assert len(rows_of((tmp_path / "a.csv").read_text(encoding="utf-8"))) == 3


def test_rows_come_as_they_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Out(list[str]):
        write = list.append
        flushed = 0

        def flush(self) -> None:
            self.flushed += 1

    out = Out()
    rows = table.Rows(out, "# kvbm", ["a", "b"])  # type: ignore[arg-type]
    rows.write({"a": 1, "b": "x,y"})
    assert "".join(out) == '# kvbm\na,b\n1,"x,y"\n' and out.flushed == 2


# ---- the command line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--num-blocks", "1,x"], "expected numbers from 1 on"),
        (["--num-blocks", "0"], "expected numbers from 1 on"),
        (["--num-blocks", "1,,2"], "expected a list"),
        (["--direction", "d2x"], "expected some of d2d, h2d, d2h, h2h, p2p, got 'd2x'"),
        (["--backend", "auto,quick"], "expected some of auto, direct"),
        (["--pattern", "fc_to_xx"], "expected some of fc_to_fc"),
        (["--pair", "nhd"], "expected SRC:DST"),
        (["--device", "gpu"], "expected cpu or cuda:N"),
        (["--device", "cuda:x"], "expected cpu or cuda:N"),
        (["--iters", "0"], "expected a whole number from 1 on, got '0'"),
        (["--replay", "--direction", "h2h"], "CUDA graphs are for GPUs"),
    ],
)
def test_wrong_usage(args: list[str], message: str) -> None:
    result = bench(*args)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_errors_keep_their_exit_codes() -> None:
    assert bench("--pair", "nhd:nothing").exit_code == kvbm.SpecError.exit_code
    refused = swept("--num-blocks", "1", "--pair", "nhd:universal,operational:universal")
    assert refused.exit_code == kvbm.PlanError.exit_code and not refused.stdout  # before anything is measured
    assert bench("--device", "cpu", "--shape", "nosuchmodel").exit_code == kvbm.SpecError.exit_code


@pytest.mark.slow  # 0.5 s
def test_what_was_named_and_cannot_be_had_is_a_failure() -> None:
    args = ("--num-blocks", "1,2", "--pair", "nhd:universal,universal:nhd", "--no-peers")
    result = swept(*args, "--direction", "h2h,d2d")
    assert result.exit_code == 1
    assert len(rows_of(result.stdout)) == 6
    assert "d2d: left out: it needs a GPU" in result.stderr and "d2d: was asked for" in result.stderr
    result = swept(*args, "--direction", "h2h", "--backend", "host,staged,vectorized")
    assert result.exit_code == 1
    assert result.stderr.count("staged: left out") == result.stderr.count("vectorized: left out") == 1
    assert "staged: was asked for" in result.stderr and "host: was" not in result.stderr
    assert swept(*args, "--direction", "h2h", "--backend", "host").exit_code == 0


def test_a_library_that_is_not_installed_is_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "torch" not in dict(peers.installed("h2h"))
    result = swept("--num-blocks", "1", "--pair", "nhd:universal")
    assert result.exit_code == 0, result.output
    assert {row["backend"] for row in rows_of(result.stdout)} == {"memcpy", "host", "numpy"}


def test_options_of_the_sweep_are_refused_before_a_subcommand(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(
        bench_cli._Bench, "get_command", lambda *_: click.Command("plot", callback=lambda: ran.append(1))
    )
    assert bench("plot").exit_code == 0 and ran == [1]
    result = bench("--iters", "3", "plot")
    assert result.exit_code == 2 and "--iters: put options behind" in result.stderr and ran == [1]


def test_help_needs_neither_numpy_nor_torch() -> None:
    loaded = fresh(
        "import sys\nfrom click.testing import CliRunner\nfrom kvbm.cli import main\n"
        "result = CliRunner().invoke(main, ['--help'])\nassert 'bench' in result.output\nprint(sorted(sys.modules))"
    )
    for name in ("numpy", "torch", "kvbm._core", "matplotlib", "rich"):
        assert f"'{name}'" not in loaded, name


@pytest.mark.slow  # a program
def test_sweep_does_not_need_torch() -> None:
    out = fresh(
        "import sys\nsys.modules['torch'] = None\nfrom click.testing import CliRunner\nfrom kvbm.cli import main\n"
        "from kvbm.bench import measure\nmeasure.cache_bytes = lambda place: 65536\nmeasure.NOISE_BYTES = 1 << 20\n"
        f"args = ['bench', '--shape', '{SHAPE_TEXT}', '--num-blocks', '1', '--iters', '1']\n"
        "args += ['--pair', 'nhd:hnd', '--direction', 'h2h']\n"
        "result = CliRunner().invoke(main, args)\nassert result.exit_code == 0, result.output\nprint(result.output)"
    )
    assert ",h2h,host," in out and ",h2h,numpy," in out


def test_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert measure.commit() == "abc1234"
    monkeypatch.delenv("KVBM_COMMIT")
    root = tmp_path / "checkout"
    (root / "src" / "kvbm").mkdir(parents=True)
    monkeypatch.setattr(measure, "__file__", str(tmp_path / "site-packages" / "kvbm" / "bench" / "measure.py"))
    monkeypatch.chdir(root)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *command], check=True, cwd=root)
    assert measure.commit() == kvbm.__version__  # a repository, and not one of kvbm
    (root / "src" / "kvbm" / "_core.pyx").touch()
    assert re.fullmatch(r"[0-9a-f]{7,}", measure.commit())


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("nanoseconds", [50_000, 2_000_000])
def test_gpu_clock(nanoseconds: int) -> None:
    with clock.GpuClock(0) as gpu:
        timed = gpu.time(lambda _: gpu.delay(nanoseconds), iters=5, warmup=2)
        assert timed.how == "events" and timed.least >= 0.9e-9 * nanoseconds
        replayed = gpu.replay([lambda _: gpu.delay(nanoseconds)] * 2, iters=5, warmup=2)
        assert replayed.how == "replay" and replayed.least >= 0.9e-9 * nanoseconds


@pytest.mark.gpu
def test_gpu_clock_survives_a_call_that_waits_and_a_capture_that_fails() -> None:
    with clock.GpuClock(0) as gpu:
        gpu.time(lambda stream: stream.sync(), iters=2, warmup=1)

        def fails(_: Any) -> None:
            gpu.delay(1000)
            raise ValueError("not now")

        with pytest.raises(ValueError, match="not now"):
            gpu.replay([fails], iters=1)
        assert gpu.time(lambda _: gpu.delay(1000), iters=1).least > 0


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["d2d", "h2d", "d2h"])
@pytest.mark.parametrize("pair", ["nhd:universal", "universal:vllm/paged_attn_v0", "nhd:operational"])
def test_gpu_every_backend(direction: str, pair: str) -> None:
    names = [name for name in copies.BACKENDS if name != "host"]
    result = swept_on_gpu(
        "--direction", direction, "--pair", pair, "--num-blocks", "1,5", "--backend", ",".join(names), "--no-peers"
    )
    assert result.exit_code == 0, result.output
    rows = rows_of(result.stdout)
    assert {row["backend"] for row in rows} == {"memcpy", *names}, result.stderr
    assert {row["timing"] for row in rows} == {"events"}
    assert all(float(row["median_ms"]) > 0 and row["driver"] and row["gpu"] for row in rows)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what torch.compile uses inside is its own affair
@pytest.mark.parametrize("pair", ["nhd:universal", "universal:vllm/paged_attn_v0", "nhd:operational"])
def test_gpu_peers(pair: str) -> None:
    result = swept_on_gpu("--pair", pair, "--num-blocks", "1,5")
    assert result.exit_code == 0, result.output
    found = {row["backend"] for row in rows_of(result.stdout)}
    assert found == {"memcpy", "direct", *(name for name, _ in peers.installed("d2d"))}, result.stderr
    assert "torch" in found


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["d2d", "h2d", "d2h"])
def test_gpu_replay(direction: str) -> None:
    result = swept_on_gpu(
        "--direction",
        direction,
        "--pair",
        "nhd:universal",
        "--num-blocks",
        "1,5",
        "--backend",
        "direct",
        "--replay",
        "--no-peers",
    )
    assert result.exit_code == 0, result.output
    rows = rows_of(result.stdout)
    assert {row["backend"] for row in rows} == {"memcpy", "direct"}
    assert {row["timing"] for row in rows} == {"replay"}


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["d2d", "d2h", "h2d"])
def test_gpu_a_wrong_peer_fails_the_run(plug_in: Callable[[str], str], direction: str) -> None:
    args = (
        "--direction",
        direction,
        "--pair",
        "nhd:universal",
        "--num-blocks",
        "4",
        "--backend",
        "direct",
        "--no-peers",
    )
    result = swept_on_gpu(*args, "--peer", plug_in(WRONG))
    assert result.exit_code == 1 and re.search(r"4 blocks: wrong at l=\d o=\d", result.stderr), result.output
    name = plug_in(RIGHT)
    result = swept_on_gpu(*args, "--peer", name)
    assert result.exit_code == 0, result.output
    assert name in {row["backend"] for row in rows_of(result.stdout)}


@pytest.mark.gpu
def test_gpu_max_sms_and_the_default_sweep() -> None:
    result = swept_on_gpu("--num-blocks", "2", "--max-sms", "4", "--no-peers")
    assert result.exit_code == 0, result.output
    rows = rows_of(result.stdout)
    assert {row["direction"] for row in rows} == {"d2d"}
    assert {row["pattern"] for row in rows} == {"contiguous", *copies.PAIRS}


@pytest.mark.gpu
def test_gpu_p2p() -> None:
    from kvbm import _core

    result = swept_on_gpu("--direction", "p2p", "--pair", "nhd:universal", "--num-blocks", "4", "--no-peers")
    if _core.device_count() < 2:
        assert result.exit_code == 1 and "there is one GPU" in result.stderr
        return
    assert result.exit_code == 0, result.output
    assert {"memcpy", "auto"} <= {row["backend"] for row in rows_of(result.stdout)}


def test_studies_are_programs_of_the_checkout() -> None:
    """Each is loaded and has help; `kvbm bench` says where those went that were its commands."""
    program = click.Context(studies.main)
    for name in studies.STUDIES:
        command = studies.main.get_command(program, name)
        assert command is not None and command.name == name and command.help
    assert set(bench_cli.STUDIES) < set(studies.STUDIES)
    for name in bench_cli.STUDIES:
        result = CliRunner().invoke(bench_cli.bench, [name, "--device", "cpu"])
        assert result.exit_code == 2 and f"run `python -m benchmarks {name}` in a checkout" in result.stderr
