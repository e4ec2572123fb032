"""kvbm.integrations.vllm.copier without vLLM: chunks, groups and digests, with synthetic pages."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvbm import BindError, BlockShape, Pool, load  # noqa: E402
from kvbm.integrations.vllm.copier import Copier, Finished, HostMemory, shared_memory  # noqa: E402
from kvbm.integrations.vllm.pages import Pages, as_bytes  # noqa: E402
from kvbm.layout.spec import parse  # noqa: E402

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
    assert memory.stores[0][0] is memory.stores[1][0] is memory.stores[2][0]
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
    """It is reported for its block, which is zero; without verification it is copied."""
    engine = pages(KV, device)
    copiers.append(copier := Copier(HostMemory(load("universal"), [[engine]], 8, device_of(device), None, verify), 2))
    before = arrays(engine).clone()
    moved(copier, 1, [0, 1, 2, 3], [2, 1], is_load=False)
    copier.memory.stores[0][0].host.arrays[3].view(np.uint8)[0, 0, 0, 0, 0] ^= 1  # block 1 of chunk 1
    found = moved(copier, 2, [8, 9, 10, 11], [2, 1], is_load=True)
    assert not torch.equal(arrays(engine)[:, 11], before[:, 3])
    assert (found.wrong_blocks, found.wrong_chunks) == (([11], {1}) if verify else ([], set()))
    assert bool((arrays(engine)[:, 11] == 0).all()) is verify
    found = moved(copier, 3, [8, 9, 10, 11], [3, 2], is_load=True)  # of which nobody has stored chunk 3
    assert (found.wrong_blocks, found.wrong_chunks) == ([8, 9], {3})
    assert bool((arrays(engine)[:, 8:10] == 0).all()) and torch.equal(arrays(engine)[:, 10:12], before[:, 0:2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_failed_load_leaves_zeros_in_all_layers_of_its_blocks_and_no_other_byte(
    copiers: list[Copier], device: str, value: float
) -> None:
    """Groups with layers of two kinds: what is wrong in one of them is zero in both, when the failure is told."""
    full, latent = pages(KV, device), pages(LATENT, device)
    groups = [[full], [full, latent]]
    copiers.append(copier := Copier(HostMemory(load("universal"), groups, 8, device_of(device)), 1))
    before = arrays(full).clone(), arrays(latent).clone()
    moved(copier, 1, [1, 2, 3, 4], [5, 0, 1, 7], sizes=[2, 2], indices=[0, 0], is_load=False)
    # Block 1 of the first group, and block 3 of the second one in its second kind of layers alone.
    copier.memory.stores[0][0].host.arrays[5][1, 1, 0, 2, 3] = value
    copier.memory.stores[1][1].host.arrays[1].view(np.uint16)[0, 0, 0, 1, 1] = 0x7FC0 if value != value else 0x7F80
    found = moved(copier, 2, [8, 9, 10, 11], [5, 0, 1, 7], sizes=[2, 2], indices=[0, 0], is_load=True)
    assert (found.wrong_blocks, found.wrong_chunks) == ([8, 10], {5, 1})
    expected = before[0].clone(), before[1].clone()
    expected[0][:, [8, 9, 10, 11]] = before[0][:, [1, 2, 3, 4]]
    expected[1][:, [10, 11]] = before[1][:, [3, 4]]
    expected[0][:, [8, 10]] = 0
    expected[1][:, 10] = 0
    assert torch.equal(arrays(full), expected[0]) and torch.equal(arrays(latent), expected[1])


def test_on_the_host_what_is_wrong_is_never_copied(copiers: list[Copier], monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is compared before it is copied: until its failure is told it holds what it held before."""
    engine = pages(KV, "cpu")
    copiers.append(copier := Copier(HostMemory(load("universal"), [[engine]], 8, "cpu"), 1))
    before = arrays(engine).clone()
    moved(copier, 1, [0, 1], [2, 1], is_load=False)
    [[store]] = copier.memory.stores
    store.host.arrays[1][...] = float("nan")
    copier.submit(2, np.array([8, 9]), np.array([2, 1]), [2], [0], is_load=True)
    assert torch.equal(arrays(engine)[:, [8, 9]], before[:, [0, 9]])
    [found] = copier.finished()
    assert found.wrong_blocks == [9] and bool((arrays(engine)[:, 9] == 0).all())

    def late(*_: Any) -> Any:  # the memory changes between the comparison and the copy
        store.host.arrays[2][...] = float("inf")
        return np.zeros(1, np.bool_)

    monkeypatch.setattr(store, "changed", late)
    assert moved(copier, 3, [8], [2], is_load=True).wrong_blocks == [8]
    assert bool((arrays(engine)[:, 8] == 0).all())


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_that_follow_a_failed_load_are_not_cleared(copiers: list[Copier], device: str) -> None:
    """Once a failure was told its blocks may belong to others: nothing writes them any more."""
    engine = pages(KV, device)
    copiers.append(copier := Copier(HostMemory(load("universal"), [[engine]], 8, device_of(device)), 1))
    moved(copier, 1, [0, 1], [2, 1], is_load=False)
    copier.memory.stores[0][0].host.arrays[1].view(np.uint8)[0, 0, 0, 0, 0] ^= 1
    assert moved(copier, 2, [8, 9], [2, 1], is_load=True).wrong_blocks == [9]
    for tensor in engine.pool.arrays:
        tensor[9] = 7
    assert not moved(copier, 3, [8], [2], is_load=True).wrong_blocks and copier.finished() == []
    copier.wait()
    assert bool((arrays(engine)[:, 9] == 7).all())


