"""Each kernel's loop nest by itself, as it is launched (test_kernels.py)."""

from __future__ import annotations

import itertools

import numpy as np
from test_kernels import FEW, OF_PLANES, ONE_PART, Nest, Page, ways

from kvbm import _core
from memory import aligned
from programs.fake_gpu import count


def each_of_planes_is_launched() -> None:
    for name, how in OF_PLANES:
        page = Page(name, how)
        source, got = aligned(page.data[0]), aligned(page.data[1])
        tables = [_core.Table(page.addresses(side, b.ctypes.data)) for side, b in enumerate((source, got))]
        digests = np.full(len(page.digests), 7, np.uint64)
        page.copy().launch(*tables, page.pairs, 0, 5, digests=digests.ctypes.data if page.digests else 0)
        page.check(source, got)
        assert digests.tolist() == page.digests, f"{name}: digests"
    assert count("launches") == len(OF_PLANES) > 20


def each(names: tuple[str, ...] = (), shorts: tuple[bool, ...] = (True, False)) -> None:
    """Every kernel of one part, or those among these names, bit for bit, guards and digests included."""
    chosen = [name for name in ONE_PART if not names or name in names]
    assert chosen
    for name in chosen:
        for short in shorts:
            for most, (run, keyed) in itertools.product((1 + 2 * short,) if name in FEW else (0,), ways(name, short)):
                nest = Nest(name, short, run, keyed)
                source, got = aligned(nest.src.data), aligned(nest.dst.data)
                tables = [_core.Table(s.addresses(b.ctypes.data)) for s, b in ((nest.src, source), (nest.dst, got))]
                digests = np.full(len(nest.digests), 7, np.uint64)
                address = digests.ctypes.data if nest.digests else 0
                nest.copy().launch(*tables, nest.pairs, 0, 5, max_sms=most, digests=address)
                nest.check(source, got)
                assert digests.tolist() == nest.digests, f"{name}: digests, runs of {run}"


def few_launches() -> None:
    for name in [*FEW, "rows_o4_i8_w16"]:
        for most in (1, 3, 1000, 0):
            nest = Nest(name, most == 3)
            source, got = aligned(nest.src.data), aligned(nest.dst.data)
            tables = [_core.Table(s.addresses(b.ctypes.data)) for s, b in ((nest.src, source), (nest.dst, got))]
            nest.copy().launch(*tables, nest.pairs, 0, 5, max_sms=most)
            nest.check(source, got)
            print(name, most, count("last_grid"), count("last_threads"), count("last_shared"), count("most_shared"))
