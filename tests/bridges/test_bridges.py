"""NumPy with ml_dtypes, JAX, Numba and CuPy: arrays of the real packages, bit for bit; and the checks that all bridges share."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvbm
import kvbm.numpy
import matrix
import oracle
from conftest import why_no_gpu
from kvbm import _bridge
from kvbm.memory import array_checks
from kvbm.memory.array_info import Array, describe
from memory import Bound, FakeCuda, aligned, numpy_views, placed

SIZES = "nl=2,no=2,nh=4,nt=16,hd=32"
PAIRS = [
    ("nhd", "universal"),
    ("vllm/flash_attn_nhd", "vllm/LBHNC"),
    ("hf/dynamic_cache", "vllm/paged_attn_v0"),
    ("vllm/paged_attn_v0", "nhd"),
]
DTYPES = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float32", "int16", "bool"]


def named(dtype: str) -> np.dtype[Any]:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def of(dtype: str) -> kvbm.BlockShape:
    return kvbm.load_shape(f"{SIZES},dtype={dtype}")


def source(name: str, dtype: str, blocks: int = 3) -> tuple[Bound, list[Any]]:
    """Coded arrays between guards; valid values for bool."""
    bound = Bound(name, of(dtype), blocks)
    if dtype == "bool":
        bound.buffer &= 1
        bound.before &= 1
    return bound, [array.view(named(dtype)) for array in bound.arrays]


def expected(src: Bound, name: str, dtype: str, blocks: int = 3) -> list[Any]:
    arena = placed(matrix.orders()[name], of(dtype), blocks).layout_bytes(0)
    ids = list(range(blocks))
    want = oracle.expected_bytes(src.arena, arena, src.before, np.zeros(arena.nbytes, np.uint8), ids, ids)
    return [view.view(named(dtype)) for view in numpy_views(arena, aligned(want), dtype)]


def same(got: Any, want: Any) -> bool:
    got = [np.asarray(one) for one in got]
    return len(got) == len(want) and all(
        a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(got, want, strict=True)
    )


# ---- NumPy -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pair", PAIRS, ids=">".join)
def test_numpy_and_ml_dtypes(pair: tuple[str, str], dtype: str) -> None:
    src, arrays = source(pair[0], dtype)
    out = kvbm.numpy.convert(arrays, *pair, shape=SIZES)
    assert same(out, expected(src, pair[1], dtype)) and src.untouched
    into = [np.zeros_like(one) for one in out]
    kvbm.numpy.convert_(arrays, into, *pair, of(dtype), [0, 1, 2], [0, 1, 2])
    assert same(into, out)


def test_numpy_into_guarded_memory() -> None:
    src, arrays = source("nhd", "bfloat16", 5)
    dst = Bound("vllm/LBHNC", of("bfloat16"), 6, dst=True)
    kvbm.numpy.convert_(arrays, dst.arrays, "nhd", "vllm/LBHNC", of("bfloat16"), [4, -1, 0], np.array([5, 0, 2]))
    want = oracle.expected_bytes(src.arena, dst.arena, src.before, dst.before, [4, 0], [5, 2])
    assert np.array_equal(dst.buffer, want), oracle.explain(dst.arena, dst.buffer, want)


def test_numpy_with_a_pitch_there_and_back() -> None:
    _, arrays = source("nhd", "float32")
    padded = kvbm.numpy.convert(arrays, "nhd", "vllm/tpu", SIZES)
    assert not padded[0].flags.c_contiguous
    assert same(kvbm.numpy.convert(padded, "vllm/tpu", "nhd", SIZES), arrays)


def test_numpy_has_no_streams() -> None:
    arrays = [np.zeros((2, 3, 4, 16, 2, 32), "float32")]
    with pytest.raises(kvbm.BindError, match=r"convert: stream: the pools are on the CPU.*leave stream out"):
        kvbm.numpy.convert(arrays, "vllm/LBHNC", "vllm/LBNHC", SIZES, stream=5)


def test_numpy_no_blocks() -> None:
    assert kvbm.numpy.convert([], "nhd", "universal", SIZES) == []
    (out,) = kvbm.numpy.convert(np.zeros((2, 0, 4, 16, 2, 32), "float32"), "vllm/LBHNC", "vllm/BLHNC", SIZES)
    assert out.shape == (0, 2, 4, 16, 2, 32)
    kvbm.numpy.convert_([np.zeros((2, 0, 4, 16, 2, 32), "float32")], [out], "vllm/LBHNC", "vllm/BLHNC", SIZES)
    with pytest.raises(kvbm.BindError, match=r"numpy.convert: inputs: vllm/LBHNC .* expects 1 arrays, got 0"):
        kvbm.numpy.convert([], "vllm/LBHNC", "vllm/BLHNC", SIZES)
    with pytest.raises(kvbm.BindError, match=r"numpy.convert: inputs: expected at least one array, which gives"):
        kvbm.numpy.convert([], "nhd", "vllm/LBHNC", SIZES)
    full = np.zeros((2, 1, 4, 16, 2, 32), "float32")
    with pytest.raises(kvbm.BindError, match=r"numpy.convert_: ids: one side has no blocks"):
        kvbm.numpy.convert_([np.zeros((2, 0, 4, 16, 2, 32), "float32")], [full], "vllm/LBHNC", "vllm/LBHNC", SIZES)
    with pytest.raises(kvbm.BindError, match=r"numpy.convert_: ids: one side has no blocks"):
        kvbm.numpy.convert_([full[:, :0]], [full], "vllm/LBHNC", "vllm/LBHNC", SIZES, 0, 0)
    kvbm.numpy.convert_([full[:, :0]], [full], "vllm/LBHNC", "vllm/LBHNC", SIZES, [], [])


def refused(match: str, change: Any, error: type[Exception] = ValueError, **more: Any) -> None:
    _, arrays = source("nhd", "float32")
    with pytest.raises(error, match=match) as info:
        kvbm.numpy.convert(change(list(arrays)), "nhd", "universal", **{"shape": SIZES, **more})
    assert isinstance(info.value, kvbm.KvbmError)


def put(index: int, new: Any) -> Any:
    def change(arrays: list[Any]) -> list[Any]:
        arrays[index] = new(arrays[index])
        return arrays

    return change


def test_numpy_refusals_name_the_input_and_the_remedy() -> None:
    refused(r"numpy.convert: inputs: nhd .* expects 4 arrays per block, so a multiple of that, got 11", lambda x: x[:-1])
    refused(r"numpy.convert: input #3: expected 3 axes \(t h d\).*\.reshape\(16, 4, 32\)", put(3, np.ravel))
    refused(r"numpy.convert: input #3: axis 't': expected 16, got 8", put(3, lambda x: x[:8]))
    refused(
        r"numpy.convert: input #2: expected a contiguous array, .* with that pitch\. .* a copy by numpy.ascontiguousarray works",
        put(2, lambda x: np.repeat(x, 2, axis=-1)[..., ::2]),
    )
    refused(r"numpy.convert: input #1 is int32, input #0 float32", put(1, lambda x: x.view(np.int32)), TypeError)
    refused(
        r"numpy.convert: input #0: expected bfloat16.* got float32", list, TypeError, shape=SIZES + ",dtype=bfloat16"
    )
    refused(
        r"numpy.convert: input #0: .*two formats of one byte",
        lambda x: [np.zeros(a.shape, named("float8_e5m2")) for a in x],
        TypeError,
        shape=SIZES + ",dtype=float8_e4m3fn",
    )
    refused(r"numpy.convert: input #1 is a builtins.list; expected a numpy.ndarray", put(1, lambda x: x.tolist()))
    refused(
        r"numpy.convert: input #0 is a memory.FakeCuda; expected a numpy.ndarray", put(0, lambda x: FakeCuda(x.shape))
    )
    refused(r"numpy.convert: shape", list, shape="nl=2")


def test_a_read_only_source_is_read_and_a_read_only_destination_refused() -> None:
    src, arrays = source("nhd", "float32")
    for array in arrays:
        array.flags.writeable = False
    out = kvbm.numpy.convert(arrays, "nhd", "universal", SIZES)
    assert same(out, expected(src, "universal", "float32"))
    out[1].flags.writeable = False
    with pytest.raises(kvbm.BindError, match=r"numpy.convert_: output #1 is read-only; .* pass a copy of it"):
        kvbm.numpy.convert_(arrays, out, "nhd", "universal", SIZES)
    mapped = np.frombuffer(bytes(out[0].nbytes), "float32").reshape(out[0].shape)
    with pytest.raises(kvbm.BindError, match=r"numpy.convert_: output #0 is read-only"):
        kvbm.numpy.convert_(arrays[:4], [mapped], "nhd", "universal", SIZES)


def test_overlaps() -> None:
    _, arrays = source("nhd", "float32")
    with pytest.raises(kvbm.BindError, match=r"numpy.convert_: nhd → nhd: .* overlap"):
        kvbm.numpy.convert_(arrays, [*arrays[1:], arrays[0]], "nhd", "nhd", SIZES)
    twice = [np.zeros((4, 2, 2, 16, 32), "float32")] * 3
    with pytest.raises(kvbm.BindError, match=r"numpy.convert_: universal: arrays 0 and 1 share memory"):
        kvbm.numpy.convert_(arrays, twice, "nhd", "universal", SIZES)


def test_pools_as_numpy_arrays() -> None:
    torch = pytest.importorskip("torch")
    shape = of("bfloat16")
    pool = kvbm.Pool.allocate(kvbm.load("vllm/LBHNC"), shape, 3)
    (array,) = kvbm.numpy.arrays(pool)
    assert array.dtype == named("bfloat16") and array.ctypes.data == int(pool.addresses[0])
    tensor = torch.zeros(array.shape, dtype=torch.bfloat16)
    (array,) = kvbm.numpy.arrays(kvbm.Pool(kvbm.load("vllm/LBHNC"), shape, [tensor]))
    assert array.dtype == named("bfloat16") and array.ctypes.data == tensor.data_ptr()


# ---- the gates, on a GPU that is not there ---------------------------------------------------------------------------


def test_foreign_devices_are_refused_by_name() -> None:
    who = array_checks.Caller("convert", "input")
    sized = array_checks.side_of("vllm/LBHNC", of("float32")).sized(3)
    (kind,) = sized.kinds
    look = lambda device, **rest: Array(0, kind.shape, kind.strides, "float32", device, **rest)  # noqa: E731
    side = array_checks.side_of("vllm/flash_attn_nhd", of("float32")).sized(3)
    seen = [Array(0, side.kinds[0].shape, side.kinds[0].strides, "float32", d) for d in ("cuda:0", "cuda:1")]
    with pytest.raises(kvbm.BindError, match=r"convert: input #1 is on cuda:1, input #0 on cuda:0; .*kvbm\.Transfer"):
        array_checks.require(who, seen, side)
    array_checks.require(who, [look("cuda:3")], sized)
    with pytest.raises(kvbm.BindError, match=r"convert: inputs: vllm/LBHNC .* holds 3 blocks in 1 arrays, got 2"):
        array_checks.require(who, [look("cpu")] * 2, sized)
    with pytest.raises(kvbm.BindError, match=r"convert: input #0 is read-only"):
        array_checks.require_writable(who, [look("cpu", readonly=True)])

    class Foreign:
        def __dlpack__(self, **rest: Any) -> None: ...

        def __dlpack_device__(self) -> tuple[int, int]:
            return (7, 0)  # Vulkan

    from kvbm._bridge import Bridge

    any_ = Bridge("any", "anything", lambda _: True, "copy", lambda *_: None)
    with pytest.raises(
        kvbm.BindError, match=r"any.convert: input #0: expected memory of the CPU or of a CUDA GPU, got DLPack"
    ):
        any_.convert([Foreign()], "vllm/LBHNC", "universal", SIZES)


@pytest.mark.parametrize("name", [*matrix.names(), "vllm/tpu"])
def test_sides_are_what_layouts_are(name: str) -> None:
    """Also if the number of blocks is a symbol: every number follows from two samples."""
    import fractions

    layout, shape = kvbm.load(name), of("bfloat16")
    side = array_checks.Side(layout, shape)
    for blocks in (1, 4, 9):
        resolved, sized = layout.resolve(shape, blocks), side.sized(blocks)
        assert sized.arrays == resolved.table_size
        for index, allocation in enumerate(resolved.allocations):
            kind = sized.kind(index)
            assert (kind.axes, kind.shape, kind.strides) == (allocation.axes, allocation.shape, allocation.strides)
        assert sized.nbytes == max(one.nbytes for one in resolved.allocations) or layout.pitch
        symbol = side.sized(fractions.Fraction(blocks))  # no int, but it can be calculated with
        assert [tuple(kind) for kind in symbol.kinds] == [tuple(kind) for kind in sized.kinds]
        assert side.blocks(array_checks.Caller("x", "input"), [a.shape for a in resolved.allocations]) == blocks


# ---- JAX -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def jax() -> Any:
    if why_no_gpu():
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # others want memory, too
    return pytest.importorskip("jax")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pair", PAIRS[:3], ids=">".join)
@pytest.mark.slow  # 1.0 s
def test_jax(jax: Any, pair: tuple[str, str], dtype: str) -> None:
    import kvbm.jax

    src, arrays = source(pair[0], dtype)
    with jax.default_device(jax.devices("cpu")[0]):
        given = [jax.numpy.asarray(array) for array in arrays]
        out = kvbm.jax.convert(given, *pair, shape=SIZES)
        assert all(isinstance(one, jax.Array) and one.dtype == given[0].dtype for one in out)
        assert same(out, expected(src, pair[1], dtype))
        assert same(jax.jit(lambda *x: x)(*out), expected(src, pair[1], dtype))  # they are arrays like any other


def test_jax_reads_where_the_array_lies_and_hands_its_result_over(jax: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither input nor result is copied."""
    import kvbm.jax

    made = []
    one = jax.device_put(np.zeros((2, 3, 4, 16, 2, 32), "float32"), jax.devices("cpu")[0])
    look = kvbm.jax._look(one, "x")
    assert look.address == one.unsafe_buffer_pointer() and look.readonly and look.device == "cpu"
    empty = kvbm.jax._BRIDGE.empty

    def noted(kind: Any, like: Any) -> Any:
        made.append(empty(kind, like))
        return made[-1]

    monkeypatch.setattr(kvbm.jax, "_BRIDGE", kvbm.jax._BRIDGE._replace(empty=noted))
    (out,) = kvbm.jax.convert([one], "vllm/LBHNC", "vllm/BLHNC", SIZES)
    assert out.unsafe_buffer_pointer() == made[0].memory.ctypes.data


