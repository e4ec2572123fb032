"""Identity: names with the same meaning, layouts that are equal at a shape, and layouts that cannot be told apart."""

from __future__ import annotations

import doctest
import itertools
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given

import kvbm
import matrix
import strategies
from kvbm.cli.app import main
from kvbm.layout import identity, spec

LAYOUTS = spec.load_dir(matrix.LAYOUTS)
#: One name of each fingerprint.
DISTINCT = list({layout.fingerprint: layout for layout in reversed(LAYOUTS)}.values())[::-1]
#: Those of one plane; the others have a law of their own below.
PLAIN = [layout for layout in DISTINCT if not layout.planes]
#: No two axes have one size; tokens and heads have; a latent; everything that can be is one.
SHAPES = (
    "nl=3,no=2,nh=5,nt=4,hd=16",
    "nl=3,no=2,nh=4,nt=4,hd=16",
    "nl=2,no=2,nh=2,nt=2,hd=16",
    "nl=3,no=1,nh=1,nt=4,hd=16",
    "nl=1,no=1,nh=1,nt=4,hd=16",
)


def parsed(**orders: str) -> list[kvbm.Layout]:
    return [spec.parse(text if "order:" in text else f'order: "{text}"', name=name) for name, text in orders.items()]


def names(groups: Iterable[Iterable[Iterable[kvbm.Layout]]]) -> list[list[list[str]]]:
    return [[[layout.name for layout in some] for some in group] for group in groups]


def paired(groups: Iterable[Iterable[Iterable[kvbm.Layout]]]) -> set[frozenset[str]]:
    """Fingerprints of every two layouts that are in the same group and in different lists of it."""
    return {
        frozenset((one.fingerprint, other.fingerprint))
        for group in map(list, groups)
        for n, some in enumerate(group)
        for others in group[n + 1 :]
        for one in some
        for other in others
    }


def test_doctests() -> None:
    found = doctest.testmod(identity)
    assert found.attempted and not found.failed


def test_aliases_have_one_fingerprint() -> None:
    groups = identity.aliases(LAYOUTS)
    assert all(len({layout.fingerprint for layout in group}) == 1 < len(group) for group in groups)
    alone = {layout.name for layout in LAYOUTS} - {layout.name for group in groups for layout in group}
    assert len(alone) + len(groups) == len(DISTINCT)


def test_equal_at_a_shape_only() -> None:
    layouts = parsed(a="[l] b o h t d", b="[l] b t d", c="[l] b h o t d", d="[l] b d t")
    assert not identity.aliases(layouts)
    assert names(identity.same_addresses(layouts, kvbm.load_shape("nl=3,no=1,nh=1,nt=4,hd=16"))) == [
        [["a"], ["b"], ["c"]]
    ]
    assert names(identity.same_addresses(layouts, kvbm.load_shape("nl=3,no=2,nh=1,nt=4,hd=16"))) == [[["a"], ["c"]]]
    assert identity.same_addresses(layouts, kvbm.load_shape("nl=3,no=2,nh=2,nt=4,hd=16")) == []


