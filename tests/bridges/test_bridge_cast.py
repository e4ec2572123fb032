"""Casts by the operators of kvbm.torch and by the other bridges, compared bit for bit with the oracles of `casting`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import casting  # noqa: E402
import kvbm  # noqa: E402
import kvbm.numpy  # noqa: E402
import kvbm.torch  # noqa: E402
from casting import Side, Sizes, cast_of  # noqa: E402
from kvbm.torch.operators import CONVERT, CONVERT_  # noqa: E402

E4M3 = "float8_e4m3fn"
GQA: Sizes = (2, 2, 3, 4, 64)

#: Quantised layout and its dtype, plain layout and its dtype, sizes, scale of the caller.
CASES: tuple[tuple[str, str, str, str, Sizes, float | None], ...] = (
    ("record/per_token_head_fp8_planes", "bfloat16", "nhd", "bfloat16", GQA, None),
    ("vllm/nvfp4", "float32", "universal", "float32", GQA, 0.0271),
    ("record/mxfp8_tensors", "bfloat16", "vllm/flash_attn_nhd", "float16", GQA, None),
    ("vllm/fp8_ds_mla", "bfloat16", "record/mla_joined", "bfloat16", (2, 1, 1, 4, 576), None),
    ("universal", E4M3, "nhd", "bfloat16", GQA, 0.37),
    ("vllm/LBHNC", "int8", "hnd", "float32", GQA, 1.0),
)
BOTH = [(case, quantises) for case in CASES for quantises in (True, False)]
NAMES = [f"{case[0]}-{'from' if quantises else 'to'} {case[2]}" for case, quantises in BOTH]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def ends(case: tuple[Any, ...], quantises: bool, blocks: tuple[int, int] = (5, 7), **more: Any) -> tuple[Side, Side]:
    name, dtype, plain, of, sizes, _ = case
    both = [(plain, of), (name, dtype)]
    (a, a_type), (b, b_type) = both if quantises else both[::-1]
    return Side(a, sizes, a_type, blocks[0], seed=5, **more), Side(b, sizes, b_type, blocks[1], dst=True, **more)


def call(case: tuple[Any, ...], quantises: bool) -> tuple[str, str]:
    """The names of both layouts."""
    return (case[2], case[0]) if quantises else (case[0], case[2])


def held(arrays: Any) -> list[bytes]:
    """The bytes of tensors or arrays."""
    found = [one.contiguous().cpu().view(torch.uint8).numpy() if hasattr(one, "cpu") else one for one in arrays]
    return [np.ascontiguousarray(np.asarray(one)).tobytes() for one in found]


def made(src: Side, dst: Side, scale: float | None, ids: Any = None) -> list[bytes]:
    """The bytes of new arrays."""
    ids = range(src.blocks) if ids is None else ids
    dst.put(casting.expected(src, dst, ids, range(len(ids)), scale, before=np.zeros_like(dst.before)))
    return held(kvbm.torch.tensors(dst.pool))


@pytest.mark.parametrize(("case", "quantises"), BOTH, ids=NAMES)
def test_convert(case: Any, quantises: bool) -> None:
    src, dst = ends(case, quantises, (3, 3))
    names, cast = call(case, quantises), cast_of(case[5])
    want = made(src, dst, case[5])
    given = kvbm.torch.tensors(src.pool)
    for shape in (str(dst.shape), dst.shape):
        got = kvbm.torch.convert(given, *names, shape, cast=cast)
        assert held(got) == want and [one.dtype for one in got] == [one.dtype for one in kvbm.torch.tensors(dst.pool)]
    assert held(torch.ops.kvbm.convert(given, *names, str(dst.shape), "amax" if case[5] is None else str(case[5]))) == want
    assert held(kvbm.numpy.convert(kvbm.numpy.arrays(src.pool), *names, str(dst.shape), cast=cast)) == want
    assert src.untouched


@pytest.mark.parametrize(("case", "quantises"), BOTH, ids=NAMES)
def test_convert_into(case: Any, quantises: bool) -> None:
    names, cast = call(case, quantises), cast_of(case[5])
    for ids, bridge in itertools.product((([4, -1, 0], [5, 2, 1]), ([2], [3])), ("torch", "numpy", "dispatcher")):
        src, dst = ends(case, quantises)
        want = casting.expected(src, dst, *ids, case[5])
        # Plain tensors have their own dtype: the text's is that of planes without one.
        text = str(kvbm.BlockShape(*case[4], dtype=case[3] if "rope" in src.planes else "float64"))
        if bridge == "numpy":
            kvbm.numpy.convert_(kvbm.numpy.arrays(src.pool), kvbm.numpy.arrays(dst.pool), *names, text, *ids, cast=cast)
        elif bridge == "torch":
            kvbm.torch.convert_(kvbm.torch.tensors(src.pool), kvbm.torch.tensors(dst.pool), *names, text, *ids, cast=cast)
        else:
            some = [torch.tensor(one) for one in ids]
            how = "amax" if case[5] is None else str(case[5])
            torch.ops.kvbm.convert_(kvbm.torch.tensors(src.pool), kvbm.torch.tensors(dst.pool), *names, text, *some, how)
        casting.check(src, dst, want, (names, bridge))


# ---- what torch does with operators ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "quantises"), [BOTH[0], BOTH[3], BOTH[10]], ids=[NAMES[0], NAMES[3], NAMES[10]])
@pytest.mark.slow
def test_opcheck(case: Any, quantises: bool) -> None:
    src, dst = ends(case, quantises, (2, 3))
    names, how = call(case, quantises), "amax" if case[5] is None else str(case[5])
    given, out = kvbm.torch.tensors(src.pool), kvbm.torch.tensors(dst.pool)
    for one in given:  # opcheck compares by torch.allclose, for which NaN is not NaN
        one.view(torch.uint8).fill_(0x21)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    assert set(torch.library.opcheck(CONVERT, (given, *names, str(dst.shape), how), test_utils=tests).values()) == {"SUCCESS"}
    ids = torch.tensor([1, 0]), torch.tensor([2, 1])
    arguments = (given, out, *names, str(dst.shape), *ids, how)
    assert set(torch.library.opcheck(CONVERT_, arguments, test_utils=tests).values()) == {"SUCCESS"}


HALF = kvbm.Scale(0.5)


@pytest.mark.parametrize("cast", ["amax", HALF, kvbm.Scale(0.1)], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.slow
def test_compile_without_a_graph_break(cast: Any, dynamic: bool) -> None:
    layout, dtype = ("record/nvfp4_universal", "bfloat16") if cast == "amax" else ("universal", E4M3)
    shape = str(kvbm.BlockShape(*GQA, dtype=dtype))

    def forward(tensors: list[Any], out: list[Any], src_ids: Any, dst_ids: Any) -> list[Any]:
        scaled = [2 * tensor for tensor in tensors]
        kvbm.torch.convert_(scaled, out, "vllm/flash_attn_nhd", layout, shape, src_ids, dst_ids, cast=cast)
        return kvbm.torch.convert(scaled, "vllm/flash_attn_nhd", layout, shape, cast=cast)

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for blocks in (3, 5):
        src = Side("vllm/flash_attn_nhd", GQA, "bfloat16", blocks)
        mine, theirs = (Side(layout, GQA, dtype, 6, dst=True) for _ in range(2))
        ids = torch.tensor([2, 0]), torch.tensor([1, 5])
        one, other = (
            run(kvbm.torch.tensors(src.pool), kvbm.torch.tensors(into.pool), *ids)
            for run, into in ((compiled, mine), (forward, theirs))
        )
        assert held(one) == held(other) and np.array_equal(mine.after, theirs.after) and not mine.untouched


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch.export about torch
@pytest.mark.slow
def test_export() -> None:
    shape = str(kvbm.BlockShape(*GQA))

    class Offload(torch.nn.Module):
        def forward(self, *layers: Any) -> list[Any]:
            return kvbm.torch.convert(list(layers), "vllm/flash_attn_nhd", "record/mxfp8_tensors", shape, cast="amax")

    src = Side("vllm/flash_attn_nhd", GQA, "bfloat16", 3)
    tensors = kvbm.torch.tensors(src.pool)
    program = torch.export.export(Offload(), tuple(tensors))
    assert [node.args[4] for node in program.graph.nodes if node.target is CONVERT] == ["amax"]
    assert held(program.module()(*tensors)) == held(Offload()(*tensors))


def test_a_gradient_is_refused() -> None:
    shape = str(kvbm.BlockShape(*GQA))
    src = Side("nhd", GQA, "bfloat16", 2)
    tensors = [one.clone() for one in kvbm.torch.tensors(src.pool)]
    tensors[1].requires_grad_()
    with pytest.raises(kvbm.BindError, match=r"convert: input #1 requires a gradient, and a cast has none; call \.detach"):
        kvbm.torch.convert(tensors, "nhd", "record/mxfp8_tensors", shape, cast="amax")
    out = kvbm.torch.convert([one.detach() for one in tensors], "nhd", "record/mxfp8_tensors", shape, cast="amax")
    with pytest.raises(kvbm.BindError, match="convert_: input #1 requires a gradient"):
        kvbm.torch.convert_(tensors, out, "nhd", "record/mxfp8_tensors", shape, cast="amax")


BRIDGES = pytest.mark.parametrize("bridge", [kvbm.torch, kvbm.numpy], ids=["torch", "numpy"])


def views(bridge: Any, pool: Any) -> Any:
    return kvbm.torch.tensors(pool) if bridge is kvbm.torch else kvbm.numpy.arrays(pool)


@BRIDGES
def test_casts_that_are_refused(bridge: Any) -> None:
    sizes, mxfp8 = "nl=2,no=2,nh=3,nt=4,hd=64", "record/mxfp8_tensors"
    plain, codes, ints = Side("nhd", GQA, "bfloat16", 2), Side("universal", GQA, E4M3, 2), Side("universal", GQA, "int8", 2)
    one, two, three = (views(bridge, side.pool) for side in (plain, codes, ints))
    raw = [array.view(torch.uint8 if bridge is kvbm.torch else "uint8") for array in two]
    for call, words in (
        (lambda: bridge.convert(one, "nhd", mxfp8, sizes, cast="amax"), "names no dtype, and a cast makes"),
        (lambda: bridge.convert(one, "nhd", mxfp8, plain.shape, cast="max"), "cast: expected 'amax' or a kvbm"),
        (lambda: bridge.convert(one, "nhd", mxfp8, plain.shape, cast="0.5"), "cast: expected 'amax' or a kvbm"),
        (lambda: bridge.convert(one, "nhd", mxfp8, plain.shape), "same planes on both sides; cast='amax'"),
        (lambda: bridge.convert(one, "nhd", "hnd", codes.shape, cast="amax"), "no plane of scales takes part"),
        (lambda: bridge.convert(three, "universal", "hnd", codes.shape, cast=HALF), "both are quantised"),
        (lambda: bridge.convert_(three, two, "universal", "universal", codes.shape, cast=HALF), r"input #0 is int8, and the sh"),
        # Red: codes of e4m3 in arrays of int8 were read, and written, as int8.
        (lambda: bridge.convert_(three, one, "universal", "nhd", codes.shape, cast=HALF), r"input #0 is int8, and the shape says"),
        (lambda: bridge.convert_(one, three, "nhd", "universal", codes.shape, cast=HALF), r"output #0 is int8, and the shape says"),
        (lambda: bridge.convert(raw, "universal", "hnd", plain.shape, cast=HALF), "got uint8"),
    ):
        with pytest.raises(kvbm.KvbmError, match=words) as error:
            call()
        assert "convert" in str(error.value)
    assert plain.untouched and codes.untouched and ints.untouched


@pytest.mark.parametrize(
    "how",
    [
        "max", "", "nan", "0", "1e300", "x" * 10_000, "null", "[]", "[[1]]", '{"k": 1}',
        # Red: these meant Scale(1.0), or the last of two numbers, or ended in a RecursionError.
        "{}", '{"x": 5}', '{"k": null, "v": null}', '{"k": 1, "v": 1, "value": 3}', '{"k": 2, "k": 1, "v": 1}', "[" * 100_000,
    ],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_texts_that_are_no_cast(how: str) -> None:
    plain = Side("nhd", GQA, "bfloat16", 2)
    with pytest.raises(kvbm.PlanError, match=r"convert: .*expected") as error:
        torch.ops.kvbm.convert(kvbm.torch.tensors(plain.pool), "nhd", "record/mxfp8_tensors", str(plain.shape), how)
    assert len(str(error.value)) < 400


@BRIDGES
def test_arrays_of_another_format_than_their_plane(bridge: Any, tmp_path: Path) -> None:
    """Red: codes in tensors of e4m3 were taken for int8, as the layout says."""
    path, shape = tmp_path / "own.yaml", kvbm.BlockShape(*GQA)
    planes = casting.plane("data", "int8", "d", "d", 64), casting.plane("scale", "float32", "")
    path.write_text(casting.planar("[<>] b l o h t", *planes).yaml, "utf-8")
    plain = Side("nhd", GQA, "bfloat16", 2)
    given = views(bridge, plain.pool)
    out = bridge.convert(given, "nhd", path, shape, cast="amax")
    wrong = [out[0].view(torch.float8_e4m3fn if bridge is kvbm.torch else ml_dtypes.float8_e4m3fn), out[1]]
    for call in (
        lambda: bridge.convert_(given, wrong, "nhd", path, shape, cast="amax"),
        lambda: bridge.convert_(wrong, given, path, "nhd", shape, cast="amax"),
        lambda: bridge.convert(wrong, path, "nhd", shape, cast="amax"),
    ):
        with pytest.raises(kvbm.DTypeError, match=r"cast: plane 'data' of the .* is declared as int8, and its arrays are float8"):
            call()
    assert plain.untouched


# ---- the other bridges -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "quantises"), [BOTH[0], BOTH[5], BOTH[8], BOTH[9]], ids=lambda one: str(one)[:20])
@pytest.mark.slow  # 0.8 s
def test_jax(case: Any, quantises: bool) -> None:
    jax = pytest.importorskip("jax")
    bridge = pytest.importorskip("kvbm.jax")
    src, dst = ends(case, quantises, (3, 3))
    given = [jax.numpy.asarray(np.ascontiguousarray(one)) for one in kvbm.numpy.arrays(src.pool)]
    got = bridge.convert(given, *call(case, quantises), str(dst.shape), cast=cast_of(case[5]))
    assert held(got) == made(src, dst, case[5])
    assert [one.dtype for one in got] == [one.dtype for one in kvbm.numpy.arrays(dst.pool)]


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "quantises"), BOTH, ids=NAMES)
def test_on_a_gpu(case: Any, quantises: bool) -> None:
    """The same bits as on the CPU; ids on the host and on the GPU; in a graph."""
    names, cast = call(case, quantises), cast_of(case[5])
    src, dst = ends(case, quantises, (3, 3))
    want = made(src, dst, case[5])
    given = [one.cuda() for one in kvbm.torch.tensors(src.pool)]
    got = kvbm.torch.convert(given, *names, str(dst.shape), cast=cast)
    assert held(got) == want and [one.dtype for one in got] == [one.dtype for one in kvbm.torch.tensors(dst.pool)]
    some, _ = ends(case, quantises, (3, 3))
    swapped = made(some, dst, case[5], [2, 1, 0])
    ids = torch.tensor([2, 1, 0], device="cuda"), torch.tensor([0, 1, 2], device="cuda")
    for both in (([2, 1, 0], [0, 1, 2]), ids):
        out = [torch.zeros_like(one.view(torch.uint8)).view(one.dtype) for one in got]
        kvbm.torch.convert_(given, out, *names, str(dst.shape), *both, cast=cast)
        kvbm.torch.check_ids()
        assert held(out) == swapped
    out = [torch.zeros_like(one.view(torch.uint8)).view(one.dtype) for one in got]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kvbm.torch.convert_(given, out, *names, str(dst.shape), *ids, cast=cast)
    graph.replay()
    torch.cuda.synchronize()
    assert held(out) == swapped


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "number"), [("cupy", 0), ("cupy", 11), ("numba", 0), ("numba", 11), ("jax", 0), ("jax", 9)])
def test_bridges_on_a_gpu(name: str, number: int) -> None:
    """CuPy and Numba have no dtype for fp8: there, codes alone are int8."""
    case, quantises = BOTH[number]
    bridge = pytest.importorskip(f"kvbm.{name}")
    src, dst = ends(case, quantises, (3, 3))
    want = made(src, dst, case[5])
    arrays = kvbm.numpy.arrays(src.pool)
    if name == "jax":
        jax = pytest.importorskip("jax")
        given = [jax.device_put(np.ascontiguousarray(one), jax.devices("gpu")[0]) for one in arrays]
        got = [np.asarray(one) for one in bridge.convert(given, *call(case, quantises), str(dst.shape), cast=cast_of(case[5]))]
    elif name == "cupy":
        import cupy

        given = [cupy.asarray(one) for one in arrays]
        got = [cupy.asnumpy(one) for one in bridge.convert(given, *call(case, quantises), str(dst.shape), cast=cast_of(case[5]))]
    else:
        from numba import cuda

        given = [cuda.to_device(np.ascontiguousarray(one).view(kvbm.layout.shapes.numpy_name(one.dtype.name))) for one in arrays]
        got = [one.copy_to_host() for one in bridge.convert(given, *call(case, quantises), str(dst.shape), cast=cast_of(case[5]))]
    assert held(got) == want
