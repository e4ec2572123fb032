"""Pinned host memory: what is registered, in which pieces, and that all of it is released.

Without a GPU the fake driver is used, which counts registrations and refuses overlapping ones; else a real driver.
"""

from __future__ import annotations

import gc
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvbm
from kvbm.memory import allocation as pinning
from processes import FakeDriver

# ---- memory of our own ---------------------------------------------------------------------------------------------


def test_allocated_memory_is_pinned_until_it_is_closed(fake_driver: FakeDriver) -> None:
    fake_driver("pinned.allocated_memory_is_pinned_until_it_is_closed")


def test_how_allocated_memory_is_mapped(fake_driver: FakeDriver) -> None:
    """In huge pages, which makes it fast, and excluded from fork(), which would copy pinned memory."""
    fake_driver("pinned.how_allocated_memory_is_mapped")


def test_at_exit_the_driver_takes_it_back(fake_driver: FakeDriver) -> None:
    """Copies may be running at exit, so kvbm leaves the release of pinned memory to the driver."""
    fake_driver("pinned.at_exit_the_driver_takes_it_back")


def test_allocated_memory_goes_with_the_last_reference(fake_driver: FakeDriver) -> None:
    """Also in a reference cycle, and with an exception; not before the last array on it is gone."""
    fake_driver("pinned.allocated_memory_goes_with_the_last_reference")


@pytest.mark.parametrize(
    ("name", "hd", "step"),
    [
        ("vllm/flash_attn_nhd", 64, 2 * 7 * 2048),  # 28 KiB a layer, a multiple of 256
        ("nhd", 64, 2048),  # arrays of each block, layer, and K or V
        ("vllm/flash_attn_nhd", 72, 2 * 7 * 2304),
        ("nhd", 9, 512),  # 288 bytes: the next multiple of 256
        ("vllm/LBHNC", 64, 0),  # one allocation
    ],
)
def test_allocations_lie_at_a_step(fake_driver: FakeDriver, name: str, hd: int, step: int) -> None:
    fake_driver("pinned.allocations_lie_at_a_step", hd, name, step)


def test_progress(fake_driver: FakeDriver) -> None:
    """Touching counts half and registering half; the last call reports completion, and every page is resident."""
    fake_driver("pinned.progress")


def test_progress_that_raises_ends_it(fake_driver: FakeDriver) -> None:
    fake_driver("pinned.progress_that_raises_ends_it")


@pytest.mark.parametrize(
    ("name", "nt", "border"),
    [
        ("vllm/flash_attn_nhd", 8, "allocation"),  # 2 * 32 * 2 KiB a layer: whole pages
        ("vllm/flash_attn_nhd", 7, "allocation"),  # 112 KiB a layer
        ("vllm/LBHNC", 8, "block"),  # one allocation; blocks of 4 KiB in each layer
        ("vllm/LBHNC", 7, "page"),
    ],
)
def test_pieces(fake_driver: FakeDriver, name: str, nt: int, border: str) -> None:
    """A large pool needs several registrations, as few as possible; they meet at ends of allocations or blocks."""
    fake_driver("pinned.pieces", nt, name, border, FAKE_NO_RANGES="1")


