"""Reshardings that cast: every byte in every partition, whole groups, refusals, what is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cast_resharding
import kvbm
from cast_resharding import KINDS, CastRun, Kind, drawn, on_host
from casting import Given
from kvbm import BindError, BlockShape, CoverageError, DTypeError, Placement, PlanError, Pool, Scale, Span, reshard
from kvbm.layout import spec
from kvbm.planner.cast import of_layers
from kvbm.reshard import local, messages, proof
from kvbm.reshard.report import as_json

MODEL = BlockShape(nl=4, no=2, nh=8, nt=16, hd=32, dtype="bfloat16")
FP8, NHD, PLAIN = "record/per_token_head_fp8_planes", "nhd", "universal"

#: Layouts in which a scale spans the tokens of a block, its KV heads, or its layers.
SPANS = {
    "t": 'order: "[b] h l o <data scale>"\n'
    "planes: {data: {order: t d, dtype: int8}, scale: {dtype: float32, shared: t, scales: data}}\n",
    "h": 'order: "[b] l o <data scale>"\n'
    "planes: {data: {order: h t d, dtype: int8}, scale: {order: t, dtype: float32, shared: h, scales: data}}\n",
    "l": 'order: "[b] h o <data scale>"\n'
    "planes: {data: {order: l t d, dtype: int8}, scale: {order: t, dtype: float32, shared: l, scales: data}}\n",
}


def spanning(axis: str) -> kvbm.Layout:
    return spec.parse(SPANS[axis], name=f"one scale along {axis}")


def engine(mesh: str, nt: int, name: str, **options: Any) -> Placement:
    shard = {axis: at for axis, at in (("h", "tp"), ("l", "pp")) if at in mesh}
    return Placement(mesh, **{"shard": shard, "model": MODEL, "nt": nt, "name": name, **options})


def pools_of(place: Placement, layout: Any, blocks: int = 4, seed: int = 0) -> list[Pool]:
    rng, found = np.random.default_rng(seed), []
    for rank in range(place.world):
        pool = Pool.allocate(spec.as_layout(layout), place.shape(rank), blocks)
        for array in pool.arrays:
            if array.dtype == ml_dtypes.bfloat16:
                array[...] = rng.standard_normal(array.shape).astype(ml_dtypes.bfloat16)
            else:
                array.view(np.uint8)[...] = rng.integers(1, 200, array.view(np.uint8).shape)
        found.append(pool)
    return found


def bytes_of(pools: list[Pool]) -> list[bytes]:
    return [b"".join(array.tobytes() for array in pool.arrays) for pool in pools]


# ---- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_every_byte(kind: Kind) -> None:
    """Random placements, block sizes, tables with holes, windows of layers, shares that are passed on, cleared tails."""
    for seed in range(1 if kind.hd > 500 else 2):
        on_host(drawn(kind, seed), kind)


@pytest.mark.full
@pytest.mark.parametrize("first", range(100, 400, 20))
def test_every_byte_of_many(first: int) -> None:
    for seed in range(first, first + 20):
        kind = KINDS[seed % len(KINDS)]
        on_host(drawn(kind, seed), kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_every_byte_on_a_gpu(kind: Kind) -> None:
    import torch

    stream = torch.cuda.Stream()
    for seed in range(1000, 1003):
        run = CastRun(drawn(kind, seed), kind, where="cuda")
        for done in run.call(stream=stream):
            done.synchronize()
        run.check(lambda buffer: buffer.cpu().numpy())


def _mutate(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    part, made = messages.Message.part, local.Transfer.__init__
    match name:
        case "another scale":
            double = lambda cast: Scale(k=cast.k * 2, v=cast.v)  # noqa: E731
            init = lambda self, *a, cast, **rest: made(self, *a, cast=double(cast), **rest)  # noqa: E731
            monkeypatch.setattr(local.Transfer, "__init__", init)
        case "layers of the rank":

            def of_rank(self: messages.Resharding, message: messages.Message) -> Any:
                assert self.cast is not None
                return of_layers(self.cast, [layer for one in message.l for layer in one.coordinates("src")])

            monkeypatch.setattr(messages.Resharding, "cast_of", of_rank)
        case "heads one on":

            def one_on(self: messages.Message, side: int, **rest: Any) -> Any:
                tokens, chosen = part(self, side, **rest)
                return tokens, {**chosen, "h": chosen["h"][side:] + chosen["h"][:side]}

            monkeypatch.setattr(messages.Message, "part", one_on)
        case "a message twice":
            listed = local.Local._listed
            monkeypatch.setattr(local.Local, "_listed", lambda *a: [one for one in listed(*a) for _ in (0, 1)])


#: Kinds with scales by layer.
BY_LAYER = [kind for kind in KINDS if isinstance(kind.scale, Given)]


@pytest.mark.parametrize("kind", BY_LAYER, ids=[kind.name for kind in BY_LAYER])
@pytest.mark.parametrize(
    ("src", "dst"),
    [({"nt": 4, "tp": 4}, {"nt": 16, "tp": 2}), ({"nt": 16, "pp": 2}, {"nt": 4}), ({"nt": 8}, {"nt": 12, "pp": 3, "tp": 2})],
    ids=["tp4 to tp2", "pp2 to 1", "1 to pp3 tp2"],
)  # fmt: skip
def test_each_layer_has_its_scale_in_every_partition(kind: Kind, src: dict[str, int], dst: dict[str, int]) -> None:
    engines = {"src": cast_resharding.engine(**src, nl=3), "dst": cast_resharding.engine(**dst, nl=3)}
    on_host(drawn(kind, 5, nl=3, layers=None, **engines), kind)
    on_host(drawn(kind, 6, nl=3, layers=range(1, 3), gather=False, stripe=True, **engines), kind)


@pytest.mark.parametrize(
    ("name", "of"),
    [("another scale", "nvfp4"), ("layers of the rank", "by layer"), ("heads one on", "fp8"), ("a message twice", "fp8")],
)
def test_the_oracle_sees_each_mutant(monkeypatch: pytest.MonkeyPatch, name: str, of: str) -> None:
    [kind] = (one for one in KINDS if one.name == of)
    stages = {"nl": 3, "src": cast_resharding.engine(4, pp=2, nl=3), "dst": cast_resharding.engine(16, nl=3)}
    case = drawn(kind, 3, clear_tail=False, gather=False, **(stages if of == "by layer" else {}))
    _mutate(monkeypatch, name)
    with pytest.raises(AssertionError):
        on_host(case, kind)


@pytest.mark.parametrize(
    ("axis", "meshes"),
    [("t", ("tp1", "tp4", "pp2", "pp2 tp8")), ("h", ("tp1", "pp2", "pp4")), ("l", ("tp1", "tp4", "tp8"))],
)
def test_the_same_bits_in_every_partition(axis: str, meshes: tuple[str, ...]) -> None:
    """Scales of many elements: from one rank and from many, those of one copy."""
    dst, tokens, blocks = engine("tp1", 16, "dst"), range(48), ([2, 0, 3], [1, 2, 3])
    whole, [want] = pools_of(engine("tp1", 16, "src"), PLAIN), pools_of(dst, spanning(axis), seed=1)
    kvbm.convert(whole[0], want, *blocks, cast="amax")
    for mesh in meshes:
        src = engine(mesh, 16, "src")
        pools, got = pools_of(src, PLAIN), pools_of(dst, spanning(axis), seed=1)
        spans = [Span(table, tokens) for table in blocks]
        reshard.Local(reshard.plan(engine("tp1", 16, "one"), src), whole, pools)(spans[0], spans[0])
        reshard.Local(reshard.plan(src, dst, cast="amax"), pools, got)(*spans)
        assert bytes_of(got) == bytes_of([want]), mesh


# ---- groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axis", "src", "dst", "is_back", "match"),
    [
        ("t", ("tp1", 16), ("tp1", 64), False, "for 64 tokens, and rank 0 sends 16 .* blocks of src of a multiple of 64 tokens"),
        ("t", ("tp1", 24), ("tp1", 16), False, "one scale for 16 tokens, and rank 0 sends 8 .* a multiple of 16 tokens"),
        ("t", ("tp1", 64), ("tp1", 16), True, "plane 'scale' of src: one scale for 64 tokens, and rank 0 sends 16"),
        ("h", ("tp4", 16), ("tp1", 16), False, "for 8 KV heads, and rank 0 sends 2 .* all 8 KV heads of the rank on one rank"),
        ("h", ("tp1", 16), ("tp2", 16), False, "4 of 8: its bits would depend on the partition; expected all 8 on every rank"),
        ("h", ("tp8", 16), ("tp8", 16), False, "1 of 8: its bits would depend on the partition"),
        ("h", ("tp2", 16), ("tp4", 16), True, "'scale' of src: one scale for 4 KV heads, and rank 0 sends 2 .*one rank of dst"),
        ("l", ("pp2", 16), ("tp1", 16), False, "one scale for 4 layers, and rank 0 sends 2 .*scale for each layer"),
        ("l", ("tp1", 16), ("pp4", 16), False, "1 of 4: its bits would depend on the partition"),
    ],
)  # fmt: skip
def test_a_group_is_not_cut(axis: str, src: tuple[str, int], dst: tuple[str, int], is_back: bool, match: str) -> None:
    places = engine(*src, "src"), engine(*dst, "dst")
    layouts = (spanning(axis), NHD) if is_back else (NHD, spanning(axis))
    with pytest.raises(CoverageError, match=match):
        reshard.plan(*places, cast="amax", layouts=layouts)
    pools = [pools_of(place, layout) for place, layout in zip(places, layouts, strict=True)]
    with pytest.raises(CoverageError, match=match):  # without the layouts, the pools say it
        reshard.Local(reshard.plan(*places, cast="amax"), *pools)


def test_ranks_that_hold_a_whole_group_may_be_read_in_any_partition() -> None:
    src, dst = engine("tp4", 16, "src"), engine("tp1", 64, "dst")
    assert reshard.plan(src, dst, cast="amax", layouts=(spanning("h"), NHD)).casts[0].spans == ("h",)


def test_tokens_in_turns_have_no_scale_of_a_block() -> None:
    turns = Placement("dcp2", shard={"t": "dcp by 1"}, model=MODEL, nt=16, name="dst")
    with pytest.raises(CoverageError, match="one scale for the tokens that a rank holds, 16 of 32"):
        reshard.plan(engine("tp1", 32, "src"), turns, cast="amax", layouts=(NHD, spanning("t")))
    with pytest.raises(CoverageError, match="one scale for 16 tokens, and rank 0 sends"):
        reshard.plan(turns, engine("tp1", 16, "dst"), cast="amax", layouts=(spanning("t"), NHD))


def test_a_share_that_is_passed_on_is_not_a_part_of_a_group() -> None:
    places = engine("tp1", 16, "src"), Placement("tp2", model=MODEL, nt=16, name="dst")
    reshard.plan(*places, cast="amax", layouts=(NHD, spanning("l")))
    for plans in (reshard.gather, lambda *a, **b: reshard.plan(*reversed(a), stripe=True, **{**b, "layouts": b["layouts"][::-1]})):
        with pytest.raises(CoverageError, match="one scale for 4 layers, and rank 0 sends 2"):
            plans(*places, cast="amax", layouts=(NHD, spanning("l")))


def test_a_part_of_a_group_is_found_before_a_byte_is_written() -> None:
    """A scale of a block: ranges of whole blocks, and tables at a distance of blocks."""
    src, dst = engine("tp1", 16, "src"), engine("tp1", 16, "dst")
    pools = pools_of(src, NHD), pools_of(dst, spanning("t"), seed=1)
    copy = reshard.Local(reshard.plan(src, dst, cast="amax"), *pools)
    before = bytes_of(pools[1])
    with pytest.raises(PlanError, match=r"plane 'scale' has one element for 16 tokens.*expected ranges of whole units"):
        copy(Span([1, 2], range(31)), Span([0, 3], range(31)))
    with pytest.raises(CoverageError, match=r"one scale for 16 tokens, and rank 0 sends 8 .*tables that begin at such a distance"):
        copy(Span([1, 2], range(16, 32)), Span([0, 3], range(16, 32), 8))
    assert bytes_of(pools[1]) == before
    of_layers = reshard.Local(reshard.plan(src, dst, cast="amax"), pools_of(src, PLAIN), layered := pools_of(dst, spanning("l")))
    before = bytes_of(layered)
    with pytest.raises(PlanError, match="axis 'l': plane 'scale' has one element for all of it"):
        of_layers(Span([1], range(16)), Span([0], range(16)), layers=range(1, 3))
    assert bytes_of(layered) == before


def test_the_proof_looks_at_every_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner that cuts a group is caught, whatever it says."""
    places = engine("tp1", 16, "src"), engine("tp1", 16, "dst")
    made = reshard.plan(*places, cast="amax", layouts=(NHD, spanning("h")))
    [whole] = made.messages
    [heads] = whole.h
    halves = [whole._replace(h=(heads.within(some),)) for some in (range(4), range(4, 8))]
    with pytest.raises(CoverageError, match="one scale for 8 KV heads, and rank 0 sends 4 of them to rank 0"):
        replace(made, messages=tuple(halves))
    replace(made, messages=tuple(halves), layouts=(NHD and spec.load(NHD), spec.load(FP8)))
    monkeypatch.setattr(proof, "_require_whole_groups", lambda *_: None)
    replace(made, messages=tuple(halves))


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_no_value_changes_without_a_cast() -> None:
    src, dst = engine("tp2", 16, "src"), engine("tp1", 64, "dst")
    pools = pools_of(src, NHD), pools_of(dst, FP8)
    with pytest.raises((PlanError, DTypeError), match="cast"):
        reshard.Local(reshard.plan(src, dst), *pools)
    quantised = engine("tp1", 64, "dst", model=replace(MODEL, dtype="float8_e4m3fn"))
    with pytest.raises(PlanError, match=r"dtype: bfloat16 in one model, float8_e4m3fn in the other; .*or cast= to change values"):
        reshard.plan(src, quantised)
    with pytest.raises(PlanError, match="dtype"):
        reshard.gather(src, quantised)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"cast": "max"}, "cast: expected 'amax' or a kvbm.Scale, got 'max'"),
        ({"cast": 1.0}, "cast: expected 'amax' or a kvbm.Scale"),
        ({"cast": "amax", "layouts": "nhd"}, "layouts: expected those of the source and of the destination"),
        ({"cast": "amax", "layouts": ("nhd",)}, "layouts: expected those of the source and of the destination"),
        ({"cast": "amax", "layouts": ("nhd", 3)}, "layouts: expected two of kvbm.Layout, or their names, got 3"),
        ({"cast": "amax", "layouts": ("record/mxfp8_universal", "record/nvfp4_universal")}, "both are quantised"),
        ({"cast": "amax", "layouts": ("nhd", "universal"), "to": "float8_e4m3fn"}, "no plane of scales takes part"),
        ({"cast": "amax", "layouts": ("nhd", "universal"), "to": "uint8"}, "expected one of .* got uint8"),
        ({"cast": "amax", "layouts": ("nhd", "vllm/fp8_ds_mla")}, "besides what is cast, src has the planes ''"),
    ],
)
def test_casts_that_are_none(options: dict[str, Any], match: str) -> None:
    to = options.pop("to", "bfloat16")
    places = engine("tp1", 16, "src"), engine("tp1", 16, "dst", model=replace(MODEL, dtype=to))
    for plans in (reshard.plan, reshard.gather):
        with pytest.raises(PlanError, match=match):
            plans(*places, **options)


