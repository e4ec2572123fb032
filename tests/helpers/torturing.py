"""Rounds of the torture campaign (tools/torture.py): copies with faults, each judged by digests and by the oracles.

A kind, a seed and a number determine all choices of a round.  It returns counts of its outcomes:

    right          no fault was injected, and every byte is the oracle's
    injected       injected faults, each with one of these outcomes:
    found          reported as required: by `DigestError` with its pairs, and located
    stated error   refused with one of kvbm's errors; existing data are unchanged, and the next try is right
    harmless       without effect: overwritten, or present before the source was digested, so it is part of the copy
    late           the destination changed after it had been digested
    done           the work succeeded in spite of the fault, and is right

Any other outcome is an AssertionError.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import gc
import hashlib
import math
import mmap
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import test_sections
from test_digest import expected
from test_planes import shapes
from test_sections import Meant, Planar, cannot, drawn, moved, parts

import kvbm
import matrix
import oracle
import plane_oracle
import reshard_oracle
from failing import ADVICE, LIVE, every_call, in_child
from kvbm import BlockShape, CudaError, DigestError, KvbmError, LayoutError, PlanError, Pool, store
from kvbm.digest.cells import alike, alone, keys_of
from kvbm.layout import spec
from kvbm.planner.plan import between
from kvbm.testing import locate
from memory import aligned, interface_views, numpy_views, placed

Found = Counter[str]

STRATEGIES = ("auto", "direct", "staged", "engine")
WAYS = ("steps", "rows", "scattered")


# ---- scenes: two pools, what of them is meant, and ids ---------------------------------------------------------------


class Flat(test_sections.Plain):
    """A pool of one plane; on a GPU in torch's memory, which is `memory`."""

    def __init__(self, order: str, shape: BlockShape, blocks: int, where: Any, **rest: Any) -> None:
        self.memory: Any = None
        if "cuda" not in str(where):
            super().__init__(order, shape, blocks, where=where, **rest)
            return
        layout = kvbm.load(order) if order in matrix.orders() else spec.parse(f'order: "{order}"')
        by = matrix.orders().get(order, oracle.Order(order))
        self.arena = placed(by, shape, blocks).layout_bytes(rest.get("align", 0), rest.get("how", "steps"))
        self.before = oracle.noise(self.arena.nbytes, 1 + rest.get("dst", False))
        self.memory = on_torch(self.before, str(where))
        if self.memory.is_cuda:
            arrays: list[Any] = list(interface_views(self.arena, self.memory, shape.dtype))
        else:
            arrays = numpy_views(self.arena, self.memory.numpy(), shape.dtype)
        self.pool = Pool(layout, shape, arrays)
        self.opaque = self.arena.placed.order.opaque


def on_torch(data: np.ndarray, where: str) -> Any:
    import torch

    tensor = torch.from_numpy(data).clone()
    return tensor.pin_memory() if where == "cuda pinned" else tensor.to(where)


def read(side: Any) -> np.ndarray:
    """All current bytes of a side."""
    memory = getattr(side, "memory", None)
    if memory is None:
        return side.buffer.copy()
    if isinstance(memory, np.ndarray):
        return memory.copy()
    import torch

    torch.cuda.synchronize()
    return memory.cpu().numpy().copy()


def write(side: Any, data: np.ndarray) -> None:
    memory = getattr(side, "memory", None)
    if memory is None:
        side.buffer[:] = data
    elif isinstance(memory, np.ndarray):
        memory[:] = data
    else:
        import torch

        memory.copy_(torch.from_numpy(data))
        torch.cuda.synchronize()


def mirror(side: Any, data: np.ndarray) -> Any:
    """The side in the oracles' form, with other bytes."""
    made = copy.copy(side)
    made.before = made.memory = data
    if isinstance(made, Flat):
        made.buffer = data
    return made