@pytest.mark.parametrize(
    ("one", "other", "shape"),
    [
        ("b l o h t d", "b l o h t d/8 d%8", "nl=3,no=2,nh=4,nt=4,hd=16"),
        ("b l o h d/16 t d%16", "b l o h t d", "nl=3,no=2,nh=4,nt=4,hd=16"),
        ("b l o t (h d)", "b l o t h d", "nl=3,no=2,nh=4,nt=4,hd=16"),
        ("b l o (h d)/32 t (h d)%32", "b l o h/2 t h%2 d", "nl=3,no=2,nh=4,nt=4,hd=16"),
        ("b l o (h d)/9 (h d)%9 t", "b l o h d t", "nl=3,no=2,nh=4,nt=4,hd=18"),
        ("[b] l o {t h d}", "[b] l o {d t h}", "nl=3,no=2,nh=4,nt=4,hd=16"),
        ("[b] l o {t h d}", "[b] l o d", "nl=3,no=2,nh=1,nt=1,hd=16"),
        ("order: {k: '[l o] b h t d', v: '[l o] b t h d'}", "[l o] b h t d", "nl=3,no=2,nh=1,nt=4,hd=16"),
        ("{order: 'b l o h t d', pitch: {t: '32 B'}}", "b l o h t d", "nl=3,no=2,nh=4,nt=4,hd=16"),
    ],
)
def test_other_words_for_the_same_addresses(one: str, other: str, shape: str) -> None:
    found = identity.same_addresses(parsed(one=one, other=other), kvbm.load_shape(shape), 3)
    assert names(found) == [[["one"], ["other"]]]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("[b] l o {t h d}", "[b] l o t h d"),  # one promises an order
        ("[b] l o {t h d}", "[b] l o {h d} t"),
        ("[l o] b h t d", "[o l] b h t d"),
        ("{order: 'b l o h t d', pitch: {t: '48 B'}}", "b l o h t d"),
    ],
)
def test_not_the_same_addresses(one: str, other: str) -> None:
    layouts = parsed(one=one, other=other)
    assert identity.same_addresses(layouts, kvbm.load_shape("nl=3,no=2,nh=4,nt=4,hd=16"), 3) == []


@given(strategies.pair(limit=100, opaque=False))
@strategies.cases(600)
def test_same_addresses_law(drawn: tuple[strategies.Sizes, strategies.Declared, strategies.Declared]) -> None:
    """Two layouts are in one group exactly if all coordinates have the same addresses, by the oracle."""
    sizes, one, other = drawn
    layouts = [spec.parse(one.yaml, name="one"), spec.parse(other.yaml, name="other")]
    shape = kvbm.BlockShape(sizes.nl, sizes.no, sizes.nh, sizes.nt, sizes.hd, sizes.dtype)
    places = [sizes.placed(it.order) for it in (one, other)]
    if any(len(place.id_step()) > 1 for place in places) or layouts[0].fingerprint == layouts[1].fingerprint:
        return
    ids = np.arange(sizes.num_blocks)
    equal = all(np.array_equal(a, b) for a, b in zip(places[0].address(ids), places[1].address(ids), strict=True))
    assert bool(identity.same_addresses(layouts, shape, sizes.num_blocks)) is equal


def allocated(layouts: list[kvbm.Layout], shape: kvbm.BlockShape) -> dict[str, kvbm.Pool]:
    """A pool of each layout that is legal at this shape, by fingerprint."""
    pools = {}
    for layout in layouts:
        with suppress(kvbm.LayoutError):
            pools[layout.fingerprint] = kvbm.Pool.allocate(layout, shape, 3)
    return pools


def takes(layout: kvbm.Layout, arrays: kvbm.Pool) -> bool:
    """True if a pool of this layout can be bound to the arrays of another one."""
    try:
        kvbm.Pool(layout, arrays.shape, list(arrays.arrays))
    except (kvbm.BindError, kvbm.DTypeError):
        return False
    return True


@pytest.mark.parametrize("text", SHAPES)
def test_ambiguous_law(text: str) -> None:
    """A pool accepts one layout's arrays for the other exactly if the two are ambiguous, or equal at this shape."""
    shape = kvbm.load_shape(text)
    pools = allocated(PLAIN, shape)
    legal = [layout for layout in PLAIN if layout.fingerprint in pools]
    assert len(legal) > 20
    blind = paired(identity.ambiguous(PLAIN, shape, 3))
    equal = paired(identity.same_addresses(PLAIN, shape, 3))
    assert not blind & equal
    for n, one in enumerate(legal):
        for other in legal[n + 1 :]:
            both = frozenset((one.fingerprint, other.fingerprint))
            bound = takes(other, pools[one.fingerprint])
            assert bound >= (both in blind), (one.name, other.name)
            assert not bound or both in blind | equal, (one.name, other.name)


