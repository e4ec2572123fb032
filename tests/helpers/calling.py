"""Calls of every public function with arguments that are wrong in some way.  Each must work, or be refused in kvbm's own words.

`found` has every public function, class and method: the names in ``__all__`` of the public modules, and what ``docs/reference``
documents.  A function that is added there is tried without a change here, unless a parameter has a name that `VALID` lacks.

A call is a name and a number.  All random choices follow from the number, so a failure can be repeated.  Most arguments are right,
and one or two are hostile.  The call is a violation if it

- raises anything but an error of kvbm, or a TypeError, ValueError or OSError that a line of kvbm raises on purpose;
- warns;
- takes more than `MOST_BYTES` of memory, or more than `SECONDS`;
- ends the process.  So calls run in a child (`tried`).
"""

# ruff: noqa: ARG005

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import math
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import kvbm
from kvbm import BlockShape, KvbmError, Model, Placement, Pool, Span, Transfer, reshard, store, testing, wire
from kvbm._arguments import quoted

__all__ = ["Violation", "call", "found", "tried"]

ROOT = Path(kvbm.__file__).parent

#: Memory (bytes) that a call may take beyond what the process has, and its processor time.
MOST_BYTES, SECONDS = 256 << 20, 8

#: Modules whose ``__all__`` is public.  Bridges of frameworks that are not installed are left out.
MODULES = (
    "kvbm",
    "kvbm.kernels",
    "kvbm.reshard",
    "kvbm.store",
    "kvbm.wire",
    "kvbm.testing",
    "kvbm.numpy",
    "kvbm.numba",
    "kvbm.torch",
    "kvbm.jax",
    "kvbm.cupy",
    "kvbm.testing.engines",
)


#: Memory (bytes) that the child may hold: what it asks for beyond that is a MemoryError, and so a violation.
_ROOM = 3 << 30


class Violation(AssertionError):  # noqa: N818
    """A call that ended as none may."""


# ---- what there is -------------------------------------------------------------------------------------------------


def _documented() -> Iterator[tuple[str, Any]]:
    """Names and objects of the lines ``::: kvbm.x.y`` in docs/reference that are no modules."""
    pages = Path(__file__).parents[2] / "docs" / "reference" / "python"
    for name in re.findall(
        r"^::: (kvbm\S+)$", "\n".join(p.read_text("utf-8") for p in sorted(pages.glob("*.md"))), re.MULTILINE
    ):
        home, _, last = name.rpartition(".")
        with contextlib.suppress(ImportError):  # a framework that is not installed
            module = importlib.import_module(home)
            found = getattr(module, last)
            if not isinstance(found, types.ModuleType):
                yield name, found


@functools.cache
def _public() -> dict[str, Any]:
    """Every public function and class, once, by its shortest name."""
    found: dict[str, Any] = {}
    every = []
    for home in MODULES:
        try:
            module = importlib.import_module(home)
        except ImportError:
            continue
        every += [(f"{home}.{name}", getattr(module, name)) for name in module.__all__]
    known: set[int] = set()
    for name, one in [*every, *_documented()]:
        is_error = isinstance(one, type) and issubclass(one, BaseException)
        if callable(one) and not is_error and id(one) not in known:
            known.add(id(one))
            found[name] = one
    return found


def _members(name: str, one: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class that kvbm defines."""
    for member in dir(one):
        if member.startswith("_") and member not in ("__enter__", "__eq__", "__repr__"):
            continue
        owner = next((base for base in one.__mro__ if member in base.__dict__), None)
        if owner is not None and owner.__module__.startswith("kvbm"):
            yield f"{name}.{member}", inspect.getattr_static(one, member)


@functools.cache
def found() -> dict[str, Any]:
    """Name → a function or a class; a method or a property of a class by the class's name, too."""
    every = {}
    for name, one in _public().items():
        if not isinstance(one, type):
            if one.__name__ not in INSIDE:
                every[name] = one
            continue
        if one in (wire.Op, wire.Wire, kvbm.kernels.MemcpyBatchMode):  # protocols, and an enumeration
            continue
        if one.__name__ not in MADE:
            every[name] = one
        every |= {
            name: member
            for name, member in _members(name, one)
            if (own := ".".join(name.rsplit(".", 2)[1:])) not in INSIDE and own.partition(".")[0] not in INSIDE
        }
    return every


#: Classes that users read, and that only kvbm makes.
MADE = frozenset(
    [
        "Layout",
        "CastReport",
        "Match",
        "Plan",
        "PoolSection",
        "Chunk",
        "ChunksDone",
        "LocalDone",
        "Message",
        "Pairs",
        "Rank",
        "Resharding",
        "Trailer",
        "Damage",
        "Stored",
        "Mapped",
        "Faulty",
        "Benchmark",
        "BenchmarkRecord",
        "Misplaced",
        "Written",
        "Resolved",
        "Link",
        "Resharding",
    ]
)

#: Classes and methods that other modules of kvbm call, with arguments that are checked already.
INSIDE = frozenset(
    [
        "Rank",
        "Packer.cells",
        "Packer.ends",
        "Packer.entries",
        "Packer.fitting",
        "Packer.in_order",
        "Packer.keys",
        "Packer.part",
        "Packer.lane",
        "Packer.listed",
        "Packer.peer",
        "Packer.require_disjoint",
        "Packer.require_no_stream",
        "Packer.require_spans",
        "Packer.route",
        "Packer.slot",
        "Packer.require_usable",
        "Pool.trusted",
        "Pool.holds",
        "Pool.meets",
        "Pool.written",
        "Plan.flat",
        "Plan.staged",
        "Plan.forms",
        "Plan.launches",
        "Plan.fit",
        "Resharding.refit",
        "Resharding.section",
        "Trailer.require",
        "Trailer.require_digest",
        "Trailer.of",
        "Trailer.write",
        "Cut.trailer",
        "Message.of_layers",
        "Message.part",
        "PoolSection.keys",
        "Layout.same_blocks",
        "Link.asked",
        "Link.awaited",
        "Link.borrow",
        "Link.count",
        "Link.cut",
        "Link.dropped",
        "Link.early",
        "Link.fetch",
        "Link.get",
        "Link.give_back",
        "Link.handles",
        "Link.heard",
        "Link.hold",
        "Link.is_idle",
        "Link.leaves",
        "Link.lender",
        "Link.lose",
        "Link.open",
        "Link.plans",
        "Link.put",
        "Link.release",
        "Link.say",
        "Link.tick",
        "Link.zero",
        "Link.tail",
        "Endpoint.call",
        "Endpoint.submit",
        "Endpoint.wake",
        "Endpoint.is_over",
        "Endpoint.require_alike",
        "Endpoint.join",
        "Digests.put",
        "Digests.require",
        "Digests.take",
        "Digests.torn",
        "Digests.zeros",
        "Digests.sizes",
        "Mapped.borrow",
        "Mapped.expect",
        "Mapped.give_back",
        "Mapped.hold",
        "Mapped.loans",
        "Mapped.open",
        "Mapped.post",
        "Mapped.watch",
        "Faulty.release",
        "Misplaced",
        "Written",
        "Strips",
        "Placement.strips",
        "Packer.zero",
        "Model.axes",
        "LayoutCase.check",
        "vllm_caches",
        "vllm_writes",
    ]
)


# ---- right arguments -----------------------------------------------------------------------------------------------

SMALL = BlockShape(nl=2, no=2, nh=2, nt=4, hd=4, dtype="float32")
BLOCKS = 3


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="kvbm-calls-"))


