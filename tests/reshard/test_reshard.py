"""Placements, plans between them, and the proof, compared token by token with rules of one line each."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvbm import BlockShape, CoverageError, Placement, PlanError, SpecError, load_shape, reshard
from kvbm.reshard.messages import _Replicas
from kvbm.reshard.strips import Family, Meeting, Runs, Turns, meet, meet_in_unit, share_a_token

MODEL = load_shape("llama-3.1-70b")


# ---- strips --------------------------------------------------------------------------------------------------------


def ascending(rng: random.Random) -> list[int]:
    at, found = rng.randrange(4), []
    for _ in range(rng.randrange(1, 12)):
        found.append(at)
        at += rng.choice([1, 1, 1, 2, 3, 6])
    return found


def test_runs_meet_in_what_both_hold() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        a, b = ascending(rng), ascending(rng)
        one, other = Runs.of(a), Runs.of(b)
        assert list(one) == a and one.places == list(range(len(a)))
        found = sorted(
            triple
            for m in meet(one, other)
            for triple in zip(m.coordinates("first"), m.coordinates("src"), m.coordinates("dst"), strict=True)
        )
        assert found == sorted((x, a.index(x), b.index(x)) for x in set(a) & set(b))
        of = rng.randrange(1, 5)
        shares = [one.share(i, of) for i in range(of)]
        assert [x for share in shares for x in share] == a
        assert [place for share in shares for place in share.places] == list(range(len(a)))
        rest = one.without(shares[0])
        assert list(rest) == a[shares[0].size :] and rest.places == list(range(shares[0].size, len(a)))


@pytest.mark.slow  # 0.5 s
def test_a_unit_holds_the_tokens_that_both_hold() -> None:
    rng = random.Random(2)

    def turns() -> Turns:
        over = rng.choice([1, 1, 2, 3, 4])
        return Turns(rng.choice([1, 2, 3, 4, 8, 16]), over, rng.randrange(over))

    for _ in range(600):
        s, d = turns(), turns()
        sizes = rng.choice([4, 5, 6, 8, 16, 24, 48, 32, 64]), rng.choice([4, 7, 8, 16, 24, 32, 64])
        cuts = [[c for c in rng.choice([(), (2,), (4,), (3,)]) if n % c == 0] for n in sizes]
        unit = meet_in_unit(s, d, sizes, (cuts[0], cuts[1]), rng.choice([0, 0, 1, 16, 24]))
        period = 4 * s.period * d.period * unit.tokens
        assert any(s.holds(x) and d.holds(x) for x in range(period)) == share_a_token(s, d)
        for k in range(min(period // unit.tokens, 60)):
            both = [x for x in range(unit.tokens) if s.holds(k * unit.tokens + x) and d.holds(k * unit.tokens + x)]
            if not both:
                continue
            assert unit.meeting is not None and sorted(unit.meeting.coordinates("first")) == both
            for name, side, size, slots in (("src", s, sizes[0], unit.src_slots), ("dst", d, sizes[1], unit.dst_slots)):
                start = min(
                    side.slot(k * unit.tokens + x) for x in range(unit.tokens) if side.holds(k * unit.tokens + x)
                )
                assert start % slots == 0 and size % slots == 0
                for x, local in zip(unit.meeting.coordinates("first"), unit.meeting.coordinates(name), strict=True):
                    assert side.slot(k * unit.tokens + x) == start + local < start + slots
                runs = unit.meeting.side(name)
                assert list(unit.meeting.coordinates(name)) == [f + i * step for f, n, step in runs for i in range(n)]


@pytest.mark.parametrize(
    ("sizes", "turns", "tokens", "slots"),
    [
        ((16, 64), (Turns(), Turns()), 16, (16, 16)),
        ((64, 16), (Turns(), Turns()), 16, (16, 16)),
        ((48, 32), (Turns(), Turns()), 16, (16, 16)),
        ((16, 16), (Turns(), Turns(1, 4, 2)), 16, (16, 4)),
        ((64, 64), (Turns(), Turns(1, 4, 2)), 64, (64, 16)),
        ((32, 16), (Turns(32, 4, 1), Turns()), 16, (16, 16)),
        ((5, 7), (Turns(), Turns()), 1, (1, 1)),
    ],
)
def test_units(sizes: tuple[int, int], turns: tuple[Turns, Turns], tokens: int, slots: tuple[int, int]) -> None:
    unit = meet_in_unit(*turns, sizes)
    assert (unit.tokens, unit.src_slots, unit.dst_slots) == (tokens, *slots)


def test_a_layout_that_splits_tokens_makes_units_smaller() -> None:
    assert meet_in_unit(Turns(), Turns(), (16, 24)).tokens == 8
    assert meet_in_unit(Turns(), Turns(), (48, 48), ((3,), ())).tokens == 48
    assert meet_in_unit(Turns(), Turns(), (48, 16), ((3,), ())).tokens == 1


# ---- plans ---------------------------------------------------------------------------------------------------------


def holds(place: Placement, rank: int, layer: int, head: int, token: int) -> bool:
    """What each rank holds, in engines' terms instead of strips."""
    at = place.place(rank)
    shares = dict(place.shares)

    def index(axis: str) -> tuple[int, int]:
        digit = shares[axis].digit
        return at[digit.axis] // digit.divisor % digit.extent, digit.extent

    if "h" in shares:
        mine, of = index("h")
        if head not in range(
            mine * place.model.nh // of, max((mine + 1) * place.model.nh // of, mine * place.model.nh // of + 1)
        ):
            return False
    if "l" in shares:
        mine, of = index("l")
        bounds = shares["l"].bounds or [place.model.nl * i // of for i in range(of + 1)]
        if not bounds[mine] <= layer < bounds[mine + 1]:
            return False
    if "t" in shares:
        mine, of = index("t")
        if token // shares["t"].every % of != mine:
            return False
    return layer in list(place.layers)


def random_placement(rng: random.Random, model: BlockShape, name: str) -> Placement:
    tp, pp, cp = rng.choice([1, 2, 3, 4, 6, 8]), rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2, 3])
    nt = rng.choice([1, 2, 4, 6, 8, 16])
    shard: dict[str, object] = {}
    if model.nh % tp == 0 or tp % model.nh == 0:
        shard["h"] = "tp"
    if 1 < pp <= model.nl:
        cuts = sorted(rng.sample(range(1, model.nl), pp - 1))
        shard["l"] = {"over": "pp", "bounds": [0, *cuts, model.nl]}
    if cp > 1:
        shard["t"] = f"cp by {rng.choice([1, 2, nt, 2 * nt]) if nt > 1 else 1}"
    try:
        return Placement({"pp": pp, "cp": cp, "tp": tp}, shard=shard, model=model, nt=nt, name=name)
    except SpecError:  # turns that do not divide a block
        return random_placement(rng, model, name)


