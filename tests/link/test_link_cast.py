"""Links that cast: every byte on both paths, fewer bytes on the wire, digests of quantised bits, refusals when engines meet."""

from __future__ import annotations

import itertools
import json
import random
import re
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_direct import mapped_wires, shared_bytes

import kvbm
from cast_resharding import KINDS, CastRun, Kind, drawn, engine
from casting import Given
from kvbm import (
    BindError,
    BlockShape,
    CoverageError,
    DigestError,
    DTypeError,
    Placement,
    PlanError,
    Pool,
    Scale,
    Span,
    reshard,
    wire,
)
from kvbm.layout import spec
from kvbm.layout.grammar import write
from kvbm.link import direct, pulls
from kvbm.link import endpoint as endpoints
from kvbm.reshard import Cut, Endpoint, Packer
from linking import LIMIT, Linked, close_all, digested_first, ended

NAMES = [kind.name for kind in KINDS]
FP8, NVFP4, NHD, HND = "record/per_token_head_fp8_planes", "record/nvfp4_universal", "nhd", "universal"
MODEL = BlockShape(nl=3, no=2, nh=4, nt=16, hd=32, dtype="bfloat16")
TOKENS = range(60)
HERE, THERE = Span([5, 3, 8, 1], TOKENS), Span([2, 0], TOKENS)


def linked(
    kind: Kind, seed: int, *, direct: bool = False, where: str = "cpu", wires: Any = None, changes: Any = (), **options: Any
) -> Linked:
    case = drawn(kind, seed, clear_tail=False, **dict(changes))
    room = {"chunk_bytes": 1 << 18, "ring_bytes": 1 << 22}
    run = CastRun(case, kind, shared_bytes if direct and where == "cpu" else None, where)
    return Linked(case, mapped_wires() if direct else wires, run=run, **{**room, **options})


def require_right(kind: Kind, seeds: range, read: Any = np.asarray, **options: Any) -> int:
    """Send random cases; every byte is the oracle's.  Returns the number of cases that can be sent."""
    right = 0
    for seed in seeds:
        with linked(kind, seed, **options) as found:
            try:
                errors = ended(found.begin(random.Random(seed)))
            except BindError as error:
                errors = [error]
            if any("without a block" in str(error) for error in errors):
                continue
            assert not any(errors), (seed, errors)
            found.run.check(read)
            found.require_slots()
            right += 1
            if options.get("direct"):
                assert {path for side in found.links for link in side for path in link.paths.values()} <= {"direct"}
                assert not any(link.stats()["chunks_sent"] for side in found.links for link in side)
    return right


# ---- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "direct"),
    [
        pytest.param(kind, direct, id=f"{name}-{'direct' if direct else 'ring'}", marks=[pytest.mark.full] * (number % 2 != direct))
        for number, (kind, name) in enumerate(zip(KINDS, NAMES, strict=True))
        for direct in (False, True)
    ],
)
def test_every_byte(kind: Kind, direct: bool) -> None:
    """Random placements, block sizes, ranges, windows of layers, holes, stripes, shares that are passed on, pushed and pulled."""
    assert require_right(kind, range(2), direct=direct)


@pytest.mark.parametrize("direct", [False, True], ids=["ring", "direct"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if isinstance(kind.scale, Given)], ids=lambda kind: kind.name)
def test_each_layer_has_its_scale_in_every_partition(kind: Kind, direct: bool) -> None:
    """Red: with the scales of a rank's layers, counted from 0."""
    for src, dst in (({"nt": 4, "tp": 4}, {"nt": 16, "tp": 2}), ({"nt": 16, "pp": 2}, {"nt": 4}), ({"nt": 8}, {"nt": 8, "pp": 3})):
        changes = {"nl": 3, "layers": None, "src": engine(**src, nl=3), "dst": engine(**dst, nl=3)}
        assert any(require_right(kind, range(seed, seed + 1), direct=direct, changes=changes) for seed in range(9))


