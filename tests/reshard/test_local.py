"""Executed reshardings: every byte against `reshard_oracle`, edges of ranges, bad input, mutants, threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import processes
import reshard_oracle
from few import few, in_full
from kvbm import BindError, BlockShape, CoverageError, Placement, PlanError, Pool, Span, load, reshard
from kvbm.layout import spec
from kvbm.reshard import local, messages, sequence, strips
from linking import gpu_memory
from reshard_oracle import on_host, random_case

# ---- against the oracle ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", few(range(0, 150, 10), 6))
def test_every_byte(first: int) -> None:
    for seed in range(first, first + 10):
        on_host(random_case(seed))


@pytest.mark.full
@pytest.mark.parametrize("first", range(1000, 11_000, 250))
def test_every_byte_of_many(first: int) -> None:
    """Ten thousand cases, which take some minutes."""
    for seed in range(first, first + 250):
        on_host(random_case(seed, most_ranks=12))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("first", range(20_000, 21_000, 250))
def test_every_byte_on_a_gpu(first: int) -> None:
    """A thousand cases; memory is copied to the GPU and back once per case."""
    import torch

    stream = torch.cuda.Stream()
    for seed in range(first, first + 250):
        run = reshard_oracle.Run(random_case(seed), *gpu_memory())
        torch.cuda.synchronize()
        for done in run.call(stream=stream):
            done.synchronize()
        run.check(lambda buffer: buffer.cpu().numpy())


@pytest.mark.parametrize("kind", ["device", "pinned"])
def test_every_byte_through_the_fake_driver(fake_gpu: processes.FakeDriver, kind: str) -> None:
    fake_gpu("reshards.every_byte", 30_000, 20, kind)


def test_streams_of_other_gpus_are_found_before_a_byte_is_written(fake_gpu: processes.FakeDriver) -> None:
    fake_gpu("reshards.streams_of_other_gpus", FAKE_DEVICES="2")


@pytest.mark.parametrize("clear_tail", [False, True])
@pytest.mark.parametrize(("small", "large", "most"), [in_full((16, 64, 130)), (16, 64, 70), (64, 16, 70), (48, 32, 70), (5, 7, 40)])
def test_every_range(small: int, large: int, most: int, clear_tail: bool) -> None:
    """All ranges [a, b) up to `most`, each a sequence with separate blocks in the destination: one byte per token."""
    model = BlockShape(nl=1, no=1, nh=1, nt=1, hd=1, dtype="uint8")
    ranges = [range(a, b) for b in range(1, most + 1) for a in range(b)]
    entries = -(-most // large)
    places = [Placement("tp1", model=model, nt=nt, name=name) for nt, name in ((small, "src"), (large, "dst"))]
    pools = [
        Pool.allocate(load("nhd"), place.shape(0), blocks)
        for place, blocks in zip(places, (-(-most // small), entries * len(ranges)), strict=True)
    ]
    for array in pools[1].arrays:
        array[...] = 255
    for index, array in enumerate(pools[0].arrays):  # an array a block
        array[...] = np.arange(index * small, (index + 1) * small).reshape(array.shape) % 251
    source = np.concatenate([array.reshape(-1) for array in pools[0].arrays])
    tables = np.arange(entries * len(ranges)).reshape(-1, entries)
    copy = reshard.Local(reshard.plan(*places), [pools[0]], [pools[1]])
    src = [[Span(range(pools[0].num_blocks), tokens) for tokens in ranges]]
    dst = [[Span(table, tokens) for table, tokens in zip(tables, ranges, strict=True)]]
    copy(src, dst, clear_tail=clear_tail)
    got = np.concatenate([array.reshape(-1) for array in pools[1].arrays]).reshape(len(ranges), -1)
    position = np.arange(entries * large)
    first, behind = (np.array([getattr(tokens, at) for tokens in ranges])[:, None] for at in ("start", "stop"))
    content = np.resize(source, entries * large)  # more than there is, of which nothing is in a range
    want = np.where((position >= first) & (position < behind), content, 255)
    if clear_tail:
        want = np.where((position >= behind) & (position < -(-behind // large) * large), 0, want)
    assert np.array_equal(got, want)


@pytest.mark.parametrize("shorter", [False, True])
def test_the_last_block_is_cleared_on_every_rank_that_shares_the_tokens(shorter: bool) -> None:
    """Turns of DCP and PCP, blocks and ranges of all kinds; one byte per token.  The oracle counts tokens one by one.

    `shorter`: a rank without a token in the last block leaves it out of its table; then nothing of that rank is cleared for it.
    """
    model = BlockShape(nl=1, no=1, nh=1, nt=1, hd=1, dtype="uint8")
    empty_handed = 0
    for over, every, nt in ((2, 1, 4), (2, 4, 4), (2, 8, 4), (3, 1, 2), (3, 2, 2), (4, 1, 3), (2, 2, 4), (2, 1, 1)):
        src = Placement("tp1", model=model, nt=4, name="src")
        dst = Placement({"dcp": over}, shard={"t": f"dcp by {every}"}, model=model, nt=nt, name="dst")
        made, most = reshard.plan(src, dst), 2 * over * max(nt, every) + 3
        [source] = pools_of(src, blocks=-(-most // 4))
        content = np.concatenate([array.reshape(-1) for array in source.arrays])
        pools = [Pool.allocate(load("nhd"), dst.shape(rank), 2 * most) for rank in range(over)]
        copy = reshard.Local(made, [source], pools)
        for stop in range(1, most):
            for tokens in {range(stop), range(stop // 2, stop), range(stop - 1, stop)}:
                homes = [[x for x in range(stop) if x // every % over == rank] for rank in range(over)]
                blocks = max(-(-len(home) // nt) for home in homes)
                tables, want = [], []
                for home in homes:
                    table = [2 * i + 1 for i in range(-(-len(home) // nt) if shorter else blocks)]
                    empty_handed += len(home) <= (blocks - 1) * nt
                    row = np.full(2 * most * nt, 255, np.uint8)
                    for slot in range(len(table) * nt):
                        at = table[slot // nt] * nt + slot % nt
                        if slot >= len(home):
                            row[at] = 0
                        elif home[slot] in tokens:
                            row[at] = content[home[slot]]
                    tables.append(Span(table, tokens))
                    want.append(row)
                for pool in pools:
                    for array in pool.arrays:
                        array[...] = 255
                copy(Span(range(source.num_blocks), tokens), tables, clear_tail=True)
                for rank, (pool, row) in enumerate(zip(pools, want, strict=True)):
                    got = np.concatenate([array.reshape(-1) for array in pool.arrays])
                    assert np.array_equal(got, row), (over, every, nt, tokens, rank)
    assert empty_handed > 100


# ---- bad input: refused, and nothing is written ----------------------------------------------------------------------

MODEL = BlockShape(nl=4, no=2, nh=4, nt=16, hd=8, dtype="float16")


def engine(mesh: str, nt: int, name: str, **options: Any) -> Placement:
    options = {"shard": {"h": "tp"}, "model": MODEL, **options}
    return Placement(mesh, nt=nt, name=name, **options)


def pools_of(place: Placement, layout: str = "nhd", blocks: int = 8) -> list[Pool]:
    made = [Pool.allocate(load(layout), place.shape(rank), blocks) for rank in range(place.world)]
    for number, pool in enumerate(made):
        for index, array in enumerate(pool.arrays):
            data = np.random.default_rng(100 * number + index).integers(0, 256, array.nbytes, np.uint8)
            array.view(np.uint8)[...] = data.reshape(array.view(np.uint8).shape)
    return made


def bytes_of(pools: list[Pool]) -> list[bytes]:
    return [array.tobytes() for pool in pools for array in pool.arrays]


class Pair:
    """tp 4, blocks of 16 → tp 2, blocks of 64: two messages to each rank."""

    def __init__(self, **options: Any) -> None:
        self.src, self.dst = engine("tp4", 16, "prefill", **options), engine("tp2", 64, "decode", **options)
        self.pools = pools_of(self.src), pools_of(self.dst)
        self.copy = reshard.Local(reshard.plan(self.src, self.dst), *self.pools)


GOOD = Span([5, 2, 7], range(40)), Span([3], range(40))


def by_rank(*spans: Any) -> list[Any]:
    return list(spans)


@pytest.mark.parametrize(
    ("src", "dst", "options", "match"),
    [
        (Span([5, 2], range(40)), GOOD[1], {}, "prefill rank 0: tokens 0 to 39 need 3 blocks of 16, got a table of 2"),
        (GOOD[0], by_rank(GOOD[1], Span([], range(40))), {}, "decode rank 1: tokens 0 to 39 need 1 blocks of 64, got a table of 0"),
        (Span([5, 8, 7], range(40)), GOOD[1], {}, r"prefill rank 0: table\[1\] is 8: expected 0 to 7, or -1 for no block"),
        (GOOD[0], by_rank(GOOD[1], Span([-2], range(40))), {}, r"decode rank 1: table\[0\] is -2: expected 0 to 7"),
        (
            Span(range(8), range(100)), by_rank(Span([3, 1], range(100)), Span([3, 3], range(100))), {},
            "decode rank 1: block 3 would be written twice: the table contains it twice",
        ),
        (
            [[GOOD[0], GOOD[0]]] * 4, [[GOOD[1], Span([4], range(40))], [GOOD[1], GOOD[1]]], {},
            "decode rank 1: block 3 would be written twice: two sequences have it in their tables",
        ),
        (
            # Of the first sequence whole units, of the second single tokens behind them.
            [[Span([0], range(16)), Span([1, 2], range(20))]] * 4,
            [[Span([0], range(16)), Span([1], range(20))], [Span([0], range(16)), Span([0], range(20))]], {},
            "decode rank 1: block 0 would be written twice: two sequences",
        ),
        (
            # Of the first sequence tokens 0 to 15, of the second 16 to 31: apart, but for the first one's tail.
            [[Span([0], range(16)), Span([1, 2], range(16, 32))]] * 4,
            [[Span([0], range(16)), Span([0], range(16, 32))]] * 2, {"clear_tail": True},
            "decode rank 0: block 0 would be written twice: two sequences",
        ),
        (GOOD[0], by_rank(GOOD[1], Span([3], range(41))), {}, r"tokens: range\(0, 40\) in the source, range\(0, 41\) in the dest"),
        (GOOD[0], [[GOOD[1]], [GOOD[1], GOOD[1]]], {}, "expected as many sequences for every rank, got 1, 1, 1, 1, 1, 2"),
        ([GOOD[0]] * 3, GOOD[1], {}, "source: expected one kvbm.Span for all ranks, or 4, one per rank.*, got 3"),
        (GOOD[0], None, {}, "destination: expected one kvbm.Span for all ranks, or 2.*, got None"),
        (GOOD[0], [[GOOD[1]], [[3]]], {}, "destination: expected kvbm.Span, got list"),
        (*GOOD, {"layers": range(2, 5)}, r"layers: expected a range within 0 to 4 of the model, got range\(2, 5\)"),
        (*GOOD, {"layers": range(0, 4, 2)}, "layers: expected a range"),
        (*GOOD, {"layers": 3}, "layers: expected a range within 0 to 4 of the model, got 3"),
        (*GOOD, {"stream": 5}, "stream, wait: pools are on the CPU"),
        (*GOOD, {"wait": 5}, "stream, wait: pools are on the CPU"),
    ],
)  # fmt: skip
def test_bad_calls_are_refused_before_a_byte_is_written(
    src: Any, dst: Any, options: dict[str, Any], match: str
) -> None:
    pair = Pair()
    before = [bytes_of(pools) for pools in pair.pools]
    with pytest.raises(BindError, match=match):
        pair.copy(src, dst, **options)
    assert [bytes_of(pools) for pools in pair.pools] == before
    pair.copy(*GOOD)  # and the next call works
    assert bytes_of(pair.pools[1]) != before[1]


@pytest.mark.parametrize(("side", "rank"), [(0, 0), (0, 3), (1, 0), (1, 1)])
def test_a_closed_pool_is_found_before_a_byte_is_written(side: int, rank: int) -> None:
    pair, spans = Pair(), (Span([5, 2], range(32)), Span([3], range(32)))
    before = bytes_of(pair.pools[1])
    arrays = [array for pool in pair.pools[1] for array in pool.arrays]
    pair.pools[side][rank].close()
    with pytest.raises(BindError, match="is closed"):
        pair.copy(*spans)
    assert [array.tobytes() for array in arrays] == before


def test_a_read_only_destination_is_found_before_a_byte_is_written() -> None:
    pair = Pair()
    arrays = [np.zeros(a.shape, a.dtype) for a in pair.pools[1][1].arrays]
    last = Pool(load("nhd"), pair.dst.shape(1), arrays)
    copy = reshard.Local(reshard.plan(pair.src, pair.dst), pair.pools[0], [pair.pools[1][0], last])
    before = bytes_of(pair.pools[1])
    for array in arrays:
        array.flags.writeable = False
    with pytest.raises(BindError, match="prefill → decode: decode rank 1: the pool is read-only"):
        copy(*GOOD)
    assert bytes_of(pair.pools[1]) == before and not any(array.any() for array in arrays)


def refit(pools: list[Pool], **options: Any) -> list[Any]:
    """The last rank's pool with another shape."""
    last = pools[-1]
    return [*pools[:-1], Pool.allocate(last.layout, replace(last.shape, **options), last.num_blocks)]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda s, d: (s[:3], d), "prefill: expected 4 source pools, one per rank of tp4, got 3"),
        (lambda s, d: (s, [*d, d[0]]), "decode: expected 2 destination pools, one per rank of tp2, got 3"),
        (lambda s, d: (s, [d[0], None]), "decode: rank 1: expected a kvbm.Pool, got NoneType"),
        (lambda s, d: (refit(s, nh=2), d), "prefill: rank 3: expected a pool of nl=4,no=2,nh=1,.*, got nl=4,no=2,nh=2"),
        (lambda s, d: (s, refit(d, nt=32)), "decode: rank 1: expected a pool of .*nt=64.*, got .*nt=32"),
        (lambda s, d: (s, refit(d, dtype="bfloat16")), "decode: rank 1: expected a pool of .*float16, got .*bfloat16"),
        (lambda s, d: (s, [d[0], d[0]]), "ranks 0 and 1 of decode share memory"),
        (lambda s, d: (s, [d[0], Pool(d[0].layout, d[0].shape, d[0].arrays)]), "ranks 0 and 1 of decode share memory"),
        (
            lambda s, d: (s, [d[0], Pool(d[0].layout, d[0].shape, [*d[1].arrays[:-1], d[0].arrays[0]])]),
            "ranks 0 and 1 of decode share memory",
        ),
    ],
)
def test_pools_that_do_not_fit(change: Callable[..., Any], match: str) -> None:
    src, dst = engine("tp4", 16, "prefill"), engine("tp2", 64, "decode")
    with pytest.raises(BindError, match=match):
        reshard.Local(reshard.plan(src, dst), *change(pools_of(src), pools_of(dst)))


