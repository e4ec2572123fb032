"""Raw copies, and lists of tensors that are read in C.

Errors are tested without a GPU.  Everything up to the launch is tested on the fake driver (programs/).  The kernel itself is tested
on a GPU.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvbm
from kvbm import _core, kernels
from kvbm.kernels import MemcpyBatchMode, memcpy_batch, vectorized_copy
from processes import COMPILER, FakeDriver

HERE = Path(__file__).resolve().parents[1]


# ---- refusals ------------------------------------------------------------------------------------------------------

BOTH = [vectorized_copy, memcpy_batch]


class Host:
    """Memory that must not be accessed."""

    def __init__(self) -> None:
        self.data = np.arange(4096, dtype=np.uint8)
        self.before = self.data.copy()
        self.at = int(self.data.ctypes.data)

    def refuse(self, call: Any, src: Any, dst: Any, size: Any, match: str, **rest: Any) -> None:
        with pytest.raises(kvbm.BindError, match=match):
            call(src, dst, size, stream=5, **rest)
        assert np.array_equal(self.data, self.before)


@pytest.mark.parametrize("call", BOTH)
def test_lists_that_differ_in_length(call: Any) -> None:
    host = Host()
    host.refuse(call, [host.at], [host.at + 64, host.at + 128], 8, "1 source and 2 destination addresses")
    host.refuse(call, [host.at, host.at + 8], [], 0, "2 source and 0 destination addresses")


@pytest.mark.parametrize("call", BOTH)
@pytest.mark.parametrize("size", [-1, 1 << 63, True, 1.5, "8", None])
def test_sizes_that_are_none(call: Any, size: Any) -> None:
    if call is memcpy_batch and size in (1.5, "8", None):
        return  # a list of sizes, perhaps: see below
    host = Host()
    host.refuse(call, [host.at], [host.at + 64], size, "size: expected a number of bytes")


def test_lists_of_sizes() -> None:
    host = Host()
    src, dst = [host.at, host.at + 8], [host.at + 64, host.at + 72]
    host.refuse(memcpy_batch, src, dst, [8], "1 sizes: expected 2")
    host.refuse(memcpy_batch, src, dst, [8, -8], r"sizes\[1\].*-8")
    host.refuse(memcpy_batch, src, dst, [8.0, 8.0], "sizes: expected integers, got dtype float64")
    host.refuse(memcpy_batch, src, dst, None, "sizes: expected")


@pytest.mark.parametrize("call", BOTH)
def test_addresses_that_are_none(call: Any) -> None:
    host = Host()
    host.refuse(call, [host.at, 0], [host.at + 64, host.at + 128], 8, r"src_ptrs\[1\] is 0")
    host.refuse(call, [host.at, host.at + 8], [0, host.at + 128], 8, r"dst_ptrs\[0\] is 0")
    host.refuse(call, [host.at, -1], [host.at + 64, host.at + 128], 8, r"src_ptrs\[1\].*-1")
    host.refuse(call, [1.0], [host.at], 8, "src_ptrs: expected integers, got dtype float64")
    host.refuse(call, [[host.at]], [host.at], 8, r"src_ptrs: expected one axis, got shape \(1, 1\)")
    host.refuse(call, host.at, [host.at], 8, r"src_ptrs: expected one axis, got shape \(\)")


@pytest.mark.parametrize("call", BOTH)
def test_bytes_that_race(call: Any) -> None:
    host = Host()
    a = host.at
    host.refuse(call, [a, a + 8, a + 16], [a + 64, a + 96, a + 71], 8, r"dst_ptrs\[0\].*dst_ptrs\[2\].*written once")
    host.refuse(call, [a, a + 8], [a + 64, a + 64], 8, r"dst_ptrs\[0\].*dst_ptrs\[1\].*written once")
    host.refuse(call, [a, a + 64], [a + 57, a + 128], 8, r"src_ptrs\[1\].*dst_ptrs\[0\].*both read and written")
    host.refuse(call, [a], [a], 8, r"src_ptrs\[0\].*dst_ptrs\[0\].*both read and written")
    with pytest.raises(kvbm.BindError, match=r"dst_ptrs\[0\].*dst_ptrs\[1\]"):
        memcpy_batch([a, a + 8], [a + 64, a + 80], [17, 8], stream=5)


def test_a_device_or_mode_that_is_none() -> None:
    host = Host()
    for device in ("cpu", "cuda:x", -1, True, 1.5, "cuda:-1"):
        host.refuse(vectorized_copy, [host.at], [host.at + 64], 8, "device: expected 'cuda'", device=device)
    for mode in (3, -1, "batched"):
        host.refuse(memcpy_batch, [host.at], [host.at + 64], 8, "mode: expected", mode=mode)


def test_nothing_to_copy_touches_no_cuda() -> None:
    for empty in ([], (), np.empty(0, np.uint64), np.empty(0)):
        assert vectorized_copy(empty, empty, 8) is None
        assert memcpy_batch(empty, empty, 8) == MemcpyBatchMode.FALLBACK_ONLY
        assert memcpy_batch(empty, empty, []) == MemcpyBatchMode.FALLBACK_ONLY
    assert vectorized_copy([0, 64], [0, 64], 0) is None
    assert memcpy_batch([0, 64], [0, 64], [0, 0], mode=MemcpyBatchMode.BATCH_WITHOUT_FALLBACK) == 2


def clashes(src: Any, dst: Any, sizes: Any) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """All pairs of positions that share bytes, of destinations and of (source, destination), by comparing each with each."""
    spans = [(range(int(s), int(s + n)), range(int(d), int(d + n))) for s, d, n in zip(src, dst, sizes, strict=True)]

    def meet(a: range, b: range) -> bool:
        return max(a.start, b.start) < min(a.stop, b.stop)

    n = range(len(spans))
    written = {(i, j) for i in n for j in n if i < j and meet(spans[i][1], spans[j][1])}
    return written, {(i, j) for i in n for j in n if meet(spans[i][0], spans[j][1])}


@pytest.mark.parametrize("reach", [200, 2000, 1 << 20, 1 << 45])
def test_races_are_found_as_by_comparing_each_with_each(reach: int) -> None:
    """Random ranges, sorted and not, of one size and of many, with and without empty ones."""
    rng = np.random.default_rng(reach)
    seen = set()
    for turn in range(600):
        n = int(rng.integers(1, 12))
        step = int(rng.choice([1, 3, 16, 4096]))
        src = rng.integers(1, reach // step + 2, n).astype(np.uint64) * np.uint64(step)
        dst = rng.integers(1, reach // step + 2, n).astype(np.uint64) * np.uint64(step)
        if turn % 3 == 0:
            src.sort()
            dst.sort()
        one = turn % 2 == 0
        sizes = np.full(n, rng.integers(1, 40)) if one else rng.integers(0, 40, n)
        written, both = clashes(src, dst, sizes)
        found = ""
        try:
            _core.check_pairs(src, dst, int(sizes[0]) if one else sizes.astype(np.uint64))
        except kvbm.BindError as error:
            found = str(error)
        kind = "twice" if "written once" in found else "both" if found else "none"
        seen.add(kind)
        positions = tuple(int(i) for i in re.findall(r"_ptrs\[(\d+)\]", found))
        assert positions in {"twice": written, "both": both, "none": {()}}[kind], found
        assert found or not (written or both)
    assert seen == {"twice", "both", "none"} or reach > 2000


@pytest.mark.parametrize("gap", [16, 1 << 20, 1 << 33])
def test_many_ranges(gap: int) -> None:
    """More than the cached scratch memory, and every digit of the sort."""
    n = 70_000
    rng = np.random.default_rng(gap)
    places = rng.permutation(2 * n).astype(np.uint64) * np.uint64(gap) + np.uint64(1 << 12)
    src, dst = places[:n].copy(), places[n:].copy()
    _core.check_pairs(src, dst, 8)
    for _ in range(5):
        i, j = (int(k) for k in rng.integers(0, n, 2))
        spoilt = dst.copy()
        spoilt[i] = src[j] + np.uint64(7)
        with pytest.raises(kvbm.BindError, match=rf"src_ptrs\[{j}\].*dst_ptrs\[{i}\]"):
            _core.check_pairs(src, spoilt, 8)
        if i != j:
            spoilt[i] = dst[j] - np.uint64(7)
            first, second = sorted((i, j))
            with pytest.raises(kvbm.BindError, match=rf"dst_ptrs\[{first}\].*dst_ptrs\[{second}\]"):
                _core.check_pairs(src, spoilt, 8)
    _core.check_pairs(src, dst, 8)


def test_ranges_at_the_end_of_the_address_space() -> None:
    top = (1 << 64) - 8
    with pytest.raises(kvbm.BindError, match=r"dst_ptrs\[0\].*dst_ptrs\[1\]"):
        _core.check_pairs(np.array([8, 8], np.uint64), np.array([top, top + 4], np.uint64), 64)


# ---- the way to the driver -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 15, 16, 17, 255, 256, 257, 4096, 4097, 8191, 70_001])
def test_every_alignment(fake_gpu: FakeDriver, size: int) -> None:
    """Alignments 0 to 17 on both sides: one launch copies the bytes of every tile, and no others."""
    fake_gpu("raw_copies.every_alignment", size)


def test_large_pairs_and_many(fake_gpu: FakeDriver) -> None:
    fake_gpu("raw_copies.large_pairs_and_many")


def test_pairs_beyond_the_parameters_go_through_the_ring(fake_gpu: FakeDriver) -> None:
    """The caller overwrites addresses of deferred launches: each launch has its own copy, and the ring stays bounded."""
    fake_gpu("raw_copies.pairs_beyond_the_parameters_go_through_the_ring")


def test_which_device(fake_gpu: FakeDriver) -> None:
    """Host memory that no GPU can access is refused before anything is copied; each allocation is queried once."""
    fake_gpu("raw_copies.which_device")


def test_neighbours_become_one_copy(fake_gpu: FakeDriver) -> None:
    fake_gpu("raw_copies.neighbours_become_one_copy")


@pytest.mark.parametrize(("mode", "used"), [(0, 2), (1, 1), (2, 2)])
def test_neighbours_of_two_allocations_are_copied_one_by_one(fake_gpu: FakeDriver, mode: int, used: int) -> None:
    """The driver refuses a copy across two allocations: such merged copies are repeated one by one."""
    fake_gpu("raw_copies.neighbours_of_two_allocations_are_copied_one_by_one", mode, used, FAKE_MOST_BYTES="100")


@pytest.mark.parametrize(("version", "used"), [("13000", "2 1 2"), ("12040", "1 1 KVBM_NO_FUNCTION")])
def test_modes(fake_gpu: FakeDriver, version: str, used: str) -> None:
    """Each mode does what it says, also on the legacy stream; an unavailable mode is an error, and fallbacks are reported."""
    assert fake_gpu("raw_copies.modes", FAKE_VERSION=version) == f"{used} {used}\n"


# ---- lists of tensors ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lists(fake_gpu: FakeDriver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDriver]:
    """Runs programs in which CPU tensors claim to be on a GPU (data/as_cuda.c)."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch cannot be looked at from C")
    path = tmp_path_factory.mktemp("lists") / "as_cuda.so"
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-O1", "-o", path, HERE / "data" / "as_cuda.c"], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AS_CUDA", str(path))  # read once, when the module is imported
        yield fake_gpu