@pytest.mark.full
@pytest.mark.parametrize("direct", [False, True], ids=["ring", "direct"])
@pytest.mark.parametrize("first", range(100, 400, 20))
def test_every_byte_of_many(first: int, direct: bool) -> None:
    for seed in range(first, first + 20):
        require_right(KINDS[seed % len(KINDS)], range(seed, seed + 1), direct=direct)


@pytest.mark.gpu
@pytest.mark.parametrize("max_sms", [None, 4])
@pytest.mark.parametrize("direct", [False, True], ids=["ring", "direct"])
@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_every_byte_on_a_gpu(kind: Kind, direct: bool, max_sms: int | None) -> None:
    import torch

    def read(buffer: Any) -> np.ndarray:
        torch.cuda.synchronize()
        found: np.ndarray = buffer.cpu().numpy()
        return found

    assert require_right(kind, range(1000, 1003), read, where="cuda", direct=direct, max_sms=max_sms)


# ---- one rank each ---------------------------------------------------------------------------------------------------


class Pair:
    """A rank of prefill and one of decode, of these layouts and casts."""

    def __init__(
        self,
        layouts: tuple[Any, Any] = (NHD, FP8),
        casts: tuple[Any, Any] = ("amax", "amax"),
        *,
        direct: bool = False,
        dtypes: tuple[str, str] = ("bfloat16", "bfloat16"),
        nts: tuple[int, int] = (16, 64),
        meshes: tuple[str, str] = ("tp1", "tp1"),
        wires: Any = None,
        **options: Any,
    ) -> None:
        self.places = [
            Placement(mesh, shard={"h": "tp"}, model=replace(MODEL, dtype=dtype), nt=nt, name=name)
            for name, nt, dtype, mesh in zip(("prefill", "decode"), nts, dtypes, meshes, strict=True)
        ]
        wires = wires or (mapped_wires() if direct else None)
        hub = wire.Hub()
        wires = wires or (lambda side, rank: wire.memory(f"{side}/{rank}", hub))
        self.pools: list[list[Pool]] = []
        self.ends: list[list[Endpoint]] = []
        for side, (place, layout, cast) in enumerate(zip(self.places, layouts, casts, strict=True)):
            device = "shared" if direct else "cpu"
            shapes = map(place.shape, range(place.world))
            self.pools.append([Pool.allocate(spec.as_layout(layout), shape, 9, device=device) for shape in shapes])
            _fill(self.pools[-1], side)
            self.ends.append([])
            for rank, pool in enumerate(self.pools[-1]):
                given = {"ring_bytes": 1 << 22, "chunk_bytes": 1 << 18, **options}
                if cast is not None:
                    given["cast"] = cast
                self.ends[-1].append(Endpoint(place.name, place, rank, pool, wire=wires(side, rank), **given))
        self.links: list[list[reshard.Link]] = []

    @property
    def cards(self) -> list[list[bytes]]:
        return [[end.card() for end in ends] for ends in self.ends]

    def meet(self) -> None:
        cards = self.cards
        self.links = [[end.meet(cards[1 - side]) for end in self.ends[side]] for side in (0, 1)]

    def go(self, name: str = "x", **options: Any) -> list[Any]:
        """Send a sequence; the handles' errors, and the arrival."""
        sending = self.links[0][0].send(name, HERE, timeout=LIMIT)
        self.arrival = self.links[1][0].receive(name, THERE, timeout=LIMIT, **options)
        return ended([sending, self.arrival])

    def digest(self, side: int) -> int:
        """The digest of the sequence in a side's pool."""
        pool, span = self.pools[side][0], (HERE, THERE)[side]
        full, rest = divmod(len(TOKENS), pool.shape.nt)
        found = sum(map(int, pool.digest(span.table[:full], tokens=[i * pool.shape.nt for i in range(full)])))
        single = pool.units(1)
        for slot in range(rest):
            unit = int(span.table[full]) * pool.shape.nt + slot
            found += int(single.digest([unit], tokens=[full * pool.shape.nt + slot])[0])
        return found % (1 << 64)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        close_all(end for ends in self.ends for end in ends)