def test_jax_refusals(jax: Any) -> None:
    import kvbm.jax

    with jax.default_device(jax.devices("cpu")[0]):
        one = jax.numpy.zeros((2, 3, 4, 16, 2, 32))
        names = ("vllm/LBHNC", "vllm/BLHNC", SIZES)
        with pytest.raises(kvbm.BindError, match=r"jax.convert: input #0 is traced by jax.jit, .* outside of jit"):
            jax.jit(lambda x: kvbm.jax.convert([x], *names))(one)
        with pytest.raises(kvbm.BindError, match=r"jax.convert: input #0 is a numpy.ndarray; expected a jax.Array"):
            kvbm.jax.convert([np.asarray(one)], *names)
        with pytest.raises(kvbm.BindError, match=r"jax.convert: input #0: expected 6 axes"):
            kvbm.jax.convert([one.ravel()], *names)
        with pytest.raises(kvbm.BindError, match=r"jax.convert: the layout's pitch .* JAX's arrays have no strides"):
            kvbm.jax.convert([one], "vllm/LBHNC", "vllm/tpu", SIZES)
        # Read-only: sources, never destinations.
        assert not hasattr(kvbm.jax, "convert_")
        array = np.asarray(one)
        with pytest.raises(kvbm.BindError, match=r"numpy.convert_: output #0 is read-only"):
            kvbm.numpy.convert_([array.copy()], [array], "vllm/LBHNC", "vllm/LBHNC", SIZES)


