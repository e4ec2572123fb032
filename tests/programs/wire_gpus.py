"""`wire.memory` on a machine of several GPUs."""

from __future__ import annotations

import numpy as np

from kvbm import _core, wire
from kvbm.wire.protocol import move


def copies() -> None:
    """Puts and gets of `memory` on a machine of several GPUs."""
    size, host = 4096, np.zeros(4096, np.uint8)
    for kinds in ((0, 1), (0, "cpu"), ("cpu", 1)):
        slabs = [
            wire.Slab.of(np.zeros(size, np.uint8))
            if kind == "cpu"
            else wire.Slab(_core.alloc_device(kind, size), size, f"cuda:{kind}")
            for kind in kinds
        ]
        ends = [wire.memory("near"), wire.memory("far")]
        for end, slab in zip(ends, slabs, strict=True):
            end.register(slab)
            move(slab, 0, wire.Slab.of(np.zeros(size, np.uint8)), 0, size)
        near, _ = (end.connect(other.card()) for end, other in (ends, ends[::-1]))
        content = np.arange(size, dtype=np.uint32).astype(np.uint8)
        move(slabs[0], 0, wire.Slab.of(content), 0, size)
        ends[0].put(near, wire.Slice(0, 1000), wire.Slice(3000, 1000))
        move(wire.Slab.of(host), 0, slabs[1], 0, size)
        assert (host[3000:4000] == content[:1000]).all() and not host[:3000].any() and not host[4000:].any()
        ends[0].get(near, wire.Slice(2000, 1000), wire.Slice(3000, 1000))
        move(wire.Slab.of(host), 0, slabs[0], 0, size)
        assert (host[2000:3000] == content[:1000]).all() and (host[:2000] == content[:2000]).all()
        print(*kinds)
