"""vLLM's offloading with a folder behind the host memory: which chunks a `KvbmTier` holds, and jobs that read and write."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import vllm
from vllm.logger import init_logger
from vllm.transformers_utils.repo_utils import get_model_path
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import Medium, get_offload_group_idx
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from ...errors import BindError
from ...reshard.presets import of_vllm
from ...shapes import BlockShape
from ...vllm_groups import groups, number_of_layer
from .copier import Copier
from .shelf import Shelf, Shelved
from .tier import Chain, Content, KvbmTier, key_of_files

__all__ = ["LOST", "READ", "WRITTEN", "Settings", "TierIndex", "TierSpec", "TierWorker", "Tiered", "Units"]

logger = init_logger("vllm.kvbm")

#: Tokens of a unit, if nothing else is said: engines that share a folder have blocks of a multiple of it.
UNIT_TOKENS = 16

#: Counters: bytes that were read and written, and blocks that could not be.
READ, WRITTEN = "vllm:kvbm_tier_read_bytes", "vllm:kvbm_tier_written_bytes"
LOST = "vllm:kvbm_tier_lost_blocks"

#: A scheduler waits so long for a search in the folder, and takes what was found for true so long, in seconds.
SEARCH_SECONDS, FRESH_SECONDS = 0.002, 1.0

#: Threads of a worker that read and write files.
THREADS = 4


@dataclass(frozen=True)
class Settings:
    """What ``kv_connector_extra_config`` says of the folder.

    Attributes
    ----------
    folder : Path
    most_bytes : int
        Of all files in it.
    unit_tokens : int
        Tokens of a unit.
    model_key : str
        What the operator calls the weights; empty: they are read.
    """

    folder: Path
    most_bytes: int
    unit_tokens: int = UNIT_TOKENS
    model_key: str = ""

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Settings | None:
        """None where no folder is named.

        Raises
        ------
        BindError
            A setting of another kind; a folder without a limit.
        """
        if extra.get("folder") is None:
            if named := [name for name in ("folder_bytes", "unit_tokens", "model_key") if name in extra]:
                raise BindError(f"kv_connector_extra_config: {named[0]}: expected a folder, too, which it is about")
            return None
        folder, key = extra["folder"], extra.get("model_key", "")
        for name, given in (("folder", folder), ("model_key", key)):
            if not isinstance(given, str) or (name == "folder" and not Path(given).is_absolute()):
                kind = "an absolute path" if name == "folder" else "a text"
                raise BindError(f"kv_connector_extra_config: {name}: expected {kind}, got {given!r:.200}")
        for name in ("folder_bytes", "unit_tokens"):
            given = extra.get(name, UNIT_TOKENS if name == "unit_tokens" else None)
            if isinstance(given, bool) or not isinstance(given, int) or given < 1:
                raise BindError(f"kv_connector_extra_config: {name}: expected a number from 1 on, got {given!r:.200}")
        return cls(Path(folder), extra["folder_bytes"], extra.get("unit_tokens", UNIT_TOKENS), key)


class Units(NamedTuple):
    """The units of a chunk.

    Attributes
    ----------
    group : int
        Which of the offloaded groups, counted from 0.
    chunk : int
        Of host memory.
    first : int
        Position of the first token.
    names : tuple of str
    """

    group: int
    chunk: int
    first: int
    names: tuple[str, ...]


class Tiered(NamedTuple):
    """What a chunk of host memory has to do with files: the settings, what the units of each group hold, and the units."""

    settings: Settings
    contents: tuple[Content, ...]
    units: tuple[Units, ...]


class TierSpec(CPULoadStoreSpec):  # type: ignore[misc]  # vLLM is not typed
    """Chunks of host memory, some of which are to be read from files before they are loaded, or written once they are stored."""

    def __init__(self, chunk_ids: list[int], tiered: Tiered) -> None:
        super().__init__(chunk_ids)
        self.tiered = tiered


def contents_of(vllm_config: Any, kv_cache_config: Any, settings: Settings, key: str) -> tuple[Content, ...]:
    """What units of each group of layers hold.

    Raises
    ------
    BindError
        What cannot be stored in files, by name.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        if (size := int(getattr(parallel, name, 1))) != 1:
            raise BindError(
                f"folder: {name}: expected 1, got {size}; blocks of other ranks' layers or tokens are not stored in files"
            )
    if vllm_config.speculative_config is not None:
        raise BindError("folder: speculative_config: expected none; blocks of a draft model are not stored in files")
    found = []
    for group in _cached(kv_cache_config):
        said, what = group.kv_cache_spec, f"folder: layer {group.layer_names[0]!r}"
        said = next(iter(getattr(said, "kv_cache_specs", {}).values()), said)
        kind = type(said)
        if kind not in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec):
            raise BindError(
                f"{what}: expected attention over all tokens, a sliding window or a latent (MLA), got {kind.__name__}; it is not "
                "stored in files"
            )
        if said.kv_quant_mode.name != "NONE" or getattr(said, "state_content_bytes", None) is not None:
            raise BindError(
                f"{what}: kv_cache_dtype: expected elements as the model has them; quantised ones are not stored in files"
            )
        latent = kind is MLAAttentionSpec
        widths = {int(said.head_size)} if latent else {int(said.head_size), int(said.head_size_v or said.head_size)}
        if getattr(said, "tokens_per_state", 1) != 1 or len(widths) != 1:
            raise BindError(f"{what}: expected a state a token, K and V of one size; others are not stored in files")
        if said.block_size % settings.unit_tokens:
            raise BindError(
                f"{what}: unit_tokens: expected a number that divides the blocks of {said.block_size} tokens, got "
                f"{settings.unit_tokens}"
            )
        heads = 1 if latent else int(model.get_total_num_kv_heads())
        layers = tuple(sorted(number_of_layer(name) for name in group.layer_names))
        dtype = str(said.dtype).removeprefix("torch.")
        shape = BlockShape(len(layers), 1 if latent else 2, heads, settings.unit_tokens, int(said.head_size), dtype)
        found.append(Content(key, str(model.model), layers, shape))
    return tuple(found)


