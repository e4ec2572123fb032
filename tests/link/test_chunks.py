"""Sequences sent in chunks: every byte against an oracle, digests of parts that add up, and errors."""

from __future__ import annotations

import functools
import itertools
import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_packer import memory

import digest_oracle
import kvbm
import plane_oracle
import processes
import reshard_oracle
from chunking import Carried, case, engine, far_cells, is_sendable
from kvbm import BindError, BlockShape, DigestError, Placement, Pool, Span, load, reshard, wire
from kvbm.layout import spec
from kvbm.link import chunks as cuts
from kvbm.link.chunk import TRAILER
from kvbm.reshard import Cut, Packer, Trailer
from kvbm.reshard import packer as pack
from kvbm.reshard.packer import NUM_CELLS
from linking import until
from memory import aligned


def room(nbytes: int) -> np.ndarray:
    """A slot filled with noise, at a multiple of 16."""
    return aligned(np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8))


def sendable(first: int, count: int) -> list[reshard_oracle.Case]:
    found: list[reshard_oracle.Case] = []
    seed = first
    while len(found) < count:
        case = reshard_oracle.replace(reshard_oracle.random_case(seed), clear_tail=False)
        found += [case] if is_sendable(case) else []
        seed += 1
    return found


def carried(one: reshard_oracle.Case, seed: str) -> None:
    rng = random.Random(seed)
    run = reshard_oracle.Run(one, aligned, reshard_oracle.host_arrays)
    Carried(run, room, rng)(lambda slot: slot.tobytes(), rng.choice(["after", "before"]))
    run.check(np.asarray)


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.slow  # 0.6 s
@pytest.mark.sanitize
def test_units_wherever_their_base_is(monkeypatch: pytest.MonkeyPatch, far: bool) -> None:
    """With a base per chunk, at the largest possible ids; and with several bases per call."""
    if far:
        monkeypatch.setattr(Packer, "cells", staticmethod(far_cells))
    else:
        monkeypatch.setattr(pack, "_REACH", 1 << 12)
    for one in sendable(75_000, 12):
        carried(one, str(far))


def test_units_that_ids_do_not_reach_are_refused() -> None:
    _, cells = Packer.cells((1 << 34) - 16, 1 << 34, 3)
    with pytest.raises(BindError, match="expected 0 to 2147483646"):
        kvbm._core.Pairs([0, 1, 2], cells, 8, NUM_CELLS)


@pytest.mark.parametrize("number", [pytest.param(n, marks=[pytest.mark.full] * (n >= 20)) for n in range(40)])
@pytest.mark.slow  # 0.8 s
@pytest.mark.sanitize
def test_every_byte(number: int) -> None:
    """In the chunks, read by a reader that shares no code with kvbm, and in the destination's pools."""
    for one in sendable(70_000 + 100 * number, 4):
        carried(one, str(number))


TWELVE = (
    "nhd", "hnd", "universal", "vllm/flash_attn_nhd", "vllm/flash_attn_hnd", "vllm/LBHNC", "vllm/paged_attn_v0",
    "hf/dynamic_cache", "trtllm/v1_pool", "flashinfer/combined_hnd", "lmcache/KV_2LTD", "sglang/mha_pool",
)  # fmt: skip
TP, CP, PP = (lambda n: (("tp", n),)), (("cp", 2), ("tp", 2)), (("pp", 2), ("tp", 2))
#: Both sides' mesh, tokens of a block and options.
WAYS: tuple[Any, ...] = (
    ((TP(4), 16, {"heads": ("tp", 1, 4)}), (TP(2), 64, {"heads": ("tp", 1, 2)})),
    ((TP(2), 64, {"heads": ("tp", 1, 2)}), (TP(8), 16, {"heads": ("tp", 1, 8)})),
    ((TP(1), 48, {}), (CP, 32, {"heads": ("tp", 1, 2), "tokens": ("cp", 1, 2)})),
    ((CP, 8, {"heads": ("tp", 1, 2), "tokens": ("cp", 1, 2), "every": 8}), (PP, 16, {"heads": ("tp", 1, 2), "bounds": (0, 1, 3)})),
    ((PP, 16, {"heads": ("tp", 1, 2), "bounds": (0, 2, 3)}), (TP(2), 32, {"tokens": ("tp", 1, 2), "every": 4})),
)  # fmt: skip


