"""The scheduler's half of `KvbmConnector`: which requests are loaded, held and sent.  It accesses no memory of caches."""

from __future__ import annotations

import secrets
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.request import RequestStatus

from ...errors import BindError, printable
from .caches import window_of
from .failures import FailedLoads
from .holding import Hold, Push
from .identity import differing, inputs_of, push_name
from .log import logger

__all__ = ["HOLD_SECONDS", "Load", "Scheduler", "Source", "StepMetadata", "count_of", "host_of", "port_of", "seconds_of"]

#: Default seconds that the blocks of a prefilled request are held until they are requested.
HOLD_SECONDS = 120.0

#: Most remembered requests of other engines that were asked for: each is sent once.
_MOST_ASKED = 4096

#: Most tokens per block of a decode engine with a sliding window: its first block is loaded as a whole.
_MOST_TOKENS = 128

#: Most characters of the name of a request or host, which messages contain.
_MOST_NAME = 1000

#: Largest number of seconds that is accepted.
_FOREVER = 1e9

@dataclass
class Source:
    """The engine that prefilled a request, from the request's untrusted parameters.

    It holds the prompt's first `tokens`, from `firsts` on where that is not the first token of the prompt, by vLLM's group.
    `is_early`: the request may still be computed; the router has named it, and the whole prompt will be held.
    """

    request: str
    host: str
    port: int
    workers: int
    tokens: int
    firsts: dict[int, int] = field(default_factory=dict)
    is_early: bool = False

    @classmethod
    def of(cls, params: dict[str, Any]) -> Source:
        """Read the parameters.  Raises `BindError` if one is missing or has a wrong type."""
        is_early = "transfer_id" in params and "remote_request_id" not in params
        name = "transfer_id" if is_early else "remote_request_id"
        names = (name, "remote_host", "remote_port", "remote_workers", "remote_num_tokens")
        given = {**params, "remote_num_tokens": sys.maxsize} if is_early else params
        found = tuple(given.get(name) for name in names)
        for name, kind, value in zip(names, (str, str, int, int, int), found, strict=True):
            if type(value) is not kind or (isinstance(value, int) and value < 0):
                raise BindError(f"kv_transfer_params: {name}: expected {kind.__name__}, got {value!r:.100}")
            if isinstance(value, str) and not 0 < len(value) <= _MOST_NAME:
                raise BindError(f"kv_transfer_params: {name}: expected at most {_MOST_NAME} characters, got {len(value)}")
        firsts = given.get("remote_first_tokens", [])
        if not isinstance(firsts, list) or any(type(one) is not int or one < 0 for one in firsts):
            raise BindError(f"kv_transfer_params: remote_first_tokens: expected numbers, got {firsts!r:.100}")
        return cls(*found, dict(enumerate(firsts)), is_early)  # type: ignore[arg-type, call-arg]