def received(made: reshard.Resharding, rank: int, tokens: int) -> dict[tuple[int, int, int], list[int]]:
    """What a rank receives by messages, token by token: coordinate → source ranks."""
    found: dict[tuple[int, int, int], list[int]] = {}
    for m in made.messages:
        if m.dst != rank:
            continue
        turn = made.sends[m.src].t
        assert m.t.meeting is not None
        for k in range(tokens // m.t.tokens):
            for x in m.t.meeting.coordinates("first"):
                position = k * m.t.tokens + x
                if not (turn.holds(position) and made.takes[rank].t.holds(position)):
                    continue  # units that are another rank's turn are not in the list of pairs
                for layer in (c for meeting in m.l for c in meeting.coordinates("first")):
                    for head in (c for meeting in m.h for c in meeting.coordinates("first")):
                        found.setdefault((layer, head, position), []).append(m.src)
    return found


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.slow  # 0.7 s
def test_every_coordinate_comes_once_from_a_rank_that_holds_it(seed: int) -> None:
    rng = random.Random(seed)
    model = BlockShape(nl=rng.randrange(3, 7), no=2, nh=rng.choice([1, 2, 3, 4, 6]), nt=4, hd=8)
    src, dst = random_placement(rng, model, "prefill"), random_placement(rng, model, "decode")
    made, (first, second) = reshard.plan(src, dst, stripe=rng.random() < 0.5), reshard.gather(src, dst)
    tokens = math.lcm(*(m.t.tokens for plan in (made, first, second) for m in plan.messages))
    tokens *= max(1, 48 // tokens)
    shared = {rank: received(first, rank, tokens) for rank in range(dst.world)}
    for rank in range(dst.world):
        want = {
            coordinate
            for coordinate in itertools.product(range(model.nl), range(model.nh), range(tokens))
            if holds(dst, rank, *coordinate)
        }
        at_once, passed = received(made, rank, tokens), received(second, rank, tokens)
        for found in (at_once, shared[rank]):
            assert all(len(ranks) == 1 and holds(src, ranks[0], *coordinate) for coordinate, ranks in found.items())
        assert at_once.keys() == want
        assert all(len(ranks) == 1 and coordinate in shared[ranks[0]] for coordinate, ranks in passed.items())
        assert not passed.keys() & shared[rank].keys()
        assert passed.keys() | shared[rank].keys() == want


def tp(n: int, name: str, **options: object) -> Placement:
    return Placement(f"tp{n}", shard={"h": "tp"}, model=MODEL, name=name, **options)  # type: ignore[arg-type]


def swap(made: reshard.Resharding, index: int, **changes: object) -> list[reshard.Message]:
    messages = list(made.messages)
    messages[index] = messages[index]._replace(**changes)  # type: ignore[arg-type]
    return messages


def test_the_proof_refuses_each_mutant() -> None:
    few = replace(MODEL, nh=2)
    replicas = reshard.plan(
        Placement("tp8", shard={"h": "tp"}, model=few, name="prefill"),
        Placement("tp4", shard={"h": "tp"}, model=few, name="decode"),
    )
    staged = reshard.plan(
        Placement("pp2", shard={"l": {"over": "pp", "bounds": [0, 50, 80]}}, model=few, name="prefill"),
        Placement("tp1", model=few, name="decode"),
    )
    made = reshard.plan(tp(4, "prefill", nt=16), tp(2, "decode", nt=64))
    one = made.messages[0]
    [layers], [heads] = one.l, one.h
    unit = one.t
    assert unit.meeting is not None
    mutants = {
        "the head of a replica by rank % heads": (
            replicas,
            [m._replace(src=3 * (m.dst % 2), h=(Meeting(m.dst % 2, 0, 0, ()),)) for m in replicas.messages],
        ),
        "the rank of a head of a replica by rank % heads": (
            replicas,
            [m._replace(src=3 * (m.dst % 2)) for m in replicas.messages],
        ),
        "a rank without those layers": (staged, swap(staged, 0, src=1)),
        "a stage's layers at the other stage's places": (
            staged,
            swap(staged, 0, l=(staged.messages[0].l[0]._replace(dst=2),)),
        ),
        "a message is missing": (made, list(made.messages[1:])),
        "a message twice": (made, [*made.messages, one]),
        "layers one on": (made, swap(made, 0, l=(layers._replace(first=1, src=1, loops=(Family(79, 1, 1, 1),)),))),
        "a layer too few": (made, swap(made, 0, l=(layers._replace(loops=(Family(79, 1, 1, 1),)),))),
        "places of layers one on": (made, swap(made, 0, l=(layers._replace(dst=1, loops=(Family(79, 1, 1, 1),)),))),
        "a rank that does not hold the heads": (made, swap(made, 0, src=2)),
        "no such rank": (made, swap(made, 0, src=4)),
        "another head's place": (made, swap(made, 0, h=(heads._replace(dst=2),))),
        "another unit": (made, swap(made, 0, t=unit._replace(tokens=32))),
        "slots of a unit": (made, swap(made, 0, t=unit._replace(dst_slots=8))),
        "tokens of a unit": (made, swap(made, 0, t=unit._replace(meeting=Meeting(0, 0, 0, (Family(8, 1, 1, 1),))))),
        "tokens at another step": (
            made,
            swap(made, 0, t=unit._replace(meeting=Meeting(0, 0, 0, (Family(16, 1, 1, 2),)))),
        ),
        "no tokens": (made, swap(made, 0, t=unit._replace(meeting=None))),
    }
    for name, (plan, messages) in mutants.items():
        try:
            replace(plan, messages=tuple(messages))
        except CoverageError:
            continue
        pytest.fail(f"proven: {name}")


def test_a_rank_without_layers_is_named() -> None:
    model = replace(MODEL, nl=6)
    src = Placement("pp1", model=model, layers=[0, 1, 2, 3], name="prefill")
    dst = Placement("pp2", shard={"l": "pp"}, model=model, name="decode")
    with pytest.raises(
        CoverageError, match=r"prefill → decode: decode rank 1: layers: 1 of 3 covered: no rank of prefill sends 4–5"
    ):
        reshard.plan(src, dst)


def test_models_that_differ_are_refused() -> None:
    other = Placement("tp2", model=replace(MODEL, nh=4), name="decode")
    with pytest.raises(PlanError, match="prefill → decode: nh: 8 KV heads in one model, 4 in the other"):
        reshard.plan(tp(4, "prefill"), other)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"src": MODEL}, "src: expected a kvbm.Placement, got BlockShape"),
    ({"dst": None}, "dst: expected a kvbm.Placement, got None"),
    ({"dst": "vllm:tp2"}, "dst: expected a kvbm.Placement, got 'vllm:tp2'"),
    *(
        ({"cuts": cuts}, "cuts: expected two lists of tokens at which blocks are split")
        for cuts in (None, 5, "ab", ((),), ((0,), ()), ((-1,), ()), ((1.5,), ()), ((), ("4",)), ((True,), ()))
    ),
    ({"prefer": 5}, "prefer: expected a function of a rank and ranks, got 5"),
    *(
        ({"prefer": lambda *_, one=one: one}, "prefer: expected one of the ranks .* for rank 0")
        for one in (None, 7, True, 0.0, "0", [], np.zeros(2))
    ),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_plans_of_what_is_none(number: int) -> None:
    options, match = BAD[number]
    given: dict[str, Any] = {"src": tp(1, "prefill"), "dst": tp(2, "decode"), **options}
    for make in (reshard.plan, reshard.gather):
        with pytest.raises(PlanError, match=match):
            make(**given)


