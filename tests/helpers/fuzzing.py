"""Inputs that are almost right.  Each must either be accepted and work, or be refused with an error message of one sentence.

A case is a kind and a number.  All random choices follow from the number, so a failure can be repeated.  Files are real ones (the
shipped layouts, shapes and placements, headers written by kvbm) with some words changed.  Arrays and ids are made odd on purpose.
`try_case` returns True if the input was accepted.  It raises an error for a violation: an exception that is not kvbm's, a message
that does not name the place, a layout that is not one-to-one, or a wrong byte.
"""

from __future__ import annotations

import json
import math
import random
import re
import string
import struct
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import kvbm
import oracle
from kvbm import BlockShape, KvbmError, Placement, Pool, reshard, store
from kvbm.layout import shapes, spec
from kvbm.layout.layout import Layout
from kvbm.layout.resolved import Resolved
from kvbm.layout.shapes import ITEMSIZE
from kvbm.layout.terms import Expression, Order, Term
from kvbm.memory.array_info import numpy_dtype

__all__ = ["KINDS", "seeds", "try_case", "try_input"]

LAYOUTS = spec.layouts_dir()

#: Coordinates that are looked at one by one, and allocations, at most.
_MOST = 4096


#: What has been done with inputs that were taken.
DONE: Counter[str] = Counter()

#: Layouts of arrays and ids: one of a single array, and one of four.
ONE = spec.parse("order: b h l o t d", "one")
FOUR = spec.parse("order: '[l o] b t h d'", "four")


class Refused(Exception):  # noqa: N818
    """The input was refused correctly."""


def refusal(call: Callable[[], Any], where: str) -> Any:
    """The result of a call.  Raises `Refused` for one of kvbm's errors whose message begins with the place."""
    try:
        return call()
    except KvbmError as error:
        text = str(error)
        text.encode()
        assert text.startswith(where), f"expected a message that begins with {where!r}, got {text!r}"
        assert len(where) + 10 < len(text) < 5000, f"expected one sentence, got {text!r}"
        raise Refused(text) from None


# ---- words that change ---------------------------------------------------------------------------------------------

_TOKEN = re.compile(r"[A-Za-z_]+|[0-9]+|\s+|.", re.DOTALL)
_NUMBERS = (
    0,
    1,
    2,
    3,
    4,
    6,
    7,
    8,
    15,
    16,
    17,
    64,
    128,
    255,
    256,
    720720,
    2**31 - 1,
    2**31,
    2**32,
    2**62,
    2**63,
    2**64,
    10**30,
)
_SIGNS = [
    *"[](){}<>/%:,'\"&*!|-?#\\+=.",
    "\n",
    " ",
    "\n  ",
    ": ",
    "- ",
    "//",
    "B",
    "\0",
    "\t",
    "²",
    "é",
    "\U0001f600",
    "true",
    "null",
]


