"""vLLM's offloading with a folder as a second tier: the chunks that a `Folder` holds, and jobs that read and write them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.kv_offload.base import Medium, get_offload_group_idx
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from ...engines.vllm import groups, number_of_layer, total_heads
from ...errors import BindError
from ...layout import spec as layouts
from ...reshard.presets import of_vllm
from ...store.folder import Folder
from ...store.keys import LAYOUT, Chain, Content, key_of_json
from ...store.shelf import Shelf, Shelved
from ..host_values import HostValues
from ..identity import neighbours
from .block_shapes import block_of, cached_groups
from .copier import Copier
from .folder import RANKS, Settings, require_ranks
from .identity import stored_model_of
from .log import logger

__all__ = ["LOST", "READ", "WRITTEN", "Settings", "TierIndex", "TierSpec", "TierWorker", "Tiered", "Units"]

#: Counters: bytes read and written, and blocks for which this failed.
READ, WRITTEN = "vllm:kvbm_tier_read_bytes", "vllm:kvbm_tier_written_bytes"
LOST = "vllm:kvbm_tier_lost_blocks"

#: Seconds that the scheduler waits for a search in the folder, and seconds that its result is used.
SEARCH_SECONDS, FRESH_SECONDS = 0.002, 1.0

#: Seconds after which a search, or a job that reads or writes files, is given up: a folder that does not answer, such as of a
#: server that is gone, stops no request.
SEARCH_LIMIT, FILES_LIMIT = 5.0, 60.0

#: Threads of the scheduler that search, and threads of a worker that read and write files.
SEARCHERS, THREADS = 2, 4


class Units(NamedTuple):
    """The units of a chunk: index of the offloaded group, number of the chunk in host memory, first token, and names."""

    group: int
    chunk: int
    first: int
    names: tuple[str, ...]


class Tiered(NamedTuple):
    """A chunk's data for files: the settings, the contents of the units of each group, and the units."""

    settings: Settings
    contents: tuple[Content, ...]
    units: tuple[Units, ...]


class TierSpec(CPULoadStoreSpec):  # type: ignore[misc]  # vLLM is not typed
    """Chunks of host memory.  Some are read from files before they are loaded, or written to files after they are stored."""

    def __init__(self, chunk_ids: list[int], tiered: Tiered) -> None:
        super().__init__(chunk_ids)
        self.tiered = tiered


def contents_of(
    vllm_config: Any, kv_cache_config: Any, settings: Settings, chunks: Sequence[int], values: HostValues | None = None
) -> tuple[Content, ...]:
    """The contents of the units of each group of layers, whose chunks have `chunks` tokens, without their model.

    Raises `BindError` for what cannot be stored in files; the message names it.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    require_ranks({name: int(getattr(parallel, name, 1)) for name in RANKS})
    if vllm_config.speculative_config is not None:
        raise BindError("folder: speculative_config: expected none; blocks of a draft model are not stored in files")
    found = []
    held = cached_groups(kv_cache_config)
    if len(held) != len(chunks):
        raise BindError(f"folder: expected {len(held)} groups of layers, got {len(chunks)} that are offloaded")
    for group, chunk in zip(held, chunks, strict=True):
        block = block_of(group, "folder", "stored in files", vllm_config)
        settings.require_units(block.nt, chunk, f"layer {group.layer_names[0]!r}: ")
        layers = tuple(sorted(number_of_layer(name) for name in group.layer_names))
        tp = int(getattr(parallel, "tensor_parallel_size", 1))
        heads = 1 if block.no == 1 else total_heads(model, layers, block.nh, tp)
        if heads is None:
            raise BindError(
                f"folder: layer {group.layer_names[0]!r}: expected one number of KV heads in the config that gives each rank of tp"
                f"{tp} one head, got several or none; use less tensor parallelism, so that a rank holds "
                "several heads, or leave folder out"
            )
        shape = replace(block, nh=heads, nt=settings.unit_tokens)
        layout, text = (layouts.load(LAYOUT), "") if values is None else (values.layout, values.text(shape.dtype))
        found.append(Content("", str(model.model), layers, shape, layout, text))
    return tuple(found)


def _model_of(vllm_config: Any, settings: Settings) -> dict[str, Any]:
    """The model of the contents; `BindError` if there are no files of weights on this machine."""
    try:
        return stored_model_of(vllm_config, settings.model_key)
    except BindError as error:
        raise BindError(
            f"folder: {error}; expected model_key in kv_connector_extra_config, a name that no other weights have"
        ) from None


class Search:
    """A search for the files of a request's units, from token `first` on.  It runs on a thread beside the scheduler.

    `held` are group and name of the units that were found.  It `began` at one time (`time.monotonic`), and after another one,
    `until`, it is searched again.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self.began = time.monotonic()
        self.done = threading.Event()
        self.held: set[tuple[int, str]] = set()
        self.until = math.inf

    def run(self, tiers: Sequence[Folder], wanted: Sequence[Units], windows: Sequence[bool]) -> None:
        """Run the search.  In a group without a window it ends at the first missing unit: later ones would not be read."""
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


