"""Pinned memory: what is registered, and that all of it is given back (test_allocation.py)."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import weakref
from pathlib import Path

import numpy as np

import kvbm
from kvbm import _core
from kvbm.memory import allocation as pinning
from programs.fake_gpu import count, driver, refused

flash, nhd, universal, whole = map(kvbm.load, ("vllm/flash_attn_nhd", "nhd", "universal", "vllm/LBHNC"))
shape = kvbm.BlockShape(nl=3, no=2, nh=2, nt=8, hd=64, dtype="float16")
page = mmap.PAGESIZE


def anywhere(blocks: int, layout: kvbm.Layout = flash, shift: int = 0) -> list[np.ndarray]:
    """Arrays in memory of their own, `shift` bytes behind a page."""
    made = []
    for a in layout.resolve(shape, blocks).allocations:
        raw = np.zeros(a.nbytes + 2 * page, np.uint8)
        start = -raw.ctypes.data % page + shift
        made.append(raw[start : start + a.nbytes].view("float16").reshape(a.shape))
    return made


def pages(pool: kvbm.Pool) -> int:
    """Bytes that it has pinned."""
    return sum(end - begin for begin, end in pool._pins.ranges)


def allocated_memory_is_pinned_until_it_is_closed() -> None:
    with kvbm.Pool.allocate(flash, shape, 5, "pinned") as pool:
        assert (pool.device, pool.num_blocks, pool.closed, pool.pinned) == ("cpu", 5, False, True)
        assert count("registered") == 1 and pool.cuts.size == 0 and pool.cuts.dtype == np.uint64
        assert ctypes.c_uint.in_dll(driver, "register_flags").value == 3  # for every context, on every device
        assert all(_core.pointer_device(int(at)) == -2 for at in (pool.spans - np.array([0, 1], np.uint64)).flat)
        for layer, array in enumerate(pool.arrays):
            assert array.shape == (2, 5, 8, 2, 64) and not array.any()
            array[...] = layer
        assert [int(array.max()) for array in pool.arrays] == [0, 1, 2]
    assert pool.closed and not pool.pinned and count("registered") == 0 and pool.arrays == ()
    pool.close()
    for use in (lambda: pool.addresses, pool.pin, pool.__enter__):
        with refused(kvbm.BindError, "vllm/flash_attn_nhd", "closed", "expected an open pool"):
            use()
    assert count("pushes") == count("pops") > 0


def how_allocated_memory_is_mapped() -> None:
    def flags(address: int) -> list[str] | None:
        with Path("/proc/self/smaps").open() as maps:
            for line in maps:
                if line.split()[0][-1] != ":":
                    begin, end = (int(part, 16) for part in line.split()[0].split("-"))
                if line.startswith("VmFlags") and begin <= address < end:
                    return line.split()[1:]
        return None

    pool = kvbm.Pool.allocate(flash, shape, 5, "pinned")
    assert int(pool.addresses[0]) % (2 << 20) == 0
    assert {"hg", "dc"} <= set(flags(int(pool.addresses[0])))
    pool.close()
    assert flags(int(pool._addresses[0])) is None, "nothing holds it any more"


def at_exit_the_driver_takes_it_back() -> None:
    _pool, lent = kvbm.Pool.allocate(flash, shape, 5, "pinned"), kvbm.Pool(whole, shape, anywhere(4, whole))
    lent.pin()
    weakref.finalize._exitfunc()
    assert count("registered") == 2


def allocated_memory_goes_with_the_last_reference() -> None:
    pool = kvbm.Pool.allocate(flash, shape, 5, "pinned")
    pool.myself = pool
    del pool
    gc.collect()
    assert count("registered") == 0
    try:
        with kvbm.Pool.allocate(flash, shape, 5, "pinned") as pool:
            assert count("registered") == 1
            raise KeyError("the caller's own")
    except KeyError:
        assert count("registered") == 0
    twin = kvbm.Pool(flash, shape, kvbm.Pool.allocate(flash, shape, 5, "pinned").arrays)
    assert count("registered") == 1 and twin.pinned  # the arrays hold the memory
    twin.close()
    assert twin.arrays and not twin.arrays[0].any()
    del twin
    assert count("registered") == 0
    pool = kvbm.Pool.allocate(flash, shape, 5, "pinned")
    view = pool.arrays[1][0]
    pool.close()
    view[...] = 7  # no longer pinned, and still there
    assert count("registered") == 0 and (view == 7).all()


def allocations_lie_at_a_step(hd: int, name: str, step: int) -> None:
    shape = kvbm.BlockShape(nl=3, no=2, nh=2, nt=8, hd=hd, dtype="float16")
    pool = kvbm.Pool.allocate(kvbm.load(name), shape, 7, "pinned")
    assert pool.steps == (None, step), pool.steps
    assert not (pool.addresses % np.uint64(256)).any()
    assert (
        pool.addresses == pool.addresses[0] + np.uint64(step) * np.arange(len(pool.addresses), dtype=np.uint64)
    ).all()


def progress() -> None:
    def resident() -> int:
        with Path("/proc/self/statm").open() as file:
            return int(file.read().split()[1]) * page

    before = resident()
    pool = kvbm.Pool.allocate(whole, shape, 8192, "pinned")
    assert pool.nbytes > 90 << 20 and resident() - before > 0.9 * pool.nbytes, "touched ahead"
    pool.close()
    pinning.STEP_BYTES, pinning.PIECE_BYTES = 1 << 20, 8 << 20
    calls = []
    before = resident()
    pool = kvbm.Pool.allocate(whole, shape, 2048, "pinned", progress=lambda *call: calls.append(call))
    assert resident() - before > 0.9 * pool.nbytes, "touched ahead"
    total = -(-pool.nbytes // page) * page
    done = [call[0] for call in calls]
    assert {call[1] for call in calls} == {total} and done[-1] == total
    assert done == sorted(done) and 0 < done[0] <= 1 << 20
    assert count("registered") == total // pinning.PIECE_BYTES == 3
    assert len(done) == total // pinning.STEP_BYTES + 3
    for device in ("cpu", "cuda"):
        calls.clear()
        kvbm.Pool.allocate(whole, shape, 2, device, lambda *call: calls.append(call))
        assert len(calls) == 1 and calls[0][0] == calls[0][1] > 0


def progress_that_raises_ends_it() -> None:
    pinning.STEP_BYTES = pinning.PIECE_BYTES = 1 << 20

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            assert count("registered") > 0
            raise KeyboardInterrupt

    lent = kvbm.Pool(whole, shape, anywhere(1024, whole))
    for make in (lambda: kvbm.Pool.allocate(whole, shape, 1024, "pinned", stop), lambda: lent.pin(stop)):
        with refused(KeyboardInterrupt):
            make()
        assert count("registered") == 0


def pieces(nt: int, name: str, border: str) -> None:
    pinning.PIECE_BYTES = 80 * page
    shape = kvbm.BlockShape(nl=8, no=2, nh=2, nt=nt, hd=64, dtype="float16")
    pool = kvbm.Pool.allocate(kvbm.load(name), shape, 32, "pinned")
    pieces = sorted(pool._owned[0].pins.ranges)
    begin, end = int(pool.addresses[0]), int(pool.addresses[0]) + -(-pool.nbytes // page) * page
    assert len(pieces) == count("registered") > 2
    assert [pieces[0][0], *(b for _, b in pieces)] == [*(a for a, _ in pieces), end] and pieces[0][0] == begin
    assert all(0 < b - a <= pinning.PIECE_BYTES and a % page == 0 for a, b in pieces)
    assert pool.pinned and pool.cuts.tolist() == [a for a, _ in pieces[1:]]
    step = {"allocation": pool.steps.entry, "block": 2 * nt * 64 * 2, "page": page}[border]
    assert not [cut for cut in pool.cuts.tolist() if (cut - begin) % step], (pool.cuts - begin, step)
    pool.close()
    assert count("registered") == 0 and pool.pinned is False


def a_registration_that_fails(kept: int) -> None:
    pinning.PIECE_BYTES = 8 * page

    def mapped() -> int:
        with Path("/proc/self/maps").open() as maps:
            return sum(int(b, 16) - int(a, 16) for a, b in (line.split()[0].split("-") for line in maps))

    first = kept * 8 * page
    before = mapped()
    try:
        kvbm.Pool.allocate(whole, shape, 4096, "pinned")
    except kvbm.CudaError as error:  # while its traceback is there
        assert count("registered") == 0 and mapped() - before < 48 << 20, "48 MiB would be the slab"
        text = str(error)
    words = "pinned memory for vllm/LBHNC", "cuMemHostRegister", f"bytes {first} to {first + 8 * page} of"
    for part in (*words, "ulimit -l", "container", "released", "fewer blocks"):
        assert part in text, (part, text)
    pool = kvbm.Pool(whole, shape, anywhere(128, whole))
    with refused(kvbm.CudaError, "pinning vllm/LBHNC", "cuMemHostRegister", f"bytes {first} to", "/dev/shm"):
        pool.pin()
    assert count("registered") == 0 and not pool.pinned and not pool.closed
    os.environ.clear()  # and then it works
    ctypes.CDLL(None).clearenv()
    pool.pin()
    assert pool.pinned
    pool.close()
    assert count("registered") == 0


def more_than_there_is() -> None:
    for blocks in (1 << 32, 1 << 45, 1 << 51):
        with refused(MemoryError, "pinned memory for vllm/LBHNC", f"{blocks * shape.nbytes} bytes", "fewer blocks"):
            kvbm.Pool.allocate(whole, shape, blocks, "pinned")
    assert count("registered") == 0
    resource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << 32))
    with refused(MemoryError, "ulimit -v"):
        kvbm.Pool.allocate(whole, shape, 1 << 20, "pinned")


def a_driver_without_a_gpu(word: str) -> None:
    with refused(kvbm.CudaUnavailableError, "pinned memory for vllm/LBHNC", word, "device='cpu'"):
        kvbm.Pool.allocate(whole, shape, 4, "pinned")
    pool = kvbm.Pool(whole, shape, anywhere(4, whole))
    assert not pool.pinned and pool.cuts.size == 0
    with refused(kvbm.CudaUnavailableError, "pinning vllm/LBHNC", word):
        pool.pin()


def a_forked_child_gives_nothing_back() -> None:
    owned, lent = kvbm.Pool.allocate(flash, shape, 5, "pinned"), kvbm.Pool(flash, shape, anywhere(5))
    gpu = kvbm.Pool.allocate(flash, shape, 5, "cuda:0")
    lent.pin()
    held = count("registered")
    pid = os.fork()
    if not pid:
        owned.close(), lent.close(), gpu.close()
        os._exit(
            0 if count("registered") == held and owned.closed and not kvbm.Pool(flash, shape, lent.arrays).pinned else 1
        )
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert owned.pinned and lent.pinned and count("registered") == held
    owned.close(), lent.close()
    assert count("registered") == 0


def pin_and_close() -> None:
    arrays = anywhere(9, shift=48)
    for i, array in enumerate(arrays):
        array[...] = i + 1
    pool, calls = kvbm.Pool(flash, shape, arrays), []
    assert not pool.pinned and count("registered") == 0
    pool.pin(progress=lambda *call: calls.append(call))
    held = count("registered")
    assert pool.pinned and held == len(arrays)
    assert sorted(pool._pins.ranges) == [(int(a) // page * page, -(-int(b) // page) * page) for a, b in pool.spans]
    assert calls[-1][0] == calls[-1][1] == pages(pool) and calls == sorted(calls)
    pool.pin(progress=lambda *_: 1 / 0)
    assert count("registered") == held
    assert pool.cuts.tolist() == sorted(a for a, _ in pool._pins.ranges)[1:]  # each array has one of its own
    pool.close()
    assert count("registered") == 0 and pool.arrays == tuple(arrays)
    assert [int(array.min()) for array in arrays] == [int(array.max()) for array in arrays] == [1, 2, 3]
    again = kvbm.Pool(flash, shape, arrays)
    again.pin()
    del again
    assert count("registered") == 0
    with refused(kvbm.BindError, "pin() is for host memory", "cuda:0"):
        kvbm.Pool.allocate(flash, shape, 3, "cuda:0").pin()


def arrays_that_share_pages() -> None:
    small = kvbm.BlockShape(nl=3, no=2, nh=1, nt=4, hd=16, dtype="float16")  # 128 bytes an array
    raw = np.zeros(1 << 20, np.uint8)
    start = -raw.ctypes.data % page + 32

    def cut(places: list[int]) -> list[np.ndarray]:
        return [raw[start + at : start + at + 128].view("float16").reshape(4, 1, 16) for at in places]

    first, last = start + raw.ctypes.data - 32, lambda n: start + raw.ctypes.data - 32 + n * page
    pool = kvbm.Pool(nhd, small, cut([640, 0, 128, 512, 256, 384]))
    pool.pin()
    assert pool._pins.ranges == [(first, last(1))] and pool.steps.whole is None
    pool.close()
    pool = kvbm.Pool(nhd, small, cut([0, page - 64, 2 * page, 5 * page, 5 * page + 500, 6 * page]))
    pool.pin()
    assert pool._pins.ranges == [(first, last(3)), (last(5), last(7))] and pool.cuts.tolist() == [last(5)]
    other = kvbm.Pool(nhd, small, cut([4 * page - 64, 4 * page + 64, 200, 5 * page + 200, 7 * page, 7 * page + 128]))
    assert not other.pinned
    other.pin()  # only what is not pinned yet
    assert other._pins.ranges == [(last(3), last(5)), (last(7), last(8))] and other.pinned
    assert other.cuts.tolist() == [last(3), last(5), last(7)]
    other.close()
    assert pool.pinned and count("registered") == 2
    pool.close()
    assert count("registered") == 0


def memory_that_is_pinned_already(ranges: bool) -> None:
    raw = np.zeros(64 * page + page, np.uint8)
    begin = -(-raw.ctypes.data // page) * page
    raw = raw[begin - raw.ctypes.data :]
    at = ctypes.c_void_p
    driver.cuCtxPushCurrent_v2(at(1))
    for first, n in ((0, 30), (30, 34)):
        assert driver.cuMemHostRegister_v2(at(begin + first * page), ctypes.c_size_t(n * page), 1) == 0
    size = 2 * 5 * 2048
    pool = kvbm.Pool(
        flash, shape, [raw[i * size : (i + 1) * size].view("float16").reshape(2, 5, 8, 2, 64) for i in range(3)]
    )
    assert pool.pinned and pool.device == "cpu" and pool.steps.entry == size
    pool.pin()
    assert count("registered") == 2
    pool.close()
    assert count("registered") == 2
    pool = kvbm.Pool(
        flash,
        shape,
        [raw[i * 12 * 4096 : (i + 1) * 12 * 4096].view("float16").reshape(2, 12, 8, 2, 64) for i in range(3)],
    )
    assert pool.pinned
    assert pool.cuts.tolist() == ([begin + 30 * page] if ranges else [begin + 12 * 4096, begin + 24 * 4096]), (
        pool.cuts - begin
    )
    assert driver.cuMemHostUnregister(at(begin + 30 * page)) == 0
    part = kvbm.Pool(flash, shape, pool.arrays)
    assert not part.pinned
    if not ranges:  # the last array is pinned in part, and nobody can say where that ends
        part = kvbm.Pool(flash, shape, [part.arrays[0], anywhere(12)[0], part.arrays[1]])
    part.pin()
    if ranges:
        assert part._pins.ranges == [(begin + 30 * page, begin + 36 * page)]
    assert part.pinned and pages(part) == (6 if ranges else 12) * page
    part.close()
    assert count("registered") == 1


def a_file_that_is_mapped(path: str) -> None:
    def flags() -> int:
        return ctypes.c_uint.in_dll(driver, "register_flags").value

    nbytes = whole.resolve(shape, 8).nbytes
    Path(path).write_bytes(bytes(range(256)) * (nbytes // 256))
    for mode, want in (("r", 3 | 8), ("r+", 3), ("c", 3)):
        mapped = np.memmap(path, np.float16, mode, shape=whole.resolve(shape, 8).allocations[0].shape)
        with kvbm.Pool(whole, shape, mapped) as pool:
            pool.pin()
            assert pool.pinned and pool.readonly == (mode == "r") and flags() == want, (mode, flags())
            assert bytes(mapped.view(np.uint8).reshape(-1)[:256]) == bytes(range(256))
        assert count("registered") == 0
    raw = np.zeros(4 * nbytes, np.uint8)
    raw = raw[-raw.ctypes.data % page :]
    size = 2 * 8 * 2048
    arrays = [raw[i * size : (i + 1) * size].view("float16").reshape(2, 8, 8, 2, 64) for i in range(3)]
    arrays[1].flags.writeable = False
    pool = kvbm.Pool(flash, shape, arrays)
    pool.pin()
    assert count("registered") == 3 and pool.pinned  # pages of different rights are not joined
    pool.close()
    first, middle, last = (array.view() for array in arrays)
    middle.flags.writeable, first.flags.writeable = True, False
    pool = kvbm.Pool(flash, shape, [last, middle, first])
    pool.pin()  # the lowest first
    assert count("registered") == 2 and flags() == 3
    pool.close()


def memory_of_a_gpu_is_freed_by_close() -> None:
    freed = []
    real = _core.free_device
    _core.free_device = lambda device, address: freed.append(address) or real(device, address)
    with kvbm.Pool.allocate(flash, shape, 4, "cuda") as pool:
        addresses, arrays = pool.addresses.tolist(), pool.arrays
        assert pool.device == "cuda:0" and not pool.pinned and not freed
    assert freed == addresses[:1] and pool.arrays == ()
    del pool, arrays
    gc.collect()
    assert len(freed) == 1, "once"
    kvbm.Pool.allocate(flash, shape, 4, "cuda:0")
    gc.collect()
    assert len(freed) == 2