def mutated(rng: random.Random, text: str, words: Sequence[str], others: Sequence[str]) -> str:
    """The text with some words, numbers, signs or lines changed; `words` and lines of `others` are inserted."""
    tokens = _TOKEN.findall(text)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3, 6))):
        at = rng.randrange(len(tokens)) if tokens else 0
        token = tokens[at] if tokens else ""
        what = rng.randrange(8)
        if what == 0:
            tokens[at : at + rng.choice((1, 1, 1, 3))] = []
        elif what == 1:
            tokens.insert(at, rng.choice(words))
        elif what == 2:
            tokens[at : at + 1] = [rng.choice(words)]
        elif what == 3:
            tokens.insert(at, rng.choice(_SIGNS))
        elif what == 4 and tokens:
            other = rng.randrange(len(tokens))
            tokens[at], tokens[other] = tokens[other], token
        elif what == 5:
            numbers = [i for i, token in enumerate(tokens) if token.isdecimal() and len(token) < 19]
            if numbers:
                at = rng.choice(numbers)
                value = int(tokens[at])
                tokens[at] = str(rng.choice((value + 1, value - 1, value * 2, value // 2, -value, *_NUMBERS)))
        elif what == 6:  # a word of the same kind, so that it may still be a file
            same = [word for word in tokens if word != token and word.isalpha() and len(word) == len(token)]
            tokens[at : at + 1] = (
                [rng.choice(same)] if same and token.isalpha() else [token] * rng.choice((1, 2, 2, 40))
            )
        elif what == 7:
            lines, theirs = "".join(tokens).split("\n"), rng.choice(others).split("\n")
            lines[rng.randrange(len(lines)) :][: rng.randrange(2)] = []
            place = rng.randrange(len(lines))
            lines[place : place + rng.randrange(2)] = [rng.choice(theirs)]
            tokens = _TOKEN.findall("\n".join(lines))
    return "".join(tokens)


@cache
def seeds(folder: str = "") -> tuple[str, ...]:
    """The shipped files of a folder, without texts for people; the layouts if no folder is given."""
    paths = sorted((LAYOUTS / folder).rglob("*.yaml"))
    if not folder:
        paths = [path for path in paths if path.relative_to(LAYOUTS).parts[0] not in ("shapes", "placements")]
    texts = []
    for path in paths:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
        kept = {key: value for key, value in data.items() if key not in ("notes", "read_from", "used_by")}
        if folder != "shapes":
            kept.pop("title", None)
        texts.append(yaml.safe_dump(kept, sort_keys=False, width=1000, default_flow_style=None))
    return tuple(texts)


# ---- layouts -------------------------------------------------------------------------------------------------------

_LAYOUT_WORDS = (
    *"blohtdxyBN", "order", "pitch", "axes", "planes", "k", "v", "dtype", "offset", "shared", "title", "16B", "round_up(",
    "min(", "max(",     *("nb", "nl", "no", "nh", "nt", "hd", "es"), "(h d)", "{t h d}", "d/8", "d%8", "t/4", "t%4",
    "<data scale>", "data", "scale",
    "planes: {data: {order: t d}, scale: {order: t, dtype: float32}}", "axes: {x: 2}", "pitch: {t: 640 B}",
    "order: {k: '[b o] t h d', v: '[b o] d h t'}", "order: b l o h t d", *ITEMSIZE,
)  # fmt: skip


#: What hardly any shipped layout has: planes that are placed by hand, orders of K and V, pitches, axes of their own.
_LAYOUTS = (
    """order: b l <data scale>
planes:
  data: {order: t d, pitch: {t: hd*es + 4 B}}
  scale: {order: t, dtype: float32, offset: hd*es, pitch: {t: round_up(hd*es, 4)//4 + 1}}
""",
    """order: '[l] b o <a b c>'
planes: {a: {order: h t d, dtype: uint8, offset: 0}, b: {order: t h, offset: 64, dtype: uint8}, c: {shared: h t, offset: 128 B}}
""",
    """order: {k: '[l] b o h d/8 t d%8', v: '[l] b o h d t'}
""",
    """order: '[l o] b x t h d'
axes: {x: min(nt, 2)}
pitch: {b: nt*nh*hd*2 + 64, t: round_up(nh*hd*es, 256) B}
""",
)


def layout_text(rng: random.Random) -> str:
    return mutated(
        rng, rng.choice(rng.choice((seeds(), seeds(), seeds(), _LAYOUTS))), _LAYOUT_WORDS, (*seeds(), *_LAYOUTS)
    )


def a_shape(rng: random.Random, most: int = _MOST) -> BlockShape:
    """A shape of few elements, with sizes that many layouts can split, and some that few can."""
    sizes = {
        "hd": rng.choice((1, 2, 6, 8, 16, 16, 32, 64, 128)),
        "nt": rng.choice((1, 2, 3, 4, 8, 16, 16, 32, 64)),
        "nh": rng.choice((1, 1, 2, 3, 4)),
        "no": rng.choice((1, 2, 2, 2, 3)),
        "nl": rng.choice((1, 2, 3, 4)),
    }
    for name in ("nl", "nh", "nt", "hd"):
        if math.prod(sizes.values()) > most:
            sizes[name] = 1
    return BlockShape(**sizes, dtype=rng.choice(("bfloat16", "uint8", "float32", *ITEMSIZE)))


def try_layout(rng: random.Random, text: str) -> None:
    layout = refusal(lambda: spec.parse(text, "x.yaml"), "x.yaml")
    assert layout == spec.parse(text, "y.yaml") and layout.fingerprint and str(layout)
    for _ in range(2):
        shape, blocks = a_shape(rng), rng.choice((1, 2, 3))
        try:
            resolved = refusal(lambda s=shape, b=blocks: layout.resolve(s, b), "")
        except Refused:
            continue
        if math.prod(resolved.extents.values()) * blocks > 4 * _MOST or resolved.table_size > _MOST:
            continue
        found = require_one_to_one(layout, resolved)
        DONE["one-to-one"] += 1
        if not rng.randrange(6) and resolved.nbytes < 1 << 22:
            require_copies(rng, layout, resolved, found)


#: Of every plane the coordinates of its items by axis, and where each lies: allocation and byte.
_Places = dict[str, tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]]


def require_one_to_one(layout: Layout, resolved: Resolved) -> _Places:
    """Require that every item is at its declared place, inside an allocation, and that no two items share a byte."""
    found, taken = {}, []
    ends = np.array([allocation.nbytes for allocation in resolved.allocations])
    starts = np.concatenate([[0], np.cumsum(ends)])
    for part in resolved.planes:
        coordinates, entry, byte = places(layout, resolved, part)
        assert len(part.accesses) == 1 or part.sizes["o"] < 3, "no order for a third"
        for o in range(part.sizes["o"]) if len(part.accesses) > 1 else (None,):
            one = {axis: x for axis, x in coordinates.items() if axis != "b"}
            if o is not None:
                one["o"] = o  # type: ignore[assignment]
            at = part.accesses[o or 0].address(coordinates["b"], one)
            mine = (coordinates["o"] == o) if o is not None else np.True_
            for ours, theirs in zip((entry, byte), at, strict=True):
                assert (np.broadcast_to(theirs, ours.shape) == ours)[np.broadcast_to(mine, ours.shape)].all(), (
                    layout.meaning
                )
        assert (byte >= 0).all() and (byte + part.shape.itemsize <= ends[entry]).all(), f"outside: {layout.meaning}"
        items = starts[entry] + byte
        if part.shape.pack > 1:
            items = np.sort(items, axis=None).reshape(-1, part.shape.pack)
            assert (items == items[:, :1]).all(), f"elements of a byte: {layout.meaning}"
            items = items[:, 0]
        taken += [items.ravel() + i for i in range(part.shape.itemsize)]
        found[part.plane] = coordinates, entry, byte
    all_bytes = np.concatenate(taken)
    assert oracle.are_distinct(all_bytes), f"not one-to-one: {layout.meaning} at {resolved.shape}"
    return found


def places(layout: Layout, resolved: Resolved, part: Resolved) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """The declared place of every element: an open grid of coordinates, allocations, bytes.

    Orders, splits and pitches are evaluated in the simplest way, for all coordinates at once.
    """
    sizes, shape = dict(part.sizes), part.shape
    grid = dict(zip(sizes, np.ix_(*(np.arange(n, dtype=np.int64) for n in sizes.values())), strict=True))
    names = {f"n{axis}": n for axis, n in resolved.sizes.items()} | {"hd": resolved.shape.hd}
    plane = next((plane for plane in layout.planes if plane.name == part.plane), None)
    orders = (plane.orders if plane else layout.orders)[: shape.no]
    halves = []
    for order in orders:
        entry: Any = np.int64(0)
        for term in layout.orders[0].table:
            if term.planes:
                entry = entry * len(term.axes) + term.axes.index(part.plane)
            else:
                index, extent = _index(term, grid, sizes, shape)
                entry = entry * extent + index
        own = names | {"es": shape.itemsize}
        byte, held, packed = _bytes_of(
            order, dict((plane or layout).pitch), grid, sizes, own, shape, shape.itemsize, shape.pack
        )
        if plane:
            assert packed == 1
            outer = layout.orders[0]
            around = Order((), tuple(term for term in outer.inner if not term.planes))
            pitch = dict(layout.pitch)
            more, *_ = _bytes_of(around, pitch, grid, sizes, own, shape, resolved.record or held, 1)
            byte = byte + more + part.bases[0][0]
        halves.append((entry, byte))
    full = np.broadcast_shapes(*(x.shape for x in grid.values()))
    (entry, byte), *other = [[np.broadcast_to(x, full) for x in half] for half in halves]
    if other and sizes["o"] > 1:
        is_v = np.broadcast_to(grid["o"] == 1, full)
        entry, byte = (np.where(is_v, v, k) for k, v in zip((entry, byte), other[0], strict=True))
    return grid, entry, byte


def _index(term: Term, grid: dict[str, np.ndarray], sizes: dict[str, int], shape: BlockShape) -> tuple[Any, int]:
    index: Any = np.int64(0)
    extent = 1
    for axis in term.axes:
        index, extent = index * sizes[axis] + grid[axis], extent * sizes[axis]
    for sign, number, in_bytes in term.steps:
        by = number * shape.pack // shape.itemsize if in_bytes else number
        index, extent = (index // by, extent // by) if sign == "/" else (index % by, by)
    return index, extent


def _bytes_of(
    order: Order,
    pitch: dict[str, Any],
    grid: Any,
    sizes: Any,
    names: dict[str, int],
    shape: BlockShape,
    held: int,
    packed: int,
) -> tuple[Any, int, int]:
    """Bytes from the first element on; bytes of the whole; elements per byte that no axis accounts for."""
    byte: Any = np.int64(0)
    for term in reversed(order.inner):
        index, extent = _index(term, grid, sizes, shape)
        if packed > 1 and extent > 1:
            index, extent, packed = index // packed, extent // packed, 1
        stride = held
        if declared := pitch.get(str(term)):
            stride = _value(declared.expression, names)  # in elements, of which a byte may hold two
            stride = stride if declared.in_bytes else stride * shape.itemsize // shape.pack
        byte, held = byte + index * stride, stride * extent
    return byte, held, packed


def _value(expression: Expression, names: dict[str, int]) -> int:
    functions = {"round_up": lambda x, to: -(-x // to) * to, "min": min, "max": max}
    return int(eval(expression.text.strip(), {"__builtins__": {}}, {**functions, **names}))


def require_copies(rng: random.Random, layout: Layout, resolved: Resolved, found: _Places) -> None:
    """Require that a copy to a plain layout of the same axes moves every byte to its place, and no other; and also back."""
    if any(term.opaque for plane in (layout, *layout.planes) for order in plane.orders for term in order.terms):
        return
    plain = plain_layout(resolved)
    shape, blocks = resolved.shape, resolved.num_blocks
    try:
        other = plain.resolve(shape, blocks)
    except kvbm.LayoutError:  # of two elements in a byte, where their axis is not the last of the plain one
        return
    theirs = require_one_to_one(plain, other)
    (src, ours), (dst, dense) = (bound(rng, *one, shape) for one in ((layout, resolved), (plain, other)))
    DONE["copied"] += 1
    for a, a_found, b, b_found, ends in (
        (ours, found, dense, theirs, (src, dst)),
        (dense, theirs, ours, found, (dst, src)),
    ):
        expected = [buffer.copy() for buffer in b]
        for part in resolved.planes:
            axes, *read = a_found[part.plane]
            back, *write = b_found[part.plane]
            order = [list(back).index(axis) for axis in axes]
            for i in range(part.shape.itemsize):
                for e, at, to, into in zip(
                    *map(np.ravel, read), *(np.ravel(x.transpose(order)) for x in write), strict=True
                ):
                    expected[to][into + i] = a[e][at + i]
        try:
            kvbm.convert(*ends)
        except (kvbm.PlanError, kvbm.MissingKernelError):
            return
        assert all((x == y).all() for x, y in zip(b, expected, strict=True)), (
            f"other bytes: {layout.meaning} at {shape}"
        )
        a = b


def plain_layout(resolved: Resolved) -> Layout:
    """A dense layout of the same axes and planes; planes have separate arrays."""
    layout = resolved.layout
    text = "".join(f"  {axis}: {resolved.sizes[axis]}\n" for axis, _ in layout.extra)
    text = f"axes:\n{text}" if text else ""

    def order(part: Resolved) -> str:
        return " ".join(axis for axis in sorted(part.sizes) if axis not in "bd") + (" d" if "d" in part.sizes else "")

    if not layout.planes:
        return spec.parse(f"order: b {order(resolved)}\n{text}")
    text += "planes:\n"
    for part, plane in zip(resolved.parts, layout.planes, strict=True):
        shared = f", shared: {' '.join(plane.shared)}" if plane.shared else ""
        text += f"  {plane.name}: {{order: '{order(part)}', dtype: {part.shape.dtype}{shared}}}\n"
    return spec.parse(f"order: '[<{' '.join(p.name for p in layout.planes)}>] b'\n{text}")


def bound(rng: random.Random, layout: Layout, resolved: Resolved, shape: BlockShape) -> tuple[Pool, list[np.ndarray]]:
    """A pool filled with noise, and its bytes."""
    buffers = [np.frombuffer(bytearray(rng.randbytes(a.nbytes)), np.uint8) for a in resolved.allocations]
    arrays = [
        np.ndarray(a.shape, numpy_dtype(a.dtype), buffer, 0, a.strides)
        for a, buffer in zip(resolved.allocations, buffers, strict=True)
    ]
    return Pool(layout, shape, arrays, num_blocks=resolved.num_blocks), buffers


# ---- shapes and placements -----------------------------------------------------------------------------------------

_SHAPE_WORDS = (
    "nl",
    "no",
    "nh",
    "nt",
    "hd",
    "dtype",
    "tp",
    "/tp8",
    ",nt=32",
    "=",
    ",",
    "llama-3.1-8b",
    "title: x",
    "..",
    "/",
    *ITEMSIZE,
)
_SHAPE_TEXTS = (
    "llama-3.1-70b",
    "llama-3.1-70b/tp8",
    "llama-3.1-8b,nt=32,dtype=float8_e4m3fn",
    "nl=2,no=2,nh=4,nt=16,hd=32,dtype=float16",
)


def shape_text(rng: random.Random) -> str:
    return mutated(rng, rng.choice(_SHAPE_TEXTS), _SHAPE_WORDS, _SHAPE_TEXTS)


def try_shape(rng: random.Random, text: str) -> None:
    shape = refusal(lambda: kvbm.load_shape(text), "shape")
    assert kvbm.load_shape(str(shape)) == shape


def shape_file_text(rng: random.Random) -> str:
    return mutated(rng, rng.choice(seeds("shapes")), _SHAPE_WORDS, seeds("shapes"))


def try_shape_file(rng: random.Random, text: str) -> None:
    path = _folder() / "shape.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    preset = refusal(lambda: shapes._preset.__wrapped__(path), str(path))
    assert all(len(shapes.heads_of_rank(preset["nh"], degree, 0)) for degree in preset["tp"])


_PLACEMENT_WORDS = (
    "mesh", "shard", "layers", "nt", "over", "bounds", *"lhtd", "tp", "pp", "cp", "tp8", "pp2 tp4", "tp/2", "tp%2",
    "tp%4 by 1", "by",
    "by nt",     "cp by nt", "shard: {h: tp}", "layers: [0-3, 5-7 by 2]", "{over: pp, bounds: [0, 3, 8]}", "title",
)  # fmt: skip
_PLACEMENTS = (
    "mesh: tp8\nshard: {h: tp/4, t: tp%4 by 1}\nnt: 64\n",
    "mesh: pp2 tp4\nshard:\n  l: {over: pp, bounds: [0, 3, 8]}\n  h: tp\nlayers: [0-3, 5-7 by 2]\nnt: 16\n",
    "mesh: pp2 tp2 cp2\nshard: {l: pp, h: tp, t: cp by nt}\n",
    "mesh: tp4\nshard: {h: tp}\nlayers: 2-6 by 2\n",
)
_PRESETS = (
    "vllm:tp8,pp2,dcp4,nt16",
    "trtllm:tp2,cp4,order=pp cp tp,nt32",
    "sglang:tp4,pp3",
    "dynamo:tp2,engine=trtllm",
)
_PRESET_WORDS = (
    "vllm",
    "trtllm",
    "sglang",
    "dynamo",
    "tp8",
    "pp",
    "cp2",
    "dcp",
    "interleave",
    "nt",
    "engine=",
    "order=",
    "layers",
    ":",
    ",",
    "=",
)


def _model(rng: random.Random) -> BlockShape:
    return BlockShape(
        nl=rng.choice((1, 3, 8, 8, 8, 61)), no=2, nh=rng.choice((1, 2, 4, 8, 8)), nt=rng.choice((1, 16, 64)), hd=4
    )


def placement_text(rng: random.Random) -> str:
    texts = (*seeds("placements"), *_PLACEMENTS)
    return mutated(rng, rng.choice(texts), _PLACEMENT_WORDS, texts)


def try_placement(rng: random.Random, text: str) -> None:
    model = _model(rng)
    require_placed(rng, refusal(lambda: Placement.parse(text, model, "x.yaml"), "x.yaml"))


def preset_text(rng: random.Random) -> str:
    return mutated(rng, rng.choice(_PRESETS), _PRESET_WORDS, _PRESETS)


def try_preset(rng: random.Random, text: str) -> None:
    model = _model(rng)
    require_placed(rng, refusal(lambda: reshard.load(text, model), ""))


def require_placed(rng: random.Random, place: Placement) -> None:
    """Require that all ranks together hold all of the cache, and that copies from and to a random placement can be proven."""
    assert str(place) and repr(place)
    if place.world > 64:
        return
    assert place.fingerprint
    held = set()
    period = math.lcm(*(place.strips(rank).t.period for rank in range(place.world)))
    if period > 512:
        return
    for rank in range(place.world):
        layers, heads, turns = place.strips(rank)
        tokens = [t for t in range(period) if turns.holds(t)]
        held |= {(layer, head, t) for layer in layers for head in heads for t in (tokens[0], tokens[-1])}
        if layers.size:
            assert place.shape(rank).nl == len(list(layers))
    assert {x[0] for x in held} == set(place.layers) and {x[1] for x in held} == set(range(place.model.nh))
    other = Placement(
        rng.choice(("tp1", "tp2", "pp2")), model=place.model, nt=rng.choice((1, 16, 64)), layers=list(place.layers)
    )
    for ends in ((place, other), (other, place)):
        try:
            made = refusal(lambda e=ends: reshard.plan(*e, stripe=bool(rng.randrange(2))), "")
        except Refused:
            continue
        DONE["planned"] += 1
        assert str(made) and made.explain() and made.fingerprint


# ---- files of blocks -----------------------------------------------------------------------------------------------

_HEADER_WORDS = (
    "alloc_00000", "alloc_00001", "__metadata__", "kvbm.shape", "kvbm.num_blocks", "kvbm.fingerprint", "kvbm.format", "kvbm.planes",
    "kvbm.cast", "dtype", "shape", "data_offsets", "U8", "F16", "BF16", "F4", "I64", "null", "true", "NaN", "1e9", "[]", "{}", '"',
    "0", "-0", "\\u0000",
    "\\ud800",
)  # fmt: skip


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="kvbm-fuzz-"))


@cache
def stored_files() -> tuple[tuple[bytes, str], ...]:
    """Files written by kvbm, with their layouts: one array, several arrays, padding, and planes of both kinds."""
    found = []
    small = BlockShape(nl=2, no=2, nh=2, nt=4, hd=8, dtype="bfloat16")
    latent = BlockShape(nl=1, no=1, nh=1, nt=2, hd=128, dtype="bfloat16")
    for name, shape in (("universal", small), ("nhd", small), ("vllm/LBHNC", small), ("vllm/dsa_indexer", latent)):
        path = _folder() / "good.safetensors"
        with store.create(path, kvbm.load(name), shape, 2, force=True) as pool:
            for number, array in enumerate(pool.arrays):
                array.view(np.uint8)[...] = np.random.default_rng(number).integers(
                    0, 256, array.view(np.uint8).shape, np.uint8
                )
        found.append((path.read_bytes(), name))
    return tuple(found)


def stored_bytes(rng: random.Random) -> tuple[bytes, str]:
    """One of these files with words of its header, its length or any of its bytes changed."""
    raw, name = rng.choice(stored_files())
    length = struct.unpack("<Q", raw[:8])[0]
    header, body = raw[8 : 8 + length].rstrip(), raw[8 + length :]
    what = rng.randrange(8)
    if what == 0:  # bytes
        changed = bytearray(raw[:8] + header + body)
        for _ in range(rng.choice((1, 1, 2, 8))):
            changed[rng.randrange(min(len(changed), 8 + len(header)))] = rng.randrange(256)
        return bytes(changed), name
    if what == 1:  # lengths
        length = max(0, len(header) + rng.choice((-1, 0, 1, -len(header), 2**31, 2**63 - len(header))))
        return struct.pack("<Q", length % 2**64) + header + body[: rng.choice((len(body), len(body) - 1, 0))], name
    text = mutated(rng, header.decode(), _HEADER_WORDS, (header.decode().replace(",", ",\n"),))
    header = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(header)) + header + body + b"x" * (what == 2), name


def try_file(rng: random.Random, given: tuple[bytes, str]) -> None:
    raw, name = given
    path = _folder() / "in.safetensors"
    path.write_bytes(raw)
    layout = kvbm.load(name)
    if not rng.randrange(50):
        require_converts(path)

    def take() -> tuple[store.Stored, Pool]:
        stored = store.read(path)
        assert stored.layout_name is None or isinstance(stored.layout_name, str)
        stored.digests  # noqa: B018
        return stored, stored.pool(layout, None if rng.randrange(3) else stored.shape)

    _stored, pool = refusal(take, str(path))
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    for number, array in enumerate(pool.arrays):
        begin, end = header[f"alloc_{number:05d}"]["data_offsets"]
        seen = np.lib.stride_tricks.as_strided(array.reshape(-1)[:1].view(np.uint8), (end - begin,), (1,))
        assert seen.tobytes() == raw[8 + length + begin : 8 + length + end], "other bytes than the file's"
        assert not array.flags.writeable


def require_converts(path: Path) -> None:
    """Require that the command converts the file, or ends with the exit code of one of kvbm's errors."""
    from click.testing import CliRunner

    from kvbm.cli.app import main

    out = path.with_name("out.safetensors")
    out.unlink(missing_ok=True)
    result = CliRunner().invoke(main, ["convert", str(path), str(out), "--to", "universal"])
    codes = {0, 2} | {getattr(kvbm.errors, error).exit_code for error in kvbm.errors.__all__}
    assert result.exit_code in codes and isinstance(result.exception, SystemExit | KvbmError | None), repr(
        result.exception
    )
    assert result.exit_code == 0 or not out.exists()


# ---- arrays --------------------------------------------------------------------------------------------------------

_SMALL = BlockShape(nl=2, no=2, nh=2, nt=2, hd=4, dtype="int16")
_ERRORS = (
    ValueError, TypeError, RuntimeError, AttributeError, KeyError, IndexError, BufferError, OverflowError, ZeroDivisionError,
    OSError, NotImplementedError, AssertionError, RecursionError, StopIteration, UnicodeError,
)  # fmt: skip


def anything(rng: random.Random) -> Any:
    """A value of any type."""
    made = (
        lambda: rng.choice(_NUMBERS), lambda: -1, lambda: -rng.choice(_NUMBERS), lambda: True, lambda: None, lambda: 1.5,
        lambda: math.nan,         lambda: "".join(rng.choices(string.printable, k=3)), lambda: b"\0\1", lambda: (),
        lambda: [[]], dict, lambda: {1, 2},
        lambda: range(3), lambda: np.int64(3), lambda: np.zeros(2, np.int32), lambda: np.float32(2), object,
        lambda: np.array(3),         lambda: (1, 2, 3), lambda: [0, 1], lambda: np.zeros((2, 2)), lambda: slice(2), lambda: 1j,
        lambda: np.datetime64("2026-01-01"),         lambda: "int16", lambda: np.array([None]), lambda: Odd(rng),
    )  # fmt: skip
    return rng.choice(made)()


class Odd:
    """Describes itself as an array, with wrong values."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._raises = rng.choice(_ERRORS)
        self._array = np.zeros((2, 2, 2, 2, 2, 4), rng.choice(("int16", "uint16", "int32")))
        self._protocols = {
            name
            for name in (
                "__cuda_array_interface__",
                "__dlpack__",
                "__dlpack_device__",
                "__array_interface__",
                "__index__",
                "__len__",
            )
            if rng.randrange(2)
        }

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and name not in self.__dict__.get("_protocols", ()):
            raise AttributeError(name)
        rng = self._rng
        what = rng.randrange(6)
        if what == 0:
            raise self._raises(f"{name} of a liar")
        if name in ("__dlpack__", "__dlpack_device__"):
            return getattr(self, f"_{name.strip('_')}")
        if name == "__cuda_array_interface__" or name == "__array_interface__":
            return anything(rng) if what == 1 else self._interface()
        return anything(rng)

    def _interface(self) -> dict[str, Any]:
        array = self._array
        said = {
            "shape": array.shape, "typestr": "<i2", "data": (array.ctypes.data, False), "strides": None, "version": 3,
            "descr": [("", "<i2")], "mask": None, "stream": 1,
        }  # fmt: skip
        for _ in range(self._rng.randrange(3)):
            key = self._rng.choice(list(said))
            said[key] = self._rng.choice(
                (anything(self._rng), ("<i2", ">i2", "|V3", "|O", "i", "f4", "")[self._rng.randrange(7)])
            )
            if not self._rng.randrange(4):
                del said[key]
            if key in ("shape", "strides") and self._rng.randrange(2):
                said[key] = tuple(
                    self._rng.choice((2, 2, 0, -1, 2**40, 2**63, 8)) for _ in range(self._rng.randrange(7))
                )
        return said

    def _dlpack_device(self) -> Any:
        if not self._rng.randrange(4):
            raise self._raises("no device")
        return self._rng.choice(
            ((1, 0), (1, 0), (1, 0), (2, 0), (3, 0), (99, -1), anything(self._rng), (anything(self._rng), 0))
        )

    def _dlpack(self, **_options: Any) -> Any:
        if not self._rng.randrange(3):
            raise self._raises("no capsule")
        return self._array.__dlpack__() if self._rng.randrange(2) else anything(self._rng)


class Liar(Odd):
    """The same, with methods on its type, where protocols look for them."""

    __array_interface__ = property(lambda self: self._interface())

    def __dlpack_device__(self) -> Any:
        return self._dlpack_device()

    def __dlpack__(self, **options: Any) -> Any:
        return self._dlpack(**options)

    def __index__(self) -> Any:
        return anything(self._rng)

    def __iter__(self) -> Iterator[Any]:
        if not self._rng.randrange(3):
            raise self._raises("no items")
        return iter([anything(self._rng)] * 2)


def odd_array(rng: random.Random, shape: Sequence[int], dtype: str) -> Any:
    """An object that is similar to the expected array: of that shape and dtype, of others, or not an array."""
    what = rng.randrange(14)
    base = np.zeros([2 * n for n in shape], dtype)
    if what == 0:
        return base[tuple(slice(n) for n in shape)]  # gaps
    dense = np.ascontiguousarray(base[tuple(slice(n) for n in shape)])
    if what == 1:
        return dense[tuple(slice(None, None, rng.choice((1, -1))) for _ in shape)]
    if what == 2:
        return dense.transpose(rng.sample(range(len(shape)), len(shape)))
    if what == 3:
        dense.flags.writeable = False
        return dense
    if what == 4:
        kinds = ("bool", "i1", "u2", ">i2", "f2", "f8", "c8", "U1", "S2", "O", "V2", "M8[s]", "i2,i2", "i4", "u8")
        return np.zeros(shape, rng.choice(kinds))
    if what == 5:
        sizes = list(shape)
        sizes[rng.randrange(len(sizes))] += rng.choice((-1, 1, 2, -2))
        return np.zeros([max(n, 0) for n in sizes], dtype)
    if what == 6:
        return np.broadcast_to(np.zeros((), dtype), shape)
    if what == 7:
        raw = np.zeros(dense.nbytes + 3, np.uint8)[rng.randrange(4) :][: dense.nbytes]
        return raw.view(dtype).reshape(shape)
    if what == 8:
        return np.ma.masked_array(dense, np.zeros(shape, bool))
    if what == 9:
        return rng.choice((Odd, Liar))(rng)
    if what == 10:
        return anything(rng)
    if what == 11:
        return dense.tolist()
    if what == 12:
        return memoryview(dense)
    return dense


def odd_arrays(rng: random.Random) -> list[Any]:
    shapes_of_four = [allocation.shape for allocation in FOUR.resolve(_SMALL, 2).allocations]
    plain: list[Any] = [np.zeros(shape, "int16") for shape in shapes_of_four]
    for _ in range(rng.choice((1, 1, 2))):
        plain[rng.randrange(len(plain))] = odd_array(rng, shapes_of_four[0], "int16")
    if not rng.randrange(6):
        plain = [*plain, plain[0]][: rng.randrange(len(plain) + 2)]
    return plain


def try_arrays(rng: random.Random, arrays: list[Any]) -> None:
    """Make a pool from such arrays, and compare a copy into it with NumPy's view of the arrays."""
    count = rng.choice((None, None, None, 2, 2, 2, anything(rng)))
    pool = refusal(lambda: Pool(FOUR, _SMALL, arrays, num_blocks=count), "four")
    assert pool.device == "cpu"
    source, _ = bound(rng, ONE, ONE.resolve(_SMALL, pool.num_blocks), _SMALL)
    refusal(lambda: kvbm.convert(source, pool), "")
    DONE["copied into arrays"] += 1
    expected = source.arrays[0].view(np.int16).transpose(2, 3, 0, 4, 1, 5)  # b h l o t d → l o b t h d
    seen = [array if isinstance(array, np.ndarray) else np.from_dlpack(array) for array in arrays]
    for array, want in zip(seen, expected.reshape(4, *expected.shape[2:]), strict=True):
        assert (array.view(np.int16) == want).all(), "other elements"


# ---- ids -----------------------------------------------------------------------------------------------------------

_BLOCKS = 6


def odd_ids(rng: random.Random) -> Any:
    """Block ids of any type; most of them are correct."""
    count = rng.choice((0, 1, 2, 3, 3, 6))
    plain = rng.sample(range(_BLOCKS), count)
    if not rng.randrange(3) and plain:
        plain[rng.randrange(len(plain))] = rng.choice((-1, -1, -2, _BLOCKS, plain[0], *_NUMBERS))
    what = rng.randrange(13)
    if what == 0:
        return plain
    if what == 1:
        return tuple(plain)
    if what == 2:
        return range(rng.randrange(-1, 4), rng.randrange(-1, 8), rng.choice((1, 2, -1)))
    if what == 3:
        return anything(rng)
    if what == 4:
        return [anything(rng) for _ in range(count)]
    if what == 5:
        return rng.choice((iter, set, dict.fromkeys, str, np.array, np.asarray))(plain)
    small = [x if abs(x) < 100 else 1 for x in plain]
    kind = rng.choice(
        ("int8", "int16", "int32", "int64", "uint8", "uint32", "uint64", "bool", "f4", ">i4", "O", "U3", "M8[s]", "c8")
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            array = np.array(small).astype(kind)
        except (TypeError, ValueError, OverflowError):
            return small
    if what == 6:
        return array[::-1]
    if what == 7:
        return np.repeat(array, 2)[::2]
    if what == 8:
        return array.reshape(1, -1) if rng.randrange(2) else array.reshape(-1, 1)
    if what == 9:
        array.flags.writeable = False
    if what == 10:
        return rng.choice((Odd, Liar))(rng)
    if what == 11:
        return memoryview(array) if kind not in ("M8[s]", "c8") else array
    return array


@cache
def _pair() -> tuple[tuple[Pool, list[np.ndarray]], tuple[Pool, list[np.ndarray]]]:
    rng = random.Random(0)
    four, one = (bound(rng, layout, layout.resolve(_SMALL, _BLOCKS), _SMALL) for layout in (FOUR, ONE))
    return four, one


def ids_pair(rng: random.Random) -> tuple[Any, Any]:
    one = odd_ids(rng)
    if not rng.randrange(3):
        return one, one
    many = (
        len(one)
        if isinstance(one, list | tuple | range)
        else getattr(one, "size", 9)
        if isinstance(one, np.ndarray)
        else 9
    )
    return one, (rng.sample(range(_BLOCKS), many) if many <= _BLOCKS and rng.randrange(2) else odd_ids(rng))


def try_ids(rng: random.Random, ids: tuple[Any, Any]) -> None:
    """Copy with these ids.  The result must be that of Python's integers; if they are refused, the destination is unchanged."""
    (src, _), (dst, (buffer,)) = _pair()
    buffer[:] = np.frombuffer(rng.randbytes(buffer.size), np.uint8)
    before = dst.arrays[0].copy()
    whole = np.stack(src.arrays).reshape(2, 2, _BLOCKS, 2, 2, 4)  # l o b t h d
    try:
        refusal(lambda: kvbm.convert(src, dst, *ids), "")
    except Refused:
        assert (dst.arrays[0] == before).all(), "written, and refused"
        raise
    if any(isinstance(x, Odd) for one in ids for x in (one if isinstance(one, list) else [one])):
        return  # says something else each time
    named = [None if one is None else np.asarray(one).reshape(-1).tolist() for one in ids]
    count = next((len(one) for one in named if one is not None), _BLOCKS)
    named = [range(count) if one is None else one for one in named]
    for i, j in zip(*named, strict=True):
        if i >= 0 and j >= 0:
            before[j] = whole[:, :, i].transpose(3, 0, 1, 2, 4)
    assert (dst.arrays[0] == before).all(), "other elements"


#: Kind → what makes an input of it, and what must become of it.
KINDS: dict[str, tuple[Callable[[random.Random], Any], Callable[[random.Random, Any], None]]] = {
    "layout": (layout_text, try_layout),
    "shape": (shape_text, try_shape),
    "shape file": (shape_file_text, try_shape_file),
    "placement": (placement_text, try_placement),
    "preset": (preset_text, try_preset),
    "file": (stored_bytes, try_file),
    "arrays": (odd_arrays, try_arrays),
    "ids": (ids_pair, try_ids),
}


def try_case(kind: str, number: int) -> bool:
    """True if the input of this number was accepted.  Raises an error for a violation."""
    rng = random.Random(f"{kind} {number}")
    make, check = KINDS[kind]
    given = make(rng)
    return try_input(check, rng, given)


def try_input(check: Callable[[random.Random, Any], None], rng: random.Random, given: Any) -> bool:
    """True if the input was accepted."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "__index__ returned non-int")
        try:
            check(rng, given)
        except Refused:
            return False
    return True
