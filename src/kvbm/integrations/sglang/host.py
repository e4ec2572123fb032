"""Pages of an engine in host memory, by key, each with its digest; nothing of SGLang is imported."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ...layout import Layout
from ...pool import Pool
from ...transfer import Transfer

__all__ = ["HostPages", "Loading", "Storing"]


class Page(NamedTuple):
    """Where a page is in host memory, and what it was."""

    block: int
    digest: int


class Storing(NamedTuple):
    """Pages on their way to host memory; what the copy reads and writes is kept until it is done."""

    keys: list[str]
    blocks: list[int]
    digests: torch.Tensor
    done: Any


class Loading(NamedTuple):
    """Pages on their way to the engine: of each part of the layers a row of digests, which add up to those of pages."""

    keys: list[str]
    pages: list[Page]
    digests: torch.Tensor
    dones: list[Any]


class HostPages:
    """Host memory for pages of a pool; the page that was not asked for the longest makes room.

    Parameters
    ----------
    engine : Pool
        Of which a block is a page.
    layout : Layout
        How pages lie in host memory.
    num_pages : int

    Attributes
    ----------
    engine, host : Pool
        Host memory is pinned where the engine is on a GPU.
    wrong : int
        Pages that were found to be not what was stored.
    """

    def __init__(self, engine: Pool, layout: Layout, num_pages: int) -> None:
        self.engine = engine
        self.host = Pool.allocate(layout, engine.shape, num_pages, "cpu" if engine.device == "cpu" else "pinned")
        self._out, self._back = Transfer(engine, self.host), Transfer(self.host, engine)
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
        """Those of which no page is here, nor on its way."""
        return [key for key in keys if key not in self._pages and key not in self._coming]

    def hold(self, keys: Iterable[str]) -> None:
        """Keep pages from making room, until `let_go`."""
        for key in keys:
            if key in self._pages:
                self._pages.move_to_end(key)
                self._held.add(key)

    def let_go(self) -> None:
        """Any page may make room again."""
        self._held.clear()

    def check(self, keys: Sequence[str]) -> None:
        """Digest pages in host memory, and forget those that are not what was stored."""
        here = [key for key in keys if key in self._pages]
        if here:
            pages = [self._pages[key] for key in here]
            self._compare(here, pages, self.host.digest([page.block for page in pages]))

    def _compare(self, keys: Sequence[str], pages: Sequence[Page], found: Any) -> bool:
        """Whether pages are what was stored; those that are not are forgotten."""
        bad = {key: page for key, page, one in zip(keys, pages, found.tolist(), strict=True) if one != page.digest}
        for key, page in bad.items():
            if self._pages.get(key) is page:
                self._free.append(self._pages.pop(key).block)
                self._held.discard(key)
            self.wrong += 1
        return not bad

    def room(self, count: int) -> bool:
        """Whether so many pages have room, or older ones make it."""
        return count <= len(self._free) + len(self._pages) - len(self._held)

    def store(self, keys: Sequence[str], ids: Sequence[int], stream: Any = None) -> Storing:
        """Begin to copy pages here; `room` was asked.  See `stored`."""
        while len(self._free) < len(keys):
            oldest = next(key for key in self._pages if key not in self._held)
            self._free.append(self._pages.pop(oldest).block)
        blocks = [self._free.pop() for _ in keys]
        digests = torch.empty(len(keys), dtype=torch.int64, pin_memory=self.engine.device != "cpu")
        done = self._out.copy(list(ids), blocks, digests=digests, **_on(stream))
        self._coming.update(keys)
        return Storing(list(keys), blocks, digests, done)

    def stored(self, storing: Storing) -> None:
        """Pages are here; `storing.done` is."""
        found = storing.digests.numpy().view(np.uint64).tolist()
        for key, block, digest in zip(storing.keys, storing.blocks, found, strict=True):
            self._pages[key] = Page(block, digest)
            self._coming.discard(key)

    def load(
        self, keys: Sequence[str], ids: Sequence[int], parts: Iterable[range], stream: Any = None
    ) -> Iterator[Loading]:
        """Copy pages to the engine, some layers after the others: after each part what was begun so far.  See `loaded`."""
        pages = [self._pages[key] for key in keys]
        blocks = [page.block for page in pages]
        parts = list(parts)
        digests = torch.zeros(len(parts), len(keys), dtype=torch.int64, pin_memory=self.engine.device != "cpu")
        loading = Loading(list(keys), pages, digests, [])
        for row, layers in zip(digests, parts, strict=True):
            if layers:
                done = self._back.copy(blocks, list(ids), layers=layers, digests=row, **_on(stream))
                loading.dones.append(done)
            yield loading

    def loaded(self, loading: Loading) -> bool:
        """Wait for a load; whether pages are what was stored."""
        for done in loading.dones:
            done.synchronize()
        found = loading.digests.numpy().view(np.uint64).sum(0, dtype=np.uint64)
        return self._compare(loading.keys, loading.pages, found)

    def clear(self) -> None:
        """Forget all pages; nothing is on its way."""
        self._pages.clear()
        self._coming.clear()
        self._held.clear()
        self._free = list(range(self.host.num_blocks))[::-1]

    def close(self) -> None:
        """Give the memory back; wait for the copies first."""
        self.clear()
        self._out.close()
        self._back.close()
        self.host.close()


def _on(stream: Any) -> dict[str, Any]:
    return {} if stream is None else {"stream": stream}