def test_memory_of_all_ranks() -> None:
    """One rank stores, another loads: blocks, digests, and their flags, in shared memory."""
    engines = [pages(LATENT, "cpu") for _ in range(2)]
    nbytes = HostMemory.shared_bytes(load("universal"), [[engines[0]]], 6)
    shared = np.zeros(nbytes, np.uint8)
    first, second = (Copier(HostMemory(load("universal"), [[one]], 6, "cpu", shared), 1) for one in engines)
    moved(first, 1, [4, 5], [0, 3], is_load=False)
    assert not moved(second, 1, [1, 2], [3, 0], is_load=True).wrong_blocks
    assert torch.equal(arrays(engines[1])[:, [1, 2]], arrays(engines[0])[:, [5, 4]])
    assert moved(second, 2, [1], [1], is_load=True).wrong_chunks == {1}
    first.close()
    second.close()


def test_ranks_share_memory_that_nobody_else_can_open(tmp_path: Path) -> None:
    """Zeroed, also where an engine of this name was killed when it started; and the name is free again."""
    barrier, seen = threading.Barrier(3), []

    def rank(number: int) -> Any:
        def wait() -> None:
            barrier.wait(30)
            if not number:
                seen.extend((path.stat().st_mode & 0o777, path.stat().st_size) for path in tmp_path.iterdir())
            barrier.wait(30)

        return shared_memory("a/b", 100, wait, tmp_path)

    for _ in range(2):
        with ThreadPoolExecutor(3) as threads:
            ranks = list(threads.map(rank, range(3)))
        for number, memory in enumerate(ranks):
            assert memory.shape == (100,) and not memory[number]
            memory[number] = number + 1
        assert all(memory[:4].tolist() == [1, 2, 3, 0] for memory in ranks) and not list(tmp_path.iterdir())
    assert set(seen) == {(0o600, 100)}
    name = "kvbm_offload_" + hashlib.sha256(b"a/b").hexdigest()[:32]
    (tmp_path / name).write_bytes(b"\1" * 300)
    assert shared_memory("a/b", 100, lambda: None, tmp_path).tolist() == [0] * 100


@pytest.mark.parametrize("what", ["readable", "link", "hard link"])
def test_memory_of_ranks_that_another_user_can_use_is_refused(tmp_path: Path, what: str) -> None:
    """Who may write into the folder makes the file when the engine starts."""
    folder, other, calls = tmp_path / "shm", tmp_path / "other", []
    folder.mkdir()
    other.write_bytes(bytes(100))
    other.chmod(0o666 if what == "readable" else 0o600)
    path = folder / ("kvbm_offload_" + hashlib.sha256(b"a").hexdigest()[:32])

    def barrier() -> None:
        if not calls:
            {"readable": other.rename, "link": path.symlink_to, "hard link": path.hardlink_to}[what](
                path if what == "readable" else other
            )
        calls.append(1)

    with pytest.raises(BindError, match=rf"{path}: expected (a file that only this user|memory of 100 bytes)"):
        shared_memory("a", 100, barrier, folder)
    assert len(calls) == 1


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
