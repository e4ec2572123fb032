"""An engine's pages in host memory, by key, with digests.  SGLang is not imported."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ...layout.layout import Layout
from ...planner.cast import Cast
from ...pool.pool import Pool
from ...system.machine import host_beside
from ..host_store import Copying, HostStore

__all__ = ["HostPages", "PagesCopying"]


class PagesCopying(NamedTuple):
    """A running copy of pages, to host memory or to the engine."""

    keys: list[str]
    copying: Copying


class HostPages:
    """Host memory for pages of a pool, whose blocks they are.  If it is full, the least recently used pages are evicted.

    `layout` and `cast`, as for `HostStore`, are those of the pages in host memory: `host`, which is pinned if the engine is on
    a GPU, on its NUMA node.  `wrong` counts pages whose contents differed from what was stored.
    """

    def __init__(self, engine: Pool, layout: Layout, num_pages: int, cast: Cast = None) -> None:
        self.engine = engine
        self.host = Pool.allocate(layout, engine.shape, num_pages, host_beside(engine.device))
        self._copies = HostStore(engine, self.host, cast=cast)
        self._pages: OrderedDict[str, int] = OrderedDict()  # key → block of the host
        self._arriving: set[str] = set()
        self._protected: set[str] = set()
        self._free = list(range(num_pages))[::-1]
        self.wrong = 0

    def __contains__(self, key: str) -> bool:
        return key in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    def missing(self, keys: Iterable[str]) -> list[str]:
        """The keys without a page in host memory or on its way there."""
        return [key for key in keys if key not in self._pages and key not in self._arriving]

    def protect(self, keys: Iterable[str]) -> None:
        """Protect pages from eviction until `unprotect`."""
        for key in keys:
            if key in self._pages:
                self._pages.move_to_end(key)
                self._protected.add(key)

    def unprotect(self) -> None:
        """End the protection of all pages."""
        self._protected.clear()

    def check(self, keys: Sequence[str]) -> None:
        """Compare pages in host memory with their digests, and remove those that differ."""
        here = [key for key in keys if key in self._pages]
        blocks = [self._pages[key] for key in here]
        self._remove(here, blocks, self._copies.changed(blocks))

    def _remove(self, keys: Sequence[str], blocks: Sequence[int], wrong: Any) -> None:
        """Remove the pages that are wrong, if they are still in these blocks."""
        for key, block, is_wrong in zip(keys, blocks, wrong.tolist(), strict=True):
            if not is_wrong:
                continue
            self.wrong += 1
            if self._pages.get(key) == block:
                self._free.append(self._pages.pop(key))
                self._protected.discard(key)

    def room(self, count: int) -> bool:
        """True if there is space for `count` pages, after eviction if needed."""
        return count <= len(self._free) + len(self._pages) - len(self._protected)

    def store(self, keys: Sequence[str], ids: Sequence[int], stream: Any = None) -> PagesCopying:
        """Begin to copy pages to host memory.  Call `room` before, and `stored` when the copy is done."""
        while len(self._free) < len(keys):
            oldest = next(key for key in self._pages if key not in self._protected)
            self._free.append(self._pages.pop(oldest))
        blocks = [self._free.pop() for _ in keys]
        storing = PagesCopying(list(keys), self._copies.store(ids, blocks, stream))
        self._arriving.update(keys)
        return storing

    def stored(self, storing: PagesCopying) -> None:
        """Add the pages of a copy that is done."""
        self._copies.stored(storing.copying)
        for key, block in zip(storing.keys, storing.copying.units.tolist(), strict=True):
            self._pages[key] = block
            self._arriving.discard(key)

    def load(
        self, keys: Sequence[str], ids: Sequence[int], parts: Iterable[range], stream: Any = None
    ) -> Iterator[PagesCopying]:
        """Begin to copy pages to the engine, one part of the layers per item.  Call `loaded` at the end.

        On the CPU pages are compared before they are copied, so that wrong ones never reach the engine.
        """
        blocks = [self._pages[key] for key in keys]
        for copying in self._copies.load(blocks, ids, parts, stream):
            yield PagesCopying(list(keys), copying)

    def loaded(self, loading: PagesCopying, stream: Any = None) -> bool:
        """Wait for a load.  True if all its pages have their digests; the engine's pages of the others are zero then."""
        copying = loading.copying
        copying.synchronize()
        wrong = self._copies.wrong(copying)
        self._remove(loading.keys, copying.units.tolist(), wrong)
        self._copies.zeros(copying.ids[wrong], stream)
        return not wrong.any()

    def clear(self) -> None:
        """Remove all pages.  No copy may be running."""
        self._pages.clear()
        self._arriving.clear()
        self._protected.clear()
        self._free = list(range(self.host.num_blocks))[::-1]

    def close(self) -> None:
        """Free the memory.  Wait for the copies before."""
        self.clear()
        self._copies.close()
        self.host.close()
