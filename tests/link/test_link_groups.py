"""Several pools of a rank in one endpoint: full attention, sliding window, draft model; layers have the model's numbers."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

import kvbm
from kvbm import BindError, Placement, Pool, Span, reshard, wire
from linking import close_all, ended

#: The target, of which every third layer attends to all tokens, and the draft.
TARGET, DRAFT = (
    kvbm.load_shape("llama-3.1-8b,nl=9,nh=4,hd=16,dtype=uint16"),
    kvbm.load_shape("llama-3.1-8b,nl=2,nh=2,hd=8,dtype=uint16"),
)
FULL = (0, 3, 6)
LAYERS = {"full": FULL, "window": tuple(sorted({*range(9)} - {*FULL})), "draft": (0, 1)}
MODELS = {"full": TARGET, "window": TARGET, "draft": DRAFT}

#: Tokens of the sequence, and where the window's begin.
TOKENS, FIRST = 150, 96

LAYOUTS = {"prefill": "vllm/flash_attn_nhd", "decode": "vllm/flash_attn_hnd"}


def code(group: str, layer: int, o: Any, h: Any, t: Any, d: Any) -> Any:
    """The value of an element, from its group and its place in the model."""
    number = [*LAYERS].index(group)
    return ((((number * 11 + layer) * 2 + o) * 7 + h) * 331 + t * 13 + d * 5 + 1).astype(np.uint16)


class Engine:
    """The ranks of one engine: placements, pools, tables and endpoints by group."""

    def __init__(self, name: str, mesh: str, nt: dict[str, int], hub: wire.Hub) -> None:
        self.name, self.nt, self.ends = name, nt, []
        shard: dict[str, Any] = {"h": "tp"}
        self.tables, self.places = {}, {}
        for group, model in MODELS.items():
            if "pp" in mesh:  # the draft's layers are all on one stage
                shard["l"] = {"over": "pp", "bounds": [0, 4, 9] if model is TARGET else [0, 1, 2]}
            self.places[group] = Placement(
                mesh, shard=dict(shard), model=model, nt=nt[group], layers=LAYERS[group], name=name
            )
            used = -(-(TOKENS - self.origin(group)) // nt[group])
            self.tables[group] = random.Random(group + name).sample(range(used + 2), used)
        for rank in range(self.places["full"].world):
            groups = {}
            for group, place in self.places.items():
                pool = Pool.allocate(kvbm.load(LAYOUTS[name]), place.shape(rank), len(self.tables[group]) + 2)
                for array in pool.arrays:
                    array[:] = 0
                groups[group] = place, pool
            carrier = wire.memory(f"{name}/{rank}", hub)
            self.ends.append(
                reshard.Endpoint(name, groups, rank, wire=carrier, chunk_bytes=1 << 16, ring_bytes=1 << 20)
            )

    def origin(self, group: str) -> int:
        return FIRST if group == "window" else 0

    def span(self, group: str) -> Span:
        return Span(self.tables[group], range(self.origin(group), TOKENS), self.origin(group))

    def elements(self, rank: int, group: str) -> Any:
        """Per layer its number, its array as ``o block slot head d``, and the expected contents of all slots of the table."""
        place, pool = self.ends[rank].groups[group]
        strips = place.strips(rank)
        table, nt, model = self.tables[group], self.nt[group], place.model
        heads = list(strips.h)
        for layer, array in zip(strips.l, pool.arrays, strict=True):
            slots = array if self.name == "prefill" else np.moveaxis(array, 3, 2)  # o b h t d
            o, t, h, d = np.ix_(range(2), self.origin(group) + np.arange(len(table) * nt), heads, range(model.hd))
            yield layer, slots, code(group, layer, o, h, t, d).reshape(2, len(table), nt, len(heads), model.hd)


@pytest.mark.parametrize("pulls", [False, True])
@pytest.mark.parametrize(
    ("src", "dst"),
    [("tp2", "tp1"), ("tp1", "tp2"), ("pp2 tp1", "tp2"), ("tp2", "pp2 tp2")],
    ids=lambda mesh: mesh.replace(" ", "x"),
)  # fmt: skip
def test_each_group(src: str, dst: str, pulls: bool) -> None:
    """One key, one endpoint per rank: windows of layers contain some layers of a group or none; every byte, also outside tokens."""
    hub = wire.Hub()
    prefill = Engine("prefill", src, {"full": 16, "window": 16, "draft": 8}, hub)
    decode = Engine("decode", dst, {"full": 64, "window": 32, "draft": 16}, hub)
    try:
        for rank, group in itertools.product(range(len(prefill.ends)), MODELS):
            for _, slots, held in prefill.elements(rank, group):
                slots[:, prefill.tables[group]] = held
        cards = [[end.card() for end in engine.ends] for engine in (prefill, decode)]
        there, here = [end.meet(cards[1]) for end in prefill.ends], [end.meet(cards[0]) for end in decode.ends]
        calls = []
        for group, model in MODELS.items():
            calls += [
                lambda link=link, group=group: link.receive("k", decode.span(group), group=group) for link in here
            ]
            for link, first in itertools.product(there, range(0, model.nl, 2)):
                some, go = range(first, min(first + 2, model.nl)), link.offer if pulls else link.send
                calls.append(
                    lambda go=go, some=some, group=group: go("k", prefill.span(group), group=group, layers=some)
                )
        random.Random(3).shuffle(calls)
        assert not any(ended([call() for call in calls]))
        for rank, group in itertools.product(range(len(decode.ends)), MODELS):
            count = 0
            for layer, slots, held in decode.elements(rank, group):
                want = np.zeros_like(slots)
                want[:, decode.tables[group]] = held
                behind = (TOKENS - decode.origin(group)) % decode.nt[group]
                if behind:
                    want[:, decode.tables[group][-1], behind:] = 0
                assert np.array_equal(slots, want), (group, layer, rank)
                count += 1
            assert count == decode.places[group].strips(rank).l.size
    finally:
        close_all([*prefill.ends, *decode.ends])


def test_groups_must_be_the_same() -> None:
    """Their names, layers and models must be equal."""
    hub = wire.Hub()
    sizes = {"full": 16, "window": 16, "draft": 16}
    prefill, decode = Engine("prefill", "tp1", sizes, hub), Engine("decode", "tp1", sizes, hub)
    [source], [end] = prefill.ends, decode.ends
    ends = [source, end]
    try:
        for number, (change, said) in enumerate(
            (
                ({"window": None}, "groups"),
                ({"window": "full"}, "covered"),
                ({"full": "draft"}, "nl: 9 layers in one model, 2 in the other"),
                ({"draft": "full"}, "model nl=9,.*: expected that of this side, nl=2,"),
            )
        ):
            groups = dict(end.groups)
            for name, other in change.items():
                groups.pop(name)
                if other is not None:
                    groups[name] = end.groups[other]
            ends.append(
                reshard.Endpoint("decode", groups, 0, wire=wire.memory(f"other{number}", hub), ring_bytes=1 << 26)
            )
            with pytest.raises(kvbm.KvbmError, match=said):
                source.meet([ends[-1].card()])
        link = source.meet([end.card()])
        with pytest.raises(BindError, match="group"):
            link.send("k", prefill.span("full"))
    finally:
        close_all(ends)