def _pool(rng: random.Random) -> Pool:
    layout = rng.choice(("universal", "nhd", "hnd", "vllm/LBHNC", "vllm/BLNHC"))
    if rng.randrange(2):
        return Pool.allocate(layout, SMALL, BLOCKS)
    resolved = kvbm.load(layout).resolve(SMALL, BLOCKS)
    return Pool(layout, SMALL, [np.zeros(one.shape, "float32") for one in resolved.allocations])


def _file(rng: random.Random) -> Path:
    path = _folder() / f"{rng.randrange(4)}.safetensors"
    if not path.exists():
        with store.create(path, "nhd", SMALL, BLOCKS) as pool:
            for array in pool.arrays:
                array[...] = 1
    return path


def _placement(rng: random.Random) -> Placement:
    if rng.randrange(2):
        return Placement(rng.choice(("tp2", "pp2 tp2")), shard=rng.choice(({"h": "tp"}, {})), model=SMALL)
    return reshard.vllm(SMALL, tp=rng.choice((1, 2)))


def _made(rng: random.Random) -> reshard.Resharding:
    return reshard.plan(reshard.vllm(SMALL, tp=rng.choice((1, 2))), reshard.vllm(SMALL, tp=1))


def _whole_pool() -> Pool:
    return Pool.allocate("nhd", SMALL, BLOCKS)


def _packer() -> reshard.Packer:
    ends = reshard.vllm(SMALL, tp=1, name="a"), reshard.vllm(SMALL, tp=1, name="b")
    return reshard.Packer(reshard.plan(*ends), 0, _whole_pool())


def _span(_rng: random.Random) -> Span:
    return Span([0, 2], range(8))


def _local() -> reshard.Local:
    made = reshard.plan(reshard.vllm(SMALL, tp=1, name="a"), reshard.vllm(SMALL, tp=1, name="b"))
    return reshard.Local(made, [_whole_pool()], [_whole_pool()])


def _cut() -> reshard.Cut:
    return reshard.Cut(_packer(), Span([0, 2], range(8)))


def _trailer() -> Any:
    made = _packer().made
    chunk = reshard.chunks(made, made.messages[0], range(8))[0]
    return reshard.Trailer.of(chunk, plan=1, key=2, epoch=0, mark=0)


def _message(_rng: random.Random) -> Any:
    return _packer().made.messages[0]


def _chunk(_rng: random.Random) -> Any:
    made = _packer().made
    return reshard.chunks(made, made.messages[0], range(8))[0]


def _wire(rng: random.Random) -> Any:
    return wire.memory(f"w{rng.randrange(1 << 30)}", wire.Hub())


def _torch_tensor(*shape: int) -> Any:
    import torch

    return torch.zeros(shape)


def _endpoint(name: str = "a", hub: Any = None) -> Any:
    from kvbm.link.endpoint import Endpoint

    lane = wire.memory(name, hub or wire.Hub())
    made = Endpoint(
        name, reshard.vllm(SMALL, tp=1), 0, _whole_pool(), wire=lane, ring_bytes=1 << 16, chunk_bytes=1 << 14
    )
    _ENDPOINTS.append(made)
    return made


#: Closed after the call.
_ENDPOINTS: list[Any] = []


def _link() -> Any:
    hub = wire.Hub()
    one, other = _endpoint("a", hub), _endpoint("b", hub)
    return one.meet([other.card()])


def _done() -> Any:
    packer = _packer()
    cut = reshard.Cut(packer, Span([0, 2], range(8)))
    return cut.pack(
        {(peer, chunk.number): np.zeros(chunk.size, np.uint8) for peer, many in cut.chunks.items() for chunk in many},
        key="k",
    )


