"""Reshardings on one GPU, and between it and pinned memory (test_local.py).  Streams run when they are waited for."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import random
import threading
import time
import types
from dataclasses import replace
from typing import Any

import numpy as np
from test_link_cast import require_right
from test_planes import fake_arrays

import kvbm
import plane_oracle
import reshard_oracle
from cast_resharding import KINDS, CastRun, drawn
from chunking import Carried, far_cells, is_sendable
from kvbm import _core, reshard, wire
from kvbm.digest import run as digesting
from kvbm.link import direct, flows
from kvbm.link.chunks import Bare
from kvbm.link.ring import Ring
from kvbm.reshard.local import cuts_of
from kvbm.wire import _mapped
from linking import Linked, ended, in_bursts, plain_case, require_nothing_left, right_cases, sender_of, written
from memory import FakeCuda
from programs.fake_gpu import alive, count, defer, driver, handle, pump, refused, seed
from programs.transfers import POOL, grant


def on_pages(data: np.ndarray) -> np.ndarray:
    found = np.frombuffer(mmap.mmap(-1, data.size + mmap.PAGESIZE), np.uint8)[: data.size]
    found[:] = data
    return found


def arrays(arena: Any, buffer: np.ndarray, dtype: str) -> list[Any]:
    if isinstance(arena, plane_oracle.Arena):
        return fake_arrays(arena, buffer)
    views = reshard_oracle.host_arrays(arena, buffer, dtype)
    kind = "uint8" if views[0].dtype == np.uint8 else dtype
    return [FakeCuda(v.shape, kind, address=v.ctypes.data, strides=v.strides) for v in views]


def every_byte(first: int, cases: int, kind: str) -> None:
    """From device memory into device memory, or from and into pinned memory by turns."""
    defer(1)
    for number in range(cases):
        case = reshard_oracle.random_case(first + number)
        pinned = {0: "", 1: ""}
        if kind == "pinned" and not case.gather:
            pinned[number % 2] = "pinned"
        run = reshard_oracle.Run(case, on_pages, arrays, pinned=tuple(bool(pinned[side]) for side in (0, 1)))
        seed(number % 4)
        for done in run.call(stream=5):
            pump()
            assert done.query()
        run.check(np.asarray)
    assert count("pushes") == count("pops")


def mapped(first: int, cases: int) -> None:
    """The same, and chunks are packed into rings that were opened by their handles, as those of other processes are."""
    _mapped._is_own = lambda _: False  # type: ignore[assignment]
    opened: list[int] = []
    real = _core.ipc_open
    _mapped._core = types.SimpleNamespace(  # type: ignore[assignment]
        **{name: getattr(_core, name) for name in ("Loans", "fence", "ipc_close", "ipc_handle")},
        ipc_open=lambda *given: opened.append(real(*given)) or opened[-1],
    )
    hub = wire.Hub()
    linked(first, cases, lambda side, rank: wire.mapped(wire.memory(f"{side}/{rank}", hub)))
    assert len(opened) > cases and alive("mappings") == 0, (len(opened), alive("mappings"), alive("allocations"))


def handles_that_fail() -> None:
    """Of CUDA IPC: peers are not mapped, which says why, and reached all the same."""
    _mapped._is_own = lambda _: False  # type: ignore[assignment]
    hub = wire.Hub()
    for name in ("ipc_handle", "ipc_open"):
        def fails(*_: Any, name: str = name) -> None:
            raise kvbm.CudaError(f"{name} failed")

        calls = {one: getattr(_core, one) for one in ("Loans", "fence", "ipc_close", "ipc_handle", "ipc_open")}
        _mapped._core = types.SimpleNamespace(**{**calls, name: fails})  # type: ignore[assignment]
        rings = [Ring("cuda:0", 4096, 1, 1) for _ in range(2)]
        ends = [wire.mapped(wire.memory(f"{number}", hub)) for number in range(2)]
        for end, ring in zip(ends, rings, strict=True):
            end.register(ring.slab)
        peer, _ = ends[0].connect(ends[1].card()), ends[1].connect(ends[0].card())
        assert f"{name} failed" in ends[0].unmapped[peer], ends[0].unmapped
        assert ends[0].borrow(peer, wire.Slice(0, 16)) is None
        ends[0].put(peer, wire.Slice(0, 16), wire.Slice(0, 16), b"put")
        assert [note for _, note in ends[1].poll()] == [b"put"]
        for end, ring in zip(ends, rings, strict=True):
            end.close()
            ring.close()
    assert alive("mappings") == 0


def linked(first: int, cases: int, wires: Any = None) -> None:
    """Endpoints whose pools and rings are on a GPU."""
    right = sum(1 for _ in right_cases(range(first, first + cases), lambda _: wires, memory=(on_pages, arrays)))
    assert right > cases // 2 and count("pushes") == count("pops") and count("illegal") == 0


class Flips:
    """A wire of which one put carries a wrong bit, or so many."""

    def __init__(self, below: Any, at: int, count: int = 1) -> None:
        self.below, self.left, self.least = below, at, -count

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)

    def put(self, peer: str, local: Any, remote: Any, note: bytes = b"") -> Any:
        self.left -= 1
        byte = ctypes.c_uint8.from_address(self.below.slab.address + local[0] + 5)
        byte.value ^= self.least <= self.left < 0
        try:
            return self.below.put(peer, local, remote, note)  # copies at once
        finally:
            byte.value ^= self.least <= self.left < 0


def wrong_in_calls() -> None:
    """Of chunks that one call unpacks the wrong one alone is sent again.  Also of those whose calls are prepared."""
    case, calls = plain_case(), []
    sender, unpack, prepare = sender_of(case), Bare.unpack, flows.Inflow._prepare

    def counted(self: Any, sent: Any) -> Any:
        calls.append(len(self._jobs))
        return unpack(self, sent)

    Bare.unpack = counted
    defer(1)
    for verify in ("after", "before"):
        for at in range(8):
            hub = wire.Hub()
            flows.Inflow._prepare = prepare if at % 2 else lambda _: False

            def make(side: int, rank: int, hub: Any = hub, at: int = at) -> Any:
                below = wire.memory(f"{side}/{rank}", hub)
                return Flips(below, at) if (side, rank) == (0, sender) else below

            with Linked(case, make, memory=(on_pages, arrays), chunk_bytes=1 << 12, ring_bytes=1 << 16) as found:
                assert not any(ended(in_bursts(found, verify, pump)))
                found.check()
                assert found.wires[0][sender].left < 0
                assert sum(link.stats()["chunks_wrong"] for link in found.links[1]) == 1
                found.require_slots()
    assert max(calls) > 1


def zeroed() -> None:
    """A receive whose last chunks are wrong each time: all its tokens are zero when it has ended, and no other byte has changed."""
    case, cleared = plain_case(), 0
    sender = sender_of(case)
    with Linked(case, memory=(on_pages, arrays), chunk_bytes=1 << 12, ring_bytes=1 << 16) as found:
        masks = written(found)
    for verify in ("after", "before"):
        for first in (2, 4):
            hub = wire.Hub()

            def make(side: int, rank: int, hub: Any = hub, first: int = first) -> Any:
                below = wire.memory(f"{side}/{rank}", hub)
                return Flips(below, first, 1000) if (side, rank) == (0, sender) else below

            with Linked(case, make, memory=(on_pages, arrays), chunk_bytes=1 << 12, ring_bytes=1 << 16) as found:
                for buffer in found.run.buffers[1]:
                    buffer[:] = 0x55
                handles = in_bursts(found, verify, pump)
                errors = ended(handles)[len(found.links[0]) :]
                assert any(isinstance(error, kvbm.DigestError) for error in errors), errors
                cleared += require_nothing_left([np.asarray(one) for one in found.run.buffers[1]], masks, errors)
                found.require_slots()
    assert cleared and count("pushes") == count("pops") and count("illegal") == 0


def streams_of_other_gpus() -> None:
    """Two ranks on two GPUs: streams are looked at before the first message is copied."""
    model = kvbm.BlockShape(nl=2, no=2, nh=2, nt=8, hd=16, dtype="int16")
    place = kvbm.Placement("tp2", shard={"h": "tp"}, model=model, name="engine")
    shape = place.shape(0)
    memory: list[np.ndarray] = []

    def pool(device: int) -> kvbm.Pool:
        layout = kvbm.load("universal")
        found = [on_pages(np.full(a.nbytes, len(memory), np.uint8)) for a in layout.resolve(shape, 4).allocations]
        memory.extend(found)
        shapes = [a.shape for a in layout.resolve(shape, 4).allocations]
        given = [FakeCuda(s, "int16", address=m.ctypes.data, device=device) for s, m in zip(shapes, found, strict=True)]
        for one in found:
            grant(one.ctypes.data, one.ctypes.data + one.nbytes, POOL, device, 3)
        return kvbm.Pool(layout, shape, given)

    defer(0)
    src, dst = ([pool(device) for device in (0, 1)] for _ in range(2))
    copy = reshard.Local(reshard.plan(place, place), src, dst)
    before = [one.tobytes() for one in memory]
    span = kvbm.Span([2, 1], range(13))
    for stream, words in (
        (5, "stream: expected one of cuda:1, got one of cuda:0"),
        (0x105, "stream: expected one of cuda:0, got one of cuda:1"),
        ({0: 5}, "stream: expected one for cuda:1, got streams for [0]"),
        ({0: 5, 1: 5}, "stream: expected one of cuda:1, got one of cuda:0"),
        (None, "have no current stream"),
    ):
        with refused(kvbm.BindError, words):
            copy(span, span, stream=stream, clear_tail=True)
        assert [one.tobytes() for one in memory] == before, stream
    copy(span, span, stream={0: 5, 1: 0x105}, clear_tail=True).synchronize()
    assert [one.tobytes() for one in memory] != before


def chunks(first: int, cases: int, kind: str) -> None:
    """Packed into slots in device memory, or pinned; trailers lie behind what kernels write, digests are the kernels'."""
    defer(1)
    if kind == "far":
        reshard.Packer.cells = staticmethod(far_cells)
    room = Pinned(64 << 20) if kind == "pinned" else slot_on_gpu
    for number in range(cases):
        case = reshard_oracle.replace(reshard_oracle.random_case(first + number), clear_tail=False)
        if not is_sendable(case):
            continue
        run = reshard_oracle.Run(case, on_pages, arrays)
        seed(number % 4)
        carried = Carried(
            run,
            room,
            random.Random(number),
            stream=5,
            finish=(ask, wait)[number % 3 > 0],
            max_sms=4 if kind == "few" else None,
        )
        carried(lambda slot: getattr(slot, "memory", slot).tobytes(), ("after", "before")[number % 2])
        run.check(np.asarray)


