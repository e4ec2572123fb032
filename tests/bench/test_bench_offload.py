"""`python -m benchmarks offload`: rows, checks before them, and vLLM's lists of descriptors.  Small sizes; no time is asserted."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import benching
from benching import MODEL, ON_CPU, run
from benchmarks import descriptors, interference, offload, race
from kvbm.bench import measure
from kvbm.bench.check import WrongCopyError
from kvbm.layout.shapes import BlockShape
from kvbm.system.clock import CpuClock

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.usefixtures("small_caches")

OURS = ("kvbm (direct)", "kvbm, no digests (direct)", "kvbm, universal (direct)")


def ran(*arguments: str) -> list[dict[str, str]]:
    rows = benching.ran(offload.offload, *ON_CPU, *arguments)
    assert tuple(rows[0]) == race.COLUMNS
    return rows


@pytest.mark.slow  # 24 caches
def test_every_cache_is_measured_both_ways() -> None:
    """With and without digests, 8 and 64 blocks, each compared with vLLM's way for this cache."""
    rows = ran("--what", "copies")
    assert {row["beside"] for row in rows} == {"memcpy"}
    theirs = {}
    for row in rows:
        if row["by"] not in OURS:
            theirs.setdefault(row["case"], set()).add(row["by"])
    cases = [
        f"{way}: {MODEL}, tp {tp}, {order}, {nt} tokens"
        for tp in (1, 4) for order in offload.ORDERS for nt in (16, 32) for way in ("load", "store")
    ]  # fmt: skip
    assert list(dict.fromkeys(row["case"] for row in rows)) == cases
    for case in cases:
        for by in (*OURS, *theirs[case]):
            assert [row["n"] for row in rows if (row["case"], row["by"]) == (case, by)] == ["8", "64"]
    for way in ("load", "store"):
        assert theirs[f"{way}: {MODEL}, tp 1, BLHNC, 16 tokens"] == {"vLLM, a block (16 KiB)"}
        assert theirs[f"{way}: {MODEL}, tp 1, LBNHC, 16 tokens"] == {"vLLM, a page and layer (8 KiB)"}
        assert theirs[f"{way}: {MODEL}, tp 4, LBHNC, 32 tokens"] == {"vLLM, a page and layer (4 KiB)"}
        both = {"vLLM, a page and layer (4 KiB)", "vLLM, canonical (128 B)"}
        assert theirs[f"{way}: {MODEL}, tp 4, LBNHC, 32 tokens"] == both
    first = rows[0]
    assert int(first["total_bytes"]) == 8 * MODEL.nbytes and first["asked"] == ""


@pytest.mark.slow  # a whole study
def test_quick_runs_and_the_table(tmp_path: Path) -> None:
    out = tmp_path / "results" / "offload.csv"
    found = run(offload.offload, *ON_CPU, "--quick", "--out", str(out))
    assert found.exit_code == 0, (found.output, found.exception)
    assert "product: left out: it needs a GPU" in found.stderr
    assert "host time" in found.stdout
    text = out.read_text("utf-8")
    assert text.startswith("# kvbm abc1234") and "a step with nothing to move" in text and "<= 0.02 ms" in text


def test_models() -> None:
    """Without a profile the model is a part of the 8B model; on GPUs both models are measured."""
    seen: list[Any] = []

    def fake(run: offload.Run, sections: Any) -> Any:
        seen.append((run, sections))
        return iter([])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "measure", fake)
        for place in ("cpu", "cuda:0"):
            patch.setattr("benchmarks.section.header", lambda *_: "# kvbm")
            run(offload.offload, "--device", place)
    (cpu, sections), (gpu, _) = seen
    assert {name: shape.nl for name, shape in cpu.models.items()} == {
        "llama-3.1-8b": 4
    } and sections == offload.SECTIONS
    assert {name: shape.nl for name, shape in gpu.models.items()} == {"llama-3.1-8b": 32, "llama-3.1-70b": 80}
    assert len(list(gpu.cases)) == 24 and {case.shape.nh for case in gpu.cases} == {2, 8}
    assert (cpu.host, gpu.host) == ("cpu", "pinned:0")


