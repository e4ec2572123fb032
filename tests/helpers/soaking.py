"""Two engines linked over wires with faults, again and again.  Each sequence arrives right, or ends in its expected error."""

from __future__ import annotations

import collections
import contextlib
import gc
import mmap
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import kvbm
from kvbm import DigestError, KvbmError, Pool, Span, TransferError, TransferTimeoutError, reshard, wire
from linking import close_all

#: The whole model, as [layer, K or V, block, token, head, dim] in the source and […, head, token, dim] in the destination.
MODEL = kvbm.BlockShape(nl=4, no=2, nh=4, nt=4, hd=16, dtype="uint16")
SRC_NT, DST_NT = 4, 8
SRC_BLOCKS, DST_BLOCKS = 24, 64

#: Sequences under way at a time, blocks of one at most, and seconds until one has failed: nothing here takes them.
WINDOW, BLOCKS, LIMIT = 12, 2, 30.0

#: Seconds until all slots of a life are free.
HELD = 30.0

#: Seconds after which what is left of a sequence is given up when a part of it has failed.
GRACE = 0.1

NOTES, PUTS = ("lose", "double", "delay", "swap"), ("bit", "word", "row", "chunk", "late")


def told(word: str) -> str:
    """The names under which faults of a wire are counted."""
    return "corrupt" if word in PUTS[:4] else word


@dataclass
class Sequence:
    """A running sequence: its handles, by side and rank, and the original contents of its destination's blocks."""

    key: str
    tokens: range
    origins: tuple[int, int]
    tables: tuple[np.ndarray, np.ndarray]
    handles: list[list[Any]]
    before: list[np.ndarray]
    aborted: bool


