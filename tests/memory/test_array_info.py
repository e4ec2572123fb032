"""Reading array descriptions: which arrays are refused because their bytes are not their elements, and which arrays overlap."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvbm
from kvbm.layout import spec
from kvbm.memory import array_info as arrays
from kvbm.memory.array_info import describe, find_overlap, flat_integers
from memory import FakeCuda

SHAPE = kvbm.BlockShape(nl=1, no=2, nh=3, nt=4, hd=8, dtype="float32")
WHOLE = (1, 2, 3, 4, 2, 8)  # vllm/LBHNC: l b h t o d
OTHER = ">" if sys.byteorder == "little" else "<"


def bind(array: Any, dtype: str = "float32") -> kvbm.Pool:
    shape = kvbm.BlockShape(nl=1, no=2, nh=3, nt=4, hd=8, dtype=dtype)
    return kvbm.Pool(kvbm.load("vllm/LBHNC"), shape, array)


class Interface:
    """An object with ``__cuda_array_interface__``; `changes` make it wrong."""

    device = 0

    def __init__(self, **changes: Any) -> None:
        interface = {"shape": WHOLE, "typestr": "<f4", "data": (1 << 40, False), "strides": None, "version": 3}
        self.__cuda_array_interface__ = {k: v for k, v in (interface | changes).items() if v != "left out"}


# ---- bytes that are not the elements that the dtype stands for -------------------------------------------------------

DTYPES = {
    "swapped": (lambda: np.zeros(WHOLE, f"{OTHER}f4"), "float32", "byte order"),
    "swapped, of a structure": (lambda: np.zeros(WHOLE, f"{OTHER}u2"), "uint16", "byte order"),
    "a structure of two bytes": (lambda: np.zeros(WHOLE, [("a", "u1"), ("b", "u1")]), "bfloat16", "structured"),
    "a structure of one byte": (lambda: np.zeros(WHOLE, [("a", "u1")]), "float8_e4m3fn", "structured"),
    "swapped on a GPU": (lambda: Interface(typestr=f"{OTHER}f4"), "float32", "byte order"),
    "swapped bits on a GPU": (lambda: Interface(typestr=f"{OTHER}V2"), "bfloat16", "byte order"),
    "a structure on a GPU": (
        lambda: Interface(typestr="|V2", descr=[("a", "|u1"), ("b", "|u1")]), "bfloat16", "structured",
    ),
    "dates": (lambda: np.zeros(WHOLE, "M8[s]"), "int64", "datetime64"),
    "spans of time": (lambda: np.zeros(WHOLE, "m8[s]"), "float64", "timedelta64"),
    "objects": (lambda: np.zeros(WHOLE, object), "int64", "object"),
}  # fmt: skip


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_of_the_right_size_and_another_meaning(name: str) -> None:
    make, dtype, match = DTYPES[name]
    with pytest.raises(kvbm.DTypeError, match=match):
        bind(make(), dtype)


@pytest.mark.parametrize("dtype", ["int4", "uint4", "float4_e2m1fn"])
def test_four_bits_in_a_byte_of_their_own(dtype: str) -> None:
    """ml_dtypes has one element per byte, a block two: the same number of bytes holds half as many elements."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.zeros((1, 2, 3, 4, 2, 4), getattr(ml_dtypes, dtype))
    with pytest.raises(kvbm.DTypeError, match=r"one byte per element.*pack them"):
        bind(array, dtype)
    assert bind(array.view("uint8"), dtype).num_blocks == 2


def test_raw_bytes_and_rich_dtypes_still_stand_in() -> None:
    assert bind(np.zeros(WHOLE, "V2"), "bfloat16").num_blocks == 2
    assert bind(Interface(typestr="|V2", descr=[("", "|V2")]), "bfloat16").num_blocks == 2
    rich = Interface(typestr="<V2")
    rich.dtype = SimpleNamespace(name="bfloat16")  # type: ignore[attr-defined]
    assert describe(rich).dtype == "bfloat16"
    rich.dtype = SimpleNamespace(name="float32")  # type: ignore[attr-defined]
    assert describe(rich).dtype == "void16", "a name of another width is not believed"