def test_ambiguous_examples() -> None:
    layouts = parsed(nhd="[b l o] t h d", hnd="[b l o] h t d", swapped="[b o l] t h d", again="[b l o] t h d")
    shape = kvbm.load_shape("nl=3,no=2,nh=5,nt=4,hd=16")
    assert names(identity.ambiguous(layouts, shape)) == [[["nhd", "again"], ["swapped"]]]
    alike = kvbm.load_shape("nl=3,no=2,nh=4,nt=4,hd=16")
    assert names(identity.ambiguous(layouts, alike)) == [[["nhd", "again"], ["hnd"], ["swapped"]]]
    halves = parsed(both="[l o] b h t d", apart="order: {k: '[l o] b h t d', v: '[l o] b h d t'}")
    assert identity.ambiguous(halves, shape) == [], "V's arrays differ"
    words = parsed(one="[b] l o {t h d}", other="[b] l o {h t d}")
    assert identity.ambiguous(words, shape) == [], "other words for one promise"
    padded = parsed(one="{order: 'l b o h t d', pitch: {l: 'nb*no*nh*nt*hd + 64'}}", other="l b o t h d")
    one_layer = kvbm.load_shape("nl=1,no=2,nh=4,nt=4,hd=16")
    assert names(identity.ambiguous(padded, one_layer)) == [[["one"], ["other"]]], "one layer has no next one"
    small = parsed(outer="[l] o b t h d", inner="[l] b o t h d")
    assert identity.ambiguous(small, shape, 3) == []
    assert names(identity.ambiguous(small, shape, 2)) == [[["outer"], ["inner"]]], "two blocks, K and V"


# ---- planes --------------------------------------------------------------------------------------------------------

PLANAR = [layout for layout in DISTINCT if layout.planes]
PLANAR_SHAPES = (
    "nl=5,no=1,nh=1,nt=4,hd=576",
    "nl=2,no=1,nh=1,nt=4,hd=512",
    "nl=5,no=1,nh=1,nt=4,hd=128",
    "nl=5,no=2,nh=2,nt=4,hd=128",
    "nl=2,no=2,nh=2,nt=128,hd=128",
)


def records(**texts: str) -> list[kvbm.Layout]:
    planes = "planes: {x: {order: %s, dtype: uint8}, y: {order: %s, dtype: %s}}\naxes: {s: hd//8}\n"
    return [
        spec.parse(
            f'order: "{text.partition("; ")[0]}"\n' + planes % tuple(text.partition("; ")[2].split("; ")), name=name
        )
        for name, text in texts.items()
    ]


def test_planes_with_the_same_addresses() -> None:
    shape = kvbm.load_shape("nl=3,no=2,nh=4,nt=4,hd=16")
    layouts = records(
        one="[l] b o h t <x y>; d; s; uint8",
        split="[l] b o h/2 h%2 t <x y>; d/8 d%8; s; uint8",
        other_dtype="[l] b o h t <x y>; d; s; int8",
        turned="[l] b o h t <y x>; d; s; uint8",
        planes="[l] b o h <x y>; t d; t s; uint8",
    )
    assert len({layout.fingerprint for layout in layouts}) == len(layouts)
    assert names(identity.same_addresses(layouts, shape, 3)) == [[["one"], ["split"]]]
    one_token = kvbm.load_shape("nl=3,no=2,nh=4,nt=1,hd=16")
    assert names(identity.same_addresses(layouts, one_token, 3)) == [[["one"], ["split"], ["planes"]]]
    again = spec.parse(Path(spec.layouts_dir(), "vllm", "fp8_ds_mla.yaml").read_text(encoding="utf-8"), name="again")
    assert [[x.name for x in group] for group in identity.aliases([again, *layouts, kvbm.load("vllm/fp8_ds_mla")])] == [
        ["again", "vllm/fp8_ds_mla"]
    ]