@pytest.mark.parametrize("src", TWELVE)
def test_all_pairs_of_twelve_layouts(src: str) -> None:
    """All tokens, some, and tokens inside one unit; all layers, and one."""
    for number, dst in enumerate(TWELVE, TWELVE.index(src)):
        ours, theirs = WAYS[number % len(WAYS)]
        tokens = (range(64), range(5, 83), range(17, 31), range(3, 4))[number % 4]
        layers = (None, None, range(1, 2))[number % 3]
        sides = [engine(mesh, nt, name, **more) for name, (mesh, nt, more) in ((src, ours), (dst, theirs))]
        carried(case(*sides, (3, 2, 4, 16, "float16"), tokens, layers), f"{src}{dst}")


FAMILIES = [name for name in plane_oracle.FAMILIES if name != "mxfp8"]


@pytest.mark.parametrize("family", FAMILIES)
def test_all_pairs_of_layouts_with_planes(family: str) -> None:
    """Quantised data with scales, latents with positions."""
    _, no, nh, _, hd, dtype = plane_oracle.FAMILIES[family].shapes[0]
    names = [name for name, formula in plane_oracle.TABLE.items() if formula.family == family]
    for number, (src, dst) in enumerate(itertools.product(names, names)):
        heads = {"heads": ("tp", 1, 2)} if nh == 2 else {}
        sizes = {"bounds": (0, 2), "group": (0, 1)}
        sides = engine(TP(1), 4, src, **sizes), engine(TP(2), (4, 8)[number % 2], dst, **heads, **sizes)
        carried(case(*sides, (2, no, nh, hd, dtype), range(number % 3, 11)), f"{src}{dst}")


def test_wrong_chunks_on_a_gpu(fake_gpu: processes.FakeDriver) -> None:
    fake_gpu("reshards.wrong_chunks")


def test_calls_of_many_chunks_leave_nothing_behind(fake_gpu: processes.FakeDriver) -> None:
    """Red: each call freed only eight older copies, so calls with more than eight chunks leaked."""
    fake_gpu("reshards.many_chunks")