def test_a_local_has_the_cast_of_its_plan() -> None:
    src, dst = engine("tp2", 16, "src"), engine("tp1", 16, "dst")
    pools = pools_of(src, NHD), pools_of(dst, "record/nvfp4_universal")
    made = reshard.plan(src, dst, cast=Scale(0.5))
    with pytest.raises(BindError, match=r"cast: expected Scale\(.*0.5\) as in the plan, or none, got 'amax'"):
        reshard.Local(made, *pools, cast="amax")
    after = []
    for plan, options in ((made, {}), (made, {"cast": Scale(0.5)}), (reshard.plan(src, dst), {"cast": Scale(0.5)})):
        reshard.Local(plan, *pools, **options)(Span([1, 2], range(32)), Span([0, 3], range(32)))
        after.append(bytes_of(pools[1]))
    assert after[0] == after[1] == after[2]
    for options in ({"strategy": "engine"}, {"max_sms": 4}):
        with pytest.raises(BindError):
            reshard.Local(made, *pools, **options)
    with pytest.raises(PlanError, match="expected 'amax' or a kvbm"):
        reshard.Local(reshard.plan(src, dst), *pools, cast="fp8")


def test_scales_are_those_of_all_layers_of_the_model() -> None:
    place = engine("pp2", 16, "src")
    latent = engine("tp1", 16, "mla", model=replace(MODEL, no=1))
    pools = pools_of(place, NHD), pools_of(place, "record/nvfp4_universal")
    for count in (2, 3, 5):  # a rank has two
        many = Scale([1.0 + n for n in range(count)])
        for call in (reshard.plan, reshard.gather):
            with pytest.raises(PlanError, match=rf"src → src: Scale.*: expected one number for each of the 4 .*, got {count}"):
                call(place, place, cast=many)
        with pytest.raises(PlanError, match="expected one number for each of the 4 layers of the model"):
            reshard.Local(reshard.plan(place, place), *pools, cast=many)
    with pytest.raises(PlanError, match=r"mla: .*the model has no K and V of their own; expected Scale"):
        reshard.plan(latent, latent, cast=Scale(k=0.5, v=0.25))
    reshard.plan(latent, latent, cast=Scale([0.5, 0.25, 0.5, 1.0]))
    said = reshard.plan(place, place, cast=Scale(k=[0.5, 0.25, 0.5, 4.0], v=0.125), layouts=(NHD, "record/nvfp4_universal"))
    assert "relative to 8 scales of the tensor, 0.125 to 4, to nearest" in said.explain()
    assert as_json(said)["cast"]["scale"] == {"k": [0.5, 0.25, 0.5, 4.0], "v": 0.125}
    made = reshard.plan(place, place, cast=Scale([1.0, 1.0, 1.0, 0.5]), layouts=(NHD, FP8))
    with pytest.raises(PlanError, match="every plane that is cast has scales of its own, which no scale of the caller multiplies"):
        _ = made.cast_parts


