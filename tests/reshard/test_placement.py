"""Placements in files: every form of a share, and bad input, which raises a `SpecError` with file and line."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import strategies
from kvbm import BlockShape, Placement, SpecError, load_shape, reshard
from kvbm.reshard.strips import Turns

MODEL = BlockShape(nl=12, no=2, nh=2, nt=16, hd=64)
GOOD = """\
title: decode
mesh: pp2 tp8
shard:
  h: tp/4
  t: tp%4 by 1
  l: {over: pp, bounds: [0, 5, 12]}
layers: [0-2, 5-11 by 3]
nt: 64
read_from: somewhere
notes: {any: [thing]}
"""


def test_a_file_says_what_python_says() -> None:
    made = Placement.parse(GOOD, MODEL, "decode.yaml")
    same = Placement(
        {"pp": 2, "tp": np.int64(8)},
        shard={"h": "tp/4", "t": "tp%4 by 1", "l": {"over": "pp", "bounds": np.array([0, 5, 12])}},
        model=MODEL, nt=np.int32(64), layers=[0, 1, 2, 5, 8, 11], title="decode", name="decode",
    )  # fmt: skip
    assert made == same and hash(made) == hash(same) and made.fingerprint == same.fingerprint
    for rank in range(16):
        strips = made.strips(rank)
        assert list(strips.l) == ([0, 1, 2] if rank < 8 else [5, 8, 11])
        assert list(strips.h) == [rank % 8 // 4]
        assert strips.t == Turns(1, 4, rank % 4)
    assert Placement.parse(GOOD, MODEL, "x.yaml", layers=[3], nt=32, title="", name="n").shape(0) == BlockShape(
        nl=1, no=2, nh=1, nt=32, hd=64
    )


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        ("h: tp", [[0], [0], [0], [0], [1], [1], [1], [1]]),
        ("h: tp/4", [[0], [0], [0], [0], [1], [1], [1], [1]]),
        ("h: tp%2", [[0], [1], [0], [1], [0], [1], [0], [1]]),
        ("h: tp/2%2", [[0], [0], [1], [1], [0], [0], [1], [1]]),
        ("h: ' tp%4/2 '", [[0], [0], [1], [1], [0], [0], [1], [1]]),
        ("l: tp/4", [[*range(6)]] * 4 + [[*range(6, 12)]] * 4),
        ("l: {over: tp/4, bounds: [0, 1, 12]}", [[0]] * 4 + [[*range(1, 12)]] * 4),
        ("t: tp by 2", [Turns(2, 8, rank) for rank in range(8)]),
        ("t: tp/2 by nt", [Turns(64, 4, rank // 2) for rank in range(8)]),
        ("t: tp%4   by   128", [Turns(128, 4, rank % 4) for rank in range(8)]),
    ],
)
def test_shares(share: str, expected: list[Any]) -> None:
    made = Placement.parse(f"mesh: tp8\nnt: 64\nshard: {{{share}}}\n", MODEL)
    held = [getattr(made.strips(rank), share[0]) for rank in range(8)]
    assert [strip if share[0] == "t" else list(strip) for strip in held] == expected


@pytest.mark.parametrize(
    ("old", "new", "line", "match"),
    [
        ("mesh: pp2 tp8", "mesh: [pp2, tp8]", 2, "mesh: expected a text, got a list"),
        ("mesh: pp2 tp8", "mesh:", 2, "mesh: expected axes"),
        ("mesh: pp2 tp8", "mesh: pp2 tp0", 2, "mesh: expected axes"),
        ("mesh: pp2 tp8", "mesh: tp2 tp8", 2, "mesh: expected axes"),
        ("mesh: pp2 tp8", "mesh: pp2 tp٨", 2, "mesh: expected axes"),
        ("mesh: pp2 tp8", "mesh: pp99999 tp8", 2, "at most 65,536 ranks"),
        ("mesh: pp2 tp8", f"mesh: pp{'9' * 4000}", 2, "mesh: expected axes"),
        ("mesh: pp2 tp8", "mash: pp2", 2, "unknown key 'mash'"),
        ("mesh: pp2 tp8\n", "", 1, "key 'mesh' missing"),
        ("h: tp/4", "h: tp/3", 4, "8 ranks by 3: expected a divisor of 8"),
        ("h: tp/4", "h: cp", 4, "expected an axis of the mesh pp2 tp8"),
        ("h: tp/4", "h: tp by 2", 4, "h: expected no turns, which only tokens take"),
        ("h: tp/4", "h: 8", 4, "expected an axis of the mesh"),
        ("h: tp/4", "h: {over: tp, bounds: [0, 2]}", 4, "for layers"),
        ("h: tp/4", "h: tp//4", 4, "expected an axis of the mesh"),
        ("h: tp/4", "q: tp/4", 4, "unknown key 'q': expected one of l, h, t"),
        ("t: tp%4 by 1", "t: tp%4", 5, "expected turns, e.g. 'tp%4 by 1'"),
        ("t: tp%4 by 1", "t: tp%4 by 0", 5, "expected a text such as"),
        ("t: tp%4 by 1", "t: tp%4 by 48", 5, "turns of 48 tokens, blocks of 64"),
        ("t: tp%4 by 1", "t: tp/4 by 1", 5, "h by tp/4%2 and t by tp/4%2: expected ranks for all 2 × 2 combinations"),
        ("t: tp%4 by 1", "h: tp", 5, "key 'h' is there twice"),
        ("bounds: [0, 5, 12]", "bounds: [0, 12]", 6, "bounds: expected 3 numbers that ascend from 0 to 12"),
        ("bounds: [0, 5, 12]", "bounds: [0, 12, 12]", 6, "bounds: expected 3 numbers"),
        ("bounds: [0, 5, 12]", "bounds: [0, 5.0, 12]", 6, "a bound: expected a number, got '5.0'"),
        ("bounds: [0, 5, 12]", "bounds: &b [0, *b]", 6, "a bound: expected a text, got a list"),
        ("bounds: [0, 5, 12]", "bounds: 5", 6, "bounds: expected a list of layers"),
        (", bounds: [0, 5, 12]", "", 6, "key 'bounds' missing"),
        ("{over: pp, bounds: [0, 5, 12]}", "tp", 6, "12 layers by 8 ranks: expected a number of ranks that divides 12"),
        ("[0-2, 5-11 by 3]", "[0-2, 2-11 by 3]", 7, "layers from 0 to 11, ascending"),
        ("[0-2, 5-11 by 3]", "[0-12]", 7, "layers from 0 to 11, ascending"),
        ("[0-2, 5-11 by 3]", "[5-2]", 7, "layers from 0 to 11, ascending"),
        ("[0-2, 5-11 by 3]", "[]", 7, "layers from 0 to 11, ascending"),
        ("[0-2, 5-11 by 3]", "0-999999999", 7, "layers: expected at most 65,536"),
        ("[0-2, 5-11 by 3]", "[0-2 by 0]", 7, "layers such as 3, 4-20 or 5-77 by 6"),
        ("[0-2, 5-11 by 3]", "[[0]]", 7, "expected a text"),
        ("nt: 64", "nt: 0", 8, "nt: expected tokens of a block, from 1 to 1,048,576, got 0"),
        ("nt: 64", "nt: 16.0", 8, "nt: expected a number"),
        ("nt: 64", "nt: -1", 8, "nt: expected a number"),
        ("nt: 64", "nt: 999999999", 8, "nt: expected tokens of a block"),
        ("nt: 64", f"nt: {'9' * 999}", 8, "nt: expected a number"),
        ("read_from: somewhere", "read_from: [a]", 9, "read_from: expected a text"),
        ("title: decode", "title: {}", 1, "title: expected a text"),
    ],
)  # fmt: skip
def test_errors_name_file_and_line(old: str, new: str, line: int, match: str) -> None:
    assert old in GOOD
    with pytest.raises(SpecError, match=re.escape(match)) as caught:
        Placement.parse(GOOD.replace(old, new, 1), MODEL, "decode.yaml")
    assert str(caught.value).startswith(f"decode.yaml:{line}: ")
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    "text",
    [
        "", "- a\n", "mesh", "\x00", "mesh: {", "? [a]\n: b\n", "mesh: *x\n", "a: " + "[" * 3000, "mesh: tp2\n" + "#" * 70000,
        "--- a\n--- b\n", "mesh: !!python/object:os.system tp", "<<: {mesh: tp2}\n", 'mesh: "\\ud800"\n',
        "%YAML 9.9\n---\nmesh: tp2\n", "mesh: tp2\nshard: {? h : [}\n", "mesh: tp2\nshard: tp\n",
    ],
)  # fmt: skip
@pytest.mark.slow  # 0.6 s
def test_what_is_no_placement(text: str) -> None:
    with pytest.raises(SpecError, match=r"^bad\.yaml"):
        Placement.parse(text, MODEL, "bad.yaml")


WORDS = [
    "mesh", "shard", "nt", "layers", "tp8", "pp2 tp8", "tp/4", "tp%4 by 1", "by nt", "h", "l", "t", "over", "bounds", "0-5 by 2",
    "{", "}", "[", "]", ": ", ", ", "\n", "\n  ", "- ", "&a ", "*a", "!!int ", "0", "12", "1e99", "9" * 30, "٨", "é", "\ud7ff",
    "\t", "'", '"', "#", "|", ">", "? ", "~", "%",
]  # fmt: skip


@pytest.mark.slow  # half a second
@given(st.lists(st.sampled_from(WORDS), max_size=30).map("".join), st.integers(0, 2**63))
@strategies.cases(3000)
def test_hostile_files(text: str, seed: int) -> None:
    """Random words, and the good file with pieces inserted, removed and doubled: a placement or a `SpecError`."""
    rng = random.Random(seed)
    for declared in (text, f"mesh: tp8\n{text}"):
        _taken(declared)
    damaged = GOOD
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(damaged))
        damaged = damaged[:at] + rng.choice(WORDS) + damaged[at + rng.choice([0, 1, 5]) :]
    _taken(damaged)


def _taken(text: str) -> None:
    try:
        made = Placement.parse(text, MODEL, "f.yaml")
    except SpecError as error:
        said = str(error)
    else:
        said = "f.yaml"
        assert made.world >= 1 and made.strips(made.world - 1).h.size and made.fingerprint
    assert said.startswith("f.yaml")


VALUES = [
    None, True, 0, -1, 2**70, 1.5, float("nan"), "", "tp", "tp by 1", b"tp", [], ["tp"], [[]], {1, 2}, range(0), itertools.count(),
    {}, {"h": 1}, {"tp": 2}, {1: 2}, {"tp": True}, {"tp": 2**70}, {"": 2}, {"a b": 2}, {"t": "tp by 1"}, {"l": "tp by 1"},
    *({"l": {"over": "tp", "bounds": bounds}} for bounds in (2, "012", [0, 1.5, 12], [0, None], itertools.count())),
    {"l": {"over": 1, "bounds": [0, 12]}}, np.zeros(3), np.arange(4), np.array(3), object(), Path("x"), lambda: 0, MODEL,
]  # fmt: skip


@pytest.mark.parametrize("what", ["mesh", "shard", "model", "nt", "layers", "title", "name"])
def test_wrong_types_in_python(what: str) -> None:
    for value in VALUES:
        given: dict[str, Any] = {"mesh": "tp2", "model": MODEL, what: value}
        try:
            made = Placement(**given)
        except SpecError as error:
            said = str(error)
        else:
            said = "expected"
            assert hash(made) is not None and made.shape(made.world - 1).nt and repr(made) and str(made)
        assert "expected" in said and len(said) < 700


@pytest.mark.parametrize("rank", [-1, 2, 2**80, "0", None, True, 0.0, [], object()])
def test_ranks_that_there_are_not(rank: Any) -> None:
    made = Placement("tp2", model=MODEL)
    for method in (made.place, made.strips, made.shape):
        with pytest.raises(SpecError, match=r"placement: rank .*: expected 0 to 1"):
            method(rank)
    assert made.strips(np.int64(1)) == made.strips(1)


@pytest.mark.parametrize("path", [5, None, b"x", "no/such.yaml", "/dev/null", "/", "a\0b", "x" * 5000])
def test_files_that_there_are_not(path: Any) -> None:
    with pytest.raises(SpecError):
        Placement.load(path, MODEL)
    with pytest.raises(SpecError):
        Placement.parse(path if not isinstance(path, str) else 7, MODEL)  # type: ignore[arg-type]


def test_huge_models_are_refused() -> None:
    """Strips are lists of layers: those of a model with 2**40 layers would use all memory."""
    for sizes in ({"nl": 1 << 40}, {"nh": 1 << 40}, {"nt": 1 << 40}):
        with pytest.raises(SpecError, match=r"expected (at most 65,536 layers|tokens of a block)"):
            Placement("tp2", model=BlockShape(**{"nl": 1, "no": 1, "nh": 1, "nt": 1, "hd": 1, **sizes}))


def test_ranks_that_hold_only_part_of_the_cache() -> None:
    """Heads and tokens on the same mesh axis must use different digits."""
    model = load_shape("llama-3.1-70b")  # 8 heads
    with pytest.raises(SpecError, match=r"prefill: h by tp%8 and t by tp%4: expected ranks for all 8 × 4 combinations"):
        Placement("tp8", shard={"h": "tp", "t": "tp%4 by 1"}, model=model, name="prefill")
    Placement("tp32", shard={"h": "tp", "t": "tp%4 by 1"}, model=model)
    Placement("tp32", shard={"h": "tp/4", "t": "tp%4 by 1"}, model=model)


def test_a_group_without_layers_of_a_rank_has_no_pool_there() -> None:
    made = Placement("pp2", shard={"l": "pp"}, model=MODEL, layers=[0, 1])
    with pytest.raises(SpecError, match="rank 1 holds none of the layers 0–1"):
        made.shape(1)


def test_what_is_given_in_place_of_a_files() -> None:
    text = "mesh: tp2\nshard: {h: tp}\n"
    assert Placement.parse(text, MODEL, nt=32, layers=[1], name="x", title="y").nt == 32
    for wrong in ("foo", "mesh", "shard"):
        with pytest.raises(SpecError, match=f"expected nt, layers, name or title as overrides, got '{wrong}'"):
            Placement.parse(text, MODEL, **{wrong: 5})
        with pytest.raises(SpecError, match=f"'vllm:tp2': expected nt, layers or name as overrides, got '{wrong}'"):
            reshard.load("vllm:tp2", MODEL, **{wrong: 5})
    with pytest.raises(SpecError, match="placement: file: expected a text, got 5"):
        Placement.parse(text, MODEL, 5)  # type: ignore[arg-type]


def test_a_placement_is_not_changed_but_made() -> None:
    with pytest.raises(SpecError, match="x: expected mesh, shard, model, nt, layers, title and name, got 'shares'"):
        replace(Placement("tp2", model=MODEL, name="x"), nt=32)


def test_a_placement_says_all_that_it_is() -> None:
    shard = {"l": {"over": "pp", "bounds": [0, 1, MODEL.nl]}, "t": "cp by 4"}
    said = repr(Placement("pp2 cp2", shard=shard, model=MODEL, nt=16, layers=[0, 2]))
    assert f"l by pp%2 at [0, 1, {MODEL.nl}], t by cp%2 by 4" in said and said.endswith("nt=16, layers 0–2 by 2)")