def _record() -> Any:
    return testing.BenchmarkRecord("x", 1.0, 1.0, 1.0, 1.0, 1, 1, 4, 1, "cpu", "cpu", None)


#: What methods are called on.
OBJECTS: dict[str, Callable[[random.Random], Any]] = {
    "BlockShape": lambda _: SMALL,
    "Layout": lambda rng: kvbm.load(rng.choice(("nhd", "universal", "vllm/cpu_vec", "vllm/fp8_ds_mla"))),
    "Resolved": lambda _: kvbm.load("nhd").resolve(SMALL, BLOCKS),
    "Match": lambda _: kvbm.match(np.zeros((3, 2, 2, 2, 4, 4), "float32"), SMALL),
    "Model": lambda _: Model(layers=range(2), nl=4),
    "Placement": _placement,
    "Plan": lambda _: kvbm.plan("nhd", "universal", SMALL),
    "Scale": lambda _: kvbm.Scale(0.5),
    "CastReport": lambda _: kvbm.CastReport(),
    "Pool": _pool,
    "PoolSection": lambda rng: _pool(rng).section(l=0),
    "Span": _span,
    "Transfer": lambda rng: Transfer(_pool(rng), _pool(rng)),
    "Chunk": _chunk,
    "Cut": lambda _: _cut(),
    "ChunksDone": lambda _: _done(),
    "Local": lambda _: _local(),
    "LocalDone": lambda _: reshard.LocalDone([]),
    "Message": _message,
    "Packer": lambda _: _packer(),
    "Pairs": lambda _: reshard.Pairs(*[np.zeros(1, np.int64)] * 4),
    "Rank": lambda _: _packer().ends(_packer().made.messages[0])[0],
    "Resharding": _made,
    "Trailer": lambda _: _trailer(),
    "CastFrom": lambda _: store.CastFrom("float8_e4m3fn", "bfloat16"),
    "Damage": lambda _: store.Damage(0, "block", None, None, 1, 2),
    "Digests": lambda _: store.Digests.of(_whole_pool()),
    "Stored": lambda rng: store.read(_file(rng)),
    "Fault": lambda _: wire.Fault("lose", 3),
    "Faulty": lambda rng: wire.faulty(_wire(rng)),
    "Mapped": lambda rng: wire.mapped(_wire(rng)),
    "Hub": lambda _: wire.Hub(),
    "Slab": lambda _: wire.Slab.of(np.zeros(64, np.uint8)),
    "Slice": lambda _: wire.Slice(0, 8),
    "Benchmark": lambda _: testing.Benchmark(1.0, None),
    "BenchmarkRecord": lambda _: _record(),
    "LayoutCase": lambda _: testing.LayoutCase(kvbm.load("nhd"), kvbm.load("hnd"), SMALL, 2),
    "TestCase": lambda _: testing.TestCase(128, 128, 1, 0, "x"),
    "Endpoint": lambda _: _endpoint(),
    "Link": lambda _: _link(),
}


_LAYOUT_NAMES = ("nhd", "hnd", "universal", "vllm/LBHNC", "vllm/cpu_vec", "operational")


def _array(_rng: random.Random) -> Any:
    return np.zeros((2, BLOCKS, 4, 2, 4), "float32")


def _layers(rng: random.Random) -> Any:
    made = kvbm.load("nhd").resolve(SMALL, BLOCKS)
    arrays = [np.zeros(one.shape, "float32") for one in made.allocations]
    return arrays if rng.randrange(3) else [_torch_tensor(*one.shape) for one in made.allocations]


def _kernel(data: Any) -> Any:
    return data


