"""Lists of ranges by one call of the driver, as vLLM makes them."""

from __future__ import annotations

import numpy as np

from benchmarks.descriptors import Batch
from kvbm import _core
from kvbm.bench.measure import Memory
from kvbm.errors import CudaError, CudaUnavailableError


def main() -> None:
    """Ranges of host memory go to other places on the GPU, and return."""
    host, back, device = (Memory(4096, place) for place in ("pinned", "pinned", "cuda:0"))
    host.fill(1)
    starts = np.arange(0, 4096, 512)
    there = np.random.default_rng(1).permutation(starts)
    Batch(device.address + there, host.address + starts, 512, 0, reads_host=False)(2)
    Batch(back.address + starts, device.address + there, 512, 0, reads_host=False)(2)
    _core.synchronize(0, 2)
    print(np.array_equal(back.array, host.array))
    try:  # this driver wants all in the order of the stream
        Batch(device.address + there, host.address + starts, 512, 0, reads_host=True)(2)
    except CudaError as error:
        print(error)


def refused() -> None:
    """A driver that has no such call."""
    try:
        Batch(np.zeros(1), np.zeros(1), 1, 0, reads_host=True)
    except CudaUnavailableError as error:
        print(error)