def test_a_rank_that_holds_no_layer_has_no_pool() -> None:
    places = [
        Placement(mesh, shard={"l": "pp"}, model=MODEL, nt=16, layers=[0, 1], name=name)
        for mesh, name in (("pp2", "src"), ("pp1", "dst"))
    ]
    src, dst = [*pools_of(replace_world(places[0])), None], pools_of(places[1])
    span = Span([2, 1], range(20))
    reshard.Local(reshard.plan(*places), src, dst)(span, span)
    assert src[0].arrays[2 * 2 * 2].tobytes() == dst[0].arrays[2 * 2 * 2].tobytes()  # of block 2
    reshard.Local(reshard.plan(*reversed(places)), dst, src)(span, span, clear_tail=True)
    with pytest.raises(BindError, match="src: rank 1: expected None, as it holds none of the layers 0–1"):
        reshard.Local(reshard.plan(*places), [src[0], dst[0]], dst)


def replace_world(place: Placement) -> Placement:
    """The first stage alone."""
    return Placement("pp1", model=place.model, nt=place.nt, layers=[0, 1], name=place.name)


def test_one_memory_on_both_sides() -> None:
    """Heads are exchanged between two ranks in place: with other blocks, or refused before the first message is copied."""
    place = engine("tp2", 16, "engine")
    pools = pools_of(place)
    aliases = [Pool(pool.layout, pool.shape, pool.arrays) for pool in pools]
    for dst in (pools, aliases):
        copy = reshard.Local(reshard.plan(place, place), pools, dst)
        before = bytes_of(pools)
        for theirs in ([3, 4], [4, 5]):
            spans = (
                [Span([1, 2], range(30)), Span([4, 2], range(30))],
                [Span([6, 5], range(30)), Span(theirs, range(30))],
            )
            with pytest.raises(
                BindError, match="block 4 of engine rank 1, whose pool is that of engine rank 1, would be both"
            ):
                copy(*spans)
            assert bytes_of(pools) == before
        copy([Span([1, 2], range(30))] * 2, [Span([6, 5], range(30)), Span([3, 4], range(30))])
        assert pools[1].arrays[1 * 8].tobytes() == pools[1].arrays[3 * 8].tobytes()