#: Right values of parameters, by name.  A name with a function's before it goes first.
VALID: dict[str, Callable[[random.Random], Any]] = {
    "layout": lambda rng: rng.choice(_LAYOUT_NAMES),
    "shape": lambda rng: rng.choice((SMALL, str(SMALL), "llama-3.1-8b/tp8")) if not rng.randrange(4) else SMALL,
    "model": lambda rng: SMALL,
    "tensors": _layers,
    "arrays": _layers,
    "out": lambda rng: None,
    "num_blocks": lambda rng: BLOCKS,
    "src": lambda rng: "nhd",
    "dst": lambda rng: "universal",
    "src_pool": _pool,
    "dst_pool": _pool,
    "pool": _pool,
    "ids": lambda rng: rng.choice((None, [0], [0, 2])),
    "src_ids": lambda rng: [0, 1],
    "dst_ids": lambda rng: [1, 2],
    "layers": lambda rng: None,
    "path": _file,
    "file": lambda rng: "x.yaml",
    "device": lambda rng: "cpu",
    "progress": lambda rng: None,
    "tokens": lambda rng: 4,
    "made": _made,
    "message": _message,
    "span": _span,
    "src_pools": lambda rng: [_whole_pool()],
    "dst_pools": lambda rng: [_whole_pool()],
    "packer": lambda rng: _packer(),
    "wire": _wire,
    "name": lambda rng: "a",
    "axes": lambda rng: rng.choice(("[l] b h t d", "[l] o b t h d", "[l] b t (h d)", "b")),
    "rank": lambda rng: 0,
    "heads": lambda rng: 8,
    "degree": lambda rng: 4,
    "nl": lambda rng: 2,
    "no": lambda rng: 2,
    "nh": lambda rng: 2,
    "nt": lambda rng: 4,
    "hd": lambda rng: 4,
    "dtype": lambda rng: "float32",
    "before": lambda rng: "bfloat16",
    "cast": lambda rng: rng.choice((None, "amax", kvbm.Scale(0.5))),
    "strategy": lambda rng: "auto",
    "mesh": lambda rng: "tp2",
    "shard": lambda rng: {"h": "tp"},
    "table": lambda rng: [0, 2],
    "origin": lambda rng: 0,
    "key": lambda rng: "k",
    "epoch": lambda rng: 0,
    "most": lambda rng: 1 << 20,
    "slots": lambda rng: {(0, 0): np.zeros(1 << 16, np.uint8)},
    "peer": lambda rng: 0,
    "number": lambda rng: 0,
    "unit": lambda rng: _message(rng).t,
    "src_span": _span,
    "dst_span": _span,
    "actual": _array,
    "expected": _array,
    "rtol": lambda rng: 1e-3,
    "atol": lambda rng: 1e-3,
    "kernel_fn": lambda rng: _kernel,
    "reference_fn": lambda rng: _kernel,
    "test_input": lambda rng: np.zeros(4, "float32"),
    "num_warmup": lambda rng: 0,
    "num_runs": lambda rng: 1,
    "limit_s": lambda rng: 2.0,
    "planes": lambda rng: np.zeros((1, 2, 2, 4, 4, 4), np.uint8),
    "array": lambda rng: np.zeros(64, np.uint8),
    "tensor": lambda rng: _torch_tensor(4, 4),
    "card": lambda rng: _wire(rng).card(),
    "note": lambda rng: b"note",
    "slab": lambda rng: wire.Slab.of(np.zeros(64, np.uint8)),
    "local": lambda rng: wire.Slice(0, 8),
    "remote": lambda rng: wire.Slice(0, 8),
    "what": lambda rng: "lose",
    "at": lambda rng: 1,
    "after": lambda rng: 1,
    "script": lambda rng: (),
    "seed": lambda rng: 0,
    "rate": lambda rng: 0.5,
    "kinds": lambda rng: ("lose",),
    "store": lambda rng: None,
    "stored": lambda rng: store.read(_file(rng)),
    "metadata": lambda rng: {"a": "b"},
    "force": lambda rng: True,
    "src_ptrs": lambda rng: [],
    "dst_ptrs": lambda rng: [],
    "size_or_sizes": lambda rng: 0,
    "size": lambda rng: 0,
    "blocks": lambda rng: [],
    "universals": lambda rng: [],
    "operationals": lambda rng: [],
    "text": lambda rng: str(SMALL),
    "kv_caches": lambda rng: {"layers.0.attn": _torch_tensor(2, BLOCKS, 4, 2, 4)},
    "records": lambda rng: [],
    "stream": lambda rng: None,
    "wait": lambda rng: None,
    "nbytes": lambda rng: 64,
    "address": lambda rng: 1 << 20,
    "block": lambda rng: 0,
    "begin": lambda rng: 0,
    "end": lambda rng: 10,
    "data": lambda rng: _trailer().write(),
    "rows": lambda rng: range(1),
    "some": lambda rng: store.Digests.of(_whole_pool(), [0]),
    "digests": lambda rng: True,
    "one": lambda rng: SMALL,
    "other": lambda rng: SMALL,
    "chunk": _chunk,
    "plan": lambda rng: 1,
    "mark": lambda rng: 1,
    "batch": lambda rng: 2,
    "layouts": lambda rng: ["nhd"],
    "dtypes": lambda rng: ["float32"],
    "batches": lambda rng: [1],
    "engine": lambda rng: "vllm",
    "generate": lambda rng: None,
    "folder": lambda rng: _folder() / "wire",
    "bucket": lambda rng: "b",
    "drop_seconds": lambda rng: 1.0,
    "offset": lambda rng: 0,
    "m": lambda rng: 128,
    "k": lambda rng: 128,
    "l": lambda rng: 1,
    "vllm_config": lambda rng: None,
    "kv_cache_config": lambda rng: None,
    "token_pool": lambda rng: object(),
    "cache": lambda rng: object(),
    "tokens_per_block": lambda rng: 4,
    "num_kv_heads": lambda rng: 2,
    "placement": lambda rng: reshard.vllm(SMALL, tp=1),
}

