"""An engine's pages in host memory, by key, with digests.  SGLang is not imported."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ...copy.transfer import Transfer
from ...copy.zeros import Zeros
from ...layout.layout import Layout
from ...pool.pool import Pool

__all__ = ["HostPages", "Loading", "Storing"]


class Page(NamedTuple):
    """A page's block in host memory, and its digest when it was stored."""

    block: int
    digest: int


class Storing(NamedTuple):
    """A running copy of pages to host memory.  It keeps the memory of the copy until the copy is done."""

    keys: list[str]
    blocks: list[int]
    digests: torch.Tensor
    done: Any


class Loading(NamedTuple):
    """A running copy of pages to the engine.  `digests` has a row per part of the layers; the rows add up to the pages' digests."""

    keys: list[str]
    ids: list[int]  # the engine's pages
    wrong: frozenset[int]  # of them those that are not copied, as host memory has changed
    pages: list[Page]
    digests: torch.Tensor
    dones: list[Any]


class HostPages:
    """Host memory for pages of a pool.  If it is full, the least recently used pages are evicted.

    Parameters
    ----------
    engine : Pool
        The engine's pool.  One block is one page.
    layout : Layout
        Layout of the pages in host memory.
    num_pages : int

    Attributes
    ----------
    engine, host : Pool
        The two pools.  Host memory is pinned if the engine is on a GPU.
    wrong : int
        Number of pages whose contents differed from what was stored.
    """

    def __init__(self, engine: Pool, layout: Layout, num_pages: int) -> None:
        self.engine = engine
        self.host = Pool.allocate(layout, engine.shape, num_pages, "cpu" if engine.device == "cpu" else "pinned")
        self._out, self._back = Transfer(engine, self.host), Transfer(self.host, engine)
        self._zeros = Zeros(engine)
        self._pages: OrderedDict[str, Page] = OrderedDict()
        self._coming: set[str] = set()
        self._held: set[str] = set()
        self._free = list(range(num_pages))[::-1]
        self.wrong = 0

    def __contains__(self, key: str) -> bool:
        return key in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    def missing(self, keys: Iterable[str]) -> list[str]:
        """The keys without a page in host memory or on its way there."""
        return [key for key in keys if key not in self._pages and key not in self._coming]

    def hold(self, keys: Iterable[str]) -> None:
        """Protect pages from eviction until `let_go`."""
        for key in keys:
            if key in self._pages:
                self._pages.move_to_end(key)
                self._held.add(key)

    def let_go(self) -> None:
        """End the protection of all pages."""
        self._held.clear()

    def check(self, keys: Sequence[str]) -> None:
        """Compare pages in host memory with their digests, and remove those that differ."""
        here = [key for key in keys if key in self._pages]
        if here:
            pages = [self._pages[key] for key in here]
            self._compare(here, pages, self.host.digest([page.block for page in pages]))

    def _compare(self, keys: Sequence[str], pages: Sequence[Page], found: Any) -> set[str]:
        """The keys of pages that do not have their digests.  They are removed."""
        bad = {key: page for key, page, one in zip(keys, pages, found.tolist(), strict=True) if one != page.digest}
        for key, page in bad.items():
            if self._pages.get(key) is page:
                self._free.append(self._pages.pop(key).block)
                self._held.discard(key)
            self.wrong += 1
        return set(bad)

    def room(self, count: int) -> bool:
        """True if there is space for `count` pages, after eviction if needed."""
        return count <= len(self._free) + len(self._pages) - len(self._held)

    def store(self, keys: Sequence[str], ids: Sequence[int], stream: Any = None) -> Storing:
        """Begin to copy pages to host memory.  Call `room` before, and `stored` when the copy is done."""
        while len(self._free) < len(keys):
            oldest = next(key for key in self._pages if key not in self._held)
            self._free.append(self._pages.pop(oldest).block)
        blocks = [self._free.pop() for _ in keys]
        digests = torch.empty(len(keys), dtype=torch.int64, pin_memory=self.engine.device != "cpu")
        done = self._out.copy(list(ids), blocks, digests=digests, **_on(stream))
        self._coming.update(keys)
        return Storing(list(keys), blocks, digests, done)

    def stored(self, storing: Storing) -> None:
        """Add the pages of a copy that is done."""
        found = storing.digests.numpy().view(np.uint64).tolist()
        for key, block, digest in zip(storing.keys, storing.blocks, found, strict=True):
            self._pages[key] = Page(block, digest)
            self._coming.discard(key)

    def load(
        self, keys: Sequence[str], ids: Sequence[int], parts: Iterable[range], stream: Any = None
    ) -> Iterator[Loading]:
        """Begin to copy pages to the engine, one part of the layers per item.  Call `loaded` at the end.

        On the CPU pages are compared before they are copied, so that wrong ones never reach the engine.
        """
        pages = [self._pages[key] for key in keys]
        blocks = [page.block for page in pages]
        wrong = frozenset[int]()
        if self.engine.device == "cpu" and blocks:
            found = self.host.digest(blocks).tolist()
            wrong = frozenset(at for at, page, one in zip(ids, pages, found, strict=True) if one != page.digest)
        parts = list(parts)
        digests = torch.zeros(len(parts), len(keys), dtype=torch.int64, pin_memory=self.engine.device != "cpu")
        loading = Loading(list(keys), list(ids), wrong, pages, digests, [])
        into = [-1 if at in wrong else at for at in ids]
        for row, layers in zip(digests, parts, strict=True):
            if layers:
                done = self._back.copy(blocks, into, layers=layers, digests=row, **_on(stream))
                loading.dones.append(done)
            yield loading

    def loaded(self, loading: Loading, stream: Any = None) -> bool:
        """Wait for a load.  True if all its pages have their digests; the engine's pages of the others are zero then."""
        for done in loading.dones:
            done.synchronize()
        found = loading.digests.numpy().view(np.uint64).sum(0, dtype=np.uint64)
        for row, (at, page) in enumerate(zip(loading.ids, loading.pages, strict=True)):
            if at in loading.wrong:  # not copied
                found[row] = ~np.uint64(page.digest)
        bad = self._compare(loading.keys, loading.pages, found)
        self._zeros((at for key, at in zip(loading.keys, loading.ids, strict=True) if key in bad), stream)
        return not bad

    def clear(self) -> None:
        """Remove all pages.  No copy may be running."""
        self._pages.clear()
        self._coming.clear()
        self._held.clear()
        self._free = list(range(self.host.num_blocks))[::-1]

    def close(self) -> None:
        """Free the memory.  Wait for the copies before."""
        self.clear()
        self._out.close()
        self._back.close()
        self._zeros.close()
        self.host.close()


def _on(stream: Any) -> dict[str, Any]:
    return {} if stream is None else {"stream": stream}