def test_other_ranks_pools_as_destinations() -> None:
    """The second message would read what the first has written, although no message has the same pool on both sides."""
    model = replace(MODEL, nh=2)
    src = Placement("tp2", shard={"h": "tp"}, model=model, nt=16, name="src")
    pools = pools_of(src)
    copy = reshard.Local(reshard.plan(src, src), pools, pools[::-1])
    before = bytes_of(pools)
    with pytest.raises(
        BindError, match="block 1 of src rank 1, whose pool is that of src rank 0, would be both read and"
    ):
        copy(Span([1], range(9)), Span([1], range(9)))
    assert bytes_of(pools) == before
    copy(Span([1], range(9)), Span([2], range(9)))
    # Half of a block is read, the other half of it written.
    copy(Span([3], range(8)), Span([4], range(8)))
    with pytest.raises(BindError, match="whose pool is that of src rank"):
        copy(Span([3], range(8)), Span([3], range(8)), clear_tail=True)


def test_pools_that_overlap_in_part() -> None:
    src, dst = engine("tp2", 16, "src"), engine("tp2", 16, "dst")
    pools = pools_of(src)
    other = Pool(pools[0].layout, pools[0].shape, [*pools[1].arrays[8:], *pools[0].arrays[:8]])
    with pytest.raises(BindError, match="overlap in memory"):
        reshard.Local(reshard.plan(src, dst), pools, [other, Pool.allocate(other.layout, other.shape, 8)])


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: Span([[1]], range(3)), "table: expected a list of block ids"),
        (lambda: Span([1.5], range(3)), "table: expected a list of block ids"),
        (lambda: Span([True, 2], range(3)), "table: expected a list of block ids"),
        (lambda: Span((7, np.False_, 2), range(3)), "table: expected a list of block ids"),
        (lambda: Span(np.ma.array([3, 2], mask=[False, True]), range(3)), "table: expected a list of block ids"),
        (lambda: Span([1], range(0, 4, 2)), "tokens: expected range"),
        (lambda: Span([1], 7), "tokens: expected range"),
        (lambda: Span([1], range(-1, 4)), "tokens: expected range"),
        (lambda: Span([1], range(3, 9), origin=4), "origin: expected a position from 0 to the first token's, 3, got 4"),
        (lambda: Span([1], range(3, 9), origin=-1), "origin: expected a position"),
        (lambda: Span([1], range(3, 9), origin=1.5), "origin: expected a position"),
        (lambda: Span([1], range(3, 9), origin="0"), "origin: expected a position"),
        (lambda: Span([1], range(3, 9), origin=np.zeros(2)), "origin: expected a position"),
        *(
            (lambda at=at: Span([1], range(at, at + 4)), "tokens: expected range.* below 2")
            for at in (2**48 - 3, 2**63)
        ),
    ],
)
def test_bad_spans(call: Callable[[], Span], match: str) -> None:
    with pytest.raises(BindError, match=match):
        call()