def _fill(pools: list[Pool], seed: int) -> None:
    rng = np.random.default_rng(seed)
    for array in (array for pool in pools for array in pool.arrays):
        if array.dtype == ml_dtypes.bfloat16:
            array[...] = rng.standard_normal(array.shape).astype(ml_dtypes.bfloat16)
        else:
            array.view(np.uint8)[...] = rng.integers(1, 120, array.view(np.uint8).shape)


def bits(pool: Pool) -> list[np.ndarray]:
    return [array.view(np.uint8).copy() for array in pool.arrays]


@pytest.mark.parametrize("direct", [False, True], ids=["ring", "direct"])
@pytest.mark.parametrize("layouts", [(NHD, FP8), (FP8, NHD), (NHD, NVFP4), (NVFP4, NHD)], ids=lambda pair: " to ".join(pair))
def test_digests_are_of_the_quantised_bits(layouts: tuple[str, str], direct: bool) -> None:
    """On both paths, whoever casts: equal to what the quantised pool says of itself."""
    with Pair(layouts, direct=direct, max_sms=4) as found:  # of no matter on a CPU
        found.meet()
        quantised = 0 if layouts[1] == NHD else 1
        for verify in ("after", "before"):
            assert found.go(verify, verify=verify) == [None, None]
            assert found.arrival.digest == found.digest(quantised) != found.digest(1 - quantised)
        assert found.links[1][0].stats()["pulls"] == (2 if direct else 0)


@pytest.mark.parametrize(("layouts", "per_row"), [((NHD, FP8), 36), ((FP8, NHD), 36), ((NHD, NVFP4), 18), ((NHD, NHD), 64)])
def test_the_smaller_format_crosses(layouts: tuple[str, str], per_row: int) -> None:
    with Pair(layouts) as found:
        found.meet()
        assert found.go() == [None, None]
        sent, came = found.links[0][0].stats(), found.links[1][0].stats()
        assert sent["bytes_sent"] == len(TOKENS) * 3 * 2 * 4 * per_row
        assert came["bytes_received"] == sent["bytes_sent"]


def test_an_engine_may_say_cast_without_need() -> None:
    """The same formats on both sides are copied bit by bit."""
    for layouts in ((NHD, HND), (FP8, "vllm/per_token_head_fp8")):
        with Pair(layouts) as found:
            found.meet()
            assert all(plan.cast is None for plan in found.links[0][0]._plans[True].values())
            assert found.go() == [None, None] and found.digest(0) == found.digest(1)


#: e4m3 and float32 in each: a scale for each token and head, for each half of a head, and for all heads or tokens.
_GROUPS = {
    "token and head": ("[b] h l o", "t d", "order: t"), "half a head": ("[b] h l o", "t d", "order: t s"),
    "all heads": ("[b] l o", "h t d", "order: t, shared: h"), "all tokens": ("[b] l o", "h t d", "order: h, shared: t"),
}  # fmt: skip


def _grouped(name: str) -> kvbm.Layout:
    outer, data, scale = _GROUPS[name]
    axes = "axes: {s: hd//16}\n" if " s" in scale else ""
    return spec.parse(
        f'order: "{outer} <data scale>"\n{axes}planes:\n  data: {{order: {data}, dtype: float8_e4m3fn}}\n'
        f"  scale: {{{scale}, dtype: float32, scales: data}}\n", name=name,
    )  # fmt: skip


@pytest.mark.parametrize("pair", list(itertools.permutations(_GROUPS, 2)), ids=" and ".join)
def test_equal_formats_with_scales_of_other_groups_do_not_meet(pair: tuple[str, str]) -> None:
    """As many bytes or not: each transfer would fail, with an error of digests or of the form of chunks."""
    with Pair((_grouped(pair[0]), _grouped(pair[1])), nts=(16, 16)) as found:
        for side in (0, 1):
            with pytest.raises(BindError, match=r"group '': plane 'scale': elements of a token and head: .* expected the same"):
                found.ends[side][0].meet(found.cards[1 - side])
    with Pair((_grouped(pair[0]),) * 2, nts=(16, 16)) as found:
        found.meet()