# ---- protocols that are kept to in part ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"typestr": "left out"}, {"typestr": "nonsense"}, {"typestr": None, "data": None}, {"data": "left out"}, {"data": 5},
        {"data": ("x", False)}, {"shape": "left out"}, {"shape": 7}, {"shape": (1.5,)}, {"shape": (-1, 2)}, {"strides": (4,)},
        {"strides": "abc"}, {"descr": 5}, {"data": (-8, False)}, {"data": (1 << 70, False)},
    ],
    ids=str,
)  # fmt: skip
def test_malformed_cuda_array_interface(changes: Any) -> None:
    with pytest.raises(kvbm.BindError, match=r"array 0: the __cuda_array_interface__ of Interface is malformed"):
        bind(Interface(**changes))


def test_cuda_arrays_without_their_values() -> None:
    with pytest.raises(kvbm.BindError, match="has no memory: its address is 0"):
        bind(Interface(data=(0, False)))
    with pytest.raises(kvbm.BindError, match="a masked array"):
        bind(Interface(mask=Interface()))

    class Deleted:
        @property
        def __cuda_array_interface__(self) -> Any:
            raise RuntimeError("Array has been deleted.")

    with pytest.raises(kvbm.BindError, match=r"Deleted has no memory: Array has been deleted"):
        bind(Deleted())
    bind_not_interface = SimpleNamespace(__cuda_array_interface__=17)
    with pytest.raises(kvbm.BindError, match="malformed"):
        bind(bind_not_interface)


@pytest.mark.parametrize("answer", [None, (), (1,), (1, 0, 0), "xy", (None, 0), 7])
def test_malformed_dlpack_device(answer: Any) -> None:
    class Foreign:
        def __dlpack_device__(self) -> Any:
            return answer

        def __dlpack__(self, **rest: Any) -> Any: ...

    with pytest.raises(kvbm.BindError, match=r"array 0: the __dlpack_device__ of Foreign is malformed"):
        bind(Foreign())


def test_the_ordinal_is_cuda_s_and_not_jax_s() -> None:
    """JAX numbers the devices of all processes; the GPU's own number is `local_hardware_id`."""
    array = FakeCuda(WHOLE, "float32")
    array.device = SimpleNamespace(id=9, local_hardware_id=1)  # type: ignore[assignment]
    assert describe(array).device == "cuda:1"
    array.device = SimpleNamespace(id=3)  # type: ignore[assignment]  # CuPy's
    assert describe(array).device == "cuda:3"


def test_a_fresh_export_is_kept() -> None:
    """If `__dlpack__` creates an array for each call, nothing else keeps its memory alive."""
    import weakref

    exported: list[Any] = []

    class Fresh:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **rest: Any) -> Any:
            class Watched(np.ndarray): ...

            made = np.arange(np.prod(WHOLE), dtype="float32").reshape(WHOLE).view(Watched)
            exported.append(weakref.ref(made))
            return made.__dlpack__(**rest)

    pool = bind(Fresh())
    assert exported[-1]() is not None and exported[-1]().ctypes.data == pool.addresses[0]
    out = kvbm.Pool.allocate(pool.layout, pool.shape, 2)
    kvbm.convert(pool, out)
    assert out.arrays[0].ravel().tolist() == list(range(int(np.prod(WHOLE))))
    del pool
    assert exported[-1]() is None


def test_masked_arrays_are_refused() -> None:
    with pytest.raises(kvbm.BindError, match=r"a masked array.*array\.data"):
        bind(np.ma.masked_array(np.zeros(WHOLE, "float32"), mask=True))


# ---- tensors whose values are not what lies at their address ---------------------------------------------------------