def test_plans_with_other_scales_have_other_fingerprints() -> None:
    """Red: a long Scale is cut off when it is printed."""
    place = engine("tp1", 16, "src", model=replace(MODEL, nl=100))
    numbers = [1.0 + n / 128 for n in range(100)]
    plans = [reshard.plan(place, place, cast=Scale(of)) for of in (numbers, [*numbers[:99], 3.0])]
    assert str(plans[0].cast) == str(plans[1].cast) and plans[0].fingerprint != plans[1].fingerprint


def test_all_ranks_of_a_side_have_one_layout() -> None:
    src, dst = engine("tp1", 16, "src"), engine("tp2", 16, "dst")
    mixed = [pools_of(dst, FP8)[0], pools_of(dst, "record/mxfp8_universal")[1]]
    with pytest.raises(BindError, match="one layout for all ranks of dst, got record/per_token_head_fp8_planes, record/mx"):
        reshard.Local(reshard.plan(src, dst, cast="amax"), pools_of(src, NHD), mixed)


# ---- what is said ----------------------------------------------------------------------------------------------------


def test_what_is_cast_is_said() -> None:
    src, dst = engine("tp4", 16, "prefill"), engine("tp2", 64, "decode")
    made = reshard.plan(src, dst, cast="amax", layouts=(NHD, FP8))
    assert "cast 'amax': data: bfloat16 → float8_e4m3fn\nproven: every coordinate of decode once" in str(made)
    assert ", and every scale from a message that has all of its elements; 4 of 4 source ranks send" in str(made)
    assert made.explain().endswith(
        "Cast: in data, values change from bfloat16 to float8_e4m3fn, each group of 32 with a float32 scale from its largest "
        "value, to nearest, ties to even.\n"
        "Between processes, chunks have the format of decode, the smaller one: prefill casts before it sends."
    )
    back = reshard.plan(dst, src, cast="amax", layouts=(FP8, NHD))
    assert "each group of 32 with its float32 scale" in back.explain()
    assert back.explain().endswith("chunks have the format of decode, the smaller one: prefill casts what it receives.")
    assert as_json(made)["cast"] == {
        "scale": "amax",
        "planes": [
            {"from": {"plane": "", "dtype": "bfloat16"}, "to": {"plane": "data", "dtype": "float8_e4m3fn"}, "scales": "scale"}
        ],
    }
    assert "the layouts of both sides say what changes" in reshard.plan(src, dst, cast="amax").explain()
    assert "nothing changes, as both sides have the same formats" in str(reshard.plan(src, dst, cast="amax", layouts=(FP8, FP8)))
    run = reshard.Local(reshard.plan(src, dst, cast="amax"), pools_of(src, NHD), pools_of(dst, FP8))
    assert "bfloat16 → float8_e4m3fn" in run.explain() and "kernel cast" in run.explain()
    latent = BlockShape(nl=2, no=1, nh=1, nt=16, hd=576, dtype="bfloat16")
    places = [Placement("tp1", model=latent, nt=16, name=name) for name in ("prefill", "decode")]
    text = reshard.plan(*places, cast="amax", layouts=("record/mla_joined", "vllm/fp8_ds_mla")).explain()
    assert "in latent, values change" in text and "Copied bit by bit: rope." in text


