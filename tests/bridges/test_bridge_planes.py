"""Layouts of several planes in the operators of kvbm.torch and the other bridges, compared bit for bit with plane_oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from test_planes import PAIRS, SOME_PAIRS, Shape, cuda_arrays, numpy_arrays, shapes  # noqa: E402
from test_torch import SEEN_FROM_C  # noqa: E402

import kvbm  # noqa: E402
import kvbm.numpy  # noqa: E402
import kvbm.torch  # noqa: E402
import plane_oracle  # noqa: E402
from kvbm.torch import batches  # noqa: E402
from memory import Strided, aligned  # noqa: E402
from plane_oracle import held  # noqa: E402

IDS = (([4, 0, 2], [5, 1, 0]), ([1, -1, 3, 0], [0, 2, -1, 6]), ([2], [3]))
FEW = [
    ("vllm/fp8_ds_mla", "record/mla_fp8_tensors"),  # three planes, from records to tensors of three dtypes
    ("record/mla_fp8_tensors", "vllm/fp8_ds_mla"),
    ("record/deepseek_v4_tokens", "vllm/deepseek_v4"),  # pages with padding
    ("vllm/nvfp4", "record/nvfp4_tensors"),  # elements of four bits
    ("flashinfer/mla_split", "record/mla_joined"),  # dtypes by the shape
]


class Given:
    """The engine's tensors of a layout, between guard bytes."""

    def __init__(self, name: str, shape: Shape, blocks: int, *, dst: bool = False, align: int = 0, device: str = "cpu"):
        self.arena = held(name, shape, blocks).arena(align)
        self.before = self.arena.dest(1) if dst else self.arena.source(0)
        self.memory = torch.from_numpy(aligned(self.before)).to(device)
        self.tensors = cuda_arrays(self.arena, self.memory)

    @property
    def bytes(self) -> np.ndarray:
        return self.memory.cpu().numpy()


def text(shape: Shape) -> str:
    return str(kvbm.BlockShape(*shape))


def check(src: Given, dst: Given, src_ids: Any, dst_ids: Any) -> None:
    want = plane_oracle.expected(src.arena, dst.arena, src.before, dst.before, src_ids, dst_ids)
    got = dst.bytes
    assert np.array_equal(got, want), plane_oracle.explain(dst.arena, got, want)
    assert np.array_equal(src.bytes, src.before), "the source changed"


def pretend(tensors: list[Any], call: Any) -> Any:
    """The result of a call with fake tensors."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        return call([mode.from_tensor(tensor) for tensor in tensors])


def into(src: str, dst: str, shape: Shape, ids: Any, align: int = 0, device: str = "cpu") -> None:
    """Call `convert_` between tensors in the engine's shapes."""
    one, other = Given(src, shape, 5, align=align, device=device), Given(dst, shape, 7, dst=True, device=device)
    assert not any(isinstance(tensor, Strided) for tensor in (*one.tensors, *other.tensors))
    ids = [torch.tensor(one, device=device) for one in ids] if device != "cpu" and len(ids[0]) == 3 else ids
    kvbm.torch.convert_(one.tensors, other.tensors, src, dst, text(shape), *ids)
    check(one, other, *(np.asarray(one.cpu() if hasattr(one, "cpu") else one) for one in ids))


def through(src: str, dst: str, shape: Shape, device: str = "cpu") -> list[Any]:
    """Call `convert`, and back by `convert_`; check the result; return the tensors in between."""
    one, back = Given(src, shape, 3, device=device), Given(src, shape, 4, dst=True, device=device)
    middle: list[Any] = kvbm.torch.convert(one.tensors, src, dst, text(shape))
    resolved = kvbm.load(dst).resolve(kvbm.BlockShape(*shape), 3)
    assert [tuple(tensor.shape) for tensor in middle] == [kind.shape for kind in resolved.allocations]
    assert [str(tensor.dtype) for tensor in middle] == [
        f"torch.{'float4_e2m1fn_x2' if kind.dtype == 'float4_e2m1fn' else kind.dtype}" for kind in resolved.allocations
    ]
    kvbm.torch.convert_(middle, back.tensors, dst, src, text(shape), [0, 1, 2], [3, 0, 2])
    check(one, back, [0, 1, 2], [3, 0, 2])
    return middle


@pytest.mark.parametrize(("src", "dst"), SOME_PAIRS)
def test_convert_and_convert_into(src: str, dst: str) -> None:
    for number, shape in enumerate(shapes(src)[:3]):
        into(src, dst, shape, IDS[number % 3], align=16 * number)
    through(src, dst, shapes(src)[0])


@pytest.mark.parametrize(("src", "dst"), FEW)
@pytest.mark.slow
def test_fake_tensors_and_the_compiler(src: str, dst: str) -> None:
    shape = shapes(src)[0]
    real = through(src, dst, shape)
    given = Given(src, shape, 3).tensors
    fake = pretend(given, lambda tensors: kvbm.torch.convert(tensors, src, dst, text(shape)))
    assert [(f.shape, f.stride(), f.dtype) for f in fake] == [(t.shape, t.stride(), t.dtype) for t in real]
    call = torch.compile(
        lambda tensors: kvbm.torch.convert(tensors, src, dst, text(shape)), fullgraph=True, backend="aot_eager"
    )
    try:
        got = call(given)
    finally:
        torch._dynamo.reset()
    back = Given(src, shape, 3, dst=True)
    kvbm.torch.convert_(got, back.tensors, dst, src, text(shape))
    one = Given(src, shape, 3)
    check(one, back, range(3), range(3))


