"""`python -m benchmarks link` and the table of link growth: rows, and the check before them.  Small sizes; no time is asserted."""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import benching
from benching import ON_CPU, run
from benchmarks import growth, link, race, ranks, ways
from kvbm import _core
from kvbm.bench.check import WrongCopyError
from processes import FakeDriver

DOCS = Path(__file__).resolve().parents[2] / "docs" / "howto" / "connect.md"
TORCH = pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")


def ran(*arguments: str) -> list[dict[str, str]]:
    rows = benching.ran(link.link, *ON_CPU, "--quick", *arguments)
    assert tuple(rows[0]) == race.COLUMNS
    return rows


@pytest.fixture
def small(small_caches: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "EACH", 1 << 16)
    monkeypatch.setattr(link.Run, "sizes", (256, 1024))


@pytest.mark.slow  # eight links, both sides of many chunks
@pytest.mark.usefixtures("small")
def test_what_is_fixed() -> None:
    chunks = ran("--what", "chunks")
    assert [row["by"] for row in chunks] == ["the side of prefill", "the side of decode-0", "a chunk and peer"]
    assert {row["asked"] for row in chunks} == {"<= 0.05 ms", "<= 1"} and chunks[-1]["ratio"] == "1.0"
    (many,) = ran("--what", "many")
    assert (many["by"], many["beside"], many["n"], many["asked"]) == ("8 links", "1 link", "8", ">= 0.8")


class InThreads:
    """What `multiprocessing` gives, with a thread for each process."""

    Pipe = staticmethod(multiprocessing.Pipe)

    class Process(threading.Thread):
        def __init__(self, target: Any, args: tuple[Any, ...], daemon: bool) -> None:
            pipe, *rest = args
            super().__init__(target=target, args=(Connection(os.dup(pipe.fileno())), *rest), daemon=daemon)

        def kill(self) -> None:
            """It ends with its pipe."""


@pytest.mark.slow  # 2 s: six endpoints
@TORCH
@pytest.mark.usefixtures("small")
def test_four_ranks_send_to_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared by the digests of the model, before it is timed."""
    monkeypatch.setattr(ranks.multiprocessing, "get_context", lambda _: InThreads)
    (first, last) = ran("--what", "ranks")
    assert {(row["case"], row["by"], row["beside"]) for row in (first, last)} == {
        ("tp 4 → 2, bytes of the other GPU", "link, chunks", "memcpy")
    }
    assert int(last["total_bytes"]) == 4 * int(first["total_bytes"]) == 1024 * benching.MODEL.nbytes // benching.MODEL.nt
    monkeypatch.setattr(ranks.Processes, "seconds", lambda *_: 1.0)
    monkeypatch.setattr(ranks.Processes, "ask", lambda *_: (0.0, [[1, 2], [0]]))
    with pytest.raises(WrongCopyError, match="what came is not what was sent"):
        ranks.Processes.check(ranks.Processes.__new__(ranks.Processes), 64)


@pytest.mark.slow  # two processes, every transport
@TORCH
@pytest.mark.usefixtures("small")
def test_every_way_is_measured_beside_what_carries_it() -> None:
    rows = ran("--what", "messages")
    here = [name for name in ways.ON_CPU if find_spec("nixl") or "gloo" in name or "torch" in name]
    assert [row["by"] for row in rows] == 2 * here
    assert all(row["beside"] == (ways.ON_CPU[row["by"]].beside or row["by"]) for row in rows)
    assert {row["by"] for row in rows if row["asked"]} == {"wire.nixl", "wire.torch"} & set(here)
    if "as engines do" in here:
        each = [int(row["n"]) for row in rows if row["by"] == "as engines do"]
        assert each == [2 * benching.MODEL.nl * tokens // 16 for tokens in (256, 1024)]


@pytest.mark.slow  # half a second
@pytest.mark.usefixtures("small")
def test_transports_that_are_missing_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise ImportError("no such package")

    monkeypatch.setattr(ways.ByNixl, "__init__", missing)
    monkeypatch.setattr(ways.ByTorch, "__init__", missing)
    found = run(link.link, *ON_CPU, "--quick", "--what", "messages")
    assert found.exit_code and "NIXL: left out: no such package" in found.stderr and "wire.nixl" not in found.stderr


@pytest.mark.slow  # two processes
@TORCH
def test_what_comes_is_compared(tmp_path: Path) -> None:
    with ways.Pair(benching.MODEL, 256, str(tmp_path)) as pair:
        pair.open("gloo")
        pair.check("gloo", 256)
        pair.side.bytes.array[100] ^= 1
        pair.check("gloo", 256)
        send = pair.ways["gloo"].send

        def wrong(tokens: int) -> None:
            pair.side.bytes.array[100] ^= 1
            send(tokens)
            pair.side.bytes.array[100] ^= 1

        pair.ways["gloo"].send = wrong  # type: ignore[method-assign]
        with pytest.raises(WrongCopyError, match="gloo: 256 tokens: what came is not what was sent"):
            pair.check("gloo", 256)
        with pytest.raises(ways.KvbmError, match="the other process: KeyError"):
            pair.ask("sum", "no way", 1)


@pytest.mark.slow  # a whole study
@pytest.mark.usefixtures("small")
def test_packing_is_measured_beside_a_memcpy() -> None:
    rows = ran("--what", "cut", "--chunk", "64KiB")
    assert [row["by"] for row in rows] == 2 * ["pack", "unpack"] and {row["beside"] for row in rows} == {"memcpy"}
    nbytes = [int(row["total_bytes"]) for row in rows]
    assert nbytes == [benching.MODEL.nbytes // 16 * tokens for tokens in (256, 256, 1024, 1024)]
    assert [int(row["n"]) for row in rows] == [-(-each // (1 << 16)) for each in nbytes]


def test_a_product_is_measured_on_gpus_alone() -> None:
    found = run(link.link, *ON_CPU, "--quick", "--what", "beside")
    assert found.exit_code and "a product beside links is measured on GPUs" in found.stderr


def test_ways_stand_beside_ways_that_are_opened_before() -> None:
    for known in (ways.ON_CPU, ways.ON_GPUS):
        names = list(known)
        assert all(not one.beside or one.beside in names[: names.index(name)] for name, one in known.items())
    mapped = ways.ways_of("cuda:1")["link, mapped"]
    assert [mapped.asked_of(nbytes) for nbytes in (1, 8 << 20, 64 << 20, 320 << 20, 2560 << 20)] == [None, None, 0.3, 0.6, 0.8]
    assert ways.ways_of("cpu")["gloo"].asked_of(1 << 30) is None


def test_the_other_process_is_on_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link._core, "device_count", lambda: 3)
    assert [link.other_than(place) for place in ("cpu", "cuda:0", "cuda:1")] == ["cpu", "cuda:1", "cuda:0"]
    monkeypatch.setattr(link._core, "device_count", lambda: 1)
    assert link.other_than("cuda:0") == "cuda:0"
    assert run(link.link, *ON_CPU, "--to", "gpu").exit_code == 2


def test_both_sides_on_a_gpu(fake_gpu: FakeDriver, tmp_path: Path) -> None:
    """The benchmark's pools have no current stream: a digest of them must name a stream."""
    fake_gpu("bench_ways.both_sides", str(tmp_path / "side"))