@pytest.mark.slow
def test_lists_are_looked_at_from_c(lists: FakeDriver) -> None:
    """Each tensor is read once, in any container and dtype; and the right bytes are copied."""
    lists("tensor_lists.lists_are_looked_at_from_c")


DEVIATIONS = {
    "a dtype among others": "chunks[1][3] = made(*CHUNK, dtype=torch.float32)",
    "a dtype of the same width": "chunks[2][7] = made(*CHUNK, dtype=torch.int16)",
    "blocks of another dtype": "chunks = batch(dtype=torch.bfloat16)[0]",
    "a dtype that is not known": "chunks, whole = batch(dtype=torch.complex64)",
    "a chunk that is not dense": "chunks[0][1] = made(NT, HD, NH).transpose(1, 2)",
    "a slice": "chunks[0][0] = made(NT, NH, 2 * HD)[..., :HD]",
    "another shape": "chunks[1][2] = made(NT, NH, HD + 1)",
    "another order of axes": "chunks[2][0] = made(NH, NT, HD)",
    "another rank": "chunks[0][0] = made(NT, NH * HD)",
    "a chunk on the CPU": "chunks[1][5] = made(*CHUNK, on=lambda t: t)",
    "all chunks on the CPU": "chunks = batch(on=lambda t: t)[0]",
    "a whole tensor on the CPU": "whole[2] = made(*WHOLE, on=lambda t: t)",
    "no tensor": "chunks[1][5] = 'x'",
    "no list": "chunks[1] = 5",
    "a short list": "chunks[2].pop()",
    "a long list": "chunks[0].append(made(*CHUNK))",
    "a block too few": "chunks.pop()",
    "a whole tensor of another shape": "whole[1] = made(NH, NL, NO, NT, HD + 1)",
    "a whole tensor of another rank": "whole[0] = made(NH, NL, NO, NT * HD)",
    "a whole tensor that is not dense": "whole[1] = made(NH, NL, NO, HD, NT).transpose(3, 4)",
    "a whole tensor of another dtype": "whole[2] = made(*WHOLE, dtype=torch.int32)",
    "a chunk inside a whole tensor": "chunks[1][1] = gpu(plain(whole[0]).view(-1)[40:160].view(CHUNK))",
    "a chunk twice": "chunks[0][0] = chunks[2][3]",
    "a whole tensor twice": "whole[1] = whole[0]",
    "an empty whole tensor": "whole = made(0, *WHOLE)",
    "axes of zero": "whole = [made(NH, NL, NO, NT, 0) for _ in range(NB)]",
    "nothing": "whole = []",
    "a set": "whole = set(whole)",
}