def test_a_call_that_fails_writes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two kernels fails to be enqueued: the call waits for the first one, because the slot will be reused."""
    pair, begun = Pair(), []

    class Copy:
        is_over = False

        def synchronize(self) -> None:
            self.is_over = True

    def enqueue(*_: Any) -> Copy:
        if begun:
            raise BindError("no room")
        begun.append(Copy())
        return begun[0]

    monkeypatch.setattr(cuts._Work, "_enqueue", enqueue)
    slots = {(0, chunk.number): room(chunk.size) for chunk in pair.chunks}
    with pytest.raises(BindError, match="no room"):
        pair.sent.pack(slots, key="k")
    assert [copy.is_over for copy in begun] == [True]


@pytest.mark.parametrize("kind", ["device", "pinned", "few", "far"])
def test_every_byte_through_the_fake_driver(fake_gpu: processes.FakeDriver, kind: str) -> None:
    fake_gpu("reshards.chunks", 80_000, 20, kind)


# ---- one pair, looked at closely ---------------------------------------------------------------------------------------

MODEL = BlockShape(nl=4, no=2, nh=4, nt=4, hd=16, dtype="float16")
#: Wherever a slot is, an unpacked block is this before.
OLD = 0xA5


class Pair:
    """The first rank of tp 1, blocks of 4 → tp 2, blocks of 16: tokens 3 to 29, in chunks of two units."""

    def __init__(self, tokens: range = range(3, 30), layers: range | None = None, **changes: Any) -> None:
        self.src = Placement("tp1", model=MODEL, name="prefill")
        self.dst = Placement("tp2", shard={"h": "tp"}, model=MODEL, nt=16, name="decode")
        self.made = reshard.plan(self.src, self.dst)
        self.pool = Pool.allocate(load("nhd"), self.src.shape(0), 9)
        self.there = Pool.allocate(load("vllm/flash_attn_hnd"), self.dst.shape(0), 3)
        for number, array in enumerate(self.pool.arrays):
            array.view(np.uint8)[...] = np.random.default_rng(number).integers(
                0, 256, array.view(np.uint8).shape, np.uint8
            )
        self.clear()
        self.spans = Span([8, 2, 5, 0, 1, 7, 6, 3], tokens), Span([2, 0], tokens)
        self.most = changes.get("most", 2 * 2048)
        self.sent = Cut(Packer(self.made, 0, self.pool), self.spans[0], layers=layers, most=self.most)
        self.got = Cut(Packer(self.made, 0, self.there, side="dst"), self.spans[1], layers=layers, most=self.most)
        self.chunks = self.sent.chunks[0]
        self.slots = {(0, chunk.number): room(chunk.size) for chunk in self.chunks}
        self.sent.pack(self.slots, key="one", epoch=5)

    def clear(self) -> None:
        for array in self.there.arrays:
            array.view(np.uint8)[...] = OLD

    def unpack(self, numbers: Any = None, *, key: str = "one", epoch: int = 5, **options: Any) -> None:
        some = self.slots if numbers is None else {(0, number): self.slots[0, number] for number in numbers}
        self.got.unpack(some, key=key, epoch=epoch, **options)

    @property
    def is_untouched(self) -> bool:
        return all((array.view(np.uint8) == OLD).all() for array in self.there.arrays)


@pytest.mark.parametrize("verify", ["after", "before"])
@pytest.mark.parametrize("layers", [None, range(1), range(1, 4)])
def test_chunks_in_any_order_and_twice_are_what_a_copy_makes(layers: range | None, verify: str) -> None:
    pair = Pair(layers=layers)
    assert len(pair.chunks) > 1 or layers
    for number in [*reversed(range(len(pair.chunks))), 0]:
        pair.unpack([number], verify=verify)
    found = [array.tobytes() for array in pair.there.arrays]
    pair.clear()
    pools = [pair.there, Pool.allocate(load("nhd"), pair.dst.shape(1), 3)]
    reshard.Local(pair.made, [pair.pool], pools)(*pair.spans, layers=layers)
    assert found == [array.tobytes() for array in pair.there.arrays]


def chunks_are_stored(opened: Callable[[], Any], made: Callable[[Any], Any], damage: Callable[[str], None]) -> None:
    """Chunks are written in packed form, read by another wire, verified, and unpacked; a wrong byte is detected.

    Parameters
    ----------
    opened : callable
        Returns a wire whose peers hold bytes.
    made : callable
        Called with the wire; returns a function of a name and a size that makes the card of a peer.
    damage : callable
        Called with a name; changes a byte of the stored data.
    """
    pair = Pair()
    wanted = Pair()
    wanted.unpack()
    most = -(-max(chunk.size for chunk in pair.chunks) // 4096) * 4096
    for turn in ("written", "read", "damaged"):
        slab = room(most * len(pair.chunks))
        its = opened()
        its.register(wire.Slab.of(slab))
        for chunk in pair.chunks:
            at, name = chunk.number * most, f"request-17.{chunk.number}"
            slot, here, there = slab[at : at + chunk.size], wire.Slice(at, chunk.size), wire.Slice(0, chunk.size)
            peer = its.connect(made(its)(name, chunk.size))
            if turn == "written":
                slot[:] = pair.slots[0, chunk.number]
                until(its.put(peer, here, there).query, "written")
            else:
                until(its.get(peer, here, there).query, "read")
                pair.slots[0, chunk.number] = slot
        its.close()
        if turn == "read":
            pair.unpack()
            assert [one.tobytes() for one in pair.there.arrays] == [one.tobytes() for one in wanted.there.arrays]
            pair.clear()
            damage("request-17.1")
    with pytest.raises(DigestError, match="chunk 1 of"):
        pair.unpack(verify="before")
    assert pair.is_untouched


@pytest.mark.skipif(not find_spec("nixl"), reason="NIXL is not installed")
def test_chunks_lie_in_files(tmp_path: Path) -> None:
    def damage(name: str) -> None:
        whole = bytearray((tmp_path / name).read_bytes())
        whole[0] ^= 1
        (tmp_path / name).write_bytes(whole)

    chunks_are_stored(lambda: wire.nixl_files(tmp_path), lambda its: its.file, damage)


def test_trailers_say_what_they_must() -> None:
    pair = Pair()
    told = [Trailer.read(slot[-TRAILER:]) for slot in pair.slots.values()]
    assert [one.chunk for one in told] == list(range(len(pair.chunks))) and {one.chunks for one in told} == {
        len(pair.chunks)
    }
    assert sum(one.units for one in told) == 6 and {one.plan for one in told} == {int(pair.made.fingerprint, 16)}
    again = Pair()
    assert all(np.array_equal(again.slots[at], pair.slots[at]) for at in pair.slots)


#: Field → byte of the trailer.
PLACES = {
    "magic": 8, "version": 12, "reserved": 14, "plan": 16, "key": 24, "epoch": 32, "source": 40, "destination": 42,
    "mark": 44, "chunk": 48, "chunks": 52, "units": 56, "nbytes": 60,
}  # fmt: skip


@pytest.mark.parametrize("verify", ["after", "before"])
@pytest.mark.parametrize("name", [*PLACES, "digest"])
def test_each_bit_of_a_trailer_is_looked_at(name: str, verify: str) -> None:
    """Refused with the field, the expected and the received value; nothing is written, except if only the digest is wrong."""
    pair = Pair()
    slot = pair.slots[0, 1]
    first = slot.size - TRAILER + PLACES.get(name, 0)
    width = min((at for at in (*PLACES.values(), TRAILER) if at > PLACES.get(name, 0)), default=0) - PLACES.get(name, 0)
    for bit in range(8 * width):
        slot[first + bit // 8] ^= 1 << bit % 8
        with pytest.raises(DigestError if name == "digest" else BindError) as error:
            pair.unpack(verify=verify)
        slot[first + bit // 8] ^= 1 << bit % 8
        said = (
            rf"chunk 1 of {len(pair.chunks)} from rank 0 to rank 0 \(units 2–3, layers 0–3\): {name}: expected .*, got "
        )
        assert re.match(said, str(error.value)), error.value
        assert pair.is_untouched or (name == "digest" and verify == "after")
    pair.unpack(verify=verify)


@pytest.mark.parametrize("verify", ["after", "before"])
def test_each_flipped_bit_of_the_payload_shows(verify: str) -> None:
    pair = Pair(tokens=range(3, 9), layers=range(2, 3))
    (slot,) = pair.slots.values()
    for bit in range(0, 8 * (slot.size - TRAILER), 29):
        slot[bit // 8] ^= 1 << bit % 8
        with pytest.raises(
            DigestError, match=r"chunk 0 of 1 .*units 0, single tokens 0–1, layers 2.*: digest: expected 0x"
        ) as error:
            pair.unpack(verify=verify)
        assert ("none of it was written" in str(error.value)) == (verify == "before") == pair.is_untouched
        slot[bit // 8] ^= 1 << bit % 8
        pair.clear()
    pair.unpack(verify=verify)


def test_one_wrong_chunk_keeps_the_others_of_the_call_from_being_written() -> None:
    pair = Pair()
    pair.slots[0, 2][5] ^= 4
    with pytest.raises(DigestError, match="chunk 2 of"):
        pair.unpack(verify="before")
    assert pair.is_untouched


def test_chunks_of_something_else() -> None:
    """Other keys, epochs, ranges, layers, origins, sizes: the trailer shows what the sender assumed."""
    pair = Pair()
    for options, words in (
        ({"key": "two"}, "key: expected 0x"),
        ({"epoch": 6}, "epoch: expected 0x0000000000000006, got 0x0000000000000005"),
    ):
        with pytest.raises(BindError, match=words):
            pair.unpack(**options)
    with pytest.raises(BindError, match="chunk: expected 1, got 0"):
        pair.got.unpack({(0, 1): pair.slots[0, 0]}, key="one", epoch=5)
    cases: list[tuple[Any, dict[str, Any]]] = [
        (Span([2, 0], range(3, 30)), {"layers": range(4), "most": 3 * 2048}),
        (Span([2, 0], range(2, 29)), {}),
        (Span([2, 0], range(3, 30)), {"origin": 0, "most": 2 * 2048 + 1}),
    ]
    for span, options in cases:
        other = Cut(Packer(pair.made, 0, pair.there, side="dst"), span, **{"most": pair.most, **options})
        chunk = other.chunks[0][0]
        slot = room(chunk.size)
        slot[-TRAILER:] = pair.slots[0, 0][-TRAILER:]
        with pytest.raises(BindError, match=r"mark: expected \d+, got \d+"):
            other.unpack({(0, 0): slot}, key="one", epoch=5)
    assert pair.is_untouched


def test_bytes_that_are_too_few_or_too_many() -> None:
    pair = Pair()
    slot = pair.slots[0, 0]
    wide = room(slot.size + 16)
    wide[: slot.size] = slot
    for given in (slot[:-1], slot[:TRAILER], slot[:0], wide, wide[: slot.size + 1]):
        with pytest.raises(BindError, match=rf"chunk 0 of .*: expected {slot.size} bytes, got {given.size}"):
            pair.got.unpack({(0, 0): given}, key="one", epoch=5)
    for given in (slot[1:], np.zeros((2, slot.size), np.uint8)[:, ::2], "bytes", None, 5):
        with pytest.raises((BindError, kvbm.DTypeError)):
            pair.got.unpack({(0, 0): given}, key="one", epoch=5)
    assert pair.is_untouched


def test_what_is_no_call() -> None:
    pair = Pair()
    good = {"key": "one", "epoch": 5}
    cut = functools.partial(Cut, Packer(pair.made, 0, pair.pool))
    far = Packer(pair.made, 0, pair.there, side="dst")
    for call, words in (
        (lambda: pair.got.unpack({(1, 0): pair.slots[0, 0]}, **good), "chunk 0 of rank 1: expected one of 0"),
        (lambda: pair.got.unpack({(0, 99): pair.slots[0, 0]}, **good), "chunk 99 of rank 0: expected one of"),
        (lambda: pair.got.unpack({0: pair.slots[0, 0]}, **good), "slots: expected a mapping from"),
        (lambda: pair.got.unpack([pair.slots[0, 0]], **good), "slots: expected a mapping from"),
        (lambda: pair.got.unpack(pair.slots, **good, verify="no"), "verify: expected 'after' or 'before', got 'no'"),
        (lambda: pair.got.unpack(pair.slots, **good, stream=5), "stream: the pool is on the CPU"),
        (lambda: pair.got.unpack(pair.slots, **good, wait=[5]), "wait: the pool is on the CPU"),
        (lambda: pair.unpack(epoch=1 << 64), r"epoch: expected a number from 0 to below 2\*\*64"),
        (lambda: pair.unpack(epoch=-1), "epoch: expected a number"),
        (lambda: pair.got.unpack(pair.slots, key=5), "key: expected text or bytes, got 5"),
        (lambda: pair.got.pack(pair.slots, **good), "this rank gets: expected unpack"),
        (lambda: pair.sent.unpack(pair.slots, **good), "this rank sends: expected pack"),
        (lambda: cut(pair.spans[0], most=2047), "0 → rank 0: a unit takes 2048 bytes.*most=2048 .* or more; or send fewer layers"),
        (lambda: cut(pair.spans[0], most=0), "most: expected bytes of a chunk"),
        (lambda: cut(pair.spans[0], most=1 << 32), "most: expected bytes of a chunk"),
        (lambda: cut(pair.spans[0], layers=range(3, 5)), "layers: expected a range within 0 to 4"),
        (lambda: cut(Span([1, -1, 2], range(3, 9))), "prefill rank 0: table: an entry without a block"),
        (lambda: cut(Span([1], range(3, 9))), "prefill rank 0: tokens 3 to 8 need 3 blocks"),
        (lambda: Cut(far, Span([1, 1], range(3, 30))), "the table contains a block twice"),
        (lambda: Cut(pair.made, pair.spans[0]), "packer: expected a kvbm.reshard.Packer, got Resharding"),
        (lambda: pair.got.unpack({}, **good, verify=np.zeros(2)), "verify: expected 'after' or 'before', got array"),
        (lambda: pair.unpack(key="\ud800"), "key: expected text that UTF-8 has"),
        (lambda: pair.got.trailer([0], 0, key="one"), r"chunk 0 of rank \[0\]: expected one of 0 of the ranks \[0\]"),
        (lambda: pair.got.trailer(False, 0, key="one"), "chunk 0 of rank False: expected one of 0"),
        *((lambda most=most: cut(Span([], range(5, 5)), most=most), "most: expected bytes of a chunk")
          for most in (None, "x", 1.5, True, 0, -1, 1 << 32, 1 << 64, np.zeros(2))),
    ):  # fmt: skip
        with pytest.raises(BindError, match=words):
            call()
    assert pair.is_untouched


def test_most_is_looked_at_where_nothing_goes() -> None:
    """A stage of a pipeline that holds none of the sent layers."""
    src, pair = Placement("pp4", shard={"l": "pp"}, model=MODEL, name="prefill"), Pair()
    packer = Packer(reshard.plan(src, pair.dst), 0, Pool.allocate(load("nhd"), src.shape(0), 9))
    for most in (None, "x", 1.5, True, 0, -1, 1 << 32, 1 << 64):
        with pytest.raises(BindError, match="most: expected bytes of a chunk"):
            Cut(packer, pair.spans[0], layers=range(1, 2), most=most)  # type: ignore[arg-type]
    assert Cut(packer, pair.spans[0], layers=range(1, 2), most=1).chunks == {0: (), 1: ()}


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint64, np.int8])
def test_an_origin_of_numpy_is_a_number(kind: Any) -> None:
    """Red: distances of unsigned integers wrapped around: 0 - 4 was 252, and units had 12 tokens instead of 4."""
    place = Placement("tp1", model=BlockShape(nl=1, no=1, nh=1, nt=24, hd=16, dtype="int8"), name="here")
    packer = Packer(reshard.plan(place, place), 0, Pool.allocate(load("nhd"), place.model, 4))
    span = Span([0, 1], range(5, 47))
    one, other = (Cut(packer, span, origin=origin) for origin in (4, kind(4)))
    assert one.chunks == other.chunks and one.chunks[0][0].message.t.tokens == 4
    assert one.trailer(0, 0, key="k") == other.trailer(0, 0, key="k")


def test_slots_are_apart() -> None:
    """Data packed into another slot's or the pool's memory would be lost, or change another sequence."""
    pair = Pair()
    a, b, *_ = pair.chunks
    wide = room(a.size + b.size)
    before = wide.copy()
    for slots in (
        {(0, 0): wide, (0, 1): wide},
        {(0, 1): wide, (0, 0): wide[b.size - 16 :]},
        {(0, 0): wide, (0, 1): wide[a.size - TRAILER :]},
    ):
        with pytest.raises(BindError, match=r"^chunk \d of .*: expected separate memory; it overlaps chunk \d"):
            pair.sent.pack(slots, key="one")
    assert np.array_equal(wide, before)
    pair.sent.pack({(0, 0): wide, (0, 1): wide[a.size :]}, key="one")  # a slot may be longer than its chunk
    inside = Pool.allocate(load("universal"), pair.src.shape(0), 9)
    place = inside.arrays[0].view(np.uint8).reshape(-1)
    place = np.lib.stride_tricks.as_strided(place[-place.ctypes.data % 16 :], (a.size,), (1,))
    with pytest.raises(BindError, match=r"expected separate memory; it overlaps the Pool\(universal"):
        Cut(Packer(pair.made, 0, inside), pair.spans[0], most=pair.most).pack({(0, 0): place}, key="one")


def test_threads_that_wait_for_one_call_take_each_step_once() -> None:
    """Red: a thread that took another one's step read digests too early, or entered a running generator."""
    both, taken = threading.Barrier(2), []

    class Waits:
        def __init__(self, number: int) -> None:
            self.number = number

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            taken.append(self.number)
            if self.number == 0:
                both.wait(20)  # all have waited for the first step before one of them goes on

    def steps() -> Any:
        yield [Waits(0)]
        time.sleep(0.02)
        yield [Waits(1)]
        assert 1 in taken, "went on before the second step was waited for"
        return {(0, 0): 5}

    done = cuts.ChunksDone(steps())
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(done.synchronize) for _ in range(2)]:
            future.result(20)
    assert done.query() and done.digests == {(0, 0): 5} and taken.count(0) == 2


