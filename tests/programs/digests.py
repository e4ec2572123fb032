"""Digests on a driver that is not one (test_digest.py): of pools, beside copies by every strategy, in graphs, where calls fail."""

from __future__ import annotations

import ctypes
import gc
import random
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from test_digest import expected
from test_planes import shapes
from test_sections import Meant, Plain, Planar, moved

import digest_rows
import kvbm
import plane_oracle
from failing import every_call
from kvbm import BlockShape, DigestError
from kvbm.copy import executor
from kvbm.digest.cells import alone, keys_of
from memory import FakeCuda
from programs.fake_gpu import count, defer, driver, half, handle, ids_on_gpu, pump, refused, seed
from programs.sections import SIDES, batches, check, ends

SHAPE = BlockShape(nl=3, no=2, nh=2, nt=8, hd=16, dtype="float16")
WAYS = ("steps", "rows", "scattered")

#: Pairs of whole blocks: fused and not, by rows and by tiles, K and V apart, without an order inside.
PAIRS = [
    ("nhd", "universal"),
    ("universal", "vllm/LBHNC"),
    ("vllm/flash_attn_nhd", "hf/dynamic_cache"),
    ("vllm/paged_attn_v0", "nhd"),
    ("nhd", "vllm/paged_attn_v0"),
    ("operational", "operational_hnd"),
    ("vllm/BLHNC", "vllm/BLHNC"),
    ("b d l o h t", "nhd"),
    ("b l t/2 o h d/4 t%2 d%4", "b o d%4 t h l d/4"),
]


