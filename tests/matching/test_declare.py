"""`kvbm.declare`: the text, loaded, has every element where the arrays have it, and what no layout has is refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import kvbm
from kvbm.cli import main

AXES = "lobhtd"


class Drawn(NamedTuple):
    """Arrays of an engine that nobody has: what its author knows."""

    sizes: Mapping[str, int]
    table: Sequence[str]
    terms: Sequence[str]  # as the author sees the axes
    arrays: Sequence[Any]
    buffers: Sequence[Any]  # the bytes of each allocation


def coordinate(term: str, index: Any) -> dict[str, Any]:
    """What an index along a term adds to the coordinates."""
    axis, _, size = term.partition("/")
    return {axis[0]: index * int(size or 1)}


@st.composite
def engines(draw: st.DrawFn) -> Drawn:
    """Memory that is written by NumPy alone: an element holds the number of its coordinates."""
    sizes = {axis: draw(st.integers(1, 3)) for axis in AXES}
    table = draw(st.sampled_from([(), ("l",), ("o",), ("l", "o"), ("o", "l"), ("b",)]))
    if len(table) == 2:
        sizes["o"] = 2  # which the list cannot show
    terms, extents = [], {}
    for axis in AXES:
        if axis in table:
            continue
        pieces = [axis]
        if axis in "htd" and draw(st.booleans()):
            inner = draw(st.integers(1, 3))
            pieces, outer = [f"{axis}/{inner}", f"{axis}%{inner}"], sizes[axis]
            extents |= {pieces[0]: outer, pieces[1]: inner}
            sizes[axis] = outer * inner
        else:
            extents[axis] = sizes[axis]
        terms += pieces
    lie = draw(st.permutations(terms))  # slowest first, in memory
    item = 4
    stride, strides = item, {}
    for term in reversed(lie):
        stride += draw(st.sampled_from([0, 0, 0, item, 3 * item, 2]))
        strides[term] = stride
        stride *= extents[term]
    seen = draw(st.permutations(lie) if draw(st.booleans()) else st.just(lie))
    arrays, buffers = [], []
    for picked in itertools.product(*(range(sizes[axis]) for axis in table)):
        buffer = np.zeros(stride, np.uint8)
        array = np.ndarray([extents[t] for t in seen], "uint32", buffer, 0, [strides[t] for t in seen])
        at = dict.fromkeys(AXES, 0) | dict(zip(table, picked, strict=True))
        index = np.indices(array.shape)
        for term, own in zip(seen, index, strict=True):
            for axis, more in coordinate(term, own).items():
                at[axis] = at[axis] + more
        array[...] = np.ravel_multi_index([np.broadcast_to(at[axis], array.shape) for axis in AXES], [sizes[a] for a in AXES])
        arrays.append(array)
        buffers.append(buffer)
    return Drawn(sizes, table, seen, arrays, buffers)


@pytest.mark.slow  # half a second
@given(engines(), st.booleans())
def test_the_text_says_where_every_element_is(tmp_path_factory: pytest.TempPathFactory, engine: Drawn, given_shape: bool) -> None:
    """For random orders, pitches, splits, views and lists of allocations, against what NumPy has written."""
    sizes = engine.sizes
    axes = " ".join([f"[{' '.join(engine.table)}]"] * bool(engine.table) + list(engine.terms))
    shape = ",".join(f"{'hd' if axis == 'd' else f'n{axis}'}={sizes[axis]}" for axis in "lohtd")
    text = kvbm.declare(engine.arrays, axes, shape=shape if given_shape else None)
    folder = tmp_path_factory.mktemp("declared")
    (folder / "mine.yaml").write_text(text, encoding="utf-8")
    code = text.splitlines()[1].removeprefix("# ").replace("mine.yaml", str(folder / "mine.yaml"))
    pool = eval(code, {"kvbm": kvbm, "tensors": engine.arrays, "tensor": engine.arrays[0]})
    assert pool.num_blocks == sizes["b"]
    assert {axis: sizes[axis] for axis in "lohtd"} == pool.shape.sizes
    for at in itertools.product(*(range(sizes[axis]) for axis in AXES)):
        where = dict(zip(AXES, at, strict=True))
        entry, offset = pool.resolved.address(where.pop("b"), **where)
        value = engine.buffers[entry][offset : offset + 4].view("uint32")[0]
        assert value == np.ravel_multi_index(at, [sizes[axis] for axis in AXES])


def test_fused_axes_are_declared_with_a_shape() -> None:
    arrays = [np.zeros((6, 16, 4 * 8), "float16")] * 2
    text = kvbm.declare(arrays, "[l] b t (h d)", shape="nl=2,no=1,nh=4,nt=16,hd=8")
    assert text.endswith('\norder: "[l] b t (h d)"\n')
    with pytest.raises(kvbm.SpecError, match=r"sizes of \(h d\): give the sizes"):
        kvbm.declare(arrays, "[l] b t (h d)")


def test_torch_and_bfloat16() -> None:
    torch = pytest.importorskip("torch")
    whole = torch.zeros(2, 6, 4, 16, 2, 8, dtype=torch.bfloat16)
    views = [layer.permute(0, 2, 1, 3, 4) for layer in whole]  # b t h o d
    text = kvbm.declare(views, "[l] b t h o d")
    assert "[one.permute(0, 2, 1, 3, 4) for one in tensors]" in text and 'order: "[l] b h t o d"' in text
    assert "nl=2,no=2,nh=4,nt=16,hd=8,dtype=bfloat16" in text
    assert kvbm.declare(whole, "l b h t o d").splitlines()[-1] == 'order: "l b h t o d"'
    assert "dtype=bfloat16" in kvbm.declare(np.zeros((2, 3), ml_dtypes.bfloat16), "b d")


def test_a_shipped_layout_is_declared_as_itself() -> None:
    """Of every layout without planes, from the arrays that it allocates and the names of their axes."""
    shape, done = kvbm.load_shape("nl=2,no=2,nh=4,nt=16,hd=128,dtype=bfloat16"), 0
    for layout in map(kvbm.load, kvbm.layouts()):
        try:
            resolved = layout.resolve(shape, 3)
        except kvbm.LayoutError:
            continue
        if layout.planes or len(layout.orders) > 1:
            continue
        kind, [order] = resolved.first, layout.orders
        array = np.ndarray(kind.shape, "uint16", np.zeros(kind.nbytes, np.uint8), 0, kind.strides)
        found = kvbm.layout.spec.parse(kvbm.declare([array] * resolved.table_size, str(order), shape=shape))
        assert found.resolve(shape, 3).accesses == resolved.accesses, layout.name
        done += 1
    assert done > 30


REFUSED = {
    "no names for the list": (lambda: kvbm.declare([a(2, 3)] * 4, "b d"), r"brackets in front.*list of 4 arrays.*'\[l\] b d'"),
    "too few names": (lambda: kvbm.declare(a(2, 3, 4), "b d"), r"expected 3 names.*\(2, 3, 4\), got 2"),
    "no block": (lambda: kvbm.declare(a(2, 3), "t d"), "axis 'b'"),
    "slots": (lambda: kvbm.declare([a(96, 2, 5)] * 4, "[l] t h d"), r"96 items.*\.reshape\(blocks, tokens, 2, 5\).*'\[l\] b t"),
    "slots, fused": (lambda: kvbm.declare([a(96, 2, 5)] * 4, "[l] (b t) h d"), r"\.reshape\(blocks, tokens, 2, 5\).*'\[l\] b t"),
    "slots inside": (lambda: kvbm.declare(a(2, 96, 10), "o t (h d)"), r"\.reshape\(2, blocks, tokens, 10\).*'o b t \(h d\)'"),
    "other fused blocks": (lambda: kvbm.declare(a(96, 10), "(b l) d"), r"alone and unsplit.*got '\(b l\)'; write 'b l'"),
    "a further axis": (lambda: kvbm.declare(a(2, 3, 4), "b s d"), "'s': expected one of b l o h t d; write a layout.*by hand"),
    "a slip in a piece": (lambda: kvbm.declare(a(2, 4, 4), "b d/8 d%4"), "expected 'd%8' beside 'd/8', got 'd%4'; or add 'd/4%2'"),
    "no name of a file": (lambda: kvbm.declare(a(2, 3), "b d", name="a b/c"), "name: expected letters, digits.*got 'a b/c'"),
    "no name": (lambda: kvbm.declare(a(2, 3), "b d", name=""), "name: expected letters, digits.*got ''"),
    "twice": (lambda: kvbm.declare(a(2, 3, 4), "b d d"), "axis 'd': expected once"),
    "a word": (lambda: kvbm.declare(a(2, 3), "block dim"), 'Did you mean "b d"'),
    "a letter": (lambda: kvbm.declare(a(2, 3), "b x"), "axis 'x': expected one of"),
    "no text": (lambda: kvbm.declare(a(2, 3), ["b", "d"]), "axes: expected a text"),
    "no array": (lambda: kvbm.declare([], "b d"), "at least one array"),
    "a number": (lambda: kvbm.declare(3, "b d"), "array 0: expected a torch tensor"),
    "empty": (lambda: kvbm.declare(a(0, 3), "b d"), "empty: axis 0"),
    "reversed": (lambda: kvbm.declare(a(2, 3)[::-1], "b d"), "axis 0 of 2 has a stride of -12 bytes.*reversed"),
    "expanded": (lambda: kvbm.declare(np.broadcast_to(a(1, 3), (2, 3)), "b d"), "stride of 0 bytes.*one place"),
    "overlapping": (lambda: kvbm.declare(windows(), "b d"), "share memory.*at least 12 bytes along 'b', got 4"),
    "not alike": (lambda: kvbm.declare([a(2, 3), a(2, 4)], "[l] b d"), "array 1 has the shape .2, 4"),
    "a third of K and V": (lambda: kvbm.declare([a(2, 3)] * 3, "[l o] b d"), "multiple of 2 arrays"),
    "unknown list": (lambda: kvbm.declare([a(2, 3)] * 4, "[b l] d t"), "sizes of b, l: give"),
    "a piece is missing": (lambda: kvbm.declare(a(2, 3), "b d/8"), "expected 'd%8' beside 'd/8'"),
    "another size than its name": (lambda: kvbm.declare(a(2, 3, 4), "b d/8 d%8"), r"'d[/%]8'"),
    "another shape": (lambda: kvbm.declare(a(2, 3), "b d", shape="nl=1,no=1,nh=1,nt=1,hd=4"), "'d': expected 4 items, got 3"),
    "more layers": (lambda: kvbm.declare([a(2, 3)], "[l] b d", shape="nl=2,no=1,nh=1,nt=1,hd=3"), "expected 2 arrays, got 1"),
    "complex numbers": (lambda: kvbm.declare(np.zeros((2, 3), "complex64"), "b d"), "complex64, which no block holds"),
    "planes": (lambda: kvbm.declare(a(2, 3), "b <data scale>"), "declare: axes"),
}  # fmt: skip


def a(*shape: int) -> Any:
    return np.zeros(shape, "float32")


def windows() -> Any:
    return np.lib.stride_tricks.sliding_window_view(np.zeros(4, "float32"), 3)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, said = REFUSED[name]
    with pytest.raises(kvbm.KvbmError, match=said) as info:
        call()
    assert str(info.value).startswith("declare: "), info.value


@pytest.mark.slow  # 3 s: each case is matched with all layouts
@hypothesis.settings(max_examples=60)
@given(st.permutations(AXES), st.integers(0, 1), st.integers(0, 20))
def test_sizes_that_differ_tell_the_order(axes: Sequence[str], listed: int, seed: int) -> None:
    """`match` proposes the order of arrays that no shipped layout has, and no other one."""
    rng = np.random.default_rng(seed)
    sizes = dict(zip(axes, (int(n) for n in rng.permutation([2, 3, 5, 7, 11, 13])), strict=True)) | {"o": 2}
    sizes = {axis: 4 if size == 2 and axis != "o" else size for axis, size in sizes.items()}
    table, terms = axes[:listed], axes[listed:]
    shape = kvbm.BlockShape(*(sizes[axis] for axis in "lohtd"), "float16")
    arrays = [np.zeros([sizes[axis] for axis in terms], "float16") for _ in range(sizes[table[0]] if table else 1)]
    found = kvbm.match(arrays, shape)
    order = " ".join([f"[{table[0]}]", *terms] if table else terms)
    hypothesis.assume(not found)  # a shipped layout has them, as given or as parts
    hypothesis.assume("as_strided" not in str(found))  # two arrays that lie as views of one allocation would
    assert f"By the sizes it can only be {order}," in str(found)
    text = str(found)[str(found).index("# ") :]
    assert kvbm.Pool(kvbm.layout.spec.parse(text, "mine.yaml"), shape, arrays).num_blocks == sizes["b"]


def test_sizes_that_are_equal_tell_several_orders() -> None:
    arrays = [np.zeros((32, 8, 64, 2, 8), "float16")] * 4  # elements slowest: no engine has that
    said = str(kvbm.match(arrays, "nl=4,no=2,nh=8,nt=8,hd=32,dtype=float16"))
    assert "By the sizes it can be [l] d h b o t or [l] d t b o h" in said or "[l] d t b o h or [l] d h b o t" in said, said
    assert "By the sizes" not in str(kvbm.match(arrays, "nl=4,no=2,nh=8,nt=16,hd=32,dtype=float16"))


def test_layouts_of_ones_own_are_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, folders and layouts; the Python that is printed runs, and a shipped layout of the same meaning has both names."""
    monkeypatch.chdir(tmp_path)
    arrays, shape = [np.zeros((32, 8, 64, 2, 16), "float16")] * 4, "nl=4,no=2,nh=8,nt=16,hd=32,dtype=float16"
    assert not kvbm.match(arrays, shape)
    Path("own").mkdir()
    Path("own", "x.yaml").write_text('order: "[l] d h b o t"\n', encoding="utf-8")
    for layouts in (["own"], [Path("own")], ["own/x.yaml"], [kvbm.load("own/x.yaml")], "own", kvbm.load("own/x.yaml")):
        [found] = kvbm.match([np.zeros((32, 8, 64, 2, 16), "float16") for _ in range(4)], shape, layouts=layouts, engine="vllm")
        assert found.fit == "exact" and found.num_blocks == 64
        assert found.names == ("x",) or found.names == ("own/x.yaml",)
    code = kvbm.match(arrays, shape, layouts=["own"])[0].code
    tensors = [np.zeros((32, 8, 64, 2, 16), "float16") for _ in range(4)]
    assert eval(code, {"kvbm": kvbm, "shape": shape, "tensors": tensors}).num_blocks == 64
    with pytest.raises(kvbm.SpecError, match=r"none.yaml: no such file"):
        kvbm.match(arrays, shape, layouts=["own/none.yaml"])
    with pytest.raises(kvbm.KvbmError, match="layouts: expected"):
        kvbm.match(arrays, shape, layouts=[3])
    Path("own", "nhd.yaml").write_text('order: "[l] o b t h d"\n', encoding="utf-8")
    names = kvbm.match(np.zeros((2, 64, 16, 8, 32), "float16"), shape.replace("nl=4", "nl=1"), layouts=["own"]).names
    assert {"own/nhd.yaml", "vllm/flash_attn_nhd"} <= set(names)
    command = ["which", "4x32,8,64,2,16", "--shape", shape]
    assert CliRunner().invoke(main, command).exit_code == 14
    assert "1. own/x.yaml\n" in CliRunner().invoke(main, [*command, "--layouts", "own"]).output
    assert "1. own/x.yaml\n" in CliRunner().invoke(main, command, env={"KVBM_LAYOUTS": "own"}).output
    # A file that is no layout hides no other, in a folder; one that is named is an error.
    Path("own", "a.yaml").write_text("services: {}\n", encoding="utf-8")
    done = CliRunner().invoke(main, [*command, "--layouts", "own"])
    assert (done.exit_code, "1. own/x.yaml\n" in done.stdout) == (0, True)
    assert " ".join(done.stderr.split()).startswith("note: skipped: own/a.yaml:1: unknown key 'services'")
    assert CliRunner().invoke(main, ["which", "4x3,3", "--shape", shape, "--layouts", "own"]).exit_code == 14
    assert CliRunner().invoke(main, [*command, "--layouts", "own/a.yaml"]).exit_code == 11