def tensors(torch: Any) -> dict[str, tuple[Any, str]]:
    from torch._subclasses import FakeTensorMode

    def cut(tensor: Any) -> Any:
        tensor.untyped_storage().resize_(16)
        return tensor

    def gone(tensor: Any) -> Any:
        tensor.untyped_storage().resize_(0)
        return tensor

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls: Any, inner: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        @classmethod
        def __torch_dispatch__(cls, *rest: Any, **more: Any) -> Any:
            raise AssertionError("nobody calls an operator")

    with FakeTensorMode():
        fake = torch.zeros(WHOLE)
    zeros = torch.zeros(WHOLE)
    return {
        "fake": (fake, "FakeTensor does not hold its values itself"),
        "meta": (zeros.to("meta"), "expected a CPU or CUDA tensor, got one on meta"),
        "sparse": (zeros.to_sparse(), "expected a dense tensor, got a sparse_coo one"),
        "quantized": (torch._make_per_tensor_quantized_tensor(zeros.byte(), 0.1, 0), "got a quantized one"),
        "negative": (torch._neg_view(zeros), "a view of the negative of its memory"),
        "conjugate": (torch.zeros(WHOLE, dtype=torch.complex64).conj(), "a view of the conjugate"),
        "of no memory": (torch._efficientzerotensor(WHOLE), "the tensor has no memory"),
        "resized to nothing": (gone(zeros.clone()), "storage has 0 bytes from its start"),
        "resized to less": (cut(zeros.clone()), "storage has 16 bytes from its start"),
        "a wrapper": (Wrapper(zeros), "Wrapper does not hold its values itself"),
    }