class Life:
    """Engines of two ranks each, from tp 2 to pp 2, until a wire is killed (within `kill` calls) or enough was sent."""

    def __init__(
        self, rng: random.Random, number: int, rate: float, counts: collections.Counter[str], kill: int
    ) -> None:
        self.rng, self.number, self.counts = rng, number, counts
        heads = reshard.Placement("tp2", shard={"h": "tp"}, model=MODEL, nt=SRC_NT, name="prefill")
        layers = reshard.Placement("pp2", shard={"l": "pp"}, model=MODEL, nt=DST_NT, name="decode")
        noise = np.random.default_rng(number)
        self.src = [noise.integers(0, 1 << 16, (4, 2, SRC_BLOCKS, SRC_NT, 2, 16), np.uint16) for _ in range(2)]
        self.dst = [noise.integers(0, 1 << 16, (2, 2, DST_BLOCKS, 4, DST_NT, 16), np.uint16) for _ in range(2)]
        self.truth = np.concatenate(self.src, axis=4)
        self.free = list(range(2, DST_BLOCKS))  # the first two are nobody's
        self.guard = [held[:, :, :2].copy() for held in self.dst]
        hub = wire.Hub()
        self.wires: list[list[wire.Faulty]] = []
        self.ends: list[list[reshard.Endpoint]] = []
        victim = (rng.randrange(2), rng.randrange(2), rng.randrange(50, kill)) if kill else None
        for side, (place, nt, held, layout) in enumerate(
            ((heads, SRC_NT, self.src, "vllm/flash_attn_nhd"), (layers, DST_NT, self.dst, "vllm/flash_attn_hnd"))
        ):
            self.wires.append([])
            self.ends.append([])
            for rank in range(2):
                script = wire.random_faults(rng.randrange(1 << 30), rate, (*NOTES, *PUTS), 20_000)
                if victim is not None and victim[:2] == (side, rank):
                    script.append(wire.Fault("kill", victim[2]))
                self.wires[side].append(wire.faulty(wire.memory(f"{side}/{rank}", hub), script))
                shape = place.shape(rank)
                assert shape.nt == nt
                pool = Pool(kvbm.load(layout), shape, list(held[rank]), num_blocks=held[rank].shape[2])
                self.ends[side].append(
                    reshard.Endpoint(
                        place.name, place, rank, pool, wire=self.wires[side][rank], chunk_bytes=1 << 12, slots=5
                    )
                )
        cards = [[end.card() for end in ends] for ends in self.ends]
        self.links = [[end.meet(cards[1 - side]) for end in self.ends[side]] for side in (0, 1)]
        self.going: collections.deque[Sequence] = collections.deque()
        self.sent = 0

    @property
    def killed(self) -> bool:
        return any(one.counts["kill"] for side in self.wires for one in side)

    def begin(self) -> None:
        """Start a sequence of some blocks: pushed or pulled, with either side first, some in two windows of layers."""
        rng = self.rng
        blocks = rng.randint(1, BLOCKS)
        origins = DST_NT * rng.randrange(2), DST_NT * rng.randrange(2)  # of the first token of each side's table
        start = max(origins) + rng.randrange(3)
        tokens = range(start, start + rng.randint(1, DST_NT * blocks))
        needed = [-(-(tokens.stop - origin) // nt) for origin, nt in zip(origins, (SRC_NT, DST_NT), strict=True)]
        src = np.array(rng.sample(range(SRC_BLOCKS), needed[0]))
        dst = np.array([self.free.pop(rng.randrange(len(self.free))) for _ in range(needed[1])])
        before = [held[:, :, dst].copy() for held in self.dst]
        key = f"{self.number}/{self.sent}"
        pulls = rng.random() < 0.5
        aborted = rng.random() < 0.01
        windows = [range(4)] if rng.random() < 0.7 else [range(1), range(1, 4)]
        handles: list[list[Any]] = [[], []]
        calls = [
            (0, self.links[0][rank].offer if pulls else self.links[0][rank].send, src, {"layers": window})
            for rank in range(2)
            for window in windows
        ]
        verify = {"verify": rng.choice(("after", "before"))}
        calls += [(1, self.links[1][rank].receive, dst, verify) for rank in range(2)]
        if rng.random() < 0.5:
            calls.reverse()  # handles of a side stay in the order of its ranks below
        for side, call, table, options in calls:
            handles[side].append(call(key, Span(table, tokens, origins[side]), timeout=LIMIT, **options))
        if calls[0][0] == 1:
            handles[1].reverse()
        self.going.append(Sequence(key, tokens, origins, (src, dst), handles, before, aborted))
        if aborted:
            rng.choice(handles[rng.randrange(2)]).abort()
        self.sent += 1

    def finish(self) -> None:
        """Wait for the oldest sequence, and check it."""
        one = self.going.popleft()
        every = [handle for side in one.handles for handle in side]
        since = (
            None  # when the first one had failed: an engine gives up the rest, of whom some may wait for their deadline
        )
        while not all(handle.has_ended for handle in every):
            self.release()
            for handle in every:
                with contextlib.suppress(KvbmError):
                    handle.synchronize(0.02)
            if since is None and any(handle.has_ended and handle.has_failed for handle in every):
                since = time.monotonic()
            if since is not None and time.monotonic() > since + GRACE:
                one.aborted = True
                for handle in every:
                    handle.abort()
        errors: list[list[KvbmError | None]] = [[], []]
        for side, handles in enumerate(one.handles):
            for handle in handles:
                try:
                    handle.query()
                    errors[side].append(None)
                except KvbmError as error:
                    errors[side].append(error)
        found = [error for side in errors for error in side if error is not None]
        for error in found:
            self.require_stated(one, error)
        for rank, error in enumerate(errors[1]):
            if error is None:
                self.compare(one, rank)
                self.counts["arrivals right"] += 1
        self.counts["transfers"] += 1
        self.counts["stated error" if found else "right"] += 1
        for error in found:
            self.counts[type(error).__name__] += 1
        self.free += one.tables[1].tolist()

    def require_stated(self, one: Sequence, error: KvbmError) -> None:
        """Require an error that these faults may cause: three wrong chunks, an abort, a killed peer."""
        assert isinstance(error, TransferError) and not isinstance(error, TransferTimeoutError), (one.key, error)
        assert isinstance(error, DigestError) or one.aborted or self.killed, (one.key, error)
        assert not isinstance(error, DigestError) or "3 times: " in str(error), (one.key, error)

    def compare(self, one: Sequence, rank: int) -> None:
        """Compare every byte of the blocks: the sent data at its tokens, and the original contents at others."""
        src, dst = one.tables
        got = self.dst[rank][:, :, dst]
        want = one.before[rank]
        for token in one.tokens:
            (a, s), (b, t) = divmod(token - one.origins[0], SRC_NT), divmod(token - one.origins[1], DST_NT)
            want[:, :, b, :, t] = self.truth[2 * rank : 2 * rank + 2, :, src[a], s]
        assert np.array_equal(got, want), (
            f"{one.key}, {one.tokens}: rank {rank} holds other bytes than it was sent: {np.argwhere(got != want)[:4].tolist()}"
        )
        self.counts["bytes compared"] += got.nbytes

    def release(self) -> None:
        """Send the late puts now, on the endpoints' threads, which own the wires."""
        for ends, wires in zip(self.ends, self.wires, strict=True):
            for end, one in zip(ends, wires, strict=True):
                if one._late:
                    end.submit(lambda one=one: one.release())  # type: ignore[misc]

    def end(self) -> None:
        """Require that all slots are free, no transfer is remembered, and nothing was written outside of sendings."""
        limit = time.monotonic() + HELD
        every = [end for side in self.ends for end in side]
        while any(self.held(end) for end in every):
            assert time.monotonic() < limit, f"life {self.number}: slots are held: {[self.held(end) for end in every]}"
            self.release()
            time.sleep(0.002)
        for rank in range(2):
            assert np.array_equal(self.dst[rank][:, :, :2], self.guard[rank])
        assert np.array_equal(self.truth, np.concatenate(self.src, axis=4))
        corrupt = 0
        for one in [one for side in self.wires for one in side]:
            corrupt += sum(one.counts[word] for word in PUTS[:4])
            for word, count in one.counts.items():
                self.counts[told(word)] += count
        wrong = sum(int(link.stats()["chunks_wrong"]) for side in self.links for link in side)
        assert wrong <= corrupt, f"life {self.number}: {wrong} chunks were wrong, and {corrupt} damaged"
        for name in ("chunks_sent", "chunks_received", "chunks_wrong", "notes_again", "stalls"):
            self.counts[name] += sum(int(link.stats()[name]) for side in self.links for link in side)
        self.counts["lives"] += 1
        close_all(every)

    @staticmethod
    def held(end: reshard.Endpoint) -> tuple[int, ...]:
        """Slots per direction that are not free, quarantined slots, flows, and transfers."""
        ring = end.ring
        links = end._links
        return tuple(
            count
            for count in (
                ring.sends - ring.free(sends=True),
                ring.takes - ring.free(sends=False),
                len(ring.quarantined),
                sum(len(link._flows) + len(link._inflows) for link in links),
                sum(len(link.handles) for link in links),
            )
            if count
        )


class Links:
    """Transfers, one life after the other."""

    def __init__(self, seed: int = 1, rate: float = 0.01) -> None:
        self.rng, self.rate = random.Random(seed), rate
        self.counts: collections.Counter[str] = collections.Counter()

    def life(self, most: int = 400) -> int:
        """Run engines from their connection to their end; return the number of their transfers."""
        rng = self.rng
        one = Life(rng, self.counts["lives"], self.rate, self.counts, kill=12 * most if rng.random() < 0.9 else 0)
        behind = 0  # transfers begun since the wire was killed
        try:
            while one.going or (one.sent < most and behind < 4):
                while len(one.going) < WINDOW and one.sent < most and behind < 4:
                    one.begin()
                    behind += one.killed
                one.finish()
            one.end()
        finally:
            close_all(end for side in one.ends for end in side)
        return one.sent

    def sample(self) -> dict[str, int]:
        """Resources of the process between two lives."""
        gc.collect()
        return {
            "rss": int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE,
            "fds": sum(1 for _ in Path("/proc/self/fd").iterdir()),
            "threads": sum(1 for _ in Path("/proc/self/task").iterdir()),
        }