def sides(direction: str) -> Iterator[tuple[Any, Any, Meant, Meant]]:
    here, there = SIDES[direction]
    for number, (src, dst) in enumerate(PAIRS):
        align = (0, 16, 4)[number % 3]
        s = Plain(src, SHAPE, 9, how=WAYS[number % 3], align=align, where=here)
        d = Plain(dst, SHAPE, 11, dst=True, how=WAYS[number // 2 % 3], where=there)
        yield s, d, Meant(), Meant()
    yield from (end for end in ends(direction) if "d" not in end[2].chosen)


class Out:
    """Memory of digests, on the GPU or pinned (the host's), with a guard on both sides."""

    def __init__(self, n: int, kind: str = "uint64", device: int = 0):
        self.memory = np.full(n + 2, 77, np.uint64)
        self.array: Any = FakeCuda((n,), kind, address=self.memory[1:].ctypes.data, device=device)
        self.array.owner = self.memory

    def found(self) -> list[int]:
        assert self.memory[0] == self.memory[-1] == 77
        return [int(one) for one in self.memory[1:-1]]


def wanted(
    s: Any, meant: Meant, src_ids: Sequence[int], dst_ids: Sequence[int], tokens: Sequence[int] | None = None
) -> list[int]:
    kept = [a if b != -1 else -1 for a, b in zip(src_ids, dst_ids, strict=True)]
    return expected(s, kept, meant, tokens)


def every_strategy(direction: str, strategy: str) -> None:
    rng = random.Random(1)
    defer(1)
    device = 0
    apart = fused = 0
    for number, (s, d, ours, theirs) in half(sides(direction), direction, strategy):
        here, there = ours.of(s.pool), theirs.of(d.pool)
        slot = max(part.of.packed().accesses[0].block[0] for part in (here, there))
        for chunk in (None, 3 * slot) if strategy == "staged" else (None,):
            with kvbm.Transfer(here, there, strategy, chunk_bytes=chunk) as move:
                device = move.device
                for turn, (src_ids, dst_ids) in enumerate(batches(rng, min(here.num_ids, 90), min(there.num_ids, 90))):
                    seed(number + turn)
                    out = Out(len(src_ids), ("uint64", "int64")[turn % 2], device)
                    tokens = [rng.randrange(1 << 40) for _ in src_ids] if (number + turn) % 2 else None
                    before = count("digests")
                    done = move.copy(
                        np.array(src_ids), np.array(dst_ids, np.int32), stream=5, digests=out.array, tokens=tokens
                    )
                    assert not done.query()
                    pump()
                    assert done.query() and strategy in ("auto", done.strategy) and count("digests") > before
                    want = wanted(s, ours, src_ids, dst_ids, tokens)
                    assert out.found() == want, (s.pool, d.pool, ours, theirs, chunk, turn, tokens is None)
                    check(s, d, ours, theirs, src_ids, dst_ids, (chunk, turn))
                    more = move._executor.digested(None).digests
                    isnt = isinstance(more.direct if done.strategy == "direct" else more.permute, str)
                    apart, fused = apart + isnt, fused + (not isnt)
                empty = Out(3, device=device)
                move.copy([-1, -1, 0], [0, -1, -1], stream=5, digests=empty.array)
                pump()
                assert empty.found() == [0, 0, 0]
                move.copy([], [], stream=5, digests=Out(0, device=device).array)
    assert apart and (fused or (strategy != "staged" and (strategy, direction) != ("direct", "d2d"))), (apart, fused)
    assert count("illegal") == 0 and count("pushes") == count("pops")


def rows(direction: str, strategy: str, each: int) -> None:
    """Rows of odd, prime and few bytes in every shipped layout: copies with digests, and digests alone."""
    defer(0)
    rng = random.Random(f"{direction}{strategy}")
    done = fused = 0

    def plain(*given: Any, where: Any, **rest: Any) -> Plain:
        return Plain(*given, where=where, **rest)

    def planar(*given: Any, where: Any, **rest: Any) -> Planar:
        return Planar(*given, where="fake" if where == 0 else "fake pinned", **rest)

    def copied(move: Any, src_ids: Any, dst_ids: Any, tokens: Any) -> list[int]:
        out = Out(len(src_ids), device=0)
        finished = move.copy(src_ids, dst_ids, stream=5, digests=out.array, tokens=tokens)
        pump()
        finished.synchronize()
        return out.found()

    def digested(pool: Any, ids: Any, tokens: Any) -> list[int]:
        stream = {} if pool.device == "cpu" else {"stream": 5}
        return [int(one) for one in pool.digest(ids, tokens=tokens, **stream)]

    for one in digest_rows.cases(each, seed=2):
        for s, d in digest_rows.sides(plain, planar, one, SIDES[direction], rng):
            fused += digest_rows.check(s, d, rng, copied, digested, strategy=strategy)
            done += 1
    assert done > 80 * each and fused * 5 > done, (done, fused)
    assert count("illegal") == 0


def turned() -> None:
    """Cells whose elements lie side by side with their neighbours': in words of 16 bytes that are turned, where these are whole."""
    found = set()
    for name in ("vllm/paged_attn_v0", "vllm/aiter_shuffle", "b d l o h t", "l o b h d t"):
        for nt, hd, dtype in ((16, 32, "float16"), (24, 16, "bfloat16"), (32, 64, "uint8"), (8, 32, "float32"), (8, 8, "float64")):
            shape = BlockShape(nl=3, no=2, nh=2, nt=nt, hd=hd, dtype=dtype)
            for align in (0, 8):
                side = Plain(name, shape, 5, where=0, align=align)
                want = expected(side, [3, 0, 4])
                assert side.pool.digest([3, 0, -1, 4], stream=5).tolist() == [*want[:2], 0, want[2]], (name, shape, align)
                whole = side.pool.whole.of
                launches = alone(whole, keys_of(whole), side.pool.alignment, "", turns=True)
                elements = {launch.kernel[0].element for launch, _ in launches}
                assert elements == {0} or align == 0
                found |= elements
    assert found == {0, 1, 2, 4} and count("illegal") == 0


def pools() -> None:
    """Of pools on a GPU: every way to name blocks, positions and what takes the digests."""
    defer(1)
    rng = random.Random(2)
    for number, (s, _, ours, _) in enumerate(sides("d2d")):
        part = ours.of(s.pool)
        n = min(part.num_ids, (3, 40, 700)[number % 3])
        ids = [rng.randrange(part.num_ids) for _ in range(n)]
        ids[1] = -1
        tokens = [rng.randrange(1 << 30) for _ in range(n)]
        want, placed = expected(s, ids, ours), expected(s, ids, ours, tokens)
        assert part.digest(ids, stream=5).tolist() == want
        assert part.digest(np.array(ids, np.int32), tokens=np.array(tokens), stream=6).tolist() == placed
        out = Out(n)
        done = part.digest(ids, tokens=tokens, out=out.array, stream=5)
        done.synchronize()
        assert out.found() == placed
        for kinds in ((np.int32, np.int64), (np.int64, np.int32)):
            given, at = np.zeros(n, kinds[0]), np.zeros(n, kinds[1])
            out = Out(n, "int64")
            done = part.digest(ids_on_gpu(given), tokens=ids_on_gpu(at), out=out.array, stream=5)
            given[:], at[:] = ids, tokens  # read when the kernels run
            done.synchronize()
            assert out.found() == placed
            given[2] = part.num_ids
            done = part.digest(ids_on_gpu(given), tokens=ids_on_gpu(at), out=out.array, stream=5)
            with refused(kvbm.BindError, "pair 2"):
                done.synchronize()
            assert out.found() == [0 if k == 2 else one for k, one in enumerate(placed)]
        pinned = Plain("nhd", SHAPE, 2, where="pinned")
        room = pinned.buffer[: 8 * n].view(np.uint64) if 8 * n <= pinned.buffer.size else None
        if room is not None:
            part.digest(ids, out=room, stream=5).synchronize()
            assert room.tolist() == want
        with refused(kvbm.BindError, "expected memory on cuda:0"):
            ordinary = np.zeros(n, np.uint64)
            driver_says_ordinary(ordinary)
            part.digest(ids, out=ordinary, stream=5)
        assert part.digest([], stream=5).size == 0
        nowhere = Out(n, device=-1)  # no GPU's number: the driver is asked
        part.digest(ids, out=nowhere.array, stream=5).synchronize()
        assert nowhere.found() == want
    assert count("illegal") == 0 and count("pushes") == count("pops")


def pinned_to_the_end() -> None:
    """Digests in host memory of which GPUs reach the beginning alone."""
    s, d = Plain("nhd", SHAPE, 5, where=0), Plain("universal", SHAPE, 5, dst=True, where=0)
    memory, n = np.zeros(16, np.uint64), 3
    pinned = (ctypes.c_ulonglong * 2).in_dll(driver, "fake_pinned")
    with kvbm.Transfer(s.pool, d.pool) as move:
        for last in range(16):
            pinned[0], pinned[1] = memory[4:].ctypes.data, memory[last:].ctypes.data
            driver_says_ordinary(memory[last:])
            out = memory[5 : 5 + n]
            for call in (
                lambda out: move.copy([1, -1, 2], [0, 1, 2], stream=5, digests=out),
                lambda out: s.pool.digest([1, -1, 2], out=out, stream=5),
            ):
                for given in (out, out[:, None][:, 0], torch_of(out)):
                    memory[:] = 7
                    if last >= 5 + n:
                        call(given).synchronize()
                        assert out.tolist() == expected(s, [1, -1, 2])
                    else:
                        with refused(kvbm.BindError, "digests: expected memory on cuda:0, or pinned host memory"):
                            call(given)
                        assert set(memory.tolist()) == {7}
        move.copy([], [], stream=5, digests=np.zeros(0, np.uint64))


def torch_of(array: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(array.view(np.int64))


def driver_says_ordinary(array: np.ndarray) -> None:
    bounds = (ctypes.c_ulonglong * 2).in_dll(driver, "fake_ordinary")
    bounds[0], bounds[1] = array.ctypes.data, array.ctypes.data + array.nbytes


def all_planes() -> None:
    """Every layout of planes by a GPU's kernels: as many launches as they take."""
    for number, name in enumerate(sorted(plane_oracle.TABLE)):
        for shape in shapes(name)[:3]:
            s = Planar(name, shape, 3, align=(0, 4, 8, 16)[number % 4], where="fake")
            assert s.pool.digest([2, 0], stream=5).tolist() == expected(s, [2, 0]), (name, shape)


def ids_on_the_gpu(direction: str, strategy: str) -> None:
    rng = random.Random(3)
    near_src, near_dst = (place == 0 for place in SIDES[direction])
    defer(1)
    for s, d, ours, theirs in sides(direction):
        here, there = ours.of(s.pool), theirs.of(d.pool)
        with kvbm.Transfer(here, there, strategy) as move:
            for wide in (np.int32, np.int64):
                n = min(here.num_ids, there.num_ids, 40)
                src_ids, dst_ids = (np.array(rng.sample(range(part.num_ids), n), wide) for part in (here, there))
                tokens = np.array([rng.randrange(1 << 20) for _ in range(n)])
                src_ids[2] = -1
                on = (strategy == "direct" or near_src, strategy == "direct" or near_dst)
                (src_ids if on[0] else dst_ids)[3] = (here if on[0] else there).num_ids
                given = [ids_on_gpu(ids) if gpu else ids for ids, gpu in zip((src_ids, dst_ids), on, strict=True)]
                out = Out(n)
                done = move.copy(*given, stream=5, digests=out.array, tokens=ids_on_gpu(tokens))
                pump()
                with refused(kvbm.BindError, "pair 3"):
                    done.synchronize()
                src_ids[3] = -1
                assert out.found() == wanted(s, ours, src_ids.tolist(), dst_ids.tolist(), tokens.tolist()), (
                    s.pool,
                    d.pool,
                )
                check(s, d, ours, theirs, src_ids.tolist(), dst_ids.tolist(), wide)
                if here.of.units > 1 and on[0]:
                    with refused(kvbm.BindError, "ids of units on a GPU", "pass tokens="):
                        move.copy(*given, stream=5, digests=out.array)


def graphs(direction: str, strategy: str) -> None:
    """Captured copies that digest: each replay writes those of what is there then."""
    rng = random.Random(3)
    for number, (s, d, ours, theirs) in half(sides(direction), direction, strategy):
        here, there = ours.of(s.pool), theirs.of(d.pool)
        n = min(here.num_ids, there.num_ids, 60) - 1
        src_ids, dst_ids = (np.array(rng.sample(range(part.num_ids), n)) for part in (here, there))
        tokens = [rng.randrange(1 << 20) for _ in range(n)]
        verify = number % 2 == 1
        slot = 4 * max(part.of.packed().accesses[0].block[0] for part in (here, there))
        with kvbm.Transfer(
            here, there, strategy, verify=verify, chunk_bytes=slot if strategy == "staged" else None
        ) as move:
            out = Out(n)
            defer(1)
            driver.fake_begin_capture(handle(6))
            done = move.copy(src_ids, dst_ids, stream=6, digests=out.array, tokens=tokens)
            graph = driver.fake_end_capture()
            assert graph, "a stream of the capture was left behind"
            assert done.captured
            for turn in range(3):
                s.before[:] = s.buffer[:] = np.roll(s.buffer, 1 + turn)
                seed(turn)
                driver.fake_launch_graph(handle(graph), handle(5))
                pump()
                assert out.found() == wanted(s, ours, src_ids.tolist(), dst_ids.tolist(), tokens), (
                    s.pool,
                    d.pool,
                    turn,
                )
                check(s, d, ours, theirs, src_ids.tolist(), dst_ids.tolist(), turn)
                done.synchronize()
            if verify:  # asked after each replay
                ctypes.c_long.in_dll(driver, "fake_wrong").value = 1 if strategy == "direct" else 0
                driver.fake_launch_graph(handle(graph), handle(5))
                pump()
                if strategy == "direct":
                    with refused(DigestError, "pairs differ"):
                        done.synchronize()
                d.buffer[:] = d.before
            driver.fake_destroy_graph(handle(graph))
            del done
            defer(0)
    assert count("broken_captures") == 0


def verified(direction: str, strategy: str) -> None:
    """Nothing is said of right copies; what changes between the copy and the destination's digest, or in the copy, is."""
    rng = random.Random(4)
    wrong = ctypes.c_long.in_dll(driver, "fake_wrong")
    defer(1)
    for number, (s, d, ours, theirs) in half(sides(direction), direction, strategy):
        here, there = ours.of(s.pool), theirs.of(d.pool)
        with kvbm.Transfer(here, there, strategy, verify=True) as move:
            n = min(here.num_ids, there.num_ids, 40)
            src_ids, dst_ids = (rng.sample(range(part.num_ids), n) for part in (here, there))
            src_ids[1] = -1
            out = Out(n, device=move.device)
            move.copy(src_ids, dst_ids, stream=5, digests=out.array).synchronize()
            assert out.found() == wanted(s, ours, src_ids, dst_ids)
            check(s, d, ours, theirs, src_ids, dst_ids)
            # A byte that another writes between the copy and the digest of the destination.
            seed(0)
            want = moved(s, d, ours, theirs, src_ids, dst_ids)
            done = move.copy(src_ids, dst_ids, stream=5)
            while not np.array_equal(d.buffer, want):
                assert pump(1), "the copy is not done"
            assert not done.query()
            at = next(iter(d.positions(theirs).values()))[0][dst_ids[0]]
            d.buffer[at.ravel()[number % at.size]] ^= 1 << number % 8
            with refused(DigestError, f"1 of {n} pairs differ, the first is pair 0"):
                done.synchronize()
            d.buffer[:] = d.before
            if strategy == "engine":
                continue
            # A kernel that writes what it did not read, in its first pair.
            seed(number)
            done = move.copy(src_ids, dst_ids, stream=5)
            wrong.value = 1
            with refused(DigestError, f"1 of {n} pairs differ, the first is pair 0"):
                done.synchronize()
            assert wrong.value == 0
            d.buffer[:] = d.before
            # One that nobody waits for: the next copy tells, once.
            wrong.value = 1
            done = move.copy(src_ids, dst_ids, stream=5)
            pump()
            del done
            gc.collect()
            told = []
            for _ in range(2):
                try:
                    move.copy(src_ids, dst_ids, stream=5)
                except DigestError as error:
                    told.append(error.pairs)
                pump()
            assert told == [(0,)], told
            pump()
            d.buffer[:] = d.before
            move.copy(src_ids, dst_ids, stream=5).synchronize()
            check(s, d, ours, theirs, src_ids, dst_ids)
    assert count("illegal") == 0 and count("pushes") == count("pops")


def beyond_reach() -> None:
    """Another GPU's memory that no kernel reaches: digests of what is packed, and no verification."""
    s, d = Plain("nhd", SHAPE, 5, where=0), Plain("universal", SHAPE, 5, dst=True, where=1)
    with kvbm.Transfer(s.pool, d.pool, "staged") as move:
        out = Out(3, device=move.device)
        move.copy([0, 1, 2], [2, 1, 0], stream=5, digests=out.array).synchronize()
        assert out.found() == expected(s, [0, 1, 2])
        check(s, d, Meant(), Meant(), [0, 1, 2], [2, 1, 0])
    with (
        kvbm.Transfer(s.pool, d.pool, "staged", verify=True) as move,
        refused(kvbm.BindError, "verify: the destination is digested by a kernel"),
    ):
        move.copy([0], [0], stream=5)


def prepared_once() -> None:
    """`explain` and digests look up no kernel of a prepared transfer again, and make no launch of its copies again."""
    made: list[str] = []
    for name in ("launches_of", "copies_of"):
        function = getattr(executor, name)
        setattr(executor, name, lambda *args, _name=name, _function=function: made.append(_name) or _function(*args))
    for direction in SIDES:
        s, d = next(sides(direction))[:2]
        for strategy in ("direct", "staged", "engine"):
            del made[:]
            with kvbm.Transfer(s.pool, d.pool, strategy, verify=strategy == "direct") as move:
                count = {"direct": 1, "staged": 2, "engine": 1}[strategy]
                assert made.count("copies_of") == count and made.count("launches_of") == count - (strategy != "direct"), made
                del made[:]
                before = move.explain()
                out = Out(2, device=move.device)
                move.copy([0, 1], [1, 0], stream=5, digests=out.array).synchronize()
                after = move.explain()
                assert not made, (direction, strategy, made)
                assert set(before.splitlines()) <= set(after.splitlines()) and "igest" in after


def nothing_grows() -> None:
    """Digests and verified copies, also dropped ones: events, streams and memory are those of the first few."""
    s = Plain("nhd", SHAPE, 9, where=0)
    d = Plain("universal", SHAPE, 9, dst=True, where=0)
    live = (ctypes.c_long * 5).in_dll(driver, "live")
    defer(1)
    seen = []
    with kvbm.Transfer(s.pool, d.pool, verify=True) as move:
        for turn in range(60):
            done = move.copy([1, 2], [3, 4], stream=5, digests=Out(2).array)
            if turn % 3:
                done.synchronize()
            del done
            pump()
            s.pool.digest([1, 2], stream=5)
            s.pool.digest([1, 2], out=Out(2).array, stream=5)
            pump()
            seen.append(tuple(live))
            assert ctypes.c_long.in_dll(driver, "registered").value <= 4
    assert len(set(seen[15:])) == 1, seen


def captured_copies_stand_in_no_line() -> None:
    """A captured copy that verifies is done at no time: others beside it are let go, and told of, as ever."""
    s, d = Plain("nhd", SHAPE, 9, where=0), Plain("universal", SHAPE, 9, dst=True, where=0)
    defer(1)
    with kvbm.Transfer(s.pool, d.pool, verify=True) as move:
        driver.fake_begin_capture(handle(6))
        done = move.copy([1, 2], [3, 4], stream=6)
        graph = driver.fake_end_capture()
        del done  # the graph writes to its memory all the same
        gc.collect()
        for _ in range(100):
            move.copy([1, 2], [5, 6], stream=5).synchronize()
            driver.fake_launch_graph(handle(graph), handle(7))
            pump()
        assert ctypes.c_long.in_dll(driver, "registered").value <= 4
        ctypes.c_long.in_dll(driver, "fake_wrong").value = 1
        move.copy([1, 2], [5, 6], stream=5)
        pump()
        with refused(DigestError, "1 of 2 pairs differ"):
            move.copy([1, 2], [5, 6], stream=5)
        driver.fake_destroy_graph(handle(graph))


def told_once() -> None:
    """Whoever waits for a wrong copy is told, and no later copy; then nothing of it is kept."""
    wrong = ctypes.c_long.in_dll(driver, "fake_wrong")
    for deferred in (0, 1):
        defer(deferred)
        s, d = Plain("nhd", SHAPE, 9, where=0), Plain("universal", SHAPE, 9, dst=True, where=0)
        move = kvbm.Transfer(s.pool, d.pool, verify=True)
        wrong.value = 1
        done = move.copy([1, 2], [3, 4], stream=5)
        for _ in range(2):
            with refused(DigestError, "1 of 2 pairs differ"):
                done.synchronize()
        move.copy([1, 2], [3, 4], stream=5).synchronize()
        # The next copy finds it done before anybody waits for it.
        wrong.value = 1
        done = move.copy([1, 2], [3, 4], stream=5)
        pump()
        after = move.copy([1, 2], [5, 6], stream=5)
        with refused(DigestError, "1 of 2 pairs differ"):
            done.synchronize()
        after.synchronize()
        move.copy([1, 2], [3, 4], stream=5).synchronize()
        seen = weakref.ref(s.pool)
        del move, done, after, s
        gc.collect()
        assert seen() is None, "a copy that is done keeps its pools"


def told_when_dropped() -> None:
    """As long as somebody has the Done of a wrong copy, others say nothing of it; then the next one does, whenever it was done."""
    wrong = ctypes.c_long.in_dll(driver, "fake_wrong")
    defer(1)
    s, d = Plain("nhd", SHAPE, 9, where=0), Plain("universal", SHAPE, 9, dst=True, where=0)
    with kvbm.Transfer(s.pool, d.pool, verify=True) as move:
        for turn in range(3):
            wrong.value = 1
            done: Any = move.copy([1, 2], [3, 4], stream=5)
            if turn:
                pump()
            for _ in range(turn * 3):
                move.copy([1, 2], [5, 6], stream=5).synchronize()
            if turn == 2:  # in a cycle
                done = [done]
                done.append(done)
            del done
            gc.collect()
            pump()
            with refused(DigestError, "1 of 2 pairs differ"):
                move.copy([1, 2], [5, 6], stream=5)
            for _ in range(3):
                move.copy([1, 2], [5, 6], stream=5).synchronize()


def memory_that_is_still_written() -> None:
    """Digests of a copy that nobody waits for have their memory until it is done, and others have it afterwards."""
    defer(1)
    s, d = Plain("nhd", SHAPE, 9, where=0), Plain("universal", SHAPE, 9, dst=True, where=0)
    with kvbm.Transfer(s.pool, d.pool, verify=True) as move:
        first = set[tuple[int, int]]()
        for _ in range(3):
            taken = set()
            for _ in range(20):
                done = move.copy([1, 2], [3, 4], stream=5)
                taken.add(done.proof.addresses)
                del done
                gc.collect()
            assert len(taken) == 20
            first = first or taken
            assert taken == first, "memory is used again"
            pump()
            move.copy([1, 2], [3, 4], stream=5).synchronize()


def a_captured_digest_wants_memory() -> None:
    s = Plain("nhd", SHAPE, 9, where=0)
    defer(1)
    out = Out(2)
    driver.fake_begin_capture(handle(6))
    s.pool.digest([1, 2], out=out.array, stream=6)
    with refused(kvbm.BindError, "the stream captures a graph", "with out="):
        s.pool.digest([1, 2], stream=6)
    graph = driver.fake_end_capture()
    gc.collect()
    driver.fake_launch_graph(handle(graph), handle(5))  # which has the refused one, too
    pump()
    assert out.found() == expected(s, [1, 2])
    driver.fake_destroy_graph(handle(graph))


def memory_that_digests_share() -> None:
    """Digests begin as zeros: ids or positions there would be read as these."""
    s, d = Plain("nhd", SHAPE, 9, where=0), Plain("universal", SHAPE, 9, dst=True, where=0)
    memory = np.array([1, 2, 5, 6])
    out, given = (FakeCuda((2,), "int64", address=memory[first:].ctypes.data) for first in (1, 2))
    same = FakeCuda((2,), "int64", address=memory[1:].ctypes.data)
    with kvbm.Transfer(s.pool, d.pool, "direct") as move:
        for shared in (given, same):
            with refused(kvbm.BindError, "digests: expected memory of its own, got that of tokens"):
                s.pool.digest([1, 2], tokens=shared, out=out, stream=5)
            with refused(kvbm.BindError, "got that of ids"):
                s.pool.digest(shared, tokens=0, out=out, stream=5)
            with refused(kvbm.BindError, "got that of ids"):
                move.copy([1, 2], shared, digests=out, stream=5)
    assert memory.tolist() == [1, 2, 5, 6]


# ---- a call of the driver fails ------------------------------------------------------------------------------------


def failing(copy: str) -> None:
    """Whichever call it is: it is said, what is alive is what would be, and the next try is right."""
    fail_at = ctypes.c_long.in_dll(driver, "fake_fail_at")
    direction, strategy = ("d2h", copy) if copy in ("staged", "engine") else ("d2d", "direct")
    where = SIDES[direction]
    blocks = 12
    shape = BlockShape(nl=1, no=2, nh=1, nt=2, hd=16, dtype="float16")

    def made() -> tuple[Any, Any]:
        return Plain("vllm/LBHNC", shape, blocks, where=where[0]), Plain("nhd", shape, blocks, dst=True, where=where[1])

    def call() -> None:
        s, d = made()
        if copy == "pool":
            assert s.pool.digest(stream=5).tolist() == want
            return
        out = Out(blocks)
        with kvbm.Transfer(
            s.pool, d.pool, strategy, verify=True, chunk_bytes=5 * shape.nbytes if strategy == "staged" else None
        ) as move:
            move.copy(range(blocks), range(blocks)[::-1], stream=5, digests=out.array, tokens=7).synchronize()
            fail_at.value = 0  # what closing waits for has been waited for
        assert out.found() == want
        check(s, d, Meant(), Meant(), range(blocks), range(blocks)[::-1])

    want = expected(Plain("vllm/LBHNC", shape, blocks), range(blocks), tokens=None if copy == "pool" else [7] * blocks)
    print(*sorted(every_call(copy, call, verifies=copy != "pool")))
