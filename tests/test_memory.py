"""Host memory that GPUs reach: what is registered, in which pieces, and that all of it is given back.

Without a GPU through the driver of test_driver.py, which counts registrations and refuses what overlaps; with one for real.
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
from kvbm import memory as pinning
from test_driver import COMPILER, library, run  # noqa: F401  (a fixture)

needs_fake = pytest.mark.skipif(COMPILER is None, reason="no C compiler for the fake driver")

#: Layers of 4 KiB a block: [l] o b t h d has nl allocations, each K and V of all blocks.
SETUP = """
import gc, mmap
from kvbm import _core, memory as pinning
flash, nhd, universal, whole = map(kvbm.load, ("vllm/flash_attn_nhd", "nhd", "universal", "vllm/LBHNC"))
shape = kvbm.BlockShape(nl=3, no=2, nh=2, nt=8, hd=64, dtype="float16")
page = mmap.PAGESIZE
def anywhere(blocks, layout=flash, shift=0):  # arrays in memory of their own, `shift` bytes behind a page
    made = []
    for a in layout.resolve(shape, blocks).allocations:
        raw = np.zeros(a.nbytes + 2 * page, np.uint8)
        start = -raw.ctypes.data % page + shift
        made.append(raw[start:start + a.nbytes].view("float16").reshape(a.shape))
    return made
def pages(pool): return sum(end - begin for begin, end in pool._pins.ranges)
def refused(kind, *words):
    class Refused:
        def __enter__(self): pass
        def __exit__(self, found, error, trace):
            assert found and issubclass(found, kind), error
            missing = [word for word in words if word not in str(error)]
            assert not missing, (missing, str(error))
            return True
    return Refused()
"""


def faked(library: Path, code: str, **knobs: str) -> str:  # noqa: F811
    return run(library, SETUP + code, **knobs)


# ---- memory of our own ---------------------------------------------------------------------------------------------


@needs_fake
def test_allocated_memory_is_pinned_until_it_is_closed(library: Path) -> None:  # noqa: F811
    faked(
        library,
        """
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
    with refused(kvbm.BindError, "vllm/flash_attn_nhd", "closed", "expected a pool that is open"):
        use()
assert count("pushes") == count("pops") > 0
""",
    )


@needs_fake
def test_how_allocated_memory_is_mapped(library: Path) -> None:  # noqa: F811
    """In huge pages, which is what makes it quick, and out of the way of fork(), which would copy what is pinned."""
    faked(
        library,
        """
def flags(address):
    with open("/proc/self/smaps") as maps:
        for line in maps:
            if line.split()[0][-1] != ":":
                begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if line.startswith("VmFlags") and begin <= address < end:
                return line.split()[1:]
pool = kvbm.Pool.allocate(flash, shape, 5, "pinned")
assert int(pool.addresses[0]) % (2 << 20) == 0
assert {"hg", "dc"} <= set(flags(int(pool.addresses[0])))
pool.close()
assert flags(int(pool._addresses[0])) is None, "nothing holds it any more"
""",
    )


@needs_fake
def test_at_exit_the_driver_takes_it_back(library: Path) -> None:  # noqa: F811
    """Copies may be running: pinned memory is not pulled away under them."""
    faked(
        library,
        """
import weakref
pool, lent = kvbm.Pool.allocate(flash, shape, 5, "pinned"), kvbm.Pool(whole, shape, anywhere(4, whole))
lent.pin()
weakref.finalize._exitfunc()
assert count("registered") == 2
""",
    )


@needs_fake
def test_allocated_memory_goes_with_the_last_reference(library: Path) -> None:  # noqa: F811
    """Also out of a cycle, also when an error passes through, and not before the last array on it."""
    faked(
        library,
        """
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
assert twin.arrays and twin.arrays[0].any() == False
del twin
assert count("registered") == 0
pool = kvbm.Pool.allocate(flash, shape, 5, "pinned")
view = pool.arrays[1][0]
pool.close()
view[...] = 7  # no longer pinned, and still there
assert count("registered") == 0 and (view == 7).all()
""",
    )


@needs_fake
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
def test_allocations_lie_at_a_step(library: Path, name: str, hd: int, step: int) -> None:  # noqa: F811
    faked(
        library,
        f"""
shape = kvbm.BlockShape(nl=3, no=2, nh=2, nt=8, hd={hd}, dtype="float16")
pool = kvbm.Pool.allocate(kvbm.load({name!r}), shape, 7, "pinned")
assert pool.steps == (None, {step}), pool.steps
assert not (pool.addresses % np.uint64(256)).any()
assert (pool.addresses == pool.addresses[0] + np.uint64({step}) * np.arange(len(pool.addresses), dtype=np.uint64)).all()
""",
    )


@needs_fake
def test_progress(library: Path) -> None:  # noqa: F811
    """Touching counts half and registering half; the last call says that all is done, and every page is there."""
    faked(
        library,
        """
