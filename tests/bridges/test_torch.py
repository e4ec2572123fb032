"""Operators of kvbm.torch on the CPU: bit for bit against the oracle, by every way in which torch can call them."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import kvbm  # noqa: E402
import kvbm.torch  # noqa: E402
import matrix  # noqa: E402
import oracle  # noqa: E402
from kvbm import _core  # noqa: E402
from kvbm.copy import transfer  # noqa: E402
from kvbm.memory import array_checks  # noqa: E402
from kvbm.torch import batches, functions, operators  # noqa: E402
from memory import Bound, aligned, placed, torch_views  # noqa: E402

SHAPE = kvbm.BlockShape(nl=2, no=2, nh=4, nt=16, hd=32, dtype="bfloat16")
SIZES = "nl=2,no=2,nh=4,nt=16,hd=32"
#: Else every call goes by the dispatcher and the slow way, with the same results.
SEEN_FROM_C = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
CONVERT, CONVERT_ = torch.ops.kvbm.convert.default, torch.ops.kvbm.convert_.default

PAIRS = [
    ("nhd", "universal"),
    ("universal", "nhd"),
    ("nhd", "hnd"),
    ("vllm/flash_attn_nhd", "universal"),
    ("vllm/LBHNC", "vllm/BLNHC"),
    ("hf/dynamic_cache", "vllm/LBHNC"),
    ("nhd", "vllm/paged_attn_v0"),  # K and V have shapes of their own
    ("vllm/paged_attn_v0", "universal"),
    ("nhd", "operational"),
]
DTYPES = ["bfloat16", "float8_e4m3fn", "float32", "float64", "int16", "uint8", "bool"]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def of(dtype: str) -> kvbm.BlockShape:
    return kvbm.load_shape(f"{SIZES},dtype={dtype}")


def bits(tensor: Any) -> Any:
    """Bytes, so that NaNs are compared, too."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def expected(src: Bound, dst: str, shape: kvbm.BlockShape, blocks: int) -> list[Any]:
    """The expected tensors of the destination, by the oracle."""
    arena = placed(matrix.orders()[dst], shape, blocks).layout_bytes(0)
    ids = list(range(blocks))
    want = oracle.expected_bytes(src.arena, arena, src.before, np.zeros(arena.nbytes, np.uint8), ids, ids)
    return torch_views(arena, torch.from_numpy(aligned(want)), shape.dtype)


def alike(got: Any, want: Any) -> bool:
    return len(got) == len(want) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))
        for a, b in zip(got, want, strict=True)
    )


def random(name: str, blocks: int = 3, dtype: str = "float32", shape: kvbm.BlockShape | None = None) -> list[Any]:
    """Random tensors of a layout."""
    resolved = kvbm.load(name).resolve(shape or of(dtype), blocks)
    made = []
    for index, one in enumerate(resolved.allocations):
        generator = torch.Generator().manual_seed(index)
        made.append(torch.randn(one.shape, generator=generator).to(getattr(torch, dtype)))
    return made


# ---- convert ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pair", PAIRS, ids=">".join)
def test_convert_is_the_oracle_s(pair: tuple[str, str], dtype: str) -> None:
    shape = of(dtype)
    src = Bound(pair[0], shape, 3, kind="torch")
    out = kvbm.torch.convert(src.arrays, *pair, shape=SIZES)
    assert alike(out, expected(src, pair[1], shape, 3)) and src.untouched


@pytest.mark.slow
def test_every_layout_there_and_back() -> None:
    """By the public function, and by the operator alone; fake tensors have the strides of real ones."""
    from torch._subclasses import FakeTensorMode

    for name in [*matrix.names(), "vllm/tpu"]:
        if name == "operational":
            continue
        tensors = random("nhd", 2)
        names = ("nhd", name, SIZES)
        there = kvbm.torch.convert(tensors, *names)
        assert alike(kvbm.torch.convert(there, name, "nhd", shape=SIZES), tensors), name
        assert alike(CONVERT(tensors, *names), there), name
        with FakeTensorMode() as mode:
            fake = kvbm.torch.convert([mode.from_tensor(tensor) for tensor in tensors], *names)
        assert [(f.shape, f.stride(), f.dtype) for f in fake] == [(t.shape, t.stride(), t.dtype) for t in there], name


def test_a_layout_by_the_path_of_its_file(tmp_path: Any) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text('order: "[l] b o h d/16B t d%16B"\n', encoding="utf-8")
    tensors = random("nhd", 2)
    out = kvbm.torch.convert(tensors, "nhd", path, SIZES)
    want = torch.stack(tensors).view(2, 2, 2, 16, 4, 8, 4)  # b l o t h d/4 d%4
    assert torch.equal(torch.stack(out), want.permute(1, 0, 2, 4, 5, 3, 6))
    assert alike(kvbm.torch.convert(out, str(path), "nhd", SIZES), tensors)


def test_a_tensor_alone_and_a_shape_object() -> None:
    (one,) = random("vllm/LBHNC", 3, "bfloat16")
    (out,) = kvbm.torch.convert(one, "vllm/LBHNC", "vllm/BLHNC", SHAPE)
    assert torch.equal(out, one.transpose(0, 1))
    assert alike(kvbm.torch.convert((one,), "vllm/LBHNC", "vllm/BLHNC", str(SHAPE)), [out])


def test_many_tensors() -> None:
    shape = kvbm.load_shape("nl=4,no=2,nh=1,nt=2,hd=2,dtype=int32")
    src = Bound("nhd", shape, 500, kind="torch")
    out = kvbm.torch.convert(src.arrays, "nhd", "universal", shape)
    assert len(src.arrays) == 4000 and alike(out, expected(src, "universal", shape, 500))


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_storage_offsets(offset: int) -> None:
    """A view that begins inside its storage is read from there, also if this requires narrower words."""
    whole = random("vllm/LBHNC", 3)[0].bfloat16()
    storage = torch.empty(whole.numel() + offset, dtype=torch.bfloat16)
    view = storage[offset:].view(whole.shape)
    view.copy_(whole)
    assert view.data_ptr() % 16 and view.storage_offset() == offset
    # The last has a launch for K and one for V where nothing is aligned: no kernel joins them.
    for dst in ("universal", "vllm/paged_attn_v0"):
        names = ("vllm/LBHNC", dst, SIZES)
        assert alike(kvbm.torch.convert([view], *names), kvbm.torch.convert([whole], *names))
    batch = operators._batch([whole], None, *names)
    assert [len(batch.copies(size, size)) for size in (4, 16)] == [2, 1]