def test_a_receiver_without_some_blocks() -> None:
    """Missing blocks are not written, but are part of the digest."""
    pair = Pair()
    other = Cut(Packer(pair.made, 0, pair.there, side="dst"), Span([-1, 1], pair.spans[1].tokens), most=pair.most)
    for verify in ("after", "before"):
        other.unpack(pair.slots, key="one", epoch=5, verify=verify)
    pair.slots[0, 0][20] ^= 1  # of the block that there is not
    with pytest.raises(DigestError, match="chunk 0 of"):
        other.unpack(pair.slots, key="one", epoch=5)
    arrays = np.stack([array.view(np.uint8) for array in pair.there.arrays])  # l o b h t d
    assert [bool((arrays[:, :, block] != OLD).any()) for block in range(3)] == [False, True, False]


def test_an_empty_range_has_no_chunks() -> None:
    pair = Pair(tokens=range(5, 5))
    assert pair.sent.chunks == pair.got.chunks == {0: (), 1: ()} or pair.got.chunks == {0: ()}


def test_read_only_slots_are_packed_into_no_more() -> None:
    pair = Pair()
    slot = pair.slots[0, 0]
    before = slot.copy()
    slot.flags.writeable = False
    with pytest.raises(BindError, match="read-only"):
        pair.sent.pack({(0, 0): slot}, key="one", epoch=9)
    assert np.array_equal(slot, before)
    pair.got.unpack({(0, 0): slot}, key="one", epoch=5)


