"""The picture of a resharding: every rank and message is drawn, bars show what ranks hold, and nothing overlaps."""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_figure import _nothing_overlaps, boxes, texts

from few import few
from kvbm import Placement, load_shape, reshard
from kvbm.errors import KvbmError
from kvbm.reshard.report import sentence
from kvbm.show import html, reshard_figure

pytest.importorskip("matplotlib")

MODEL = load_shape("llama-3.1-70b")
LATENT = load_shape("deepseek-v3")
DOCS = Path(__file__).resolve().parents[2] / "docs"


def place(mesh: str, name: str, nt: int = 16, model: Any = MODEL, layers: Any = None, **shard: Any) -> Placement:
    return Placement(mesh, shard=shard, model=model, nt=nt, name=name, layers=layers)


def bounds(*numbers: int) -> dict[str, object]:
    return {"over": "pp", "bounds": list(numbers)}


FEW = replace(MODEL, nh=2)
HYBRID = range(5, 80, 6)

#: Name → the steps that are drawn.
CASES: dict[str, Callable[[], tuple[reshard.Resharding, ...]]] = {
    "one rank": lambda: (reshard.plan(place("tp1", "prefill"), place("tp1", "decode")),),
    "tp4 to tp2": lambda: (reshard.plan(place("tp4", "prefill", h="tp"), place("tp2", "decode", 64, h="tp")),),
    "replicas": lambda: (reshard.plan(place("tp2", "a", 16, FEW, h="tp"), place("tp8", "b", 16, FEW, h="tp")),),
    "uneven stages": lambda: (
        reshard.plan(
            place("pp3 tp2", "prefill", h="tp", l=bounds(0, 20, 48, 80)),
            place("pp2 tp4", "decode", 64, h="tp", l=bounds(0, 44, 80)),
        ),
    ),
    "turns": lambda: (
        reshard.plan(place("tp8", "a", 16, FEW, h="tp"), place("tp8", "b", 64, FEW, h="tp/4", t="tp%4 by 1")),
    ),
    "long and short turns": lambda: (
        reshard.plan(place("cp4 tp2", "a", h="tp", t="cp by 1"), place("cp2 tp2", "b", 64, h="tp", t="cp by 64")),
    ),
    "striped": lambda: (
        reshard.plan(place("tp8", "a", 16, LATENT), place("dp2", "b", 16, LATENT), stripe=True),
    ),
    "idle": lambda: (reshard.plan(place("tp8", "a", 16, LATENT), place("tp1", "b", 16, LATENT)),),
    "gather": lambda: reshard.gather(place("tp4", "a", 16, LATENT), place("tp8", "b", 16, LATENT)),
    "64 to 16": lambda: (
        reshard.plan(
            place("pp4 tp16", "prefill", h="tp", l=bounds(0, 18, 40, 61, 80)),
            place("pp2 tp2 dcp4", "decode", 64, h="tp", l=bounds(0, 43, 80), t="dcp by 1"),
        ),
    ),
    "too many": lambda: (
        reshard.plan(place("pp8 cp4 tp8", "a", h="tp", l="pp", t="cp by nt"), place("pp4 tp8", "b", 64, h="tp", l="pp")),
    ),
    "a group of layers": lambda: (
        reshard.plan(
            place("tp4", "a", layers=HYBRID, h="tp"),
            place("pp4 tp2", "b", 32, layers=HYBRID, h="tp", l=bounds(0, 3, 30, 60, 80)),
        ),
    ),
    "names as they come": lambda: (
        reshard.plan(place("tp1", "a $x^2$ & <b>" * 4), place("tp1", "decode-0 " * 12, 1 << 20)),
    ),
}  # fmt: skip


@functools.cache
def drawn(name: str) -> tuple[tuple[reshard.Resharding, ...], Any]:
    steps = CASES[name]()
    return steps, reshard_figure.draw(*steps)


def labels(figure: Any, pattern: str) -> list[tuple[str, ...]]:
    found = [re.fullmatch(pattern, patch.get_label()) for patch in boxes(figure)]
    return [match.groups() for match in found if match]


@pytest.mark.parametrize("name", few(CASES, 7))
def test_all_ranks_and_messages_are_drawn_once_and_nothing_overlaps(name: str) -> None:
    steps, figure = drawn(name)
    said = texts(figure)
    ranks = [
        (side, int(rank))
        for side, some in labels(figure, "(source|destination) ranks (.*)")
        for rank in some.split(" ")
    ]
    worlds = [("source", made.src.world) for made in steps] + [("destination", made.dst.world) for made in steps]
    assert sorted(ranks) == sorted((side, rank) for side, world in worlds for rank in range(world))
    messages = [pair for (some,) in labels(figure, "messages (.*)") for pair in some.split(" ")]
    assert sorted(messages) == sorted(f"{m.src}→{m.dst}" for made in steps for m in made.messages)
    for made in steps:
        if name != "names as they come":  # which are cut
            assert {*sentence(made).split("; "), str(made.src), str(made.dst)} <= set(said)
        unit = min((m.t for m in made.messages), key=lambda unit: unit.tokens)
        assert f"unit of {unit.src_slots} slots of {made.src.nt}" in [patch.get_label() for patch in boxes(figure)]
        assert f"unit of {unit.dst_slots} slots of {made.dst.nt}" in [patch.get_label() for patch in boxes(figure)]
    _nothing_overlaps(figure)


