"""Pages of vLLM's KV cache as pools, group by group; those of which nothing is known, as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ... import spec as layouts
from ...errors import BindError
from ...pool import Pool
from ...shapes import BlockShape
from ...vllm_groups import groups

__all__ = ["Pages", "as_bytes", "pages_of"]


@dataclass(frozen=True)
class Pages:
    """Pages of layers that lie alike.

    Attributes
    ----------
    pool : Pool
        Over the engine's memory; a block is a page of each of the layers.
    unknown : str
        Why they are bytes; empty if they are not.
    """

    pool: Pool
    unknown: str = ""


def pages_of(
    tensors: Mapping[str, Any],
    canonical: Any,
    config: Any,
    vllm_config: Any,
    kv_cache_config: Any,
    *,
    declared: bool = True,
) -> list[list[Pages]]:
    """What a block of each group of layers consists of.

    Parameters
    ----------
    tensors : mapping of str to tensor
        vLLM's KV caches by the names of their layers.
    canonical : CanonicalKVCaches
        The same as tensors of pages, ``(blocks, bytes)``, and which of them each group has.
    config : OffloadingConfig
    vllm_config : VllmConfig
    kv_cache_config : KVCacheConfig
    declared : bool
        In their declared layouts; else as bytes.

    Returns
    -------
    list of list of Pages
        By group.  Layers of one group may lie apart, and groups may have pages in common: these are one object.
    """
    found: dict[Any, Pages] = {}
    result = []
    for group, refs in zip(config.groups, canonical.group_data_refs, strict=True):
        why, pages = "", []
        if declared:
            try:
                known = groups(vllm_config, kv_cache_config, group=group.group_id)
                pages = [Pages(Pool.from_vllm(tensors, group=one)) for one in known]
            except BindError as error:
                why = str(error)
        if not pages:
            pages = as_bytes([canonical.tensors[ref.tensor_idx].tensor for ref in refs], why)
        # Groups of a hybrid model overlay each other: whatever lies at the same places is copied by the same transfer.
        result.append([found.setdefault(_meaning(one.pool), one) for one in pages])
    return result


def _meaning(pool: Pool) -> Any:
    return pool.layout, pool.shape, pool.num_blocks, pool.addresses.tobytes()


def as_bytes(tensors: Sequence[Any], unknown: str = "") -> list[Pages]:
    """Whatever pages hold, it is the same bytes when they come back.

    Parameters
    ----------
    tensors : sequence of tensor
        Pages of a group's layers, ``(blocks, bytes)`` of one byte each.
    unknown : str
        Why nothing else is known of them, if that is so.

    Returns
    -------
    list of Pages
        Layers whose pages are of one size, and at one step, together.
    """
    alike: dict[Any, list[Any]] = {}
    for tensor in tensors:
        alike.setdefault((tuple(tensor.shape), tensor.stride(0)), []).append(tensor.view(torch.uint8))
    found = []
    for ((_, nbytes), step), pages in alike.items():
        pitch = f'\npitch: {{b: "{step} B"}}' if step != nbytes else ""
        layout = layouts.parse(f'order: "[l] b d"{pitch}', name="bytes")
        found.append(Pages(Pool(layout, BlockShape(len(pages), 1, 1, 1, nbytes, "uint8"), pages), unknown))
    return found