def test_planes_that_nothing_tells_apart() -> None:
    shape = kvbm.load_shape("nl=3,no=2,nh=4,nt=4,hd=16,dtype=uint8")
    layouts = records(
        tokens="[l] b t <x y>; o h d; o h s; uint8",
        pages="[l] b <x y>; t o h d; t o h s; uint8",
        heads="[l] b h <x y>; t o d; t o s; float8_e4m3fn",
        layers="[b] l <x y>; t o h d; t o h s; uint8",
        apart="[<x y> l] b; t o h d; t o h s; uint8",
        apart_too="[<x y> l] b; t h o d; t h o s; uint8",
    )
    assert names(identity.ambiguous(layouts, shape, 5)) == [[["tokens"], ["pages"], ["heads"]]]
    swapped = kvbm.load_shape("nl=3,no=2,nh=2,nt=4,hd=16,dtype=uint8")
    assert names(identity.ambiguous(layouts, swapped, 5)) == [
        [["apart"], ["apart_too"]],
        [["tokens"], ["pages"], ["heads"]],
    ]
    # An array of elements of one byte, as many as the records have bytes, is taken for either.
    latent = kvbm.load_shape("nl=3,no=1,nh=1,nt=4,hd=576,dtype=float8_e4m3fn")
    both = [kvbm.load("vllm/mla"), kvbm.load("record/mla_joined")]
    assert names(identity.ambiguous(both, latent, 5)) == [[["vllm/mla"], ["record/mla_joined"]]]
    assert identity.ambiguous(both, kvbm.load_shape("nl=3,no=1,nh=1,nt=4,hd=576"), 5) == [], "two bytes are no byte"


@pytest.mark.parametrize("text", PLANAR_SHAPES)
@pytest.mark.slow
def test_ambiguous_law_of_planes(text: str) -> None:
    """One of two pools accepts arrays of the other's layout exactly if the two layouts are ambiguous or equal."""
    shape = kvbm.load_shape(text)
    pools = allocated(DISTINCT, shape)
    blind = paired(identity.ambiguous(DISTINCT, shape, 3))
    equal = paired(identity.same_addresses(DISTINCT, shape, 3))
    legal = [layout for layout in PLANAR if layout.fingerprint in pools]
    assert len(legal) > 5 and not blind & equal
    taken = set()
    for one in legal:
        for other in DISTINCT:
            if other is one or other.fingerprint not in pools:
                continue
            if takes(one, pools[other.fingerprint]) or takes(other, pools[one.fingerprint]):
                taken.add(frozenset((one.fingerprint, other.fingerprint)))
    mine = {layout.fingerprint for layout in legal}
    assert taken <= blind | equal
    assert {pair for pair in blind if pair & mine} <= taken
    assert any(pair & mine for pair in blind)


# ---- the command line ----------------------------------------------------------------------------------------------