def wait(done: Any) -> None:
    done.synchronize()


def ask(done: Any) -> None:
    """Streams go on between two questions."""
    while not done.query():
        assert pump(1), "nothing is left to run, and it is not done"


def slot_on_gpu(nbytes: int) -> Any:
    memory = on_pages(np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8))
    found = FakeCuda((nbytes,), "uint8", address=memory.ctypes.data)
    found.memory = memory
    return found


class Pinned:
    """Slots one behind the other in pinned memory."""

    def __init__(self, nbytes: int) -> None:
        self.memory, self.at = on_pages(np.zeros(nbytes, np.uint8)), 0
        _core.host_register(self.memory.ctypes.data, nbytes)

    def __call__(self, nbytes: int) -> np.ndarray:
        found = self.memory[self.at :][:nbytes]
        self.at += -(-nbytes // 16) * 16
        return found


def wrong_chunks() -> None:
    """Found when the host asks or waits, and told as often as it does; with `before` nothing is written."""
    defer(1)
    model = kvbm.BlockShape(nl=2, no=2, nh=2, nt=8, hd=16, dtype="int16")
    place = kvbm.Placement("tp1", model=model, name="engine")
    made, memory, pools = reshard.plan(place, place), [], []
    for number in range(2):
        layout = kvbm.load(("nhd", "universal")[number])
        some = [on_pages(np.full(a.nbytes, number, np.uint8)) for a in layout.resolve(model, 3).allocations]
        shapes = [a.shape for a in layout.resolve(model, 3).allocations]
        pools.append(
            kvbm.Pool(
                layout, model, [FakeCuda(s, "int16", address=m.ctypes.data) for s, m in zip(shapes, some, strict=True)]
            )
        )
        memory.append(some)
    span = kvbm.Span([2, 0, 1], range(3, 20))
    sent = reshard.Cut(reshard.Packer(made, 0, pools[0]), span, most=2048)
    got = reshard.Cut(reshard.Packer(made, 0, pools[1], side="dst"), span, most=2048)
    slots = {(0, chunk.number): slot_on_gpu(chunk.size) for chunk in sent.chunks[0]}
    packing = sent.pack(slots, key="k", stream=5)
    assert not packing.query() and not any(bytes(slot.memory[-56:-52]) == b"KVBM" for slot in slots.values())
    packing.synchronize()
    assert packing.query() and all(bytes(slot.memory[-56:-52]) == b"KVBM" for slot in slots.values())
    slots[0, 1].memory[7] ^= 2
    for verify in ("before", "after"):
        for finish in (wait, ask):
            done = got.unpack(slots, key="k", stream=5, verify=verify)
            assert not done.query()
            for _ in range(2):
                with refused(
                    kvbm.DigestError,
                    "chunk 1 of",
                    "digest: expected 0x",
                    "none of it" if verify == "before" else "were written",
                ):
                    finish(done)
            assert all((part == 1).all() for part in memory[1]) == (verify == "before")
    slots[0, 1].memory[7] ^= 2
    slots[0, 1].memory[-20] ^= 1  # the trailer is read when the call is made
    with refused(kvbm.BindError, "chunk 1 of", "mark: expected"):
        got.unpack(slots, key="k", stream=5)
    slots[0, 1].memory[-20] ^= 1
    got.unpack(slots, key="k", stream=5).synchronize()
    for _ in range(3):  # nobody waits: memory of digests is used again once the kernels are done
        held = len(digesting.pinned._slabs)
        for _ in range(30):
            sent.pack(slots, key="k", stream=5)
            pump()
        digesting.pinned.release()
    assert len(digesting.pinned._slabs) == held
    assert count("pushes") == count("pops")


def many_chunks() -> None:
    """Calls of many chunks that have ended hold nothing: neither slots nor pinned memory."""
    defer(1)
    model = kvbm.BlockShape(nl=2, no=2, nh=2, nt=8, hd=16, dtype="int16")
    place = kvbm.Placement("tp1", model=model, name="engine")
    layout = kvbm.load("universal")
    some = [on_pages(np.zeros(a.nbytes, np.uint8)) for a in layout.resolve(model, 10).allocations]
    shapes = [a.shape for a in layout.resolve(model, 10).allocations]
    arrays = [FakeCuda(s, "int16", address=m.ctypes.data) for s, m in zip(shapes, some, strict=True)]
    made = reshard.plan(place, place)
    packer = reshard.Packer(made, 0, kvbm.Pool(layout, model, arrays))
    cut = reshard.Cut(packer, kvbm.Span(range(10), range(80)), most=2048)
    assert len(cut.chunks[0]) == 10
    slots = {(0, chunk.number): slot_on_gpu(chunk.size) for chunk in cut.chunks[0]}
    for call in range(40):
        done = cut.pack(slots, key="k", stream=5)
        done.synchronize()
        assert len(digesting.pinned._watched) <= 60, (call, len(digesting.pinned._watched))
    assert len(digesting.pinned._slabs) <= 8, len(digesting.pinned._slabs)


def launches_that_wait_for_python(what: str) -> None:
    """A launch waits in the driver until a thread of Python's has gone on; meanwhile another one wants what it holds.

    Red: that one kept Python's lock while it waited, and all stood still.
    """
    model = kvbm.BlockShape(nl=2, no=2, nh=2, nt=8, hd=16, dtype="int16")
    layout, place = kvbm.load("universal"), kvbm.Placement("tp1", model=model, name="engine")
    memory, pools = [], []
    for value in (7, 0):
        wanted = layout.resolve(model, 10).allocations
        memory.append([on_pages(np.full(one.nbytes, value, np.uint8)) for one in wanted])
        shapes = zip(wanted, memory[-1], strict=True)
        pools.append(kvbm.Pool(layout, model, [FakeCuda(one.shape, "int16", address=at.ctypes.data) for one, at in shapes]))
    packer = reshard.Packer(reshard.plan(place, place), 0, pools[1], side="dst")
    span, layers, words = kvbm.Span(range(10), range(80)), range(2), on_pages(np.zeros(16, np.uint8)).view(np.uint64)
    reader, page = direct.Reader(packer, 0, pools[0]), words.ctypes.data
    parts = reader.parts(span, 0, layers)
    entries = reader.foreseen(parts, span, layers)
    assert entries is not None

    def foreseen() -> _core.Foreseen:  # as of kvbm.link.pulls.Ahead
        sums = [direct.Sums(len(one.own), True) for one in parts]
        copies = [
            _core.Expected(
                one.launches.copies, one.own, one.at, one.entries, one.rests, one.each, reader.far.num_blocks, made.address,
                True, (packer, reader, made),
            )
            for one, made in zip(parts, sums, strict=True)
        ]  # fmt: skip
        loans = _core.Loans(page, page + 8, words)
        return _core.Foreseen(copies, bytes(16), bytes(16), (0, 8), entries, loans, packer.pool.watch, 5)

    copies = foreseen()
    boxes = [on_pages(np.zeros(_core.MAIL_BYTES, np.uint8)) for _ in range(2)]
    near, far = (_core.Mail(*(box.ctypes.data for box in ends), boxes) for ends in (boxes, boxes[::-1]))
    wants = {
        "close": pools[1].watch.close, "end": copies.end, "has_begun": lambda: copies.has_begun, "take": near.take,
        "expect": lambda: near.expect(foreseen()),
        "close the mail": near.close,
    }  # fmt: skip
    full = ctypes.c_long.in_dll(driver, "fake_full")
    full.value = 1
    assert far.post(bytes(16) + np.arange(10, dtype="<i4").tobytes())
    begins = threading.Thread(target=near.expect, args=(copies,), daemon=True)
    begins.start()
    while full.value != 2:
        time.sleep(1e-4)
    asks = threading.Thread(target=wants[what], daemon=True)
    asks.start()
    for _ in range(20):
        time.sleep(1e-3)
    full.value = 0
    begins.join()
    asks.join()
    pump()
    assert all((one == 7).all() for one in memory[1])


def captured_streams() -> None:
    """A link copies once, so it refuses a stream that a graph captures.

    Red: the copies became a part of the graph, and the transfer never ended.
    """
    with Linked(plain_case(), None, (on_pages, arrays)) as found:
        [sender, *_], [receiver, *_] = found.links
        ours, theirs = found.spans(0)[0][0], found.spans(1)[0][0]
        for stream in (6, 2):
            assert not _core.is_captured(stream, 0)
            driver.fake_begin_capture(handle(stream))
            assert _core.is_captured(stream, 0) and not _core.is_captured(7, 0) and not _core.is_captured(1, 0)
            for call, span in ((sender.send, ours), (receiver.receive, theirs), (sender.offer, ours)):
                with refused(kvbm.BindError, "stream: a CUDA graph captures it"):
                    call("x", span, stream=stream)
            assert not any(_core.is_captured(one, 0) for one in sender.endpoint.streams.values()), "they are the endpoint's own"
            driver.fake_end_capture()
    assert count("broken_captures") == 0


def casts_on_few(first: int, cases: int) -> None:
    """Chunks and direct copies that cast, on at most three multiprocessors: each format to or fro."""
    few, read, most = ctypes.c_long.in_dll(driver, "few_ctas"), 0, [0, 0]
    kinds = KINDS[::2] * cases
    for number, kind in enumerate(kinds, first):
        few.value = 0
        require_right(kind, range(number, number + 1), where="fake", max_sms=3)
        most[0] = max(most[0], few.value)
        case = drawn(kind, number, clear_tail=False, gather=False)
        run = CastRun(case, kind, where="fake")
        layouts = [side[0].layout for side in run.ranks]
        [made] = run.plans(layouts=layouts, cuts=[cuts_of(side) for side in run.pools])
        few.value = 0
        try:
            read += sum(len(_read(run, made, rank)) for rank in {message.dst for message in made.messages})
        except kvbm.BindError as error:
            assert "has no block for some of the tokens" in str(error)
            continue
        run.check()
        most[1] = max(most[1], few.value)
    assert most == [3, 3] and read > len(kinds), (most, read)


def out_of_another_gpu(first: int, cases: int) -> None:
    """Direct copies out of pools that seem to be on another GPU: on 16 multiprocessors, digests included."""
    drawn_cases = (reshard_oracle.random_case(number) for number in itertools.count(first))
    plain = (replace(case, clear_tail=False) for case in drawn_cases if not case.gather)
    copied = fused = 0
    while copied < cases:
        case = next(plain)
        run = reshard_oracle.Run(case, on_pages, arrays)
        before = count("launches"), count("digests")
        try:
            for rank in {message.dst for message in run.plans[0].messages}:
                near, far = (_read(run, run.plans[0], rank, max_sms=None, gpu=gpu) for gpu in ("0000:3b:00.0", "another"))
                assert near == far, "digests"
        except kvbm.BindError as error:
            assert "has no block for some of the tokens" in str(error)
            continue
        run.check(np.asarray)
        copied += count("launches") > before[0]
        fused += 0 < count("launches") - before[0] == count("digests") - before[1]
    assert 0 < count("few_ctas") <= 16 and fused > cases // 4, (count("few_ctas"), fused)


def _read(run: Any, made: reshard.Resharding, rank: int, max_sms: int | None = 3, gpu: str = "") -> list[int]:
    """Copy what a rank receives out of its peers' pools; the digest of each copy."""
    packer, found = reshard.Packer(made, rank, run.pools[1][rank], side="dst", max_sms=max_sms), []
    for peer, (tokens, *told) in itertools.product(dict.fromkeys(packer.peers), run.case.sequences):
        reader, work = direct.Reader(packer, peer, run.pools[0][peer], gpu), direct.Pass()
        here, there = (kvbm.Span(one.tables[at], tokens, one.origins[at]) for one, at in zip(told, (peer, rank), strict=True))
        parts = reader.parts(there, here.origin, run.case.layers or range(run.case.nl))
        for piece in reader.pieces(parts, here.table):
            reader.begin(piece, work, {"stream": 5, "wait": None})
        work.synchronize()
        found.append(work.total)
    return found