def test_parameters_and_what_c_does_not_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are checked in C; every case can also be checked in Python, with the same result."""
    tensors = random("nhd")
    want = kvbm.torch.convert(tensors, "nhd", "vllm/paged_attn_v0", SIZES)
    parameters = [torch.nn.Parameter(tensor) for tensor in tensors]
    assert alike(kvbm.torch.convert(parameters, "nhd", "vllm/paged_attn_v0", SIZES), want)
    monkeypatch.setattr(_core, "strided_tensors", lambda *_: None)
    assert alike(kvbm.torch.convert(tensors, "nhd", "vllm/paged_attn_v0", SIZES), want)


def _into(given: Any) -> Any:
    out = random("universal")
    kvbm.torch.convert_(given, out, "hf/dynamic_cache", "universal", SIZES)
    return out


CALLS = {"convert": lambda given: kvbm.torch.convert(given, "hf/dynamic_cache", "universal", SIZES), "convert_": _into}


@pytest.mark.parametrize(("name", "call"), list(CALLS.items()), ids=list(CALLS))
@pytest.mark.slow
def test_who_listens_at_the_dispatcher_is_called(name: str, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher is skipped for plain tensors only if nothing could observe it."""
    from torch.overrides import TorchFunctionMode
    from torch.profiler import ProfilerActivity, profile
    from torch.utils._python_dispatch import TorchDispatchMode

    heard: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            heard.append(str(func))
            return func(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            heard.append(str(func))
            return func(*args, **(kwargs or {}))

    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            heard.append(str(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    tensors = random("hf/dynamic_cache")
    twin = f"kvbm._{name}.default"
    for mode in (Functions, Operators):
        heard.clear()
        with mode():
            call(tensors)
        assert twin in heard, mode
    heard.clear()
    call([*tensors[:-1], tensors[-1].as_subclass(Mine)])
    assert twin in heard, "a subclass, and be it the last"
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        call(tensors)
    assert f"kvbm::_{name}" in [event.key for event in profiled.key_averages()]
    if name == "convert":  # torch.jit.trace drops what writes into the tensors of a list, before and after
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated
            traced = torch.jit.trace(lambda *given: call(list(given))[0], tuple(tensors), check_trace=False)
        assert f"kvbm::_{name}" in str(traced.graph)
    with pytest.raises(RuntimeError, match=r"(?i)batching|vmap|functorch"):
        torch.func.vmap(lambda tensor: call([tensor, *tensors[1:]])[0])(torch.stack(tensors[:2]))
    with monkeypatch.context() as patch:  # torch.func may want to know of plain tensors, too
        for direct in ("run", "run_"):
            patch.setattr(functions, direct, None)
        torch.func.vmap(lambda each: call(tensors) and each, randomness="same")(torch.ones(2))
    if not SEEN_FROM_C:
        return
    # And otherwise nobody calls the operators.
    for operator in ("PLAIN", "PLAIN_", "CONVERT", "CONVERT_"):
        monkeypatch.setattr(functions, operator, None)
    call(tensors)
    call(tuple(tensors))
    one, other = torch.zeros(2, 3, 4, 16, 2, 32), torch.zeros(3, 2, 4, 16, 2, 32)
    if name == "convert":
        kvbm.torch.convert(one, "vllm/LBHNC", "vllm/BLHNC", SIZES)
    else:
        kvbm.torch.convert_(one, other, "vllm/LBHNC", "vllm/BLHNC", SIZES)


def test_a_gradient_wanted_of_the_last_tensor_alone() -> None:
    tensors = random("hf/dynamic_cache")
    tensors = [*(one.float() for one in tensors[:-1]), tensors[-1].float().requires_grad_()]
    out = kvbm.torch.convert(tensors, "hf/dynamic_cache", "universal", SIZES)
    assert out[0].requires_grad
    with pytest.raises(kvbm.BindError, match=f"input #{len(tensors) - 1} requires a gradient"):
        kvbm.torch.convert_(tensors, [one.detach() for one in out], "hf/dynamic_cache", "universal", SIZES)
    with torch.no_grad():
        assert not kvbm.torch.convert(tensors, "hf/dynamic_cache", "universal", SIZES)[0].requires_grad


def test_a_torch_that_does_not_answer_is_always_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch lacks one of the private functions, the dispatcher is called, with the same result."""
    monkeypatch.delattr(torch._C._functorch, "peek_interpreter_stack")
    listeners = functions._listeners()
    assert len(listeners) == 1 and listeners[0]()
    monkeypatch.setattr(functions, "_LISTENERS", listeners)
    monkeypatch.setattr(functions, "run", None)
    tensors = random("nhd")
    assert alike(
        kvbm.torch.convert(tensors, "nhd", "hnd", SIZES), [one.transpose(0, 1).contiguous() for one in tensors]
    )


@pytest.mark.skipif(not SEEN_FROM_C, reason="this PyTorch lets C look at no tensors")
def test_what_c_takes() -> None:
    good = ((2, 3), (3, 1), "", 0)
    tensors = [torch.zeros(2, 3), torch.zeros(2, 3)]
    look = lambda *rest: _core.strided_tensors(*rest)  # noqa: E731
    table, alignment = look(tensors, 2, (good,), None, "float32", -1)
    assert len(table) == 2 and alignment == 16
    assert look(tuple(tensors), 2, (good, good), b"\0\1", "float32", -1) is not None
    refused = [
        (tensors, 3, (good,), None, "float32", -1),
        (tensors, 2, (((3, 2), (2, 1), "", 0),), None, "float32", -1),
        (tensors, 2, (((2, 3), (1, 2), "", 0),), None, "float32", -1),
        (tensors, 2, (((6,), (1,), "", 0),), None, "float32", -1),
        (tensors, 2, (good,), None, "int32", -1),
        (tensors, 2, (good,), None, "float32", 0),
        (tensors, 2, (good, ((3, 2), (2, 1), "", 0)), b"\0\1", "float32", -1),
        (tensors, 2, (good, good), b"\0", "float32", -1),
        (tensors, 2, (good, good), None, "float32", -1),
        (tensors, 2, (((1,) * 9, (1,) * 9, "", 0),), None, "float32", -1),
        ([tensors[0], torch.zeros(2, 3, dtype=torch.int32)], 2, (good,), None, "float32", -1),
        ([tensors[0], "x"], 2, (good,), None, "float32", -1),
        (iter(tensors), 2, (good,), None, "float32", -1),
        ([], 0, (good,), None, "float32", -1),
        (tensors, 2, (), None, "float32", -1),
        (tensors, 2, (good,), b"\0\1", "float32", -1),
        (tensors, 2, (good,) * 17, b"\0\1", "float32", -1),
        (tensors, 2, (((2, 3), (3, 1), "int32", 0),), None, "float32", -1),
        (tensors, 2, (((3, 2), (2, 1), "", 7),), None, "float32", -1),
        ([tensors[0], torch.zeros(3, 2).T], 2, (((6,), (1,), "", 6),), None, "float32", -1),
        ([tensors[0], torch.nn.Parameter(tensors[1])], 2, (good,), None, "float32", -1, frozenset((torch.Tensor,))),
        ([tensors[0], torch.zeros(2, 3, requires_grad=True)], 2, (good,), None, "float32", -1, None, False),
    ]
    for case in refused:
        assert look(*case) is None, case
    assert look([torch.zeros(3, 2).T], 1, (((2, 3), (1, 2), "", 0),), None, "float32", -1) is not None
    assert (
        look([torch.zeros(1, 3).as_strided((1, 3), (77, 1))], 1, (((1, 3), (3, 1), "", 0),), None, "float32", -1)
        is not None
    )
    two = [torch.zeros(2, 3), torch.zeros(6, dtype=torch.int32)]
    kinds = good, ((6,), (1,), "int32", 0)
    assert look(two, 2, kinds, b"\0\1", "float32", -1) is not None
    assert look(two, 2, kinds, b"\1\0", "float32", -1) is None and look(two, 2, kinds, b"\0\0", "float32", -1) is None
    any_shape = ((6,), (1,), "", 6)  # records: the bytes count
    assert look(tensors, 2, (any_shape,), None, "float32", -1) is not None


@pytest.mark.parametrize("pair", PAIRS, ids=">".join)
def test_no_blocks(pair: tuple[str, str]) -> None:
    """No tensors, or tensors without blocks."""
    resolved = kvbm.load(pair[0]).resolve(of("float32"), 1)
    if kvbm.load(pair[0]).b_in_table:
        tensors = []
        if not kvbm.load(pair[1]).b_in_table:
            with pytest.raises(kvbm.BindError, match=r"convert: outputs: .* got none; .* which give the device"):
                kvbm.torch.convert([], *pair, SIZES)
            return
    else:
        tensors = [
            torch.empty([0 if axis == "b" else n for axis, n in zip(one.axes, one.shape, strict=True)])
            for one in resolved.allocations
        ]
    out = kvbm.torch.convert(tensors, *pair, SIZES)
    assert all(tensor.numel() == 0 for tensor in out)
    if out:
        assert kvbm.torch.convert(out, pair[1], pair[0], SIZES)[0].shape == tensors[0].shape
    kvbm.torch.convert_(tensors, out, *pair, SIZES)


def test_dtypes_by_the_shape_and_by_the_tensors() -> None:
    """A shape without a dtype takes the tensors' dtype; 16 bytes of a split are then another number of elements."""
    for dtype, row in (("float32", 4), ("bfloat16", 8), ("uint8", 16)):
        out = kvbm.torch.convert(random("nhd", 1, dtype), "nhd", "vllm/paged_attn_v0", SIZES)
        assert out[0].shape[-1] == row and out[0].dtype == getattr(torch, dtype)


def test_eight_bits_are_read_as_others_without_touching_memory() -> None:
    shape = of("float8_e4m3fn")
    src = Bound("nhd", shape, 3, kind="torch")
    want = [bits(one) for one in expected(src, "universal", shape, 3)]
    for dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn):
        for text in ("uint8", "int8", "float8_e4m3fn"):
            views = [kvbm.torch.reinterpret(one.view(torch.uint8), dtype) for one in src.arrays]
            assert all(a.data_ptr() == b.data_ptr() for a, b in zip(views, src.arrays, strict=True))
            out = kvbm.torch.convert(views, "nhd", "universal", f"{SIZES},dtype={text}")
            assert all(one.dtype == dtype for one in out)
            assert all(torch.equal(bits(a), b) for a, b in zip(out, want, strict=True))
    into = [torch.zeros(4, 2, 2, 16, 32, dtype=torch.uint8) for _ in range(3)]
    kvbm.torch.convert_(src.arrays, into, "nhd", "universal", shape)
    assert all(torch.equal(bits(a), b) for a, b in zip(into, want, strict=True))
    # Formats that a shape has no name for go as bits.
    other = [one.view(torch.float8_e4m3fnuz) for one in src.arrays]
    out = kvbm.torch.convert(other, "nhd", "universal", f"{SIZES},dtype=uint8")
    assert out[0].dtype == torch.float8_e4m3fnuz and torch.equal(bits(out[0]), want[0])


def test_reinterpret_refuses() -> None:
    with pytest.raises(kvbm.DTypeError, match=r"reinterpret: .* got float8_e5m2 as float8_e4m3fn; \.to\("):
        kvbm.torch.reinterpret(torch.zeros(2).to(torch.float8_e5m2), torch.float8_e4m3fn)
    with pytest.raises(kvbm.DTypeError, match="float32 as uint8"):
        kvbm.torch.reinterpret(torch.zeros(2), torch.uint8)
    with pytest.raises(kvbm.BindError, match=r"requires a gradient, and as uint8 it has none; call \.detach\(\)"):
        kvbm.torch.reinterpret(torch.zeros(2).to(torch.float8_e5m2).requires_grad_(), torch.uint8)


# ---- convert_ --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["list", "int64", "int32", "strided", "mixed", "all"])
@pytest.mark.parametrize("pair", PAIRS, ids=">".join)
def test_convert_into_is_the_oracle_s(pair: tuple[str, str], kind: str) -> None:
    """All other bytes of the destination are unchanged: guards, and blocks without an id."""
    src = Bound(pair[0], SHAPE, 5, kind="torch")
    dst = Bound(pair[1], SHAPE, 5, dst=True, kind="torch")
    src_ids, dst_ids = ([3, 0, 3, 1], [1, 4, 0, 2]) if kind != "all" else (list(range(5)), list(range(5)))
    given: Any = {
        "list": (src_ids, dst_ids),
        "int64": (torch.tensor(src_ids), torch.tensor(dst_ids)),
        "int32": (torch.tensor(src_ids, dtype=torch.int32), torch.tensor(dst_ids, dtype=torch.int32)),
        "strided": (torch.tensor(src_ids).repeat_interleave(2)[::2], tuple(dst_ids)),
        "mixed": (torch.tensor(src_ids, dtype=torch.int32), np.array(dst_ids)),
        "all": (None, None),
    }[kind]
    assert kvbm.torch.convert_(src.arrays, dst.arrays, *pair, SHAPE, *given) is None
    want = oracle.expected_bytes(src.arena, dst.arena, src.before, dst.before, src_ids, dst_ids)
    assert np.array_equal(dst.buffer, want), oracle.explain(dst.arena, dst.buffer, want)
    assert src.untouched


def test_ids_that_skip_and_ids_on_one_side() -> None:
    src, dst = Bound("nhd", SHAPE, 4, kind="torch"), Bound("universal", SHAPE, 5, dst=True, kind="torch")
    kvbm.torch.convert_(src.arrays, dst.arrays, "nhd", "universal", SHAPE, [3, -1, 2, 1], [0, 1, -1, 4])
    want = oracle.expected_bytes(src.arena, dst.arena, src.before, dst.before, [3, 1], [0, 4])
    kvbm.torch.convert_(src.arrays, dst.arrays, "nhd", "universal", SHAPE, dst_ids=[3, 2])
    want = oracle.expected_bytes(src.arena, dst.arena, src.before, want, [0, 1], [3, 2])
    kvbm.torch.convert_(src.arrays, dst.arrays, "nhd", "universal", SHAPE, src_ids=torch.empty(0, dtype=torch.int64))
    kvbm.torch.convert_(src.arrays, dst.arrays, "nhd", "universal", SHAPE, [], [])
    assert np.array_equal(dst.buffer, want), oracle.explain(dst.arena, dst.buffer, want)


def nested(tensor: Any) -> Any:
    """A nested tensor of two."""
    return torch._nested_view_from_buffer(tensor.view(-1), *(torch.tensor(x) for x in ([[1], [1]], [[1], [1]], [0, 1])))


@pytest.mark.parametrize(
    ("src_ids", "dst_ids", "match"),
    [
        ([4], [0], r"convert_: src_ids\[0\] is 4: expected 0 to 3"),
        ([0], [5], r"convert_: dst_ids\[0\] is 5: expected 0 to 4"),
        ([0], [-2], r"convert_: dst_ids\[0\] is -2"),
        ([0, 1], [2, 2], r"convert_: dst_ids\[1\] is 2, as is dst_ids\[0\]"),
        ([0, 1], [2], r"convert_: ids: expected as many source as destination ids, got 2 and 1"),
        (None, None, r"convert_: ids: source and destination hold 4 and 5 blocks"),
        ([[0]], [0], r"convert_: src_ids: expected one axis of int32 or int64, got shape \(1, 1\)"),
        ([0.5], [0], r"convert_: src_ids: expected one axis of int32 or int64, got .* float32"),
        ("x", [0], r"convert_: src_ids: expected block ids"),
        (None, [0, 1, 2, 3, 4], r"convert_: src_ids\[4\] is 4: expected 0 to 3"),
        (nested(torch.arange(2)), [0], r"convert_: ids: #0 is a nested tensor"),
        (
            torch.arange(2)[:1],
            torch._neg_view(torch.arange(1)),
            r"convert_: dst_ids: expected integers, got .* cannot be read: it is the negative",
        ),
    ],
)
def test_ids_that_are_refused_leave_the_destination(src_ids: Any, dst_ids: Any, match: str) -> None:
    src, dst = Bound("nhd", SHAPE, 4, kind="torch"), Bound("universal", SHAPE, 5, dst=True, kind="torch")
    with pytest.raises(kvbm.BindError, match=match):
        kvbm.torch.convert_(src.arrays, dst.arrays, "nhd", "universal", SHAPE, src_ids, dst_ids)
    assert dst.untouched


def test_blocks_of_one_pool_move_in_place() -> None:
    tensors = random("nhd", 4)
    before = [tensor.clone() for tensor in tensors]
    kvbm.torch.convert_(tensors, tensors, "nhd", "nhd", SIZES, [3], [0])
    assert alike(tensors, [*before[12:], *before[4:]])
    with pytest.raises(kvbm.BindError, match=r"convert_: src_ids\[1\] is 2, which is also a destination"):
        kvbm.torch.convert_(tensors, tensors, "nhd", "nhd", SIZES, [1, 2], [2, 3])


def test_overlaps() -> None:
    (one,) = random("vllm/LBHNC", 4)
    other = one.view(-1).view(2, 4, 16, 4, 2, 32)
    with pytest.raises(kvbm.BindError, match=r"convert_: vllm/LBHNC → vllm/LBNHC: .* overlap in memory"):
        kvbm.torch.convert_([one], [other], "vllm/LBHNC", "vllm/LBNHC", SIZES)
    twice = random("universal", 1) * 2
    with pytest.raises(kvbm.BindError, match=r"convert_: universal: arrays 0 and 1 share memory"):
        kvbm.torch.convert_(random("nhd", 2), twice, "nhd", "universal", SIZES)


def test_writing_is_seen_by_autograd() -> None:
    """Autograd must notice changes of a tensor that a backward pass needs."""
    tensors, (out,) = random("vllm/LBHNC", 2), random("vllm/BLHNC", 2)
    weight = torch.ones_like(out, requires_grad=True)
    product = weight * out
    kvbm.torch.convert_(tensors, [out], "vllm/LBHNC", "vllm/BLHNC", SIZES)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    with torch.inference_mode():
        (inside,) = kvbm.torch.convert(tensors, "vllm/LBHNC", "vllm/BLHNC", SIZES)
        kvbm.torch.convert_(tensors, [inside], "vllm/LBHNC", "vllm/BLHNC", SIZES)
        assert inside.is_inference() and torch.equal(inside, out)


# ---- what torch does with operators ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # opcheck's own, in PyTorch 2.15
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[3], PAIRS[6]], ids=">".join)
@pytest.mark.slow
def test_opcheck_convert(pair: tuple[str, str], grad: bool) -> None:
    tensors = [tensor.requires_grad_(grad) for tensor in random(pair[0], 2)]
    done = torch.library.opcheck(CONVERT, (tensors, *pair, SIZES))
    assert set(done.values()) == {"SUCCESS"} and len(done) >= 4


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.slow  # 1.2 s
def test_opcheck_convert_into(ids: bool) -> None:
    tensors, out = random("vllm/flash_attn_nhd", 3), random("universal", 3)
    given = (torch.tensor([2, 0]), torch.tensor([1, 2])) if ids else ()
    done = torch.library.opcheck(CONVERT_, (tensors, out, "vllm/flash_attn_nhd", "universal", SIZES, *given))
    assert set(done.values()) == {"SUCCESS"}


