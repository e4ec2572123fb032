"""vLLM's caches as the groups of an endpoint, and block tables as its spans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from ...engines.vllm import Group, groups, specs_of
from ...errors import BindError, SpecError
from ...pool.pool import Pool
from ...reshard import Placement, Span
from ...reshard.presets import of_vllm

__all__ = ["Caches", "window_of"]


#: Specs of groups in whose block tables each token is at its position in the sequence; not those of encoders or ring buffers.
_BY_POSITION = (
    "FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "SlidingWindowMLASpec", "ChunkedLocalAttentionSpec",
)  # fmt: skip


class Caches:
    """The caches of a vLLM worker.  Raises `BindError` for groups whose block tables are not supported."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, kv_caches: dict[str, Any]) -> None:
        self.groups: dict[str, tuple[Placement, Pool]] = {}  # for an `Endpoint`
        self._read: dict[str, Group] = {}
        self.rank = 0
        self.layers: dict[str, int] = {}  # vLLM's names of this worker's layers → their numbers in the model
        whole = []
        parts: Counter[int] = Counter()
        _require_no_states(kv_cache_config)
        for group in groups(vllm_config, kv_cache_config):
            if group.index not in kv_cache_config.transfer_group_ids:
                continue
            cache_spec = kv_cache_config.kv_cache_groups[group.index].kv_cache_spec
            kinds = {type(one).__name__ for one in specs_of(cache_spec)}
            if other := sorted(kinds.difference(_BY_POSITION)):
                raise BindError(
                    f"{group}: {', '.join(other)}: where its block table has a token is not known; expected "
                    f"{', '.join(_BY_POSITION)}"
                )
            if group.dcp != 1:
                raise BindError(f"{group}: decode_context_parallel_size: expected 1, got {group.dcp}; it was not tested")
            name = f"{group.index}.{parts[group.index]}"
            parts[group.index] += 1
            try:
                placement, self.rank = of_vllm(group)
            except SpecError as error:
                if group.pp == 1:
                    raise
                numbers = ", ".join(map(str, group.layers))
                raise BindError(
                    f"{group}: pipeline_parallel_size: {group.pp} stages, and this one has layers {numbers}: "
                    "expected one group of all layers, shared out as vLLM does by itself (VLLM_PP_LAYER_PARTITION not set)"
                ) from error
            self.groups[name] = placement, Pool.from_vllm(kv_caches, group=group)
            self._read[name] = group
            self.layers.update(zip(group.names, group.layers, strict=True))
            if window_of(cache_spec) == (0, 0):
                whole.append(name)
        #: Groups without a window: they keep a block for each token of a sequence while it is computed.
        self.whole = frozenset(whole)

    def spans(
        self, blocks: tuple[list[int], ...], last: int, first: int = 0, begins: Mapping[int, int] = MappingProxyType({})
    ) -> dict[str, Span]:
        """Spans per group: tokens `first` to `last` (exclusive), as far as vLLM holds blocks for them.

        `blocks` are ids per vLLM group.  vLLM holds no blocks for tokens before a sliding window: the table has -1.  The first
        held block is sent completely, even if the window no longer includes all its tokens: vLLM may find it in its prefix
        cache for a shorter sequence.  If the other engine does not hold all of this block, `begins` has the first token that it
        holds, by vLLM's group.

        Raises `BindError` if a block is missing after the first held block.
        """
        found = {}
        for name, group in self._read.items():
            table = np.array(blocks[group.index], np.int64)
            table[table == 0] = -1  # vLLM's null block
            present = np.flatnonzero(table >= 0)
            start = max(int(present[0]) * group.shape.nt, begins.get(group.index, 0)) if present.size else last
            if present.size and len(table) - present[0] != present.size:
                raise BindError(
                    f"{group}: expected blocks for all tokens from {start} on, got a table with gaps: {blocks[group.index]!r:.200}"
                )
            found[name] = Span(table, range(min(max(start, first), last), last))
        return found


def _require_no_states(kv_cache_config: Any) -> None:
    """Raise `BindError` if layers keep states instead of something per token: no placement describes them."""
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        for one in specs_of(group.kv_cache_spec):
            states = getattr(one, "num_kv_heads", None) is None
            if states or getattr(one, "tokens_per_state", 1) != 1:
                raise BindError(
                    f"vLLM: group {index}, layer {group.layer_names[0]!r}: {type(one).__name__}: "
                    f"{'a state per sequence' if states else 'several tokens share a state'}: KvbmConnector sends K and V, or "
                    "latents, of each token; prefill and decode this model in one engine, where KvbmOffloadingConnector copies "
                    "such blocks as bytes"
                )


def window_of(cache_spec: Any) -> tuple[int, int]:
    """Tokens of the sliding window and of the attention chunk of a group; 0 if vLLM does not release blocks because of them."""
    one = getattr(cache_spec, "first_spec", cache_spec)
    if any(base.__name__ == "FullAttentionSpec" for base in type(one).__mro__):  # keeps all blocks, even with a window
        return 0, 0
    return tuple(int(getattr(one, name, None) or 0) for name in ("sliding_window", "attention_chunk_size"))  # type: ignore[return-value]
