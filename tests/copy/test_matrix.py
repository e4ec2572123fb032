"""Every ordered pair of shipped layouts, bit for bit, including guards and padding: host kernels and CUDA kernels."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
import pytest

import kvbm
import matrix
import oracle
from coordinates import in_case
from few import few
from memory import aligned, only, views

load = cache(kvbm.load)


def _shape(case: matrix.Case) -> kvbm.BlockShape:
    nl, no, nh, nt, hd = case.shape
    return kvbm.BlockShape(nl=nl, no=no, nh=nh, nt=nt, hd=hd, dtype=case.dtype)


def _ids(case: matrix.Case) -> tuple[Any, Any]:
    src_ids, dst_ids, _, _ = case.batch_ids
    if case.ids == "all":
        return None, None
    if case.ids == "list":
        return src_ids, dst_ids
    return np.array(src_ids, dtype=case.ids), np.array(dst_ids, dtype=case.ids)


def _turn(case: matrix.Case, n: int) -> int:
    """A choice that is the same on every run."""
    return zlib.crc32(f"{case} turn".encode()) % n


#: Copies the case's blocks from bytes laid out by one arena into bytes laid out by the other; what both are afterwards.
Copy = Callable[[matrix.Case, list[oracle.Arena], list[np.ndarray]], list[np.ndarray]]


def run(cases: Iterable[matrix.Case], copy: Copy) -> None:
    """Compare every byte of both buffers with the oracle, for each case."""
    for case in cases:
        with in_case(case):
            _run(case, copy)


def _run(case: matrix.Case, copy: Copy) -> None:
    ways = ("steps", "rows", "scattered")  # which the tables of a kernel depend on
    src = case.src_placed.layout_bytes(case.src_align, ways[_turn(case, 3)])
    dst = case.dst_placed.layout_bytes(case.dst_align, ways[_turn(case, 9) // 3])
    for salt in oracle.salts(case.itemsize):
        source, before = oracle.source_bytes(src, salt), oracle.dest_bytes(dst, salt)
        want = oracle.expected_bytes(src, dst, source, before, *case.batch_ids[:2])
        source_after, got = copy(case, [src, dst], [source, before])
        assert np.array_equal(got, want), f"{case}\n{oracle.explain(dst, got, want)}"
        assert np.array_equal(source_after, source), f"{case}: the source changed"


def _pools(case: matrix.Case, arenas: list[oracle.Arena], buffers: list[Any], kind: str) -> list[kvbm.Pool]:
    return [
        kvbm.Pool(load(name), _shape(case), views(arena, buffer, case.dtype, kind))
        for name, arena, buffer in zip((case.src, case.dst), arenas, buffers, strict=True)
    ]


def on_host(case: matrix.Case, arenas: list[oracle.Arena], data: list[np.ndarray]) -> list[np.ndarray]:
    buffers = [aligned(one) for one in data]
    pools = _pools(case, arenas, buffers, ("torch", "numpy")[_turn(case, 2)])
    src_ids, dst_ids, _, _ = case.batch_ids
    with only(arenas[0], buffers[0], src_ids), only(arenas[1], buffers[1], dst_ids):
        kvbm.convert(*pools, *_ids(case))
    return buffers


def on_gpu(case: matrix.Case, arenas: list[oracle.Arena], data: list[np.ndarray]) -> list[np.ndarray]:
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        buffers = [torch.from_numpy(one).cuda() for one in data]
        pools = _pools(case, arenas, buffers, ("torch", "interface")[_turn(case, 2)])
        # torch's tensors carry their current stream; others, and every second of torch's, are told.
        # (Views at odd addresses are no tensors, whatever the kind.)
        tensors = isinstance(pools[0].arrays[0], torch.Tensor)
        told = {} if tensors and _turn(case, 4) < 2 else {"stream": stream}
        kvbm.convert(*pools, *_ids(case), **told)
        return [buffer.cpu().numpy() for buffer in buffers]


PAIRS = matrix.pairs()


def cases_from(src: str) -> list[matrix.Case]:
    return [case for case in matrix.cases() if case.src == src]


@pytest.mark.slow  # a thousand cases; the quick tests have those of `meetings`
@pytest.mark.parametrize("first", few((0, 2, 1, 3, 4, 5), 1))
@pytest.mark.parametrize("src", sorted({src for src, _ in PAIRS}))
def test_host(src: str, first: int) -> None:
    run(cases_from(src)[first::6], on_host)


@pytest.mark.gpu
@pytest.mark.parametrize("src", sorted({src for src, _ in PAIRS}))
def test_gpu(src: str) -> None:
    run(cases_from(src), on_gpu)


@pytest.mark.sanitize
@pytest.mark.parametrize("src", few(matrix.everyone(), 18))
def test_host_meets_every_other(src: str) -> None:
    """Each layout is converted to all others, so that a new layout is tested with all existing ones."""
    run(matrix.meetings(src), on_host)


@pytest.mark.gpu
@pytest.mark.parametrize("src", matrix.everyone())
def test_gpu_meets_every_other(src: str) -> None:
    run(matrix.meetings(src), on_gpu)


@pytest.mark.full
@pytest.mark.timeout(0)  # minutes each
@pytest.mark.parametrize("src", matrix.everyone())
def test_host_full(src: str) -> None:
    for dst in matrix.others(src):
        run(matrix.everything(src, dst), on_host)


@pytest.mark.full
@pytest.mark.timeout(0)
@pytest.mark.gpu
@pytest.mark.parametrize("src", matrix.everyone())
def test_gpu_full(src: str) -> None:
    for dst in matrix.others(src):
        run(matrix.everything(src, dst), on_gpu)


def test_refused() -> None:
    """An opaque group against a required order: an error that names a solution; the destination is unchanged."""
    assert len(matrix.refused_pairs()) > 20
    for src, dst in matrix.refused_pairs():
        with in_case(src, dst):
            _refused(src, dst)


def _refused(src: str, dst: str) -> None:
    shape = kvbm.BlockShape(nl=3, no=2, nh=4, nt=16, hd=16, dtype="float16")
    with pytest.raises(
        kvbm.PlanError, match=r"operational_nhd.*operational_hnd|operational_hnd.*operational_nhd"
    ) as info:
        kvbm.plan(kvbm.load(src), kvbm.load(dst), shape)
    assert src in str(info.value) and dst in str(info.value)
    placed = [oracle.Placed(matrix.orders()[name], shape.sizes, 2, 2) for name in (src, dst)]
    arenas = [p.layout_bytes() for p in placed]
    buffers = [aligned(oracle.source_bytes(arenas[0], 0)), aligned(oracle.dest_bytes(arenas[1], 0))]
    pools = [
        kvbm.Pool(kvbm.load(name), shape, views(a, b, "float16", "numpy"))
        for name, a, b in zip((src, dst), arenas, buffers, strict=True)
    ]
    with pytest.raises(kvbm.PlanError):
        kvbm.convert(*pools)
    assert np.array_equal(buffers[1], oracle.dest_bytes(arenas[1], 0))


def test_everyone_meets_everyone() -> None:
    """Every ordered pair of meanings with a common shape, once; widths and alignments vary for each layout."""
    prints: dict[str, set[str]] = {}
    for name in matrix.orders():
        prints.setdefault(kvbm.load(name).fingerprint, set()).add(name)
    assert all(len(group & set(matrix.everyone())) == 1 for group in prints.values())
    met = {src: matrix.meetings(src) for src in matrix.everyone()}
    refused = {(s, d) for s in matrix.everyone() for d in matrix.everyone() if matrix.refused(s, d)}
    for src, cases in met.items():
        assert len({case.dst for case in cases}) == len(cases)
        left = {dst for dst in matrix.everyone() if (src, dst) not in refused} - {case.dst for case in cases}
        # A latent has no heads: it meets those that have them at one head, which groups of two heads do not fit.
        assert all(matrix.latent(src) != matrix.latent(dst) for dst in left), left
        assert {case.itemsize for case in cases} == {1, 2, 4, 8}
        assert {case.batch for case in cases} == {"one", "two", "many"}
        assert {case.src_align for case in cases} == {case.dst_align for case in cases} == set(matrix.ALIGNS)
        assert {case.ids for case in cases} == set(matrix.ID_KINDS)
    for dst in matrix.everyone():
        widths = {case.itemsize for cases in met.values() for case in cases if case.dst == dst}
        assert widths == {1, 2, 4, 8}, dst
    every = {(src, dst) for src in met for dst in matrix.others(src)}
    assert set(PAIRS) <= {(case.src, case.dst) for cases in met.values() for case in cases} == every


def test_cases_cover() -> None:
    """The sample covers what it claims: every pair with every possible width and every batch, and pairs of values."""
    cases = matrix.cases()
    seen = {key for case in cases for key in matrix.covers(case)}
    missing = set()
    for pair in PAIRS:
        widths = {oracle.ITEMSIZE[dtype] for dtype, _ in matrix.possible(*pair)}
        missing |= {("pair width", pair, w) for w in widths} - seen
        missing |= {("pair batch", pair, b) for b in matrix.BATCHES} - seen
    for dtype in oracle.ITEMSIZE:
        missing |= {("dtype src align", dtype, a) for a in matrix.ALIGNS} - seen
        missing |= {("dtype dst align", dtype, a) for a in matrix.ALIGNS} - seen
        missing |= {("dtype batch", dtype, b) for b in matrix.BATCHES if b != "none"} - seen
        missing |= {("dtype shape", dtype, s) for s in matrix.SHAPES if any(c.dtype == dtype for c in cases)} - seen
    for shape in matrix.SHAPES:
        missing |= {("shape ids", shape, i) for i in matrix.ID_KINDS} - seen
    assert not missing
    assert len({pair for case in cases for pair in [(case.src, case.dst)]}) == len(PAIRS)
    assert {dtype for case in cases for dtype in [case.dtype]} == set(oracle.ITEMSIZE)
    assert any(list(c.batch_ids[0]) != sorted(c.batch_ids[0]) for c in cases)