def _cached(kv_cache_config: Any) -> list[Any]:
    """The groups of layers whose blocks are kept for other requests: those that vLLM offloads."""
    return [group for group in kv_cache_config.kv_cache_groups if group.kv_cache_spec.prefix_cacheable]


def key_of_model(vllm_config: Any, settings: Settings) -> str:
    """Which weights and which configuration compute the blocks.

    Raises
    ------
    BindError
        There are no files of weights here.
    """
    model = vllm_config.model_config
    told = model.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        told.pop(name, None)
    version = ".".join(vllm.__version__.split(".")[:2])
    more = [told, str(model.dtype), str(model.quantization), bool(model.disable_sliding_window), f"vLLM {version}"]
    text = json.dumps(more, sort_keys=True, default=str)
    if settings.model_key:
        return f"{settings.model_key} {text}"
    advice = "expected model_key in kv_connector_extra_config, a name of your own that no other weights have"
    if vllm_config.load_config.load_format == "dummy":
        raise BindError(f"folder: load_format: dummy weights have no files to tell models apart by; {advice}")
    path = Path(model.model)
    if not path.exists():
        try:
            path = Path(get_model_path(model.model, model.revision))
        except Exception as error:
            raise BindError(f"folder: the files of {model.model!r} are not found here ({error}); {advice}") from None
    return key_of_files(path, text)


