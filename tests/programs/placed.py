"""Pinned memory on the NUMA node of a GPU (test_numa.py)."""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Sequence

import kvbm
import sysfs
from kvbm import _core
from kvbm.memory import numa
from programs.fake_gpu import count, refused

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_INTERLEAVE = 3

flash = kvbm.load("vllm/flash_attn_nhd")
shape = kvbm.BlockShape(nl=3, no=2, nh=2, nt=8, hd=64, dtype="float16")


def a_policy_is_seen() -> None:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return
    assert not numa._has_policy()
    mask = ctypes.c_ulong(1)
    if not ctypes.CDLL(None).syscall(number, _INTERLEAVE, ctypes.byref(mask), 65):  # containers may forbid it
        assert numa._has_policy()


def pools_are_placed_before_they_are_touched(root: str, gpus: Sequence[str]) -> None:
    assert [numa.pci_address(device) for device in (0, 1, 2)] == [*gpus, ""]
    numa.place = functools.partial(numa.place, root=root)
    touch, seen = _core.host_touch, []
    _core.host_touch = lambda at, *rest: (seen.append(sysfs.policy(at)), touch(at, *rest))
    for device, want, node in (("pinned:1", "prefer:0", 0), ("pinned:0", "default", None), ("pinned", "default", None)):
        with kvbm.Pool.allocate(flash, shape, 5, device) as pool:
            assert (pool.device, pool.pinned, pool._owned[0].node) == ("cpu", True, node)
            assert sysfs.policy(pool._slab[0]) == sysfs.policy(pool._slab[1] - 1) == want, device
    assert seen == ["prefer:0", "default", "default"]


def a_gpu_that_does_not_exist() -> None:
    with refused(kvbm.CudaError, "cuda:2"):
        kvbm.Pool.allocate(flash, shape, 5, "pinned:2")
    assert count("registered") == 0
    kvbm.Pool.allocate(flash, shape, 5, "pinned:1").close()