class Scene(NamedTuple):
    s: Any
    d: Any
    ours: Meant
    theirs: Meant
    src_ids: list[int]
    dst_ids: list[int]
    device: str

    def __repr__(self) -> str:
        return f"{self.s.pool} {self.ours} {self.src_ids} → {self.d.pool} {self.theirs} {self.dst_ids}"

    @property
    def ends(self) -> tuple[Any, Any]:
        return self.ours.of(self.s.pool), self.theirs.of(self.d.pool)

    def after(self, src: np.ndarray) -> np.ndarray:
        """The expected destination after a copy of a source with the bytes `src`."""
        return moved(mirror(self.s, src), self.d, self.ours, self.theirs, self.src_ids, self.dst_ids)

    def digests(self, src: np.ndarray) -> list[int]:
        """Digests of a source with the bytes `src`, by the definition."""
        kept = [a if b != -1 else -1 for a, b in zip(self.src_ids, self.dst_ids, strict=True)]
        return expected(mirror(self.s, src), kept, self.ours)

    def returned(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """The source bytes that correspond to a destination with the bytes `dst`."""
        ids = [(a, b) for a, b in zip(self.src_ids, self.dst_ids, strict=True) if a != -1 != b]
        result, writes = src.copy(), self.d.positions(self.theirs)
        for plane, (at, itemsize) in self.s.positions(self.ours).items():
            read_, write_ = at[[a for a, _ in ids]], writes[plane][0][[b for _, b in ids]]
            if self.s.opaque or self.d.opaque:
                run = math.prod(read_.shape[3:])
                read_, write_ = (np.sort(one.reshape(-1, run), axis=1) for one in (read_, write_))
            write_ = write_.reshape(read_.shape)
            for k in range(itemsize):
                result[read_ + k] = dst[write_ + k]
        return result

    def refill(self) -> None:
        write(self.s, self.s.before)
        write(self.d, self.d.before)


def places(rng: random.Random, device: str) -> tuple[Any, Any]:
    """Devices of the source and the destination."""
    if device == "host":
        return "cpu", "cpu"
    near, far = (0, "pinned") if device == "fake" else (device, "cuda pinned")
    return rng.choice([(near, near), (near, far), (far, near)])


@cache
def plane_pairs() -> list[tuple[str, str]]:
    return [pair for pair in plane_oracle.pairs() if "mxfp8" not in pair[0]]


def scene(
    rng: random.Random, device: str, *, least: int = 0, most: int = 6000, blocks: int = 10, whole: bool = False
) -> Scene:
    """Pools between which a copy can be planned; with one plane, blocks have `least` to `most` elements."""
    while True:
        try:
            return _scene(rng, device, least, most, blocks, whole)
        except (PlanError, LayoutError, oracle.IllegalError):
            continue


def _scene(rng: random.Random, device: str, least: int, most: int, blocks: int, whole: bool) -> Scene:
    here, there = places(rng, device)
    ways = rng.choice(WAYS), rng.choice(WAYS)
    aligns = rng.choice((0, 0, 1, 2, 4, 8, 16, 12)), rng.choice((0, 0, 2, 8, 16))
    counts = rng.randint(2, blocks), rng.randint(2, blocks)
    unit = 0
    if rng.random() < 0.15:
        src, dst = rng.choice(plane_pairs())
        shape = rng.choice(shapes(src)[:3])
        near, far = ("cpu", "cpu") if device == "host" else ("fake", "fake pinned") if device == "fake" else ("cuda", "pinned")
        kinds = [far if "pinned" in str(place) else near for place in (here, there)]
        s: Any = Planar(src, shape, counts[0], how=ways[0], where=kinds[0])
        d: Any = Planar(dst, shape, counts[1], how=ways[1], where=kinds[1], dst=True)
        ours = theirs = Meant()
        if not whole and rng.random() < 0.3:
            names = [plane.name for plane in s.arena.placed.planes]
            ours = theirs = Meant(0, {"planes": rng.sample(names, rng.randint(1, len(names)))})
    else:
        while True:
            nl, nh, hd = rng.randint(1, 4), rng.choice((1, 2, 3, 4)), rng.choice((8, 16, 16, 32, 64))
            nt = rng.choice((1, 2, 4, 8, 16, 16, 32))
            if least <= nl * 2 * nh * hd * nt <= most:
                break
        dtype = rng.choice(("float16", "bfloat16", "float32", "uint8", "float64", "int8"))
        shape = BlockShape(nl=nl, no=2, nh=nh, nt=nt, hd=hd, dtype=dtype)
        orders = [
            rng.choice(matrix.names()) if rng.random() < 0.7 else drawn(rng, shape.sizes) for _ in range(2)
        ]
        meant = [matrix.orders().get(order, oracle.Order(order)) for order in orders]
        ours = theirs = Meant()
        if not whole and rng.random() < 0.4:
            unit = rng.choice([0, *(n for n in (1, 2, 4, 8, 16) if nt % n == 0)])
            ours, theirs = parts(rng, shape.sizes, unit, 0.3)
        if any(cannot(order, part, nt) for order, part in zip(meant, (ours, theirs), strict=True)):
            raise PlanError("a part that has no order")
        itemsize = shape.itemsize
        aligns = tuple(align - align % itemsize for align in aligns) if "cuda" in device else aligns
        s = Flat(orders[0], shape, counts[0], here, how=ways[0], align=aligns[0])
        d = Flat(orders[1], shape, counts[1], there, dst=True, how=ways[1], align=aligns[1])
    parts_ = ours.of(s.pool), theirs.of(d.pool)
    n = min(parts_[0].num_ids, parts_[1].num_ids, 24)
    n = rng.randint(1, n)
    src_ids, dst_ids = (rng.sample(range(part.num_ids), n) for part in parts_)
    if n > 3 and rng.random() < 0.3:
        src_ids[1] = dst_ids[n - 2] = -1
    made = Scene(s, d, ours, theirs, src_ids, dst_ids, device)
    # PlanError: there is no copy, or nothing that has a digest
    between(parts_[0].of, parts_[1].of, "")
    keys = parts_[0].keys()
    for part, section in zip(parts_, alike(parts_[0].of, parts_[1].of), strict=True):
        alone(section, keys, part.pool.alignment, "")
    if s.opaque or d.opaque:
        keys_of(s.pool.whole.of), keys_of(d.pool.whole.of)
        alone(parts_[0].of, keys, s.pool.alignment, "")
    return made


def ids_of(rng: random.Random, ids: Sequence[int]) -> Any:
    kind = rng.choice((list, np.int32, np.int64))
    return list(ids) if kind is list else np.array(ids, kind)


def options(rng: random.Random, at: Scene, staged: bool) -> dict[str, Any]:
    """Options of a transfer."""
    if at.device == "host":
        return {}
    strategy = "staged" if staged else rng.choice(STRATEGIES)
    slot = max(part.of.packed().accesses[0].block[0] for part in at.ends)
    chunk = rng.choice((None, slot, 3 * slot)) if strategy == "staged" else None
    chunk = max(slot, 1 << 17) if staged else chunk  # more than anything else on the GPU
    sms = rng.choice((None, 1, 4)) if strategy in ("auto", "direct") else None
    return {"strategy": strategy, "chunk_bytes": chunk, "max_sms": sms}


def transfer(rng: random.Random, at: Scene, *, staged: bool = False, **rest: Any) -> kvbm.Transfer:
    """A transfer by any strategy that is available for the pair."""
    while True:
        try:
            return kvbm.Transfer(*at.ends, **options(rng, at, staged), **rest)
        except (kvbm.MissingKernelError, kvbm.BindError):  # the copy engine lacks the modes
            if at.device == "host":
                raise


class Out:
    """Memory for digests, of a kind that the copy can write."""

    def __init__(self, n: int, device: str) -> None:
        self.host = np.full(n + 2, 77, np.uint64)
        self.array: Any = self.host[1:-1]
        if device == "fake":
            from memory import FakeCuda

            self.array = FakeCuda((n,), "uint64", address=self.host[1:].ctypes.data)
        elif device != "host":
            import torch

            self.array = torch.full((n,), 77, dtype=torch.int64, device=device)
            torch.cuda.synchronize(device)  # the copy runs on a stream of its own

    def found(self) -> list[int]:
        if hasattr(self.array, "cpu"):
            return [int(one) for one in self.array.cpu().numpy().view(np.uint64)]
        assert self.host[0] == self.host[-1] == 77, "a guard of the digests was written"
        return [int(one) for one in self.host[1:-1]]


def streams(device: str) -> list[Any]:
    if device == "host":
        return [None]
    if device == "fake":
        return [5, 6, 7]
    import torch

    return [torch.cuda.Stream(device) for _ in range(3)]


def digested(part: Any, ids: Sequence[int], stream: Any) -> list[int]:
    """Digests of a pool, on a stream if it is on a GPU."""
    return [int(one) for one in part.digest(ids, **({} if part.pool.device == "cpu" else {"stream": stream}))]


def require_copied(at: Scene, src: np.ndarray | None = None) -> None:
    want = at.after(at.s.before if src is None else src)
    got = read(at.d)
    wrong = np.flatnonzero(got != want)
    assert not wrong.size, (at, f"{wrong.size} bytes are wrong", wrong[:8].tolist())
    assert np.array_equal(read(at.s), at.s.before if src is None else src), (at, "the source was written")


# ---- nothing injected ------------------------------------------------------------------------------------------------


def copies(rng: random.Random, device: str) -> Found:
    """By any strategy, on any stream, with digests or verification or neither, captured or not."""
    at = scene(rng, device)
    knobs = Fake() if device == "fake" else None
    n, verify = len(at.src_ids), rng.random() < 0.5
    with transfer(rng, at, verify=verify) as move:
        for _ in range(2):
            at.refill()
            out = Out(n, device) if rng.random() < 0.6 else None
            given: dict[str, Any] = {} if out is None else {"digests": out.array}
            stream = rng.choice(streams(device))
            ids = ids_of(rng, at.src_ids), ids_of(rng, at.dst_ids)
            if knobs is None:
                done = move.copy(*ids, stream=stream, **given)
                done.synchronize()
            else:
                done = knobs.copied(rng, move, ids, stream, given)
            if out is not None:
                assert out.found() == at.digests(at.s.before), (at, "the digests are not those of the definition")
            require_copied(at)
            part = at.ends[0]
            kept = [one for one in at.src_ids if one != -1]
            assert digested(part, kept, stream) == expected(mirror(at.s, at.s.before), kept, at.ours), (at, "of the pool")
            del done
    if knobs is not None:
        knobs.require_clean()
    return Counter(right=1)


def reshards(rng: random.Random, device: str) -> Found:
    """Random placements of two engines: bytes, guards, how often each byte is written, and digests of all destinations."""
    case = reshard_oracle.random_case(rng.randrange(10**6))
    try:
        run = reshard_oracle.Run(case, aligned, reshard_oracle.host_arrays)
        run.call()
    except reshard_oracle.RefusedError:
        return Counter(refused=1)
    run.check(np.asarray)
    for pool, memory, want in zip(run.pools[1], run.scene.sides[1], run.scene.after, strict=True):
        arrays = reshard_oracle.host_arrays(memory.arena, aligned(want), case.dtype)
        judge = Pool(pool.layout, pool.shape, arrays, num_blocks=pool.num_blocks)
        try:
            assert np.array_equal(pool.digest(), judge.digest()), case
        except PlanError:
            return Counter(right=1, undigested=1)
    return Counter(right=1)


# ---- flipped bits ----------------------------------------------------------------------------------------------------


class Flip(NamedTuple):
    """A bit of an element that is copied."""

    place: str  # source, destination, ring or kernel
    pair: int
    byte: int
    mask: int


def draw_flip(rng: random.Random, at: Scene, place: str) -> Flip:
    pair = rng.choice([k for k, ids in enumerate(zip(at.src_ids, at.dst_ids, strict=True)) if -1 not in ids])
    side, meant, ids = (at.d, at.theirs, at.dst_ids) if place == "destination" else (at.s, at.ours, at.src_ids)
    where, itemsize = rng.choice(list(side.positions(meant).values()))
    of = where[ids[pair]].ravel()
    return Flip(place, pair, int(of[rng.randrange(of.size)]) + rng.randrange(itemsize), 1 << rng.randrange(8))


def flipped(data: np.ndarray, flip: Flip) -> np.ndarray:
    made = data.copy()
    made[flip.byte] ^= flip.mask
    return made


def flips(rng: random.Random, device: str) -> Found:
    """One bit changes while a verifying copy runs, or without its notice."""
    where = ("source", "destination", "ring", "kernel") if device == "fake" else ("source", "destination")
    place = rng.choice(where)
    while True:
        least, most = (0, 6000) if device == "fake" else (4000, 60000)
        at = scene(rng, device, least=least, most=most, whole=rng.random() < 0.5)
        crosses = "cpu" in (at.s.pool.device, at.d.pool.device)
        if not any(a != -1 != b for a, b in zip(at.src_ids, at.dst_ids, strict=True)) or (not crosses and place == "ring"):
            continue
        break
    flip = draw_flip(rng, at, place)
    inject = {"host": flip_on_host, "fake": flip_on_fake}.get(device, flip_on_gpu)
    with transfer(rng, at, staged=place == "ring", verify=True) as move:
        made, done = inject(rng, at, move, flip)
        seen = done.proof._memory[: 2 * len(at.src_ids)]
        raised: tuple[int, ...] = ()
        said = ""
        try:
            done.synchronize()
        except DigestError as error:
            raised, said = error.pairs, str(error)
        outcome = judge(at, flip, made, [int(one) for one in seen], raised)
        if raised:
            require_located(at, said)
        del done
        # The next copy, undisturbed.
        at.refill()
        move.copy(at.src_ids, at.dst_ids, stream=streams(device)[0]).synchronize()
        require_copied(at)
    if device == "fake":
        Fake().require_clean()
    return Counter({"injected": 1, outcome: 1, f"{flip.place}: {outcome}": 1})


def judge(at: Scene, flip: Flip, made: bool, seen: list[int], raised: tuple[int, ...]) -> str:
    """The outcome of a flip; AssertionError if it is not a correct one."""
    n = len(at.src_ids)
    of_src, of_dst = seen[:n], seen[n:]
    whole = at.s.before
    other = flipped(whole, flip) if flip.place == "source" and made else whole
    src, dst = read(at.s), read(at.d)
    assert np.array_equal(src, other), (at, flip, "the source changed otherwise")
    sources = [at.digests(whole), at.digests(other)]
    assert all(one in (a, b) for one, a, b in zip(of_src, *sources, strict=True)), (at, flip, "digests of the source")
    now = at.digests(at.returned(whole, dst))
    earlier = []  # of the destination before it was flipped
    if flip.place == "destination" and made:
        # A flip reads and then writes: what is copied in between is lost, and the byte is then another one.
        earlier = [at.digests(at.returned(whole, flipped(dst, flip))), *sources]
    assert all(one in each for one, *each in zip(of_dst, now, *earlier, strict=True)), (at, flip, "digests of the destination")
    differ = tuple(k for k in range(n) if of_src[k] != of_dst[k])
    assert raised == differ, (at, flip, raised, differ, "what was reported is not what differs")
    wanted = [at.after(whole), at.after(other)]
    if flip.place == "source":
        assert any(np.array_equal(dst, want) for want in wanted), (at, flip, "the destination is of neither source")
    else:
        wrong = np.flatnonzero(dst != wanted[0])
        assert wrong.size <= 1, (at, flip, wrong[:8])
    if raised:
        assert raised == (flip.pair,) or flip.place in ("ring", "kernel"), (at, flip, raised)
        return "found"
    # What was digested is what lies there: that of the source as it was, or as it was when it was digested.
    digested = int(of_src[flip.pair] != sources[0][flip.pair])
    if np.array_equal(dst, wanted[digested]) or np.array_equal(*wanted):
        return "harmless"
    assert flip.place == "destination" and of_dst != now and of_dst in earlier, (at, flip, "a wrong copy was called right")
    return "late"


def require_located(at: Scene, said: str) -> None:
    """Require that wrong data are named: their pairs, and the coordinates of a single byte."""
    src, dst = read(at.s), read(at.d)
    want = at.after(src)
    wrong = np.flatnonzero(dst != want)
    kept = list(zip(at.src_ids, at.dst_ids, strict=True))
    stream = streams(at.device)[0]
    found = locate(*at.ends, at.src_ids, at.dst_ids, **({} if stream is None else {"stream": stream}))
    pairs, inside = set(), {}
    for plane, (where, itemsize) in at.d.positions(at.theirs).items():
        for k, (a, b) in enumerate(kept):
            if a == -1 or b == -1:
                continue
            of = where[b]
            hit = np.isin(of[..., None] + np.arange(itemsize), wrong).any(axis=-1)
            if hit.any():
                pairs.add(k)
                inside[plane, k] = hit
    assert set(found.pairs) == pairs, (at, str(found), pairs)
    assert found.pairs or "nothing any more" in said or "→" in said, said
    if wrong.size != 1 or at.s.opaque or at.d.opaque:
        return
    (((plane, pair), hit),) = inside.items()
    (region,) = found.found[0].regions
    axes = list("lohtd") if isinstance(at.s, Flat) else None
    if axes is None:
        (extents,) = (p.extents for p in at.d.arena.placed.planes if p.name == plane)
        axes = sorted(extents)
    assert region.planes == (plane,) and region.exact, (at, str(found))
    for axis, index in zip(axes, np.argwhere(hit)[0].tolist(), strict=True):
        chosen = at.ours.chosen.get(axis)
        number = index if chosen is None else [chosen][0] if isinstance(chosen, int) else list(chosen)[index]
        if axis in region.at and axis in "loht":
            assert region.at[axis] == (number,), (at, pair, axis, number, str(found))
        elif axis == "d" and axis in region.at and isinstance(at.s, Flat):
            assert number in region.at[axis], (at, pair, axis, number, str(found))


def flip_on_host(rng: random.Random, at: Scene, move: kvbm.Transfer, flip: Flip) -> tuple[bool, Any]:
    """Another thread flips the bit, at any time."""
    move.copy(at.src_ids, at.dst_ids)
    begin = time.perf_counter()
    move.copy(at.src_ids, at.dst_ids)
    took, n = time.perf_counter() - begin, len(at.src_ids)
    whole = at.digests(at.s.before)
    wanted = [at.after(one) for one in (at.s.before, flipped(at.s.before, flip) if flip.place == "source" else at.s.before)]
    for _ in range(12):  # until it comes between the digests
        at.refill()
        done = flip_while_copied(at, move, flip, rng.choice((took, 50e-6, 500e-6, 3e-3)) * rng.random())
        seen = done.proof._memory
        if not np.array_equal(seen[:n], seen[n : 2 * n]):
            break
        want = wanted[int(seen[flip.pair] != whole[flip.pair])]
        wrong = np.flatnonzero(read(at.d) != want)
        late = flip.place == "destination" and wrong.tolist() == [flip.byte]
        assert late or not wrong.size, (at, flip, "a wrong copy was called right")
    return True, done


def flip_while_copied(at: Scene, move: kvbm.Transfer, flip: Flip, wait: float) -> Any:
    side, start = at.s if flip.place == "source" else at.d, threading.Barrier(2)
    memory = side.memory if getattr(side, "memory", None) is not None else side.buffer

    def work() -> None:
        start.wait()
        end = time.perf_counter() + wait
        while time.perf_counter() < end:
            pass
        memory[flip.byte] ^= flip.mask

    thread = threading.Thread(target=work)
    thread.start()
    start.wait()
    done = move.copy(at.src_ids, at.dst_ids)
    thread.join()
    return done


def flip_on_gpu(rng: random.Random, at: Scene, move: kvbm.Transfer, flip: Flip) -> tuple[bool, Any]:
    """A kernel on another stream flips the bit, at any time; in pinned memory the host does."""
    import torch

    side = at.s if flip.place == "source" else at.d
    memory = side.memory
    torch.cuda.synchronize()
    mine, other = torch.cuda.Stream(), torch.cuda.Stream()
    one = torch.tensor(flip.mask, dtype=torch.uint8, device=memory.device) if memory.is_cuda else None
    torch.cuda.synchronize()
    wait = int(rng.choice((0, 1e4, 1e5, 1e6)) * rng.random())
    with torch.cuda.stream(other):
        torch.cuda._sleep(wait)
        if one is not None:
            memory[flip.byte : flip.byte + 1].bitwise_xor_(one)
    with torch.cuda.stream(mine):
        torch.cuda._sleep(int(rng.choice((0, 1e4, 1e5)) * rng.random()))
    done = move.copy(at.src_ids, at.dst_ids, stream=mine)
    if one is None:
        other.synchronize()
        memory.numpy()[flip.byte] ^= flip.mask
    torch.cuda.synchronize()
    return True, done


def flip_on_fake(rng: random.Random, at: Scene, move: kvbm.Transfer, flip: Flip) -> tuple[bool, Any]:
    """The bit is flipped between any two steps of the streams."""
    fake = Fake()
    fake.defer(1)
    order = rng.randrange(1, 1 << 30)
    fake.seed(order)
    for _ in range(3 if flip.place == "ring" else 1):  # then it is the first slot's turn again
        done = move.copy(at.src_ids, at.dst_ids, stream=5)
        steps = fake.pump()
        done.synchronize()
        del done
    at.refill()
    fake.seed(order)
    ring = np.zeros(0, np.uint8)
    if flip.place == "ring":  # it is the largest allocation
        begin, end = (ctypes.c_ulonglong * 2).in_dll(fake.driver, "fake_largest")
        ring = np.frombuffer((ctypes.c_ubyte * (end - begin)).from_address(begin), np.uint8)
        ring[:] = 0
    done = move.copy(at.src_ids, at.dst_ids, stream=5)
    fake.pump(rng.randrange(steps + 1) if flip.place != "kernel" or rng.random() < 0.3 else 0)
    made = True
    if flip.place == "kernel":
        fake.number("fake_wrong").value = 1
    elif flip.place == "ring":
        inside = np.flatnonzero(ring)
        made = inside.size > 0
        if made:
            ring[rng.choice(inside)] ^= flip.mask
    else:
        side = at.s if flip.place == "source" else at.d
        memory = side.memory if getattr(side, "memory", None) is not None else side.buffer
        memory[flip.byte] ^= flip.mask
    fake.pump()
    fake.number("fake_wrong").value = 0
    return made, done


# ---- the fake driver -------------------------------------------------------------------------------------------------


class Fake:
    """Knobs and counters of the fake driver."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.driver.fake_end_capture.restype = ctypes.c_void_p

    def number(self, name: str) -> ctypes.c_long:
        return ctypes.c_long.in_dll(self.driver, name)

    def defer(self, on: int) -> None:
        ctypes.c_int.in_dll(self.driver, "deferred").value = on

    def seed(self, n: int) -> None:
        ctypes.c_uint.in_dll(self.driver, "fake_seed").value = n

    def pump(self, n: int = -1) -> int:
        return int(self.driver.fake_pump(n))

    @property
    def live(self) -> tuple[int, ...]:
        return tuple((ctypes.c_long * len(LIVE)).in_dll(self.driver, "live"))

    def require_clean(self) -> None:
        assert self.number("illegal").value == 0, "memory without a grant is touched"
        assert self.number("pushes").value == self.number("pops").value, "a context was left on a thread"
        assert self.number("broken_captures").value == 0, "a capture was broken"

    def copied(self, rng: random.Random, move: kvbm.Transfer, ids: Any, stream: int, given: Any) -> Any:
        """One copy in any order of its steps, or captured and replayed."""
        self.defer(1)
        self.seed(rng.randrange(1 << 30))
        if rng.random() < 0.7:
            done = move.copy(*ids, stream=stream, **given)
            self.pump(rng.randrange(20))
            done.synchronize()
        else:
            self.driver.fake_begin_capture(ctypes.c_void_p(6))
            done = move.copy(*ids, stream=6, **given)
            graph = self.driver.fake_end_capture()
            assert graph, "a stream of the capture was left behind"
            for _ in range(rng.randint(1, 2)):
                self.driver.fake_launch_graph(ctypes.c_void_p(graph), ctypes.c_void_p(stream))
                self.pump()
            if done.captured:  # it digests: ask it
                done.synchronize()
            self.driver.fake_destroy_graph(ctypes.c_void_p(graph))
        self.defer(0)
        return done


def action(rng: random.Random) -> Callable[[], None]:
    """A copy, digests of a pool, a captured copy, or pinned memory: all steps from making the pools on, and a check."""
    start, what = rng.getrandbits(64), rng.choice(("copy", "copy", "verify", "verify", "digest", "graph", "pin"))

    def call() -> None:
        again, fake = random.Random(start), Fake()
        at = scene(again, "fake", most=600, blocks=5)
        fail_at = fake.number("fake_fail_at")
        if what == "digest":
            kept = [one for one in at.src_ids if one != -1]
            assert digested(at.ends[0], kept, 5) == expected(mirror(at.s, at.s.before), kept, at.ours)
            return
        if what == "pin":
            with contextlib.closing(Pool.allocate(at.s.pool.layout, at.s.pool.shape, 2, "pinned")) as pool:
                pool.digest()
                fail_at.value = 0
            return
        with transfer(again, at, verify=what == "verify") as move, contextlib.ExitStack() as stack:
            if what == "graph":
                fake.defer(1)
                try:
                    fake.driver.fake_begin_capture(ctypes.c_void_p(6))
                    try:
                        move.copy(at.src_ids, at.dst_ids, stream=6)
                    finally:  # also of a copy that failed half-way: the graph has a ring as long as it lives
                        graph = ctypes.c_void_p(fake.driver.fake_end_capture())
                        stack.callback(lambda: graph and fake.driver.fake_destroy_graph(graph))
                    assert graph, "a stream of the capture was left behind"
                    fake.driver.fake_launch_graph(graph, ctypes.c_void_p(5))
                    fake.pump()
                finally:
                    fake.defer(0)
            else:
                out = Out(len(at.src_ids), "fake")
                move.copy(at.src_ids, at.dst_ids, stream=5, digests=out.array).synchronize()
                assert out.found() == at.digests(at.s.before), at
            fail_at.value = 0  # what closing waits for has been waited for
            require_copied(at)

    call.__name__ = what
    return call


def calls(rng: random.Random, device: str) -> Found:
    """Make calls of the driver in an action fail, one after the other: about half of them per round."""
    call = action(rng)
    verifies, step = call.__name__ == "verify", lambda: rng.choice((1, 2, 3))  # other rounds meet the others
    names = every_call(call.__name__, call, verifies=verifies, step=step, most=400)
    found: Found = Counter(names)
    found["injected"] = names.total()
    for name, times in names.items():
        found["done" if name in ADVICE else "stated error"] += times
    return found


def device_memory(rng: random.Random, device: str) -> Found:
    """The GPU, or pinned memory, is full after some bytes."""
    if device != "fake":
        return real_device_memory(rng, device)
    call, room = action(rng), rng.choice((0, 1 << rng.randrange(27), rng.randrange(1 << 16)))

    def attempt(limited: bool) -> str:
        fake = Fake()
        said = "done"
        if limited:
            fake.number("fake_room").value = room
            try:
                call()
            except CudaError as error:
                assert error.code == 2 and "memory" in str(error).lower() + "memory", error
                said = "stated error"
            except MemoryError:
                said = "stated error"
            fake.number("fake_room").value = -1
        gc.collect()
        for _ in range(3 - limited):
            call()
        gc.collect()
        fake.require_clean()
        return f"{said}|{' '.join(map(str, fake.live))}"

    _, clean = in_child(lambda: attempt(False)).split("|")
    said, live = in_child(lambda: attempt(True)).split("|")
    for kind, now, was in zip(LIVE, live.split(), clean.split(), strict=True):
        assert int(now) <= int(was), f"{call.__name__}: {room} bytes: {now} {kind}, without: {was}"
    return Counter({"injected": 1, said: 1})


def has_arrays_of_blocks(pool: Pool) -> bool:
    """True if each block has separate arrays: very many blocks would be very many arrays."""
    twice = pool.layout.resolve(pool.shape, 2 * pool.num_blocks)
    return twice.table_size > pool.resolved.table_size


def real_device_memory(rng: random.Random, device: str) -> Found:
    """A ring, or a pool, larger than the GPU."""
    at = scene(rng, device, most=600, whole=True)
    found: Found = Counter(injected=1)
    large = 1 << rng.randrange(39, 46)
    try:
        if isinstance(at.s, Flat) and rng.random() < 0.5 and not has_arrays_of_blocks(at.s.pool):
            Pool.allocate(at.s.pool.layout, at.s.pool.shape, large // at.s.pool.shape.nbytes, device)
        else:
            with kvbm.Transfer(*at.ends, "staged", chunk_bytes=large) as move:
                move.copy(at.src_ids, at.dst_ids, stream=streams(device)[0]).synchronize()
        found["done"] += 1  # between two pools of one GPU nothing is staged
    except (KvbmError, MemoryError):
        found["stated error"] += 1
    at.refill()
    with transfer(rng, at, verify=True) as move:
        move.copy(at.src_ids, at.dst_ids, stream=streams(device)[0]).synchronize()
    require_copied(at)
    return found


# ---- threads ---------------------------------------------------------------------------------------------------------


def threads(rng: random.Random, device: str) -> Found:
    """Several threads copy, verify and digest with the same transfers and pools; each writes separate blocks."""
    at = scene(rng, device, blocks=40)
    at = at._replace(
        src_ids=[a for a, b in zip(at.src_ids, at.dst_ids, strict=True) if a != -1 != b],
        dst_ids=[b for a, b in zip(at.src_ids, at.dst_ids, strict=True) if a != -1 != b],
    )
    many = rng.choice((2, 4, 8))
    want, start = at.digests(at.s.before), threading.Barrier(many)
    moves = [transfer(rng, at, verify=bool(k)) for k in range(2)]
    part = at.ends[0]

    def work(k: int) -> None:
        mine = range(k, len(at.src_ids), many)
        src, dst = [at.src_ids[i] for i in mine], [at.dst_ids[i] for i in mine]
        stream = None if device == "host" else 5 + k if device == "fake" else streams(device)[0]
        start.wait()
        for turn in range(6):
            out = Out(len(mine), device)
            done = moves[(k + turn) % 2].copy(src, dst, stream=stream, digests=out.array)
            if turn % 3:
                done.synchronize()
                assert out.found() == [want[i] for i in mine]
            assert digested(part, src, stream) == [want[i] for i in mine]
            if not turn % 3:
                done.synchronize()

    with ThreadPoolExecutor(many) as pool:
        list(pool.map(work, range(many)))
    require_copied(at)
    for move in moves:
        move.close()
    if device == "fake":
        Fake().require_clean()
    return Counter(right=1)


# ---- files -----------------------------------------------------------------------------------------------------------

LEFT = ".kvbm-"  # what a temporary name begins with


def stored_pool(rng: random.Random) -> Pool:
    shape = BlockShape(nl=rng.randint(1, 3), no=2, nh=rng.choice((1, 2, 4)), nt=rng.choice((4, 16)), hd=16, dtype="float16")
    layout = rng.choice(("nhd", "universal", "vllm/LBHNC"))
    pool = Pool.allocate(kvbm.load(layout), shape, rng.randint(1, 40))
    for array in pool.arrays:
        array.view(np.uint8)[...] = np.random.default_rng(rng.randrange(1 << 30)).integers(
            0, 256, array.view(np.uint8).shape, np.uint8
        )
    return pool


def writer(rng: random.Random, folder: Path, pool: Pool) -> tuple[str, Callable[[], Any]]:
    """A function that replaces the file `out`."""
    source, target = folder / "in", folder / "out"
    store.save(source, pool, force=True)
    store.save(target, stored_pool(rng), force=True)
    what = rng.choice(("save", "convert", "convert in place", "digests"))
    layout = kvbm.load(rng.choice(("hnd", "universal", "nhd")))
    if what == "save":
        return what, lambda: store.save(target, pool, force=True, layout=layout)
    if what == "convert":
        return what, lambda: store.convert(source, target, layout, force=True)
    if what == "digests":
        store.save(target, pool, digests=False, force=True)
        return what, lambda: store.add_digests(target)
    return what, lambda: store.convert(target, target, layout, force=True)


def require_whole(folder: Path, old: bytes, new: bytes, *, left: bool) -> bool:
    """True if the file is the new one; otherwise it must be the old one.  No other file may exist."""
    now = (folder / "out").read_bytes()
    assert now in (old, new), f"the file is neither the old nor the new one: {len(now)} bytes"
    names = {one.name for one in folder.iterdir()} - {"in", "out"}
    assert not names or (left and all(name.startswith(LEFT) for name in names)), f"left behind: {names}"
    for name in names:
        (folder / name).unlink()
    return now == new


@contextlib.contextmanager
def files(rng: random.Random, folder: Path | None = None) -> Iterator[tuple[Path, str, Callable[[], Any], bytes, bytes]]:
    """A folder with files, a function that replaces one of them, and the old and the new one's bytes."""
    with tempfile.TemporaryDirectory(prefix="kvbm-torture-", dir=folder) as name:
        at = Path(name)
        old = new = b""
        while old == new:
            what, call = writer(rng, at, stored_pool(rng))
            old = (at / "out").read_bytes()
            call()
            new = (at / "out").read_bytes()
        (at / "out").write_bytes(old)
        yield at, what, call, old, new


def kills(rng: random.Random, device: str) -> Found:
    """SIGKILL at any step of Python, or at any time, while a file is written."""
    found: Found = Counter()
    with files(rng) as (folder, what, call, old, new):
        events = int(in_child(lambda: traced(call, 0)))
        (folder / "out").write_bytes(old)
        start = time.perf_counter()
        in_child(call)
        took = time.perf_counter() - start
        for turn in range(8):
            (folder / "out").write_bytes(old)
            child = os.fork()
            if child == 0:
                try:
                    if turn % 2:
                        traced(call, rng.randint(1, events))
                    else:
                        call()
                finally:
                    os._exit(0)
            if turn % 2 == 0:
                time.sleep(took * 1.2 * rng.random())
                os.kill(child, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status in (0, -signal.SIGKILL), f"{what}: status {status}"
            is_new = require_whole(folder, old, new, left=True)
            assert is_new or status, f"{what}: the old file, and nobody was killed"
            found["injected"] += status != 0
            if status:
                found["new file" if is_new else "old file"] += 1
            in_child(lambda: store.read(folder / "out"))
        (folder / "out").write_bytes(old)
        call()
        assert require_whole(folder, old, new, left=False) and store.verify(folder / "out") == []
        # While a file is verified: it is only read.
        child = os.fork()
        if child == 0:
            traced(lambda: store.verify(folder / "out"), rng.randint(1, 4000))
            os._exit(0)
        os.waitpid(child, 0)
        assert require_whole(folder, new, new, left=False)
    return found


def traced(call: Callable[[], Any], last: int) -> int:
    """Run a function and count Python's calls, including those of C functions; at the `last` one the process is killed."""
    count = 0

    def step(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(step)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def full_disk(rng: random.Random, device: str) -> Found:
    """No space: by a limit on the size of files, or on a small file system if one can be mounted."""
    if rng.random() < 0.5:
        said = in_child(lambda: _on_small_disk(rng))
        if said != "cannot be mounted":
            return Counter({"injected": 1, said: 1, "on a small file system": 1})
    with files(rng) as (folder, what, call, old, new):
        limit = rng.choice((0, rng.randrange(len(new)), rng.randrange(len(new) * 5 // 4), len(new) - 1, len(new)))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            said = _refused(what, call)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        is_new = require_whole(folder, old, new, left=False)
        assert is_new == (said == "done"), f"{what}: {said}, {limit} of {len(new)} bytes"
        assert (limit >= len(new)) == is_new, f"{what}: {said}, {limit} of {len(new)} bytes"
        (folder / "out").write_bytes(old)
        call()
        assert require_whole(folder, old, new, left=False) and store.verify(folder / "out") == []
    return Counter({"injected": 1, said: 1})


def _refused(what: str, call: Callable[[], Any]) -> str:
    try:
        call()
    except OSError as error:
        assert "bytes wanted" in str(error), f"{what}: {error!r}"
        return "stated error"
    return "done"


def _on_small_disk(rng: random.Random) -> str:
    """In a separate process, whose mounts are invisible to others."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private = 0x00020000, (1 << 18) | (1 << 14)
    if not hasattr(libc, "unshare") or libc.unshare(new_mounts) or libc.mount(b"none", b"/", None, private, None):
        return "cannot be mounted"
    with tempfile.TemporaryDirectory(prefix="kvbm-torture-") as name:
        with files(random.Random(rng.getrandbits(64)), Path(name)) as (_, _, _, _, new):
            size = 3 * len(new)
        room = (size + rng.randrange(1 << 19)) & -mmap.PAGESIZE
        if libc.mount(b"none", name.encode(), b"tmpfs", 0, f"size={room}".encode()):
            return "cannot be mounted"
        try:
            with files(rng, Path(name)) as (folder, what, call, old, new):
                stat = os.statvfs(folder)
                left = stat.f_bavail * stat.f_frsize
                keep = rng.randrange(max(len(new) * 3 // 2, 1))
                filler = folder.parent / "filler"
                filler.write_bytes(bytes(max(left - keep, 0)))
                said = _refused(what, call)
                is_new = require_whole(folder, old, new, left=False)
                assert is_new == (said == "done"), f"{what}: {said}"
                filler.unlink()
                (folder / "out").write_bytes(old)
                call()
                assert require_whole(folder, old, new, left=False) and store.verify(folder / "out") == []
                return said
        except OSError as error:
            if error.errno != 28:
                raise
            return "cannot be mounted"  # too small for the files of the round
        finally:
            libc.umount2(name.encode(), 2)


# ---- readers beside writers ------------------------------------------------------------------------------------------


#: Of the files, and of what is read.
LAYOUTS = ("universal", "nhd", "vllm/LBHNC", "vllm/flash_attn_nhd")
GENERATIONS = range(1, 60)


class Generation(NamedTuple):
    """A state of a file.  Its number determines layout, sizes, and one number in all elements of a block."""

    number: int

    @property
    def layout(self) -> str:
        return LAYOUTS[self.number % len(LAYOUTS)]

    @property
    def shape(self) -> BlockShape:
        rng = random.Random(self.number)
        return BlockShape(nl=rng.randint(1, 3), no=2, nh=rng.choice((1, 2)), nt=rng.choice((4, 16)), hd=16, dtype="int32")

    @property
    def blocks(self) -> int:
        return random.Random(-self.number).randint(1, 24)

    def value(self, block: int) -> int:
        return self.number * 32 + block + 1

    def pool(self) -> Pool:
        pool = Pool.allocate(kvbm.load(self.layout), self.shape, self.blocks)
        for block in range(self.blocks):
            for part in parts_of(pool, self.layout, block):
                part[...] = self.value(block)
        return pool


def parts_of(pool: Pool, layout: str, block: int) -> list[np.ndarray]:
    """The elements of a block, from the orders of these layouts in their files."""
    each = {"universal": 1, "nhd": 2 * pool.shape.nl}.get(layout)
    if each is not None:
        return list(pool.arrays[block * each : (block + 1) * each])
    return [array[:, block] for array in pool.arrays]


@cache
def known_digests() -> list[list[int]]:
    """Of all generations, as in memory."""
    return [[int(one) for one in Generation(number).pool().digest()] for number in GENERATIONS]


def require_one_generation(pool: Pool, layout: str, ids: Sequence[int] | None = None) -> int:
    """All elements of a pool must be those of one generation, with its sizes; return its number."""
    values = [{int(one) for part in parts_of(pool, layout, row) for one in np.unique(part)} for row in range(pool.num_blocks)]
    assert all(len(of) == 1 for of in values), f"a block is a mixture: {values}"
    found = [value for of in values for value in of]
    of = Generation((found[0] - 1) // 32)
    wanted = [of.value(block) for block in (range(of.blocks) if ids is None else ids)]
    assert found == wanted and pool.shape == of.shape, f"{found} {pool.shape}, expected {of}: {wanted} {of.shape}"
    return of.number


def readers(rng: random.Random, device: str) -> Found:
    """Files are read while another process replaces, removes or cuts them, and is killed.  What is read is of one generation."""
    fault = rng.choice(("replace", "replace", "remove", "cut", "kill"))
    found: Found = Counter()
    with tempfile.TemporaryDirectory(prefix="kvbm-torture-") as name:
        folder = Path(name)
        path = folder / "in"
        store.save(path, Generation(1).pool())
        children: list[int] = []
        end = time.monotonic() + 1.5
        try:
            children += [_start(functools.partial(_write_generations, path, rng.getrandbits(32), fault)) for _ in range(2)]
            while time.monotonic() < end:
                if fault == "kill" and rng.random() < 0.2:
                    child = children.pop(0)
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    children.append(_start(functools.partial(_write_generations, path, rng.getrandbits(32), fault)))
                found["injected"] += 1
                try:
                    _read_generation(rng, path, fault)
                    found["done"] += 1
                except FileNotFoundError:
                    assert fault in ("remove", "cut"), "a file that is only replaced is always there"
                    found["stated error"] += 1
                except kvbm.BindError as error:
                    assert fault == "cut" and "in: " in str(error), error
                    found["stated error"] += 1
                except DigestError as error:  # a page of a file that is cut is zeros before the read ends
                    assert fault == "cut", error
                    found["stated error"] += 1
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        left = {one.name for one in folder.iterdir()} - {"in", "out"}
        assert all(one.startswith(LEFT) for one in left), f"left behind: {left}"
        store.save(path, Generation(2).pool(), force=True)
        assert store.verify(path) == [] and require_one_generation(store.load(path), Generation(2).layout) == 2
    return found


def _start(call: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            call()
        finally:
            os._exit(1)
    return child


def _write_generations(path: Path, seed: int, fault: str) -> None:
    """Until the process is killed."""
    rng = random.Random(seed)
    pools = [(number, Generation(number).pool()) for number in rng.sample(GENERATIONS, 6)]
    while True:
        _, pool = rng.choice(pools)
        what = rng.random()
        with contextlib.suppress(KvbmError, OSError):  # the other writer was faster
            if what < 0.7:
                store.save(path, pool, force=True)
            elif what < 0.8:
                store.save(path, pool, digests=False, force=True)
                store.add_digests(path)
            elif fault == "remove":
                path.unlink(missing_ok=True)
            elif fault == "cut" and path.exists():
                os.truncate(path, rng.randrange(path.stat().st_size))
            else:
                store.save(path, pool, force=True)


def _read_generation(rng: random.Random, path: Path, fault: str) -> None:
    """Read the file in some way, and judge it."""
    what = rng.choice(("load", "some", "other", "bare", "convert", "verify", "digest", *(["map"] if fault != "cut" else [])))
    with store.read(path) if rng.random() < 0.5 else contextlib.nullcontext(path) as given:
        if what == "map":
            stored = given if isinstance(given, store.Stored) else store.read(given)
            require_one_generation(stored.pool(store.layout_of(stored)), str(stored.layout_name))
        elif what == "some":
            require_one_generation(store.load(given, [0], layout="universal"), "universal", [0])
        elif what == "convert":
            made = store.convert(given, path.with_name("out"), "universal", force=True)
            require_one_generation(store.load(made), "universal")
        elif what == "verify":
            stored = given if isinstance(given, store.Stored) else store.read(given)
            assert stored.digests is None or store.verify(stored) == []
        elif what == "digest":
            found = store.digest(given).blocks.tolist()
            assert found in known_digests(), f"not of one generation: {found}"
        else:
            layout = rng.choice(LAYOUTS) if what != "load" else None
            pool = store.load(given, layout=layout, verify=what != "bare")
            require_one_generation(pool, layout or pool.layout.name)


# ---- memory of the host ----------------------------------------------------------------------------------------------


def host_memory(rng: random.Random, device: str) -> Found:
    """The process may use some more bytes: what does not fit is refused, and is right as soon as it fits."""
    shape = BlockShape(nl=4, no=2, nh=4, nt=16, hd=64, dtype="float16")
    blocks = rng.choice((8, 64, 300))
    layouts = [kvbm.load(rng.choice(("nhd", "universal", "vllm/LBHNC", "vllm/paged_attn_v0"))) for _ in range(2)]
    src, dst = (Pool.allocate(layout, shape, blocks) for layout in layouts)
    for array in src.arrays:
        array.view(np.uint8)[...] = np.random.default_rng(1).integers(0, 256, array.view(np.uint8).shape, np.uint8)
    ids = rng.sample(range(blocks), blocks)
    folder = tempfile.TemporaryDirectory(prefix="kvbm-torture-")
    path = Path(folder.name, "file")

    def copied() -> None:
        kvbm.Transfer(src, dst, verify=True).copy(ids, range(blocks)).synchronize()

    def digested() -> None:
        dst.digest()

    def plain() -> None:
        kvbm.convert(src, dst, ids, range(blocks))

    def allocated() -> None:
        with contextlib.closing(Pool.allocate(layouts[0], shape, 4 * blocks)) as pool:
            pool.digest([0])

    def located() -> None:
        assert not locate(src, dst, ids, range(blocks))

    def saved() -> None:
        store.save(path, src, force=True)

    def loaded() -> None:
        store.load(path, layout=layouts[1]).close()

    works = [plain, copied, digested, allocated, located, saved, loaded]
    if rng.random() < 0.5:  # what is imported, and known, is there
        for work in works:
            work()
    else:
        saved(), plain()
    found: Found = Counter()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    for work in rng.sample(works, len(works)):
        held = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * mmap.PAGESIZE
        room = rng.choice((0, 1 << rng.randrange(12, 25), rng.randrange(1 << 24)))
        found["injected"] += 1
        resource.setrlimit(resource.RLIMIT_AS, (held + room, hard))
        try:
            work()
            said = "done"
        except (MemoryError, KvbmError) as error:
            said = "stated error"
            assert not isinstance(error, DigestError), error
        except OSError as error:
            assert error.errno == 12, repr(error)
            said = "stated error"
        except ImportError as error:
            said = "stated error"
            assert "map segment" in str(error) or "allocate" in str(error), repr(error)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        found[said] += 1
        plain(), saved()
        want = [int(one) for one in src.digest(ids)]
        assert [int(one) for one in dst.digest()] == want
        assert not list(Path(folder.name).glob(LEFT + "*")), "left behind"
        assert hashlib.sha256(path.read_bytes()).digest() and store.verify(path) == []
        for one in works:
            one()
    folder.cleanup()
    return found


# ---- kinds -----------------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    run: Callable[[random.Random, str], Found]
    devices: tuple[str, ...]
    batch: int  # rounds a process
    share: int  # of the time


KINDS = {
    "copies": Kind(copies, ("host", "fake", "cuda"), 10, 3),
    "reshards": Kind(reshards, ("host",), 10, 2),
    "flips": Kind(flips, ("host", "fake", "cuda"), 10, 4),
    "threads": Kind(threads, ("host", "fake", "cuda"), 10, 2),
    "kills": Kind(kills, ("host",), 1, 2),
    "readers": Kind(readers, ("host",), 1, 2),
    "full disk": Kind(full_disk, ("host",), 1, 1),
    "host memory": Kind(host_memory, ("host",), 1, 1),
    "device memory": Kind(device_memory, ("fake", "cuda"), 1, 1),
    "calls": Kind(calls, ("fake",), 1, 3),
}


def one_round(device: str, kind: str, seed: int, number: int) -> Found:
    """Run a round."""
    return KINDS[kind].run(random.Random(f"{seed} {device.partition(':')[0]} {kind} {number}"), device)


# ---- soak ------------------------------------------------------------------------------------------------------------


class Soak:
    """Small copies of all kinds, without an end."""

    def __init__(self, device: str, folder: Path) -> None:
        rng = self.rng = random.Random(1)
        self.device, self.folder = device, folder
        self.scenes = [scene(rng, device, most=1200, blocks=6) for _ in range(12)]
        self.moves = [transfer(rng, at, verify=bool(k % 2)) for k, at in enumerate(self.scenes)]
        self.outs = [Out(len(at.src_ids), device) for at in self.scenes]
        self.streams = streams(device)
        self.wants = [at.digests(at.s.before) for at in self.scenes]
        self.pool = stored_pool(rng)

    def step(self, number: int) -> None:
        which = number % len(self.scenes)
        at, move, out = self.scenes[which], self.moves[which], self.outs[which]
        stream = self.streams[number % len(self.streams)]
        if number % 5 == 0:
            done = move.copy(at.src_ids, at.dst_ids, stream=stream, digests=out.array)
            done.synchronize()
            assert number % 50 or out.found() == self.wants[which]
        elif number % 5 == 1:
            move.copy(at.src_ids, at.dst_ids, stream=stream)  # dropped
        else:
            move.copy(at.src_ids, at.dst_ids, stream=stream).synchronize()
        if number % 97 == 0:
            digested(at.ends[0], [one for one in at.src_ids if one != -1], stream)
            with kvbm.Transfer(*at.ends, verify=True) as fresh:  # sections and a transfer of this turn
                fresh.copy(at.src_ids, at.dst_ids, stream=stream).synchronize()
        if number % 1009 == 0:
            store.save(self.folder / "in", self.pool, force=True)
            store.convert(self.folder / "in", self.folder / "out", kvbm.load("hnd"), force=True)
            store.load(self.folder / "out", layout=kvbm.load("universal")).close()
        if number % 5003 == 5002:
            self.check()

    def check(self) -> None:
        for at in self.scenes:
            for stream in self.streams if self.device not in ("host", "fake") else ():
                stream.synchronize()
            require_copied(at)

    def sample(self) -> dict[str, int]:
        """The resources that the process holds."""
        gc.collect()
        found = {
            "rss": int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE,
            "fds": sum(1 for _ in Path("/proc/self/fd").iterdir()),
            "threads": sum(1 for _ in Path("/proc/self/task").iterdir()),
        }
        if self.device == "fake":
            del found["rss"]  # the fake driver keeps what it records of events
            found |= dict(zip(LIVE, Fake().live, strict=True))
        elif self.device != "host":
            import torch

            free, total = torch.cuda.mem_get_info(self.device)
            found["device"] = total - free
        return found