def test_options_that_there_are_not() -> None:
    with pytest.raises(PlanError, match="gather: expected stripe, prefer, cuts, cast and layouts, got 'foo'"):
        reshard.gather(tp(1, "prefill"), tp(2, "decode"), foo=1)


def test_integers_of_numpy_plan_the_same() -> None:
    """Both sides compare fingerprints, so these must be equal, too."""
    ends = Placement("tp2", model=MODEL), Placement("tp2", model=MODEL)
    one = reshard.plan(*ends, prefer=lambda rank, _: rank, cuts=((4,), (8,)))
    two = reshard.plan(*ends, prefer=lambda rank, _: np.int64(rank), cuts=[np.array([4]), [8]])  # type: ignore[arg-type]
    assert one == two and one.fingerprint == two.fingerprint and hash(one) == hash(two)


@pytest.mark.parametrize("seed", range(40))
def test_the_replica_with_the_least_to_send_is_chosen(seed: int) -> None:
    """The result is that of comparing all replicas, which would take quadratic time for 65,536 ranks."""
    rng = random.Random(seed)
    world, dst_world = rng.randrange(1, 40), rng.randrange(1, 40)
    ranks = sorted(rng.sample(range(world), rng.randrange(1, world + 1)))
    replicas, load = _Replicas(ranks, world, dst_world, None), dict.fromkeys(ranks, 0.0)
    for rank in (rng.randrange(dst_world) for _ in range(200)):
        expected = min(ranks, key=lambda one: (load[one], abs(one * dst_world - rank * world)))
        assert replicas.choose(rank) == expected
        more = rng.choice((1, 1, 2, 0.5, 1 / 3))
        load[expected] += more
        replicas.add(expected, more)


def test_a_span_that_was_pickled_is_not_written() -> None:
    for copied in (pickle.loads(pickle.dumps(reshard.Span([3, 1], range(2, 20), 1))), copy.deepcopy(reshard.Span([3], range(4)))):
        assert not copied.table.flags.writeable and isinstance(copied.origin, int)
    assert copied.tokens == range(4)