def test_jax_arrays_on_several_devices_are_refused() -> None:
    pytest.importorskip("jax")
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [sys.executable, Path(__file__).parents[1] / "programs" / "jax_devices.py", SIZES],
        capture_output=True,
        text=True,
        check=True,
        env=env,
    )
    assert done.stdout.startswith("jax.convert: input #0 is spread over 2 devices; expected one: convert shard.data")


# ---- Numba -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # 0.6 s
def test_numba_on_the_cpu_works_on_numpy_s_arrays() -> None:
    """A compiled function writes the input of a conversion, and reads its output."""
    numba = pytest.importorskip("numba")

    @numba.njit
    def fill(array: Any) -> None:
        flat = array.ravel()
        for i in range(flat.size):
            flat[i] = i

    one = np.zeros((2, 3, 4, 16, 2, 32), np.float32)
    fill(one)
    (out,) = kvbm.numpy.convert([one], "vllm/LBHNC", "vllm/BLHNC", SIZES)
    assert np.array_equal(out, one.swapaxes(0, 1)) and np.array_equal(one.ravel(), np.arange(one.size))


def test_numba_refuses_what_is_no_device_array() -> None:
    pytest.importorskip("numba")
    try:
        import kvbm.numba
    except ImportError as error:  # Numba's CUDA half is a package of its own in newer versions
        pytest.skip(str(error))
    with pytest.raises(
        kvbm.BindError, match=r"numba.convert: input #0 is a numpy.ndarray; expected a numba.cuda device"
    ):
        kvbm.numba.convert([np.zeros((2, 3, 4, 16, 2, 32), "float32")], "vllm/LBHNC", "vllm/BLHNC", SIZES)
    pool = kvbm.Pool.allocate(kvbm.load("vllm/LBHNC"), of("float32"), 3)
    with pytest.raises(kvbm.BindError, match=r"numba.arrays: the pool is on cpu"):
        kvbm.numba.arrays(pool)


