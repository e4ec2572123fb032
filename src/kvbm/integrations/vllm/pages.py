"""Pages of vLLM's KV cache as pools: their order, sizes and dtype, read from vLLM's own objects."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ... import spec as layouts
from ...errors import BindError
from ...layout import Layout
from ...pool import Pool
from ...shapes import ITEMSIZE, BlockShape

__all__ = ["Pages", "pages_of", "require_version"]

#: The first version that is supported, and the first that is not.
VERSIONS = ((0, 32), (0, 33))

#: What lies in a page of a layer, by the name of vLLM's layout; ``{t}`` is the token inside a kernel's block, ``{n}`` that block.
INTERIORS = {"LBHNC": "{n}h {t} o d", "LBNHC": "{n}{t} h o d"}

#: What lies in a block of all layers, where vLLM has blocks outermost.
PACKED = {"BLHNC": "l h t o d", "BLNHC": "l t h o d", "BHLNC": "h l t o d"}

#: vLLM's CPU kernels that keep K of a head and block as ``(head_size, tokens)``, and V behind it as ``(tokens, head_size)``.
#: Others, such as ``amx``, pack K in words.
CPU_PLAIN = ("vec", "vec16")


def require_version() -> None:
    """Raise `BindError` unless the vLLM that is installed is one of those that this was tested with."""
    import vllm

    found = vllm.__version__
    try:
        number = tuple(int(part) for part in found.split(".")[:2])
    except ValueError:
        number = ()
    if not VERSIONS[0] <= number < VERSIONS[1]:
        first, end = (".".join(map(str, version)) for version in VERSIONS)
        raise BindError(
            f"kvbm.integrations.vllm: expected vLLM {first} up to {end} (exclusive), got {found}; install one of these, or a "
            "kvbm-layouts that knows yours"
        )


@dataclass(frozen=True)
class Pages:
    """Pages of layers that look alike, as a pool.

    Attributes
    ----------
    pool : Pool
        Over the engine's memory; a block is a page of each of the layers.
    tensors : tuple of int
        Which of vLLM's tensors they are, in the order of the layers.
    """

    pool: Pool
    tensors: tuple[int, ...]


def pages_of(kv_caches: Any, config: Any, vllm_config: Any, kv_cache_config: Any) -> list[list[Pages]]:
    """What a block of each group of layers consists of.

    Parameters
    ----------
    kv_caches : CanonicalKVCaches
        vLLM's tensors of pages, and which of them each group has.
    config : OffloadingConfig
    vllm_config : VllmConfig
    kv_cache_config : KVCacheConfig

    Returns
    -------
    list of list of Pages
        By group; layers of one group may differ in their pages.

    Raises
    ------
    BindError
        Pages whose order is not known.
    """
    found: dict[tuple[Any, ...], Pages] = {}
    groups = []
    for group, refs in zip(config.groups, kv_caches.group_data_refs, strict=True):
        spec = kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec
        specs = getattr(spec, "kv_cache_specs", None) or dict.fromkeys(group.layer_names, spec)
        if len(refs) == len(group.layer_names) and config.kv_cache_layout not in PACKED:
            kinds = _layer_by_layer(kv_caches, config, vllm_config, group.layer_names, specs, refs)
        else:
            kinds = _packed(config, kv_caches, specs, refs, len(config.groups))
        pages = []
        for (layout, shape), tensors in kinds.items():
            key = (layout, shape, tuple(tensors))
            if key not in found:
                arrays = [kv_caches.tensors[index].tensor for index in tensors]
                found[key] = Pages(_bound(layout, shape, arrays), tuple(tensors))
            pages.append(found[key])
        groups.append(pages)
    return groups


Kinds = dict[tuple[Layout, BlockShape], list[int]]


def _layer_by_layer(
    kv_caches: Any, config: Any, vllm_config: Any, names: Sequence[str], specs: Mapping[str, Any], refs: Sequence[Any]
) -> Kinds:
    """Layouts and shapes of the pages that each layer has of its own, and which tensors these are."""
    drafts: dict[tuple[str | None, tuple[Any, ...], int], list[int]] = {}
    for name, ref in zip(names, refs, strict=True):
        tensor = kv_caches.tensors[ref.tensor_idx].tensor
        order, sizes = _page(name, specs[name], ref.page_size_bytes, config, vllm_config, tensor)
        drafts.setdefault((order, sizes, tensor.stride(0)), []).append(ref.tensor_idx)
    return {
        (_layout(order, sizes, step), BlockShape(len(tensors), *sizes)): tensors
        for (order, sizes, step), tensors in drafts.items()
    }


def _page(
    name: str, spec: Any, nbytes: int, config: Any, vllm_config: Any, tensor: Any
) -> tuple[str | None, tuple[Any, ...]]:
    """The order of a layer's page (None: not known, it is copied as bytes), and its sizes: ``no nh nt hd dtype``."""
    as_bytes = None, (1, 1, 1, nbytes, "uint8")
    sizes = _sizes(spec, nbytes)
    if sizes is None:
        return as_bytes
    no, _, nt, _, _ = sizes
    if _is_cpu() and no == 2:
        isa = _cpu_kernel(spec, vllm_config)
        if isa not in CPU_PLAIN:
            raise BindError(
                f"vLLM: layer {name}: its CPU kernel '{isa}' packs K of {spec.dtype} in an order of its own; expected one of "
                f"{', '.join(CPU_PLAIN)}: run with --dtype float32, or without the offloading"
            )
        return "cpu", sizes
    if config.kv_cache_layout not in INTERIORS:
        raise BindError(
            f"vLLM: layer {name}: the layout {config.kv_cache_layout} does not keep a page of a layer together; expected one of "
            f"{', '.join((*INTERIORS, *PACKED))}: set VLLM_KV_CACHE_LAYOUT"
        )
    blocks, cache = tensor.shape[0], vllm_config.compilation_config.static_forward_context[name].kv_cache
    ratio = cache.shape[0] // blocks  # blocks of the attention kernel
    splits = {"n": f"t/{nt // ratio} ", "t": f"t%{nt // ratio}"} if ratio > 1 else {"n": "", "t": "t"}
    return INTERIORS[config.kv_cache_layout].format(**splits), sizes


