"""While another thread imports torch, CuPy or a part of NumPy, their modules are there and have no names yet."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import pytest

import kvbm
from kvbm import BindError, Pool
from kvbm._arguments import imported, quoted
from kvbm.layout.naming import dtype_name
from kvbm.memory.array_info import describe
from kvbm.memory.streams import framework_stream
from kvbm.testing.data import is_array

SHAPE = kvbm.load_shape("nl=1,no=2,nh=2,nt=4,hd=8,dtype=float32")


@pytest.fixture(autouse=True)
def half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: AttributeError of a module, from any call that looked whether an argument is a tensor."""
    for name in ("torch", "cupy", "numpy.ma"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__spec__._initializing = True  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)


class Other:
    """No array."""


def test_it_is_not_there() -> None:
    assert imported("torch") is None and imported("numpy") is np and imported("there is none") is None


def test_pools_copies_and_ids() -> None:
    src, dst = (Pool.allocate(kvbm.load(name), SHAPE, 3) for name in ("nhd", "universal"))
    for array in src.arrays:
        array[...] = np.arange(array.size).reshape(array.shape)
    kvbm.convert(src, dst, [0, 2], np.array([1, 2], np.int32))
    kvbm.convert(dst, src, np.array([1, 2]), [0, 2])
    assert len(src.digest(np.array([0, 2]), tokens=[0, 4])) == 2
    before = [array.copy() for array in src.arrays]
    again = Pool(kvbm.load("nhd"), SHAPE, src.arrays)
    assert all(map(np.array_equal, again.arrays, before)) and is_array(again.arrays[0]) and not is_array(Other())
    for given in (Other(), [Other()], "abc", np.datetime64(3, "s")):
        with pytest.raises(kvbm.KvbmError):
            kvbm.convert(src, dst, given, [0])
        with pytest.raises(kvbm.KvbmError):
            Pool(kvbm.load("nhd"), SHAPE, given)


def test_what_is_asked_of_an_argument() -> None:
    assert dtype_name(np.float32) == "float32" and describe(np.zeros(3), "x").shape == (3,)
    for call in (lambda: dtype_name(Other()), lambda: describe(Other(), "x"), lambda: framework_stream("torch", 0)):
        with pytest.raises(kvbm.KvbmError):
            call()
    assert "Other" in quoted(Other())
    with pytest.raises(BindError):
        describe(object(), "x")