@pytest.mark.slow  # 0.6 s
def test_ranks_are_named_where_they_are_drawn() -> None:
    _, figure = drawn("replicas")
    assert {"0", "1", "0–3 ×4", "4–7 ×4", "from 0", "to 4–7"} <= set(texts(figure))
    assert {"0", "1–7 ×7", "nothing"} <= set(texts(drawn("idle")[1]))
    assert {"62", "… 193 more"} <= set(texts(drawn("too many")[1]))


def test_ribbons_are_as_wide_as_their_bytes() -> None:
    (made,), figure = drawn("uneven stages")
    tall = {}
    for patch in boxes(figure):
        if match := re.fullmatch(r"messages (\d+)→(\d+)", patch.get_label()):
            ys = patch.get_path().vertices[:, 1]
            tall[int(match[1]), int(match[2])] = ys[7] - ys[0]
            assert ys[4] - ys[3] == pytest.approx(ys[7] - ys[0]), "at both ends"
    one = made.messages[0]
    for m in made.messages:
        wanted = made.nbytes(m, 16) / made.nbytes(one, 16)
        assert tall[m.src, m.dst] / tall[one.src, one.dst] == pytest.approx(wanted)


@pytest.mark.slow  # 1.3 s
def test_bytes_of_turns_are_those_of_the_tokens_that_go() -> None:
    """Of the units of two ranks with long turns, each rank sends only half."""
    for name, each in (("long and short turns", ("40 KiB", "80 KiB")), ("turns", ("10 KiB", "10 KiB"))):
        assert set(each) == {text for text in texts(drawn(name)[1]) if text.endswith("KiB")}


@pytest.mark.parametrize("name", ["tp4 to tp2", "uneven stages", "turns", "long and short turns", "gather"])
def test_bars_say_what_a_rank_holds_and_who_sends_it(name: str) -> None:
    """Computed from the strips alone, for each coordinate."""
    for made in drawn(name)[0]:
        drawing = reshard_figure._Drawing(reshard_figure.Sheet(), made)
        for side, some in enumerate((drawing.sources, drawing.targets)):
            for box, axis in itertools.product(some, "lht"):
                cells = drawing._cells(side, box, axis)
                whole = drawing.tokens if axis == "t" else range(len(cells))
                for x, cell in zip(whole, cells, strict=True):
                    held = {r: holds((made.src, made.dst)[side].strips(r), axis, x) for r in box.ranks}
                    assert len(set(held.values())) == 1 and (cell is not None) == held[box.ranks[0]]
                    wanted = {
                        m.src
                        for m in made.messages
                        if (m.dst if side else m.src) in box.ranks
                        and holds(made.sends[m.src], axis, x) and holds(made.takes[m.dst], axis, x)
                    }  # fmt: skip
                    assert {drawing.source_of[rank] for rank in wanted} == set(cell or ())


def holds(strips: Any, axis: str, x: int) -> bool:
    return bool(strips.t.holds(x)) if axis == "t" else x in set(getattr(strips, axis))


@pytest.mark.slow  # 0.6 s
def test_neighbours_differ_in_colour_and_in_grey() -> None:
    def grey(colour: str) -> float:
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        return 0.3 * red + 0.59 * green + 0.11 * blue

    light, dark = ([grey(fill) for fill, *_ in reshard_figure._COLOURS[i::2]] for i in (0, 1))
    assert min(light) - max(dark) > 60 and len(set(reshard_figure._COLOURS)) == 10
    for name in ("uneven stages", "64 to 16"):
        (made,) = drawn(name)[0]
        drawing = reshard_figure._Drawing(reshard_figure.Sheet(), made)
        for j in range(len(drawing.targets)):
            senders = [drawing.colours[i] for i, target in sorted(drawing.ribbons) if target == j]
            assert len(set(senders)) == len(senders)


@pytest.mark.parametrize("count", [11, 16, 63])
def test_no_colour_comes_twice(count: int) -> None:
    """Also with more boxes than there are chosen colours; neighbours differ in greyscale."""
    model = load_shape(f"nl=2,no=2,nh={count},nt=16,hd=8,dtype=float16")
    src = Placement(f"tp{count}", shard={"h": "tp"}, model=model, nt=16, name="a")
    made = reshard.plan(src, Placement("tp1", shard={}, model=model, nt=16, name="b"))
    drawing = reshard_figure._Drawing(reshard_figure.Sheet(), made)
    fills = [fill for fill, *_ in drawing.colours]
    assert len(fills) == len(set(fills)) == count
    greys = [sum(w * int(fill[i : i + 2], 16) for w, i in ((0.3, 1), (0.59, 3), (0.11, 5))) for fill in fills]
    assert all(light - dark > 60 for light, dark in zip(greys[::2], greys[1::2], strict=False))


def test_nothing_is_imported_before_a_picture_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys, kvbm.reshard, kvbm.show.reshard_figure; print('matplotlib' in sys.modules, 'numpy' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).split() == ["False", "False"]
    made = CASES["one rank"]()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(KvbmError, match="pictures need matplotlib"):
        reshard_figure.draw(*made)


def test_the_picture_in_the_docs_is_current(tmp_path: Path) -> None:
    """The texts are equal; the digits of curves depend on matplotlib."""
    html.save(drawn("tp4 to tp2")[1], tmp_path / "made.svg")
    made, kept = (
        re.findall(r">([^<\n]+)<", path.read_text("utf-8")) for path in (tmp_path / "made.svg", DOCS / "howto" / "reshard.svg")
    )
    assert made == kept