class Search:
    """Which units of a request there are files of, looked for beside the scheduler.

    Parameters
    ----------
    first : int
        The token that it begins with.

    Attributes
    ----------
    done : threading.Event
        When all of them have been looked for.
    held : set of (int, str)
        Group and name of those that are there.
    until : float
        When to look again, as `time.monotonic` counts.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self.done = threading.Event()
        self.held: set[tuple[int, str]] = set()
        self.until = math.inf

    def run(self, tiers: Sequence[KvbmTier], wanted: Sequence[Units], windows: Sequence[bool]) -> None:
        """Look for them; of a group without a window none behind the first that is not there: it would not be read."""
        try:
            for units in wanted:
                for name in units.names:
                    if tiers[units.group].holds(name):
                        self.held.add((units.group, name))
                    elif not windows[units.group]:
                        break
        finally:
            self.until = time.monotonic() + FRESH_SECONDS
            self.done.set()


class TierIndex:
    """What the scheduler knows of a folder: which chunks of a request are units that it holds.

    Parameters
    ----------
    vllm_config, kv_cache_config
        As a connector is given them.
    settings : Settings
    chunk_tokens : dict of int to int
        Tokens of a chunk, by vLLM's group, in the order of the offloaded groups.

    Raises
    ------
    BindError
        What cannot be stored in files; a folder that cannot be written to.
    """

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, settings: Settings, chunk_tokens: dict[int, int]
    ) -> None:
        contents_of(vllm_config, kv_cache_config, settings, "")  # refuse before weights are read
        key = key_of_model(vllm_config, settings)
        self._settings = settings
        self._contents = contents_of(vllm_config, kv_cache_config, settings, key)
        if len(self._contents) != len(chunk_tokens):
            raise BindError(
                f"folder: expected {len(self._contents)} groups of layers, got {len(chunk_tokens)} that are offloaded"
            )
        self._tiers = [KvbmTier(settings.folder, content, settings.most_bytes) for content in self._contents]
        self._chunks = {group: (index, tokens) for index, (group, tokens) in enumerate(chunk_tokens.items())}
        self._windows = [
            isinstance(group.kv_cache_spec, SlidingWindowSpec) for group in kv_cache_config.kv_cache_groups
        ]
        self._shunned: set[tuple[int, str]] = set()
        self._is_open = True
        self._threads = ThreadPoolExecutor(2, "kvbm tier search")
        logger.info("kvbm: blocks are stored in %s", ", ".join(str(tier.root) for tier in self._tiers))

    def begin(self, request: Any, context: Any) -> None:
        """A request that is new.

        What depends on more than tokens is left to the host memory: LoRA, pictures and sound, embeddings, prompts that are
        replaced.
        """
        if request.lora_request or request.mm_features or request.prompt_embeds is not None or request.resumable:
            return
        context.set_state(Chain(self._settings.unit_tokens, request.all_token_ids, request.cache_salt or ""))

    def end(self) -> None:
        """Nothing more is read or written: the weights may be others from now on."""
        if self._is_open:
            logger.warning(
                "kvbm: the cache was reset, maybe for other weights: no more blocks are stored in files, or read from them"
            )
        self._is_open = False

    def units(self, key: bytes, context: Any, chunk: int = -1) -> Units | None:
        """Those of a chunk; None where it has none."""
        chain, end = context.get_state(Chain), context.get_offload_key_position(key)
        if chain is None or end is None or not self._is_open:
            return None
        index, tokens = self._chunks[get_offload_group_idx(key)]
        return Units(index, chunk, end - tokens, chain.names(end - tokens, end))

    def holds(self, key: bytes, context: Any, room: int) -> bool | None:
        """Whether the files hold a chunk, and host memory has room for it and all before it, as it has for so many chunks.

        None: not known yet; ask again.
        """
        if not context.load_tier_filter.allows(Medium.STORAGE, None):
            return False
        units = self.units(key, context)
        if units is None:
            return False
        tokens = self._contents[units.group].shape.nt * len(units.names)
        if (units.first // tokens + 1) * len(self._tiers) > room:
            return False
        search = context.get_state(Search)
        first = 0 if self._windows[units.group] else units.first  # windows are looked for from the end on
        if search is None or time.monotonic() > search.until or first < search.first:
            search = self._begun(context, first)
        if not search.done.is_set():
            return None
        found = [(units.group, name) for name in units.names]
        return search.held.issuperset(found) and self._shunned.isdisjoint(found)

    def _begun(self, context: Any, first: int) -> Search:
        """A search for a request's units from a token on; one that is short is waited for."""
        chain, search = context.get_state(Chain), Search(first)
        context.set_state(search)
        names = chain.names(first, chain.whole)
        wanted = [Units(group, -1, first, names) for group in range(len(self._tiers))]
        self._threads.submit(search.run, self._tiers, wanted, self._windows)
        search.done.wait(SEARCH_SECONDS)
        return search

    def spec(self, chunks: Sequence[int], units: Sequence[Units]) -> Any:
        """What a worker is told."""
        return TierSpec(list(chunks), Tiered(self._settings, self._contents, tuple(units)))

    def shun(self, units: Units) -> None:
        """They could not be read: not again, until they have been written anew."""
        self._shunned.update((units.group, name) for name in units.names)

    def trust(self, units: Units) -> None:
        """They are written."""
        if self._shunned:
            self._shunned.difference_update((units.group, name) for name in units.names)