def test_what_is_wrong_is_said_as_from_python(lists: FakeDriver) -> None:
    """Read in C or in Python: the same result and message; the destination is unchanged unless the copy is right."""
    said = eval(lists("tensor_lists.each_as_from_python", "wrong_lists", list(DEVIATIONS.values())))
    for what, outcomes in zip(DEVIATIONS, said, strict=True):
        harmless = {"a chunk twice": 1, "a whole tensor twice": 1}  # read twice: that is no race
        assert sum(outcome is None for outcome in outcomes) == harmless.get(what, 0), (what, outcomes)
        assert all(outcome is None or outcome[0] in ("BindError", "DTypeError", "LayoutError") for outcome in outcomes), what


@pytest.mark.slow
def test_chunks_and_layers_are_looked_at_from_c(lists: FakeDriver) -> None:
    lists("tensor_lists.chunks_and_layers_are_looked_at_from_c")


WRONG_CHUNKS = {
    "a dtype among others": "src[1][3] = made(*CHUNK, dtype=torch.float32)",
    "another dtype on the other side": "dst = [[made(NH, NT, HD, dtype=torch.bfloat16) for _ in row] for row in dst]",
    "a dtype that is not known": "src = [[made(*CHUNK, dtype=torch.complex64) for _ in row] for row in src]",
    "a chunk that is not dense": "src[0][1] = made(NT, HD, NH).transpose(1, 2)",
    "a view of a source": "dst = [[chunk.transpose(0, 1) for chunk in row] for row in src]",
    "another shape": "dst[2][2] = made(NH, NT, HD + 1)",
    "the same order": "dst = [[made(*CHUNK) for _ in row] for row in dst]",
    "another rank": "src[0][0] = made(NT, NH * HD)",
    "a source on the CPU": "src[1][5] = made(*CHUNK, on=lambda t: t)",
    "all destinations on the CPU": "dst = [[made(NH, NT, HD, on=lambda t: t) for _ in row] for row in dst]",
    "no tensor": "dst[1][5] = 'x'",
    "no list": "src[1] = 5",
    "a short list": "dst[2].pop()",
    "a block too few": "dst.pop()",
    "an empty list first": "src[0] = []",
    "a source as a destination": "dst[1][1] = src[0][0].view(NH, NT, HD)",
    "a source twice": "src[0][0] = src[2][3]",
    "a destination twice": "dst[0][0] = dst[2][3]",
    "axes of zero": "src, dst = [made(NT, NH, 0)], [made(NH, NT, 0)]",
    "nothing": "src, dst = [], []",
    "a set": "src = set(src[0])",
}