def resident():
    with open("/proc/self/statm") as file:
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
""",
    )


@needs_fake
def test_progress_that_raises_ends_it(library: Path) -> None:  # noqa: F811
    faked(
        library,
        """
pinning.STEP_BYTES = pinning.PIECE_BYTES = 1 << 20
def stop(done, total):
    if done > total // 2:
        assert count("registered") > 0
        raise KeyboardInterrupt
lent = kvbm.Pool(whole, shape, anywhere(1024, whole))
for make in (lambda: kvbm.Pool.allocate(whole, shape, 1024, "pinned", stop), lambda: lent.pin(stop)):
    with refused(KeyboardInterrupt):
        make()
    assert count("registered") == 0
""",
    )


@needs_fake
@pytest.mark.parametrize(
    ("name", "nt", "border"),
    [
        ("vllm/flash_attn_nhd", 8, "allocation"),  # 2 * 32 * 2 KiB a layer: whole pages
        ("vllm/flash_attn_nhd", 7, "allocation"),  # 112 KiB a layer
        ("vllm/LBHNC", 8, "block"),  # one allocation; blocks of 4 KiB in each layer
        ("vllm/LBHNC", 7, "page"),
    ],
)
def test_pieces(library: Path, name: str, nt: int, border: str) -> None:  # noqa: F811
    """A large pool takes several registrations, as few as can be; they meet where an allocation or a block ends."""
    faked(
        library,
        f"""
pinning.PIECE_BYTES = 80 * page
shape = kvbm.BlockShape(nl=8, no=2, nh=2, nt={nt}, hd=64, dtype="float16")
pool = kvbm.Pool.allocate(kvbm.load({name!r}), shape, 32, "pinned")
pieces = sorted(pool._owned[0].pins.ranges)
begin, end = int(pool.addresses[0]), int(pool.addresses[0]) + -(-pool.nbytes // page) * page
assert len(pieces) == count("registered") > 2
assert [pieces[0][0], *(b for _, b in pieces)] == [*(a for a, _ in pieces), end] and pieces[0][0] == begin
assert all(0 < b - a <= pinning.PIECE_BYTES and a % page == 0 for a, b in pieces)
assert pool.pinned and pool.cuts.tolist() == [a for a, _ in pieces[1:]]
step = {{"allocation": pool.steps.entry, "block": 2 * {nt} * 64 * 2, "page": page}}[{border!r}]
assert not [cut for cut in pool.cuts.tolist() if (cut - begin) % step], (pool.cuts - begin, step)
pool.close()
assert count("registered") == 0 and pool.pinned is False
""",
        FAKE_NO_RANGES="1",  # what we registered, we know ourselves
    )


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


@needs_fake
@pytest.mark.parametrize(("status", "kept"), [("2", "0"), ("2", "2"), ("801", "0")])
def test_a_registration_that_fails(library: Path, status: str, kept: str) -> None:  # noqa: F811
    """Everything done so far is undone; the error says what it was for, which bytes, and what to do."""
    faked(
        library,
        f"""
pinning.PIECE_BYTES = 8 * page
def mapped():
    with open("/proc/self/maps") as maps:
        return sum(int(b, 16) - int(a, 16) for a, b in (line.split()[0].split("-") for line in maps))
first = {kept} * 8 * page
before = mapped()
try:
    kvbm.Pool.allocate(whole, shape, 4096, "pinned")
except kvbm.CudaError as error:  # while its traceback is there
    assert count("registered") == 0 and mapped() - before < 48 << 20, "48 MiB would be the slab"
    text = str(error)
for part in ("pinned memory for vllm/LBHNC", "cuMemHostRegister", f"bytes {{first}} to {{first + 8 * page}} of",
             "ulimit -l", "container", "released", "fewer blocks"):
    assert part in text, (part, text)
pool = kvbm.Pool(whole, shape, anywhere(128, whole))
with refused(kvbm.CudaError, "pinning vllm/LBHNC", "cuMemHostRegister", f"bytes {{first}} to", "/dev/shm"):
    pool.pin()
assert count("registered") == 0 and not pool.pinned and not pool.closed
os.environ.clear()  # and then it works
ctypes.CDLL(None).clearenv()
pool.pin()
assert pool.pinned
pool.close()
assert count("registered") == 0
""",
        FAKE_REGISTER=status,
        FAKE_REGISTER_FROM=kept,
    )


@needs_fake
def test_more_than_there_is(library: Path) -> None:  # noqa: F811
    faked(
        library,
        """
for blocks in (1 << 32, 1 << 45, 1 << 51):
    with refused(MemoryError, "pinned memory for vllm/LBHNC", f"{blocks * shape.nbytes} bytes", "fewer blocks"):
        kvbm.Pool.allocate(whole, shape, blocks, "pinned")
assert count("registered") == 0
import resource
resource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << 32))
with refused(MemoryError, "ulimit -v"):
    kvbm.Pool.allocate(whole, shape, 1 << 20, "pinned")