def forward(tensors: list[Any]) -> list[Any]:
    scaled = [2 * tensor for tensor in tensors]
    out = kvbm.torch.convert(scaled, "vllm/flash_attn_nhd", "vllm/LBHNC", SIZES)
    return [one + 1 for one in out]


def into(tensors: list[Any], out: list[Any], src_ids: Any, dst_ids: Any) -> Any:
    scaled = [2 * tensor for tensor in tensors]
    kvbm.torch.convert_(scaled, out, "vllm/flash_attn_nhd", "universal", SHAPE32, src_ids, dst_ids)
    return out[0].sum()


SHAPE32 = of("float32")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.slow
def test_compile_without_a_graph_break(backend: str, dynamic: bool) -> None:
    compiled = torch.compile(forward, fullgraph=True, backend=backend, dynamic=dynamic)
    for blocks in (3, 5):
        tensors = random("vllm/flash_attn_nhd", blocks)
        assert alike(compiled(tensors), forward(tensors))
        mine, theirs = random("universal", 6), random("universal", 6)
        ids = torch.tensor([2, 0]), torch.tensor([1, 5])
        written = torch.compile(into, fullgraph=True, backend=backend, dynamic=dynamic)(tensors, mine, *ids)
        assert torch.equal(written, into(tensors, theirs, *ids)) and alike(mine, theirs)