def test_an_origin_inside_a_turn() -> None:
    src = Placement("cp2", shard={"t": "cp by 4"}, model=MODEL, nt=16, name="src")
    dst = Placement("cp1", model=MODEL, nt=16, name="dst")
    pools = pools_of(src), pools_of(dst)
    copy = reshard.Local(reshard.plan(src, dst), *pools)
    before = bytes_of(pools[1])
    with pytest.raises(BindError, match="src rank 0: origin 12: expected a multiple of 8, a whole turn"):
        copy(Span([1, 2], range(20, 40), origin=12), Span([1, 2, 3], range(20, 40)))
    assert bytes_of(pools[1]) == before
    copy(Span([1, 2], range(20, 40), origin=16), Span([1, 2, 3], range(20, 40)))


def test_padding_of_tables_is_not_looked_at() -> None:
    """Engines' tables are longer than a sequence: entries after its last block and before its first are ignored."""
    pair = Pair()
    pair.copy(Span([99, 5, 2, 0, 0, 0, 1 << 40], range(20, 40)), Span([3, 3, 3, -7], range(20, 40)))


@pytest.mark.parametrize(
    ("name", "other"),
    [("operational", "operational"), ("operational", "operational_nhd"), ("operational_nhd", "operational")],
)
def test_a_message_that_cuts_an_opaque_group(name: str, other: str) -> None:
    """Whole blocks of all heads can be sent; single heads or tokens cannot."""
    one = [engine("tp2", 16, "src"), engine("tp2", 16, "dst")]
    pools = pools_of(one[0], name), pools_of(one[1], other)
    copy = reshard.Local(reshard.plan(*one), *pools)
    copy(Span([5, 2], range(32)), Span([3, 4], range(32)))
    assert pools[0][1].arrays[5].tobytes() == pools[1][1].arrays[3].tobytes()
    before = bytes_of(pools[1])
    for options in ({}, {"clear_tail": True}):
        with pytest.raises(PlanError, match=r"operational.*the opaque group \{t h d\}"):
            copy(Span([5, 2], range(31)), Span([3, 4], range(31)), **options)
        assert bytes_of(pools[1]) == before
    for src, dst in ((engine("tp1", 16, "src"), one[1]), (engine("tp2", 24, "src"), one[1])):
        with pytest.raises(PlanError, match=r"the opaque group|does not promise the order"):
            reshard.Local(reshard.plan(src, dst), pools_of(src, name), pools_of(dst, other))