# ---- on a GPU --------------------------------------------------------------------------------------------------------

GPU_DTYPES = ["float32", "int16", "uint8"]


def test_a_stream_for_jax_leaves_the_current_device(monkeypatch: pytest.MonkeyPatch, jax: Any) -> None:
    import kvbm.jax

    current = ["the caller's"]

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def set_current(self) -> None:
            current[0] = f"cuda:{self.index}"

        def create_stream(self) -> str:
            if self.index == 8:
                raise RuntimeError("no such device")
            return f"a stream of {current[0]}"

    driver = SimpleNamespace(
        cuCtxGetCurrent=lambda: (0, current[0]), cuCtxSetCurrent=lambda to: current.__setitem__(0, to)
    )
    monkeypatch.setitem(sys.modules, "cuda.core", SimpleNamespace(Device=Device))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    make = kvbm.jax._stream_of_device.__wrapped__
    assert make(7) == "a stream of cuda:7" and current == ["the caller's"]
    with pytest.raises(RuntimeError, match="no such device"):
        make(8)
    assert current == ["the caller's"]


def test_cupy_fences_a_stream_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's pool reuses memory in the order of its current stream, so the named stream must be fenced on both sides."""
    done: list[str] = []

    class Stream:
        def __init__(self, handle: int) -> None:
            self.handle = handle

        def record(self) -> str:
            done.append(f"{self.handle} records")
            return f"what {self.handle} had"

        def wait_event(self, event: str) -> None:
            done.append(f"{self.handle} waits for {event}")

    class Memory:
        def __init__(self, shape: Any, dtype: Any, memory: Any = None, strides: Any = None) -> None:
            self.array, self.strides = np.zeros(shape, dtype), strides
            self.dtype, self.device = self.array.dtype, contextlib.nullcontext()
            done.append(f"alloc {self.array.nbytes}" if memory else "input")

    cuda = SimpleNamespace(
        get_current_stream=lambda: Stream(1), ExternalStream=Stream, alloc=lambda nbytes: f"{nbytes} bytes", Device=None
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=Memory, cuda=cuda))
    found = importlib.util.find_spec("kvbm.cupy")
    assert found and found.loader
    module = importlib.util.module_from_spec(found)  # not imported: sys.modules and kvbm keep no module above a fake CuPy
    found.loader.exec_module(module)
    monkeypatch.setattr(_bridge, "convert_pools", lambda *_, stream, **__: done.append(f"copy on {stream}"))
    looking = module._BRIDGE._replace(look=lambda memory, what: describe(memory.array, what))
    given = [Memory((2, 3, 4, 16, 2, 32), "float32")]
    (out,) = looking.convert(given, "vllm/LBHNC", "vllm/BLHNC", SIZES, stream=7)
    fenced = ["1 records", "7 waits for what 1 had", "copy on 7", "7 records", "1 waits for what 7 had"]
    assert [line for line in done if line not in ("input", f"alloc {out.array.nbytes}")] == fenced
    assert done.index(f"alloc {out.array.nbytes}") > done.index("7 waits for what 1 had")
    done.clear()
    looking.convert_(given, [out], "vllm/LBHNC", "vllm/BLHNC", SIZES, stream=7)
    assert done == fenced
    done.clear()
    looking.convert_(given, [out], "vllm/LBHNC", "vllm/BLHNC", SIZES)
    assert done == ["copy on None"]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # CuPy's, about itself