@pytest.mark.slow  # 1.3 s
def test_a_changing_number_of_blocks_is_compiled_once() -> None:
    """One tensor per layer: the number of blocks is a symbol, and stays one."""
    import torch._dynamo.testing

    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(forward, fullgraph=True, backend=counter, dynamic=True)
    for blocks in (3, 5, 9):
        tensors = random("vllm/flash_attn_nhd", blocks)
        assert alike(compiled(tensors), forward(tensors))
    assert counter.frame_count == 1


@pytest.mark.slow  # half a second
def test_ids_whose_number_is_data() -> None:
    """Such as ids selected by a mask: their number is not known when the graph is made."""

    def picked(tensors: list[Any], out: list[Any], mask: Any) -> Any:
        ids = mask.nonzero().flatten()
        kvbm.torch.convert_(tensors, out, "vllm/flash_attn_nhd", "universal", SIZES, ids, ids.flip(0))
        return ids

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(picked, fullgraph=True, backend="aot_eager")
        for mask in (torch.tensor([True, False, True]), torch.tensor([True, True, True]), torch.tensor([False] * 3)):
            tensors, mine, theirs = random("vllm/flash_attn_nhd", 3), random("universal", 3), random("universal", 3)
            assert torch.equal(compiled(tensors, mine, mask), picked(tensors, theirs, mask)) and alike(mine, theirs)