class TierWorker:
    """What a worker reads and writes, on threads of its own.

    Parameters
    ----------
    vllm_config, kv_cache_config
        As a connector is given them.
    settings : Settings
    copier : Copier
    group_ids : sequence of int
        vLLM's groups that are offloaded.
    count : callable
        Called with names of counters and numbers to add.

    Raises
    ------
    BindError
        What cannot be stored in files.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        settings: Settings,
        copier: Copier,
        group_ids: Sequence[int],
        count: Callable[[str, int], None],
    ) -> None:
        self._copier, self._count = copier, count
        self._own = contents_of(vllm_config, kv_cache_config, settings, "")
        self._shelves = []
        for group_id, lanes, content in zip(group_ids, copier.memory.lanes, self._own, strict=True):
            known = groups(vllm_config, kv_cache_config, group=group_id)
            if len(known) != 1 or len(lanes) != 1:
                raise BindError(
                    f"folder: group {group_id}: expected layers of one size, got {len(known)}; they are not stored in files"
                )
            if known[0].layers != content.layers:
                raise BindError(f"{known[0]}: folder: expected layers {content.layers} in order, got {known[0].layers}")
            if known[0].sliding_window is not None and copier.blocks_per_chunk != 1:
                raise BindError(
                    f"{known[0]}: folder: blocks_per_chunk: expected 1, got {copier.blocks_per_chunk}: chunks at the edge of a "
                    "sliding window are not whole"
                )
            placement, rank = of_vllm(known[0])
            held = tuple(placement.strips(rank).h)
            heads = range(held[0], held[-1] + 1)
            self._shelves.append(Shelf(content.shape, lanes[0].host, heads, copier.verify, THREADS))
        self._tiers: list[KvbmTier] = []
        self._threads = ThreadPoolExecutor(THREADS, "kvbm tier")
        self._reads: dict[int, list[Future[Shelved]]] = {}
        self._writes: dict[int, tuple[Any, list[Future[Shelved]]]] = {}
        self._stores: dict[int, Tiered] = {}

    def _pieces(self, tiered: Tiered) -> list[tuple[int, Any, tuple[str, ...], list[int]]]:
        """Some blocks of a group each, their units' names and first tokens."""
        if not self._tiers:
            if [replace(content, model="") for content in tiered.contents] != list(self._own):
                raise BindError(f"folder: the scheduler expects {tiered.contents}, and this worker has {self._own}")
            self._tiers = [
                KvbmTier(tiered.settings.folder, content, tiered.settings.most_bytes) for content in tiered.contents
            ]
        chunk = self._copier.blocks_per_chunk
        found = []
        for index, shelf in enumerate(self._shelves):
            unit, each = shelf.unit, shelf.each
            blocks: list[int] = []
            names: list[str] = []
            firsts: list[int] = []
            for units in tiered.units:
                if units.group == index:
                    blocks += range(units.chunk * chunk, (units.chunk + 1) * chunk)
                    names += units.names
                    firsts += range(units.first, units.first + len(units.names) * unit, unit)
            step = max(1, min(shelf.step // each, -(-len(blocks) // THREADS)))
            for at in range(0, len(blocks), step):
                some = slice(at * each, (at + step) * each)
                found.append((index, np.array(blocks[at : at + step], np.int64), tuple(names[some]), firsts[some]))
        return found

    # ---- reading ---------------------------------------------------------------------------------------------------

    def read(self, job_id: int, tiered: Tiered) -> None:
        """Begin to fill chunks of host memory: blocks that are not there, or not right, are not known then."""
        self._reads[job_id] = [self._threads.submit(self._read, *piece) for piece in self._pieces(tiered)]

    def _read(self, index: int, blocks: Any, names: tuple[str, ...], firsts: list[int]) -> Shelved:
        [lane] = self._copier.memory.lanes[index]
        try:
            done = self._shelves[index].read(self._tiers[index], blocks, names, firsts)
        except Exception as error:  # whatever it is, nobody may take the blocks for read
            done = Shelved(blocks, np.zeros(len(blocks), np.uint64), np.zeros(len(blocks), np.bool_), 0, repr(error))
        lane.digests[blocks], lane.known[blocks] = done.digests, done.good
        return done

    def has_read(self, wait: set[int] | None = None) -> list[int]:
        """Jobs whose chunks are filled since the last call; of some of them it is waited for."""
        found = []
        for job_id, futures in list(self._reads.items()):
            if (wait is not None and job_id in wait) or all(future.done() for future in futures):
                del self._reads[job_id]
                self._told(READ, [future.result() for future in futures])
                found.append(job_id)
        return found

    def _told(self, name: str, found: Sequence[Shelved]) -> None:
        if nbytes := sum(one.nbytes for one in found):
            self._count(name, nbytes)
        bad = sum(int((~one.good).sum()) for one in found)
        if bad:
            self._count(LOST, bad)
            why = next(one.why for one in found if one.why)
            logger.warning("kvbm: %d blocks were not %s: %s", bad, "read" if name == READ else "written", why)

    # ---- writing ---------------------------------------------------------------------------------------------------

    def stores(self, job_id: int, tiered: Tiered) -> None:
        """What is to be written when a job has stored it; nothing where nobody knows that it is what the engine had."""
        if self._copier.verify:
            self._stores[job_id] = tiered

    def write(self, job_id: int, result: Any) -> bool:
        """Begin to write what a job has stored; its result is told when that is done.  False: there is nothing to write."""
        tiered = self._stores.pop(job_id, None)
        if tiered is None:
            return False
        futures = []
        for index, blocks, names, firsts in self._pieces(tiered):
            [lane] = self._copier.memory.lanes[index]
            futures.append(self._threads.submit(self._write, index, blocks, lane.digests[blocks], names, firsts))
        self._writes[job_id] = result, futures
        return True

    def _write(self, index: int, blocks: Any, digests: Any, names: tuple[str, ...], firsts: list[int]) -> Shelved:
        try:
            done = self._shelves[index].write(self._tiers[index], blocks, digests, names, firsts)
            self._tiers[index].wrote(done.nbytes)
        except Exception as error:
            done = Shelved(blocks, np.zeros(len(blocks), np.uint64), np.zeros(len(blocks), np.bool_), 0, repr(error))
        return done

    def has_written(self) -> list[Any]:
        """Results of jobs that are written since the last call."""
        results = []
        for job_id, (result, futures) in list(self._writes.items()):
            if all(future.done() for future in futures):
                del self._writes[job_id]
                self._told(WRITTEN, [future.result() for future in futures])
                results.append(result)
        return results

    def close(self) -> None:
        """Write what has begun to be written, and end the threads."""
        self._threads.shutdown(wait=True)