@pytest.mark.parametrize("dtype", [*GPU_DTYPES, "bfloat16"])
@pytest.mark.parametrize("pair", PAIRS, ids=">".join)
def test_cupy(pair: tuple[str, str], dtype: str) -> None:
    cupy = pytest.importorskip("cupy")
    import kvbm.cupy

    src, arrays = source(pair[0], dtype)
    if dtype == "bfloat16":  # its bits: not every CuPy knows the dtype
        arrays = [array.view(np.uint16) for array in arrays]
    want = [one.view(arrays[0].dtype) for one in expected(src, pair[1], dtype)]
    shape = f"{SIZES},dtype={dtype}"
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        given = [cupy.asarray(array) for array in arrays]
        out = kvbm.cupy.convert(given, *pair, shape)
        into = [cupy.zeros_like(one) for one in out]
        kvbm.cupy.convert_(given, into, *pair, shape, cupy.arange(3), cupy.arange(3))
        got, again = [one.get() for one in out], [one.get() for one in into]
    stream.synchronize()
    assert same(got, want) and same(again, want)
    named_stream = kvbm.cupy.convert(given, *pair, shape, stream=stream)
    stream.synchronize()
    assert same([one.get() for one in named_stream], want)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_cupy_pools_and_refusals() -> None:
    cupy = pytest.importorskip("cupy")
    import kvbm.cupy

    pool = kvbm.Pool.allocate(kvbm.load("vllm/LBHNC"), of("float32"), 3, "cuda:0")
    (view,) = kvbm.cupy.arrays(pool)
    assert view.data.ptr == int(pool.addresses[0]) and view.dtype == np.float32
    view[...] = 7
    cupy.cuda.get_current_stream().synchronize()
    store = kvbm.Pool.allocate(kvbm.load("vllm/BLHNC"), of("float32"), 3, "cuda:0")
    stream = cupy.cuda.Stream(non_blocking=True)
    kvbm.convert(pool, store, stream=stream)
    stream.synchronize()
    assert bool((kvbm.cupy.arrays(store)[0] == 7).all())
    with pytest.raises(kvbm.BindError, match=r"cupy.convert: input #0 is a numpy.ndarray; expected a cupy.ndarray"):
        kvbm.cupy.convert([np.zeros((2, 3, 4, 16, 2, 32), "float32")], "vllm/LBHNC", "vllm/BLHNC", SIZES)
    with pytest.raises(kvbm.BindError, match=r"cupy.convert: input #0: .* a copy by cupy.ascontiguousarray works"):
        kvbm.cupy.convert([view.repeat(2, -1)[..., ::2]], "vllm/LBHNC", "vllm/BLHNC", SIZES)
    with pytest.raises(kvbm.BindError, match=r"cupy.convert: input #0: .* it is a reversed view"):
        kvbm.cupy.convert([view[..., ::-1]], "vllm/LBHNC", "vllm/BLHNC", SIZES)
    with pytest.raises(kvbm.BindError, match=r"cupy.arrays: the pool is on cpu"):
        kvbm.cupy.arrays(kvbm.Pool.allocate(kvbm.load("vllm/LBHNC"), of("float32"), 3))
    del view


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # Numba's, of small grids and of its own deprecations
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("pair", PAIRS, ids=">".join)
def test_numba(pair: tuple[str, str], dtype: str) -> None:
    cuda = pytest.importorskip("numba.cuda")
    import kvbm.numba

    src, arrays = source(pair[0], dtype)
    want = expected(src, pair[1], dtype)
    given = [cuda.to_device(array) for array in arrays]
    out = kvbm.numba.convert(given, *pair, SIZES)
    assert same([one.copy_to_host() for one in out], want)
    stream = cuda.stream()
    into = [cuda.to_device(np.zeros_like(one), stream=stream) for one in want]
    kvbm.numba.convert_(given, into, *pair, SIZES, [0, 1, 2], [0, 1, 2], stream=stream)
    got = [one.copy_to_host(stream=stream) for one in into]
    stream.synchronize()
    assert same(got, want)
    pool = kvbm.Pool.allocate(kvbm.load("vllm/LBHNC"), of(dtype), 3, "cuda:0")
    (view,) = kvbm.numba.arrays(pool)
    assert view.device_ctypes_pointer.value == int(pool.addresses[0])
    del view


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int16"])
@pytest.mark.parametrize("pair", PAIRS[:3], ids=">".join)
def test_jax_on_a_gpu(jax: Any, pair: tuple[str, str], dtype: str) -> None:
    import kvbm.jax

    try:
        device = jax.devices("gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"this JAX has no GPU: {error}")
    src, arrays = source(pair[0], dtype)
    given = [jax.device_put(array, device) for array in arrays]
    out = kvbm.jax.convert(given, *pair, shape=SIZES)
    assert all(one.devices() == {device} and one.dtype == given[0].dtype for one in out)
    assert same(out, expected(src, pair[1], dtype))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_jax_on_a_gpu_waits_for_the_work_that_makes_the_array(jax: Any) -> None:
    import kvbm.jax

    try:
        device = jax.devices("gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"this JAX has no GPU: {error}")

    @jax.jit
    def slow(x: Any, square: Any) -> Any:
        """Adds 1 after matrix products that take tens of milliseconds."""
        last = jax.lax.fori_loop(0, 200, lambda _, y: (y @ square) / 2048, square)
        return x + 1 + 0 * last.sum()

    square = jax.device_put(np.ones((2048, 2048), "float32"), device)
    for _ in range(2):
        one = jax.device_put(np.arange(2 * 3 * 4 * 16 * 2 * 32, dtype="float32").reshape(2, 3, 4, 16, 2, 32), device)
        made = slow(one, square)
        (out,) = kvbm.jax.convert([made], "vllm/LBHNC", "vllm/BLHNC", SIZES)
        assert np.array_equal(np.asarray(out), np.asarray(one).swapaxes(0, 1) + 1)