# ---- digests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [None, [range(1), range(1, 4)]])
def test_the_chunks_digests_add_up_to_the_sequences(layers: list[range] | None) -> None:
    """On both sides, from any ranks: computed by pools, and by NumPy."""
    tokens = range(37)
    ends = [
        (reshard.vllm(MODEL, tp=4, nt=4), "nhd"),
        (Placement("pp2 tp2", shard={"h": "tp", "l": "pp"}, model=MODEL, nt=8, name="b"), "vllm/flash_attn_hnd"),
        (Placement("cp2 tp2", shard={"h": "tp", "t": "cp by 4"}, model=MODEL, nt=8, name="c"), "universal"),
    ]  # fmt: skip
    data = np.random.default_rng(3).integers(0, 256, (37, 4, 2, 4, 32), np.uint8)  # t l o h, bytes along d
    whole = digest_oracle.Block({"": ("tlohd", data.reshape(37, 4, 2, 4, 16, 2))}).digest()
    for (src, layout), (dst, other) in itertools.permutations(ends, 2):
        pools = [filled(src, rank, layout, data, tokens) for rank in range(src.world)]
        made, total, slots = reshard.plan(src, dst), 0, {}
        for some in layers or [None]:
            for rank, pool in enumerate(pools):
                one = Cut(Packer(made, rank, pool), Span(range(pool.num_blocks), tokens), layers=some, most=5000)
                mine = {(peer, chunk.number): room(chunk.size) for peer, parts in one.chunks.items() for chunk in parts}
                one.pack(mine, key="k")
                slots |= {(some, rank, *at): slot for at, slot in mine.items()}
        total = sum(int(slot[-TRAILER:].view(np.uint64)[0]) for slot in slots.values()) % 2**64
        assert total == whole, f"{src.name} → {dst.name}"
        for rank in range(dst.world):
            pool = Pool.allocate(load(other), dst.shape(rank), 10)
            for some in layers or [None]:
                got = Cut(Packer(made, rank, pool, side="dst"), Span(range(10), tokens), layers=some, most=5000)
                got.unpack(
                    {(s, n): slot for (what, s, d, n), slot in slots.items() if d == rank and what == some}, key="k"
                )
            assert np.array_equal(held(dst, rank, pool, tokens), part(dst, rank, data, tokens)), (
                f"{src.name} → {dst.name}"
            )