# ---- vLLM's lists --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", offload.ORDERS)
def test_pages_are_all_of_a_block(order: str) -> None:
    """Each byte of a block occurs once: in the engine's memory by its layout, and in a row of the host."""
    shape, blocks = dataclasses.replace(MODEL, nh=2), 5
    pages = descriptors.Pages.of(order, shape, blocks)
    engine, host = pages.ranges([3], [1])
    axes = offload.ORDERS[order]
    sizes = {"l": shape.nl, "b": blocks, "t": shape.nt, "h": shape.nh, "o": shape.no, "d": 2 * shape.hd}
    flat = np.arange(blocks * shape.nbytes).reshape([sizes[axis] for axis in axes])
    wanted = np.take(flat, 3, axes.index("b"))
    got = engine[:, None] + np.arange(pages.nbytes)
    assert np.array_equal(np.sort(got.reshape(-1)), np.sort(wanted.reshape(-1)))
    assert np.array_equal(
        np.sort((host[:, None] + np.arange(pages.nbytes)).reshape(-1)), shape.nbytes + np.arange(shape.nbytes)
    )
    assert len(engine) == (1 if order == "BLHNC" else shape.nl)


def test_canonical_pages() -> None:
    """For two heads of eight, vLLM 0.32 lists one fragment per token: 16 of 1 KiB per page; elsewhere it lists none."""
    shape = BlockShape(nl=3, no=2, nh=2, nt=16, hd=128, dtype="bfloat16")
    pages = descriptors.Pages.canonical("LBNHC", shape, 10, 4)
    assert pages is not None and pages.nbytes == 1024 and pages.engine.shape == (3, 16)
    assert pages.row == 4 * shape.nbytes
    engine, host = pages.ranges([2, 0], [1, 3])
    page = shape.nbytes // shape.nl
    assert engine[:17].tolist() == [2 * page + 1024 * t for t in range(16)] + [0]
    assert host[:17].tolist() == [pages.row + 4096 * t for t in range(16)] + [3 * pages.row]
    assert int(engine[32]) == (10 + 2) * page and int(host[32]) == pages.row + 4 * page
    assert descriptors.Pages.canonical("LBNHC", shape, 10, 1) is None
    assert (
        descriptors.Pages.canonical("LBHNC", shape, 10, 4) is descriptors.Pages.canonical("BLHNC", shape, 10, 4) is None
    )


@pytest.mark.parametrize("version", ["13000", "12080"])
def test_one_call_copies_a_list(fake_driver: Any, version: str) -> None:
    """Both forms of the driver's function; reads of host memory may happen at any time."""
    same, refused = fake_driver("batches.main", FAKE_VERSION=version).splitlines()
    assert same == "True" and refused == "cuMemcpyBatchAsync of 8 ranges: CUDA_ERROR_INVALID_VALUE"


def test_a_driver_without_the_call(fake_driver: Any) -> None:
    assert "expected a driver with cuMemcpyBatchAsync" in fake_driver("batches.refused", FAKE_VERSION="12070")


# ---- what is wrong is seen -----------------------------------------------------------------------------------------


@pytest.fixture
def worker() -> Any:
    with contextlib.ExitStack() as stack:
        shape = dataclasses.replace(MODEL, nh=2)
        yield offload.Worker(offload.Case("model", 4, "LBNHC", shape), "cpu", 32, CpuClock(), stack)


def test_a_wrong_copy_is_seen(worker: offload.Worker) -> None:
    """A wrong block in host memory; a wrong block after the way back; a write to a block that was not requested."""
    for by in offload.OURS:
        worker.check_copier(by, 4)
    move, by, spoils_load = worker.move, "kvbm, no digests", False
    host = worker.store(by).host.arrays

    def spoiled(*given: Any, is_load: bool) -> float:
        seconds = move(*given, is_load=is_load)
        if is_load == spoils_load:
            (worker.cache if is_load else torch.from_numpy(host[int(given[2][1])].view(np.uint8))).view(-1)[7] ^= 1
        return seconds

    worker.move = spoiled  # type: ignore[method-assign]
    with pytest.raises(WrongCopyError, match="is not the block that was stored"):
        worker.check_copier(by, 4)
    spoils_load = True
    with pytest.raises(WrongCopyError, match="or other blocks were written"):
        worker.check_copier(by, 4)