""",
    )


@needs_fake
@pytest.mark.parametrize(("status", "word"), [("100", "CUDA_VISIBLE_DEVICES"), ("803", "Reboot")])
def test_a_driver_without_a_gpu(library: Path, status: str, word: str) -> None:  # noqa: F811
    faked(
        library,
        f"""
with refused(kvbm.CudaUnavailableError, "pinned memory for vllm/LBHNC", {word!r}, "device='cpu'"):
    kvbm.Pool.allocate(whole, shape, 4, "pinned")
pool = kvbm.Pool(whole, shape, anywhere(4, whole))
assert not pool.pinned and pool.cuts.size == 0
with refused(kvbm.CudaUnavailableError, "pinning vllm/LBHNC", {word!r}):
    pool.pin()
""",
        FAKE_INIT=status,
    )


@needs_fake
def test_a_forked_child_gives_nothing_back(library: Path) -> None:  # noqa: F811
    """What it inherits is its parent's; there is nothing that it could raise or print, either."""
    faked(
        library,
        """
owned, lent = kvbm.Pool.allocate(flash, shape, 5, "pinned"), kvbm.Pool(flash, shape, anywhere(5))
gpu = kvbm.Pool.allocate(flash, shape, 5, "cuda:0")
lent.pin()
held = count("registered")
pid = os.fork()
if not pid:
    owned.close(), lent.close(), gpu.close()
    os._exit(0 if count("registered") == held and owned.closed and not kvbm.Pool(flash, shape, lent.arrays).pinned else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert owned.pinned and lent.pinned and count("registered") == held
owned.close(), lent.close()
assert count("registered") == 0
""",
    )


# ---- memory of the caller's ----------------------------------------------------------------------------------------


@needs_fake
def test_pin_and_close(library: Path) -> None:  # noqa: F811
    """Arrays that lie anywhere in their pages are pinned as whole pages, once; the arrays stay as they are."""
    faked(
        library,
        """
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
pool.pin(progress=lambda *call: 1 / 0)
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
""",
    )


@needs_fake
def test_arrays_that_share_pages(library: Path) -> None:  # noqa: F811
    """Small arrays side by side become one registration; a gap of a page or more stays unpinned."""
    faked(
        library,
        """
small = kvbm.BlockShape(nl=3, no=2, nh=1, nt=4, hd=16, dtype="float16")  # 128 bytes an array
raw = np.zeros(1 << 20, np.uint8)
start = -raw.ctypes.data % page + 32
def cut(places): return [raw[start + at:start + at + 128].view("float16").reshape(4, 1, 16) for at in places]
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
""",
    )


@needs_fake
@pytest.mark.parametrize("ranges", [True, False])
def test_memory_that_is_pinned_already(library: Path, ranges: bool) -> None:  # noqa: F811
    """It is found, left alone, and not given back; its cuts are known if the driver says where its registrations begin."""
    faked(
        library,
        f"""
raw = np.zeros(64 * page + page, np.uint8)
begin = -(-raw.ctypes.data // page) * page
raw = raw[begin - raw.ctypes.data:]
at = ctypes.c_void_p
context = ctypes.c_void_p(1)
driver.cuCtxPushCurrent_v2(context)
for first, n in ((0, 30), (30, 34)):
    assert driver.cuMemHostRegister_v2(at(begin + first * page), ctypes.c_size_t(n * page), 1) == 0
size = 2 * 5 * 2048
pool = kvbm.Pool(flash, shape, [raw[i * size:(i + 1) * size].view("float16").reshape(2, 5, 8, 2, 64) for i in range(3)])
assert pool.pinned and pool.device == "cpu" and pool.steps.entry == size
pool.pin()
assert count("registered") == 2
pool.close()
assert count("registered") == 2
blocks = 12
pool = kvbm.Pool(flash, shape, [raw[i * 12 * 4096:(i + 1) * 12 * 4096].view("float16").reshape(2, 12, 8, 2, 64) for i in range(3)])
assert pool.pinned
assert pool.cuts.tolist() == ([begin + 30 * page] if {ranges} else [begin + 12 * 4096, begin + 24 * 4096]), pool.cuts - begin
assert driver.cuMemHostUnregister(at(begin + 30 * page)) == 0
part = kvbm.Pool(flash, shape, pool.arrays)
assert not part.pinned
if not {ranges}:  # the last array is pinned in part, and nobody can say where that ends
    part = kvbm.Pool(flash, shape, [part.arrays[0], anywhere(12)[0], part.arrays[1]])
part.pin()
if {ranges}:
    assert part._pins.ranges == [(begin + 30 * page, begin + 36 * page)]
assert part.pinned and pages(part) == (6 if {ranges} else 12) * page
part.close()
assert count("registered") == 1
""",
        **({} if ranges else {"FAKE_NO_RANGES": "1"}),
    )