def test_a_plan_with_a_cast_is_another_plan() -> None:
    src, dst = engine("tp4", 16, "prefill"), engine("tp2", 64, "decode")
    plans = [
        reshard.plan(src, dst, **options)
        for options in (
            {}, {"cast": "amax"}, {"cast": Scale(1.0)}, {"cast": Scale(2.0)}, {"cast": "amax", "layouts": (NHD, FP8)},
            {"cast": "amax", "layouts": (NHD, "record/mxfp8_universal")},
        )
    ]  # fmt: skip
    assert len({made.fingerprint for made in plans}) == len(plans)
    assert "cast" not in as_json(plans[0]) and "cast" not in str(plans[0]).lower() and "Cast" not in plans[0].explain()


def test_bytes_of_a_message_are_those_of_the_smaller_side() -> None:
    src, dst = engine("tp2", 16, "src"), engine("tp2", 16, "dst", model=replace(MODEL, dtype="float8_e4m3fn"))
    for places in ((src, dst), (dst, src)):
        made = reshard.plan(*places, cast=Scale(1.0))
        assert made.nbytes(made.messages[0]) == 4 * 2 * 4 * 16 * 32


def test_kinds_of_the_oracle() -> None:
    assert {kind.name for kind in KINDS} >= {"fp8", "nvfp4, back", "mla", "constant, back"} and cast_resharding.engine(4).world == 1