@pytest.mark.gpu
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("section", link.SECTIONS)
def test_on_a_gpu(section: str) -> None:
    """Both processes on one GPU, or on two; with one GPU, NCCL is omitted."""
    if section == "ranks" and _core.device_count() < 2:
        pytest.skip("one GPU")
    rows = ran("--what", section, "--device", "cuda:0")
    found = {row["by"] for row in rows}
    wanted = {"messages": {"memcpy"}, "cut": {"pack", "unpack"}, "beside": {"memcpy"}}.get(section, set())
    if section in ("messages", "beside") and find_spec("nixl"):
        wanted |= {"NIXL", "link by NIXL", "link, mapped"}
    assert wanted <= found and rows


def test_blocks_of_engines_are_each_there_once() -> None:
    """One descriptor per block, layer, K and V: together they cover all bytes of the pool, block by block."""

    class Way(ways.AsEngines):
        def __init__(self, side: ways.Side) -> None:
            self.side = side

    side = ways.Side(ways.Setting(benching.MODEL, 64, "", True))
    way = Way(side)
    found = way.blocks([(*place, 0) for place in way.regions()])
    nbytes = side.pool.shape.nbytes
    each = 2 * side.pool.shape.nl
    for block in range(4):
        held = b"".join(
            ways.wire.Slab(at, size) and _bytes(at, size) for at, size, _ in found[each * block : each * (block + 1)]
        )
        want = b"".join(array[half, block].tobytes() for array in side.pool.arrays for half in (0, 1))
        assert held == want and len(held) == nbytes
    side.stack.close()


def _bytes(address: int, nbytes: int) -> bytes:
    import ctypes

    return ctypes.string_at(address, nbytes)


@pytest.mark.parametrize("case", list(growth.CASES)[:3])
def test_how_links_grow(case: str) -> None:
    """The numbers of the documentation's table, except times."""
    one = growth.grow(case)
    (told,) = [line for line in DOCS.read_text("utf-8").splitlines() if line.startswith(f"| {case} |")]
    (made,) = list(growth.table({case: one}))[2:]
    times = re.compile(r"(?<=\| )[\d.]+ \| [\d.]+ \| (?=[\d,]+ \| [\d,]+ \|$)")
    assert times.sub("", made) == times.sub("", told)


def test_the_table_has_every_case() -> None:
    text = DOCS.read_text("utf-8")
    assert all(f"\n| {case} | " in text for case in growth.CASES)
    assert next(growth.table({})) in text