@pytest.mark.slow
def test_inductor_with_gradients() -> None:
    """The real compiler, once: forward, backward, the operator that writes, and inputs that it must make contiguous."""
    from torch._inductor import config as inductor

    def step(one: Any, out: Any, ids: Any) -> Any:
        names = ("vllm/LBHNC", "vllm/BLHNC", SIZES)
        (blocks,) = kvbm.torch.convert([one.transpose(2, 3).contiguous()], *names)
        kvbm.torch.convert_([blocks.detach()], [out], *names[1::-1], SIZES, ids, ids.flip(0))
        return blocks

    (tensor,) = random("vllm/LBHNC", 3)
    results = []
    with warnings.catch_warnings(), inductor.patch(cpp_cache_precompile_headers=False):  # which pay for many programs
        warnings.simplefilter("ignore")  # of inductor about itself
        for run in (step, torch.compile(step, fullgraph=True)):
            one = tensor.transpose(2, 3).contiguous().requires_grad_()
            (out,) = random("vllm/LBHNC", 3)
            blocks = run(one, out, torch.tensor([0, 2]))
            blocks.backward(torch.arange(blocks.numel(), dtype=torch.float32).view(blocks.shape))
            results.append([blocks, out, one.grad])
    assert alike(*results)
    assert torch.equal(results[0][0], tensor.transpose(0, 1)) and torch.equal(results[0][1][:, 0], tensor[:, 2])


@pytest.mark.slow  # half a second
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch.export about torch
def test_export() -> None:
    class Offload(torch.nn.Module):
        def forward(self, *layers: Any) -> list[Any]:
            return kvbm.torch.convert(list(layers), "vllm/flash_attn_nhd", "vllm/LBHNC", SIZES)

    blocks = torch.export.Dim("blocks", min=2, max=64)
    tensors = random("vllm/flash_attn_nhd", 3)
    program = torch.export.export(Offload(), tuple(tensors), dynamic_shapes={"layers": ({1: blocks},) * len(tensors)})
    assert any(node.target is CONVERT for node in program.graph.nodes)
    program = program.run_decompositions()
    more = random("vllm/flash_attn_nhd", 7)
    assert alike(program.module()(*more), Offload()(*more))


@pytest.mark.skipif(not SEEN_FROM_C, reason="the compiler of PyTorch 2.8 names the exception and not what it says")
def test_a_stream_inside_compile_is_refused() -> None:
    compiled = torch.compile(
        lambda one: kvbm.torch.convert([one], "vllm/LBHNC", "vllm/BLHNC", SIZES, stream=1),
        backend="eager",
        fullgraph=True,
    )
    with pytest.raises(Exception, match=r"convert: stream: inside torch.compile the compiler orders the work"):
        compiled(random("vllm/LBHNC", 2)[0])


def test_autocast_leaves_dtypes_alone() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (out,) = kvbm.torch.convert(random("vllm/LBHNC", 2), "vllm/LBHNC", "vllm/BLHNC", SIZES)
        (grad,) = torch.autograd.grad(
            kvbm.torch.convert(one := random("vllm/LBHNC", 2)[0].requires_grad_(), "vllm/LBHNC", "vllm/BLHNC", SIZES)[
                0
            ].sum(),
            one,
        )
    assert out.dtype == grad.dtype == torch.float32


def test_threads() -> None:
    tensors = random("nhd", 8)
    want = kvbm.torch.convert(tensors, "nhd", "universal", SIZES)
    wrong: list[int] = []

    def work(k: int) -> None:
        for _ in range(20):
            batches._faces.clear()
            if not alike(kvbm.torch.convert(tensors, "nhd", "universal", SIZES), want):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- gradients -------------------------------------------------------------------------------------------------------

SMALL = "nl=2,no=2,nh=2,nt=2,hd=4"


def small(name: str, blocks: int = 1) -> list[Any]:
    shape = kvbm.load_shape(f"{SMALL},dtype=float64")
    return [tensor.requires_grad_() for tensor in random(name, blocks, "float64", shape)]


@pytest.mark.filterwarnings("ignore:Backwards compatibility")
@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[3], PAIRS[6], ("vllm/tpu", "nhd"), ("nhd", "vllm/tpu")], ids=">".join)
def test_gradcheck_and_double_backward(pair: tuple[str, str]) -> None:
    def call(*tensors: Any) -> tuple[Any, ...]:
        return tuple(kvbm.torch.convert(list(tensors), *pair, SMALL))

    tensors = small("nhd") if pair[0] == "nhd" else kvbm.torch.convert(small("nhd"), "nhd", pair[0], SMALL)
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    assert torch.autograd.gradcheck(call, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *t: tuple(one.pow(2) for one in call(*t)), tensors, fast_mode=True)


def test_the_adjoint_is_the_inverse() -> None:
    """It accepts gradients in any form: of some outputs only, expanded ones, for some inputs only."""
    tensors = small("nhd", 2)
    out = kvbm.torch.convert(tensors, "nhd", "universal", SMALL)
    incoming = [torch.randn_like(one) for one in out]
    grads = torch.autograd.grad(out, tensors, incoming, retain_graph=True)
    assert alike(grads, kvbm.torch.convert(incoming, "universal", "nhd", SMALL))
    assert alike(
        torch.autograd.grad(out[1].sum(), tensors, retain_graph=True),
        [torch.zeros_like(tensors[0])] * 4 + [torch.ones_like(tensors[0])] * 4,
    )
    (one,) = torch.autograd.grad([one.sum() for one in out], tensors[3:4])
    assert torch.equal(one, torch.ones_like(one))
    tensors[0].requires_grad_(False)
    kvbm.torch.convert(tensors, "nhd", "universal", SMALL)[0].sum().backward()
    assert tensors[0].grad is None and torch.equal(tensors[1].grad, torch.ones_like(tensors[1]))


def test_what_is_not_wanted_is_not_recorded() -> None:
    tensors = [tensor.detach() for tensor in small("nhd", 2)]
    leaf = tensors[0].clone().requires_grad_()
    call = lambda: kvbm.torch.convert([leaf, *tensors[1:]], "nhd", "universal", SMALL)  # noqa: E731
    with torch.no_grad():
        assert not call()[0].requires_grad
    assert call()[0].requires_grad and leaf._version == 0
    assert not kvbm.torch.convert(tensors, "nhd", "universal", SMALL)[0].requires_grad