def test_groups_of_which_one_is_cast() -> None:
    """Full attention is cast, a draft model has one format."""
    hub, place = wire.Hub(), Placement("tp1", model=MODEL, nt=16)
    pools = [
        {name: Pool.allocate(layout, MODEL, 9) for name, layout in (("draft", HND), ("full", layout))} for layout in (NHD, FP8)
    ]
    for side, by_name in enumerate(pools):
        _fill(list(by_name.values()), side)
    ends = [
        Endpoint(engine, {name: (place, pool) for name, pool in by_name.items()}, 0, wire=wire.memory(engine, hub), cast="amax")
        for engine, by_name in zip("ab", pools, strict=True)
    ]
    try:
        links = [ends[i].meet([ends[1 - i].card()]) for i in (0, 1)]
        handles = [
            call("x", Span([1, 3], range(32)), group=name) for name in pools[0] for call in (links[0].send, links[1].receive)
        ]
        assert not any(ended(handles))
    finally:
        close_all(ends)
    want = Pool.allocate(FP8, MODEL, 9)
    kvbm.convert(pools[0]["full"], want, [1, 3], [1, 3], cast="amax")
    for got, right in ((pools[1]["full"], want), (pools[1]["draft"], pools[0]["draft"])):
        assert all(np.array_equal(a[i], b[i]) for a, b in zip(bits(got), bits(right), strict=True) for i in (1, 3)) or all(
            np.array_equal(bits(got)[i], bits(right)[i]) for i in (1, 3)
        )


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def wrong_bits(monkeypatch: pytest.MonkeyPatch) -> Any:
    hub = wire.Hub()
    return lambda side, rank: wire.faulty(
        wire.memory(f"{side}/{rank}", hub), [wire.Fault("bit", at) for at in range(100)] if side == 0 else []
    )


