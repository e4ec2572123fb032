"""Presets, compared with the engines' formulas, which are copied here from their sources."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbm import BlockShape, Placement, PlanError, SpecError, load_shape, reshard

SIZES = range(1, 17)


def model(nl: int = 61, nh: int = 8, nt: int = 16) -> BlockShape:
    return BlockShape(nl=nl, no=2, nh=nh, nt=nt, hd=64)


# ---- layers --------------------------------------------------------------------------------------------------------


def vllm_stages(layers: int, pp: int) -> list[range]:
    """``get_pp_indices`` of vllm/distributed/utils.py."""
    partitions = [layers // pp for _ in range(pp)]
    if remaining := layers % pp:
        for i in range(2, remaining + 2):
            partitions[-i] += 1
    starts = [sum(partitions[:rank]) for rank in range(pp)]
    return [range(start, start + size) for start, size in zip(starts, partitions, strict=True)]


def sglang_stages(layers: int, pp: int) -> list[range]:
    """``get_pp_indices`` of sglang/srt/distributed/utils.py."""
    base, remainder = divmod(layers, pp)
    found = []
    for rank in range(pp):
        if rank >= pp - remainder:
            start = rank * (base + 1) - (pp - remainder)
            found.append(range(start, start + base + 1))
        else:
            found.append(range(rank * base, rank * base + base))
    return found


def trtllm_stages(layers: int, pp: int) -> list[range]:
    """``Mapping.pp_layers``: torch.tensor_split."""
    size, more = divmod(layers, pp)
    starts = [rank * size + min(rank, more) for rank in range(pp + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


STAGES = {"vllm": vllm_stages, "sglang": sglang_stages, "trtllm": trtllm_stages}


@pytest.mark.parametrize("engine", STAGES)
def test_stages(engine: str) -> None:
    for layers, pp in itertools.product((16, 27, 61, 80), SIZES):
        made = reshard.load(f"{engine}:pp{pp}", model(layers))
        assert [list(made.strips(rank).l) for rank in range(pp)] == [list(r) for r in STAGES[engine](layers, pp)]


def test_torch_says_the_same() -> None:
    torch = pytest.importorskip("torch")
    for layers, pp in itertools.product((27, 61), SIZES):
        parts = torch.tensor_split(torch.arange(layers), pp)
        assert [part.tolist() for part in parts] == [list(r) for r in trtllm_stages(layers, pp)]


# ---- heads and ranks -----------------------------------------------------------------------------------------------


def degrees(heads: int) -> Iterator[int]:
    return (tp for tp in SIZES if heads % tp == 0 or tp % heads == 0)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "dynamo"])
def test_heads_and_ranks(engine: str) -> None:
    """Ranks are pp-major; a rank has max(1, H // tp) heads from rank * H // tp on."""
    for heads, pp in itertools.product((1, 2, 3, 4, 6, 8), (1, 2, 3)):
        for tp in degrees(heads):
            made = reshard.load(f"{engine}:tp{tp},pp{pp}", model(nh=heads))
            stages = STAGES["vllm" if engine == "dynamo" else engine](61, pp)
            assert made.world == pp * tp
            for rank in range(pp * tp):
                first = rank % tp * heads // tp
                strips = made.strips(rank)
                assert list(strips.h) == list(range(first, first + max(1, heads // tp)))
                assert list(strips.l) == list(stages[rank // tp])
                assert strips.t.over == 1


@pytest.mark.parametrize("order", [" ".join(axes) for axes in itertools.permutations(("pp", "tp", "cp"))])
def test_ranks_of_trtllm(order: str) -> None:
    """C++: pp * (tp * cp) + tp * cp_size + cp.  Older Python: pp * (tp * cp) + cp * tp_size + tp."""
    for tp, pp, cp in itertools.product((1, 2, 4, 8), (1, 2, 3), (1, 2, 4)):
        made = reshard.trtllm(model(), tp=tp, pp=pp, cp=cp, order=order)
        stages = trtllm_stages(61, pp)
        for i, j, k in itertools.product(range(pp), range(tp), range(cp)):
            rank = {"pp tp cp": i * tp * cp + j * cp + k, "pp cp tp": i * tp * cp + k * tp + j}.get(order)
            if rank is None:  # its own order: of mixed radix
                size, at = {"pp": pp, "tp": tp, "cp": cp}, {"pp": i, "tp": j, "cp": k}
                a, b, c = order.split()
                rank = (at[a] * size[b] + at[b]) * size[c] + at[c]
            strips = made.strips(rank)
            assert list(strips.l) == list(stages[i])
            assert list(strips.h) == list(range(j * 8 // tp, (j + 1) * 8 // tp))
            assert (strips.t.index, strips.t.over) == (k, cp)


# ---- tokens --------------------------------------------------------------------------------------------------------


def get_dcp_local_seq_lens(seq_len: int, dcp: int, rank: int, interleave: int) -> int:
    """From vllm/v1/attention/backends/utils.py."""
    base = seq_len // interleave // dcp * interleave
    remainder = seq_len - base * dcp
    return base + min(max(remainder - rank * interleave, 0), interleave)


@pytest.mark.slow  # half a second
def test_dcp() -> None:
    """Token `pos` is on rank ``pos // I % dcp`` of the group, in slot ``pos // (I * dcp) * I + pos % I``."""
    for tp in SIZES:
        for dcp in (n for n in SIZES if tp % n == 0):
            for nt, interleave in [(size, i) for size in (8, 12) for i in range(1, size + 1) if size % i == 0]:
                made = reshard.vllm(model(nh=1), tp=tp, dcp=dcp, interleave=interleave, nt=nt)
                lengths = [0] * dcp
                turns = [made.strips(rank).t for rank in range(tp)]
                for pos in range(3 * nt * dcp + 5):
                    owner, slot = pos // interleave % dcp, pos // (interleave * dcp) * interleave + pos % interleave
                    assert [turn.holds(pos) for turn in turns] == [rank % dcp == owner for rank in range(tp)]
                    assert turns[owner].slot(pos) == slot == lengths[owner]
                    lengths[owner] += 1
                    # The slot is in the block that the virtual block of nt * dcp tokens stands for.
                    assert slot // nt == pos // (nt * dcp)
                    if pos % 7 == 0:
                        counts = [get_dcp_local_seq_lens(pos + 1, dcp, rank, interleave) for rank in range(dcp)]
                        assert counts == lengths == [turn.held(pos + 1) for turn in turns[:dcp]]


def test_dcp_of_several_heads() -> None:
    for heads, dcp, pp in itertools.product((1, 2, 4), (2, 4), (1, 2)):
        for tp in SIZES:
            if tp % heads:
                continue
            if tp % (heads * dcp):
                with pytest.raises(SpecError, match=r"expected the ranks of a group to hold one head"):
                    reshard.vllm(model(nh=heads), tp=tp, dcp=dcp, pp=pp)
                continue
            made = reshard.vllm(model(nh=heads), tp=tp, dcp=dcp, pp=pp)
            for first in range(0, tp * pp, dcp):
                strips = [made.strips(rank) for rank in range(first, first + dcp)]
                assert len({(s.l, s.h) for s in strips}) == 1 and [s.t.index for s in strips] == list(range(dcp))


def test_cp_of_trtllm() -> None:
    """Whole blocks in turns: block b of a sequence is on rank b % cp, as its block b // cp."""
    for cp, nt in itertools.product(SIZES, (4, 16, 32)):
        made = reshard.trtllm(model(nh=1), cp=cp, nt=nt)
        for pos in range(0, 3 * nt * cp, 3):
            block = pos // nt
            for rank in range(cp):
                turn = made.strips(rank).t
                assert bool(turn.holds(pos)) is (block % cp == rank)
                if block % cp == rank:
                    assert divmod(turn.slot(pos), nt) == (block // cp, pos % nt)


# ---- who sends to whom ---------------------------------------------------------------------------------------------


def target_ranks(mine: int, mine_tp: int, peer_tp: int) -> range:
    """``targetIRanks`` of TensorRT-LLM's cacheSplitConcat.cu: the peers of a rank, if a power of two divides the other."""
    if mine_tp <= peer_tp:
        k = peer_tp // mine_tp
        return range(mine * k, mine * k + k)
    return range(mine // (mine_tp // peer_tp), mine // (mine_tp // peer_tp) + 1)


def test_sources_are_those_of_trtllm() -> None:
    for a, b in itertools.product((1, 2, 4, 8), repeat=2):
        made = reshard.plan(reshard.trtllm(model(), tp=a), reshard.trtllm(model(), tp=b))
        for rank in range(b):
            assert {m.src for m in made.messages if m.dst == rank} == set(target_ranks(rank, b, a))


def first_slices(src_tp: int, dst_tp: int, src: int, dst: int, heads: int) -> tuple[int, int, int]:
    """The first version of SGLang's slices: first head in the source, number, first place in the destination."""
    ours, theirs = max(1, heads // src_tp), max(1, heads // dst_tp)
    if src_tp > dst_tp:
        return 0, ours, src * ours % theirs
    return dst * theirs % ours, theirs, 0


def later_slices(src_tp: int, dst_tp: int, src: int, dst: int, heads: int) -> tuple[int, int, int]:
    """With the fix for source ranks that hold the same heads."""
    ours, theirs = max(1, heads // src_tp), max(1, heads // dst_tp)
    if src_tp > dst_tp:
        return 0, ours, src // max(1, src_tp // heads) * ours % theirs
    return dst * theirs % ours, theirs, 0


@pytest.mark.parametrize(("slices", "fixed"), [(first_slices, False), (later_slices, True)])
def test_the_plan_differs_from_sglangs_slices_where_they_are_wrong(slices: Any, fixed: bool) -> None:
    """A slice is right if each of its heads belongs to its place.  All messages of the plan are right."""
    wrong, right, replicated_sources = 0, 0, 0
    for heads in (1, 2, 4, 8):
        degrees_ = [tp for tp in (1, 2, 4, 8, 16) if heads % tp == 0 or tp % heads == 0]
        for a, b in itertools.product(degrees_, repeat=2):
            src, dst = reshard.sglang(model(nh=heads), tp=a), reshard.sglang(model(nh=heads), tp=b)
            for m in reshard.plan(src, dst).messages:
                ours, theirs = list(src.strips(m.src).h), list(dst.strips(m.dst).h)
                planned = {
                    p: ours[s]
                    for meeting in m.h
                    for s, p in zip(meeting.coordinates("src"), meeting.coordinates("dst"), strict=True)
                }
                assert all(theirs[place] == head for place, head in planned.items())
                first, count, place = slices(a, b, m.src, m.dst, heads)
                moved = {place + i: ours[first + i] for i in range(count) if first + i < len(ours)}
                good = all(place < len(theirs) and theirs[place] == head for place, head in moved.items())
                assert good is (moved == planned), (heads, a, b, m.src, m.dst)
                wrong, right = wrong + (not good), right + good
                replicated_sources += not good and a > heads and a > b
    assert wrong and right > 4 * wrong
    assert bool(replicated_sources) is not fixed


# ---- as text, and wrong --------------------------------------------------------------------------------------------


def test_texts(tmp_path: Path) -> None:
    shape = model(nh=2)
    for text, made in {
        "vllm:tp8,pp2,dcp4,nt32,interleave16": reshard.vllm(shape, tp=8, pp=2, dcp=4, nt=32, interleave=16),
        "vllm": reshard.vllm(shape),
        "trtllm:tp2, cp4,order=pp cp tp": reshard.trtllm(shape, tp=2, cp=4, order="pp cp tp"),
        "sglang:pp3": reshard.sglang(shape, pp=3),
        "dynamo:tp2": reshard.vllm(shape, tp=2),
        "dynamo:tp2,cp2,engine=trtllm": reshard.trtllm(shape, tp=2, cp=2),
    }.items():
        assert reshard.load(text, shape).fingerprint == made.fingerprint
        assert reshard.load(text, shape).name == text
    file = tmp_path / "vllm:x.yaml"
    file.write_text("mesh: tp2\nshard: {h: tp}\n", encoding="utf-8")
    assert reshard.load(str(file), shape) == Placement("tp2", shard={"h": "tp"}, model=shape, name="vllm:x")
    assert reshard.sglang(shape, layers=[1, 60], pp=2).strips(1).l.size == 1


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "expected a .yaml file, or a preset such as 'vllm:tp8,pp2' (vllm, trtllm, sglang, dynamo)"),
        ("llama", "expected a .yaml file, or a preset"),
        ("none.yaml", "none.yaml: no such file"),
        ("vllm:", "expected tpN, ppN, dcpN, interleaveN, ntN, block-size=N, got ''"),
        ("vllm:tp", "got 'tp'"),
        ("vllm:tp=x", "got 'tp=x'"),
        ("vllm:tp8,cp2", "got 'cp2'"),
        ("vllm:tp8,tp8", "tp: expected once, got twice"),
        ("vllm:tp0", "tp: expected an integer from 1 to 131071, got 0"),
        ("vllm:tp" + "9" * 4000, "expected tpN"),
        ("vllm:tp999999999", "tp: expected an integer from 1 to 131071, got 999999999"),
        ("vllm:tp99999", "at most 65,536 ranks"),
        ("vllm:pp62", "pp: expected at most 61 stages for 61 layers, got 62"),
        ("vllm:tp3", "8 heads by 3 ranks"),
        ("vllm:tp8,dcp2", "dcp: 8 heads by 8 ranks, 2 in a group"),
        ("vllm:tp16,dcp2,interleave3", "turns of 3 tokens, blocks of 16"),
        ("vllm:tp16,dcp2,interleave32", "interleave: expected a divisor of the 16 tokens of a block, got 32"),
        ("vllm:nt0", "nt: expected tokens of a block"),
        ("trtllm:order=tp", "order: expected the axes pp, tp and cp, slowest first, got 'tp'"),
        ("dynamo:engine=lmdeploy", "engine: expected one of vllm, trtllm, sglang, got 'lmdeploy'"),
        ("dynamo:tp2,cp2", "expected options of vllm, tp, pp, dcp, interleave, nt, layers, got 'cp'"),
        ("vllm:tp8\0", "got"),
    ],
)  # fmt: skip
def test_bad_texts(text: str, match: str) -> None:
    with pytest.raises(SpecError, match=re.escape(match)) as caught:
        reshard.load(text, model())
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("preset", [reshard.vllm, reshard.trtllm, reshard.sglang, reshard.dynamo, reshard.load])
def test_wrong_types(preset: Any) -> None:
    text = ("vllm",) if preset is reshard.load else ()
    for value in (None, b"llama-3.1-8b", 5):
        with pytest.raises(SpecError, match="model: expected a BlockShape or a text"):
            preset(*text, value)
    if preset is reshard.load:
        for value in (None, 5, b"vllm", ["vllm"]):
            with pytest.raises(SpecError, match="expected a file, or a preset"):
                preset(value, model())
        return
    for what, value in itertools.product(("tp", "pp", "nt", "layers", "name"), (-1, 2.5, "x", True, [[]], object())):
        with pytest.raises(SpecError, match=r"expected"):
            preset(model(), **{what: value if what != "name" or not isinstance(value, str) else 5})
    if preset is reshard.dynamo:
        for engine in (None, [], "dynamo"):
            with pytest.raises(SpecError, match="engine: expected one of"):
                preset(model(), engine=engine)


def test_sides_of_other_models_are_refused() -> None:
    with pytest.raises(PlanError, match="nl: 61 layers in one model, 80 in the other"):
        reshard.plan(reshard.vllm(model()), reshard.vllm(load_shape("llama-3.1-70b,hd=64")))


def test_a_unit_is_the_same_in_all_messages_of_a_plan() -> None:
    """So the table's first line is true for all of them."""
    for a, b in itertools.product(
        ("vllm:tp8,dcp4,interleave4,nt32", "trtllm:cp3,nt24", "sglang:tp2,pp3,nt5"), repeat=2
    ):
        made = reshard.plan(reshard.load(a, model(nh=1)), reshard.load(b, model(nh=1)))
        assert len({(m.t.tokens, m.t.src_slots, m.t.dst_slots) for m in made.messages}) == 1
        tokens = math.lcm(*(m.t.tokens for m in made.messages)) + 3
        for m in made.messages:
            one, two = made.sends[m.src].t, made.takes[m.dst].t
            assert made.nbytes(m, tokens) == made.nbytes(m, 0) + m.layers * m.heads * 256 * sum(
                bool(one.holds(x) and two.holds(x)) for x in range(tokens)
            )