def ok(*args: str | Path) -> str:
    result = CliRunner().invoke(main, [str(a) for a in args], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def test_command_aliases(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text('order: "[b l o] t h d"\n', encoding="utf-8")
    text = ok("layouts", "--aliases", "--layouts", tmp_path)
    (line,) = [line for line in text.splitlines() if "mine" in line]
    assert {"nhd", "mine", "dynamo/stacked_nhd"} <= set(line.replace(",", "").split())
    assert "same address" not in text
    text = ok("layouts", "--aliases", "mla", "--shape", "deepseek-v3")
    assert "no others have the same addresses" in text
    text = ok("layouts", "--aliases", "--shape", "nl=4,no=1,nh=1,nt=16,hd=64")
    always, at_shape = text.split("\n\n")
    assert "at every shape" in always and "nl=4,no=1,nh=1" in at_shape and "[l] b t d" in at_shape


def test_command_layouts_by_part() -> None:
    text = ok("layouts", "VLLM/")
    assert "vllm/LBHNC" in text and "sglang/" not in text and "universal " not in text
    result = CliRunner().invoke(main, ["layouts", "no-such"])
    assert result.exit_code == kvbm.SpecError.exit_code and "vllm/" in result.output
    assert CliRunner().invoke(main, ["layouts", "--shape", "llama-3.1-8b"]).exit_code == 2
    assert CliRunner().invoke(main, ["layouts", "--aliases", "--num-blocks", "4"]).exit_code == 2


@pytest.mark.slow  # 1.3 s
def test_command_check_ambiguous(tmp_path: Path) -> None:
    path, other = tmp_path / "mine.yaml", tmp_path / "yours.yaml"
    path.write_text('order: "[b l o] d t h"\n', encoding="utf-8")
    assert "same arrays" not in ok("check", path)
    assert "no other shipped layout takes its arrays at any shipped shape" in ok("check", path, "--ambiguous")
    shape = "nl=4,no=2,nh=16,nt=16,hd=16"
    text = ok("check", path, "--ambiguous", "--shape", shape)
    assert f"same arrays as hnd, nhd at {shape}" in text and "name the layout explicitly" in text
    other.write_text('order: "[b l o] d h t"\n', encoding="utf-8")
    text = ok("check", path, other, "--ambiguous", "--shape", "nl=4,no=2,nh=16,nt=16,hd=8")
    assert "same arrays as yours at" in text and "same arrays as mine at" in text
    path.write_text('order: "[b l o] h t d"\n', encoding="utf-8")
    text = ok("check", path, "--ambiguous", "--shape", "nl=4,no=2,nh=16,nt=16,hd=8")
    assert "same arrays as nhd at" in text and "as hnd" not in text, "an alias is no mix-up"


@pytest.mark.slow
def test_arrays_of_one_number_of_blocks_are_arrays_of_another() -> None:
    """By brute force at small shapes.  Where a pool of one layout takes another's arrays as more or fewer blocks, it is told."""
    padded = [
        spec.parse(
            f'order: {{k: "[l] b h o d t", v: "[l] b h o t d"}}\npitch: {{b: nh * no * nt * hd + nh * no * nt * hd // {part}}}',
            name=f"padded{part}",
        )
        for part in (8, 2)
    ]
    known = list({one.fingerprint: one for one in [*map(kvbm.load, kvbm.layouts()), *padded]}.values())
    for shape in (kvbm.BlockShape(2, 2, 2, 16, 16, "float16"), kvbm.BlockShape(1, 1, 1, 4, 16, "float16")):
        told = {(one.fingerprint, other.fingerprint) for one, _, other, _ in identity.confusable(known, shape, 16)}
        sized = {}
        for layout in known:
            with suppress(kvbm.errors.LayoutError):
                sized[layout.name] = [layout.resolve(shape, blocks) for blocks in (16, *range(1, 16), *range(17, 33))]
        for one, other in itertools.permutations([layout for layout in known if layout.name in sized], 2):
            want, sizes = sized[one.name][0], sized[other.name][1:]
            looks = identity._arrays(want), want.table_size
            sizes = [one for one in sizes if one.first.is_record or (identity._arrays(one), one.table_size) == looks]
            if any(identity._accepts(size, want) and identity._places(size) != identity._places(want) for size in sizes):
                assert (one.fingerprint, other.fingerprint) in told, (one.name, other.name, shape)
    found = identity.confusable(known, "llama-3.1-8b", 128)
    names = {(one.name, a, other.name, b) for one, a, other, b in found}
    (mine,) = {one for one, *_ in found if one.name == "padded8"}
    assert identity.confusable(known, "llama-3.1-8b", 128, of=[mine]) == [it for it in found if it[0] == mine]
    assert ("padded8", 128, "vllm/cpu_vec", 144) in names