#: Right values for a parameter of one function.
OWN: dict[str, Callable[[random.Random], Any]] = {
    "from_trtllm.pool": lambda rng: np.zeros((3, 2, 2, 32), "float32"),
    "Endpoint.pool": lambda rng: _whole_pool(),
    "Endpoint.engine": lambda rng: "a",
    "Endpoint.ring_bytes": lambda rng: 1 << 16,
    "Endpoint.chunk_bytes": lambda rng: 1 << 14,
    "Endpoint.model": lambda rng: "",
    "Endpoint.slots": lambda rng: None,
    "Endpoint.meet.cards": lambda rng: [_endpoint("b").card()],
    "Packer.pool": lambda rng: _whole_pool(),
    "Packer.rank": lambda rng: 0,
    "Link.send.layers": lambda rng: None,
    "receive.timeout": lambda rng: 0.1,
    "send.timeout": lambda rng: 0.1,
    "offer.timeout": lambda rng: 0.1,
    "Link.send.group": lambda rng: "",
    "Pool.section.o": lambda rng: 0,
    "section.l": lambda rng: 0,
    "section.h": lambda rng: 0,
    "section.t": lambda rng: range(2),
    "section.d": lambda rng: range(4),
    "section.planes": lambda rng: None,
    "section.o": lambda rng: 0,
    "Scale.k": lambda rng: 0.5,
    "Scale.v": lambda rng: [0.5],
    "cast_report.dst_pool": lambda rng: Pool.allocate("hnd", dataclasses.replace(SMALL, dtype="int8"), BLOCKS),
    "cast_report.cast": lambda rng: kvbm.Scale(0.5),
    "load.name": lambda rng: rng.choice(_LAYOUT_NAMES),
    "reshard.load.text": lambda rng: "vllm/tp",
    "Placement.load.path": lambda rng: next(
        (kvbm.layout.shapes.data_dir() / "placements").rglob("vllm*.yaml"), Path("x.yaml")
    ),
    "Placement.parse.text": lambda rng: "mesh: tp2\nshard: {h: tp}\n",
    "reshard.plan.src": _placement,
    "reshard.plan.dst": _placement,
    "reshard.plan.layouts": lambda rng: None,
    "nhd_hnd_transpose.src": lambda rng: [],
    "nhd_hnd_transpose.dst": lambda rng: [],
    "src_layout": lambda rng: rng.choice(("NHD", "hnd")),
    "gather.src": _placement,
    "gather.dst": _placement,
    "store.convert.src": _file,
    "store.convert.dst": lambda rng: _folder() / f"out{rng.randrange(4)}.safetensors",
    "save.path": lambda rng: _folder() / f"out{rng.randrange(4)}.safetensors",
    "create.path": lambda rng: _folder() / f"new{rng.randrange(4)}.safetensors",
    "chunks.tokens": lambda rng: range(8),
    "chunks.origins": lambda rng: (0, 0),
    "Span.tokens": lambda rng: range(8),
    "Resharding.nbytes.tokens": lambda rng: 4,
    "pair_up.src": OBJECTS["Rank"],
    "pair_up.dst": OBJECTS["Rank"],
    "digest.tokens": lambda rng: None,
    "copy.tokens": lambda rng: None,
    "locate.tokens": lambda rng: None,
    "digest.model": lambda rng: None,
    "Transfer.model": lambda rng: None,
    "copy.digests": lambda rng: None,
    "testing.digest.model": lambda rng: None,
    "nixl.name": lambda rng: "n",
    "wire.torch.store": lambda rng: None,
    "LayoutCase.src": lambda rng: kvbm.load("nhd"),
    "LayoutCase.dst": lambda rng: kvbm.load("hnd"),
    "Resharding.src": _placement,
    "convert_.out": lambda rng: [np.zeros((3, 2, 2, 2, 4, 4), "float32")],
    "layout_cases.pairs": lambda rng: None,
    "memcpy_batch.mode": lambda rng: 0,
    "wire.put.peer": lambda rng: "x",
    "wire.get.peer": lambda rng: "x",
}


# ---- hostile values ------------------------------------------------------------------------------------------------

_ERRORS = (
    ValueError,
    TypeError,
    RuntimeError,
    AttributeError,
    KeyError,
    IndexError,
    BufferError,
    OverflowError,
    ZeroDivisionError,
    OSError,
    NotImplementedError,
    AssertionError,
    RecursionError,
    StopIteration,
    UnicodeError,
    MemoryError,
)

_ASKED = (
    "__len__",
    "__index__",
    "__int__",
    "__float__",
    "__iter__",
    "__eq__",
    "__bool__",
    "__getitem__",
    "__contains__",
    "__array__",
    "__fspath__",
    "__lt__",
    "__next__",
    "__call__",
    "__dlpack__",
    "__dlpack_device__",
    "__hash__",
    "__cuda_stream__",
    "__buffer__",
    "__str__",
    "__repr__",
    "__array_interface__",
    "__cuda_array_interface__",
    "keys",
    "items",
    "shape",
    "dtype",
    "device",
)


def _liar(rng: random.Random) -> Any:
    """An object of a new class, some of whose special methods raise, or answer what is not so."""
    answers: tuple[Callable[[], Any], ...] = (
        lambda: 1,
        lambda: -1,
        lambda: 1 << 70,
        lambda: "x",
        lambda: None,
        lambda: [1],
        lambda: iter([1, "x"]),
        lambda: (2, 0),
        lambda: True,
        lambda: {"shape": (1,), "typestr": "<f4", "data": (0, False), "version": 3},
    )
    error = rng.choice(_ERRORS)

    def method() -> Any:
        if rng.randrange(2):

            def raises(*_: Any, **__: Any) -> Any:
                raise error("of a liar")

            return raises
        answer = rng.choice(answers)
        return lambda *_, **__: answer()

    base = rng.choice((object, object, object, int, str, list, dict, tuple, float))
    own: dict[str, Any] = {}
    for name in rng.sample(_ASKED, rng.choice((1, 2, 4, len(_ASKED)))):
        made = method()
        if name == "__hash__" and rng.randrange(3):
            continue
        own[name] = made if name.startswith("__") and "interface" not in name else property(made)
    with contextlib.suppress(Exception):
        return type("Liar", (base,), own)()
    return object()


def _half(*items: Any) -> Iterator[Any]:
    yield from items
    raise RuntimeError("of a generator")


def _deep() -> list[Any]:
    made: list[Any] = []
    for _ in range(100_000):
        made = [made]
    return made


def _loop() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


def _readonly() -> Any:
    array = np.zeros((2, BLOCKS, 4, 2, 4), "float32")
    array.flags.writeable = False
    return array


