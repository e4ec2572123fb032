"""Lists of tensors that are looked at from C (test_core_copies.py): data/as_cuda.c is $AS_CUDA."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import torch

import kvbm
from kvbm import _core, kernels
from programs.fake_gpu import random, refused

lib = ctypes.CDLL(os.environ["AS_CUDA"])
lib.as_cuda.restype, lib.as_cuda.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
get, new = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_New
get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
NAME = ctypes.create_string_buffer(b"dlpack_exchange_api")
API = lib.as_cuda(get(torch.Tensor.__dlpack_c_exchange_api__, NAME.value))
NB, NL, NO, NH, NT, HD = 3, 4, 2, 3, 5, 8
PER = NL * NO
CHUNK, WHOLE, FLAT = (NT, NH, HD), (NH, NL, NO, NT, HD), (NL, NO, NT * NH * HD)


def looks() -> int:
    """How many tensors C has looked at."""
    return ctypes.c_long.in_dll(lib, "looks").value


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU, to Python and to C."""

    __dlpack_c_exchange_api__ = new(API, ctypes.addressof(NAME), None)
    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda _: torch.device("cuda", 0))


def gpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnGpu)


def made(
    *shape: int, dtype: torch.dtype = torch.float16, on: Callable[[torch.Tensor], torch.Tensor] = gpu
) -> torch.Tensor:
    flat = torch.from_numpy(random.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8))
    return on(flat.view(dtype).view(shape) if flat.numel() else torch.empty(shape, dtype=dtype))


def batch(nb: int = NB, **rest: Any) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    return [[made(*CHUNK, **rest) for _ in range(PER)] for _ in range(nb)], [made(*WHOLE, **rest) for _ in range(nb)]


def closely(*arguments: Any) -> None:
    raise SystemExit("looked at closely")


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return plain(tensor).view(torch.uint8)


def check(chunks: list[list[torch.Tensor]], whole: list[torch.Tensor], heads_at: int) -> None:
    for row, universal in zip(chunks, whole, strict=True):
        stacked = torch.stack([bits(chunk) for chunk in row]).view(NL, NO, *row[0].shape[:2], -1)
        assert torch.equal(bits(universal), stacked.movedim(heads_at, 0).contiguous())


def lists_are_looked_at_from_c() -> None:
    look_closely, kernels._look_closely = kernels._look_closely, closely
    names = "bool int8 uint8 float8_e4m3fn float8_e5m2 int16 uint16 float16 bfloat16 int32 uint32 float32 int64 uint64 float64"
    for name in names.split():
        for layout, heads_at in (("NHD", 3), ("HND", 2)):
            chunks, whole = batch(dtype=getattr(torch, name))
            if layout == "HND":
                chunks = [[made(NH, NT, HD, dtype=getattr(torch, name)) for _ in row] for row in chunks]
            before = looks()
            kernels.block_to_universal(chunks, whole, layout, stream=5)
            # The first of each list is looked at twice.
            assert looks() - before <= NB * PER + NB + 2, looks() - before
            check(chunks, whole, heads_at)
            for universal in whole:
                bits(universal)[...] ^= 0xFF
            kernels.universal_to_block(tuple(whole), tuple(tuple(row) for row in chunks), layout, stream=5)
            check(chunks, whole, heads_at)
    for backend in (None, "batch", "async"):
        chunks, _ = batch()
        flat = made(NB, *FLAT)  # one tensor for all
        kernels.block_to_operational(chunks, flat, backend, stream=5)
        stacked = torch.stack([torch.stack([bits(chunk) for chunk in row]) for row in chunks])
        assert torch.equal(bits(flat).view(NB, PER, -1), stacked.view(NB, PER, -1))
    one, _ = batch(nb=1)
    whole = made(*WHOLE)
    kernels.block_to_universal(one[0], whole, stream=5)  # a flat list, one tensor
    kernels._look_closely = look_closely
    again = made(*WHOLE)
    _core.whole_tensors = lambda *_: None
    kernels.block_to_universal(one, [again], stream=5)  # as it is looked at from Python
    assert torch.equal(bits(whole), bits(again))


def chunks_and_layers_are_looked_at_from_c() -> None:
    """Lists in the other order, and some layers: each tensor is read once or twice, and the right bytes are copied."""
    look_closely, at_chunks = kernels._look_closely, kernels._look_closely_at_chunks
    kernels._look_closely = kernels._look_closely_at_chunks = closely
    for name in ["bool", "uint8", "float8_e5m2", "int16", "bfloat16", "float32", "float64"]:
        dtype = getattr(torch, name)
        src = [[made(*CHUNK, dtype=dtype) for _ in range(PER)] for _ in range(NB)]
        dst = [[made(NH, NT, HD, dtype=dtype) for _ in range(PER)] for _ in range(NB)]
        before = looks()
        kernels.nhd_hnd_transpose(src, tuple(tuple(row) for row in dst), stream=5)
        assert looks() - before <= 2 * NB * PER + 4, looks() - before
        pairs = [*zip(chain(*src), chain(*dst), strict=True)]
        assert all(torch.equal(bits(b), bits(a).transpose(0, 1).contiguous()) for a, b in pairs)
        for a in chain(*src):
            bits(a)[...] ^= 0xFF
        kernels.nhd_hnd_transpose(dst[1], src[1], "HND", stream=5)  # one block as a flat list
        assert all(
            torch.equal(bits(b), bits(a).transpose(0, 1).contiguous()) for a, b in zip(src[1], dst[1], strict=True)
        )
        _, whole = batch(dtype=dtype)
        had = [bits(universal).clone() for universal in whole]
        some = [row[NO : 3 * NO] for row in src]
        kernels.block_to_universal(some, whole, layers=range(1, 3), stream=5)
        for row, universal, old in zip(some, whole, had, strict=True):
            old[:, 1:3] = torch.stack([bits(chunk) for chunk in row]).view(2, NO, NT, NH, -1).permute(3, 0, 1, 2, 4)
            assert torch.equal(bits(universal), old)
        one = made(*WHOLE, dtype=dtype)
        kernels.universal_to_block(one, some[0], layers=range(2, 4), stream=5)
        got = torch.stack([bits(chunk) for chunk in some[0]]).view(2, NO, NT, NH, -1)
        assert torch.equal(got, bits(one)[:, 2:4].permute(1, 2, 3, 0, 4))
    kernels._look_closely, kernels._look_closely_at_chunks = look_closely, at_chunks


