"""The functions of kvbm.kernels, which copy lists of tensors.  Errors need no GPU; round trips do."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvbm
import matrix
import oracle
import stacks
from coordinates import in_case
from digest_oracle import of_cells
from kvbm import PlanError, _core, kernels
from kvbm.planner import kernel_forms
from memory import FakeCuda, aligned, interface_views, placed, torch_views
from processes import FakeDriver, compile_fake_driver

HERE = Path(__file__).resolve().parents[1]
NB, NL, NO, NH, NT, HD = 2, 2, 2, 3, 4, 8
SHAPE = kvbm.BlockShape(nl=NL, no=NO, nh=NH, nt=NT, hd=HD, dtype="float16")

TO = {"universal": kernels.block_to_universal, "operational": kernels.block_to_operational}
FROM = {"universal": kernels.universal_to_block, "operational": kernels.operational_to_block}


def blocks(
    nb: int = NB, shape: tuple[int, ...] = (NT, NH, HD), dtype: str = "float16", **rest: Any
) -> list[list[FakeCuda]]:
    return [[FakeCuda(shape, dtype, **rest) for _ in range(NL * NO)] for _ in range(nb)]


def universals(
    nb: int = NB, shape: tuple[int, ...] = (NH, NL, NO, NT, HD), dtype: str = "float16", **rest: Any
) -> list[FakeCuda]:
    return [FakeCuda(shape, dtype, **rest) for _ in range(nb)]


def operationals(
    nb: int = NB, shape: tuple[int, ...] = (NL, NO, NT * NH * HD), dtype: str = "float16"
) -> list[FakeCuda]:
    return [FakeCuda(shape, dtype) for _ in range(nb)]


def refused(kind: str, blocks: Any, whole: Any, match: str, error: type[Exception] = ValueError, **rest: Any) -> None:
    """Errors in both directions, before any CUDA call."""
    for call in (
        lambda: TO[kind](blocks, whole, stream=0, **rest),
        lambda: FROM[kind](whole, blocks, stream=0, **rest),
    ):
        with pytest.raises(error, match=match) as info:
            call()
        assert isinstance(info.value, kvbm.KvbmError) and not isinstance(info.value, kvbm.CudaError)


def test_stubs_are_told() -> None:
    """As recorded by the build: whether it had a compiler."""
    built = json.loads((Path(kvbm.__file__).parent / "_build.json").read_text())
    assert kernels.is_using_stubs() is (built["nvcc"] is None)


@pytest.mark.parametrize(("version", "answer"), [("12070", "False"), ("12080", "True"), ("13000", "True")])
def test_batched_copies_are_there_from_12_8_on(fake_gpu: FakeDriver, version: str, answer: str) -> None:
    assert fake_gpu("launches.has_memcpy_batch", FAKE_VERSION=version) == f"{answer}\n"


@pytest.mark.parametrize("empty", [[], ()])
def test_empty_batch_touches_no_cuda(empty: Any) -> None:
    for layout in ("NHD", "HND", "nhd", "Hnd"):
        assert kernels.block_to_universal(empty, empty, layout) is None
        assert kernels.universal_to_block(empty, empty, layout) is None
    for backend in (None, "auto", "kernel", "batch", "async"):
        assert kernels.block_to_operational(empty, empty, backend) is None
        assert kernels.operational_to_block(empty, empty, backend) is None


def test_empty_tensor_of_universals() -> None:
    assert kernels.block_to_universal([], FakeCuda((0, NH, NL, NO, NT, HD))) is None
    assert kernels.universal_to_block(FakeCuda((0, NH, NL, NO, NT, HD)), []) is None


def test_an_empty_batch_is_checked_too() -> None:
    with pytest.raises(ValueError, match="layout"):
        kernels.block_to_universal([], [], "DHN")
    with pytest.raises(ValueError, match="backend"):
        kernels.block_to_operational([], [], "magic")
    refused("universal", blocks(1), [], r"blocks.*0.*1|blocks.*1.*0")
    refused("operational", blocks(1), [], r"blocks.*0.*1|blocks.*1.*0")


@pytest.mark.parametrize("name", ["", "NDH", "universal", "vllm/LBHNC", 3, None])
def test_unknown_layout(name: Any) -> None:
    refused("universal", blocks(), universals(), r"layout: expected 'NHD' or 'HND'", layout=name)


@pytest.mark.parametrize("name", ["", "memcpy", "gpu", 3])
def test_unknown_backend(name: Any) -> None:
    refused("operational", blocks(), operationals(), r"backend: expected .*'auto'", backend=name)


def test_cpu_tensors(torch: Any) -> None:
    cpu = [[torch.zeros(NT, NH, HD, dtype=torch.float16) for _ in range(NL * NO)] for _ in range(NB)]
    whole = [torch.zeros(NH, NL, NO, NT, HD, dtype=torch.float16) for _ in range(NB)]
    flat = [torch.zeros(NL, NO, NT * NH * HD, dtype=torch.float16) for _ in range(NB)]
    refused("universal", cpu, whole, r"CUDA.*CPU")
    refused("universal", cpu, universals(), r"blocks\[0\]\[0\].*CUDA.*CPU")
    refused("universal", blocks(), whole, r"universals\[0\].*CUDA.*CPU")
    refused("operational", cpu, flat, r"CUDA.*CPU")
    refused("operational", cpu, operationals(), r"blocks\[0\]\[0\].*CUDA.*CPU")
    assert not any(t.any() for row in cpu for t in row) and not any(t.any() for t in whole)


def test_numpy_arrays() -> None:
    refused("universal", blocks(), [np.zeros((NH, NL, NO, NT, HD), np.float16)] * NB, r"universals\[0\].*CUDA.*CPU")


def test_one_cpu_tensor_among_many(torch: Any) -> None:
    mixed: Any = blocks()
    mixed[1][3] = torch.zeros(NT, NH, HD, dtype=torch.float16)
    refused("universal", mixed, universals(), r"blocks\[1\]\[3\].*CUDA.*CPU")


def test_not_tensors() -> None:
    refused("universal", [["x"] * 4] * 2, universals(), r"blocks\[0\]\[0\].*str")
    refused("universal", blocks(), ["x", "y"], r"universals\[0\].*str")
    refused("universal", 3, universals(), r"blocks.*int")
    refused("universal", blocks(), 3, r"universals.*int")
    refused("universal", [3, 4], universals(), r"blocks\[0\].*int")


def test_wrong_dtype() -> None:
    refused("universal", blocks(dtype="complex64"), universals(dtype="complex64"), "complex64", TypeError)
    refused("operational", blocks(dtype="complex64"), operationals(dtype="complex64"), "complex64", TypeError)


@pytest.mark.parametrize("other", ["float32", "int16", "uint8"])
def test_mixed_dtypes(other: str) -> None:
    refused("universal", blocks(dtype=other), universals(), rf"float16.*{other}|{other}.*float16", TypeError)
    mixed = blocks()
    mixed[1][2] = FakeCuda((NT, NH, HD), other)
    refused("universal", mixed, universals(), rf"float16.*{other}|{other}.*float16", TypeError)
    refused("operational", mixed, operationals(), rf"float16.*{other}|{other}.*float16", TypeError)
    two = universals()
    two[1] = FakeCuda((NH, NL, NO, NT, HD), other)
    refused("universal", blocks(), two, rf"float16.*{other}|{other}.*float16", TypeError)


def test_wrong_rank() -> None:
    refused("universal", blocks(), universals(shape=(NH, NL, NO, NT * HD)), r"universals\[0\].*5 axes.*\(3, 2, 2, 32\)")
    refused("universal", blocks(shape=(NT, NH * HD)), universals(), r"blocks\[0\]\[0\].*\(4, 3, 8\).*\(4, 24\)")
    refused("operational", blocks(), operationals(shape=(NL * NO, 96)), r"operationals\[0\].*3 axes.*\(4, 96\)")
    refused("universal", blocks(), FakeCuda((2, 2, NH, NL, NO, NT, HD)), r"universals.*axes")


def test_wrong_shape() -> None:
    refused("universal", blocks(shape=(NT, NH, 7)), universals(), r"blocks\[0\]\[0\].*\(4, 3, 8\).*\(4, 3, 7\)")
    two = universals()
    two[1] = FakeCuda((NH, NL, NO, NT, HD + 1))
    refused("universal", blocks(), two, r"universals\[1\].*\(3, 2, 2, 4, 8\).*\(3, 2, 2, 4, 9\)")
    one_wrong = blocks()
    one_wrong[1][3] = FakeCuda((NT, NH, HD - 1))
    refused("universal", one_wrong, universals(), r"blocks\[1\]\[3\].*\(4, 3, 7\)")
    refused("operational", one_wrong, operationals(), r"blocks\[1\]\[3\].*96.*\(4, 3, 7\)")


def test_nhd_is_not_hnd() -> None:
    refused("universal", blocks(shape=(NH, NT, HD)), universals(), r"\(4, 3, 8\).*\(3, 4, 8\)", layout="NHD")
    refused("universal", blocks(), universals(), r"\(3, 4, 8\).*\(4, 3, 8\)", layout="HND")


def test_wrong_count() -> None:
    refused("universal", blocks(3), universals(2), r"blocks.*2.*3")
    refused("universal", blocks(1), universals(2), r"blocks.*2.*1")
    short = blocks()
    short[1] = short[1][:3]
    refused("universal", short, universals(), r"blocks\[1\].*4.*3")
    refused("operational", short, operationals(), r"blocks\[1\].*4.*3")
    refused("universal", blocks(1)[0][:3], universals(1), r"blocks.*")
    refused("universal", [], universals(1), r"blocks.*1.*0")
    refused("universal", [t for row in blocks(2) for t in row], universals(2), r"blocks.*2.*8")


def test_non_contiguous() -> None:
    strided = blocks()
    strided[0][1] = FakeCuda((NT, NH, HD), strides=(2 * HD, NT * HD * 2, 2))
    refused("universal", strided, universals(), r"blocks\[0\]\[1\].*contiguous")
    refused("operational", strided, operationals(), r"blocks\[0\]\[1\].*contiguous")
    two = universals()
    two[1] = FakeCuda((NH, NL, NO, NT, HD), strides=(4096, 1024, 512, 32, 4))
    refused("universal", blocks(), two, r"universals\[1\].*contiguous")


def test_device_mix() -> None:
    refused("universal", blocks(device=1), universals(), r"cuda:(0|1).*cuda:(0|1)")
    mixed = blocks()
    mixed[1][0] = FakeCuda((NT, NH, HD), device=1)
    refused("universal", mixed, universals(), r"cuda:1.*cuda:0")
    refused("operational", mixed, operationals(), r"cuda:1.*cuda:0")


def test_overlap() -> None:
    inside = blocks()
    whole = universals()
    inside[1][2] = FakeCuda((NT, NH, HD), address=whole[0].address + 64)
    refused("universal", inside, whole, r"overlap")
    flat = operationals()
    inside[1][2] = FakeCuda((NT, NH, HD), address=flat[1].address)
    for backend in ("kernel", "batch", "async"):
        refused("operational", inside, flat, r"overlap", backend=backend)


def test_a_destination_twice() -> None:
    """Two chunks, or two whole tensors, at one address: the result would depend on chance."""
    twice = blocks()
    twice[1][2] = FakeCuda((NT, NH, HD), address=twice[0][0].address)
    with pytest.raises(ValueError, match=r"(?i)overlap|share|twice"):
        kernels.universal_to_block(universals(), twice, stream=0)
    with pytest.raises(ValueError, match=r"(?i)overlap|share|twice"):
        kernels.operational_to_block(operationals(), twice, stream=0)
    whole = universals()
    whole[1] = FakeCuda((NH, NL, NO, NT, HD), address=whole[0].address)
    with pytest.raises(ValueError, match=r"(?i)overlap|share|twice"):
        kernels.block_to_universal(blocks(), whole, stream=0)


def test_stream_of_nothing() -> None:
    """Arrays without a current stream need a given stream; other objects are not streams."""
    with pytest.raises(ValueError, match="stream"):
        kernels.block_to_universal(blocks(), universals())
    for stream in ("default", 1.5, object()):
        with pytest.raises(TypeError, match="stream"):
            kernels.block_to_universal(blocks(), universals(), stream=stream)


def test_stream_is_keyword_only() -> None:
    for call in (*TO.values(), *FROM.values(), kernels.nhd_hnd_transpose):
        with pytest.raises(TypeError):
            call([], [], "NHD", 0)


# ---- some layers ---------------------------------------------------------------------------------------------------


def some(layers: int, nb: int = NB, **rest: Any) -> list[list[FakeCuda]]:
    """The chunks of so many layers."""
    return [[FakeCuda(rest.get("shape", (NT, NH, HD))) for _ in range(layers * NO)] for _ in range(nb)]


def test_blocks_hold_only_the_chunks_of_the_layers() -> None:
    one = range(1, 2)
    only = r"\(len\(layers\)\*no, only those of the layers\)"
    refused("universal", blocks(), universals(), rf"blocks\[0\]: expected 2 tensors {only}, got 4", layers=one)
    refused("universal", some(1), universals(), r"blocks\[0\]: expected 4 tensors \(nl\*no\), got 2")
    refused("universal", some(1), universals(), rf"expected 4 tensors {only}, got 2", layers=range(2))
    refused("universal", some(1, 3), universals(), r"blocks: expected 2 lists.*3", layers=one)
    short = some(1)
    short[1].pop()
    refused("universal", short, universals(), r"blocks\[1\]: expected 2 tensors .*got 1", layers=one)
    refused("universal", some(1, 1)[0][:1], universals(1), r"blocks\[0\]: expected 2 tensors .*got 1", layers=one)
    refused("universal", some(1), universals(), r"\(3, 4, 8\).*\(4, 3, 8\)", layers=one, layout="HND")


@pytest.mark.parametrize(
    "layers", [range(0), range(1, 1), range(2, 1), range(-1, 1), range(3), range(2, 3), range(1, 1 << 80)]
)
def test_layers_beyond_those_of_the_universal_tensors(layers: range) -> None:
    match = r"layers: expected a range within 0 to 2, .*universals\[0\], got range"
    refused("universal", some(1), universals(), match, layers=layers)


@pytest.mark.parametrize(
    "layers", [1, "1", [0, 1], (range(1), range(1)), slice(1), range(0, 2, 2), range(2, 0, -1), True, np.arange(2)]
)
def test_layers_that_are_no_range(layers: Any) -> None:
    refused("universal", some(1), universals(), r"layers: expected range\(first, last\) or None, got ", layers=layers)
    with pytest.raises(kvbm.BindError, match=r"layers: expected range"):
        kernels.block_to_universal([], [], layers=layers)  # also where there is nothing to copy


def test_layers_of_an_empty_batch() -> None:
    assert kernels.block_to_universal([], [], layers=range(5)) is None
    assert kernels.universal_to_block([], [], layers=range(5)) is None


def test_a_chunk_in_another_layer_of_a_universal_tensor() -> None:
    """Refused, although no byte of it is copied: tensors are compared as a whole."""
    whole = universals()
    inside = some(1)
    inside[0][0] = FakeCuda((NT, NH, HD), address=whole[0].address)
    refused("universal", inside, whole, r"overlap", layers=range(1, 2))


@pytest.mark.parametrize("program", ["layers", "layer_by_layer"])
def test_layers_on_the_fake_driver(fake_gpu: FakeDriver, program: str) -> None:
    """One launch; every byte of both sides, guards and other layers included."""
    fake_gpu(f"stacked.{program}")


def test_the_plan_of_some_layers_is_that_of_fewer_layers() -> None:
    """Only where the universal side starts depends on which layers they are."""
    sizes, about = (NH, 6, NO, NT, HD), ("float16", 2, (16, 16), -1)
    for layout in ("nhd", "hnd"):
        for to_whole in (True, False):
            made = [
                kernels._prepared(layout, sizes, *about, to_whole, layers)
                for layers in (None, range(6), range(2), range(3, 5))
            ]
            assert [len(copies) for copies in made] == [1] * 4, "one launch each"


# ---- chunks in the other order -------------------------------------------------------------------------------------


def turned(nb: int = NB, **rest: Any) -> list[list[FakeCuda]]:
    return blocks(nb, (NH, NT, HD), **rest)


def not_turned(src: Any, dst: Any, match: str, error: type[Exception] = ValueError, **rest: Any) -> None:
    """An error before any CUDA call."""
    with pytest.raises(error, match=match) as info:
        kernels.nhd_hnd_transpose(src, dst, stream=0, **rest)
    assert isinstance(info.value, kvbm.KvbmError) and not isinstance(info.value, kvbm.CudaError)


@pytest.mark.parametrize("empty", [[], (), [[]], [[], ()]])
def test_no_chunks_touch_no_cuda(empty: Any) -> None:
    for layout in ("NHD", "HND", "nhd", "Hnd"):
        assert kernels.nhd_hnd_transpose(empty, empty, layout) is None


@pytest.mark.parametrize("name", ["", "NDH", "universal", 3, None])
def test_unknown_order_of_the_source(name: Any) -> None:
    not_turned(blocks(), turned(), r"src_layout: expected 'NHD' or 'HND', got ", src_layout=name)
    not_turned([], [], r"src_layout: expected 'NHD' or 'HND', got ", src_layout=name)


def test_chunks_of_the_same_order_or_of_another_shape() -> None:
    not_turned(blocks(), blocks(), r"dst\[0\]\[0\]: expected shape \(3, 4, 8\), got shape \(4, 3, 8\)")
    not_turned(turned(), turned(), r"dst\[0\]\[0\]: expected shape \(4, 3, 8\), got shape \(3, 4, 8\)", src_layout="HND")
    odd = blocks()
    odd[1][2] = FakeCuda((NT, NH, HD + 1))
    not_turned(odd, turned(), r"src\[1\]\[2\]: expected shape \(4, 3, 8\), got shape \(4, 3, 9\)")
    odd = turned()
    odd[1][3] = FakeCuda((NH, NT + 1, HD))
    not_turned(blocks(), odd, r"dst\[1\]\[3\]: expected shape \(3, 4, 8\), got shape \(3, 5, 8\)")
    flat = blocks(shape=(NT, NH * HD))
    not_turned(flat, turned(), r"src\[0\]\[0\]: expected 3 axes, \[nt, nh, hd\], got shape \(4, 24\)")
    not_turned(flat, turned(), r"3 axes, \[nh, nt, hd\]", src_layout="hnd")
    not_turned(blocks(shape=(NT, NH, 0)), blocks(shape=(NH, NT, 0)), r"hd")


def test_chunks_of_another_number() -> None:
    not_turned(blocks(3), turned(2), r"dst: expected 3 lists, one per block, got 2")
    short = blocks()
    short[1].pop()
    not_turned(short, turned(), r"src\[1\]: expected 4 tensors \(as in src\[0\]\), got 3")
    short = turned()
    short[0].pop()
    not_turned(blocks(), short, r"dst\[0\]: expected 4 tensors \(as in src\[0\]\), got 3")
    not_turned(blocks(1)[0], turned(1)[0][:3], r"dst\[0\]: expected 4 tensors .*got 3")
    not_turned(blocks(), turned(2)[0], r"dst\[0\]: expected 4 tensors .*got a FakeCuda|dst: expected 2 lists.*4")
    not_turned(blocks(1), [], r"dst: expected 1 lists.*0")
    not_turned([], turned(1), r"dst: expected 0 lists.*1")


def test_chunks_that_are_no_tensors() -> None:
    not_turned(3, turned(), r"src: expected a list of lists of tensors, one per block, got a int")
    not_turned(FakeCuda((2, 4, NT, NH, HD)), turned(), r"src: expected a list of lists of tensors.*got a FakeCuda")
    not_turned(blocks(), 3, r"dst: expected 2 lists of 4 tensors, got a int")
    not_turned([["x"] * 4] * 2, turned(), r"src\[0\]\[0\].*str")
    not_turned(["x"], turned(1), r"src\[0\]\[0\].*str")
    not_turned(blocks(), [["x"] * 4] * 2, r"dst\[0\]\[0\].*str")
    not_turned([blocks()[0], 5], turned(), r"src\[1\]: expected 4 tensors .*got a int")


def test_chunks_on_the_cpu(torch: Any) -> None:
    """As of the other functions: an error that names what copies there."""
    cpu = [[torch.zeros(NT, NH, HD, dtype=torch.float16) for _ in range(NL * NO)] for _ in range(NB)]
    other = [[torch.ones(NH, NT, HD, dtype=torch.float16) for _ in range(NL * NO)] for _ in range(NB)]
    what = r"expected a CUDA tensor, got one on the CPU; use kvbm.Pool and kvbm.convert for the CPU"
    not_turned(cpu, other, rf"src\[0\]\[0\]: {what}")
    not_turned(blocks(), other, rf"dst\[0\]\[0\]: {what}")
    not_turned([[np.zeros((NT, NH, HD))]], [[np.zeros((NH, NT, HD))]], rf"src\[0\]\[0\]: {what}")
    mixed: Any = turned()
    mixed[1][3] = other[0][0]
    not_turned(blocks(), mixed, rf"dst\[1\]\[3\]: {what}")
    assert all(t.all() for row in other for t in row)


def test_chunks_of_other_dtypes() -> None:
    both = r"float16.*float32|float32.*float16"
    not_turned(blocks(), turned(dtype="float32"), both, TypeError)
    mixed = blocks()
    mixed[1][1] = FakeCuda((NT, NH, HD), "float32")
    not_turned(mixed, turned(), both, TypeError)
    not_turned(blocks(dtype="complex64"), turned(dtype="complex64"), "complex64", TypeError)


def test_chunks_that_are_not_contiguous() -> None:
    odd = blocks()
    odd[0][1] = FakeCuda((NT, NH, HD), strides=(2 * HD, NT * HD * 2, 2))
    not_turned(odd, turned(), r"src\[0\]\[1\]: expected a contiguous tensor")
    odd = turned()
    odd[1][0] = FakeCuda((NH, NT, HD), strides=(2 * HD, NH * HD * 2, 2))
    not_turned(blocks(), odd, r"dst\[1\]\[0\]: expected a contiguous tensor")


def test_chunks_on_other_gpus() -> None:
    not_turned(blocks(), turned(device=1), r"the source is on cuda:0, the destination on cuda:1; expected one device")
    mixed = blocks()
    mixed[1][0] = FakeCuda((NT, NH, HD), device=1)
    not_turned(mixed, turned(), r"cuda:1.*cuda:0")


def test_it_is_not_done_in_place() -> None:
    """No destination may share memory with a source, also where the bytes would not move, or with another destination."""
    src = blocks()
    same = [[FakeCuda((NH, NT, HD), address=chunk.address) for chunk in row] for row in src]
    not_turned(src, same, r"overlap")
    inside = turned()
    inside[1][2] = FakeCuda((NH, NT, HD), address=src[0][3].address + 64)
    not_turned(src, inside, r"overlap")
    one = blocks(1, (NT, 1, HD))
    not_turned(one, [[FakeCuda((1, NT, HD), address=chunk.address) for chunk in one[0]]], r"overlap")
    twice = turned()
    twice[1][2] = FakeCuda((NH, NT, HD), address=twice[0][0].address)
    not_turned(blocks(), twice, r"(?i)overlap|share|twice")


def test_stream_of_no_framework() -> None:
    with pytest.raises(ValueError, match="stream"):
        kernels.nhd_hnd_transpose(blocks(), turned())
    for stream in ("default", 1.5, object()):
        with pytest.raises(TypeError, match="stream"):
            kernels.nhd_hnd_transpose(blocks(), turned(), stream=stream)


@pytest.mark.parametrize("program", ["transposes", "transposes_of_many", "captured", "nothing_waits"])
def test_transposes_on_the_fake_driver(fake_gpu: FakeDriver, program: str) -> None:
    """One launch; every byte of both sides, guards included."""
    fake_gpu(f"stacked.{program}")


def test_a_transpose_that_is_not_launched(fake_gpu: FakeDriver) -> None:
    fake_gpu("stacked.what_fails", FAKE_LAUNCH="1")


def test_the_plan_of_a_transpose_does_not_know_the_batch() -> None:
    """A chunk is a block, so one prepared copy serves all batches of one shape; heads are rows that stay together."""
    shape = kvbm.BlockShape(1, 1, 8, 16, 128, "float16")
    assert kvbm.plan("nhd", "hnd", shape).kernels() == kvbm.plan("hnd", "nhd", shape).kernels() == ["rows_o0_i3_w16"]
    [copy] = kernels._prepared_transpose("nhd", (16, 8, 128), "float16", (16, 16), -1)
    stack = stacks.Stacks("nhd", "hnd", kvbm.BlockShape(3, 2, 8, 16, 128, "float16"), 2)
    source, got = map(aligned, stack.data)
    tables = [
        _core.Table(np.array([buffer.ctypes.data + base for base in arena.bases], np.uint64))
        for arena, buffer in zip(stack.arenas, (source, got), strict=True)
    ]
    copy.run(*tables, _core.Pairs(None, None, 12, 12), threads=2)  # the same code on the host
    stack.check(source, got)


# ---- each kernel by itself -----------------------------------------------------------------------------------------


class Nest:
    """A loop nest that uses every mode of a kernel, on guarded memory, and its expected result from NumPy's strides.

    `short`: chunks of a few words, several per CTA; else chunks of several tiles.  `run`: words of a run; 0: an odd number.
    `keyed`: the launch digests; the default is that the kernel always does.
    """

    def __init__(self, name: str, short: bool, run: int = 0, keyed: bool = False):
        [self.form] = kernel_forms.parse_kernel(name)
        self.kernel, self.keyed = name, keyed or self.form.sums
        self.random = random.Random(zlib.crc32(f"{name} {short}".encode()))
        form, pick = self.form, self.random
        self.unit = form.element or form.word
        side = form.word // self.unit if form.kind == "tile" else 1
        self.outer = [2, 3, 1, 2][: form.outer]
        # Of a plain run only the length is left; else it is odd, so that it ends within a tile.
        self.inner = [3 if short else 11, *pick.choices((1, 2, 3) if short else (2, 3), k=form.modes - 1)]
        if form.kind == "tile":
            self.inner[:2] = [side * (1 if short else 9), side * (2 if short else 5)]
        if form.modes == 1 and not short:
            self.inner = [2111]
        if run:
            self.inner[0] = run
        while math.prod(self.inner) > (500 if short else 6000) and max(self.inner[2:], default=1) > 1:
            self.inner[2 + int(np.argmax(self.inner[2:]))] -= 1
        blocks = (9, 31 if short else 13)
        self.src, self.dst = (Side(self, s, n) for s, n in enumerate(blocks))
        pairs = 23 if short else 8
        self.src_ids = np.array([pick.randrange(blocks[0]) for _ in range(pairs)], np.int64)
        self.dst_ids = np.array(pick.sample(range(blocks[1]), pairs), np.int64)
        self.src_ids[pairs // 2] = self.dst_ids[1] = -1
        self.pairs = _core.Pairs(self.src_ids, self.dst_ids, *blocks)
        self.want = self.dst.data.copy()
        moved = (self.src_ids >= 0) & (self.dst_ids >= 0)
        for at in itertools.product(*map(range, self.outer)):
            for s, d in zip(self.src_ids[moved], self.dst_ids[moved], strict=True):
                self.dst.view(self.want, d, at)[...] = self.src.view(self.src.data, s, at)
        assert not np.array_equal(self.want, self.dst.data)
        # A kernel that digests: keys that each mode steps, and the side of a tile whose words are cells.
        self.along = pick.randrange(2) if form.kind == "tile" and side > 1 else 0
        self.first, *keys = pick.choices(range(1, 1 << 20), k=1 + form.outer + form.modes)
        self.keys = keys[: form.outer], keys[form.outer :]
        self.digests = [self.digest(s, d) for s, d in zip(self.src_ids, self.dst_ids, strict=True)] if self.keyed else []

    def digest(self, src_id: int, dst_id: int) -> int:
        """Of the words that a pair reads, each a cell."""
        total = 0
        for at in itertools.product(*map(range, self.outer)) if min(src_id, dst_id) >= 0 else ():
            words = np.moveaxis(self.src.view(self.src.data, src_id, at), self.along, -2)  # … elements along, bytes
            words = words.reshape(*words.shape[:-2], -1, self.form.word)
            cells = np.zeros((*words.shape[:-1], 16), np.uint8)
            cells[..., : self.form.word] = words
            steps = [key for mode, key in enumerate(self.keys[1]) if mode != self.along]
            steps.append(self.keys[1][self.along])
            places = np.indices(words.shape[:-1])
            keys = self.first + sum(c * key for c, key in zip(at, self.keys[0], strict=True))
            keys = keys + sum(place * key for place, key in zip(places, steps, strict=True))
            total += int(of_cells(cells, keys.astype(np.uint64)).sum(dtype=np.uint64))
        return total % (1 << 64)

    def copy(self) -> _core.Copy:
        s, d = self.src, self.dst
        outer = list(zip(self.outer, s.outer, d.outer, s.outer_table, d.outer_table, strict=True))
        inner = list(zip(self.inner, s.inner, d.inner, strict=True))
        offsets = (s.offset, d.offset, s.table_offset, d.table_offset)
        told = (1, [(self.first, *self.keys, (), self.along == 1)]) if self.keyed else None
        return _core.Copy(self.kernel, [(offsets, outer, inner)], s.of_id, d.of_id, ((), ()), told)

    def check(self, source: np.ndarray, got: np.ndarray) -> None:
        wrong = np.nonzero(got != self.want)[0]
        assert not wrong.size, f"{self.kernel}: {wrong.size} of {got.size} bytes differ, the first at {wrong[0]}"
        assert np.array_equal(source, self.src.data), f"{self.kernel}: the source changed"


class Side:
    """The places of one side's elements: allocations with gaps between them, some modes stepping through the table."""

    def __init__(self, nest: Nest, side: int, blocks: int):
        pick, word = nest.random, nest.form.word
        modes = list(range(1, len(nest.inner)))
        pick.shuffle(modes)
        fastest = side if nest.form.kind == "tile" else 0  # a tile's second mode is the destination's run
        order = [fastest, *(mode for mode in [0, *modes] if mode != fastest)]
        self.inner, end = [0] * len(order), nest.unit
        for mode in order:
            self.inner[mode] = end
            end = end * nest.inner[mode] + word * (pick.randrange(3) if mode != order[0] else 0)
            end = -(-end // word) * word
        # Outer modes: through both tables, the source's alone, neither, the destination's alone.
        tables, self.outer, self.outer_table = 1, [], []
        for mode, extent in enumerate(nest.outer):
            through_table = mode == 0 or mode == 1 + 2 * side
            self.outer_table.append(tables if through_table else 0)
            self.outer.append(0 if through_table else end)
            if through_table:
                tables *= extent
            else:
                end = (end + word) * extent
                self.outer[-1] = end // extent
        self.of_id = (tables, 0) if side else (0, end)
        allocations, length = (tables * blocks, end) if side else (tables, end * blocks)
        self.table_offset, self.offset = 2, 2 * word
        length += self.offset + 3 * word
        gap = 48
        self.bases = np.arange(allocations) * (-(-length // 16) * 16 + gap) + gap
        self.bases += word % 16  # no wider word than the kernel's would do
        rng = np.random.default_rng(pick.randrange(1 << 30))
        self.data = rng.integers(0, 256, int(self.bases[-1]) + length + gap, dtype=np.uint8)
        self.shape = (*nest.inner, nest.unit)

    def addresses(self, start: int) -> np.ndarray:
        """The table; the entries before `table_offset` are invalid addresses."""
        return np.concatenate([np.zeros(self.table_offset), start + self.bases]).astype(np.uint64)

    def view(self, data: np.ndarray, block: int, at: tuple[int, ...]) -> np.ndarray:
        entry = block * self.of_id[0] + sum(c * step for c, step in zip(at, self.outer_table, strict=True))
        start = self.bases[entry] + self.offset + block * self.of_id[1]
        start += sum(c * step for c, step in zip(at, self.outer, strict=True))
        return np.ndarray(self.shape, np.uint8, data, int(start), (*self.inner, 1))


PLANES = [name for name in _core.kernel_names() if name.startswith(("record_", "page_", "sum_record_"))]
# Those that only digest are test_digest's, those that cast are test_cast's.
ELSEWHERE = (*PLANES, *(name for name in _core.kernel_names() if name.startswith(("digest", "cast", "sum_cast"))))
ONE_PART = [name for name in _core.kernel_names() if "__" not in name and name not in ELSEWHERE]
FEW = [name for name in ONE_PART if name.startswith("few_")]


def ways(name: str, short: bool) -> list[tuple[int, bool]]:
    """Runs of a nest, and whether it is digested: rows on few multiprocessors share addresses along a run, and digest if asked."""
    if not name.startswith("few_rows"):
        return [(0, False)]
    return [(0, False), (0, True), (2, True), (4, False), (16, True), (24, True), (64, True)] if short else [(0, False), (16, True)]


def families(names: Iterable[str]) -> dict[str, list[str]]:
    """Kernels by the words of their names before the first number, as rows and few_tile."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(re.split(r"_o\d|_w\d", name)[0], []).append(name)
    return found


KINDS = families(ONE_PART)


@pytest.mark.sanitize
@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("kind", families(name for name in ONE_PART if name not in FEW))
def test_each_on_the_host(kind: str, short: bool) -> None:
    for name in KINDS[kind]:
        with in_case(name):
            _on_the_host(name, short)


def _on_the_host(name: str, short: bool) -> None:
    nest = Nest(name, short)
    source, got = aligned(nest.src.data), aligned(nest.dst.data)
    tables = [_core.Table(side.addresses(b.ctypes.data)) for side, b in ((nest.src, source), (nest.dst, got))]
    digests = np.full(len(nest.digests), 7, np.uint64)
    nest.copy().run(*tables, nest.pairs, threads=2, digests=digests.ctypes.data if nest.digests else 0)
    nest.check(source, got)
    assert digests.tolist() == nest.digests


def test_kernels_that_digest_are_told_keys() -> None:
    table = _core.Table(np.zeros(1, np.uint64))
    pairs = _core.Pairs([0], [0], 1, 1)
    part = [((0, 0, 0, 0), [], [(1, 16, 16)])]
    for name, told in (("copy_o0_w16", (1, [(0, (), (1,), (), False)])), ("sum_rows_o4_i8_w16", None)):
        with pytest.raises(PlanError, match="expected keys for a kernel that digests"):
            _core.Copy(name, part, (0, 16), (0, 16), ((), ()), told)
    with pytest.raises(PlanError, match="an address of digests"):
        _core.Copy("copy_o0_w16", part, (0, 16), (0, 16)).run(table, table, pairs, digests=8)


class Loops:
    """A plane of a page: extents and strides of both sides, its start, and the words that a kernel is told."""

    def __init__(self, outer: list[int], inner: list[int], words: tuple[int, ...]):
        self.outer, self.inner, self.words = outer, inner, words
        self.item = words[1] if len(words) > 1 else words[0]
        self.steps: list[list[int]] = [[], []]  # inner, in bytes
        self.outer_steps: list[list[tuple[int, int]]] = [[], []]  # table entries, bytes
        self.offset = [0, 0]
        self.of_id = [0, 0]
        self.pieces: list[int] = []  # pages: bytes from one piece to the next, of which there are two
        self.first, self.keys = 0, ([0] * len(outer), [0] * len(inner))  # of digests

    def argument(self, table_offset: int) -> Any:
        outer = [
            (n, s, d, s_table, d_table)
            for n, (s_table, s), (d_table, d) in zip(self.outer, *self.outer_steps, strict=True)
        ]
        inner = list(zip(self.inner, *self.steps, strict=True))
        if self.pieces:
            inner += [(1, 0, 0)] * (kernel_forms.MAX_INNER - 1 - len(inner)) + [(2, *self.pieces)]
        return (*self.offset, table_offset, table_offset), outer, inner, tuple((step,) for step in self.of_id), self.words


class Page:
    """Several planes, each with its own loops and words, in one launch on guarded memory; NumPy's strides give the expected result.

    `how`: ``together`` if all planes have the same chunks, else ``apart``.  For kernels of pages one side is dense: the source if
    they gather (``page_in``), else the destination.  Such pages come in two pieces.
    """

    def __init__(self, name: str, how: str):
        [self.form] = kernel_forms.parse_kernel(name)
        self.kernel = name
        pick = random.Random(zlib.crc32(f"{name} {how}".encode()))
        form = self.form
        outer = [2, 3, 1, 2][: form.outer]
        self.blocks = (7, 11)
        self.loops: list[Loops] = []
        self.tables = [0, 0]
        if form.kind == "record":
            for number, word in enumerate(pick.sample((16, 8, 4, 2, 1), k=2 if form.inner > 6 else 4)):
                inner = [pick.choice((3, 1, 300)), *pick.choices((1, 2, 3), k=form.inner - 1)]
                while math.prod(inner) > 3000:
                    inner[inner.index(max(inner))] //= 2
                mine = [max(1, n - (how == "apart") * number % 2) for n in outer]
                self.loops.append(Loops(mine, inner, (word,)))
        else:
            rows = [4 if k == 0 else pick.choice((1, 2)) for k in range(form.inner - 1)]
            for run, item in ((128, 16), (4, 4), (6, 2), (22, 1)) if rows else ((64, 16), (48, 8)):
                self.loops.append(Loops(list(outer), [run // item, *rows], (0, item, 0, 0, 0)))
        self.ends = [self._place(side, pick) for side in (0, 1)]
        self.bases = []
        for side in (0, 1):
            count = self.tables[side] * (self.blocks[side] if side else 1)
            self.bases.append(np.arange(count) * (-(-self.ends[side] // 16) * 16 + 48) + 48)
        rng = np.random.default_rng(pick.randrange(1 << 30))
        self.data = [
            rng.integers(0, 256, int(self.bases[side][-1]) + self.ends[side] + 48, dtype=np.uint8) for side in (0, 1)
        ]
        pairs = 7
        self.src_ids = np.array([pick.randrange(self.blocks[0]) for _ in range(pairs)], np.int64)
        self.dst_ids = np.array(pick.sample(range(self.blocks[1]), pairs), np.int64)
        self.src_ids[pairs // 2] = self.dst_ids[1] = -1
        self.pairs = _core.Pairs(self.src_ids, self.dst_ids, *self.blocks)
        self.want = self.data[1].copy()
        for loops in self.loops:
            for at in itertools.product(*map(range, loops.outer)):
                for s, d in zip(self.src_ids, self.dst_ids, strict=True):
                    if s >= 0 and d >= 0:
                        self.view(loops, 1, self.want, d, at)[...] = self.view(loops, 0, self.data[0], s, at)
        assert not np.array_equal(self.want, self.data[1])
        if form.sums:
            for loops in self.loops:
                loops.first, *keys = pick.choices(range(1, 1 << 20), k=1 + len(loops.outer) + len(loops.inner))
                loops.keys = keys[: len(loops.outer)], keys[len(loops.outer) :]
        ids = zip(self.src_ids.tolist(), self.dst_ids.tolist(), strict=True)
        self.digests = [self.digest(s) if min(s, d) >= 0 else 0 for s, d in ids] if form.sums else []

    def digest(self, src_id: int) -> int:
        """Of the words of all planes of a block, each a cell."""
        total = 0
        for loops in self.loops:
            places = np.indices(loops.inner)
            for at in itertools.product(*map(range, loops.outer)):
                cells = np.zeros((*loops.inner, 16), np.uint8)
                cells[..., : loops.item] = self.view(loops, 0, self.data[0], src_id, at)
                keys = loops.first + sum(c * key for c, key in zip(at, loops.keys[0], strict=True))
                keys = keys + sum(place * key for place, key in zip(places, loops.keys[1], strict=True))
                total += int(of_cells(cells, keys.astype(np.uint64)).sum(dtype=np.uint64))
        return total % (1 << 64)

    def _place(self, side: int, pick: random.Random) -> int:
        """The places of the planes on one side; bytes of an allocation."""
        self.tables[side] = 1
        through = []
        for mode in range(self.form.outer):
            through.append(self.tables[side] if mode == 0 or mode == 1 + 2 * side else 0)
            self.tables[side] *= [2, 3, 1, 2][mode] if through[-1] else 1
        end = 32
        if self.form.kind.startswith("page") and (side == 0) == (self.form.kind == "page_in"):
            return self._dense(side, through)
        for loops in self.loops:
            order = list(range(1, len(loops.inner)))
            pick.shuffle(order)
            steps, held = [loops.item] * len(loops.inner), loops.item * loops.inner[0]
            for mode in order:
                steps[mode] = held + loops.item * pick.randrange(3)
                held = steps[mode] * loops.inner[mode]
            if self.form.kind != "record":
                loops.pieces.append(held)
                held *= 2
            loops.steps[side] = steps
            loops.offset[side] = end = -(-end // loops.item) * loops.item
            for n, table in zip(loops.outer, through, strict=True):
                loops.outer_steps[side].append((table, 0 if table else held))
                held *= 1 if table else n
            loops.of_id[side] = 0 if side else held
            end += held * (1 if side else self.blocks[0]) + 3
        return end

    def _dense(self, side: int, through: list[int]) -> int:
        """Records of all planes one after the other, which together are whole words: what is streamed."""
        runs = [loops.inner[0] * loops.item for loops in self.loops]
        rows, record = self.loops[0].inner[1:], sum(runs)
        held = record * math.prod(rows)
        assert held % 16 == 0
        steps, at = [], record
        for n in rows:
            steps.append(at)
            at *= n
        outer_steps, page = [], 2 * held
        for n, table in zip(self.loops[0].outer, through, strict=True):
            outer_steps.append((table, 0 if table else page))
            page *= 1 if table else n
        for number, loops in enumerate(self.loops):
            place = sum(runs[:number])
            loops.steps[side], loops.outer_steps[side] = [loops.item, *steps], outer_steps
            loops.offset[side], loops.of_id[side] = 32 + place, 0 if side else page
            word = math.gcd(loops.item, place, *steps)
            word = word if word == loops.item else 4 if word % 4 == 0 else 1
            loops.words = (word, loops.item, 4 if word >= 4 else 1, place, 0 if number else held)
            loops.pieces.append(held)
        return 32 + page * (1 if side else self.blocks[0])

    def view(self, loops: Loops, side: int, data: np.ndarray, block: int, at: tuple[int, ...]) -> np.ndarray:
        """A chunk of a plane, with its pieces."""
        entry = block * self.tables[1] if side else 0
        start = loops.offset[side] + block * loops.of_id[side]
        for n, (table, step) in zip(at, loops.outer_steps[side], strict=True):
            entry, start = entry + n * table, start + n * step
        shape, strides = (*loops.inner, loops.item), (*loops.steps[side], 1)
        if loops.pieces:
            shape, strides = (2, *shape), (loops.pieces[side], *strides)
        return np.ndarray(shape, np.uint8, data, int(self.bases[side][entry] + start), strides)

    def addresses(self, side: int, start: int) -> np.ndarray:
        """The table; the entries before the first of the parts lead nowhere."""
        return np.concatenate([np.zeros(2), start + self.bases[side]]).astype(np.uint64)

    def copy(self) -> _core.Copy:
        parts = [loops.argument(2) for loops in self.loops]
        told = (1, [(loops.first, *loops.keys, (), False) for loops in self.loops]) if self.form.sums else None
        # What all parts say for themselves is not taken from here.
        return _core.Copy(self.kernel, parts, (0, 1 << 40), (self.tables[1], 1 << 40), ((), ()), told)

    def check(self, source: np.ndarray, got: np.ndarray) -> None:
        wrong = np.nonzero(got != self.want)[0]
        assert not wrong.size, f"{self.kernel}: {wrong.size} of {got.size} bytes differ, the first at {wrong[0]}"
        assert np.array_equal(source, self.data[0]), f"{self.kernel}: the source changed"


PAGES = [name for name in PLANES if name.startswith("page_")]
OF_PLANES = [(name, how) for name in PLANES for how in (("together",) if name in PAGES else ("together", "apart"))]


@pytest.mark.sanitize
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("how", ["together", "apart"])
def test_each_of_planes_on_the_host(how: str, threads: int) -> None:
    """Each part has its own words and id strides, with any number of chunks."""
    for name in (name for name in PLANES if name not in PAGES):
        with in_case(name):
            _of_planes_on_the_host(name, how, threads)


def _of_planes_on_the_host(name: str, how: str, threads: int) -> None:
    page = Page(name, how)
    assert len({loops.item for loops in page.loops}) > 1
    assert page.form.outer == 0 or len({tuple(loops.outer) for loops in page.loops}) == 1 + (how == "apart")
    source, got = aligned(page.data[0]), aligned(page.data[1])
    tables = [_core.Table(page.addresses(side, b.ctypes.data)) for side, b in enumerate((source, got))]
    digests = np.full(len(page.digests), 7, np.uint64)
    page.copy().run(*tables, page.pairs, threads=threads, digests=digests.ctypes.data if page.digests else 0)
    page.check(source, got)
    assert digests.tolist() == page.digests


def test_each_of_planes_is_launched(fake_gpu: FakeDriver) -> None:
    """The arguments of a launch are right for every part: tested by the fake driver, which also walks pages."""
    fake_gpu("nests.each_of_planes_is_launched")


def test_pages_have_no_host_half() -> None:
    page = Page(PAGES[0], "together")
    table = _core.Table(np.zeros(4, np.uint64))
    with pytest.raises(kvbm.KvbmError, match=PAGES[0]):
        page.copy().run(table, table, page.pairs)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["together", "apart"])
def test_each_of_planes_on_a_gpu_sanitize(how: str) -> None:
    """The same, with the CTAs of all planes in one grid, and pages through shared memory."""
    for name in (name for name, each in OF_PLANES if each == how):
        with in_case(name):
            _of_planes_on_a_gpu(name, how)


def _of_planes_on_a_gpu(name: str, how: str) -> None:
    import torch

    page, stream = Page(name, how), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        source, got = (torch.from_numpy(data).cuda() for data in page.data)
    tables = [_core.Table(page.addresses(side, b.data_ptr()), 0) for side, b in enumerate((source, got))]
    digests = torch.full((len(page.digests),), 7, dtype=torch.int64, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    address = digests.data_ptr() if page.digests else 0
    page.copy().launch(*tables, page.pairs, 0, stream.cuda_stream, digests=address)
    stream.synchronize()
    page.check(source.cpu().numpy(), got.cpu().numpy())
    assert digests.cpu().numpy().view(np.uint64).tolist() == page.digests


def test_parts_of_planes() -> None:
    """One to four parts, each with its words; other numbers are refused."""
    page = Page("record_o4_i8", "together")
    one = page.loops[0].argument(2)
    for count in (0, 5):
        with pytest.raises(kvbm.PlanError, match=rf"kernel 'record_o4_i8' does not copy {count} part"):
            _core.Copy("record_o4_i8", [one] * count, (0, 0), (1, 0))
    for count in (1, 2, 3, 4):
        _core.Copy("record_o4_i8", [one] * count, (0, 0), (1, 0))


def test_few_kernels_have_no_host_half() -> None:
    nest = Nest("few_rows_o4_i8_w16", True)
    table = _core.Table(np.zeros(4, np.uint64))
    with pytest.raises(kvbm.KvbmError, match="few_rows_o4_i8_w16"):
        nest.copy().run(table, table, nest.pairs)


@pytest.mark.slow
def test_few_launches(fake_gpu: FakeDriver, tmp_path: Path) -> None:
    """Each few kernel is found, launched with at most the granted number of multiprocessors, and gets the right arguments."""
    noting = FakeDriver(compile_fake_driver(tmp_path, HERE / "programs" / "grid.c"))
    told = noting("nests.few_launches")
    rows = [line.split() for line in told.splitlines()]
    assert len(rows) == 4 * 15
    for name, most, grid, threads, shared, allowed in rows:
        if not name.startswith("few_"):
            assert int(grid) > 3, "an ordinary kernel is not held back"
            continue
        assert 1 <= int(grid) <= (min(int(most), 132) or 132), (name, most, grid)
        assert int(grid) == int(most) or int(most) not in (1, 3), "there is more work than that"
        assert int(threads) == 512
        assert int(shared) <= int(allowed), "each kernel has a limit of its own"


@pytest.mark.gpu
@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_each_on_a_gpu_sanitize(kind: str, short: bool) -> None:
    """Every kernel alone, bit for bit, including guards; few kernels with several numbers of multiprocessors."""
    for name in KINDS[kind]:
        with in_case(name):
            _on_a_gpu(name, short)


def _on_a_gpu(name: str, short: bool) -> None:
    import torch

    stream = torch.cuda.Stream()
    for most, (run, keyed) in itertools.product((1, 3, 8, 1000) if name in FEW else (0,), ways(name, short)):
        nest = Nest(name, short, run, keyed)
        with torch.cuda.stream(stream):
            source, got = torch.from_numpy(nest.src.data).cuda(), torch.from_numpy(nest.dst.data).cuda()
        tables = [_core.Table(s.addresses(b.data_ptr()), 0) for s, b in ((nest.src, source), (nest.dst, got))]
        digests = torch.full((len(nest.digests),), 7, dtype=torch.int64, device="cuda")
        stream.wait_stream(torch.cuda.current_stream())
        address = digests.data_ptr() if nest.digests else 0
        nest.copy().launch(*tables, nest.pairs, 0, stream.cuda_stream, max_sms=most, digests=address)
        stream.synchronize()
        nest.check(source.cpu().numpy(), got.cpu().numpy())
        assert digests.cpu().numpy().view(np.uint64).tolist() == nest.digests


@pytest.mark.gpu
@pytest.mark.parametrize("most", [1, 8])
def test_few_kernels_in_a_graph(most: int) -> None:
    """A captured launch keeps its grid and its shared memory."""
    import torch

    for name in FEW:
        nest = Nest(name, False)
        source, got = torch.from_numpy(nest.src.data).cuda(), torch.from_numpy(nest.dst.data).cuda()
        tables = [_core.Table(s.addresses(b.data_ptr()), 0) for s, b in ((nest.src, source), (nest.dst, got))]
        copy = nest.copy()
        copy.launch(*tables, nest.pairs, 0, 0, max_sms=most)  # what is loaded lazily is loaded here
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            stream = torch.cuda.current_stream().cuda_stream
            copy.launch(*tables, nest.pairs, 0, stream, max_sms=most)
        got.copy_(torch.from_numpy(nest.dst.data))
        graph.replay()
        torch.cuda.synchronize()
        nest.check(source.cpu().numpy(), got.cpu().numpy())


# ---- on a GPU ------------------------------------------------------------------------------------------------------


class Stack:
    """Blocks and whole tensors in guarded CUDA buffers, as lists of torch tensors or of bare CUDA arrays."""

    def __init__(
        self,
        kind: str,
        layout: str,
        shape: kvbm.BlockShape,
        nb: int,
        to_whole: bool,
        views: Any,
        align: tuple[int, int],
    ):
        import torch

        whole = {"universal": oracle.Order("[b] h l o t d"), "operational": oracle.Order("[b] l o {t h d}")}[kind]
        chunk = matrix.orders()[layout.lower()]
        self.blocks = placed(chunk, shape, nb).layout_bytes(align[0])
        self.whole = placed(whole, shape, nb).layout_bytes(align[1])
        self.arenas = (self.blocks, self.whole) if to_whole else (self.whole, self.blocks)
        self.data = oracle.source_bytes(self.arenas[0], 0), oracle.dest_bytes(self.arenas[1], 0)
        self.want = oracle.expected_bytes(*self.arenas, *self.data, range(nb), range(nb))
        buffers = [torch.from_numpy(d).cuda() for d in self.data]
        torch.cuda.synchronize()
        self.buffers = buffers
        of_blocks, of_whole = buffers if to_whole else buffers[::-1]
        per = shape.nl * shape.no
        flat = views(self.blocks, of_blocks, shape.dtype)
        self.args_blocks = [flat[i * per : (i + 1) * per] for i in range(nb)]
        self.args_whole = views(self.whole, of_whole, shape.dtype)

    def fill_late(self, stream: Any) -> None:
        """The source is zeros until `stream` has slept for a while: only later work on the stream reads the data."""
        import torch

        original = self.buffers[0].clone()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            self.buffers[0].zero_()
            torch.cuda._sleep(100_000_000)
            self.buffers[0].copy_(original)

    def check(self) -> None:
        import torch

        torch.cuda.synchronize()
        got = self.buffers[1].cpu().numpy()
        assert np.array_equal(got, self.want), oracle.explain(self.arenas[1], got, self.want)
        assert np.array_equal(self.buffers[0].cpu().numpy(), self.data[0])


SIZES = [(1, 1, 1, 1, 1), (2, 2, 3, 5, 5), (3, 2, 8, 16, 64), (2, 1, 1, 16, 128), (4, 2, 4, 8, 24)]


@pytest.mark.gpu
@pytest.mark.parametrize("views", [torch_views, interface_views], ids=["torch", "interface"])
@pytest.mark.parametrize("to_whole", [True, False], ids=["to", "from"])
@pytest.mark.parametrize("layout", ["NHD", "HND", "nhd", "Hnd"])
@pytest.mark.parametrize("dtype", sorted(oracle.ITEMSIZE))
def test_universal_sanitize(dtype: str, layout: str, to_whole: bool, views: Any) -> None:
    import torch

    stream = torch.cuda.Stream()
    for index, sizes in enumerate(SIZES):
        nb, itemsize = (1, 2, 5)[index % 3], oracle.ITEMSIZE[dtype]
        stack = Stack(
            "universal",
            layout,
            kvbm.BlockShape(*sizes, dtype),
            nb,
            to_whole,
            views,
            (itemsize * (index % 3), itemsize * (index % 2)),
        )
        if to_whole:
            kernels.block_to_universal(stack.args_blocks, stack.args_whole, layout, stream=stream)
        else:
            kernels.universal_to_block(stack.args_whole, stack.args_blocks, layout, stream=stream)
        stack.check()


class OnGpu:
    """`stacks.Stacks` in guarded CUDA buffers, as lists of torch tensors or of bare CUDA arrays."""

    def __init__(self, stack: stacks.Stacks, views: Any):
        import torch

        self.stack = stack
        self.buffers = [torch.from_numpy(data).cuda() for data in stack.data]
        torch.cuda.synchronize()
        self.lists = [stack.lists(side, buffer, views) for side, buffer in enumerate(self.buffers)]

    def check(self) -> None:
        import torch

        torch.cuda.synchronize()
        self.stack.check(*(buffer.cpu().numpy() for buffer in self.buffers))


@pytest.mark.gpu
@pytest.mark.parametrize("views", [torch_views, interface_views], ids=["torch", "interface"])
@pytest.mark.parametrize(("src", "dst"), [("nhd", "hnd"), ("hnd", "nhd")])
@pytest.mark.parametrize("dtype", sorted(oracle.ITEMSIZE))
def test_transpose_sanitize(dtype: str, src: str, dst: str, views: Any) -> None:
    import torch

    stream, itemsize = torch.cuda.Stream(), oracle.ITEMSIZE[dtype]
    for index, sizes in enumerate(stacks.SIZES):
        align = itemsize * (index % 3), itemsize * (index % 2)
        stack = stacks.Stacks(src, dst, kvbm.BlockShape(*sizes, dtype), (1, 2, 5)[index % 3], align)
        there = OnGpu(stack, views)
        kernels.nhd_hnd_transpose(*there.lists, src.upper() if index % 2 else src, stream=stream)
        there.check()


@pytest.mark.gpu
@pytest.mark.parametrize("views", [torch_views, interface_views], ids=["torch", "interface"])
@pytest.mark.parametrize("to_whole", [True, False], ids=["to", "from"])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("dtype", sorted(oracle.ITEMSIZE))
def test_layers_sanitize(dtype: str, layout: str, to_whole: bool, views: Any) -> None:
    import torch

    stream, itemsize = torch.cuda.Stream(), oracle.ITEMSIZE[dtype]
    call = kernels.block_to_universal if to_whole else kernels.universal_to_block
    names = (layout, "universal") if to_whole else ("universal", layout)
    for index, (sizes, layers) in enumerate(zip(stacks.SIZES, stacks.LAYERS, strict=True)):
        align = itemsize * (index % 3), itemsize * (index % 2)
        stack = stacks.Stacks(*names, kvbm.BlockShape(*sizes, dtype), (1, 2, 5)[index % 3], align, layers)
        there = OnGpu(stack, views)
        call(*there.lists, layout, layers=layers, stream=stream)
        there.check()


@pytest.mark.gpu
def test_a_large_transpose_and_the_layers_of_a_model() -> None:
    """More addresses than fit the parameters; against torch's own permutation."""
    import torch

    nb, nl, no, nh, nt, hd = 16, 32, 2, 8, 16, 128
    pages = torch.randint(-(2**15), 2**15, (nb, nl * no, nt, nh, hd), dtype=torch.int16, device="cuda")
    other = torch.zeros(nb, nl * no, nh, nt, hd, dtype=torch.int16, device="cuda")
    chunks, turned = [list(row.unbind()) for row in pages], [list(row.unbind()) for row in other]
    kernels.nhd_hnd_transpose(chunks, turned)
    assert torch.equal(other, pages.transpose(2, 3))
    back = torch.zeros_like(pages)
    kernels.nhd_hnd_transpose(turned, [row.unbind() for row in back], "HND")
    assert torch.equal(back, pages)
    universals = torch.full((nb, nh, nl, no, nt, hd), 7, dtype=torch.int16, device="cuda")
    kernels.block_to_universal([row[10:20] for row in chunks], universals, layers=range(5, 10))
    want = torch.full_like(universals, 7)
    want[:, :, 5:10] = pages.view(nb, nl, no, nt, nh, hd)[:, 5:10].permute(0, 4, 1, 2, 3, 5)
    assert torch.equal(universals, want)
    for layer in range(nl):
        kernels.block_to_universal(
            [row[2 * layer : 2 * layer + 2] for row in turned], universals, "HND", layers=range(layer, layer + 1)
        )
    assert torch.equal(universals, pages.view(nb, nl, no, nt, nh, hd).permute(0, 4, 1, 2, 3, 5))


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["transpose", "layers"])
def test_new_copies_in_a_graph_and_on_the_current_stream(what: str) -> None:
    """Captured on torch's current stream; nothing synchronises, which a capture would refuse."""
    import torch

    shape, layers = kvbm.BlockShape(4, 2, 8, 16, 128, "bfloat16"), range(1, 3)
    stack = (
        stacks.Stacks("nhd", "hnd", shape, 3)
        if what == "transpose"
        else stacks.Stacks("universal", "nhd", shape, 3, layers=layers)
    )
    there = OnGpu(stack, torch_views)

    def copy() -> None:
        if what == "transpose":
            kernels.nhd_hnd_transpose(*there.lists)
        else:
            kernels.universal_to_block(*there.lists, layers=layers)

    copy()  # what is loaded lazily is loaded here
    there.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy()
    there.buffers[1].copy_(torch.from_numpy(stack.data[1]))
    graph.replay()
    there.check()


BACKENDS = [
    None, "auto", "kernel", "batch", "async", "AUTO", "kernel_only", "memcpy_batch", "memcpy_async",
    "cuda_memcpy_batch", "cuda_memcpy_async",
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("views", [torch_views, interface_views], ids=["torch", "interface"])
@pytest.mark.parametrize("to_whole", [True, False], ids=["to", "from"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_operational(backend: str | None, to_whole: bool, views: Any) -> None:
    import torch

    if backend in ("batch", "memcpy_batch", "cuda_memcpy_batch") and not kernels.is_memcpy_batch_available():
        pytest.skip("the driver has no cuMemcpyBatchAsync")
    stream = torch.cuda.Stream()
    for index, (sizes, dtype) in enumerate(
        zip(SIZES, ("uint8", "bfloat16", "float16", "float32", "int64"), strict=True)
    ):
        for layout in ("nhd", "hnd"):
            stack = Stack(
                "operational", layout, kvbm.BlockShape(*sizes, dtype), (2, 1, 5)[index % 3], to_whole, views, (0, 0)
            )
            if to_whole:
                kernels.block_to_operational(stack.args_blocks, stack.args_whole, backend, stream=stream)
            else:
                kernels.operational_to_block(stack.args_whole, stack.args_blocks, backend, stream=stream)
            stack.check()


@pytest.mark.gpu
def test_one_tensor_for_many() -> None:
    """One tensor for all universals; a flat list for one block; tuples."""
    import torch

    shape = kvbm.BlockShape(2, 2, 3, 4, 8, "float16")
    whole = torch.zeros(3, 3, 2, 2, 4, 8, dtype=torch.float16, device="cuda")
    chunks = [[torch.randn(4, 3, 8, device="cuda").half() for _ in range(4)] for _ in range(3)]
    kernels.block_to_universal(chunks, whole)
    want = torch.stack([torch.stack(row).view(2, 2, 4, 3, 8).permute(3, 0, 1, 2, 4) for row in chunks])
    assert torch.equal(whole.view(torch.int16), want.contiguous().view(torch.int16))
    one = torch.zeros(3, 2, 2, 4, 8, dtype=torch.float16, device="cuda")
    kernels.block_to_universal(tuple(chunks[1]), one)
    assert torch.equal(one.view(torch.int16), want[1].contiguous().view(torch.int16))
    back = [torch.zeros(4, 3, 8, dtype=torch.float16, device="cuda") for _ in range(4)]
    kernels.universal_to_block([one], back)
    assert all(torch.equal(a, b) for a, b in zip(back, chunks[1], strict=True))
    flat = torch.zeros(3, 2, 2, shape.nt * shape.nh * shape.hd, dtype=torch.float16, device="cuda")
    kernels.block_to_operational(chunks, flat)
    assert torch.equal(flat.view(12, -1), torch.stack([c.flatten() for row in chunks for c in row]))


@pytest.mark.gpu
def test_current_stream_of_torch() -> None:
    """Without a given stream, torch's current one is used, not the default stream."""
    import torch

    shape = kvbm.BlockShape(4, 2, 8, 16, 128, "bfloat16")
    stack = Stack("universal", "nhd", shape, 8, True, torch_views, (0, 0))
    side = torch.cuda.Stream()
    stack.fill_late(side)
    with torch.cuda.stream(side):
        kernels.block_to_universal(stack.args_blocks, stack.args_whole)
    stack.check()


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["torch", "int", "cuda.core", "cuda.bindings", "protocol"])
def test_streams(how: str) -> None:
    import torch

    shape = kvbm.BlockShape(4, 2, 8, 16, 128, "bfloat16")
    stack = Stack("universal", "hnd", shape, 8, True, torch_views, (0, 0))
    side = torch.cuda.Stream()
    stream: Any = side
    if how == "int":
        stream = side.cuda_stream
    elif how == "cuda.core":
        from cuda.core import Device

        device = Device(0)
        device.set_current()
        stream = device.create_stream()
        side = torch.cuda.ExternalStream(int(stream.handle))
    elif how == "cuda.bindings":
        from cuda.bindings import driver

        stream = driver.CUstream(side.cuda_stream)
    elif how == "protocol":

        class Mine:
            def __cuda_stream__(self) -> tuple[int, int]:
                return (0, side.cuda_stream)

        stream = Mine()
    stack.fill_late(side)
    kernels.block_to_universal(stack.args_blocks, stack.args_whole, "HND", stream=stream)
    side.synchronize()
    stack.check()


def test_a_stream_of_torch_is_not_asked_in_python() -> None:
    """Its own attribute has the handle; a class of the user's that is made from it is asked as it says."""

    def asked(_: object) -> tuple[int, int]:
        return 0, 9

    theirs = type("Stream", (), {"__module__": "torch.cuda.streams", "cuda_stream": 7, "__cuda_stream__": asked})
    mine = type("Mine", (theirs,), {"__module__": "mine"})
    assert (_core.stream_handle(theirs()), _core.stream_handle(mine())) == (7, 9)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_cupy(layout: str) -> None:
    cupy = pytest.importorskip("cupy")
    shape = (5, 3, 8) if layout == "NHD" else (3, 5, 8)
    chunks = [[cupy.random.randint(0, 2**16, shape).astype(cupy.uint16) for _ in range(4)] for _ in range(3)]
    whole = [cupy.zeros((3, 2, 2, 5, 8), cupy.uint16) for _ in range(3)]
    cupy.cuda.get_current_stream().synchronize()  # the other stream does not wait for this one
    with cupy.cuda.Stream(non_blocking=True) as stream:
        kernels.block_to_universal(chunks, whole, layout)  # CuPy's current stream
        stream.synchronize()
    order = (3, 0, 1, 2, 4) if layout == "NHD" else (2, 0, 1, 3, 4)
    for row, got in zip(chunks, whole, strict=True):
        want = np.stack([cupy.asnumpy(c) for c in row]).reshape(2, 2, *shape).transpose(order)
        assert np.array_equal(cupy.asnumpy(got), want)


@pytest.mark.gpu
def test_refusals_leave_the_destination() -> None:
    import torch

    stack = Stack("universal", "nhd", SHAPE, 2, True, torch_views, (0, 0))
    bad = [row[:] for row in stack.args_blocks]
    bad[1][3] = bad[1][3][:, :, :-1]
    for broken in (bad, stack.args_blocks[:1], [row[::-1][:3] for row in stack.args_blocks]):
        with pytest.raises(ValueError, match="blocks"):
            kernels.block_to_universal(broken, stack.args_whole)
    with pytest.raises(TypeError):
        kernels.block_to_universal(
            [[t.view(torch.bfloat16) for t in row] for row in stack.args_blocks], stack.args_whole
        )
    torch.cuda.synchronize()
    assert np.array_equal(stack.buffers[1].cpu().numpy(), stack.data[1])
