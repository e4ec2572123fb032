# ruff: noqa: B023  (what a loop defines is called in the same turn)
"""Arrays whose memory is gone are found before a byte is read or written, whatever their number and whatever uses the pool."""

from __future__ import annotations

import ctypes
import functools
import gc
import math
import mmap
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import shared_memory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import kvbm
from kvbm.layout import spec
from kvbm.memory import liveness

LAYOUT = spec.parse('order: "[l] b t d"', name="layers")
BLOCKS, ROW = 3, (3, 2, 4)
NUMBERS = (1, 2, 16, 17, 64, 160, 1000)


def shape(layers: int) -> kvbm.BlockShape:
    return kvbm.BlockShape(layers, 1, 1, 2, 4, "float32")


@pytest.fixture(params=["fields", "asked"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways in which torch's tensors are looked at: their fields in C, and their methods, where the fields are not found."""
    if request.param == "asked":
        monkeypatch.setattr(liveness, "_known", [])
        monkeypatch.setattr(liveness, "_find_fields", lambda _: None)
    else:
        assert liveness.torch_fields() is not None, "this release of torch has its fields elsewhere"
    return str(request.param)


def tensors(count: int, value: float = 0.0) -> list[torch.Tensor]:
    return [torch.full(ROW, value) for _ in range(count)]


def smaller_there(tensor: torch.Tensor) -> None:
    """Another storage at the same address, which ends earlier: what an allocator gives after a resize to 0."""
    memory = (ctypes.c_char * (4 * tensor.numel())).from_address(tensor.data_ptr())
    tensor.data = torch.from_numpy(np.frombuffer(memory, np.float32, count=8))


LOSSES: dict[str, Callable[[torch.Tensor], object]] = {
    "freed": lambda one: one.untyped_storage().resize_(0),
    "moved": lambda one: one.untyped_storage().resize_(1 << 16),
    "replaced": lambda one: one.set_(torch.zeros(ROW)),
    "data": lambda one: setattr(one, "data", torch.zeros(ROW)),
    "offset": lambda one: setattr(one, "data", one.data.flatten()[4:]),
    "smaller": smaller_there,
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("side", ["source", "destination"])
def test_one_array_without_its_memory_ends_every_use_before_a_byte(way: str, loss: str, side: str) -> None:
    for count, lost in ((1, 0), (17, 16), (40, 0), (1000, 999 if loss in ("freed", "data", "offset") else 0)):
        arrays, others = tensors(count, 1.0), tensors(count, 2.0)
        broken = arrays if side == "source" else others
        kept = [*arrays, *others]
        src, dst = kvbm.Pool(LAYOUT, shape(count), arrays), kvbm.Pool(LAYOUT, shape(count), others)
        few = count < 1000
        copy = kvbm.Transfer(src, dst)
        verified = kvbm.Transfer(src, dst, verify=True) if few else copy
        units = kvbm.Transfer(src.units(1), dst.units(1)) if few else copy
        copy.copy([0], [1])
        for one in others:
            one.fill_(2.0)
        holds = broken[lost].untyped_storage()  # what the pool keeps alive, too
        LOSSES[loss](broken[lost])
        pool = src if side == "source" else dst
        uses: list[Callable[[], object]] = [
            lambda: copy.copy([0], [1]), lambda: kvbm.convert(src, dst, [0], [1]), lambda: verified.copy([0], [1]),
            lambda: units.copy([0], [1]), lambda: copy.copy([0], [1], digests=np.zeros(1, np.uint64)),
            lambda: pool.digest([0]), lambda: pool.section(t=0).digest([0]), lambda: kvbm.Transfer(src, dst),
            pool.require_open, pool.check,
        ]  # fmt: skip
        for use in uses if few else uses[:2]:
            with pytest.raises(kvbm.BindError, match=f"array {lost} has other memory than when it was bound"):
                use()
        for one in others:
            if one is not broken[lost]:
                assert bool((one == 2.0).all())
        del kept, holds


def test_memory_that_grew_in_place_is_taken_as_it_is(way: str) -> None:
    """The same address, and at least the bytes that the pool uses."""
    room = np.ones(100, np.float32)
    given = torch.from_numpy(room[:24]).view(ROW)
    src, dst = kvbm.Pool(LAYOUT, shape(1), [given]), kvbm.Pool(LAYOUT, shape(1), tensors(1))
    given.data = torch.from_numpy(room)
    move = kvbm.Transfer(src, dst)
    for _ in range(2):
        move.copy([0], [1])
    assert float(dst.arrays[0][1].sum()) == 8
    assert way == "asked" or src.watch.changed() == -1, "it was noted"


def test_numpy_does_not_resize_arrays_of_a_pool_and_replaced_data_are_found() -> None:
    for count in (1, 40):
        arrays = [np.ones(ROW, np.float32) for _ in range(count)]
        src, dst = kvbm.Pool(LAYOUT, shape(count), arrays), kvbm.Pool(LAYOUT, shape(count), tensors(count))
        for one in arrays:
            with pytest.raises(ValueError, match="cannot resize"):
                one.resize((1,), refcheck=False)
        move = kvbm.Transfer(src, dst)
        move.copy([0], [0])
        arrays[-1].__setstate__(np.zeros((1, 2, 4), np.float32).__reduce__()[2])  # maybe at the same address
        with pytest.raises(kvbm.BindError, match=f"array {count - 1} has other memory"):
            move.copy([0], [0])


def test_the_memory_under_numpys_views_stays_while_a_pool_is_open() -> None:
    """`numpy.ndarray(..., buffer=)` keeps no buffer, so without the pool's own hold all of these are freed under it."""
    nbytes = 2 * 4 * math.prod(ROW)
    mapped, apart = mmap.mmap(-1, nbytes), shared_memory.SharedMemory(create=True, size=nbytes)
    apart.unlink()
    whole = np.zeros(nbytes // 4, np.float32)
    owners: list[tuple[Any, Callable[[], object], type[Exception]]] = [
        (mapped, mapped.close, BufferError),
        (apart.buf, apart.close, BufferError),
        (whole, lambda: whole.resize((1,), refcheck=False), ValueError),
    ]
    for memory, free, error in owners:
        arrays = [np.ndarray(ROW, np.float32, memory, at * nbytes // 2) for at in range(2)]
        pool = kvbm.Pool(LAYOUT, shape(2), arrays)
        del arrays
        with pytest.raises(error):
            free()
        assert pool.digest().shape == (BLOCKS,)
        pool.close()
        del pool
        free()


def test_any_array_that_has_become_read_only_is_no_destination() -> None:
    for locked in (0, 20, 39):
        arrays = [np.zeros(ROW, np.float32) for _ in range(40)]
        src, dst = kvbm.Pool(LAYOUT, shape(40), tensors(40, 1.0)), kvbm.Pool(LAYOUT, shape(40), arrays)
        move = kvbm.Transfer(src, dst)
        arrays[locked].flags.writeable = False
        for use in (lambda: move.copy([0], [0]), lambda: kvbm.convert(src, dst, [0], [0])):
            with pytest.raises(kvbm.BindError, match="the destination is read-only"):
                use()
        assert not any(one.any() for one in arrays)
        kvbm.Transfer(dst, src).copy([0], [0])  # it may be read


@pytest.mark.slow  # 1.0 s
@pytest.mark.sanitize
def test_deleted_arrays_of_jax_are_found() -> None:
    jnp = pytest.importorskip("jax.numpy")
    arrays = [jnp.ones(ROW, "float32") for _ in range(20)]
    src, dst = kvbm.Pool(LAYOUT, shape(20), arrays), kvbm.Pool(LAYOUT, shape(20), tensors(20))
    move = kvbm.Transfer(src, dst)
    move.copy([0], [0])
    arrays[18].delete()
    for use in (lambda: move.copy([0], [0]), lambda: kvbm.convert(src, dst), lambda: src.digest([0])):
        with pytest.raises(kvbm.BindError, match="array 18 has other memory"):
            use()


def test_memory_of_kvbm_that_was_freed_is_found() -> None:
    """A second pool over the arrays of `Pool.allocate(device="cuda")`, after the first one was closed."""
    gone = SimpleNamespace(is_deleted=lambda: True)
    assert not liveness.has_memory(gone, 0, 0) and liveness.has_memory(object(), 0, 0)


class Asked:
    """An array that is asked in Python whether it has its memory, and calls something then."""

    called: Callable[[], object]

    def __init__(self) -> None:
        self.memory, self.called = np.zeros(ROW, "float32"), dict

    def __dlpack__(self, **options: Any) -> Any:
        return self.memory.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.memory.__dlpack_device__()

    def is_deleted(self) -> bool:
        called, self.called = self.called, dict
        called()
        return False


@pytest.mark.parametrize("is_src", [True, False])
def test_memory_that_goes_while_an_array_is_asked_is_found(is_src: bool) -> None:
    for what in ("its pool", "the other pool", "the other memory"):
        asked, [other] = Asked(), tensors(1)
        pools = [kvbm.Pool(LAYOUT, shape(1), one) for one in ((asked, other) if is_src else (other, asked))]
        move = kvbm.Transfer(pools[0], pools[1])
        asked.called = {
            "its pool": pools[not is_src].close, "the other pool": pools[is_src].close,
            "the other memory": functools.partial(other.untyped_storage().resize_, 0),
        }[what]  # fmt: skip
        with pytest.raises(kvbm.BindError, match="other memory than when" if what == "the other memory" else "is closed"):
            move.copy([0], [0])


def test_pools_of_arrays_that_refer_to_them_are_freed() -> None:
    """What `convert` keeps of two pools ends with either of them."""

    class Cache(Asked):
        def __init__(self) -> None:
            super().__init__()
            self.pool = kvbm.Pool(LAYOUT, shape(1), self)

    engine = Cache()
    for is_src in (True, False):
        cache = Cache()
        kvbm.convert(*((cache.pool, engine.pool) if is_src else (engine.pool, cache.pool)))
        gone = weakref.ref(cache)
        del cache
        gc.collect()
        assert gone() is None, is_src


def test_autograd_is_told_of_a_pool_that_is_closed_during_the_copy(way: str) -> None:
    count = 16
    sizes, ids = kvbm.BlockShape(count, 1, 1, 2, 4, "float32"), np.arange(1 << 15)
    src, dst = ([torch.full((ids.size, 2, 4), value) for _ in range(count)] for value in (7.0, 0.0))
    pools, told = [kvbm.Pool(LAYOUT, sizes, arrays) for arrays in (src, dst)], [one._version + 1 for one in dst]
    move = kvbm.Transfer(pools[0], pools[1])
    with ThreadPoolExecutor(1) as threads:
        copied = threads.submit(move.copy, ids, ids)
        while not dst[0][0, 0, 0] and not copied.done():
            pass
        pools[1].close()
        copied.result()
    assert [one._version for one in dst] == told


def test_autograd_is_told_of_all_tensors(way: str) -> None:
    counts = NUMBERS if way == "fields" else NUMBERS[:-1]
    for count in counts:
        src, others = kvbm.Pool(LAYOUT, shape(count), tensors(count)), tensors(count)
        move = kvbm.Transfer(src, kvbm.Pool(LAYOUT, shape(count), others))
        before = [one._version for one in others]
        move.copy([0], [0])
        kvbm.convert(src, move._executor.keep[1], [0], [0])  # type: ignore[index]
        assert [one._version for one in others] == [version + 2 for version in before], count
        with pytest.raises(kvbm.BindError):
            move.copy([0], [9])
        assert [one._version for one in others] == [version + 2 for version in before], "nothing was written"


def test_a_closed_pool_is_refused_by_what_was_made_before() -> None:
    src, dst = kvbm.Pool(LAYOUT, shape(2), tensors(2)), kvbm.Pool.allocate(LAYOUT, shape(2), BLOCKS)
    move = kvbm.Transfer(src, dst)
    for pool in (dst, src):
        pool.close()
        for use in (lambda: move.copy([0], [0]), lambda: kvbm.convert(src, dst)):
            with pytest.raises(kvbm.BindError, match="is closed"):
                use()


@pytest.mark.slow  # 0.5 s
@pytest.mark.sanitize
def test_a_pool_ends_with_its_last_reference() -> None:
    gc.collect()
    gc.disable()
    try:
        pool = kvbm.Pool(LAYOUT, shape(2), arrays := tensors(2))
        pool.digest([0])
        gone, of = weakref.ref(pool), weakref.ref(arrays[0])
        del pool, arrays
        assert gone() is None and of() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["torch", "numpy", "own"])
def test_a_warm_copy_makes_two_calls_in_python_however_many_arrays_there_are(kind: str) -> None:
    """What a time would show as a loss: each array was asked in Python once, which took 9 µs for 80 layers."""
    for count in (1, 17, 160):
        if kind == "own":
            src, dst = (kvbm.Pool.allocate(LAYOUT, shape(count), BLOCKS) for _ in range(2))
        else:
            make = tensors if kind == "torch" else lambda n: [np.zeros(ROW, np.float32) for _ in range(n)]
            src, dst = (kvbm.Pool(LAYOUT, shape(count), make(count)) for _ in range(2))
        move, ids = kvbm.Transfer(src, dst), np.array([1, 0])
        move.copy(ids, ids)
        seen: list[tuple[str, Any]] = []
        sys.setprofile(lambda frame, event, arg: seen.append((event, arg or frame.f_code.co_name)))
        try:
            move.copy(ids, ids)
        finally:
            sys.setprofile(None)
        python = [name for event, name in seen if event == "call"]
        assert python == ["copy", "stream"], (count, python)  # `stream` says that the host has none
        assert len([event for event, _ in seen if event == "c_call"]) <= 2, seen  # of `setprofile`, and the route


@pytest.mark.parametrize("nbytes", [0, 20])
def test_torchs_functions_refuse_tensors_whose_storage_was_resized(way: str, nbytes: int) -> None:
    """It was read and written behind its end."""
    import kvbm.torch

    names = "vllm/LBHNC", "vllm/LBNHC", "nl=1,no=2,nh=1,nt=4,hd=1"
    for lost in (0, 1):
        pair = [torch.arange(48.0).view(1, 6, 1, 4, 2, 1), torch.zeros(1, 6, 4, 1, 2, 1)]
        pair[lost].untyped_storage().resize_(nbytes)
        calls = [lambda: kvbm.torch.convert_(pair[0], pair[1], *names), lambda: kvbm.torch.convert(pair[0], *names)]
        for call in calls[: 2 - lost]:
            with pytest.raises(kvbm.BindError, match="its storage was freed or resized"):
                call()
