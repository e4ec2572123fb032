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

__all__ = ["Pages", "pages_of"]


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
    tensors: Mapping[str, Any], canonical: Any, config: Any, vllm_config: Any, kv_cache_config: Any
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

    Returns
    -------
    list of list of Pages
        By group.  Layers of one group may lie apart, and groups may have pages in common: these are one object.
    """
    found: dict[Any, Pages] = {}
    result = []
    for group, refs in zip(config.groups, canonical.group_data_refs, strict=True):
        try:
            known = groups(vllm_config, kv_cache_config, group=group.group_id)
            pages = [Pages(Pool.from_vllm(tensors, group=one)) for one in known]
        except BindError as error:
            pages = [_bytes([canonical.tensors[ref.tensor_idx].tensor for ref in refs], str(error))]
        # Groups of a hybrid model overlay each other: whatever lies at the same places is copied by the same transfer.
        result.append([found.setdefault(_meaning(one.pool), one) for one in pages])
    return result


def _meaning(pool: Pool) -> Any:
    return pool.layout, pool.shape, pool.num_blocks, pool.addresses.tobytes()


def _bytes(pages: Sequence[Any], why: str) -> Pages:
    """Whatever a page holds, it is the same bytes when it comes back."""
    (blocks, nbytes), step = pages[0].shape, pages[0].stride(0)
    if any((tuple(page.shape), page.stride(0)) != ((blocks, nbytes), step) for page in pages):
        raise BindError(f"{why}; and as bytes they differ in size: expected pages of {nbytes} bytes in all layers")
    pitch = f'\npitch: {{b: "{step} B"}}' if step != nbytes else ""
    layout = layouts.parse(f'order: "[l] b d"{pitch}', name="bytes")
    shape = BlockShape(len(pages), 1, 1, 1, nbytes, "uint8")
    return Pages(Pool(layout, shape, [page.view(torch.uint8) for page in pages]), why)