@pytest.mark.parametrize(
    "name",
    ["fake", "meta", "sparse", "quantized", "negative", "conjugate", "of no memory", "resized to nothing", "resized to less",
     "a wrapper"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow  # 0.5 s
@pytest.mark.sanitize
def test_tensors_without_memory_of_their_own(name: str, torch: Any) -> None:
    tensor, match = tensors(torch)[name]
    with pytest.raises(kvbm.BindError, match=f"array 0: .*{match}"):
        bind(tensor)


def test_tensors_inside_a_transform(torch: Any) -> None:
    with pytest.raises(kvbm.BindError, match="the tensor has no memory"):
        torch.func.vmap(lambda one: bind(one) and one)(torch.zeros(3, *WHOLE))


# ---- integers, which every call with digests looks at ----------------------------------------------------------------


def integers(torch: Any) -> dict[str, Any]:
    """Three integers of 64 bits, and what is like them."""
    from torch._subclasses import FakeTensorMode

    class Own(np.ndarray): ...

    def locked(array: Any) -> Any:
        array.flags.writeable = False
        return array

    def resized(tensor: Any, nbytes: int) -> Any:
        tensor.untyped_storage().resize_(nbytes)
        return tensor

    memory, zeros = np.zeros(8, np.uint64), torch.zeros(3, dtype=torch.int64)
    plain = {"shape": (3,), "typestr": "<u8"}
    elsewhere = Interface(**plain)
    elsewhere.device = -1
    with FakeTensorMode():
        fake = torch.zeros(3, dtype=torch.int64)
    some = {
        "uint64": memory[:3], "int64": memory[2:5].view(np.int64), "longlong": np.zeros(3, "longlong"),
        "float64": memory[:3].view(float), "dates": memory[:3].view("M8[s]"), "swapped": np.zeros(3, f"{OTHER}u8"),
        "a structure": np.zeros(3, [("a", "u8")]), "narrow": np.zeros(3, np.uint32), "two axes": memory[:6].reshape(3, 2),
        "a column": memory[:3].reshape(3, 1), "a row": memory[:3].reshape(1, 3), "none": memory[:0], "one": memory[:1],
        "one of many": memory[::8], "a number": memory[0], "no axis": memory[:1].reshape(()), "every other": memory[:6:2],
        "backwards": memory[2::-1], "one value": np.lib.stride_tricks.as_strided(memory, (3,), (0,)), "more": memory[:4],
        "fewer": memory[:2], "locked": locked(memory[:3].copy()), "a subclass": memory[:3].view(Own),
        "masked": np.ma.masked_array(memory[:3]), "not aligned": np.zeros(25, np.uint8)[1:].view(np.uint64),
        "a tensor": zeros, "a tensor, unsigned": zeros.to(torch.uint64), "part of a tensor": torch.zeros(9).long()[3:6],
        "a tensor of floats": zeros.double(), "every other of a tensor": torch.zeros(6).long()[::2],
        "a tensor of more": torch.zeros(4).long(), "a tensor of two axes": zeros[:, None], "one of a tensor": zeros[:1],
        "an expanded tensor": zeros[:1].expand(3), "no axis of a tensor": zeros[0], "none of a tensor": zeros[:0],
        "negative": torch._neg_view(zeros.clone()), "sparse": zeros.to_sparse(), "meta": zeros.to("meta"), "fake": fake,
        "a parameter": torch.nn.Parameter(zeros, requires_grad=False), "of no memory": torch._efficientzerotensor(3).long(),
        "quantized": torch._make_per_tensor_quantized_tensor(zeros.int(), 0.1, 0),
        "nested": torch.nested.nested_tensor([zeros]), "conjugate": torch.zeros(3, dtype=torch.complex64).conj(),
        "less memory": resized(zeros.clone(), 16), "no memory": resized(zeros.clone(), 0),
        "on a GPU": Interface(**plain), "on a GPU, signed": Interface(**plain | {"typestr": "<i8"}), "nowhere": elsewhere,
        "no interface": object(), "nothing": None, "a list": [0, 0, 0],
    }  # fmt: skip
    changes = [
        {"typestr": "<f8"}, {"typestr": f"{OTHER}u8"}, {"typestr": None}, {"typestr": "left out"}, {"shape": (4,)}, {"shape": [3]},
        {"shape": (3.0,)}, {"shape": (3, 1)}, {"shape": "left out"}, {"strides": (8,)}, {"strides": (16,)}, {"strides": (0,)},
        {"strides": [8]}, {"strides": "left out"}, {"data": (1 << 40, True)}, {"data": (0, False)}, {"data": (-8, False)},
        {"data": (1 << 64, False)}, {"data": (np.uint64(1 << 40), False)}, {"data": (float(1 << 40), False)}, {"data": 5},
        {"data": "left out"}, {"mask": (1,)}, {"descr": [("", "<u8")]}, {"descr": [("a", "<u8")]}, {"descr": 5},
        {"shape": np.array([3])}, {"strides": np.array([8])}, {"shape": (1,), "strides": (16,)},
        {"shape": (0,), "data": (0, False)},
    ]  # fmt: skip
    return some | {f"on a GPU, {change}": Interface(**plain | change) for change in changes}


@pytest.mark.sanitize
@pytest.mark.slow  # half a second
@pytest.mark.filterwarnings("ignore")
def test_a_quick_look_sees_what_a_long_one_does(torch: Any) -> None:
    """The fast check accepts only arrays that `describe` accepts with the same result, and all usual ones."""
    taken = set()
    for name, array in integers(torch).items():
        for count in (0, 1, 2, 3, 4):
            quick = flat_integers(array, count)
            if quick is None:
                continue
            taken.add(name)
            told = describe(array)
            assert told.dtype in ("uint64", "int64") and told.shape == (count,) and not told.readonly, name
            assert told.strides == (8,) or count < 2, name
            assert quick[:2] == (told.address, -1 if told.device == "cpu" else int(told.device[5:])), name
            assert (quick[2] is None) == (told.owner is None), name
            assert quick[2] is None or quick[2].data_ptr() == told.owner.data_ptr(), name
    assert taken >= {"uint64", "one of many", "a tensor", "a tensor, unsigned", "part of a tensor", "on a GPU, signed"}
    assert not taken & {"locked", "negative", "less memory", "swapped", "on a GPU, {'data': (1099511627776, True)}"}


def test_integers_inside_a_transform(torch: Any) -> None:
    seen = torch.func.vmap(lambda one: one if flat_integers(one, 3) is None else 1 / 0)(torch.zeros(2, 3).long())
    assert seen.shape == (2, 3)


# ---- arrays that change while they are bound -------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["data", "resize_", "set_"])
@pytest.mark.parametrize("what", ["source", "destination"])
def test_tensors_that_have_other_memory_by_now(how: str, what: str, torch: Any) -> None:
    tensor, other = torch.ones(WHOLE), kvbm.Pool.allocate(kvbm.load("vllm/LBHNC"), SHAPE, 2)
    pool = bind(tensor)
    pair = (pool, other) if what == "source" else (other, pool)
    transfer = kvbm.Transfer(*pair)
    kvbm.convert(*pair)
    match how:
        case "data":
            tensor.data = torch.full(WHOLE, 2.0)
        case "resize_":
            tensor.untyped_storage().resize_(0)
        case "set_":
            tensor.set_(torch.full(WHOLE, 3.0))
    for call in (lambda: kvbm.convert(*pair), transfer.copy):
        with pytest.raises(
            kvbm.BindError, match=r"array 0 has other memory than when it was bound.*create a new pool"
        ):
            call()


def test_a_copy_into_a_tensor_counts_as_a_write(torch: Any) -> None:
    """A tensor that autograd saved and a copy overwrote must not be used: the gradient would be wrong."""
    source = kvbm.Pool.allocate(kvbm.load("vllm/LBHNC"), SHAPE, 2)
    for call in (lambda a, b: kvbm.convert(a, b), lambda a, b: kvbm.Transfer(a, b).copy()):
        leaf = torch.ones(WHOLE, requires_grad=True)
        product = (leaf * leaf).sum()
        call(source, bind(leaf))
        assert leaf._version == 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
    whole = torch.ones(2, *WHOLE[1:])
    pool = kvbm.Pool(kvbm.load("vllm/flash_attn_nhd"), kvbm.BlockShape(2, 2, 1, 4, 8, "float32"), [
        torch.ones(2, 2, 4, 1, 8), whole.view(-1)[:128].view(2, 2, 4, 1, 8),
    ])  # fmt: skip
    kvbm.convert(kvbm.Pool.allocate(pool.layout, pool.shape, 2), pool)
    assert whole._version == pool.arrays[0]._version == 1, "a view has the version of its base"
    with torch.inference_mode():
        plain = torch.ones(WHOLE)
    kvbm.convert(source, bind(plain))


def test_a_copy_that_fails_is_no_write(torch: Any) -> None:
    tensor = torch.ones(WHOLE)
    with pytest.raises(kvbm.BindError):
        kvbm.convert(kvbm.Pool.allocate(kvbm.load("vllm/LBHNC"), SHAPE, 2), bind(tensor), [0], [9])
    assert tensor._version == 0


def test_arrays_that_are_locked_after_binding() -> None:
    array = np.zeros(WHOLE, "float32")
    source, target = kvbm.Pool.allocate(kvbm.load("vllm/LBHNC"), SHAPE, 2), bind(array)
    transfer = kvbm.Transfer(source, target)
    kvbm.convert(source, target)
    array.flags.writeable = False
    for call in (lambda: kvbm.convert(source, target), transfer.copy):
        with pytest.raises(kvbm.BindError, match="the destination is read-only"):
            call()
    kvbm.convert(target, source)
    array.flags.writeable = True
    kvbm.convert(source, target)


# ---- what is no pool, and cannot be one elsewhere --------------------------------------------------------------------


def test_what_is_no_pool() -> None:
    pool = bind(np.zeros(WHOLE, "float32"))
    for call in (kvbm.convert, kvbm.Transfer):
        for pair, what in (((1, 2), "source"), ((pool, [pool]), "destination"), ((None, pool), "source")):
            with pytest.raises(kvbm.BindError, match=rf"the {what}: expected a kvbm\.Pool or a section of one, got"):
                call(*pair)


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_pool_stays_where_its_memory_is(how: Any) -> None:
    with pytest.raises(TypeError, match=r"Pool\(vllm/LBHNC.*cannot be pickled or copied"):
        how(bind(np.zeros(WHOLE, "float32")))


@pytest.mark.parametrize("number", [2.0, "2", True, None, 2 + 0j])
def test_numbers_of_blocks_are_integers(number: Any) -> None:
    with pytest.raises(kvbm.BindError, match="num_blocks: expected an integer"):
        kvbm.Pool.allocate(kvbm.load("nhd"), SHAPE, number)
    whole = [np.zeros(array.shape, array.dtype) for array in kvbm.Pool.allocate(kvbm.load("nhd"), SHAPE, 2).arrays]
    if number is not None:
        with pytest.raises(kvbm.BindError, match="num_blocks: expected an integer"):
            kvbm.Pool(kvbm.load("nhd"), SHAPE, whole, num_blocks=number)
    assert kvbm.Pool.allocate(kvbm.load("nhd"), SHAPE, np.int64(2)).num_blocks == 2  # type: ignore[arg-type]


# ---- arrays that overlap: by the bytes that their elements hold ------------------------------------------------------


def held(array: np.ndarray) -> set[int]:
    """Every byte of every element of an array, in order."""
    start = array.__array_interface__["data"][0]
    places = {start}
    for extent, stride in zip(array.shape, array.strides, strict=True):
        places = {place + turn * stride for place in places for turn in range(extent)}
    return {place + byte for place in places for byte in range(array.itemsize)}


@st.composite
def padded(draw: Any) -> tuple[Any, Any, list[int]]:
    """A layout of allocations with gaps between tokens, blocks or both, and the start offsets of some allocations."""
    token = draw(st.sampled_from([4, 8, 12, 20]))
    block = draw(st.sampled_from([0, 3 * token, 4 * token, 5 * token + 4]))
    layers, blocks = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    pitch = {"t": f'"{token} B"'} | ({"b": f'"{block} B"'} if block else {})
    text = ", ".join(f"{axis}: {size}" for axis, size in pitch.items())
    layout = spec.parse(f'order: "[l] b t d"\npitch: {{{text}}}', name="padded")
    shape = kvbm.BlockShape(nl=layers, no=1, nh=1, nt=3, hd=1, dtype="float32")
    starts = [4 * draw(st.integers(0, 40)) for _ in range(layers)]
    return layout.resolve(shape, blocks), layout, starts


@given(padded())
def test_arrays_overlap_where_their_elements_do(case: Any) -> None:
    resolved, layout, starts = case
    memory = np.zeros(4096, np.uint8)
    (kind,) = resolved.kinds
    arrays = [np.ndarray(kind.shape, "float32", memory, start, kind.strides) for start in starts]
    bytes_of = [held(array) for array in arrays]
    clashes = {(i, j) for j in range(len(arrays)) for i in range(j) if bytes_of[i] & bytes_of[j]}
    found = find_overlap(np.array([a.ctypes.data for a in arrays], np.uint64), resolved.kinds, resolved.kind_of_entry)
    assert (tuple(sorted(found)) in clashes) if found else not clashes
    if clashes:
        with pytest.raises(kvbm.BindError, match=r"arrays \d+ and \d+ share memory"):
            kvbm.Pool(layout, resolved.shape, arrays)
    else:
        assert kvbm.Pool(layout, resolved.shape, arrays).num_blocks == resolved.num_blocks


def test_arrays_of_a_kind_each_overlap_too() -> None:
    """K's and V's arrays have different strides; V's rows are in the gaps of K's, and then overlap them."""
    layout = spec.parse('order: {k: "[o] b t d", v: "[o] b d t"}\npitch: {b: "64 B"}', name="apart")
    shape = kvbm.BlockShape(nl=1, no=2, nh=1, nt=4, hd=2, dtype="float32")
    kinds = layout.resolve(shape, 3).kinds
    memory = np.zeros(512, np.uint8)
    for offset, fits in ((32, True), (28, False), (36, False), (0, False), (192, True)):
        arrays = [
            np.ndarray(k.shape, "float32", memory, at, k.strides) for k, at in zip(kinds, (0, offset), strict=True)
        ]
        assert fits == (not held(arrays[0]) & held(arrays[1]))
        if fits:
            kvbm.Pool(layout, shape, arrays)
        else:
            with pytest.raises(kvbm.BindError, match="arrays 0 and 1 share memory"):
                kvbm.Pool(layout, shape, arrays)


def test_views_of_one_tensor_side_by_side_are_quickly_told_apart() -> None:
    """Each layer's rows are in the gaps of all others; each distance is compared once."""
    layers, blocks = 200, 1000
    layout = spec.parse('order: "[l] b d"\npitch: {b: "64*nl B"}', name="interleaved")
    shape = kvbm.BlockShape(nl=layers, no=1, nh=1, nt=1, hd=16, dtype="float32")
    memory = np.zeros((blocks, layers, 16), "float32")
    views = [memory[:, layer] for layer in range(layers)]
    assert kvbm.Pool(layout, shape, views).num_blocks == blocks
    views[7] = memory[:, 199]
    with pytest.raises(kvbm.BindError, match="arrays 7 and 199 share memory"):
        kvbm.Pool(layout, shape, views)


def test_one_memory_of_two_shapes_is_not_one_pool() -> None:
    """With another number of layers, the same addresses are different blocks."""
    layout = spec.parse('order: "b l o h t d"', name="whole")
    memory = np.arange(2 * 4 * 2 * 3 * 4 * 8, dtype="float32")
    pools = []
    for layers in (4, 2):
        shape = kvbm.BlockShape(nl=layers, no=2, nh=3, nt=4, hd=8, dtype="float32")
        pools.append(kvbm.Pool(layout, shape, memory[: 2 * shape.nbytes // 4].reshape(2, layers, 2, 3, 4, 8)))
    before = memory.copy()
    with pytest.raises(kvbm.BindError, match="source and destination overlap in memory"):
        kvbm.Transfer(*pools).copy([0], [1], layers=(range(1, 3), range(2)))
    assert np.array_equal(memory, before)


def test_no_flat_assignment_or_mask_stores_numbers_as_pairs_of_elements() -> None:
    array = np.full((4, 4), 7, np.uint8).view(arrays.PackedArray)
    writes: list[Callable[[Any], object]] = [
        lambda value: array.flat.__setitem__(slice(None), value),
        lambda value: setattr(array, "flat", value),
        lambda value: np.putmask(array, np.ones((4, 4), bool), value),
        lambda value: np.place(array, np.ones((4, 4), bool), value),
        lambda value: np.fill_diagonal(array, value),
    ]
    for write in writes:
        with pytest.raises(kvbm.DTypeError, match="two elements each"):
            write(np.array([0.5]))
        assert (np.asarray(array) == 7).all()
        write(np.array([7], np.uint8))
    assert list(array.flat) == [7] * 16 == np.asarray(array.flat).tolist() and array.flat[3] == 7 and len(array.flat) == 16


def test_no_arithmetic_computes_with_pairs_of_elements() -> None:
    """Red: `array *= 2` doubled bytes.  What asks about bytes, and works with their bits, is as of any array."""
    array = np.full((4, 4), 7, np.uint8).view(arrays.PackedArray)
    computes: list[Callable[[], object]] = [
        lambda: array + 1, lambda: array.__imul__(2), lambda: -array, lambda: array.sum(), lambda: array.max(), lambda: 0.5 * array,
        lambda: np.multiply(np.ones((4, 4)), 2, out=array, casting="unsafe"), lambda: np.add.at(array, 0, 1),
        lambda: np.copyto(array, np.full((4, 4), 0.5), casting="unsafe"),
    ]  # fmt: skip
    for compute in computes:
        with pytest.raises(kvbm.DTypeError, match="two elements each"):
            compute()
        assert (np.asarray(array) == 7).all()
    assert (array == 7).all() and not (array != array).any() and np.array_equal(array, array) and array.any()
    assert ((array & 15) == 7).all() and (array >> 4 == 0).all() and (array | array << 4 == 0x77).all()
    found = np.ones((4, 4), bool)
    assert not np.not_equal(array, array, out=found).any()
    array ^= 255
    assert isinstance(array, arrays.PackedArray) and (np.asarray(array) == 248).all()
    np.testing.assert_array_equal(array, np.full((4, 4), 248, np.uint8))