def positions(place: Placement, rank: int, tokens: range) -> np.ndarray:
    turns = place.strips(rank).t
    return np.array([p for p in tokens if p // turns.every % turns.over == turns.index], int)


def part(place: Placement, rank: int, data: np.ndarray, tokens: range) -> np.ndarray:
    strips = place.strips(rank)
    return data[np.ix_(positions(place, rank, tokens), list(strips.l), [0, 1], list(strips.h))]


def rows(place: Placement, rank: int, pool: Pool, tokens: range) -> Any:
    """Slot of a token, layer, K or V, head; and the bytes of its row there, for layouts with contiguous rows."""
    strips, arrays = place.strips(rank), memory(pool)
    counts = len(positions(place, rank, tokens)), strips.l.size, 2, strips.h.size
    for slot, layer, o, h in itertools.product(*map(range, counts)):
        entry, byte = pool.resolved.address(slot // place.nt, l=layer, o=o, h=h, t=slot % place.nt, d=0)
        yield (slot, layer, o, h), arrays[entry][byte : byte + 32]


def filled(place: Placement, rank: int, layout: str, data: np.ndarray, tokens: range) -> Pool:
    pool, own = Pool.allocate(load(layout), place.shape(rank), 10), part(place, rank, data, tokens)
    for at, row in rows(place, rank, pool, tokens):
        row[:] = own[at]
    return pool


def held(place: Placement, rank: int, pool: Pool, tokens: range) -> np.ndarray:
    strips = place.strips(rank)
    found = np.zeros((len(positions(place, rank, tokens)), strips.l.size, 2, strips.h.size, 32), np.uint8)
    for at, row in rows(place, rank, pool, tokens):
        found[at] = row
    return found


def test_a_digest_is_of_coordinates_and_not_of_bytes() -> None:
    """Two exchanged tokens, heads or layers in a slot are detected, even if all bytes are the same."""
    pair = Pair(tokens=range(4, 12))
    slot = pair.slots[0, 0]
    unit = slot[:2048].reshape(4, 2, 2, 4, 32)  # l o h t
    for axis in range(4):
        before = unit.copy()
        unit[...] = np.roll(unit, 1, axis)
        with pytest.raises(DigestError):
            pair.unpack()
        unit[...] = before
    pair.unpack()


def test_a_plane_that_the_tokens_of_a_block_share() -> None:
    """Units are whole blocks, and parts of a block are refused: two ranks would have to write the same scale."""
    shape = BlockShape(nl=2, no=2, nh=4, nt=4, hd=16, dtype="bfloat16")
    planes = "planes: {data: {order: t d, dtype: int8}, scale: {dtype: float32, shared: t}}\n"
    ours, theirs = (
        spec.parse(f'order: "{o}"\n{planes}', name="scaled")
        for o in ("[l] b o h <data scale>", "[b] h l o <data scale>")
    )
    src, dst = (Placement(mesh, shard={"h": "tp"}, model=shape, name=mesh) for mesh in ("tp1", "tp2"))
    made, pool = reshard.plan(src, dst), Pool.allocate(ours, src.shape(0), 4)
    pools = [Pool.allocate(theirs, dst.shape(0), 4) for _ in range(3)]
    for one in (pool, *pools):
        for part in memory(one):
            part[:] = np.random.default_rng(one is pool).integers(0, 256, part.size, np.uint8)
    spans = Span([3, 0, 2], range(12)), Span([1, 3, 0], range(12))
    reshard.Local(made, [pool], pools[1:])(*spans)
    sent = Cut(Packer(made, 0, pool), spans[0])
    slots = {(0, chunk.number): room(chunk.size) for chunk in sent.chunks[0]}
    sent.pack(slots, key="k")
    Cut(Packer(made, 0, pools[0], side="dst"), spans[1]).unpack(slots, key="k", verify="before")
    assert all(np.array_equal(a, b) for a, b in zip(memory(pools[0]), memory(pools[1]), strict=True))
    with pytest.raises(kvbm.PlanError, match="plane 'scale' has one element for 4 tokens, which units would share"):
        Cut(Packer(made, 0, pool), Span([3, 0, 2], range(11)))