def _tensors() -> tuple[Callable[[], Any], ...]:
    try:
        import torch
    except ImportError:
        return ()

    def freed() -> Any:
        made = torch.zeros(2, BLOCKS, 4, 2, 4)
        made.untyped_storage().resize_(0)
        return made

    return (
        freed,
        lambda: torch.zeros(2, BLOCKS, 4, 2, 4),
        lambda: torch.zeros(2, BLOCKS, 4, 2, 4, requires_grad=True),
        lambda: torch.zeros(2, BLOCKS, 4, 2, 4, requires_grad=True) * 1,
        lambda: torch.zeros(2, BLOCKS, 4, 2, 4, device="meta"),
        lambda: torch.zeros(3, 4).to_sparse(),
        lambda: torch.zeros(3, 4, dtype=torch.complex64).conj(),
        lambda: torch.zeros(0, dtype=torch.int64),
        lambda: torch.zeros((), dtype=torch.int64),
        lambda: torch.tensor([0, 1]),
        lambda: torch.tensor([0.0, math.nan]),
        lambda: torch.tensor([True, False]),
        lambda: torch.zeros(4, dtype=torch.int64)[::2],
        lambda: torch.zeros(2, BLOCKS, 4, 2, 4, dtype=torch.bfloat16).transpose(0, 1),
        lambda: torch.nn.Parameter(torch.zeros(2)),
        lambda: torch.float32,
        lambda: torch.device("cpu"),
        lambda: torch.device("meta"),
        lambda: torch.Size([1, 2]),
    )


_TEXTS = (
    "",
    "\0",
    "a\0b",
    "\x1b[31mred",
    "line\nline",
    "١٢",
    "nl=١,no=2,nh=2,nt=4,hd=4",
    "\ud800",
    "\u202e",
    "é" * 300,
    "x" * 100_000,
    "/",
    "..",
    "~",
    "%s%n{}{0}",
    "cuda:99",
    "cuda:١",
    "cuda",
    "cpu:0",
    "cuda:" + "9" * 30,
    "pinned",
    "[" * 5000,
    "1" * 5000,
    "nhd\n",
    " nhd",
    "nan",
    "[l] b o",
    "order: b",
    "vllm/",
    "/etc/passwd",
    "/proc/self/mem",
    "/dev/null",
    ".",
    "NHD",
    "tp" + "9" * 8,
    "a=1",
    "-1",
    "1e3",
)

_VALUES: tuple[Callable[[], Any], ...] = (
    lambda: -1,
    lambda: 0,
    lambda: 1,
    lambda: 7,
    lambda: 2**31,
    lambda: 2**62,
    lambda: 2**63,
    lambda: 2**64,
    lambda: -(2**63) - 1,
    lambda: 10**30,
    lambda: 10**5000,
    lambda: -(10**5000),
    lambda: True,
    lambda: False,
    lambda: None,
    lambda: 1.5,
    lambda: math.nan,
    lambda: math.inf,
    lambda: -math.inf,
    lambda: 1e308,
    lambda: 1j,
    lambda: b"",
    lambda: b"\0\1",
    lambda: bytearray(b"ab"),
    lambda: b"x" * 100_000,
    lambda: memoryview(b"ab"),
    lambda: memoryview(np.zeros((2, 2), "i4")),
    lambda: memoryview(np.arange(2)),
    lambda: (),
    list,
    dict,
    set,
    lambda: [[]],
    lambda: [[0], [1, 2]],
    lambda: [None],
    lambda: ["a"],
    lambda: [0, -1],
    lambda: [0, 0],
    lambda: [1 << 70],
    lambda: [10**5000],
    lambda: [1.0],
    lambda: [True],
    lambda: (0, 1),
    lambda: {0, 1},
    lambda: {"a": 1},
    lambda: {1: 2},
    lambda: {"l": 0},
    lambda: frozenset(),
    lambda: range(0),
    lambda: range(2),
    lambda: range(3, 0, -1),
    lambda: range(-2, 2),
    lambda: range(0, 4, 2),
    lambda: range(10**18),
    lambda: range(10**30),
    lambda: (range(1), range(1)),
    lambda: (range(1), None),
    lambda: slice(2),
    lambda: Ellipsis,
    lambda: NotImplemented,
    lambda: object(),
    lambda: object,
    lambda: int,
    lambda: type,
    lambda: len,
    lambda: print,
    lambda: lambda *_: 1 / 0,
    lambda: math,
    lambda: iter([0, 1]),
    lambda: (x for x in (0, 1)),
    lambda: _half(0),
    lambda: map(int, ["x"]),
    lambda: itertools.repeat(0, 3),
    _deep,
    _loop,
    lambda: np.int64(1),
    lambda: np.uint64(2**63),
    lambda: np.float32("nan"),
    lambda: np.bool_(True),
    lambda: np.array(3),
    lambda: np.array([0, 1]),
    lambda: np.array([0, 1], np.uint64),
    lambda: np.array([2**63], np.uint64),
    lambda: np.array([0.0, math.nan]),
    lambda: np.array([[0, 1]]),
    lambda: np.zeros(0),
    lambda: np.zeros(0, np.int64),
    lambda: np.zeros((0, 3)),
    lambda: np.array([None, 1]),
    lambda: np.array(["a"]),
    lambda: np.array([1], ">i8"),
    lambda: np.arange(6)[::2],
    lambda: np.arange(3)[::-1],
    lambda: np.zeros(2, "i4,f4"),
    lambda: np.zeros(2, "M8[s]"),
    lambda: np.ma.masked_array([1, 2], [True, False]),
    lambda: np.broadcast_to(np.zeros((), "f4"), (2, BLOCKS, 4, 2, 4)),
    _readonly,
    lambda: np.zeros((2, BLOCKS, 4, 2, 4), "float32"),
    lambda: np.zeros((2, BLOCKS, 4, 2, 4), "float64"),
    lambda: np.zeros((2, BLOCKS, 4, 2, 5), "float32"),
    lambda: [np.zeros((2, BLOCKS, 4, 2, 4), "float32")] * 2,
    lambda: np.zeros((2, BLOCKS, 4, 2, 8), "float32")[..., ::2],
    lambda: np.zeros((1,) * 40 or 1),
    lambda: np.broadcast_to(np.int64(0), (1 << 40,)),
    lambda: np.dtype("float32"),
    lambda: np.float16,
    lambda: np.random.default_rng(0),
    lambda: Path("x"),
    lambda: Path("a\0b"),
    lambda: Path(),
    lambda: SMALL,
    lambda: kvbm.load("nhd"),
    lambda: Span([0], range(1)),
    lambda: Model(),
    lambda: BlockShape(nl=1, no=1, nh=1, nt=1, hd=1),
    lambda: BlockShape(nl=2**20, no=2, nh=2, nt=2**20, hd=4),
    lambda: Pool.allocate("hnd", SMALL, 1),
    lambda: kvbm.load("vllm/fp8_ds_mla"),
    lambda: reshard.vllm(SMALL, tp=2),
    _whole_pool,
)