def test_wrong_chunks_are_said_as_from_python(lists: FakeDriver) -> None:
    """Read in C or in Python: the same result and message."""
    said = eval(lists("tensor_lists.each_as_from_python", "wrong_chunks", list(WRONG_CHUNKS.values())))
    for what, outcome in zip(WRONG_CHUNKS, said, strict=True):
        assert (outcome is None) is (what in ("a source twice", "nothing")), (what, outcome)
        assert outcome is None or outcome[0] in ("BindError", "DTypeError", "LayoutError"), (what, outcome)


def test_destinations_count_as_written(lists: FakeDriver) -> None:
    """Autograd is told once of each written tensor, read in C or not; very many chunks that are read in C are not reported."""
    lists("tensor_lists.destinations_count_as_written")


def test_a_list_that_changes_while_it_is_looked_at(lists: FakeDriver) -> None:
    """Reading an object may run Python; if the list gets shorter meanwhile, this is an error, not a crash."""
    lists("tensor_lists.a_list_that_changes_while_it_is_looked_at")


# ---- on a GPU ------------------------------------------------------------------------------------------------------

SIZES = [0, 1, 15, 16, 17, 255, 4096, (1 << 20) + 3]
SKEWS = [(s, d) for s in range(18) for d in range(18)]


class Pairs:
    """Sources and destinations at chosen misalignments, each between guard bytes."""

    def __init__(self, size: int, skews: Any, src_at: str = "cuda", dst_at: str = "cuda") -> None:
        import torch

        self.size = size
        self.pitch = (size + 127) // 64 * 64
        total = len(skews) * self.pitch + 64

        def memory(at: str) -> Any:
            data = torch.randint(0, 256, (total,), dtype=torch.uint8)
            return data.cuda() if at == "cuda" else data.pin_memory() if at == "pinned" else data

        self.src, self.dst = memory(src_at), memory(dst_at)
        self.starts = [(i * self.pitch + s, i * self.pitch + d) for i, (s, d) in enumerate(skews)]
        torch.cuda.synchronize()
        self.want = self.dst.cpu().clone()
        self.expect()

    def expect(self) -> None:
        source = self.src.cpu()
        for s, d in self.starts:
            self.want[d : d + self.size] = source[s : s + self.size]

    @property
    def addresses(self) -> tuple[list[int], list[int]]:
        return (
            [self.src.data_ptr() + s for s, _ in self.starts],
            [self.dst.data_ptr() + d for _, d in self.starts],
        )

    def check(self) -> None:
        import torch

        torch.cuda.synchronize()
        got = self.dst.cpu()
        if not torch.equal(got, self.want):
            wrong = torch.nonzero(got != self.want).flatten()
            pytest.fail(
                f"size {self.size}: {len(wrong)} bytes differ, the first at {int(wrong[0])} (pitch {self.pitch})"
            )


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_every_alignment_on_a_gpu(size: int) -> None:
    """All together: each pair with the widest words that it allows."""
    pairs = Pairs(size, SKEWS)
    vectorized_copy(*pairs.addresses, size)
    pairs.check()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [size for size in SIZES if size < 1 << 20] + [65_551])
