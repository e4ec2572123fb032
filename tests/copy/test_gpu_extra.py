"""On a GPU: cases that are too large for the matrix, and features that only a GPU has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvbm
import matrix
import oracle
from memory import interface_views, placed, torch_views, views

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "pair",
    [
        ("vllm/LBHNC", "vllm/BHLNC"),
        ("vllm/LHBNC", "nhd"),
        ("hf/dynamic_cache", "vllm/LBNHC"),
        ("vllm/paged_attn_v0", "vllm/flash_attn_nhd"),
    ],
)
def test_offsets_past_4_gib(pair: tuple[str, str]) -> None:
    """Blocks at both ends of pools of more than 8 GiB: an index cut to 32 bits would use another place."""
    import torch

    shape = kvbm.BlockShape(nl=2, no=2, nh=8, nt=64, hd=128, dtype="bfloat16")  # 512 KiB a block
    blocks = (9 << 30) // shape.nbytes
    if torch.cuda.mem_get_info()[0] < 21 << 30:
        pytest.skip("needs 21 GiB of GPU memory")
    where = [placed(matrix.orders()[name], shape, blocks) for name in pair]
    rng = np.random.default_rng(1)
    src_ids = np.concatenate([[0, blocks - 1], rng.choice(np.arange(1, blocks - 1), 6, replace=False)])
    dst_ids = np.concatenate([[blocks - 1, 0], rng.choice(np.arange(1, blocks - 1), 6, replace=False)])
    pools, tensors = [], []
    for side in where:
        flat = [torch.empty(space.nbytes, dtype=torch.uint8, device="cuda").random_(0, 256) for space in side.spaces]
        tensors.append(flat)
        pools.append(
            kvbm.Pool(
                kvbm.load(pair[len(pools)]),
                shape,
                [f.view(torch.bfloat16).view(s.shape) for f, s in zip(flat, side.spaces, strict=True)],
            )
        )
    assert max(int(p.address(src_ids[:2])[1].max()) for p in where) > 1 << 32
    untouched = _sums(tensors[1])
    expected = _read(tensors[0], where[0], src_ids)
    before = _read(tensors[1], where[1], dst_ids)
    torch.cuda.synchronize()
    kvbm.convert(*pools, src_ids, dst_ids)
    torch.cuda.synchronize()
    got = _read(tensors[1], where[1], dst_ids)
    assert torch.equal(got, expected)
    # Put the old bytes back where the blocks are: then every allocation is as it was, to the byte.
    _write(tensors[1], where[1], dst_ids, before)
    assert _sums(tensors[1]) == untouched
    del pools, tensors
    torch.cuda.empty_cache()


def _index(side: oracle.Placed, ids: Any) -> Any:
    import torch

    entry, offset = side.address(ids)
    return torch.from_numpy(np.ascontiguousarray(entry)).cuda(), torch.from_numpy(np.ascontiguousarray(offset)).cuda()


def _read(flat: list[Any], side: oracle.Placed, ids: Any) -> Any:
    """Elements as 16-bit words in the order of coordinates."""
    import torch

    entry, offset = _index(side, ids)
    out = torch.zeros(entry.shape, dtype=torch.int16, device="cuda")
    for i, memory in enumerate(flat):
        mask = entry == i
        out[mask] = memory.view(torch.int16)[offset[mask] // 2]
    return out


def _write(flat: list[Any], side: oracle.Placed, ids: Any, data: Any) -> None:
    import torch

    entry, offset = _index(side, ids)
    for i, memory in enumerate(flat):
        mask = entry == i
        memory.view(torch.int16)[offset[mask] // 2] = data[mask]


def _sums(flat: list[Any]) -> list[tuple[int, int]]:
    """Two checksums per allocation, one of them weighted by position."""
    import torch

    out = []
    for memory in flat:
        words = memory.view(torch.int64)
        total = weighted = 0
        for start in range(0, words.numel(), 1 << 26):
            piece = words[start : start + (1 << 26)]
            weight = torch.arange(start, start + piece.numel(), device="cuda") * 2 + 1
            total ^= int(piece.sum().item())
            weighted ^= int((piece * weight).sum().item()) + start
        out.append((total, weighted))
    return out


@pytest.mark.parametrize("pair", [("nhd", "universal"), ("universal", "vllm/paged_attn_v0"), ("vllm/LBHNC", "hnd")])
def test_graph_capture(pair: tuple[str, str]) -> None:
    """Replays of a captured conversion read the current source, and do not upload, allocate or wait."""
    import torch

    shape = kvbm.BlockShape(nl=4, no=2, nh=4, nt=16, hd=64, dtype="bfloat16")
    arenas = [placed(matrix.orders()[name], shape, 6).layout_bytes() for name in pair]
    source, before = oracle.source_bytes(arenas[0], 0), oracle.dest_bytes(arenas[1], 0)
    buffers = [torch.from_numpy(b).cuda() for b in (source, before)]
    pools = [
        kvbm.Pool(kvbm.load(n), shape, torch_views(a, b, "bfloat16"))
        for n, a, b in zip(pair, arenas, buffers, strict=True)
    ]
    ids = [5, 0, 3], [1, 4, 2]
    kvbm.convert(*pools, *ids)  # kernels and tables are loaded before
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kvbm.convert(*pools, *ids)
    for salt in (1, 2, 3):
        fresh = oracle.source_bytes(arenas[0], salt)
        buffers[0].copy_(torch.from_numpy(fresh))
        buffers[1].copy_(torch.from_numpy(before))
        graph.replay()
        torch.cuda.synchronize()
        want = oracle.expected_bytes(*arenas, fresh, before, *ids)
        got = buffers[1].cpu().numpy()
        assert np.array_equal(got, want), oracle.explain(arenas[1], got, want)


@pytest.mark.parametrize("src", ["nhd", "universal", "vllm/paged_attn_v0", "vllm/LBHNC", "hf/dynamic_cache"])
@pytest.mark.parametrize("dst", ["hnd", "universal", "vllm/paged_attn_v0", "operational_nhd"])
@pytest.mark.parametrize(("dtype", "align"), [("bfloat16", 0), ("float8_e5m2", 1), ("int64", 4), ("float32", 2)])
def test_sanitize(src: str, dst: str, dtype: str, align: int) -> None:
    """A small set for compute-sanitizer: -k sanitize.  Separate allocations, so that accesses outside are reported."""
    import torch

    for sizes in ((2, 2, 3, 5, 16), (1, 2, 2, 33, 32)):
        shape = kvbm.BlockShape(*sizes, dtype)
        arenas = [placed(matrix.orders()[name], shape, 3).layout_bytes(align) for name in (src, dst)]
        source, before = oracle.source_bytes(arenas[0], 0), oracle.dest_bytes(arenas[1], 0)
        buffers = [torch.from_numpy(b).cuda() for b in (source, before)]
        pools = [
            kvbm.Pool(kvbm.load(n), shape, interface_views(a, b, dtype))
            for n, a, b in zip((src, dst), arenas, buffers, strict=True)
        ]
        stream = torch.cuda.current_stream()
        kvbm.convert(*pools, [2, 0], [0, 1], stream=stream)
        torch.cuda.synchronize()
        want = oracle.expected_bytes(*arenas, source, before, [2, 0], [0, 1])
        got = buffers[1].cpu().numpy()
        assert np.array_equal(got, want), oracle.explain(arenas[1], got, want)


def test_no_kernel_image_for_this_gpu() -> None:
    """A device that does not exist is an error with code and name, and the next call works."""
    from kvbm import _core

    with pytest.raises(kvbm.CudaError) as info:
        _core.warm(None, 999)
    assert info.value.name and info.value.code
    _core.warm(None, 0)


def test_two_devices() -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    shape = kvbm.BlockShape(nl=2, no=2, nh=4, nt=16, hd=64, dtype="bfloat16")
    pairs = []
    for index in (1, 0):
        arenas = [placed(matrix.orders()[name], shape, 4).layout_bytes() for name in ("nhd", "universal")]
        source, before = oracle.source_bytes(arenas[0], index), oracle.dest_bytes(arenas[1], index)
        buffers = [torch.from_numpy(b).to(f"cuda:{index}") for b in (source, before)]
        pools = [
            kvbm.Pool(kvbm.load(n), shape, views(a, b, "bfloat16", "torch"))
            for n, a, b in zip(("nhd", "universal"), arenas, buffers, strict=True)
        ]
        assert pools[0].device == f"cuda:{index}"
        current = torch.cuda.current_device()
        kvbm.convert(*pools)  # on the stream of the tensors' device, whichever device is current
        assert torch.cuda.current_device() == current
        torch.cuda.synchronize(index)
        want = oracle.expected_bytes(*arenas, source, before, range(4), range(4))
        assert np.array_equal(buffers[1].cpu().numpy(), want)
        pairs.append(pools)
    kvbm.convert(pairs[0][0], pairs[1][1])  # from GPU 1 to GPU 0, on the current stream of the source's
    torch.cuda.synchronize(1)
    for moved, stayed in zip(pairs[1][1].arrays, pairs[0][1].arrays, strict=True):
        assert torch.equal(moved.cpu().view(torch.int16), stayed.cpu().view(torch.int16))
    mixed = [pairs[0][0].arrays[0], *pairs[1][0].arrays[1:]]
    with pytest.raises(kvbm.BindError, match=r"cuda:0.*cuda:1"):
        kvbm.Pool(kvbm.load("nhd"), shape, mixed)


def test_arrays_without_a_stream() -> None:
    """Bare CUDA arrays and kvbm's own device memory have no current stream, so a stream must be given."""
    import torch

    shape = kvbm.BlockShape(nl=1, no=2, nh=2, nt=4, hd=8, dtype="float16")
    pools = [kvbm.Pool.allocate(kvbm.load(name), shape, 2, "cuda:0") for name in ("nhd", "universal")]
    with pytest.raises(kvbm.BindError, match="stream"):
        kvbm.convert(*pools)
    kvbm.convert(*pools, stream=torch.cuda.current_stream())
    torch.cuda.synchronize()


def test_a_launch_does_not_wait() -> None:
    """The call returns while the stream is still busy."""
    import torch

    shape = kvbm.BlockShape(nl=4, no=2, nh=8, nt=16, hd=128, dtype="bfloat16")
    pools = []
    for name in ("nhd", "universal"):
        spaces = placed(matrix.orders()[name], shape, 16).spaces
        pools.append(
            kvbm.Pool(
                kvbm.load(name), shape, [torch.zeros(s.shape, dtype=torch.bfloat16, device="cuda") for s in spaces]
            )
        )
    stream = torch.cuda.Stream()
    kvbm.convert(*pools, stream=stream)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000_000)
    kvbm.convert(*pools, stream=stream)
    assert not stream.query(), "the conversion waited for the stream"
    torch.cuda.synchronize()