def _closed() -> Pool:
    pool = _whole_pool()
    pool.close()
    return pool


@functools.cache
def _makers() -> tuple[Callable[[], Any], ...]:
    return (*_VALUES, *_tensors(), _closed)


def hostile(rng: random.Random) -> Any:
    """A value that hardly any parameter takes."""
    what = rng.randrange(10)
    if what == 0:
        return _liar(rng)
    if what in (1, 2):
        return rng.choice(_TEXTS)
    if what == 3:
        return [hostile(rng) for _ in range(rng.choice((1, 2, 3)))]
    if what == 4:
        return {rng.choice(("l", "h", "o", "a", 0, "tp", "data")): hostile(rng) for _ in range(rng.choice((1, 2)))}
    return rng.choice(_makers())()


#: Parameters that take the caller's own function.  What it raises reaches the caller.
CALLBACKS = ("progress", "prefer", "generate", "reference_fn", "kernel_fn")


# ---- a call --------------------------------------------------------------------------------------------------------


def _valid(name: str, parameter: str) -> Callable[[random.Random], Any] | None:
    """What makes a right value of a parameter; None where only hostile values are known."""
    words = name.removeprefix("kvbm.").split(".")
    for first in range(len(words)):
        if own := OWN.get(".".join([*words[first:], parameter])):
            return own
    return VALID.get(parameter)


def _receiver(name: str, rng: random.Random) -> tuple[Any, Any]:
    """The function to call, bound to an object if it is a method."""
    one = found()[name]
    owner_name, _, member = name.rpartition(".")
    classes = {f"{key}": value for key, value in _public().items() if isinstance(value, type)}
    if owner_name not in classes:
        return one, one
    if isinstance(one, staticmethod | classmethod):
        bound = getattr(classes[owner_name], member)
        return bound, bound
    make = OBJECTS.get(owner_name.rpartition(".")[2])
    if make is None:
        raise LookupError(f"{name}: tests/helpers/calling.py needs an object of {owner_name} in OBJECTS")
    receiver = make(rng)
    if not callable(one):  # a property
        return (lambda: getattr(receiver, member)), None
    return getattr(receiver, member), one


