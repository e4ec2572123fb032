"""Packing: slots whose order does not depend on a layout, written by one rank and read by another."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest

import kvbm
from kvbm import Placement, Pool, Span, reshard
from kvbm.layout import spec
from kvbm.reshard import Cut, Packer

MODEL = kvbm.BlockShape(nl=3, no=2, nh=4, nt=4, hd=16, dtype="float16")


def memory(pool: Pool) -> list[np.ndarray]:
    """The bytes of every array."""
    found = []
    for array in pool.arrays:
        size = sum((n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)) + array.itemsize
        found.append(np.frombuffer((ctypes.c_ubyte * size).from_address(array.ctypes.data), np.uint8))
    return found


def pools(place: Placement, layout: str, tokens: int, rng: random.Random) -> list[Pool]:
    made = []
    for rank in range(place.world):
        pool = Pool.allocate(kvbm.load(layout), place.shape(rank), -(-tokens // place.nt) + 2)
        for part in memory(pool):
            part[:] = np.frombuffer(rng.randbytes(part.size), np.uint8)
        made.append(pool)
    return made


def slots_of(cut: Cut) -> dict[tuple[int, int], np.ndarray]:
    """A slot for every chunk."""
    found = {}
    for peer, chunks in cut.chunks.items():
        for number, chunk in enumerate(chunks):
            wide = np.zeros(chunk.size + 16, np.uint8)
            found[peer, number] = wide[-wide.ctypes.data % 16 :][: chunk.size]
    return found


def carry(made: reshard.Resharding, pools: list[list[Pool]], spans: list[list[Span]]) -> None:
    """Pack on every rank that sends, and unpack on every rank that receives."""
    sent = {}
    far = [side[0].origin for side in spans]
    for rank, (pool, span) in enumerate(zip(pools[0], spans[0], strict=True)):
        cut = Cut(Packer(made, rank, pool), span, origin=far[1])
        slots = slots_of(cut)
        cut.pack(slots, key="one").synchronize()
        sent |= {(rank, *at): slot for at, slot in slots.items()}
    for rank, (pool, span) in enumerate(zip(pools[1], spans[1], strict=True)):
        cut = Cut(Packer(made, rank, pool, side="dst"), span, origin=far[0])
        came = {(peer, number): sent[peer, rank, number] for peer, held in cut.chunks.items() for number in range(len(held))}
        cut.unpack(came, key="one").synchronize()


PLACEMENTS = {
    "tp4": ("tp4", {"h": "tp"}),
    "tp2": ("tp2", {"h": "tp"}),
    "tp8": ("tp8", {"h": "tp"}),
    "pp2": ("pp2", {"l": {"over": "pp", "bounds": [0, 1, 3]}}),
    "cp2": ("cp2 tp2", {"h": "tp", "t": "cp by 1"}),
    "one": ("tp1", {}),
}


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("src", "dst", "sizes", "layouts"),
    [
        ("tp4", "tp2", (4, 16), ("vllm/flash_attn_nhd", "vllm/flash_attn_hnd")),
        ("tp2", "tp4", (16, 4), ("universal", "nhd")),
        ("tp2", "tp8", (8, 8), ("vllm/LBHNC", "hnd")),
        ("pp2", "tp2", (6, 4), ("nhd", "universal")),
        ("one", "cp2", (4, 4), ("hnd", "nhd")),
        ("cp2", "one", (4, 8), ("nhd", "hf/dynamic_cache")),
    ],
)
def test_packed_and_unpacked_is_as_copied(src: str, dst: str, sizes: tuple[int, int], layouts: tuple[str, str]) -> None:
    rng = random.Random(f"{src}{dst}")
    ends = [
        Placement(PLACEMENTS[name][0], shard=PLACEMENTS[name][1], model=MODEL, nt=nt, name=name)
        for name, nt in zip((src, dst), sizes, strict=True)
    ]
    made = reshard.plan(*ends)
    senders, takers = (pools(place, layout, 40, rng) for place, layout in zip(ends, layouts, strict=True))
    wanted = pools(ends[1], layouts[1], 40, rng)
    for a, b in zip(wanted, takers, strict=True):
        for mine, other in zip(memory(a), memory(b), strict=True):
            mine[:] = other
    spans = [
        [Span(rng.sample(range(p.num_blocks), p.num_blocks), range(3, 37)) for p in side] for side in (senders, takers)
    ]
    copy = reshard.Local(made, senders, wanted)
    copy(*spans)
    carry(copy.made, [senders, takers], spans)
    for a, b in zip(wanted, takers, strict=True):
        assert all(np.array_equal(mine, other) for mine, other in zip(memory(a), memory(b), strict=True))


def test_digests_of_a_rank_whose_order_leaves_its_layer_out() -> None:
    """A stage of one layer: its digests are those of its layer in the model, as on the other side."""
    model = kvbm.BlockShape(nl=2, no=2, nh=1, nt=4, hd=16, dtype="float16")
    src = Placement("pp2", shard={"l": {"over": "pp", "bounds": [0, 1, 2]}}, model=model, nt=4, name="src")
    dst = Placement("tp1", model=model, nt=4, name="dst")
    made, rng = reshard.plan(src, dst), random.Random(5)
    senders = [Pool.allocate(spec.parse('order: "b o t d"'), src.shape(rank), 4) for rank in range(2)]
    for part in (part for pool in senders for part in memory(pool)):
        part[:] = np.frombuffer(rng.randbytes(part.size), np.uint8)
    [taker] = pools(dst, "nhd", 8, rng)
    carry(made, [senders, [taker]], [[Span([0, 1], range(8))] * 2, [Span([2, 3], range(8))]])
    parts = [pool.digest([0, 1], tokens=[0, 4], model=src.part(rank)) for rank, pool in enumerate(senders)]
    assert (parts[0] + parts[1]).tolist() == taker.digest([2, 3], tokens=[0, 4]).tolist()


@pytest.mark.sanitize
def test_a_slot_depends_on_no_layout() -> None:
    """Sixteen tokens of one head, written out by hand."""
    place = Placement("tp4", shard={"h": "tp"}, model=MODEL, nt=16, name="prefill")
    far = Placement("tp1", model=MODEL, nt=16, name="decode")
    made, shape = reshard.plan(place, far), place.shape(0)
    values = np.arange(shape.nl * 2 * 16 * 16, dtype=np.float16).reshape(3, 2, 16, 16)  # l o t d
    seen = []
    for name in ("vllm/flash_attn_nhd", "universal"):
        pool = Pool.allocate(kvbm.load(name), shape, 2)
        for layer in range(shape.nl):
            for o in range(2):
                for token in range(16):
                    entry, at = pool.resolved.address(1, l=layer, o=o, h=0, t=token, d=0)
                    memory(pool)[entry][at : at + 32] = values[layer, o, token].view(np.uint8)
        cut = Cut(Packer(made, 0, pool), Span([1], range(16)))
        slots = slots_of(cut)
        cut.pack(slots, key="one").synchronize()
        seen.append(slots[0, 0].tobytes()[: values.nbytes])
    assert seen[0] == seen[1] == values.tobytes()


def test_launches_are_shared_by_pools_that_lie_alike() -> None:
    """As by links to several engines; of another number of blocks, side or layout they are others."""
    place = Placement("tp4", shard={"h": "tp"}, model=MODEL, nt=16, name="prefill")
    made = reshard.plan(place, place)
    lanes = []
    for name, blocks, side in (
        ("universal", 4, "src"), ("universal", 4, "src"), ("universal", 5, "src"), ("universal", 4, "dst"), ("nhd", 4, "src"),
    ):  # fmt: skip
        packer = Packer(made, 0, Pool.allocate(kvbm.load(name), place.shape(0), blocks), side=side)
        lanes.append(packer.lane(made.messages[0], single=False))
    assert lanes[0].copies is lanes[1].copies and lanes[0].digests is lanes[1].digests
    assert len({id(lane.copies) for lane in lanes}) == 4


@pytest.mark.sanitize
def test_slots_and_pools_that_do_not_fit() -> None:
    src = Placement("tp2", shard={"h": "tp"}, model=MODEL, nt=4, name="prefill")
    dst = Placement("tp4", shard={"h": "tp"}, model=MODEL, nt=4, name="decode")
    made = reshard.plan(src, dst)
    cut = Cut(Packer(made, 0, Pool.allocate(kvbm.load("nhd"), src.shape(0), 4)), Span([0, 1], range(8)))
    slots = slots_of(cut)
    before, one = {at: slot.copy() for at, slot in slots.items()}, slots[1, 0]
    wide, readonly = np.zeros(one.size + 32, np.uint8), one.view()
    readonly.flags.writeable = False
    for given, message in (
        (one[:-1], "expected at least"),
        (np.zeros(10_000, np.uint8)[::2], "expected contiguous bytes"),
        (np.zeros(5_000, np.uint16), "expected contiguous bytes"),
        (wide[-wide.ctypes.data % 16 + 1 :][: one.size], "expected an address at a multiple of 16"),
        (readonly, "read-only"),
    ):
        with pytest.raises(kvbm.BindError, match=message):
            cut.pack({**slots, (1, 0): given}, key="one")
    assert all(np.array_equal(slots[at], before[at]) for at in slots)
    with pytest.raises(kvbm.BindError, match=r"prefill: rank 0: expected a pool of nl=3,no=2,nh=2,nt=4"):
        Packer(made, 0, Pool.allocate(kvbm.load("nhd"), MODEL, 4))
    opaque = Pool.allocate(kvbm.load("operational"), src.shape(0), 4)
    with pytest.raises(kvbm.PlanError, match="opaque group"):
        Packer(made, 0, opaque)


SMALL = kvbm.BlockShape(nl=1, no=2, nh=2, nt=4, hd=4, dtype="float32")
LAYOUT = "vllm/flash_attn_nhd"


def pack_and_unpack(src_span: kvbm.Span, dst_span: kvbm.Span, a: np.ndarray, b: np.ndarray) -> None:
    place = reshard.vllm(SMALL)
    src, dst = (kvbm.Pool(kvbm.load(LAYOUT), SMALL, array) for array in (a, b))
    carry(reshard.plan(place, place), [[src], [dst]], [[src_span], [dst_span]])


@pytest.mark.parametrize("origin", range(5))
def test_packer_where_tables_begin_at_other_positions(origin: int) -> None:
    a = np.arange(2 * 4 * 4 * 2 * 4, dtype=np.float32).reshape(2, 4, 4, 2, 4)
    b = np.zeros_like(a)
    pack_and_unpack(kvbm.Span([3, 1, 2], range(4, 12)), kvbm.Span([2, 3, 0], range(4, 12), origin), a, b)
    for token in range(4, 12):
        block, slot = divmod(token - origin, 4)
        assert np.array_equal(b[:, [2, 3, 0][block], slot], a[:, [3, 1, 2][token // 4], token % 4])


def test_packer_leaves_what_is_read_only() -> None:
    a, b = np.ones((2, 2, 4, 2, 4), np.float32), np.zeros((2, 2, 4, 2, 4), np.float32)
    b.flags.writeable = False
    with pytest.raises(kvbm.BindError, match="read-only"):
        pack_and_unpack(kvbm.Span([0], range(4)), kvbm.Span([0], range(4)), a, b)
    assert not b.any()


def test_a_span_of_ids_beyond_64_bits() -> None:
    with pytest.raises(kvbm.BindError, match="table: expected a list of block ids"):
        kvbm.Span(np.array([2**64 - 1], np.uint64), range(4))


def test_packers_of_what_is_none() -> None:
    model = kvbm.BlockShape(nl=2, no=2, nh=2, nt=4, hd=4, dtype="float32")
    place = Placement("tp1", model=model, name="here")
    made = reshard.plan(place, place)
    pool = Pool.allocate(kvbm.load("nhd"), model, 2)
    for given, match in (
        ((5, 0, pool), "made: expected a Resharding of kvbm.reshard.plan, got 5"),
        ((made, 0, 5), "here: rank 0: expected a kvbm.Pool, got int"),
        ((made, 0, pool.section(h=0)), "here: rank 0: expected a kvbm.Pool, got PoolSection"),
    ):
        with pytest.raises(kvbm.BindError, match=match):
            reshard.Packer(*given)
    for side in (None, 0, "both", np.zeros(2), ["src"]):
        with pytest.raises(kvbm.BindError, match="side: expected 'src' or 'dst', got"):
            reshard.Packer(made, 0, pool, side=side)  # type: ignore[arg-type]
    for sms in (0, -1, "x", 1.5, True, 1 << 31, 1 << 64):
        with pytest.raises(kvbm.BindError, match="max_sms: expected a number from 1 on"):
            reshard.Packer(made, 0, pool, max_sms=sms)  # type: ignore[arg-type]


def test_cuts_are_of_spans_that_fit() -> None:
    """Red: a table that is too short, and a block that does not exist, had sizes."""
    model = kvbm.BlockShape(nl=2, no=2, nh=2, nt=4, hd=4, dtype="float32")
    place = Placement("tp1", model=model, name="here")
    packer = Packer(reshard.plan(place, place), 0, Pool.allocate(kvbm.load("nhd"), model, 2))
    good = kvbm.Span([1], range(4))
    assert [chunk.size for chunk in Cut(packer, good).chunks[0]] == [512 + 64]
    for call, match in (
        (lambda: Cut(packer, kvbm.Span([0], range(8))), "here rank 0: tokens 0 to 7 need 2 blocks of 4, got a table of 1"),
        (lambda: Cut(packer, kvbm.Span([7], range(4))), r"here rank 0: table\[0\] is 7: expected 0 to 1"),
        (lambda: Cut(packer, 5), "span: expected a kvbm.Span, got 5"),
        (lambda: Cut(packer, good, origin="0"), "origin: expected a position"),
        (lambda: Cut(packer, good, origin=0.5), "origin: expected a position"),
        (lambda: Cut(packer, good).pack(None, key="k"), "slots: expected a mapping from"),
        (lambda: Cut(packer, good).pack([1], key="k"), "slots: expected a mapping from"),
    ):
        with pytest.raises(kvbm.BindError, match=match):
            call()