def test_a_load_that_fails_its_check_is_seen(worker: offload.Worker) -> None:
    worker.store_all()
    worker.store("kvbm").host.arrays[3].view(np.uint8).reshape(-1)[5] ^= 1
    with pytest.raises(WrongCopyError, match="model, tp 4, LBNHC, 16 tokens, kvbm: 1 of 2 blocks fail their check"):
        worker.move("kvbm", np.array([1, 2]), np.array([3, 4]), is_load=True)


@pytest.mark.slow  # a whole study
def test_memory_that_does_not_suffice_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = offload.random_pool

    def some(layout: Any, *rest: Any, **more: Any) -> Any:
        if layout.name == "vllm/LBNHC":
            raise MemoryError("no room")
        return pool(layout, *rest, **more)

    monkeypatch.setattr(offload, "random_pool", some)
    notes: list[str] = []
    rows = list(offload.measure(offload.Run("cpu", {"small": MODEL}, 1, True, notes.append), ("copies",)))
    assert notes == [f"small, tp {tp}, LBNHC, 16 tokens: left out: no room" for tp in (1, 4)]
    assert len(rows) == 2 * 2 * 2 * 2 * 4


# ---- as on a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.slow  # a whole study
def test_what_is_asked_for_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """For kvbm's copies; the CPU replaces the GPU."""
    monkeypatch.setattr(offload.Run, "asks", property(lambda _: True))
    rows = ran("--what", "copies", "--quick")
    assert {(row["by"] in OURS, row["n"], row["asked"]) for row in rows} == {
        (True, "8", ">= 0.93"), (True, "64", ">= 0.97"), (False, "8", ""), (False, "64", ""),
    }  # fmt: skip


def test_a_product_beside_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row shows how much slower it is during kvbm's copies than during a memcpy."""

    class Model:
        torch = torch

        def beside(self, copy: Any, nbytes: int) -> Any:
            copy(None)
            return interference.Seen(next(products), 1.0, nbytes / 2, nbytes)

    products = iter([1.01, 1.02, 1.01, 1.01, 1.5])
    monkeypatch.setattr(offload, "memcpy", lambda *_: contextlib.nullcontext(lambda stream: stream))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    notes: list[str] = []
    asked = offload.Run("cpu", {"small": MODEL}, 1, True, notes.append)
    with contextlib.ExitStack() as stack:
        worker = offload.Worker(offload.Case("small", 1, "LBNHC", MODEL), "cpu", 128, CpuClock(), stack)
        rows = measure.Memory(128 * MODEL.nbytes, "cpu")
        stack.callback(rows.close)
        found = list(offload._beside_product(asked, Model(), worker, rows, "store"))  # type: ignore[arg-type]
    assert [(row["by"], row["ratio"], row["reached"]) for row in found] == [
        ("kvbm", 0.9902, "yes"), ("kvbm, no digests", 1.0, "yes"), ("kvbm, universal", 1.0, "yes"),
        ("vLLM, a page and layer (8 KiB)", 0.6733, ""),
    ]  # fmt: skip


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    """All parts, at their smallest sizes."""
    shape = "nl=4,no=2,nh=8,nt=16,hd=128,dtype=bfloat16"
    out = tmp_path / "offload.csv"
    found = run(offload.offload, "--quick", "--iters", "5", "--shape", shape, "--out", str(out))
    assert found.exit_code == 0, (found.output, found.exception)
    rows = benching.read(out.read_text("utf-8"))[1]
    ways = {row["by"].partition(" (")[0] for row in rows}
    assert {*offload.OURS, "vLLM, a page and layer", "vLLM, a block", "vLLM, canonical"} <= ways
    assert {row["case"].partition(":")[0] for row in rows} == {
        "load", "store", "product beside a load", "product beside a store", "host time",
    }  # fmt: skip