def test_axes_on_several_lines_are_one_line_of_the_comment() -> None:
    """Red: an order that a terminal had wrapped made a file that is not YAML."""
    text = kvbm.declare([np.zeros((6, 4, 16, 8), "float16")] * 4, "[l o] b\n  h t d")
    assert "axes: [l o] b h t d\n" in text
    assert kvbm.layout.spec.parse(text, "mine.yaml").order_text == "[l o] b h t d"


def test_a_size_of_the_shape_is_proposed_where_layouts_fit_only_as_views() -> None:
    """Red: with blocks of 32 tokens and a shape of 16, only layouts of others were listed, and nothing was said."""
    arrays = [np.zeros((2, 6, 32, 8, 16), "float16")] * 3
    found = kvbm.match(arrays, "nl=3,no=2,nh=8,nt=16,hd=16,dtype=float16")
    assert found and all(one.fit == "viewed" for one in found)
    assert any("with nt=32 these fit: " in text and "vllm/flash_attn_nhd" in text for text in found.near)
    assert found.near[0] in str(found) and found.as_json()["near"] == list(found.near)
    assert kvbm.match(arrays, "nl=3,no=2,nh=8,nt=32,hd=16,dtype=float16").near == ()


@pytest.mark.parametrize("command", [("which",), ("declare", "--axes", "[l] o b t h d")], ids=["which", "declare"])
def test_strides_that_may_be_bytes_are_noted(command: Sequence[str]) -> None:
    for strides, is_noted in (("16384,8192,2048,256,2", True), ("8192,4096,1024,128,1", False), ("8193,4096,1024,128,1", False)):
        done = CliRunner().invoke(main, [command[0], f"4x2,2,4,8,128:{strides}", *command[1:]])
        assert ("NumPy's, which are in bytes" in done.stderr) is is_noted, (strides, done.output)


def test_the_command(tmp_path: Path) -> None:
    text = CliRunner().invoke(main, ["declare", "32x(2, 64, 16, 8, 128)", "--axes", "[l] o b t h d"], catch_exceptions=False).output
    assert text == kvbm.declare([np.zeros((2, 64, 16, 8, 128), ml_dtypes.bfloat16)] * 32, "[l] o b t h d")
    assert math.prod(kvbm.layout.spec.parse(text).resolve("llama-3.1-8b", 64).first.shape) == 2 * 64 * 16 * 8 * 128
    given = ["6,16,12:192,12,1", "--axes", "b t (h d)", "--shape", "nl=1,no=1,nh=2,nt=16,hd=6"]
    result = CliRunner().invoke(main, ["declare", *given])
    assert result.exit_code == 0 and result.output.splitlines()[-1] == 'order: "b t (h d)"'