@dataclass
class Load:
    """A request that another engine prefilled: the blocks on this side by group, and the tokens to load.

    No tokens: this side does not need the request, and the other engine releases it.
    """

    source: Source
    blocks: tuple[list[int], ...] = ()
    first: int = 0
    last: int = 0
    begins: dict[int, int] = field(default_factory=dict)  # group → its first token, if it is a later one


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The scheduler's message to the workers before a step: requests to hold, to release and to load.

    For requests that may be sent while they are computed: what the step computes, requests with blocks that are reused, and names
    for which nothing comes.
    """

    start: str
    unheld: list[str] = field(default_factory=list)
    pushes: dict[str, Push] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    holds: dict[str, Hold] = field(default_factory=dict)
    loads: dict[str, Load] = field(default_factory=dict)


class _Window(NamedTuple):
    """A group that keeps only blocks of a window or of a chunk; sizes are in tokens."""

    group: int
    block: int
    window: int
    chunk: int

    def first(self, token: int) -> int:
        """The first token that the given token attends to."""
        return max(0, token - self.window + 1 if self.window else token // self.chunk * self.chunk)


@dataclass
class _Pushed:
    """A request that may be sent while it is computed."""

    name: str
    request: Any
    preemptions: int
    is_stopped: bool = False


class Scheduler:
    """Decides which requests are loaded, held and sent.  It accesses no memory of caches.

    With a window, vLLM frees blocks that the token after the prompt does not attend to, before it reports the end of the request.
    The decode engine computes the prompt's last token, which attends to more, and loads its first block as a whole.  So these
    blocks are recorded with each step, and kept.
    """

    def __init__(self, config: Any, kv_cache_config: Any) -> None:
        self.manager: Any = None  # vLLM's manager of blocks
        self._windows: list[_Window] = []
        for index in kv_cache_config.transfer_group_ids:
            cache_spec = kv_cache_config.kv_cache_groups[index].kv_cache_spec
            window, chunk = window_of(cache_spec)
            if window or chunk:
                self._windows.append(_Window(index, int(cache_spec.block_size), window, chunk))
        self._pushes: dict[str, _Pushed] = {}
        self._number = 0
        self._prefills: dict[str, int] = {}  # request → tokens of its prompt
        self._seen: dict[str, list[tuple[int, int, list[Any]]]] = {}  # request → its blocks: group, place of the first, blocks
        self._kept: dict[str, list[Any]] = {}
        transfer, parallel = config.kv_transfer_config, config.parallel_config
        self._host, self._port = host_of(transfer), port_of(config, transfer.kv_port)
        self._workers = parallel.world_size
        self._hold_seconds = seconds_of(transfer, "hold_seconds", HOLD_SECONDS)
        self._engine = transfer.engine_id
        self._metadata = StepMetadata(start=secrets.token_hex(8))
        self._local: dict[str, int] = {}
        self._inputs: dict[str, tuple[int, str]] = {}  # request → number of tokens, and the hash of what they depend on
        self._failed = FailedLoads()
        self._loading: dict[str, Any] = {}  # requests that are being loaded
        self._asked: OrderedDict[tuple[str, int, str], None] = OrderedDict()

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Number of tokens to load from another engine, after the `computed` ones; None: ask again later.

        The prompt's last token is computed here, to get the next token.
        """
        return self._failed.answer(request) or self._failed.defer(self._matched(request, computed))

    def _matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        source = self._source(request)
        if source is None:
            return 0, False
        count = min(source.tokens, request.num_prompt_tokens - 1) - computed
        self._local[request.request_id] = computed
        return (count, True) if count > 0 else (0, False)

    def _source(self, request: Any) -> Source | None:
        """The engine that prefilled a request, until the request has been asked for."""
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return None
        try:
            source = Source.of(params)
            inputs = self._inputs_of(request, request.num_prompt_tokens if source.is_early else source.tokens)
            if source.is_early:
                source.request = push_name(source.request, inputs)
            if params.get("remote_engine_id") == self._engine:  # use the prefix cache, and copy nothing
                _, _, name = (*source.request.split("/", 2), "", "")[:3]
                self._metadata.unheld += [name] if name and not source.is_early else []
                raise BindError(f"remote_engine_id: {self._engine!r} is this engine itself")
            if (source.host, source.port, source.request) in self._asked:  # such as n > 1, or a router that retries
                raise BindError(f"remote_request_id: {source.request!r:.100} was loaded already; it is sent once")
            if not source.is_early and (remote := params.get("remote_inputs")) != inputs:
                self._ask(request, Load(source))  # the other engine can release it
                raise BindError(
                    f"remote_inputs: {differing(inputs, str(remote)[:_MOST_NAME])}: expected the hash of this request's first "
                    f"{source.tokens} tokens, and of its other inputs, got that of another: the other engine prefilled another "
                    "prompt; do both have the same chat template?"
                )
        except BindError as error:
            params["do_remote_prefill"] = False
            logger.warning("request %s: it is prefilled here: %s", printable(str(request.request_id)), str(error))
            return None
        return source

    def _inputs_of(self, request: Any, tokens: int) -> str:
        """`inputs_of`, computed once while a request waits."""
        known = self._inputs.get(request.request_id)
        if known is None or known[0] != tokens:
            known = self._inputs[request.request_id] = tokens, inputs_of(request, tokens)
        return known[1]

    def _ask(self, request: Any, load: Load) -> None:
        """Make the workers ask for a request, once."""
        request.kv_transfer_params["do_remote_prefill"] = False
        self._inputs.pop(request.request_id, None)
        self._metadata.loads[request.request_id] = load
        self._asked[load.source.host, load.source.port, load.source.request] = None
        if len(self._asked) > _MOST_ASKED:
            self._asked.popitem(last=False)

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """Called when vLLM has allocated blocks for the tokens to load."""
        self._failed.forget(request.request_id)
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode"):
            if self._windows:
                self._prefills[request.request_id] = request.num_prompt_tokens
            if (name := self._name(request)) and request.request_id not in self._pushes:
                self._pushes[request.request_id] = _Pushed(name, request, request.num_preemptions)
        source = self._source(request)
        if source is None:
            return
        first = self._local.pop(request.request_id, 0)
        tables = blocks.get_block_ids() if external else ()
        if external:
            self._loading[request.request_id] = request
        begins = self._begins(request.request_id, source, tables, first, first + external) if external else {}
        self._ask(request, Load(source, tables, first, first + external, begins))

    def _name(self, request: Any) -> str:
        """The name under which a request may be sent while it is computed; empty if another request has this name."""
        given = request.kv_transfer_params.get("transfer_id")
        if not (isinstance(given, str) and 0 < len(given) <= _MOST_NAME):
            return ""
        name = push_name(given, self._inputs_of(request, request.num_prompt_tokens))
        return "" if any(one.name == name for one in self._pushes.values()) else name

    def _begins(self, request: str, source: Source, tables: tuple[list[int], ...], first: int, last: int) -> dict[int, int]:
        """Group → first token to load, for groups in which the other engine may lack tokens of the first block.

        The next token does not attend to the missing ones.  But a shorter sequence would: the prefix cache must not find the block.
        """
        found = {}
        for one in self._windows:
            at = next((at for at, block in enumerate(tables[one.group]) if block), 0)
            seen = one.first(last)
            begin = min(source.firsts.get(one.group, seen if source.is_early else 0), seen)
            if first <= at * one.block < begin:
                found[one.group] = begin
                self.manager.coordinator.single_type_managers[one.group].num_cached_block[request] = at + 1
        return found

    def finished(self, request: Any, blocks: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """True if the request's blocks are held for another engine, and the parameters for that engine."""
        try:
            return self._finished(request, blocks)
        finally:
            self._inputs.pop(request.request_id, None)

    def _finished(self, request: Any, blocks: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        self._failed.forget(request.request_id)
        self._local.pop(request.request_id, None)
        self._prefills.pop(request.request_id, None)
        pushed = self._pushes.pop(request.request_id, None)
        if pushed is not None:
            self._stop(request.request_id, pushed)
        seen = self._seen.pop(request.request_id, [])
        source = self._source(request)
        if source is not None:  # aborted before it had blocks: the other engine can release it
            self._ask(request, Load(source))
        params = request.kv_transfer_params or {}
        ended = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        name = pushed.name if pushed is not None else self._name(request) if params.get("do_remote_decode") else ""
        self._number += 1
        if not params.get("do_remote_decode") or request.status not in ended or not any(blocks):
            if name and any(blocks):  # workers may still read them
                failure = f"it was not prefilled: {request.status.name}"
                self._metadata.holds[request.request_id] = Hold(blocks, 0, self._hold_seconds, self._number, name, failure)
                return True, None
            if name:
                self._metadata.lost[name] = f"it was not prefilled: {request.status.name}"
            return False, None
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        if seen:
            blocks = self._keep(request.request_id, blocks, seen)
        self._metadata.holds[request.request_id] = Hold(blocks, tokens, self._hold_seconds, self._number, name)
        params = {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": self._engine,
            "remote_request_id": f"{self._metadata.start}/{self._number}/{request.request_id}", "remote_host": self._host,
            "remote_port": self._port, "remote_workers": self._workers, "remote_num_tokens": tokens,
            "remote_inputs": self._inputs_of(request, tokens),
        }  # fmt: skip
        if self._windows:
            blocks_of = {one.group: one.block for one in self._windows}
            params["remote_first_tokens"] = [
                next((at for at, block in enumerate(table) if block), len(table)) * blocks_of.get(group, 0)
                for group, table in enumerate(blocks)
            ]
        return True, params

    def _keep(
        self, request: str, blocks: tuple[list[int], ...], seen: list[tuple[int, int, list[Any]]]
    ) -> tuple[list[int], ...]:
        """The tables, including blocks that vLLM has just freed: no other request has used them yet."""
        tables, kept = [list(table) for table in blocks], []
        for group, first, behind in seen:
            for at, block in zip(range(first, len(tables[group])), behind, strict=False):
                if tables[group][at] == 0 and not block.is_null:
                    tables[group][at] = block.block_id
                    kept.append(block)
        self.manager.block_pool.touch(kept)
        self._kept[request] = kept
        return tuple(tables)

    def loaded(self, requests: Iterable[str]) -> None:
        """All workers have ended loading these requests."""
        ended = [self._loading.pop(name) for name in requests if name in self._loading]
        self._failed.ended(ended, self.manager)

    def sent(self, requests: Iterable[str]) -> None:
        """Stop holding these requests."""
        for request in requests:
            if kept := self._kept.pop(request, None):
                self.manager.block_pool.free_blocks(reversed(kept))

    def step_metadata(self, scheduled: Mapping[str, int] = MappingProxyType({})) -> StepMetadata:
        """The message for a step.  `scheduled` has the number of tokens per request that the step computes."""
        for request, tokens in self._prefills.items():
            blocks = self.manager.get_blocks(request).blocks
            self._seen[request] = []
            for one in self._windows:
                first = max(0, one.first(tokens - 1) - _MOST_TOKENS + 1) // one.block
                self._seen[request].append((one.group, first, list(blocks[one.group][first:])))
        for name, pushed in self._pushes.items():
            request = pushed.request
            self._stop(name, pushed)
            before, most = request.num_computed_tokens, request.num_prompt_tokens
            if not pushed.is_stopped and name in scheduled and before < most:
                after = min(before + scheduled[name], most)
                self._metadata.pushes[name] = Push(pushed.name, self.manager.get_block_ids(name), before, after)
        metadata, self._metadata = self._metadata, StepMetadata(self._metadata.start)
        return metadata

    def _stop(self, name: str, pushed: _Pushed) -> None:
        """Of a request that was preempted since the last step, blocks may be used for others by the next one."""
        if pushed.request.num_preemptions != pushed.preemptions and not pushed.is_stopped:
            pushed.is_stopped = True
            self._metadata.stopped.append(name)


def host_of(transfer: Any) -> str:
    """The address of this machine for other engines; `BindError` if it is no text."""
    given = transfer.get_from_extra_config("host", "127.0.0.1")
    if not isinstance(given, str) or not 0 < len(given) <= _MOST_NAME:
        raise BindError(f"kv_connector_extra_config: host: expected an address of this machine, got {given!r:.100}")
    return given


def seconds_of(transfer: Any, name: str, usual: float) -> float:
    """A setting in seconds; `BindError` if it is wrong."""
    given = transfer.get_from_extra_config(name, usual)
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < _FOREVER:
        raise BindError(f"kv_connector_extra_config: {name}: expected a number of seconds above 0, got {given!r:.100}")
    return float(given)


def count_of(transfer: Any, name: str, usual: int) -> int:
    """A setting that is an integer from 1 on, with the default `usual`; `BindError` if it is wrong."""
    given = transfer.get_from_extra_config(name, None)
    if given is None:
        return usual
    if type(given) is not int or given < 1:
        raise BindError(f"kv_connector_extra_config: {name}: expected a number from 1 on, got {given!r:.100}")
    return given


def port_of(config: Any, first: Any) -> int:
    """The port of this engine's first worker.  Engines of one data-parallel group use consecutive ports, from `first` on."""
    parallel = config.parallel_config
    return int(first) + int(parallel.data_parallel_index) * int(parallel.world_size)