@pytest.mark.parametrize("verify", ["after", "before"])
@pytest.mark.parametrize("layouts", [(NHD, FP8), (FP8, NHD)], ids=lambda pair: " to ".join(pair))
def test_a_chunk_that_changes_on_its_way_leaves_zeros(
    layouts: tuple[str, str], verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Pair(layouts, wires=wrong_bits(monkeypatch)) as found:
        found.meet()
        before = bits(found.pools[1][0])
        assert all(isinstance(error, DigestError) for error in found.go(verify=verify))
        after = bits(found.pools[1][0])
        changed = [a != b for a, b in zip(before, after, strict=True)]
        assert not any(b[one].any() for one, b in zip(changed, after, strict=True))


@pytest.mark.parametrize("verify", ["after", "before"])
@pytest.mark.parametrize("layouts", [(NHD, FP8), (FP8, NHD)], ids=lambda pair: " to ".join(pair))
def test_memory_that_changes_under_a_reader_that_casts_is_found(
    layouts: tuple[str, str], verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    digested_first(monkeypatch)
    with Pair(layouts, direct=True) as found:
        found.meet()
        begin, go_on, before = pulls.Pull._begin, pulls.Pull._go_on, bits(found.pools[1][0])

        def turn() -> None:
            for array in found.pools[0][0].arrays:
                array.view(np.uint8)[...] ^= 1

        def turned(self: pulls.Pull) -> None:
            turn()
            begin(self)

        def ends(self: pulls.Pull) -> bool:
            is_over = not self._todo and self._pass is not None and self._pass.query()
            came = go_on(self)
            if is_over:
                turn()
            return came

        monkeypatch.setattr(pulls.Pull, "_begin", turned)
        monkeypatch.setattr(pulls.Pull, "_go_on", ends)
        errors = found.go(verify=verify)
        assert all(isinstance(error, DigestError) for error in errors), errors
        after = bits(found.pools[1][0])
        changed = [a != b for a, b in zip(before, after, strict=True)]
        assert not any(b[one].any() for one, b in zip(changed, after, strict=True))


@pytest.mark.parametrize("direct", [False, True], ids=["ring", "direct"])
def test_an_abort_and_the_next_attempt(direct: bool) -> None:
    with Pair(direct=direct) as found:
        found.meet()
        arrival = found.links[1][0].receive("x", THERE)
        arrival.abort()
        [error] = ended([arrival])
        assert error is not None
        assert found.go("y") == [None, None] and found.arrival.digest == found.digest(1)


# ---- who does not meet -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("casts", "says"),
    [
        (("amax", None), ("cast: 'amax' here and none on the other side", "cast: none here and 'amax' on the other side")),
        ((None, Scale(1)), (r"cast: none here and Scale\(1.0\) on the other", r"cast: Scale\(1.0\) here and none on")),
        (("amax", Scale(1.0)), (r"cast: 'amax' here and Scale\(1.0\) on the other", r"cast: Scale\(1.0\) here and 'amax' on")),
        ((Scale(0.1), Scale(0.2)), (r"cast: Scale\(0.10000000149011612\) here and Scale\(0.2", "expected the same: values change")),
        ((Scale([1.0, 2.0, 4.0]), Scale([1.0, 2.0, 3.0])), ("on the other side, which differ in layer 2; expected the same",) * 2),
        ((Scale(k=1.0, v=[1.0, 2.0, 4.0]), Scale(k=1.0, v=[1.0, 3.0, 4.0])), ("which differ in V of layer 1; expected",) * 2),
        ((Scale(k=1.0, v=2.0), Scale(1.0)), ("which differ in V; expected",) * 2),
        ((Scale([1.0, 2.0, 4.0]), Scale([1.0, 2.0])), ("which differ in the number of layers; expected",) * 2),
        ((Scale([0.5] * 3), Scale(0.5)), (r"cast: Scale\(\(0.5, 0.5, 0.5\)\) here and Scale\(0.5\) on the other side", "the same")),
        ((None, None), (r"planes: .* on the other side; expected the same, or cast= on both sides",) * 2),
    ],
)  # fmt: skip
def test_both_sides_say_the_same_cast(casts: tuple[Any, Any], says: tuple[str, str]) -> None:
    with Pair(casts=casts) as found:
        for side in (0, 1):
            with pytest.raises(BindError, match=says[side]):
                found.ends[side][0].meet(found.cards[1 - side])
            if casts != (None, None):
                with pytest.raises(BindError, match=says[side]):
                    found.ends[side][0].require_alike(found.cards[1 - side][0])


def test_a_peer_of_the_same_format_that_says_no_cast_is_refused() -> None:
    with Pair((NHD, HND), casts=("amax", None)) as found:
        for side in (0, 1):
            with pytest.raises(BindError, match=r"cast: .* expected the same: values change only if both sides"):
                found.ends[side][0].meet(found.cards[1 - side])


def test_an_earlier_version_refuses_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows version 5.  A card without a cast is as it was."""
    with Pair() as found, Pair(casts=(None, None)) as plain:
        card, old = json.loads(found.cards[0][0]), json.loads(plain.cards[0][0])
        assert card["kvbm-link"] == 6 and old["kvbm-link"] == 5
        assert card.keys() - old.keys() == {"cast"} and card["groups"][""].keys() - old["groups"][""].keys() == {"layout"}
        monkeypatch.setattr(endpoints, "_CASTING", 5)
        with pytest.raises(BindError, match=r"card: expected version 5, or .*: both sides need the same kvbm, got version 6"):
            plain.ends[1][0].meet(found.cards[0])


def _changed(card: bytes, **changes: Any) -> bytes:
    held = json.loads(card)
    for key, value in changes.items():
        at = held["groups"][""] if key in ("layout", "planes", "formats") else held
        at.pop(key) if value is None else at.update({key: value})
    return json.dumps(held).encode()


@pytest.mark.parametrize(
    "changes",
    [
        {"cast": None}, {"cast": "max"}, {"cast": 0.1}, {"cast": True}, {"cast": -1.0}, {"cast": []}, {"cast": [[1.0]]},
        {"cast": [0.5, "1"]}, {"cast": {"k": 0.5}}, {"cast": {"k": 0.5, "v": []}}, {"cast": {"k": [0.5], "v": [0.5] * 2}},
        {"kvbm-link": 5},
        {"kvbm-link": 7}, {"layout": None}, {"layout": 3}, {"layout": "x" * 9000}, {"layout": "[" * 999}, {"layout": "order: b l"},
        {"layout": "order: b l o t h d"}, {"planes": "data int8, scale float32"},
    ],
)  # fmt: skip
def test_cards_that_are_none(changes: dict[str, Any]) -> None:
    with Pair() as found, pytest.raises(BindError, match="card: expected"):
        found.ends[0][0].meet([_changed(found.cards[1][0], **changes)])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kvbm-link": 5}, "card: expected version 6 for a card with a cast, got version 5"),
        ({"kvbm-link": 7}, "card: expected version 5, or 6 with a cast: both sides need the same kvbm, got version 7"),
        ({"kvbm-link": None}, "card: expected version 5, or 6 with a cast: both sides need the same kvbm, got {'"),
        ({"cast": None}, "card: expected 'cast' of 'amax', a number, or numbers by layer, got None"),
    ],
)
def test_a_card_of_a_version_that_has_no_cast(changes: dict[str, Any], says: str) -> None:
    with Pair() as found, pytest.raises(BindError, match=says):
        found.ends[0][0].meet([_changed(found.cards[1][0], **changes)])


def test_a_card_with_another_layout_of_the_same_planes_is_another_plan() -> None:
    """Its scales lie elsewhere, or are none: nothing is read wrong."""
    other = write(kvbm.load(FP8), scales=False)
    with Pair() as found, pytest.raises(PlanError, match=r"besides what is cast, prefill has the planes .* and decode"):
        found.ends[0][0].meet([_changed(found.cards[1][0], layout=other)])
    with Pair(direct=True) as found:
        lie = _changed(found.cards[1][0], layout=write(kvbm.load("vllm/per_token_head_fp8"), scales=True))
        found.links = [[found.ends[0][0].meet([lie])], [found.ends[1][0].meet(found.cards[0])]]
        errors = found.go()
        assert all(error is not None and "another plan" in str(error) for error in errors), errors


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"layouts": ("record/mxfp8_universal", NVFP4)}, PlanError, "both are quantised"),
        ({"layouts": (NHD, HND), "dtypes": ("bfloat16", "float8_e4m3fn")}, PlanError, "no plane of scales takes part"),
        ({"layouts": (NHD, HND), "dtypes": ("bfloat16", "uint8"), "casts": (Scale(1.0),) * 2}, PlanError, "one of .* got uint8"),
        ({"casts": (Scale(2.0),) * 2}, PlanError, "every plane that is cast has scales of its own"),
        ({"nts": (16, 64), "spans": "t"}, CoverageError, "one scale for 64 tokens, and rank 0 sends 16"),
        ({"nts": (16, 16), "spans": "h", "meshes": ("tp1", "tp2")}, CoverageError, "its bits would depend on the partition"),
    ],
)  # fmt: skip
def test_casts_that_there_are_not(options: dict[str, Any], error: type[Exception], match: str) -> None:
    from test_reshard_cast import spanning

    if (axis := options.pop("spans", None)) is not None:
        options = {**options, "layouts": (HND, spanning(axis))}
    with Pair(**options) as found:
        for side in (0, 1):
            try:
                link = found.ends[side][0].meet(found.cards[1 - side])
            except error as found_error:
                assert re.search(match, str(found_error)), found_error
            else:  # it can be read, not written
                with pytest.raises(error, match=match):
                    link.send("x", HERE) if side == 0 else link.receive("x", HERE)


def test_arrays_of_another_format_than_declared() -> None:
    """The bytes of e5m2 are not cast as int8, wherever they lie."""
    place, hub = Placement("tp1", model=MODEL, nt=16), wire.Hub()
    pools = [Pool.allocate(NHD, MODEL, 4), Pool.allocate("record/per_token_head_int8_planes", MODEL, 4)]
    pools[1].formats = {"data": "float8_e5m2"}
    ends = [
        Endpoint(name, place, 0, pool, wire=wire.memory(name, hub), cast="amax") for name, pool in zip("ab", pools, strict=True)
    ]
    try:
        for side, where in ((0, "the pool on the other side"), (1, "the pool here")):
            with pytest.raises(DTypeError, match=f"plane 'data' of {where} is declared as int8, and its arrays are float8_e5m2"):
                ends[side].meet([ends[1 - side].card()])
    finally:
        close_all(ends)


def test_what_an_endpoint_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    place, pool = Placement("tp1", model=MODEL, nt=16), Pool.allocate(NHD, MODEL, 4)
    with pytest.raises(PlanError, match="cast: expected 'amax' or a kvbm"):
        Endpoint("a", place, 0, pool, wire=wire.memory("a"), cast="fp8")
    monkeypatch.setattr(direct, "_MOST_TEXT", 8)
    with pytest.raises(BindError, match=r"endpoint a: cast: nhd: its layout's text has .* characters"):
        Endpoint("a", place, 0, pool, wire=wire.memory("a"), cast="amax")


def test_what_a_packer_refuses() -> None:
    place = Placement("tp1", model=MODEL, nt=16)
    pools = [Pool.allocate(NHD, MODEL, 4), Pool.allocate(FP8, MODEL, 4)]
    with pytest.raises(BindError, match="cast: expected a plan with the layouts of both sides"):
        Packer(reshard.plan(place, place, cast="amax"), 0, pools[0])
    made = reshard.plan(place, place, cast="amax", layouts=(NHD, FP8))
    with pytest.raises(BindError, match="cast: expected a pool of the plan's layout"):
        Packer(made, 0, Pool.allocate(HND, MODEL, 4))
    with pytest.raises(BindError, match="make them with a Packer and Cut"):
        reshard.chunks(made, made.messages[0], range(16))
    sent, taken = Packer(made, 0, pools[0]), Packer(made, 0, pools[1], side="dst")
    assert sent.casts and not taken.casts
    span = Span([1, 2], range(32))
    [chunk], [same] = Cut(sent, span).chunks[0], Cut(taken, span).chunks[0]
    assert chunk.nbytes == same.nbytes == 32 * 3 * 2 * 4 * 36
    slot = np.zeros(chunk.size, np.uint8)
    Cut(sent, span).pack({(0, 0): slot}, key="x").synchronize()
    Cut(taken, span).unpack({(0, 0): slot}, key="x").synchronize()
    want = Pool.allocate(FP8, MODEL, 4)
    kvbm.convert(pools[0], want, [1, 2], [1, 2], cast="amax")
    assert all(np.array_equal(bits(pools[1])[i], bits(want)[i]) for i in (1, 2))


def test_a_part_of_a_group_is_refused_by_both_sides() -> None:
    """A scale for the tokens of a block: whole blocks are sent, and a range that ends inside one is an error at once."""
    from test_reshard_cast import spanning

    with Pair((HND, spanning("t")), nts=(16, 16)) as found:
        found.meet()
        before = bits(found.pools[1][0])
        for call in (found.links[0][0].send, found.links[1][0].receive):
            handle = None
            try:
                handle = call("x", HERE, timeout=1.0)
            except PlanError as error:
                assert "plane 'scale' has one element for 16 tokens, which units would share" in str(error)
            if handle is not None:
                [error] = ended([handle])
                assert error is not None
        assert all(map(np.array_equal, before, bits(found.pools[1][0])))
        whole = Span([5, 3, 8], range(48)), Span([2, 0, 1], range(48))
        handles = found.links[0][0].send("y", whole[0]), found.links[1][0].receive("y", whole[1])
        assert ended(handles) == [None, None]
        want = Pool.allocate(spanning("t"), found.places[1].shape(0), 9)
        kvbm.convert(found.pools[0][0], want, [5, 3, 8], [2, 0, 1], cast="amax")
        assert all(np.array_equal(bits(found.pools[1][0])[i], bits(want)[i]) for i in (2, 0, 1))