class _Granted:
    """A request's chunks in files that were reported as hits.  Host memory must have room for them when they are loaded."""


class TierIndex:
    """The scheduler's index of a folder: which chunks of a request are in files.

    `chunk_tokens` has the tokens per chunk of vLLM's offloaded groups, in their order, and `values` are those of the blocks in
    host memory and in files.  Raises `BindError` if something cannot be stored in files, or the folder is not writable.
    """

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, settings: Settings, chunk_tokens: dict[int, int],
        values: HostValues | None = None,
    ) -> None:  # fmt: skip
        found = contents_of(vllm_config, kv_cache_config, settings, list(chunk_tokens.values()), values)
        model = _model_of(vllm_config, settings)  # it reads the weights: after all other errors
        self._settings = settings
        self._contents = tuple(replace(content, model=key_of_json(model)) for content in found)
        self._tiers = [Folder(settings.folder, content, settings.most_bytes) for content in self._contents]
        for tier in self._tiers:
            tier.make(model)
        for line in {line: None for tier in self._tiers for line in neighbours(tier.root, tier.content, model)}:
            logger.info("kvbm: blocks beside these are not used: %s", line)
        self._chunks = {group: (index, tokens) for index, (group, tokens) in enumerate(chunk_tokens.items())}
        self._windows = [isinstance(group.kv_cache_spec, SlidingWindowSpec) for group in cached_groups(kv_cache_config)]
        self._shunned: set[tuple[int, str]] = set()
        self._is_open = True
        self._threads = ThreadPoolExecutor(SEARCHERS, "kvbm tier search")
        self._late: list[Search] = []  # searches that were given up and have not ended
        logger.info("kvbm: blocks are stored in %s", ", ".join(str(tier.root) for tier in self._tiers))

    def begin(self, request: Any, context: Any) -> None:
        """Begin a new request.

        Requests that depend on more than tokens use only host memory: LoRA, pictures and sound, embeddings, replaced prompts.
        """
        if request.lora_request or request.mm_features or request.prompt_embeds is not None or request.resumable:
            return
        context.set_state(Chain(self._settings.unit_tokens, request.all_token_ids, request.cache_salt or ""))

    def end(self) -> None:
        """Stop reading and writing: the weights may be different from now on."""
        if self._is_open:
            logger.warning(
                "kvbm: the cache was reset, maybe for other weights: no more blocks are written to files or read from them"
            )
        self._is_open = False

    def units(self, key: bytes, context: Any, chunk: int = -1) -> Units | None:
        """The units of a chunk; None if it has none."""
        chain, end = context.get_state(Chain), context.get_offload_key_position(key)
        if chain is None or end is None or not self._is_open:
            return None
        index, tokens = self._chunks[get_offload_group_idx(key)]
        return Units(index, chunk, end - tokens, chain.keys(end - tokens, end))

    def holds(self, key: bytes, context: Any, room: int) -> bool | None:
        """True if files hold a chunk, and host memory, with `room` free chunks, has room for it and all chunks before it.

        None: not known yet; call it again.
        """
        if not context.load_tier_filter.allows(Medium.STORAGE, None):
            return False
        units = self.units(key, context)
        if units is None:
            return False
        window = self._windows[units.group]
        tokens = self._contents[units.group].shape.nt * len(units.names)
        # For a window the last chunks are looked up first: they may be in host memory, and are loaded, too.
        if self._needed(context.get_state(Chain).whole if window else units.first + tokens) > room:
            return False
        search = context.get_state(Search)
        first = 0 if window else units.first  # windows are searched from the end
        if search is None or time.monotonic() > search.until or first < search.first:
            search = self._begun(context, first)
        if not search.done.is_set():
            return None if search not in self._late and not self._is_late(search) else False
        found = [(units.group, name) for name in units.names]
        is_held = search.held.issuperset(found) and self._shunned.isdisjoint(found)
        if is_held:
            context.set_state(_Granted())
        return is_held

    def fits(self, key: bytes, context: Any, room: int) -> bool:
        """True if a chunk in host memory leaves room for the request's chunks that are read from files."""
        if context.get_state(_Granted) is None:
            return True
        return self._needed(context.get_offload_key_position(key)) <= room

    def _needed(self, end: int) -> int:
        """Number of chunks of all groups for `end` tokens."""
        return sum(-(-end // tokens) for _, tokens in self._chunks.values())

    def _is_late(self, search: Search) -> bool:
        """True if a search is given up."""
        if time.monotonic() < search.began + SEARCH_LIMIT:
            return False
        self._late.append(search)
        logger.warning(
            "kvbm: %s: no answer within %g s: requests are computed without its files", self._settings.folder, SEARCH_LIMIT
        )
        return True

    def _begun(self, context: Any, first: int) -> Search:
        """A search for a request's units from a token on.  It waits a short time for the result."""
        chain, search = context.get_state(Chain), Search(first)
        context.set_state(search)
        self._late = [one for one in self._late if not one.done.is_set()]
        if len(self._late) >= SEARCHERS:  # the folder does not answer: nothing is found there
            search.run((), (), ())
            return search
        names = chain.keys(first, chain.whole)
        wanted = [Units(group, -1, first, names) for group in range(len(self._tiers))]
        self._threads.submit(search.run, self._tiers, wanted, self._windows)
        search.done.wait(SEARCH_SECONDS)
        return search

    def spec(self, chunks: Sequence[int], units: Sequence[Units]) -> Any:
        """The spec for a worker."""
        return TierSpec(list(chunks), Tiered(self._settings, self._contents, tuple(units)))

    def shun(self, units: Units) -> None:
        """Do not read these units again until they have been rewritten: reading failed."""
        self._shunned.update((units.group, name) for name in units.names)

    def trust(self, units: Units) -> None:
        """These units have been written: allow reading."""
        if self._shunned:
            self._shunned.difference_update((units.group, name) for name in units.names)


class _Reading:
    """A job that reads files.  As a context manager it returns whether the job is still wanted; that cannot change inside."""

    def __init__(self) -> None:
        self.end = time.monotonic() + FILES_LIMIT
        self.is_over = False
        self.pieces: list[tuple[int, Any]] = []
        self.futures: list[Future[Shelved]] = []
        self._lock = threading.Lock()

    def __enter__(self) -> bool:
        self._lock.acquire()
        return not self.is_over

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class TierWorker:
    """Reads and writes files in a worker, on separate threads; `count` adds to a counter.

    `group_ids` are vLLM's offloaded groups, and `values` are those of the blocks in host memory and in files.  Raises
    `BindError` if something cannot be stored in files.
    """

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, settings: Settings, copier: Copier, group_ids: Sequence[int],
        count: Callable[[str, int], None], values: HostValues | None = None,
    ) -> None:  # fmt: skip
        self._copier, self._count = copier, count
        chunks = [group.kv_cache_spec.block_size * copier.blocks_per_chunk for group in cached_groups(kv_cache_config)]
        self._unit_contents = contents_of(vllm_config, kv_cache_config, settings, chunks, values)
        self._shelves = []
        for group_id, stores, content in zip(group_ids, copier.memory.stores, self._unit_contents, strict=True):
            known = groups(vllm_config, kv_cache_config, group=group_id)
            if len(known) != 1 or len(stores) != 1:
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
            self._shelves.append(Shelf(content, stores[0].host, heads, stores[0].verify, THREADS))
        self._tiers: list[Folder] = []
        self._threads = ThreadPoolExecutor(THREADS, "kvbm tier")
        self._reads: dict[int, _Reading] = {}
        self._writes: dict[int, tuple[Any, float, list[Future[Shelved]]]] = {}
        self._late: list[Future[Shelved]] = []  # reads and writes that were given up
        self._stores: dict[int, Tiered] = {}

    def _pieces(self, tiered: Tiered) -> list[tuple[int, Any, tuple[str, ...], list[int]]]:
        """Pieces of some blocks of one group, with the names and first tokens of their units."""
        if not self._tiers:
            if [replace(content, model="") for content in tiered.contents] != list(self._unit_contents):
                raise BindError(f"folder: the scheduler expects {tiered.contents}, and this worker has {self._unit_contents}")
            self._tiers = [
                Folder(tiered.settings.folder, content, tiered.settings.most_bytes) for content in tiered.contents
            ]
        chunk = self._copier.blocks_per_chunk
        found = []
        for index, shelf in enumerate(self._shelves):
            unit, each, joined = shelf.unit, shelf.each, shelf.joined
            blocks: list[int] = []
            names: list[str] = []
            firsts: list[int] = []
            for units in tiered.units:
                if units.group == index:
                    blocks += range(units.chunk * chunk, (units.chunk + 1) * chunk)
                    names += units.names
                    firsts += range(units.first, units.first + len(units.names) * unit, unit)
            wholes = len(blocks) // joined  # that no block and no unit leaves
            step = max(1, min(shelf.step // each, -(-wholes // THREADS)))
            for at in range(0, wholes, step):
                some, its = slice(at * each, (at + step) * each), slice(at * joined, (at + step) * joined)
                found.append((index, np.array(blocks[its], np.int64), tuple(names[some]), firsts[some]))
        return found

    # ---- reading ---------------------------------------------------------------------------------------------------

    def read(self, job_id: int, tiered: Tiered) -> None:
        """Begin to fill chunks of host memory from files.  Blocks that are missing or wrong are left without digests."""
        self._late = [one for one in self._late if not one.done()]
        reading = self._reads[job_id] = _Reading()
        if len(self._late) >= THREADS:  # no thread is free: it is given up at once
            reading.end = 0.0
        for piece in self._pieces(tiered):
            reading.pieces.append(piece[:2])
            reading.futures.append(self._threads.submit(self._read, reading, *piece))

    def _read(self, reading: _Reading, index: int, blocks: Any, names: tuple[str, ...], firsts: list[int]) -> Shelved:
        [store] = self._copier.memory.stores[index]
        try:
            if reading.is_over:
                return _failed(blocks, "it was given up")
            done = self._shelves[index].read(self._tiers[index], blocks, names, firsts, reading)
        except Exception as error:  # for any error, the blocks must not count as read
            done = _failed(blocks, repr(error))
        with reading as is_wanted:  # else the chunks may hold others
            if is_wanted:
                store.digests[blocks], store.known[blocks] = done.digests, done.good
        return done

    def has_read(self, wait: set[int] | None = None) -> list[int]:
        """Jobs with chunks that were filled since the last call, or given up.  It waits for the jobs in `wait`."""
        found = []
        for job_id, reading in list(self._reads.items()):
            if wait is not None and job_id in wait:
                futures.wait(reading.futures, max(0.0, reading.end - time.monotonic()))
            is_done = all(future.done() for future in reading.futures)
            if not is_done and time.monotonic() < reading.end:
                continue
            if not is_done:
                self._give_up(reading)
            del self._reads[job_id]
            late = f"it was not read within {FILES_LIMIT:g} s"
            results = zip(reading.pieces, reading.futures, strict=True)
            self._note_ended(READ, [one.result() if is_done else _failed(blocks, late) for (_, blocks), one in results])
            found.append(job_id)
        return found

    def _give_up(self, reading: _Reading) -> None:
        """Nothing of this job is written to host memory from now on, and its blocks do not count as read."""
        with reading:
            reading.is_over = True
            for index, blocks in reading.pieces:
                [store] = self._copier.memory.stores[index]
                store.known[blocks] = False
        self._late += [future for future in reading.futures if not future.cancel() and not future.done()]

    def _note_ended(self, name: str, found: Sequence[Shelved]) -> None:
        if nbytes := sum(one.nbytes for one in found):
            self._count(name, nbytes)
        bad = sum(int((~one.good).sum()) for one in found)
        if bad:
            self._count(LOST, bad)
            why = next(one.why for one in found if one.why)
            logger.warning("kvbm: %d blocks were not %s: %s", bad, "read" if name == READ else "written", why)

    # ---- writing ---------------------------------------------------------------------------------------------------

    def stores(self, job_id: int, tiered: Tiered) -> None:
        """Note what to write after a job has stored it.  Nothing is written if the stored blocks have no digests."""
        if self._copier.memory.verify:
            self._stores[job_id] = tiered

    def write(self, job_id: int, result: Any) -> bool:
        """Begin to write what a job has stored; its result is returned when that is done.  False if there is nothing to write."""
        tiered = self._stores.pop(job_id, None)
        self._late = [one for one in self._late if not one.done()]
        if tiered is None or self._late:
            return False
        begun = []
        for index, blocks, names, firsts in self._pieces(tiered):
            [store] = self._copier.memory.stores[index]
            begun.append(self._threads.submit(self._write, index, blocks, store.digests[blocks], names, firsts))
        self._writes[job_id] = result, time.monotonic() + FILES_LIMIT, begun
        return True

    def _write(self, index: int, blocks: Any, digests: Any, names: tuple[str, ...], firsts: list[int]) -> Shelved:
        try:
            done = self._shelves[index].write(self._tiers[index], blocks, digests, names, firsts)
        except Exception as error:
            done = _failed(blocks, repr(error))
        return done

    def has_written(self) -> list[Any]:
        """Results of jobs that were written since the last call, or given up: host memory may be used for others then."""
        results = []
        for job_id, (result, end, begun) in list(self._writes.items()):
            done = [future for future in begun if future.done()]
            if len(done) < len(begun):
                if time.monotonic() < end:
                    continue
                logger.warning("kvbm: blocks were not written within %g s; none are written until they are", FILES_LIMIT)
                self._late += [future for future in begun if not future.cancel() and not future.done()]
            del self._writes[job_id]
            self._note_ended(WRITTEN, [future.result() for future in done])
            results.append(result)
        return results

    def close(self) -> None:
        """Finish the writes that have begun, and end the threads."""
        self._threads.shutdown(wait=True)


def _failed(blocks: Any, why: str) -> Shelved:
    """The result for blocks of which none was read or written."""
    return Shelved(blocks, np.zeros(len(blocks), np.uint64), np.zeros(len(blocks), np.bool_), 0, why)
