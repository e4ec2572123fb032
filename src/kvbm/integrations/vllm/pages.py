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

__all__ = ["Pages", "as_bytes", "pages_of", "require_whole"]


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

    Raises
    ------
    BindError
        Pages that are to be copied as bytes, and do not hold all of their blocks.

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
            raw = [canonical.tensors[ref.tensor_idx].tensor for ref in refs]
            require_whole({name: tensors[name] for name in group.layer_names if name in tensors}, raw)
            pages = as_bytes(raw, why)
        # Groups of a hybrid model overlay each other: whatever lies at the same places is copied by the same transfer.
        result.append([found.setdefault(_meaning(one.pool), one) for one in pages])
    return result


def require_whole(layers: Mapping[str, Any], pages: Sequence[Any]) -> None:
    """Refuse layers of which a block does not lie in its page: what is beside it would not be copied, and no digest would see that.

    Parameters
    ----------
    layers : mapping of str to tensor
        Views of vLLM's by the names of their layers, blocks first; others are passed over.
    pages : sequence of tensor
        Of their group, ``(blocks, bytes)``.
    """
    for name, view in layers.items():
        if not isinstance(view, torch.Tensor) or not pages or view.shape[0] != pages[0].shape[0]:
            continue
        size = view.element_size()
        nbytes = size * (1 + sum((extent - 1) * step for extent, step in zip(view.shape[1:], view.stride()[1:], strict=True)))
        for block in (0, view.shape[0] - 1):
            at = view.data_ptr() + block * view.stride(0) * size
            starts = [(page.data_ptr() + block * page.stride(0), page.shape[1]) for page in pages]
            if not any(start <= at and at + nbytes <= start + length for start, length in starts):
                raise BindError(
                    f"vLLM offloading: {name}: a block's elements lie {nbytes} bytes apart, and vLLM says a page of "
                    f"{pages[0].shape[1]} bytes; expected a layout as host_layout, such as universal, or another "
                    "VLLM_KV_CACHE_LAYOUT"
                )


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