@needs_fake
def test_a_file_that_is_mapped(library: Path, tmp_path: Path) -> None:  # noqa: F811
    """Read-only arrays are registered as such, also beside others that can be written."""
    faked(
        library,
        f"""
path = {str(tmp_path / "blocks")!r}
nbytes = whole.resolve(shape, 8).nbytes
with open(path, "wb") as file:
    file.write(bytes(range(256)) * (nbytes // 256))
flags = lambda: ctypes.c_uint.in_dll(driver, "register_flags").value
for mode, want in (("r", 3 | 8), ("r+", 3), ("c", 3)):
    mapped = np.memmap(path, np.float16, mode, shape=whole.resolve(shape, 8).allocations[0].shape)
    with kvbm.Pool(whole, shape, mapped) as pool:
        pool.pin()
        assert pool.pinned and pool.readonly == (mode == "r") and flags() == want, (mode, flags())
        assert bytes(mapped.view(np.uint8).reshape(-1)[:256]) == bytes(range(256))
    assert count("registered") == 0
raw = np.zeros(4 * nbytes, np.uint8)
raw = raw[-raw.ctypes.data % page:]
size = 2 * 8 * 2048
cut = lambda i: raw[i * size:(i + 1) * size].view("float16").reshape(2, 8, 8, 2, 64)
arrays = [cut(0), cut(1), cut(2)]
arrays[1].flags.writeable = False
pool = kvbm.Pool(flash, shape, arrays)
pool.pin()
assert count("registered") == 3 and pool.pinned  # pages of different rights are not joined
pool.close()
arrays = [cut(2), cut(1), cut(0)]
arrays[2].flags.writeable = False
pool = kvbm.Pool(flash, shape, arrays)
pool.pin()  # the lowest first
assert count("registered") == 2 and flags() == 3
pool.close()
""",
    )


def test_which_pages_are_left_to_pin() -> None:
    """Arrays may lie in each other's padding, and registrations anywhere in them."""
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


@needs_fake
def test_memory_of_a_gpu_is_freed_by_close(library: Path) -> None:  # noqa: F811
    faked(
        library,
        """
freed = []
real = _core.free_device
_core.free_device = lambda device, address: freed.append(address) or real(device, address)
with kvbm.Pool.allocate(flash, shape, 4, "cuda") as pool:
    addresses, arrays = pool.addresses.tolist(), pool.arrays
    assert pool.device == "cuda:0" and not pool.pinned and not freed
assert sorted(freed) == sorted(addresses) and pool.arrays == ()
del pool, arrays
gc.collect()
assert len(freed) == len(addresses), "once"
kvbm.Pool.allocate(flash, shape, 4, "cuda:0")
gc.collect()
assert len(freed) == 2 * len(addresses)
""",
    )


# ---- with a GPU ----------------------------------------------------------------------------------------------------

SHAPE = kvbm.BlockShape(nl=3, no=2, nh=2, nt=8, hd=64, dtype="float16")
FLASH = "vllm/flash_attn_nhd"


def is_pinned(pool: kvbm.Pool) -> bool:
    """What the driver says of the first and the last byte of every array; asked directly."""
    from kvbm import _core

    ends = [_core.pointer_device(int(at)) for begin, end in pool.spans for at in (begin, end - np.uint64(1))]
    assert len(set(ends)) == 1, ends
    return ends[0] == -2


def same_on_gpu(array: Any, torch: Any) -> bool:
    """Through the copy engine to the GPU and back, both asynchronous: bit for bit."""
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
    """Read-only as it is mapped; copy-on-write, as a file on disk may not be pinned to be written."""
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
