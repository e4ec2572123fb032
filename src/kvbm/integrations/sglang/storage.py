"""A storage backend for SGLang's HiCache: pages in a folder of units that all engines share."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from ...errors import BindError, KvbmError, escaping
from ...layout import spec as layouts
from ...layout.shapes import BlockShape
from ...pool.pool import Pool
from ...store.folder import Folder, remove, units_of
from ...store.keys import Content, key_of_json
from ...store.shelf import Shelf
from ..identity import neighbours
from ..settings import unknown
from .identity import stored_model_of

__all__ = ["KvbmStorage", "pool_of"]

logger = escaping(logging.getLogger(__name__))

#: Names in ``--hicache-storage-backend-extra-config``: kvbm's, and those that SGLang reads itself.
_SETTINGS = (
    "path", "folder_bytes", "unit_tokens", "model_id",
    "backend_name", "module_path", "class_name", "interface_v1", "prefetch_threshold", "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token", "hicache_storage_pass_prefix_keys",
)  # fmt: skip

#: Settings of earlier versions.
_RETIRED = {
    "file_layout": "all engines write one layout into a shared folder",
    "heads_per_file": "a rank reads its heads from files of any heads",
}

#: Threads that read or write at the same time.
_THREADS = 2

#: SGLang's ``--hicache-mem-layout`` → the layout of keys and values, and of latents.
_LAYOUTS = {
    "layer_first": ("sglang/host_layer_first", "sglang/host_mla_layer_first"),
    "page_first": ("sglang/host_page_first", "sglang/host_mla_page_first"),
    "page_first_direct": ("sglang/host_page_first_direct", "sglang/host_mla_page_first_direct"),
    "page_head": ("sglang/host_page_head", None),
}


def pool_of(host: Any) -> Pool:
    """A pool on the memory of HiCache's host pool: block b is page b.

    Raises `BindError`: the class is not ``MHATokenToKVPoolHost`` or ``MLATokenToKVPoolHost``, or ``--hicache-mem-layout`` is
    not ``layer_first``, ``page_first``, ``page_first_direct`` or (not for latents) ``page_head``.
    """
    is_mla = type(host) is MLATokenToKVPoolHost
    if not is_mla and type(host) is not MHATokenToKVPoolHost:
        raise BindError(f"SGLang: expected a MHATokenToKVPoolHost or a MLATokenToKVPoolHost, got {type(host).__name__}")
    name = _LAYOUTS.get(host.layout, (None, None))[is_mla]
    if name is None:
        known = [layout for layout, names in _LAYOUTS.items() if names[is_mla]]
        raise BindError(f"SGLang: {type(host).__name__}: expected --hicache-mem-layout {', '.join(known)}, got {host.layout}")
    if host.layer_num != host.end_layer - host.start_layer or host.dcp_size > 1:
        raise BindError(
            f"SGLang: {type(host).__name__} of {host.layer_num} layers, {host.start_layer} to {host.end_layer - 1} of the model: "
            "expected those alone, without a draft model's, and without context parallelism in decode"
        )
    dtype = str(host.dtype).removeprefix("torch.")
    if is_mla:
        shape = BlockShape(host.layer_num, 1, 1, host.page_size, host.kv_cache_dim, dtype)
    else:
        shape = BlockShape(host.layer_num, 2, host.head_num, host.page_size, host.head_dim, dtype)
    layout = layouts.load(name)
    sizes = layout.resolve(shape, host.page_num).first.shape
    return Pool(layout, shape, host.kv_buffer.view(sizes))


class KvbmStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang is not typed
    """Pages in a folder that all engines share (`kvbm.store.folder`), with a digest of each head.

    Settings in ``--hicache-storage-backend-extra-config``, besides SGLang's ``backend_name``, ``module_path``, ``class_name`` and
    ``interface_v1`` (which must be 1):

    path : str
        The folder.  It is created if it does not exist.
    folder_bytes : int
        Limit of the bytes of all files in the folder.  Default: no limit.
    unit_tokens : int
        Tokens per unit.  Only the number of tokens of a page is possible, which is the default.
    model_id : str
        A name that no other weights have: then they are not read.  vLLM's ``model_key`` of the same name means the same.
        Default: a hash of the weights.

    Raises
    ------
    BindError
        The version of SGLang is not supported, a setting, a pool or the parallelism is not known, or the weights are not here.

    Notes
    -----
    SGLang's key of a page is the key of the unit with its tokens: SGLang and `kvbm.store.keys` have the same chain.  A file appears
    only when it is complete.  A file whose contents have changed is a miss, and is removed.  The log names the fields that differ
    in other contents of the same model's name: their units are not used.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:  # noqa: ARG002  (SGLang passes it)
        given = dict(storage_config.extra_config or {})
        for name, why in _RETIRED.items():
            if given.pop(name, None) is not None:
                logger.warning("kvbm: hicache-storage-backend-extra-config: %s: it is not needed any more: %s", name, why)
        if problem := unknown(given, _SETTINGS):  # no error: SGLang and its other parts may read more
            logger.warning("kvbm: hicache-storage-backend-extra-config: %s", problem)
        if not given.get("interface_v1"):
            raise BindError(f"interface_v1: expected 1, got {given.get('interface_v1')!r:.100}: pages are read in place")
        if storage_config.attn_cp_size > 1 or storage_config.dcp_size > 1:
            raise BindError("SGLang: context parallelism: expected none; which tokens a rank holds is not known")
        self.config = storage_config
        self.root = Path(_text(given, "path", None))
        self.model = _text(given, "model_id", "")
        self.most_bytes, self.unit_tokens = _number(given, "folder_bytes"), _number(given, "unit_tokens")
        self.stats = {"stored": 0, "loaded": 0, "lost": 0}

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        pool, config = pool_of(mem_pool_host), self.config
        self.page_size = pool.shape.nt
        if self.unit_tokens not in (None, self.page_size):
            raise BindError(
                f"unit_tokens: expected the {self.page_size} tokens of a page (--page-size), as SGLang tells a storage backend "
                f"only keys of pages, got {self.unit_tokens}; set --page-size {self.unit_tokens}, or give the engines of vLLM that "
                f'share the folder "unit_tokens": {self.page_size}, which may be several of their blocks'
            )
        is_mla = type(mem_pool_host) is MLATokenToKVPoolHost
        total = 1 if is_mla else pool.shape.nh * config.tp_size
        first = 0 if is_mla else pool.shape.nh * config.tp_rank
        if not self.model and pool.shape.dtype in ("uint8", "int8"):
            raise BindError(f"model_id: the host pool holds {pool.shape.dtype}, of which it does not say what it is: expected one")
        if not (title := self.model or config.model_name):
            raise BindError("model_id: SGLang does not name its model: expected one")
        model = stored_model_of(self.model)
        if (tag := getattr(mem_pool_host, "storage_format_tag", None)) is not None:
            model["more"]["storage_format_tag"] = str(tag)
        layers = tuple(range(mem_pool_host.start_layer, mem_pool_host.end_layer))
        content = Content(key_of_json(model), title, layers, replace(pool.shape, nh=total))
        self.folder = Folder(self.root, content, self.most_bytes)
        self.folder.make(model)
        for line in neighbours(self.folder.root, content, model):
            logger.warning("kvbm: pages beside these are not used: %s", line)
        self._shelf, self._pool = Shelf(content, pool, range(first, first + pool.shape.nh), threads=_THREADS), pool
        logger.info("kvbm: pages of %s in %s", pool, self.folder.root)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if host_pool_name != PoolName.KV:
            raise BindError(f"SGLang: a host pool {host_pool_name} beside the keys and values is not known; expected none")
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    # ---- what SGLang calls ---------------------------------------------------------------------------------------------

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Write pages that are in no files yet.  True for each page that is stored afterwards."""
        return self._each("stored", keys, host_indices, extra_info)

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Read pages from files.  True for each page that was read and has its digests."""
        return self._each("loaded", keys, host_indices, extra_info)

    def exists(self, key: str) -> bool:
        return self.folder.holds(_unit_of(key))

    def clear(self) -> None:
        """Remove the units of this content, of all ranks and engines."""
        for unit in units_of(str(self.folder.root)):
            remove(unit)

    def close(self) -> None:
        """Free the memory of the copies."""
        self._shelf.close()

    def _refused(self, *_: Any, **__: Any) -> Any:
        raise BindError("interface_v1: expected 1: kvbm reads and writes pages in place, and no tensors beside them")

    get = batch_get = set = batch_set = _refused

    # ---- pages ---------------------------------------------------------------------------------------------------------

    def _each(self, what: str, keys: list[str], indices: Any, extra_info: Any) -> list[bool]:
        """Store or load pages.  One that fails is a miss, and the log says why."""
        pages = self._pages(keys, indices)
        names = [_unit_of(key) for key in keys]
        before = len(getattr(extra_info, "prefix_keys", None) or ())
        found: list[bool] = []
        for at in range(0, len(pages), self._shelf.step):
            some = slice(at, at + self._shelf.step)
            blocks = np.array(pages[some], np.int64)
            firsts = [self.page_size * (before + at + row) for row in range(len(blocks))]
            try:
                if what == "stored":
                    done = self._shelf.write(self.folder, blocks, self._pool.digest(blocks), names[some], firsts)
                else:
                    done = self._shelf.read(self.folder, blocks, names[some], firsts)
            except KvbmError as error:  # such as after `close`
                logger.error("kvbm: pages were not %s: %s", what, str(error))
                found += [False] * len(blocks)
                continue
            if done.why:
                logger.error("kvbm: %d pages were not %s: %s", int((~done.good).sum()), what, done.why)
            found += done.good.tolist()
        self.stats[what] += sum(found)
        self.stats["lost"] += len(found) - sum(found)
        return found

    def _pages(self, keys: Sequence[str], indices: Any) -> list[int]:
        """The numbers of the pages in the host pool of some slots."""
        slots = indices.tolist()
        firsts = slots[:: self.page_size]
        whole = [first + at for first in firsts for at in range(self.page_size)]
        if len(firsts) != len(keys) or slots != whole or any(first < 0 or first % self.page_size for first in firsts):
            raise BindError(f"SGLang: expected the slots of {len(keys)} pages of {self.page_size} tokens, got {slots!s:.200}")
        return [first // self.page_size for first in firsts]


def _unit_of(key: str) -> str:
    """The key of the unit of a page: SGLang's own, if it is a hash."""
    if re.fullmatch(r"[0-9a-f]{64}", key):
        return key
    return hashlib.sha256(b"key of a page\0" + key.encode(errors="surrogatepass")).hexdigest()


def _text(given: dict[str, Any], name: str, usual: str | None) -> str:
    found = given.get(name, usual)
    if not isinstance(found, str):
        raise BindError(f"hicache-storage-backend-extra-config: {name}: expected a text, got {found!r:.100}")
    return found


def _number(given: dict[str, Any], name: str) -> int | None:
    found = given.get(name)
    if found is not None and (isinstance(found, bool) or not isinstance(found, int) or found < 1):
        raise BindError(f"hicache-storage-backend-extra-config: {name}: expected a number from 1 on, got {found!r:.100}")
    return found