def test_the_first_backward_plans_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward copy is planned with the forward copy, so the first backward pass takes no longer than the second."""
    tensors = small("nhd", 3)
    batches._faces.clear()
    array_checks.side_of.cache_clear()
    out = kvbm.torch.convert(tensors, "nhd", "universal", SMALL)
    for module, name in ((batches, "plan"), (batches, "prepare"), (batches, "Face"), (batches, "Batch")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("planned in the backward"))
    sum(one.sum() for one in out).backward()
    assert torch.equal(tensors[0].grad, torch.ones_like(tensors[0]))


def test_gradients_that_cannot_be_had() -> None:
    tensors, out = random("vllm/LBHNC", 2), random("vllm/BLHNC", 2)
    names = ("vllm/LBHNC", "vllm/BLHNC", SIZES)
    wanted = [tensors[0].requires_grad_()]
    for given in ((wanted, out), ([tensors[0].detach()], [out[0].clone().requires_grad_()])):
        for call in (kvbm.torch.convert_, CONVERT_):
            with pytest.raises(
                kvbm.BindError, match=r"convert_: (in|out)put #0 requires a gradient, .*use kvbm.torch.convert"
            ):
                call(*given, *names)
            with torch.no_grad():
                call(*given, *names)
    bytes_ = [tensors[0].detach().to(torch.float8_e5m2).requires_grad_()]
    for call in (kvbm.torch.convert, CONVERT):
        with pytest.raises(
            kvbm.BindError,
            match=r"convert: input #0 requires a gradient, but the shape reads it as uint8, and integers have none",
        ):
            call(bytes_, *names[:2], f"{SIZES},dtype=uint8")
        assert not call([bytes_[0].detach()], *names[:2], f"{SIZES},dtype=uint8")[0].requires_grad
    integers = kvbm.torch.convert(random("vllm/LBHNC", 2, "int16"), *names)
    assert not integers[0].requires_grad


# ---- the contract at the border --------------------------------------------------------------------------------------


def bad(**change: Any) -> Callable[[], tuple[list[Any], str, str, str]]:
    return lambda: arguments(change)


def arguments(change: dict[str, Any]) -> tuple[list[Any], str, str, str]:
    tensors = random("vllm/flash_attn_nhd", 3)  # [l o] b t h d
    for index, new in change.get("at", {}).items():
        tensors[index] = new(tensors[index])
    tensors = change.get("tensors", lambda x: x)(tensors)
    return tensors, "vllm/flash_attn_nhd", change.get("dst", "universal"), change.get("shape", SIZES)


LAYOUT = kvbm.load("vllm/flash_attn_nhd")
PER_LAYER = LAYOUT.resolve(of("float32"), 3).table_size
REFUSED = {
    "too few": (bad(tensors=lambda x: x[:-1]), ValueError, r"convert: inputs: vllm/flash_attn_nhd .* expects \d arrays, got \d"),
    "wrong rank": (
        bad(at={1: lambda x: x.flatten(-2)}),
        ValueError,
        r"convert: input #1: expected 5 axes \(o b t h d\) of \(2, 3, 16, 4, 32\), got shape \(2, 3, 16, 128\); "
        r".*\.reshape\(2, 3, 16, 4, 32\)",
    ),
    "wrong rank of the first": (
        bad(at={0: lambda x: x.flatten(-2)}),
        ValueError,
        r"convert: input #0: expected 5 axes .*\.reshape\(",
    ),
    "wrong shape": (
        bad(at={1: lambda x: x.transpose(2, 3).contiguous()}),
        ValueError,
        r"convert: input #1: axis 't': expected 16, got 4 \(shape .*if its axes are o b h t d, use a layout with its order",
    ),
    "another number of blocks": (
        bad(at={1: lambda x: x[:, :2].contiguous()}),
        ValueError,
        r"input #1: axis 'b': expected 3, got 2",
    ),
    "sliced": (
        bad(at={1: lambda x: torch.cat([x, x], -1)[..., 16:48]}),
        ValueError,
        r"convert: input #1: expected a contiguous array, got strides of \(.*\) bytes at storage offset 16, .*\.contiguous\(\)",
    ),
    "transposed": (
        bad(at={0: lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2)}),
        ValueError,
        r"input #0: .*\.contiguous\(\)",
    ),
    "expanded": (bad(at={1: lambda x: x[:, :1].expand(-1, 3, -1, -1, -1)}), ValueError, r"input #1: .*\.contiguous\(\)"),
    "mixed dtypes": (bad(at={1: lambda x: x.double()}), TypeError, r"convert: input #1 is float64, input #0 float32"),
    "dtype of the shape": (
        bad(shape=SIZES + ",dtype=bfloat16"),
        TypeError,
        r"convert: input #0: expected bfloat16, as the shape says, got float32; .*dtype=float32",
    ),
    "two kinds of fp8": (
        bad(tensors=lambda x: [t.to(torch.float8_e5m2) for t in x], shape=SIZES + ",dtype=float8_e4m3fn"),
        TypeError,
        r"input #0: expected float8_e4m3fn, .* got float8_e5m2; .*\.view\(torch\.uint8\)",
    ),
    "complex": (bad(tensors=lambda x: [t.to(torch.complex64) for t in x]), TypeError, r"convert: .*complex64.*torch\.int64"),
    "sparse": (bad(at={0: lambda x: x.to_sparse()}), Exception, r"sparse|Sparse"),
    "nested": (
        bad(at={0: lambda x: nested(x)}),
        ValueError,
        r"convert: tensors: #0 is a nested tensor; expected a dense one: .*\.unbind\(\)",
    ),
    "jagged": (
        bad(at={1: lambda x: torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 2]))}),
        ValueError,
        r"convert: tensors: #1 is a nested tensor",
    ),
    "no list": (bad(tensors=lambda x: dict(enumerate(x))), ValueError, r"convert: tensors: expected a list of tensors, got a dict"),
    "no tensor": (bad(at={1: lambda x: x.numpy()}), ValueError, r"convert: tensors: #1 is a ndarray"),
    "no layout": (bad(dst="nothing"), ValueError, r"convert: layout 'nothing'"),
    "a Layout": (bad(dst=5), ValueError, r"convert: dst: expected a Layout, a name or the path"),
    "no shape": (bad(shape=""), ValueError, r"convert: shape"),
    "no shape at all": (bad(shape=None), ValueError, r"convert: shape: expected a BlockShape or a text such as"),
    "no copy": (bad(dst="vllm/mla"), ValueError, r"convert: "),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_remedy(name: str) -> None:
    made, error, match = REFUSED[name]
    given = made()
    with pytest.raises(error, match=match) as info:
        kvbm.torch.convert(*given)
    if name != "sparse":
        assert isinstance(info.value, kvbm.KvbmError)


def test_remedies_work() -> None:
    """The advice in error messages works."""
    whole = random("vllm/flash_attn_nhd", 3)
    want = kvbm.torch.convert(whole, "vllm/flash_attn_nhd", "universal", SIZES)
    flat = [one.flatten(-2).reshape(2, 3, 16, 4, 32) for one in whole]
    sliced = [torch.cat([one, one], -1)[..., :32].contiguous() for one in whole]
    for given in (flat, sliced):
        assert alike(kvbm.torch.convert(given, "vllm/flash_attn_nhd", "universal", SIZES), want)


def test_outputs_are_named_too() -> None:
    tensors, out = random("nhd", 2), random("universal", 2)
    names = ("nhd", "universal", SIZES)
    with pytest.raises(kvbm.BindError, match=r"convert_: output #1: expected a contiguous array"):
        kvbm.torch.convert_(tensors, [out[0], out[1].transpose(0, 1).contiguous().transpose(0, 1)], *names)
    with pytest.raises(kvbm.DTypeError, match=r"convert_: output #0: expected float32, as the shape says, got float64"):
        kvbm.torch.convert_(tensors, [one.double() for one in out], *names)
    with pytest.raises(kvbm.BindError, match=r"convert_: out: #0 is a list"):
        kvbm.torch.convert_(tensors, [out], *names)


def fake(device: str, *others: str) -> list[Any]:
    """Tensors that claim to be on other devices; called under FakeTensorMode."""
    devices = [device, *others]
    return [torch.empty(2, 3, 16, 4, 32, device=devices[i] if i < len(devices) else device) for i in range(PER_LAYER)]


@pytest.mark.parametrize(
    ("devices", "match"),
    [
        (
            ("cuda:0", "cpu"),
            r"convert: input #1 is on cpu, input #0 on cuda:0; .* construct kvbm\.Transfer.* pinned .*\.to\('cuda:0'\)",
        ),
        (("cpu", "cuda:0"), r"convert: input #1 is on cuda:0, input #0 on cpu; expected one device"),
        (("cuda:0", "cuda:1"), r"convert: input #1 is on cuda:1, input #0 on cuda:0; .* between two GPUs construct kvbm\.Transfer"),
    ],
)  # fmt: skip
def test_mixed_devices(devices: tuple[str, ...], match: str) -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(), pytest.raises(kvbm.BindError, match=match):
        kvbm.torch.convert(fake(*devices), "vllm/flash_attn_nhd", "universal", SIZES)


def test_source_and_destination_on_two_devices() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        out = [torch.empty(4, 2, 2, 16, 32, device="cuda:1") for _ in range(3)]
        with pytest.raises(
            kvbm.BindError, match=r"convert_: output #0 is on cuda:1, input #0 on cuda:0; .*kvbm\.Transfer"
        ):
            kvbm.torch.convert_(fake("cuda:0"), out, "vllm/flash_attn_nhd", "universal", SIZES)
        ids = torch.zeros(1, dtype=torch.int64, device="cuda:1")
        with pytest.raises(kvbm.BindError, match=r"convert_: dst_ids is on cuda:1, input #0 on cuda:0"):
            kvbm.torch.convert_(fake("cuda:0"), fake("cuda:0"), *["vllm/flash_attn_nhd"] * 2, SIZES, None, ids)
        (one, *_) = kvbm.torch.convert(fake("cuda:1"), "vllm/flash_attn_nhd", "universal", SIZES)
        assert one.device == torch.device("cuda:1")


def test_meta_tensors_have_shapes() -> None:
    tensors = [tensor.to("meta") for tensor in random("nhd", 2)]
    out = kvbm.torch.convert(tensors, "nhd", "universal", SIZES)
    assert len(out) == 2 and out[0].is_meta and out[0].shape == (4, 2, 2, 16, 32)


def test_a_cuda_error_is_the_framework_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*rest: Any) -> None:
        raise kvbm.CudaError("cuLaunchKernel: an illegal address", code=700, name="CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(batches.Batch, "run", fail)
    with pytest.raises(torch.AcceleratorError, match=r"^convert: cuLaunchKernel: an illegal address") as info:
        kvbm.torch.convert(random("nhd"), "nhd", "universal", SIZES)
    error = info.value
    assert isinstance(error, kvbm.CudaError) and isinstance(error, kvbm.torch.AcceleratorError)
    assert (error.code, error.error_code, error.name) == (700, 700, "CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(kvbm.CudaError, match=r"^convert_: "):
        kvbm.torch.convert_(random("nhd"), random("universal"), "nhd", "universal", SIZES)


# ---- streams, as far as they can be refused without a GPU ------------------------------------------------------------


class Stream:
    """An object that claims to be a stream of GPU 1."""

    device_id = 1

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 0x7000)


def test_streams_that_are_refused() -> None:
    from kvbm.torch import fences

    tensors = random("nhd")
    with pytest.raises(kvbm.BindError, match=r"convert: stream: the tensors are on cpu, .* leave stream out"):
        kvbm.torch.convert(tensors, "nhd", "universal", SIZES, stream=Stream())
    with pytest.raises(kvbm.BindError, match=r"convert_: stream: the tensors are on cpu"):
        kvbm.torch.convert_(tensors, random("universal"), "nhd", "universal", SIZES, stream=Stream())
    with pytest.raises(kvbm.BindError, match=r"^stream is on cuda:1, the tensors on cuda:0; .*kvbm\.Transfer"):
        fences.stream_of(Stream(), torch.device("cuda:0"))
    with pytest.raises(TypeError, match="stream: expected"):
        fences.stream_of("default", torch.device("cuda:0"))


# ---- around ----------------------------------------------------------------------------------------------------------


def test_pools_as_tensors() -> None:
    pool = kvbm.Pool.allocate(kvbm.load("vllm/LBHNC"), SHAPE, 3)
    (tensor,) = kvbm.torch.tensors(pool)
    assert tensor.dtype == torch.bfloat16 and tensor.data_ptr() == int(pool.addresses[0])
    bound = kvbm.Pool(kvbm.load("vllm/LBHNC"), SHAPE, [tensor])
    assert kvbm.torch.tensors(bound)[0].data_ptr() == tensor.data_ptr()
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.zeros(tensor.shape, ml_dtypes.bfloat16)
    (view,) = kvbm.torch.tensors(kvbm.Pool(kvbm.load("vllm/LBHNC"), SHAPE, [array]))
    assert view.dtype == torch.bfloat16 and view.data_ptr() == array.ctypes.data


def test_the_operators_agree_with_pools() -> None:
    """The direct call and the operator give the same copy."""
    tensors = random("nhd", 4)
    pool = kvbm.Pool(kvbm.load("nhd"), of("float32"), tensors)
    store = kvbm.Pool.allocate(kvbm.load("universal"), of("float32"), 4)
    transfer.convert(pool, store)
    assert alike(kvbm.torch.tensors(store), kvbm.torch.convert(tensors, "nhd", "universal", SIZES))


def test_pools_of_planes_as_tensors() -> None:
    pool = kvbm.Pool.allocate(kvbm.load("record/mxfp8_tensors"), of("float8_e4m3fn"), 2)
    seen = kvbm.torch.tensors(pool)
    assert {str(tensor.dtype) for tensor in seen} == {"torch." + kind.dtype for kind in pool.resolved.kinds}
    assert [tensor.data_ptr() for tensor in seen] == pool.addresses.tolist() and len({t.dtype for t in seen}) == 2


def test_four_bits_in_pairs() -> None:
    """A tensor of pairs has half the length, and is copied as bytes."""
    (one,) = random("vllm/LBHNC", 3, "uint8", kvbm.load_shape("nl=2,no=2,nh=4,nt=16,hd=16,dtype=uint8"))
    shape = f"{SIZES},dtype=float4_e2m1fn"
    for tensor in (one, one.view(torch.float4_e2m1fn_x2)):
        (out,) = kvbm.torch.convert([tensor], "vllm/LBHNC", "vllm/BLHNC", shape)
        assert out.dtype == tensor.dtype and torch.equal(out.view(torch.uint8), one.transpose(0, 1))


def test_a_route_for_ids_on_the_gpu_is_made_of_what_there_is() -> None:
    """It can be bound without a GPU; GPU tests run it."""
    tensors, out = random("nhd", 3), random("universal", 3)
    batch = operators._batch(tensors, out, "nhd", "universal", SIZES)
    tables = [
        operators.table_of(who, given, sized, elements, batch.face, "float32")
        for who, given, sized, elements in (
            (operators._INPUT_, tensors, batch.src, batch.src_elements),
            (operators._OUTPUT_, out, batch.dst, batch.dst_elements),
        )
    ]
    route = operators._route(batch, tensors, out, *tables)
    assert route.choose(3) == "direct" and route.counters() == ((0, 0, 0), (0, 0, 0), 0)


@pytest.mark.parametrize("twin", ["", "_"])
def test_operators_without_tensors(twin: str) -> None:
    """The dispatcher has no device: the result is empty if there can be no blocks, else an error of one sentence."""
    fill, make = (getattr(torch.ops.kvbm, f"{twin}{name}") for name in ("convert_", "convert"))
    assert make([], "nhd", "universal", SIZES) == [] and fill([], [], "nhd", "universal", SIZES) is None
    for operator, call in (("convert", make), ("convert_", lambda *names: fill([], *names))):
        with pytest.raises(kvbm.BindError, match=rf"^{operator}: inputs: vllm/LBHNC .* expects 1 arrays, got none"):
            call([], "vllm/LBHNC", "universal", SIZES)
        with pytest.raises(kvbm.SpecError, match=rf"^{operator}: layout 'nonsense'"):
            call([], "nonsense", "universal", SIZES)
    with pytest.raises(kvbm.BindError, match=r"^convert: inputs: vllm/LBHNC .* expects 1 arrays"):
        kvbm.torch.convert([], "vllm/LBHNC", "universal", SIZES)


@pytest.mark.filterwarnings("ignore")
def test_operators_with_tensors_that_no_kernel_takes() -> None:
    tensors = random("nhd", 1)
    for odd, match in (
        (tensors[0].to_sparse(), "sparse_coo"),
        (
            torch._make_per_tensor_quantized_tensor(torch.zeros(tensors[0].shape, dtype=torch.uint8), 0.1, 0),
            "(quantized|quint8)",
        ),
    ):
        with pytest.raises(kvbm.KvbmError, match=rf"convert: .*{match}"):
            kvbm.torch.convert([odd] * len(tensors), "nhd", "universal", SIZES)
        with pytest.raises(kvbm.KvbmError, match=rf"convert_: .*{match}"):
            kvbm.torch.convert_([odd] * len(tensors), random("universal", 1), "nhd", "universal", SIZES)


def test_strides_of_an_output_are_no_reason_to_copy_it() -> None:
    """Layouts with these strides are named.  A copy of an input also helps; a copy of an output would not be read."""
    tensors, out = (
        random("nhd", 1),
        [one.transpose(2, 3).contiguous().transpose(2, 3) for one in random("universal", 1)],
    )
    with pytest.raises(kvbm.BindError, match=r"output #0: .*these strides are those of vllm/BHLNC: name that layout") as info:
        kvbm.torch.convert_(tensors, out, "nhd", "universal", SIZES)
    assert "contiguous" not in str(info.value)
    odd = [one.transpose(0, 4).contiguous().transpose(0, 4) for one in random("universal", 1)]
    with pytest.raises(kvbm.BindError, match=r"output #0: .* in the order d l o t h: use a layout with that order") as info:
        kvbm.torch.convert_(tensors, odd, "nhd", "universal", SIZES)
    assert ".contiguous()" not in str(info.value) and "the result would not be in your array" in str(info.value)
    with pytest.raises(kvbm.BindError, match=r"input #0: .* order d l o t h: .*only read, so a copy by \.contiguous\(\) works"):
        kvbm.torch.convert_(odd, tensors, "universal", "nhd", SIZES)
    turned = [one.transpose(0, 1).contiguous().transpose(0, 1) for one in tensors]
    with pytest.raises(kvbm.BindError, match=r"input #0: .* these strides are those of hnd") as info:
        kvbm.torch.convert(turned, "nhd", "universal", SIZES)
    assert "contiguous" not in str(info.value)
    permuted = [one.transpose(0, 1) for one in turned]
    advised, direct = (kvbm.torch.convert(given, name, "universal", SIZES) for given, name in ((permuted, "hnd"), (tensors, "nhd")))
    assert all(map(torch.equal, advised, direct)), "the advice is right"


def test_nothing_imports_the_bridges() -> None:
    code = (
        "import sys, kvbm\n"
        "kvbm.convert, kvbm.kernels, kvbm.Pool\n"
        "names = ('torch', 'cupy', 'numba', 'jax', 'kvbm.torch', 'kvbm._bridge', 'kvbm.numpy')\n"
        "print([name for name in names if name in sys.modules])\n"
        "kvbm.numpy.convert\n"
        "print([name for name in names if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.splitlines() == ["[]", "['kvbm._bridge', 'kvbm.numpy']"]


def test_a_tensor_whose_storage_was_resized_is_refused_and_never_read() -> None:
    """Freed and cut storages, also of views with an offset; each was a read of foreign memory."""
    sizes = "nl=2,no=2,nh=4,nt=16,hd=8,dtype=float32"
    names = "vllm/flash_attn_nhd", "universal", sizes
    for missing, offset, where in itertools.product((1, 12000, 12288), (0, 1), ("first", "last")):
        tensors = [torch.zeros(2, 3, 16, 4, 8) for _ in range(2)]
        base = torch.zeros(2, 3 * 16 * 4 * 8 * 2)
        index = 0 if where == "first" else 1
        tensors[index] = base[offset].view(2, 3, 16, 4, 8)
        base.untyped_storage().resize_((12288 * (offset + 1) - missing) * (missing < 12288))
        out = [torch.zeros(4, 2, 2, 16, 8) for _ in range(3)]
        for call in (
            lambda tensors=tensors: kvbm.torch.convert(tensors, *names),
            lambda tensors=tensors, out=out: kvbm.torch.convert_(tensors, out, *names),
            lambda tensors=tensors, out=out: kvbm.torch.convert_(out, tensors, names[1], names[0], sizes),
        ):
            with pytest.raises(kvbm.BindError, match=r"convert_?: .*its storage was freed or resized"):
                call()