@pytest.mark.parametrize(
    ("starts", "block", "want"),
    [
        ([0], 0, [100, 100, 50]),  # nowhere better than the limit
        ([0, 70], 0, [70, 100, 80]),
        ([0, 30], 0, [100, 100, 50]),  # to cut at 30 would make a piece more
        ([0, 30], 40, [70, 80, 100]),  # 30 + 40, 30 + 3 * 40, and the rest fits
        ([0, 99.5], 0, [100, 100, 50]),  # no page
        ([0], 7.5, [90, 90, 70]),  # every other block starts with a page
    ],
)
def test_where_pieces_are_cut(
    starts: list[float], block: float, want: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = os.sysconf("SC_PAGESIZE")
    monkeypatch.setattr(pinning, "PIECE_BYTES", 100 * page)
    base = 1000 * page
    pieces = list(pinning._split(base, base + 250 * page, [base + int(s * page) for s in starts], int(block * page)))
    assert [(end - begin) // page for begin, end in pieces] == want
    assert [base, *(end for _, end in pieces)] == [*(begin for begin, _ in pieces), base + 250 * page]


@pytest.mark.parametrize(("status", "kept"), [("2", "0"), ("2", "2"), ("801", "0")])
def test_a_registration_that_fails(fake_driver: FakeDriver, status: str, kept: str) -> None:
    """Earlier registrations are undone; the error names the purpose, the bytes, and what to do."""
    fake_driver("pinned.a_registration_that_fails", int(kept), FAKE_REGISTER=status, FAKE_REGISTER_FROM=kept)


def test_more_than_there_is(fake_driver: FakeDriver) -> None:
    fake_driver("pinned.more_than_there_is")


@pytest.mark.parametrize(("status", "word"), [("100", "CUDA_VISIBLE_DEVICES"), ("803", "Reboot")])
def test_a_driver_without_a_gpu(fake_driver: FakeDriver, status: str, word: str) -> None:
    fake_driver("pinned.a_driver_without_a_gpu", word, FAKE_INIT=status)


def test_a_forked_child_gives_nothing_back(fake_driver: FakeDriver) -> None:
    """Inherited registrations belong to the parent; the child raises and prints nothing."""
    fake_driver("pinned.a_forked_child_gives_nothing_back")


# ---- memory of the caller's ----------------------------------------------------------------------------------------


def test_pin_and_close(fake_driver: FakeDriver) -> None:
    """Arrays anywhere in their pages are pinned as whole pages, once; the arrays do not change."""
    fake_driver("pinned.pin_and_close")


def test_arrays_that_share_pages(fake_driver: FakeDriver) -> None:
    """Small adjacent arrays become one registration; a gap of a page or more is not pinned."""
    fake_driver("pinned.arrays_that_share_pages")


@pytest.mark.parametrize("ranges", [True, False])
def test_memory_that_is_pinned_already(fake_driver: FakeDriver, ranges: bool) -> None:
    """It is detected and not released; its boundaries are known if the driver reports where registrations begin."""
    fake_driver("pinned.memory_that_is_pinned_already", ranges, **({} if ranges else {"FAKE_NO_RANGES": "1"}))


def test_a_file_that_is_mapped(fake_driver: FakeDriver, tmp_path: Path) -> None:
    """Read-only arrays are registered as read-only, also with writable ones in the same pool."""
    fake_driver("pinned.a_file_that_is_mapped", str(tmp_path / "blocks"))


def test_which_pages_are_left_to_pin() -> None:
    """Arrays may be in each other's padding, and registrations anywhere in them."""
    page = os.sysconf("SC_PAGESIZE")

    def left(spans: list[tuple[float, float]], readonly: list[bool], pinned: list[tuple[float, float]]) -> list[Any]:
        def ask(at: int) -> tuple[int, int]:
            inside = [(int(a * page), int(b * page)) for a, b in pinned if a * page <= at < b * page]
            return inside[-1] if inside else (0, 0)

        bytes_of = [(int(a * page), int(b * page)) for a, b in spans]
        return [(a / page, b / page, fixed) for a, b, fixed in pinning.unpinned_pages(bytes_of, readonly, ask)]

    assert left([(1, 2)], [False], []) == [(1, 2, False)]
    assert left([(1.5, 2.5), (2.5, 3.5)], [True, True], []) == [(1, 4, True)]
    assert left([(1.5, 2.5), (2.5, 3.5)], [True, False], []) == [(1, 4, False)]  # the page between must be written
    assert left([(1, 2), (2, 3)], [True, False], []) == [(1, 2, True), (2, 3, False)]
    assert left([(1, 11), (2, 4)], [False] * 2, [(2, 3), (10, 11)]) == [(1, 2, False), (3, 10, False)]
    assert left([(1, 11), (2, 6)], [False] * 2, [(2, 9), (5.5, 6)]) == [(1, 2, False), (9, 11, False)]
    assert left([(1, 3), (5, 9)], [False] * 2, [(2.5, 6)]) == [(1, 2, False), (6, 9, False)]
    assert left([(1, 3), (5, 9)], [False] * 2, [(1, 9)]) == []


def test_step() -> None:
    shape = kvbm.BlockShape(nl=3, no=2, nh=2, nt=8, hd=64, dtype="float16")
    layout, raw = kvbm.load("vllm/flash_attn_nhd"), np.zeros((9, 2, 5, 8, 2, 64), np.float16)
    for places, step in (((0, 1, 2), 1), ((1, 4, 7), 3), ((2, 1, 0), None), ((0, 1, 3), None), ((0, 2, 1), None)):
        assert kvbm.Pool(layout, shape, [raw[i] for i in places]).steps.entry == (step and step * raw[0].nbytes)
    one = kvbm.BlockShape(nl=1, no=2, nh=2, nt=8, hd=64, dtype="float16")
    assert kvbm.Pool(layout, one, raw[4]).steps == (None, 0)


def test_pin_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    from conftest import why_no_gpu

    if not why_no_gpu().startswith("no CUDA driver"):
        pytest.skip("there is a driver")
    shape = kvbm.BlockShape(nl=2, no=2, nh=3, nt=4, hd=8, dtype="float32")
    layout = kvbm.load("universal")
    with kvbm.Pool.allocate(layout, shape, 3) as pool:
        assert not pool.pinned and not pool.cuts.size
        with pytest.raises(kvbm.CudaUnavailableError, match=r"pinning universal.*libcuda\.so\.1"):
            pool.pin()
    with pytest.raises(kvbm.CudaUnavailableError, match=r"pinned memory for universal.*libcuda\.so\.1.*device='cpu'"):
        kvbm.Pool.allocate(layout, shape, 3, "pinned")


# ---- memory on a GPU -----------------------------------------------------------------------------------------------


def test_memory_of_a_gpu_is_freed_by_close(fake_driver: FakeDriver) -> None:
    fake_driver("pinned.memory_of_a_gpu_is_freed_by_close")


# ---- with a GPU ----------------------------------------------------------------------------------------------------

SHAPE = kvbm.BlockShape(nl=3, no=2, nh=2, nt=8, hd=64, dtype="float16")
FLASH = "vllm/flash_attn_nhd"


def is_pinned(pool: kvbm.Pool) -> bool:
    """The driver's answer for the first and the last byte of every array, asked directly."""
    from kvbm import _core

    ends = [_core.pointer_device(int(at)) for begin, end in pool.spans for at in (begin, end - np.uint64(1))]
    assert len(set(ends)) == 1, ends
    return ends[0] == -2


def same_on_gpu(array: Any, torch: Any) -> bool:
    """By the copy engine to the GPU and back, both asynchronous: bit for bit."""
    host = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    assert host.is_pinned()
    there = host.to("cuda", non_blocking=True)
    back = torch.empty_like(host, pin_memory=True)
    back.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    return bool(torch.equal(back.view(torch.int16), host.view(torch.int16)))


def fill(pool: kvbm.Pool) -> None:
    random = np.random.default_rng(7)
    for array in pool.arrays:
        bits = np.asarray(array).view(np.uint16)
        bits[...] = random.integers(0, 1 << 15, bits.shape, np.uint16)


@pytest.mark.gpu
def test_gpu_allocated(torch: Any) -> None:
    blocks = 4096  # 16 MiB a layer
    calls: list[tuple[int, int]] = []
    with kvbm.Pool.allocate(kvbm.load(FLASH), SHAPE, blocks, "pinned", lambda *call: calls.append(call)) as pool:
        assert pool.pinned and pool.steps.entry == 2 * blocks * 2048 and is_pinned(pool) and not pool.cuts.size
        assert calls[-1][0] == calls[-1][1] == pool.nbytes
        fill(pool)
        assert all(same_on_gpu(array, torch) for array in pool.arrays)
        # One copy across the border of two arrays: they are one registration.
        both = np.ndarray((pool.steps.entry,), np.uint8, pool.arrays[0].base, pool.steps.entry // 2)
        assert same_on_gpu(both.view(np.int16), torch)
        twin = kvbm.Pool(pool.layout, SHAPE, pool.arrays)  # nothing is known of these but what the driver says
        assert twin.pinned and not twin.cuts.size, "the driver says where a registration begins and ends"
        spans = twin.spans.copy()
    from kvbm import _core

    assert {_core.pointer_device(int(at)) for at in spans[:, 0]} == {-1}


@pytest.mark.gpu
def test_gpu_pieces(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "PIECE_BYTES", 1 << 20)
    with kvbm.Pool.allocate(kvbm.load(FLASH), SHAPE, 300, "pinned") as pool:
        assert pool.pinned and is_pinned(pool) and pool.cuts.size >= 3
        twin = kvbm.Pool(pool.layout, SHAPE, pool.arrays)
        assert twin.pinned and twin.cuts.tolist() == pool.cuts.tolist()


@pytest.mark.gpu
def test_gpu_pin_of_tensors(torch: Any) -> None:
    layout = kvbm.load(FLASH)
    tensors = [torch.zeros(a.shape, dtype=torch.float16) for a in layout.resolve(SHAPE, 100).allocations]
    pool = kvbm.Pool(layout, SHAPE, tensors)
    assert not pool.pinned and not is_pinned(pool)
    pool.pin()
    fill(pool)
    assert pool.pinned and is_pinned(pool) and all(same_on_gpu(tensor, torch) for tensor in tensors)
    other = kvbm.Pool(layout, SHAPE, tensors)
    other.pin()
    other.close()
    assert is_pinned(pool), "it was not the other's"
    pool.close()
    assert not is_pinned(kvbm.Pool(layout, SHAPE, tensors))
    again = kvbm.Pool(layout, SHAPE, tensors)
    again.pin()
    assert is_pinned(again)
    del again
    gc.collect()
    assert not is_pinned(kvbm.Pool(layout, SHAPE, tensors))


@pytest.mark.gpu
def test_gpu_tensors_that_torch_pinned(torch: Any) -> None:
    layout = kvbm.load(FLASH)
    tensors = [
        torch.zeros(a.shape, dtype=torch.float16, pin_memory=True) for a in layout.resolve(SHAPE, 100).allocations
    ]
    with kvbm.Pool(layout, SHAPE, tensors) as pool:
        assert pool.device == "cpu" and pool.pinned
        pool.pin()
    assert is_pinned(kvbm.Pool(layout, SHAPE, tensors))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["r", "c"])
def test_gpu_pin_of_a_file(torch: Any, tmp_path: Path, mode: Any) -> None:
    """Read-only, as it is mapped; copy-on-write, as a file on disk may not be pinned for writing."""
    layout = kvbm.load("vllm/LBHNC")
    allocation = layout.resolve(SHAPE, 64).allocations[0]
    content = np.random.default_rng(3).integers(0, 1 << 15, allocation.nbytes // 2, np.uint16)
    content.tofile(tmp_path / "blocks")
    mapped = np.memmap(tmp_path / "blocks", np.float16, mode, shape=allocation.shape)
    with kvbm.Pool(layout, SHAPE, mapped) as pool:
        pool.pin()
        assert pool.pinned and is_pinned(pool) and pool.readonly == (mode == "r")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's, of an array that must not be written
            tensor = torch.from_numpy(mapped.view(np.int16))
        there = tensor.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        assert np.array_equal(there.cpu().numpy().reshape(-1), content.view(np.int16))
    assert not is_pinned(kvbm.Pool(layout, SHAPE, mapped))
