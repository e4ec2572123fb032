"""kvbm.integrations.vllm.copier without vLLM: chunks, groups and digests, with synthetic pages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvbm import BindError, BlockShape, Pool, load  # noqa: E402
from kvbm.integrations.vllm.copier import Copier, Finished, HostMemory  # noqa: E402
from kvbm.integrations.vllm.pages import Pages, as_bytes  # noqa: E402
from kvbm.spec import parse  # noqa: E402

KV = BlockShape(nl=2, no=2, nh=2, nt=4, hd=8, dtype="float32")
LATENT = BlockShape(nl=2, no=1, nh=1, nt=4, hd=24, dtype="bfloat16")
LBHNC = parse('order: "[l] b h t o d"', name="pages")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def pages(shape: BlockShape, device: str, blocks: int = 12) -> Pages:
    """Pages of random elements."""
    size = (blocks, shape.nh, shape.nt, shape.no, shape.hd)
    dtype = getattr(torch, shape.dtype)
    return Pages(Pool(LBHNC, shape, [torch.randn(size).to(dtype).to(device) for _ in range(shape.nl)]))


def arrays(of: Pages) -> Any:
    return torch.stack(of.pool.arrays)


@pytest.fixture
def copiers() -> Iterator[list[Copier]]:
    made: list[Copier] = []
    yield made
    for copier in made:
        copier.close()


def moved(copier: Copier, job: int, ids: list[int], chunks: list[int], **options: Any) -> Finished:
    """A job, when it is done."""
    sizes, indices = options.pop("sizes", [len(ids)]), options.pop("indices", [0])
    copier.submit(job, np.array(ids, np.int32), np.array(chunks, np.int32), sizes, indices, **options)
    copier.wait({job})
    while not (found := copier.finished()):  # the event is recorded behind the copies
        time.sleep(1e-3)
    [one] = found
    assert one.job_id == job
    return one


def device_of(device: str) -> str:
    return "pinned" if device == "cuda" else "cpu"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["universal", "operational_nhd", "nhd"])
def test_blocks_leave_and_return(copiers: list[Copier], device: str, layout: str) -> None:
    """To other blocks; the reported counts are right."""
    engine = pages(KV, device)
    copiers.append(copier := Copier(HostMemory(load(layout), [[engine]], 8, device_of(device)), 1))
    before = arrays(engine).clone()
    out = moved(copier, 1, [3, 5, 2], [7, 0, 4], is_load=False)
    assert (out.is_load, out.blocks, out.nbytes, out.wrong_blocks) == (False, 3, 3 * KV.nbytes, [])
    assert 0 < out.seconds < 10
    back = moved(copier, 2, [8, 9], [4, 7], is_load=True)
    assert (back.is_load, back.blocks, back.nbytes, back.wrong_chunks) == (True, 2, 2 * KV.nbytes, set())
    assert torch.equal(arrays(engine)[:, [8, 9]], before[:, [2, 3]])
    assert copier.finished() == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gap", [0, 32])
def test_pages_as_bytes(copiers: list[Copier], device: str, gap: int) -> None:
    """Any contents leave and return; bytes between pages are unchanged; pages of other sizes are separate items."""
    size = KV.nbytes // KV.nl
    memory = torch.randint(-128, 128, (3, 12, size + gap), dtype=torch.int8).to(device)
    pages = as_bytes([memory[0, :, :size], memory[1, :, :size], memory[2, :, : size // 2]])
    assert [one.pool.shape.nl for one in pages] == [2, 1]
    copiers.append(copier := Copier(HostMemory(load("universal"), [pages], 8, device_of(device)), 1))
    before = memory.clone()
    out = moved(copier, 1, [3, 5], [7, 0], is_load=False)
    assert out.nbytes == 2 * (2 * size + size // 2)
    assert not moved(copier, 2, [8, 9], [0, 7], is_load=True).wrong_blocks
    for layer, nbytes in enumerate((size, size, size // 2)):
        before[layer, [8, 9], :nbytes] = before[layer, [5, 3], :nbytes]
    assert torch.equal(memory, before)


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_of_several_blocks(copiers: list[Copier], device: str) -> None:
    """A load begins and ends inside a chunk; blocks that were never stored are wrong."""
    engine = pages(KV, device)
    copiers.append(copier := Copier(HostMemory(load("universal"), [[engine]], 12, device_of(device)), 3))
    before = arrays(engine).clone()
    moved(copier, 1, [1, 2, 3, 4, 5], [3, 0], is_load=False, indices=[4])  # places 1, 2 of chunk 3; all of chunk 0
    found = moved(copier, 2, [7, 8, 9], [3, 0], is_load=True, indices=[5])
    assert torch.equal(arrays(engine)[:, 7:10], before[:, 2:5]) and not found.wrong_blocks
    found = moved(copier, 3, [10, 11], [3], is_load=True, indices=[3])
    assert (found.wrong_blocks, found.wrong_chunks) == ([10], {3})
    moved(copier, 4, [1, 2, 3, 4], [2, 0], is_load=False, indices=[5])  # chunk 0 again; of chunk 2 the end alone
    moved(copier, 5, [1, 2], [0], is_load=False, indices=[1])  # and of chunk 0: what it held before is not what it holds
    assert moved(copier, 6, [10, 11], [0], is_load=True, indices=[0]).wrong_blocks == [10]


@pytest.mark.parametrize("device", DEVICES)
def test_groups_share_chunks(copiers: list[Copier], device: str) -> None:
    """Layers of several kinds in one block, and groups with common pages."""
    full, latent = pages(KV, device), pages(LATENT, device)
    groups = [[full], [full], [full, latent]]
    copiers.append(copier := Copier(HostMemory(load("universal"), groups, 6, device_of(device)), 1))
    memory = copier.memory
    assert memory.lanes[0][0] is memory.lanes[1][0] is memory.lanes[2][0]
    before = arrays(full).clone(), arrays(latent).clone()
    out = moved(copier, 1, [1, 2, 3], [5, 0, 1], sizes=[1, 1, 1], indices=[0, 7, 2], is_load=False)
    assert out.nbytes == 3 * KV.nbytes + LATENT.nbytes and out.blocks == 3
    moved(copier, 2, [9], [1], sizes=[0, 0, 1], indices=[0, 0, 0], is_load=True)
    moved(copier, 3, [10, 11], [0, 5], sizes=[1, 1, 0], indices=[0, 0, 0], is_load=True)
    assert torch.equal(arrays(full)[:, [9, 10, 11]], before[0][:, [3, 2, 1]])
    assert torch.equal(arrays(latent)[:, 9], before[1][:, 3])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("verify", [True, False])
def test_a_flipped_bit(copiers: list[Copier], device: str, verify: bool) -> None:
    """It is reported for its block; without verification it is copied."""
    engine = pages(KV, device)
    copiers.append(copier := Copier(HostMemory(load("universal"), [[engine]], 8, device_of(device)), 2, verify))
    before = arrays(engine).clone()
    moved(copier, 1, [0, 1, 2, 3], [2, 1], is_load=False)
    copier.memory.lanes[0][0].host.arrays[3].view(np.uint8)[0, 0, 0, 0, 0] ^= 1  # block 1 of chunk 1
    found = moved(copier, 2, [8, 9, 10, 11], [2, 1], is_load=True)
    assert not torch.equal(arrays(engine)[:, 11], before[:, 3])
    assert (found.wrong_blocks, found.wrong_chunks) == (([11], {1}) if verify else ([], set()))
    found = moved(copier, 3, [8, 9, 10, 11], [3, 2], is_load=True)  # of which nobody has stored chunk 3
    assert (found.wrong_blocks, found.wrong_chunks) == ([8, 9], {3})


def test_memory_of_all_ranks() -> None:
    """One rank stores, another loads: blocks, digests, and their flags, in shared memory."""
    engines = [pages(LATENT, "cpu") for _ in range(2)]
    nbytes = HostMemory.shared_bytes([[engines[0]]], 6)
    shared = np.zeros(nbytes, np.uint8)
    first, second = (Copier(HostMemory(load("universal"), [[one]], 6, "cpu", shared), 1) for one in engines)
    moved(first, 1, [4, 5], [0, 3], is_load=False)
    assert not moved(second, 1, [1, 2], [3, 0], is_load=True).wrong_blocks
    assert torch.equal(arrays(engines[1])[:, [1, 2]], arrays(engines[0])[:, [5, 4]])
    assert moved(second, 2, [1], [1], is_load=True).wrong_chunks == {1}
    first.close()
    second.close()


def test_errors() -> None:
    """Too few chunks for the blocks; several kinds of blocks in a layout without one array per block."""
    engine = pages(KV, "cpu")
    copier = Copier(HostMemory(load("universal"), [[engine]], 8, "cpu"), 2)
    with pytest.raises(BindError, match=r"2 blocks a chunk: expected 3 blocks and 2 chunks, got 3 and 1"):
        copier.submit(1, np.arange(3), np.arange(1), [3], [1], is_load=True)
    assert copier.finished() == []
    with pytest.raises(
        BindError, match=r"host_layout: nhd .*: expected a layout with one array a block, such as universal"
    ):
        HostMemory(load("nhd"), [[engine], [pages(LATENT, "cpu")]], 8, "cpu")


@pytest.mark.gpu
def test_nothing_waits_for_a_submit(copiers: list[Copier]) -> None:
    """The host returns while earlier work on the stream runs, and no job is finished; later all are."""
    engine = pages(KV, "cuda")
    copiers.append(copier := Copier(HostMemory(load("universal"), [[engine]], 8, "pinned"), 1))
    moved(copier, 1, [0, 1], [0, 1], is_load=False)
    before = arrays(engine).clone()
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # half a second
    for tensor in engine.pool.arrays:
        tensor[2] = 7
    start = time.perf_counter()
    copier.submit(2, np.array([2]), np.array([5]), [1], [0], is_load=False)
    copier.submit(3, np.array([6]), np.array([1]), [1], [0], is_load=True)
    assert time.perf_counter() - start < 0.2
    assert copier.finished() == []
    copier.wait({2, 3})
    torch.cuda.synchronize()
    assert [(one.job_id, one.wrong_blocks) for one in copier.finished()] == [(2, []), (3, [])]
    moved(copier, 4, [9], [5], is_load=True)
    assert bool((arrays(engine)[:, 9] == 7).all()) and torch.equal(arrays(engine)[:, 6], before[:, 1])