def test_a_scale_that_the_tokens_of_a_block_share() -> None:
    """Whole blocks of equal size can be sent; a scale of 64 tokens is not one of 16, nor of 15 of them."""
    layout = spec.parse(
        'order: "[b] h l o <data scale>"\n'
        'planes: {data: {order: "t d", dtype: int8}, scale: {dtype: float32, shared: t}}\n',
        name="scaled",
    )
    src, other = engine("tp4", 16, "src"), engine("tp2", 64, "dst")
    pools = [[Pool.allocate(layout, place.shape(r), 8) for r in range(place.world)] for place in (src, src, other)]
    with pytest.raises(PlanError, match="plane 'scale' has one element for 64 tokens, which units would share"):
        reshard.Local(reshard.plan(src, other), pools[0], pools[2])
    copy = reshard.Local(reshard.plan(src, src), pools[0], pools[1])
    copy(Span([1, 2], range(32)), Span([4, 3], range(32)))
    before = bytes_of(pools[1])
    with pytest.raises(PlanError, match="plane 'scale' has one element for 16 tokens, which units would share"):
        copy(Span([1, 2], range(31)), Span([4, 3], range(31)))
    assert bytes_of(pools[1]) == before


def test_placements_of_other_models() -> None:
    for change in ({"nl": 5}, {"no": 1}, {"nh": 2}, {"hd": 16}, {"dtype": "bfloat16"}):
        other = engine("tp2", 64, "decode", model=replace(MODEL, **change))
        with pytest.raises(PlanError, match=r"in one model, .* in the other"):
            reshard.plan(engine("tp4", 16, "prefill"), other)
    with pytest.raises(CoverageError, match="decode rank 0: layers: 2 of 4 covered: no rank of prefill sends 2–3"):
        reshard.plan(engine("tp4", 16, "prefill", layers=[0, 1]), engine("tp2", 64, "decode"))