def call(name: str, number: int) -> str:
    """``"works"`` or ``"refused"``.  Raises `Violation`."""
    rng = random.Random(f"{name} {number}")
    function, described = _receiver(name, rng)
    arguments, keywords, said = _arguments(name, described and function, rng)
    is_told = any(f"{one}=" in said for one in CALLBACKS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = function(*arguments, **keywords)
            _use(result)
    except Exception as error:
        if is_told and str(error) in ("of a liar", "division by zero", "of a generator"):
            return "works"  # the caller's own function has raised it
        if why := _foreign(error):
            raise Violation(f"{name}({said}): {type(error).__name__}: {_text(error)}  [{why}]") from error
        return "refused"
    finally:
        for one in (*arguments, *keywords.values()):
            with contextlib.suppress(Exception):
                if isinstance(one, Pool | Transfer):
                    one.close()
        while _ENDPOINTS:
            _ENDPOINTS.pop().close()
    return "works"


def _text(error: BaseException) -> str:
    try:
        return f"{error!s:.300}"
    except Exception as other:
        return f"(a message that raises {type(other).__name__})"


def _use(result: Any) -> None:
    """Take the first items of a result that is made while it is read, and print it."""
    if isinstance(result, contextlib.AbstractContextManager) and hasattr(result, "gen"):
        with result as made:
            repr(made)
    elif isinstance(result, types.GeneratorType):
        for _ in itertools.islice(result, 3):
            pass
    elif type(result).__module__.startswith("kvbm"):
        repr(result), str(result)


def _arguments(name: str, function: Any, rng: random.Random) -> tuple[list[Any], dict[str, Any], str]:
    """Arguments for a call, and their names with those that are hostile."""
    if function is None:
        return [], {}, ""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return [], {}, ""
    arguments: list[Any] = []
    keywords: dict[str, Any] = {}
    names = [one.name for one in parameters]
    bad = set(rng.sample(names, min(len(names), rng.choice((1, 1, 1, 2, 3))))) if names else set()
    said = []
    for one in parameters:
        make = _valid(name, one.name)
        if one.kind is one.VAR_KEYWORD:
            continue
        if one.name in bad:
            value = hostile(rng)
            said.append(f"{one.name}={_shown(value)}")
        elif make is not None and (one.default is one.empty or not rng.randrange(3)):
            value = make(rng)
        elif one.default is one.empty and one.kind is not one.VAR_POSITIONAL:
            raise LookupError(f"{name}: tests/helpers/calling.py needs a right value of {one.name!r} in VALID or OWN")
        else:
            if one.kind is one.POSITIONAL_ONLY:
                break
            continue
        if (
            one.kind is one.VAR_POSITIONAL
            or one.kind is one.POSITIONAL_ONLY
            or (one.kind is one.POSITIONAL_OR_KEYWORD and len(arguments) == parameters.index(one))
        ):
            arguments.append(value)
        else:
            keywords[one.name] = value
    return arguments, keywords, ", ".join(said)


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {quoted(value, 80)}"


# ---- whose error it is ---------------------------------------------------------------------------------------------


def _foreign(error: BaseException) -> str:
    """Why an error is not one that a caller may get; empty if it is."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "kvbm" in frame.filename and "/tests/" not in frame.filename]
    last = own[-1] if own else None
    where = f"{Path(last.filename).name}:{last.lineno}" if last else "no line of kvbm"
    try:
        str(error)
    except Exception:
        return f"{where}: its message cannot be read"
    if isinstance(error, KvbmError):
        message = str(error)
        try:
            message.encode()
        except UnicodeError:
            return f"{where}: its message cannot be written"
        if any(not (c.isprintable() or c == "\n") for c in message):
            return f"{where}: its message has control characters"
        if len(message) > 6000:
            return f"{where}: its message has {len(message)} characters"
        return ""
    if (
        isinstance(error, TypeError | ValueError | OSError)
        and last is not None
        and frames[-1] is last
        and _raises(last)
    ):
        return ""
    if isinstance(error, OSError) and error.filename is not None:
        return ""  # FileNotFoundError and its like, of a file that the caller has named
    if isinstance(error, TypeError) and last is None:
        return ""  # the arguments do not fit the signature
    return where


def _raises(frame: traceback.FrameSummary) -> bool:
    """True if the line is a ``raise``."""
    if frame.lineno is None:
        return False
    if frame.filename.endswith(".py"):
        return any(first <= frame.lineno <= last for first, last in _statements(frame.filename))
    return True  # compiled


@functools.cache
def _statements(file: str) -> tuple[tuple[int, int], ...]:
    tree = ast.parse(Path(file).read_text("utf-8"))
    return tuple((one.lineno, one.end_lineno or one.lineno) for one in ast.walk(tree) if isinstance(one, ast.Raise))


# ---- in a child ----------------------------------------------------------------------------------------------------


def _peak(reset: bool = False) -> int:
    """The most memory of this process since the last reset, in bytes."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) << 10  # type: ignore[index]


def _too_long(*_: object) -> None:
    raise Violation(f"a call took {SECONDS} s:\n{''.join(traceback.format_stack()[-6:-1])}")


def _child() -> None:
    """Make the calls that standard input names.  A line of JSON before each call, and one on what became of it."""
    signal.signal(signal.SIGPROF, _too_long)
    resource.setrlimit(resource.RLIMIT_DATA, (_ROOM, resource.RLIM_INFINITY))
    given, end = json.load(sys.stdin)
    out = sys.stdout
    sys.stdout = sys.stderr
    for number in range(300):  # frameworks that a value needs are imported now
        hostile(random.Random(number))

    def tell(*words: Any) -> None:
        print(json.dumps(words), file=out, flush=True)

    for name, first in given:
        for number in range(first, end):
            tell("at", name, number)
            before = _peak(reset=True)
            try:
                signal.setitimer(signal.ITIMER_PROF, SECONDS)
                became = call(name, number)
                signal.setitimer(signal.ITIMER_PROF, 0)
                if (took := _peak() - before) > MOST_BYTES:
                    raise Violation(f"{name}: took {took >> 20} MiB")
                tell(became)
            except BaseException as error:
                signal.setitimer(signal.ITIMER_PROF, 0)
                if isinstance(error, KeyboardInterrupt):
                    raise
                said = f"{error}" if isinstance(error, Violation) else f"{type(error).__name__}: {_text(error)}"
                tell("wrong", name, number, said[:1500])
    tell("done")


_CHILD = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import calling; calling._child()"


def tried(
    names: Iterable[str], first: int, count: int, *, stands_s: float = 120, told: Callable[..., None] = lambda *_: None
) -> tuple[Counter[str], list[list[Any]]]:
    """Call each function `count` times in a child process.  Counts of calls that worked and that were refused, and the violations.

    A child that ends, or does not end a call within `stands_s` seconds, is started again behind that call.  `told` is called with
    each violation.
    """
    left, done, wrong = [(name, first) for name in names], Counter[str](), list[list[Any]]()
    while left:
        with (
            tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
            tempfile.TemporaryDirectory() as folder,  # a call may write a file under any name
        ):
            with subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-c", _CHILD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=folder,
            ) as child:
                assert child.stdin and child.stdout
                json.dump([left, first + count], child.stdin)
                child.stdin.close()
                at, is_done = None, False
                while True:
                    timer = threading.Timer(stands_s, child.kill)
                    timer.start()
                    line = child.stdout.readline()
                    timer.cancel()
                    if not line:
                        break
                    what, *rest = json.loads(line)
                    if what == "at":
                        at = rest
                    elif what == "wrong":
                        wrong.append(rest)
                        told(*rest)
                    elif what == "done":
                        is_done = True
                    else:
                        done[what] += 1
            errors.seek(0)
            said = errors.read()
        if is_done:
            break
        if at is None:
            raise RuntimeError(f"the child did not begin: {said[-2000:]}")
        wrong.append([*at, f"the process ended with {child.returncode}: {said[-1500:]}"])
        told(*wrong[-1])
        behind = next(i for i, (name, _) in enumerate(left) if name == at[0])
        left = [(at[0], at[1] + 1), *left[behind + 1 :]]
    return done, wrong