@pytest.mark.skipif(not SEEN_FROM_C, reason="this PyTorch lets C look at no tensors")
def test_the_engine_s_shapes_go_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records in any shape of their bytes: (block, K and V x heads, token, bytes) as in vLLM's NVFP4."""
    monkeypatch.setattr(batches, "require_all", None)
    for src, dst in FEW[:3]:
        into(src, dst, shapes(src)[0], IDS[0])
    src, dst = FEW[3]
    one = Given(src, shapes(src)[0], 5)
    assert kvbm.load(src).resolve(kvbm.BlockShape(*shapes(src)[0]), 5).first.shape != one.tensors[0].shape
    middle = kvbm.torch.convert(one.tensors, src, "vllm/nvfp4_sm120", text(shapes(src)[0]))
    assert len(middle) == len(one.tensors)


def test_memory_that_overlaps() -> None:
    """Checked per plane: adjacent tensors of several sizes must not be confused with each other."""
    src, _ = FEW[0]
    shape = shapes(src)[0]
    one = Given(src, shape, 3)
    with pytest.raises(kvbm.BindError, match=r"convert_: .*overlap"):
        kvbm.torch.convert_(one.tensors, one.tensors, src, "record/mla_fp8_pages", text(shape), [0], [1])
    same = Given(src, shape, 3)
    kvbm.torch.convert_(same.tensors, same.tensors, src, src, text(shape), [0], [2])
    want = plane_oracle.expected(same.arena, same.arena, same.before, same.before, [0], [2])
    assert np.array_equal(same.bytes, want)


# ruff: noqa: E501  (a refusal is a line of a table)
def refusals() -> dict[str, tuple[type[Exception], str, Any]]:
    src, dst = FEW[1]
    shape = shapes(src)[0]
    good = Given(src, shape, 3).tensors
    wrong = next(i for i, tensor in enumerate(good) if tensor.dtype == torch.float32)
    say = text(shape)
    call = kvbm.torch.convert
    bad = [*good[:wrong], good[wrong].view(torch.int32), *good[wrong + 1 :]]
    return {
        "a plane's dtype": (kvbm.DTypeError, rf"convert: input #{wrong}: expected float32, as the layout's planes say, got int32; a copy converts no dtype", lambda: call(bad, src, dst, say)),
        "a plane's shape": (kvbm.BindError, rf"convert: input #{wrong}: axis 't': expected", lambda: call([*good[:wrong], good[wrong][:, :-1].contiguous(), *good[wrong + 1 :]], src, dst, say)),
        "one too few": (kvbm.BindError, rf"convert: inputs: {src} .* expects {len(good)} arrays, got {len(good) - 1}", lambda: call(good[:-1], src, dst, say)),
        "bytes that are not": (kvbm.DTypeError, r"convert: input #0: its planes share it, so expected bytes .* got float32", lambda: call([torch.zeros(3, 4, 656)] * shape[0], "vllm/fp8_ds_mla", src, say)),
        "too few bytes": (kvbm.BindError, r"convert: input #0: .*expected", lambda: call([torch.zeros(3, 4, 655, dtype=torch.uint8)] * shape[0], "vllm/fp8_ds_mla", src, say)),
        "no planes on one side": (kvbm.PlanError, r"^convert: vllm/fp8_ds_mla → nhd: .* has a plane .*; expected the same planes on both sides", lambda: call(Given(dst, shape, 3).tensors, dst, "nhd", say)),
        "no planes on one side, fake": (kvbm.PlanError, r"^convert: vllm/fp8_ds_mla → nhd: .*; expected the same planes on both sides", lambda: pretend(Given(dst, shape, 3).tensors, lambda fake: call(fake, dst, "nhd", say))),
        "no planes on one side, NumPy": (kvbm.PlanError, r"^numpy\.convert: vllm/fp8_ds_mla → nhd: .*; expected the same planes on both sides", lambda: kvbm.numpy.convert([t.numpy() for t in Given(dst, shape, 3).tensors], dst, "nhd", say)),
        "a gradient": (kvbm.BindError, rf"convert: input #{wrong} requires a gradient, and record/mla_fp8_tensors .* has planes of several dtypes, which have none; call \.detach\(\)", lambda: call([*good[:wrong], good[wrong].clone().requires_grad_(), *good[wrong + 1 :]], src, dst, say)),
    }  # fmt: skip


@pytest.mark.parametrize("name", refusals())
def test_refused(name: str) -> None:
    kind, match, call = refusals()[name]
    with pytest.raises(kind, match=match):
        call()


