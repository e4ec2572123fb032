"""vLLM's caches as the groups of an endpoint, and block tables as its spans."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from ...errors import BindError
from ...pool import Pool
from ...reshard import Placement, Span
from ...reshard.presets import of_vllm
from ...vllm_groups import Group, groups

__all__ = ["Caches"]


#: Kinds of groups whose block tables hold a sequence's tokens, each at its position; not those of an encoder, or rings.
_BY_POSITION = (
    "FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "SlidingWindowMLASpec", "ChunkedLocalAttentionSpec",
)  # fmt: skip


class Caches:
    """What a worker of vLLM holds; `BindError` for groups whose tables are not known.

    Parameters
    ----------
    vllm_config, kv_cache_config, kv_caches
        As a connector is given them.

    Attributes
    ----------
    groups : dict of str to (Placement, Pool)
        As an `Endpoint` takes them.
    rank : int
        Of this worker.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, kv_caches: dict[str, Any]) -> None:
        self.groups: dict[str, tuple[Placement, Pool]] = {}
        self._read: dict[str, Group] = {}
        self.rank = 0
        parts: Counter[int] = Counter()
        for group in groups(vllm_config, kv_cache_config):
            if group.index not in kv_cache_config.transfer_group_ids:
                continue
            held = kv_cache_config.kv_cache_groups[group.index].kv_cache_spec
            kinds = {type(one).__name__ for one in (getattr(held, "kv_cache_specs", None) or {"": held}).values()}
            if other := sorted(kinds.difference(_BY_POSITION)):
                raise BindError(
                    f"{group}: {', '.join(other)}: where its block table has a token is not known; expected "
                    f"{', '.join(_BY_POSITION)}"
                )
            if group.dcp != 1:
                raise BindError(f"{group}: decode_context_parallel_size: expected 1, got {group.dcp}; it was not tested")
            name = f"{group.index}.{parts[group.index]}"
            parts[group.index] += 1
            placement, self.rank = of_vllm(group)
            self.groups[name] = placement, Pool.from_vllm(kv_caches, group=group)
            self._read[name] = group

    def spans(self, blocks: tuple[list[int], ...], last: int, first: int = 0) -> dict[str, Span]:
        """By group: tokens `first` to `last` (exclusive), as far as vLLM holds blocks for them.

        Behind a sliding window vLLM holds no blocks: the table has -1.  The first block that is held comes as a whole, though not
        all of its tokens are seen any more: vLLM may find it in its prefix cache for a shorter sequence.

        Parameters
        ----------
        blocks : tuple of list of int
            Of a request, by vLLM's group.
        last : int
            The first token that no block has to hold.
        first : int, optional
            The first token.

        Raises
        ------
        BindError
            Blocks that are missing behind one that is held.
        """
        found = {}
        for name, group in self._read.items():
            table = np.array(blocks[group.index], np.int64)
            table[table == 0] = -1  # vLLM's null block
            held = np.flatnonzero(table >= 0)
            start = int(held[0]) * group.shape.nt if held.size else last
            if held.size and len(table) - held[0] != held.size:
                raise BindError(
                    f"{group}: expected blocks for all tokens from {start} on, got a table with gaps: {blocks[group.index]!r:.200}"
                )
            found[name] = Span(table, range(min(max(start, first), last), last))
        return found