def test_one_alignment_a_launch(size: int) -> None:
    """One alignment per launch: the number of threads per pair follows from its word."""
    pairs = Pairs(size, SKEWS)
    for src, dst in zip(*pairs.addresses, strict=True):
        vectorized_copy([src], [dst], size)
    pairs.check()


@pytest.mark.gpu
def test_pairs_sanitize() -> None:
    """Small, for compute-sanitizer: exact allocations, so that an access beyond the end is reported."""
    import torch

    stream = torch.cuda.Stream()
    for size in (1, 15, 33, 4097):
        src = [torch.randint(0, 256, (size + 3,), dtype=torch.uint8, device="cuda") for _ in range(300)]
        dst = [torch.zeros(size + 3, dtype=torch.uint8, device="cuda") for _ in range(300)]
        torch.cuda.synchronize()
        for skew in (0, 1, 3):
            starts = [s.data_ptr() + 3 for s in src], [d.data_ptr() + skew for d in dst]
            vectorized_copy(*starts, size, stream=stream)
            vectorized_copy(starts[0][:2], starts[1][:2], size, stream=stream)
            stream.synchronize()
            assert all(torch.equal(s[3:], d[skew : skew + size]) for s, d in zip(src, dst, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("skew", [(0, 0), (3, 3), (3, 11), (0, 1)])
def test_one_large_pair(skew: tuple[int, int]) -> None:
    import torch

    size = 256 << 20
    src = torch.randint(0, 1 << 62, (size // 8 + 4,), dtype=torch.int64, device="cuda").view(torch.uint8)
    dst = torch.full_like(src, 0xA5)
    vectorized_copy([src.data_ptr() + skew[0]], [dst.data_ptr() + skew[1]], size)
    torch.cuda.synchronize()
    assert torch.equal(dst[skew[1] : skew[1] + size], src[skew[0] : skew[0] + size])
    assert bool((dst[: skew[1]] == 0xA5).all()) and bool((dst[skew[1] + size :] == 0xA5).all())


@pytest.mark.gpu
@pytest.mark.parametrize("size", [24, 4096])
def test_twenty_thousand_pairs(size: int) -> None:
    """More than fit the parameters, several times: the ring."""
    rng = np.random.default_rng(size)
    pairs = Pairs(size, rng.integers(0, 4, (20_000, 2)) * 16 + rng.integers(0, 2, (20_000, 1)))
    order = rng.permutation(20_000)
    src, dst = (np.array(a, np.uint64)[order] for a in pairs.addresses)
    for _ in range(10):
        vectorized_copy(src, dst, size)
    pairs.check()


PLACES = [("cuda", "pinned"), ("pinned", "cuda"), ("pinned", "pinned"), ("cuda", "cuda")]


@pytest.mark.gpu
@pytest.mark.parametrize("places", PLACES, ids="-".join)
@pytest.mark.parametrize("size", [17, 4096, 100_003])
def test_pinned_memory(places: tuple[str, str], size: int) -> None:
    pairs = Pairs(size, SKEWS[:40], *places)
    vectorized_copy(*pairs.addresses, size)
    pairs.check()


@pytest.mark.gpu
@pytest.mark.parametrize("places", PLACES, ids="-".join)
@pytest.mark.parametrize("mode", MemcpyBatchMode)
def test_engine_copies(places: tuple[str, str], mode: MemcpyBatchMode) -> None:
    """By the copy engines: with and without merged neighbours, with equal and different sizes, some of them 0."""
    import torch

    if mode == MemcpyBatchMode.BATCH_WITHOUT_FALLBACK and not kernels.is_memcpy_batch_available():
        pytest.skip("the driver has no cuMemcpyBatchAsync")
    stream = torch.cuda.Stream()
    pairs = Pairs(5000, SKEWS[:40], *places)
    used = memcpy_batch(*pairs.addresses, 5000, mode=mode, stream=stream)
    assert used == mode or mode == MemcpyBatchMode.BATCHED_WITH_FALLBACK
    pairs.check()
    pairs = Pairs(40 * 64, [(16, 32)], *places)  # one range, cut
    (src,), (dst,) = pairs.addresses
    cuts = np.sort(np.random.default_rng(3).integers(0, 40 * 64, 30))
    at = np.concatenate([[0], cuts])
    sizes = np.diff(np.append(at, 40 * 64))
    for merge in (True, False):
        pairs.dst.fill_(7)
        pairs.want.fill_(7)
        pairs.expect()
        torch.cuda.synchronize()
        memcpy_batch(at + src, at + dst, sizes, mode=mode, stream=stream, merge=merge)
        pairs.check()


@pytest.mark.gpu
def test_memory_that_no_gpu_reaches() -> None:
    import torch

    pairs = Pairs(64, [(0, 0)] * 5)
    host = np.zeros(64, np.uint8)
    src, dst = pairs.addresses
    before = pairs.dst.clone()
    for call in BOTH:
        with pytest.raises(kvbm.BindError, match=r"dst_ptrs\[4\].*no GPU reaches"):
            call(src, [*dst[:4], host.ctypes.data], 64)
        with pytest.raises(kvbm.BindError, match=r"src_ptrs\[0\].*no GPU reaches"):
            call([host.ctypes.data, *src[1:]], dst, 64)
    torch.cuda.synchronize()
    assert torch.equal(pairs.dst, before) and not host.any()


@pytest.mark.gpu
@pytest.mark.parametrize("count", [3, 253, 254, 5000])
def test_a_captured_copy_replays(count: int) -> None:
    """Addresses in the parameters, or in a slot of the graph: replays read the source's current contents."""
    import torch

    pairs = Pairs(96, [(i % 5, i % 7) for i in range(count)])
    other = Pairs(96, [(0, 0)] * count)
    vectorized_copy(*pairs.addresses, 96)  # loads the kernel
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        vectorized_copy(*pairs.addresses, 96)
        memcpy_batch(*other.addresses, 96)  # a capture takes no batched copies: falls back
    for turn in range(3):
        pairs.src.random_(0, 256)
        other.src.random_(0, 256)
        pairs.expect()
        other.expect()
        # Other large batches meanwhile must not take the slot.
        noise = Pairs(40, [(1, 2)] * 3000)
        vectorized_copy(*noise.addresses, 40)
        graph.replay()
        pairs.check()
        other.check()
        noise.check()
        if turn == 1:
            torch.cuda.synchronize()
    del graph


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["dtype", "dense", "shape", "cpu", "device"])
def test_a_tensor_unlike_the_others(what: str) -> None:
    """Real CUDA tensors are read in C; a wrong one gives the same error as in Python."""
    import torch

    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch cannot be looked at from C")
    chunks = [[torch.zeros(4, 3, 8, device="cuda").half() for _ in range(4)] for _ in range(5)]
    whole = [torch.ones(3, 2, 2, 4, 8, device="cuda").half() for _ in range(5)]
    found = _core.whole_tensors(whole, 5)
    assert found is not None and found[1:4] == ((3, 2, 2, 4, 8), "float16", 0)
    assert _core.chunk_tensors(chunks, 5, 4, (4, 3, 8), True, "float16", 0) is not None
    chunks[3][2], match = {
        "dtype": (torch.zeros(4, 3, 8, device="cuda"), "float32"),
        "dense": (torch.zeros(4, 8, 3, device="cuda").half().transpose(1, 2), r"blocks\[3\]\[2\].*contiguous"),
        "shape": (torch.zeros(4, 3, 9, device="cuda").half(), r"blocks\[3\]\[2\].*\(4, 3, 9\)"),
        "cpu": (torch.zeros(4, 3, 8).half(), r"blocks\[3\]\[2\].*CUDA.*CPU"),
        "device": (whole[0].view(-1)[:96].view(4, 3, 8), "overlap"),
    }[what]
    assert what == "device" or _core.chunk_tensors(chunks, 5, 4, (4, 3, 8), True, "float16", 0) is None
    for call in (
        lambda: kernels.block_to_universal(chunks, whole),
        lambda: kernels.universal_to_block(whole, chunks),
    ):
        with pytest.raises((kvbm.BindError, kvbm.DTypeError), match=match):
            call()
    torch.cuda.synchronize()
    assert all(bool((w == 1).all()) for w in whole)
