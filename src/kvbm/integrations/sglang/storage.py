"""A storage backend for SGLang's HiCache: pages in files of a declared layout, which any tensor parallelism can read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from ...copy.transfer import Transfer
from ...errors import BindError, DigestError, KvbmError, escaping
from ...layout import spec as layouts
from ...layout.layout import Layout
from ...layout.shapes import BlockShape
from ...pool.pool import Pool
from ...store import save
from ...store.file import opened
from ...store.open_file import Opened
from ..identity import describe, key_of, neighbours
from ..settings import unknown
from .identity import model_of

__all__ = ["KvbmStorage", "pool_of"]

logger = escaping(logging.getLogger(__name__))

#: Keys in a file's metadata: its name, which contains the page, its layers and its heads; and the name of its folder.
_NAME, _CONTENT = "sglang.page", "sglang.content"

#: Names in ``--hicache-storage-backend-extra-config``: kvbm's, and those that SGLang reads itself.
_SETTINGS = (
    "path", "file_layout", "heads_per_file", "model_id",
    "backend_name", "module_path", "class_name", "interface_v1", "prefetch_threshold", "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token", "hicache_storage_pass_prefix_keys",
)  # fmt: skip

#: SGLang's ``--hicache-mem-layout`` → the layout of keys and values, and of latents.
_LAYOUTS = {
    "layer_first": ("sglang/host_layer_first", "sglang/host_mla_layer_first"),
    "page_first": ("sglang/host_page_first", "sglang/host_mla_page_first"),
    "page_first_direct": ("sglang/host_page_first_direct", "sglang/host_mla_page_first_direct"),
    "page_head": ("sglang/host_page_head", None),
}


def pool_of(host: Any) -> Pool:
    """A pool on the memory of HiCache's host pool: block b is page b.

    Raises
    ------
    BindError
        The class is not ``MHATokenToKVPoolHost`` or ``MLATokenToKVPoolHost``, or ``--hicache-mem-layout`` is not ``layer_first``,
        ``page_first``, ``page_first_direct`` or (not for latents) ``page_head``.
    """
    is_mla = type(host) is MLATokenToKVPoolHost
    if not is_mla and type(host) is not MHATokenToKVPoolHost:
        raise BindError(f"SGLang: expected a MHATokenToKVPoolHost or a MLATokenToKVPoolHost, got {type(host).__name__}")
    name = _LAYOUTS.get(host.layout, (None, None))[is_mla]
    if name is None:
        known = [layout for layout, names in _LAYOUTS.items() if names[is_mla]]
        raise BindError(
            f"SGLang: {type(host).__name__}: expected --hicache-mem-layout {', '.join(known)}, got {host.layout}"
        )
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


class _Piece(NamedTuple):
    """Some heads of a page, which are stored in one file."""

    suffix: str
    near: Pool  # one block in the layout of the files
    put: Transfer  # from the host pool; verifies digests
    get: Transfer


class _Copies:
    """The transfers of one direction.  Only one thread at a time may use them."""

    def __init__(self, pieces: list[_Piece]) -> None:
        self.pieces = pieces
        self.lock = threading.Lock()


class KvbmStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang is not typed
    """Pages in files: one file per page and per ``heads_per_file`` heads, in a declared layout, with digests.

    Settings in ``--hicache-storage-backend-extra-config``, besides SGLang's ``backend_name``, ``module_path``, ``class_name`` and
    ``interface_v1`` (which must be 1):

    path : str
        Folder of the files.  It is created if it does not exist.
    file_layout : str
        Layout of a page in a file: a name of the catalogue, or a file.  Default: ``universal``.
    heads_per_file : int
        A divisor of the number of heads per rank in every deployment.  Default: the number of heads of this rank.
    model_id : str
        A name that no other weights have: then they are not read.  Default: SGLang's model name, and a hash of the weights.

    Raises
    ------
    BindError
        The version of SGLang is not supported, a setting, a pool or the parallelism is not known, or the weights are not here.

    Notes
    -----
    The name of the files' folder contains the model, the layout, and a hash of all that K and V depend on (`model_of`), the dtype
    and the sizes of a page.  ``content.json`` in it says what that is.  The log names the fields that differ in other folders of
    the same model's name: their pages are not used.
    The name of a file contains the page's key, its layers and its heads.  A file appears only when it is complete.  A file whose
    contents have changed is a miss, and is removed.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:  # noqa: ARG002  (SGLang passes it)
        given = dict(storage_config.extra_config or {})
        if problem := unknown(given, _SETTINGS):  # no error: SGLang and its other parts may read more
            logger.warning("kvbm: hicache-storage-backend-extra-config: %s", problem)
        if not given.get("interface_v1"):
            raise BindError(
                f"interface_v1: expected 1, got {given.get('interface_v1')!r:.100}: pages are read in place"
            )
        if storage_config.attn_cp_size > 1 or storage_config.dcp_size > 1:
            raise BindError("SGLang: context parallelism: expected none; which tokens a rank holds is not known")
        self.config = storage_config
        self.root = Path(_text(given, "path", None))
        self.layout = layouts.load(_text(given, "file_layout", "universal"))
        self.model = _text(given, "model_id", "")
        self.heads_per_file = given.get("heads_per_file")
        self.stats = {"stored": 0, "loaded": 0, "wrong": 0}

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        pool, config = pool_of(mem_pool_host), self.config
        self.page_size = pool.shape.nt
        is_mla = type(mem_pool_host) is MLATokenToKVPoolHost
        total = 1 if is_mla else pool.shape.nh * config.tp_size
        first = 0 if is_mla else pool.shape.nh * config.tp_rank
        each = pool.shape.nh if self.heads_per_file is None or is_mla else self.heads_per_file
        if not isinstance(each, int) or each < 1 or pool.shape.nh % each:
            raise BindError(
                f"heads_per_file: expected a divisor of the rank's {pool.shape.nh} heads, got {each!r:.100}"
            )
        if not self.model and pool.shape.dtype in ("uint8", "int8"):
            raise BindError(
                f"model_id: the host pool holds {pool.shape.dtype}, of which it does not say what it is: expected one"
            )
        model = self.model or config.model_name
        if not model:
            raise BindError("model_id: SGLang does not name its model: expected one")
        fields = model_of(self.model)
        tag = getattr(mem_pool_host, "storage_format_tag", None)
        described = _described(key_of(fields), None if tag is None else str(tag), model, pool, total, self.layout)
        self.folder = self.root / _folder(model, self.layout, described)
        describe(self.folder, model, fields, described)
        for line in neighbours(self.folder, model, fields):
            logger.warning("kvbm: pages of another model of this name are not used: %s", line)
        layers = f"l{mem_pool_host.start_layer}-{mem_pool_host.end_layer}"
        self._puts, self._gets = (
            _Copies(list(_pieces(pool, self.layout, first, each, layers, is_mla))) for _ in range(2)
        )
        logger.info("kvbm: pages of %s in files of %s: %s", pool, self.layout.name, self.folder)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if host_pool_name != PoolName.KV:
            raise BindError(
                f"SGLang: a host pool {host_pool_name} beside the keys and values is not known; expected none"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    # ---- what SGLang calls ---------------------------------------------------------------------------------------------

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:  # noqa: ARG002
        """Write pages to files that do not exist yet.  True for each page that is stored afterwards."""
        return self._each(self._puts, self._put, keys, host_indices)

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:  # noqa: ARG002
        """Read pages from files.  True for each page that was read and has its digests."""
        return self._each(self._gets, self._get, keys, host_indices)

    def exists(self, key: str) -> bool:
        return all(self._path(key, piece).exists() for piece in self._gets.pieces)

    def clear(self) -> None:
        """Remove the files of this model and layout, of all ranks."""
        for path in self.folder.glob("*.safetensors"):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Free the memory of the transfers."""
        for copies in (self._puts, self._gets):
            with copies.lock:
                for piece in copies.pieces:
                    piece.put.close()
                    piece.get.close()

    def _refused(self, *_: Any, **__: Any) -> Any:
        raise BindError("interface_v1: expected 1: kvbm reads and writes pages in place, and no tensors beside them")

    get = batch_get = set = batch_set = _refused

    # ---- a page --------------------------------------------------------------------------------------------------------

    def _path(self, key: str, piece: _Piece) -> Path:
        is_plain = re.fullmatch(r"[A-Za-z0-9_]{1,128}", key)
        name = key if is_plain else hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()
        return self.folder / f"{name}.{piece.suffix}.safetensors"

    def _each(
        self, copies: _Copies, act: Callable[[Path, _Piece, int], bool], keys: list[str], indices: Any
    ) -> list[bool]:
        slots = indices.tolist()
        firsts = slots[:: self.page_size]
        whole = [first + at for first in firsts for at in range(self.page_size)]
        if len(firsts) != len(keys) or slots != whole or any(first < 0 or first % self.page_size for first in firsts):
            raise BindError(
                f"SGLang: expected the slots of {len(keys)} pages of {self.page_size} tokens, got {slots!s:.200}"
            )
        with copies.lock:
            return [
                all(act(self._path(key, piece), piece, first // self.page_size) for piece in copies.pieces)
                for key, first in zip(keys, firsts, strict=True)
            ]

    def _put(self, path: Path, piece: _Piece, page: int) -> bool:
        try:
            if path.exists():
                return True
            piece.put.copy([page], [0]).synchronize()
            save(path, piece.near, metadata=_labels(path))
        except FileExistsError:  # another rank or engine has written it meanwhile
            return True
        except (KvbmError, OSError) as error:
            logger.error("kvbm: %s was not stored: %s", path.name, str(error))
            return False
        self.stats["stored"] += 1
        return True

    def _get(self, path: Path, piece: _Piece, page: int) -> bool:
        is_files_fault, file = True, None
        try:
            file = Opened(path)
            stored = opened(file)
            source = stored.source(self.layout, piece.near.shape, 1)
            for name, expected in _labels(path).items():
                if (got := stored.metadata.get(name)) != expected:
                    raise BindError(f"{path}: {name}: expected {expected!r}, got {got!r:.300}")
            if stored.digests is None:
                raise BindError(f"{path}: expected a file with digests")
            source.fill(piece.near, [0], [0])
            found, is_files_fault = piece.near.digest([0]), False
            if is_files_fault := bool(found[0] != stored.digests.blocks[0]):
                raise DigestError(f"{path}: expected digest {stored.digests.blocks[0]:#x}, got {found[0]:#x}")
            piece.get.copy([0], [page]).synchronize()  # compared before: nothing of a wrong file is left
        except FileNotFoundError:
            return False
        except (KvbmError, OSError) as error:
            if not is_files_fault or isinstance(error, OSError):  # such as too many open files: keep the file
                logger.error("kvbm: %s was not loaded, a miss: %s", path.name, str(error))
                return False
            self.stats["wrong"] += 1
            logger.error("kvbm: a page is not what was stored, a miss: %s", str(error))
            if file is not None and file.is_at(path):  # another rank may have written it again
                with contextlib.suppress(OSError):
                    path.unlink()
            return False
        finally:
            if file is not None:
                file.close()
        self.stats["loaded"] += 1
        return True


def _text(given: dict[str, Any], name: str, usual: str | None) -> str:
    found = given.get(name, usual)
    if not isinstance(found, str):
        raise BindError(f"hicache-storage-backend-extra-config: {name}: expected a text, got {found!r:.100}")
    return found


def _labels(path: Path) -> dict[str, str]:
    """The metadata that ties a file to its name and folder: a file that was moved or copied is refused."""
    return {_NAME: path.name, _CONTENT: path.parent.name}


def _described(key: str, tag: str | None, model: str, pool: Pool, heads: int, layout: Layout) -> dict[str, Any]:
    """What a page depends on beside its tokens.  It is equal for deployments that can read each other's files."""
    shape = pool.shape
    return {
        "format": 2, "key": key, "tag": tag, "model": model, "dtype": shape.dtype, "tokens": shape.nt, "planes": shape.no,
        "heads": heads, "head_size": shape.hd, "layout": layout.order_text, "fingerprint": layout.fingerprint,
    }  # fmt: skip


def _folder(model: str, layout: Layout, described: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9.-]+', '-', model)[-64:]}-{layout.name.replace('/', '-')}-{digest[:16]}"


def _pieces(pool: Pool, layout: Layout, first: int, each: int, layers: str, is_mla: bool) -> Iterator[_Piece]:
    for begin in range(0, pool.shape.nh, each):
        part = pool.whole if is_mla else pool.section(h=range(begin, begin + each))
        shape = BlockShape(pool.shape.nl, pool.shape.no, each, pool.shape.nt, pool.shape.hd, pool.shape.dtype)
        near = Pool.allocate(layout, shape, 1)
        suffix = layers if is_mla else f"{layers}.h{first + begin}-{first + begin + each}"
        yield _Piece(suffix, near, Transfer(part, near, verify=True), Transfer(near, part))
