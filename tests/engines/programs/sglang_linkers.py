"""A linker that spoils what waits in host memory, where a file says so: for the tests of `kvbm.integrations.sglang`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kvbm.integrations.sglang import KvbmLinker


class SpoiledLinker(KvbmLinker):
    """Sets a bit of each byte of a page that is asked for when the file ``spoil`` says so: before a lookup, or a load.

    Where it says ``blind``, a page is spoiled before a load and given the digest of what it holds then.  It writes how many pages
    of each kind it holds, and how many were wrong, to the file ``seen``; ``folder`` in its settings says where both are.
    """

    def __init__(self, *args: Any, extra_config: dict[str, Any], **more: Any) -> None:
        self._folder = Path(extra_config.pop("folder"))
        super().__init__(*args, extra_config=extra_config, **more)

    def _spoil(self, when: str, transfers: list[Any]) -> None:
        said = self._folder / "spoil"
        wanted = said.read_text() if said.exists() else ""
        is_blind = wanted == "blind"
        pages, keys = self.pools[transfers[0].name], transfers[0].keys
        if (wanted == when or (is_blind and when == "load")) and len(keys) > 2 and keys[2] in pages:
            said.unlink(missing_ok=True)  # of two ranks one may be quicker
            block = pages._pages[keys[2]]
            array = pages.host.arrays[block]  # a layout with one array a block
            array.view(np.uint8)[...] |= 64
            if is_blind:
                pages._copies.digests[block] = pages.host.digest([block])[0]

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        self._spoil("lookup", transfers)
        return super().lookup(rid, transfers)

    def load(self, rid: str, transfers: list[Any]) -> bool:
        self._spoil("load", transfers)
        return super().load(rid, transfers)

    def pop_completed_offload(self) -> bool:
        done = super().pop_completed_offload()
        seen = " ".join(f"{name.value}:{len(pages)}:{pages.wrong}" for name, pages in self.pools.items())
        (self._folder / "seen").write_text(seen)
        return done
