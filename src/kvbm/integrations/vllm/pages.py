"""Pages of vLLM's KV cache as pools, per group.  Pages without a known layout are copied as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...engines.vllm import Group, groups
from ...errors import BindError
from ...layout import spec as layouts
from ...layout.shapes import BlockShape
from ...pool.pool import Pool
from ..host_values import HostValues, latent_and_rope

__all__ = ["Pages", "as_bytes", "pages_of", "require_whole"]


@dataclass(frozen=True)
class Pages:
    """Pages of layers with the same layout, as a pool on the engine's memory: a block has one page per layer.

    `unknown` says why they are copied as bytes; it is empty if their layout is known.
    """

    pool: Pool
    unknown: str = ""


def pages_of(
    tensors: Mapping[str, Any], canonical: Any, config: Any, vllm_config: Any, kv_cache_config: Any, *,
    declared: bool = True, values: HostValues | None = None,
) -> list[list[Pages]]:  # fmt: skip
    """The pages of each group's blocks.

    A group with layers in several places has several.  Groups that use the same pages share them.

    `tensors` are vLLM's KV caches by the names of layers, and `canonical` the same caches as tensors of pages, ``(blocks,
    bytes)``, with the tensors of each group.  If `declared`, the declared layouts are used, else bytes.  With `values` the
    pages are cast to these: their layout must be known, and the parts of a latent have names.

    Raises `BindError` if pages must be copied as bytes, and some of a block's elements are outside its page, or `values` are
    given; and if the pages cannot be cast.
    """
    found: dict[Any, Pages] = {}
    result = []
    for group, refs in zip(config.groups, canonical.group_data_refs, strict=True):
        why, pages = "", []
        if values is not None:
            pages = [
                Pages(Pool.from_vllm(tensors, group=one))
                for one in _cast_groups(vllm_config, kv_cache_config, group.group_id, values)
            ]
        elif declared:
            try:
                known = groups(vllm_config, kv_cache_config, group=group.group_id)
                pages = [Pages(Pool.from_vllm(tensors, group=one)) for one in known]
            except BindError as error:
                why = str(error)
        if not pages:
            raw = [canonical.tensors[ref.tensor_idx].tensor for ref in refs]
            require_whole({name: tensors[name] for name in group.layer_names if name in tensors}, raw)
            pages = as_bytes(raw, why)
        # Groups of a hybrid model use the same memory: pages at the same addresses are copied by the same transfer.
        result.append([found.setdefault(_meaning(one.pool), one) for one in pages])
    return result


def _cast_groups(vllm_config: Any, kv_cache_config: Any, group_id: int, values: HostValues) -> list[Group]:
    """The parts of a group, in layouts that can be cast."""
    try:
        known = groups(vllm_config, kv_cache_config, group=group_id)
    except BindError as error:
        raise BindError(f"host_values: {error}; or leave host_values out") from None
    for one in known:
        values.require(one.shape, str(one))
    if not values.rope:
        return known
    return groups(vllm_config, kv_cache_config, group=group_id, layout=latent_and_rope(values.rope))


def require_whole(layers: Mapping[str, Any], pages: Sequence[Any]) -> None:
    """Raise `BindError` if a layer's block has elements outside its page.

    They would not be copied, and no digest would show it.  `layers` has vLLM's views by name, with blocks as the first axis;
    other items are ignored.  `pages`, ``(blocks, bytes)``, are those of the layers' group.
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
    """Pages ``(blocks, bytes)`` as pools of bytes, one for each size and stride.

    Copies restore the same bytes, whatever they contain.  `unknown` says why the layout is not known, if so.
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