# ---- the oracle can fail: mutants ------------------------------------------------------------------------------------


def _mutate(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make one thing wrong."""
    pair_up, placed, fitting = local.pair_up, local.Local._made, local.Local._fitting

    def pairs(change: Callable[[sequence.Pairs, Any], sequence.Pairs]) -> None:
        monkeypatch.setattr(local, "pair_up", lambda *given: change(pair_up(*given), given))

    match name:
        case "a head of a replica by rank % heads":
            monkeypatch.setattr(messages, "prove", lambda *_: None)
            monkeypatch.setattr(messages._Replicas, "choose", lambda self, rank: (rank + 1) % self._worlds[0])
            monkeypatch.setattr(messages._Replicas, "add", lambda *_: None)
        case "a unit too few":
            pairs(lambda found, _: found._replace(src_units=found.src_units[1:], dst_units=found.dst_units[1:]))
        case "a token too few":
            pairs(lambda found, _: found._replace(src_tokens=found.src_tokens[1:], dst_tokens=found.dst_tokens[1:]))
        case "everything twice":
            work = local.Local._listed
            monkeypatch.setattr(
                local.Local,
                "_listed",
                lambda self, *given: [one for each in work(self, *given) for one in (each, each)],
            )
        case "the first edge token also as a unit's":
            pairs(
                lambda found, given: (
                    found
                    if not len(found.src_units)
                    else found._replace(
                        src_tokens=np.append(found.src_tokens, found.src_units[:1] * given[0].src_slots),
                        dst_tokens=np.append(found.dst_tokens, found.dst_units[:1] * given[0].dst_slots),
                    )
                )
            )
        case "units of the source in the other order":
            pairs(lambda found, _: found._replace(src_units=found.src_units[::-1]))
        case "the distance of origins is not looked at":
            monkeypatch.setattr(local.Local, "_fitting", lambda self, _: fitting(self, 0))
        case "origins of the first ranks alone":
            monkeypatch.setattr(
                local.Local, "_listed",
                lambda self, src, dst, layers, listed=local.Local._listed: listed(
                    self, [[_at(one, src[0][i].origin) for i, one in enumerate(row)] for row in src], dst, layers
                ),
            )  # fmt: skip
        case "null blocks of the source are block 0":
            pairs(lambda found, _: found._replace(src_units=np.maximum(found.src_units, 0)))
        case "a tail of a slot too few":
            tail = sequence.Rank.tail
            monkeypatch.setattr(sequence.Rank, "tail", lambda self, span: tail(self, span)[:-1])
        case "a tail of a slot too many":
            tail = sequence.Rank.tail
            monkeypatch.setattr(
                sequence.Rank, "tail", lambda self, span: np.append(tail(self, span)[:1] - 1, tail(self, span))
            )
        case "tails of all layers":
            cleared = local.Local._cleared
            monkeypatch.setattr(local.Local, "_cleared", lambda self, dst, _: cleared(self, dst, None))
        case "no tail":
            monkeypatch.setattr(local.Local, "_cleared", lambda *_: [])
        case "layers one on":
            of = messages.Message.part

            def one_on(self: messages.Message, side: int, **rest: Any) -> Any:
                tokens, chosen = of(self, side, **rest)
                return tokens, {**chosen, "l": chosen["l"][side:] + chosen["l"][:side]}

            monkeypatch.setattr(messages.Message, "part", one_on)
        case "heads in the other order":
            monkeypatch.setattr(
                local.Local, "_made",
                lambda self, m, layers: placed(self, m._replace(h=tuple(_swapped(x) for x in m.h)), layers),
            )  # fmt: skip
        case "turns that begin with rank 1":
            monkeypatch.setattr(messages, "prove", lambda *_: None)
            monkeypatch.setattr(
                strips.Turns, "slot", lambda self, p: p // self.period * self.every + (p + 1) % self.every
            )
        case "a message is missing":
            monkeypatch.setattr(messages, "prove", lambda *_: None)
            listed = messages._messages
            monkeypatch.setattr(messages, "_messages", lambda *given: listed(*given)[1:] or listed(*given))
        case _:
            raise KeyError(name)


def _at(span: Span, origin: int) -> Span:
    return Span(span.table, span.tokens, min(origin, span.tokens.start))


def _swapped(meeting: strips.Meeting) -> strips.Meeting:
    if not meeting.loops:
        return meeting
    [(count, step, src, dst)] = meeting.loops
    return meeting._replace(src=meeting.src + src * (count - 1), loops=(strips.Family(count, step, -src, dst),))


MUTANTS = (
    "a head of a replica by rank % heads",
    "a unit too few",
    "a token too few",
    "everything twice",
    "the first edge token also as a unit's",
    "units of the source in the other order",
    "the distance of origins is not looked at",
    "origins of the first ranks alone",
    "null blocks of the source are block 0",
    "a tail of a slot too few",
    "a tail of a slot too many",
    "tails of all layers",
    "no tail",
    "layers one on",
    "heads in the other order",
    "turns that begin with rank 1",
    "a message is missing",
)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_oracle_sees_each_mutant(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _mutate(monkeypatch, name)

    def seen() -> Iterator[bool]:
        for seed in range(120):
            try:
                on_host(random_case(seed))
            except AssertionError:
                yield True
            except (BindError, PlanError, IndexError, ValueError, reshard_oracle.RefusedError):
                yield False

    assert any(seen())


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_eight_threads_with_one_local() -> None:
    """Separate blocks, layers in turns, and ranges whose single-token transfers are created while others use them."""
    pair = Pair()
    src, dst = pools_of(pair.src, blocks=64), pools_of(pair.dst, "vllm/flash_attn_hnd", blocks=32)
    for pool in dst:
        for array in pool.arrays:
            array[...] = 0
    copy = reshard.Local(reshard.plan(pair.src, pair.dst), src, dst)
    alone = [Pool.allocate(pool.layout, pool.shape, 32) for pool in dst]
    for pool in alone:
        for array in pool.arrays:
            array[...] = 0

    def work(carry: reshard.Local, thread: int) -> None:
        for turn in range(4):
            tokens = range(3 * turn, 70 + thread + turn)
            table = [8 * thread + (turn + k) % 8 for k in range(6)]
            theirs = [4 * thread + k for k in range(2)]
            for layers in (range(2), range(2, 4), None):
                carry(Span(table, tokens), Span(theirs, tokens), layers=layers, clear_tail=turn % 2 == 0)

    one = reshard.Local(copy.made, src, alone)
    for thread in range(8):
        work(one, thread)
    other = reshard.Local(copy.made, src, dst)
    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(work, (copy, other)[thread % 2], thread) for thread in range(8)]:
            done.result()
    assert bytes_of(dst) == bytes_of(alone)
    total = [x.stats()["bytes"] for x in (copy, other, one)]
    assert total[0] + total[1] == total[2]


def test_what_is_no_resharding_and_what_are_no_pools() -> None:
    pair = Pair()
    with pytest.raises(BindError, match=r"made: expected a Resharding of kvbm\.reshard\.plan, got 5"):
        reshard.Local(5, *pair.pools)  # type: ignore[arg-type]
    for pools in (5, None, {0: pair.pools[1][0]}):
        with pytest.raises(
            BindError, match=r"decode: expected 2 destination pools, one per rank of tp2, got (int|NoneType|dict)"
        ):
            reshard.Local(pair.copy.made, pair.pools[0], pools)  # type: ignore[arg-type]


def test_digests_survive_other_ranks_layouts_and_block_sizes() -> None:
    """The sum over all ranks and blocks is the same before and after."""
    model = BlockShape(nl=5, no=2, nh=8, nt=16, hd=24, dtype="float16")
    here, there = reshard.vllm(model, tp=4, pp=2, nt=16), reshard.vllm(model, tp=2, nt=64)
    rng = np.random.default_rng(0)
    src = [Pool.allocate(load("vllm/flash_attn_nhd"), here.shape(rank), 12) for rank in range(here.world)]
    dst = [Pool.allocate(load("universal"), there.shape(rank), 4) for rank in range(there.world)]
    for pool in src:
        for array in pool.arrays:
            array.view(np.uint8)[...] = rng.integers(0, 256, array.view(np.uint8).shape, np.uint8)
    blocks = [5, 0, 7, 2, 1, 3, 4, 11]
    spans = Span(blocks, tokens=range(128)), Span([2, 0], tokens=range(128))
    reshard.Local(reshard.plan(here, there), src, dst)(*spans).synchronize()

    def total(pools: list[Pool], placed: Placement, ids: list[int], nt: int) -> int:
        each = [
            pool.digest(ids, tokens=[nt * i for i in range(len(ids))], model=placed.part(rank))
            for rank, pool in enumerate(pools)
        ]
        return int(np.concatenate(each).sum(dtype=np.uint64))

    assert total(src, here, blocks, 16) == total(dst, there, [2, 0], 64) != total(dst, there, [0, 2], 64)