def _sizes(spec: Any, nbytes: int) -> tuple[int, int, int, int, str] | None:
    """``no nh nt hd dtype`` of a page; None where it is not heads times tokens times something."""
    heads, tokens, content = (getattr(spec, name, None) for name in ("num_kv_heads", "num_states", "head_size"))
    if None in (heads, tokens, content):  # the state of another kind of layer
        return None
    heads, content = spec.num_heads, spec.state_content_size_bytes
    if heads * tokens * content != nbytes:
        return None
    dtype, size = str(spec.dtype).removeprefix("torch."), spec.dtype.itemsize
    if spec.head_size_v == spec.head_size and content == 2 * spec.head_size * size and dtype in ITEMSIZE:
        return 2, heads, tokens, spec.head_size, dtype
    if dtype in ITEMSIZE and content % size == 0:
        return 1, heads, tokens, content // size, dtype
    return 1, heads, tokens, content, "uint8"


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _cpu_kernel(spec: Any, vllm_config: Any) -> str:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache = vllm_config.cache_config.cache_dtype
    found: str = _get_attn_isa(vllm_config.model_config.dtype, spec.block_size, spec.head_size, cache)
    return found if spec.dtype == vllm_config.model_config.dtype else f"{found} with {cache}"


def _packed(config: Any, kv_caches: Any, specs: Mapping[str, Any], refs: Sequence[Any], num_groups: int) -> Kinds:
    """Layout and shape of blocks of all layers: as bytes where groups share them, or layers differ."""
    [ref] = refs
    tensor = kv_caches.tensors[ref.tensor_idx]
    first = next(iter(specs.values()))
    alike = num_groups == 1 and all(spec == first for spec in specs.values())
    sizes = _sizes(first, getattr(first, "unpadded_page_size_bytes", 0)) if alike else None
    shape = BlockShape(len(specs), *sizes) if sizes else None
    if shape is None or shape.nbytes != tensor.page_size_bytes or config.kv_cache_layout not in PACKED:
        shape = BlockShape(1, 1, 1, 1, tensor.page_size_bytes, "uint8")
        order = "b d"
    else:
        order = f"b {PACKED[config.kv_cache_layout]}"
    return {(layouts.parse(f'order: "{order}"', name=f"vllm/{config.kv_cache_layout}"), shape): [ref.tensor_idx]}


def _layout(order: str | None, sizes: tuple[Any, ...], step: int) -> Layout:
    """One array a layer, of pages at a step of so many bytes."""
    nbytes = math.prod(sizes[:4]) * ITEMSIZE[sizes[4]]
    pitch = f'\npitch: {{b: "{step} B"}}' if step != nbytes else ""
    if order == "cpu":
        return layouts.parse(f'order: {{k: "[l] b h o d t", v: "[l] b h o t d"}}{pitch}', name="vllm/cpu_pages")
    return layouts.parse(f'order: "[l] b {order or "d"}"{pitch}', name="vllm/pages" if order else "bytes")


def _bound(layout: Layout, shape: BlockShape, pages: Sequence[Any]) -> Pool:
    """A pool over tensors of pages, ``(blocks, bytes)``, whose rows may lie apart."""
    blocks = pages[0].shape[0]
    kind = layout.resolve(shape, blocks).first
    dtype = getattr(torch, shape.dtype)
    arrays = []
    for page in pages:
        typed = page.view(dtype)
        arrays.append(typed.as_strided(kind.shape, [step // dtype.itemsize for step in kind.strides]))
    return Pool(layout, shape, arrays, num_blocks=blocks)