def test_what_is_not_built_is_compiled_for_the_tensors_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(batches, "prepare", lambda *_, device: asked.append(device) or ())
    for device in ("cpu", "cuda:1"):
        names = ("nhd", "universal", "nl=2,no=2,nh=4,nt=16,hd=32")
        batches.Face("convert", names, (torch.bfloat16,) * 2, torch.device(device)).batch(3, 3).copies(16, 16)
    assert asked == [-1, 1]


# ---- the other bridges -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("src", "dst"), FEW)
def test_numpy(src: str, dst: str) -> None:
    shape = shapes(src)[0]
    one, back = held(src, shape, 3).arena(), held(src, shape, 3).arena()
    memory, other = aligned(one.source(0)), aligned(back.dest(1))
    middle = kvbm.numpy.convert(numpy_arrays(one, memory), src, dst, text(shape))
    kinds = kvbm.load(dst).resolve(kvbm.BlockShape(*shape), 3).allocations
    assert [(array.shape, array.dtype) for array in middle] == [
        (kind.shape, kvbm.memory.array_info.numpy_dtype(kind.dtype)) for kind in kinds
    ]
    before = other.copy()
    kvbm.numpy.convert_(middle, numpy_arrays(back, other), dst, src, text(shape), [0, 1, 2], [2, 0, 1])
    want = plane_oracle.expected(one, back, memory, before, [0, 1, 2], [2, 0, 1])
    assert np.array_equal(other, want)


@pytest.mark.parametrize(("src", "dst"), FEW)
@pytest.mark.slow  # 0.8 s
def test_jax(src: str, dst: str) -> None:
    jax = pytest.importorskip("jax")
    bridge = pytest.importorskip("kvbm.jax")
    shape = shapes(src)[0]
    one = held(src, shape, 3).arena()
    arrays = numpy_arrays(one, aligned(one.source(0)))
    want = kvbm.numpy.convert(arrays, src, dst, text(shape))
    kinds = kvbm.load(dst).resolve(kvbm.BlockShape(*shape), 3)
    if any(kind.strides != tuple(np.empty(kind.shape, np.uint8).strides) for kind in kinds.kinds if kind.is_record):
        with pytest.raises(kvbm.BindError, match="pitch"):
            bridge.convert([jax.numpy.asarray(array) for array in arrays], src, dst, text(shape))
        return
    got = bridge.convert([jax.numpy.asarray(array) for array in arrays], src, dst, text(shape))
    for mine, theirs in zip(got, want, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        assert np.array_equal(np.asarray(mine).view(np.uint8), np.ascontiguousarray(theirs).view(np.uint8))


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_every_pair_on_a_gpu(src: str, dst: str) -> None:
    for number, shape in enumerate(shapes(src)):
        into(src, dst, shape, IDS[number % 3], align=16 * number, device="cuda:0")
    through(src, dst, shapes(src)[0], "cuda:0")
    kvbm.torch.check_ids()


@pytest.mark.gpu
@pytest.mark.parametrize(("src", "dst"), FEW)
def test_planes_sanitize(src: str, dst: str) -> None:
    """Tensors in separate memory that ends with their last element: nothing after it may be read or written."""
    through(src, dst, shapes(src)[2], "cuda:0")


@pytest.mark.gpu
@pytest.mark.parametrize(("src", "dst"), FEW)
def test_a_graph_of_planes(src: str, dst: str) -> None:
    shape = shapes(src)[0]
    one, back = Given(src, shape, 3, device="cuda:0"), Given(src, shape, 3, dst=True, device="cuda:0")
    through(src, dst, shape, "cuda:0")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        middle = kvbm.torch.convert(one.tensors, src, dst, text(shape))
        kvbm.torch.convert_(middle, back.tensors, dst, src, text(shape))
    graph.replay()
    torch.cuda.synchronize()
    check(one, back, range(3), range(3))


@pytest.mark.gpu
@pytest.mark.parametrize(("src", "dst"), FEW)
@pytest.mark.parametrize("name", ["cupy", "numba"])
def test_bridges_on_a_gpu(name: str, src: str, dst: str) -> None:
    pytest.importorskip(name)
    bridge = pytest.importorskip(f"kvbm.{name}")
    shape = shapes(src)[0]
    one, back = held(src, shape, 3).arena(), held(src, shape, 3).arena()
    memory, before = one.source(0), back.dest(1)
    if name == "cupy":
        cupy = pytest.importorskip("cupy")
        put, get = cupy.asarray, cupy.asnumpy
    else:
        cuda = pytest.importorskip("numba.cuda")
        put, get = cuda.to_device, lambda array: array.copy_to_host()
    given = [put(array) for array in numpy_arrays(one, aligned(memory))]
    into_ = [put(array) for array in numpy_arrays(back, aligned(before))]
    middle = bridge.convert(given, src, dst, text(shape))
    bridge.convert_(middle, into_, dst, src, text(shape), [0, 1, 2], [2, 0, 1])
    want = plane_oracle.expected(one, back, memory, before, [0, 1, 2], [2, 0, 1])
    for got, wanted in zip(into_, numpy_arrays(back, want), strict=True):
        assert np.array_equal(get(got).view(np.uint8), wanted.view(np.uint8))