def each_as_from_python(look: str, deviations: list[str]) -> None:
    """What a function below says to each deviation, first with the reading in C and then without it."""
    by_c, said = _core.whole_tensors, []
    for deviation in deviations:
        said.append(globals()[look](deviation))
        _core.whole_tensors = by_c
    print(said)


def wrong_chunks(deviation: str) -> tuple[str, str] | None:
    """`deviation`: a statement that changes `src` or `dst`."""
    src = [[made(*CHUNK) for _ in range(PER)] for _ in range(NB)]
    dst = [[made(NH, NT, HD) for _ in range(PER)] for _ in range(NB)]
    scope = {**globals(), "src": src, "dst": dst}
    exec(deviation, scope)

    def outcome() -> tuple[str, str] | None:
        try:
            return kernels.nhd_hnd_transpose(scope["src"], scope["dst"], stream=5)
        except Exception as error:
            return type(error).__name__, str(error)

    from_c = outcome()
    _core.whole_tensors = lambda *_: None
    assert outcome() == from_c, (deviation, outcome(), from_c)
    return from_c


def wrong_lists(deviation: str) -> list[tuple[str, str] | None]:
    """`deviation`: a statement that changes `chunks` or `whole`."""
    scope = {**globals(), **dict(zip(("chunks", "whole"), batch(), strict=True))}
    exec(deviation, scope)
    chunks, whole = scope["chunks"], scope["whole"]

    def tried(call: Callable[..., None], *arguments: Any) -> tuple[str, str] | None:
        try:
            return call(*arguments, stream=5)
        except Exception as error:
            return type(error).__name__, str(error)

    def outcomes() -> list[tuple[str, str] | None]:
        return [tried(kernels.block_to_universal, chunks, whole), tried(kernels.universal_to_block, whole, chunks)]

    from_c = outcomes()
    _core.whole_tensors = lambda *_: None
    assert outcomes() == from_c, (deviation, outcomes(), from_c)
    return from_c


def destinations_count_as_written() -> None:
    def versions(tensors: list[torch.Tensor]) -> list[int]:
        return [tensor._version for tensor in tensors]

    by_c = _core.whole_tensors
    for look in (by_c, lambda *_: None):
        _core.whole_tensors = look
        src, dst = [made(*CHUNK) for _ in range(6)], [made(NH, NT, HD) for _ in range(6)]
        kernels.nhd_hnd_transpose([src[:3], src[3:]], [dst[:3], dst[3:]], stream=5)
        kernels.nhd_hnd_transpose(src, dst, stream=5)
        assert versions(dst) == [2] * 6 and versions(src) == [0] * 6
        for nb in (1, 3):
            chunks, whole = batch(nb=nb)
            flat, given = [*chain(*chunks)], chunks[0] if nb == 1 else chunks
            kernels.block_to_universal(given, whole, stream=5)
            assert versions(whole) == [1] * nb and versions(flat) == [0] * len(flat)
            kernels.universal_to_block(whole, given, stream=5)
            assert versions(whole) == [1] * nb and versions(flat) == [1] * len(flat)
            inner = [made(*FLAT) for _ in range(nb)]
            for turn, backend in enumerate((None, "batch", "async"), 1):
                kernels.block_to_operational(given, inner, backend, stream=5)
                assert versions(inner) == [turn] * nb
                kernels.operational_to_block(inner, given, backend, stream=5)
                assert versions(flat) == [1 + turn] * len(flat)
            try:
                kernels.universal_to_block([*whole[:-1], whole[-1][0]], given, stream=5)
            except kvbm.BindError:
                assert versions(flat) == [4] * len(flat)
    _core.whole_tensors = by_c
    chunks, _ = batch()
    stacked = made(NB, *FLAT)
    kernels.block_to_operational(chunks, stacked, stream=5)
    assert stacked._version == 1
    chunks, whole = batch(nb=40)
    kernels.universal_to_block(whole, chunks, stream=5)
    assert not any(versions([*chain(*chunks)]))


def a_list_that_changes_while_it_is_looked_at() -> None:
    chunks, whole = batch()

    class Meta(type(torch.Tensor)):
        def __getattribute__(cls, name: str) -> Any:
            if name == "__dlpack_c_exchange_api__":
                del chunks[1][2:]
            return super().__getattribute__(name)

    class Evil(torch.Tensor, metaclass=Meta):
        device = property(lambda _: torch.device("cuda", 0))

    chunks[1][1] = made(*CHUNK, on=lambda t: t.as_subclass(Evil))
    with refused((kvbm.BindError, IndexError)):
        kernels.block_to_universal(chunks, whole, stream=5)
