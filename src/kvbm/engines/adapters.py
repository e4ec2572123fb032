"""Pools over the caches of engines: ``Pool.from_vllm``, ``from_sglang``, ``from_trtllm`` and ``from_transformers``.

An adapter knows what an engine's tensors look like: the names of their dimensions, and the order of the layers.  It does not guess
the layout: the caller names it, or the engine's class allows only one.  `Pool` then checks shapes and strides against the layout,
so NHD in place of HND is an error if the strides differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from .._arguments import number, quoted
from ..errors import BindError, LayoutError
from ..layout import spec
from ..layout.axes import OF_A_BLOCK
from ..layout.layout import Layout
from ..layout.shapes import PACKED, BlockShape, as_shape
from ..memory.array_info import describe
from .vllm import ORDERS, Group, groups, number_of_layer

__all__ = ["FromEngines", "pool_hint"]

#: The dimensions of a layer's tensor in vLLM's attention backends.  Their order in memory may differ: the tensor is then a
#: permuted view, and the layout gives the order.
VLLM_DIMS = {
    "vllm/flash_attn_nhd": "o b t h d",
    "vllm/flash_attn_hnd": "o b t h d",
    "vllm/flashinfer_nhd": "b o t h d",
    "vllm/flashinfer_hnd": "b o t h d",
    # vLLM 0.26 and newer: views of one tensor of all layers.  The last dimension is K and V of a token and head.
    **dict.fromkeys((f"vllm/{order}" for order in ORDERS), "b h t o*d"),
    # K and V have different orders.  The tensor's shape gives only the sizes.
    "vllm/cpu": "o b h t d",
    "vllm/cpu_vec": "b h t o*d",
    "vllm/cpu_amx": "b h t o*d",
    # Several planes share tensors of bytes.  The last dimension holds the bytes of a token, or of a token of a head.
    "vllm/fp8_ds_mla": "b t bytes",
    "vllm/nvfp4_ds_mla": "b t bytes",
    "vllm/deepseek_v4": "b t bytes",
    "vllm/mla_v41": "b t bytes",
    "vllm/dsa_indexer": "b t bytes",
    "vllm/dsa_indexer_mxfp4": "b t bytes",
    "vllm/per_token_head_fp8": "b t h bytes",
    "vllm/per_token_head_int8": "b t h bytes",
    "vllm/nvfp4": "b o*h t bytes",
    "vllm/nvfp4_sm120": "b o*h t bytes",
}


class FromEngines:
    """The adapters, as class methods of `Pool`."""

    @classmethod
    def from_vllm(
        cls,
        kv_caches: Mapping[str, Any] | Sequence[Any] | Any,
        layout: str | Layout | None = None,
        *,
        vllm_config: Any = None,
        kv_cache_config: Any = None,
        group: int | Group | None = None,
        dims: str | None = None,
        shape: BlockShape | str | None = None,
    ) -> Self:
        """Bind vLLM's KV caches as a pool: by vLLM's config (0.26 and newer), or by a layout that you name.

        Parameters
        ----------
        kv_caches : mapping of str to tensor, sequence of tensors, or tensor
            The tensors that a KV connector receives: a mapping of the layer's name (``model.layers.3.self_attn.attn``) to its
            tensor, in any order; or a list in the order of the layers.  If the layout has one allocation for all layers: either one
            view of it per layer, or the whole tensor with the dimensions of the layout.
        layout : str or Layout
            The layout of the attention backend and ``VLLM_KV_CACHE_LAYOUT``, such as ``"vllm/flash_attn_hnd"``.  Together with the
            config it replaces the layout that the config gives for the contents of a view.
        vllm_config, kv_cache_config : optional
            vLLM's objects, as a KV connector receives them.  Layout, layers, sizes, dtype and backend are read from them and
            compared with the tensors; see `kvbm.vllm_groups`.
        group : int or Group, optional
            The group of layers, if there are several: the pools of a hybrid model share memory.  A `Group` of
            `kvbm.vllm_groups.groups` needs no config.
        dims : str, optional
            The dimensions of a tensor's shape, such as ``"o b t h d"``.  Default: vLLM's for the layouts in `VLLM_DIMS`, else those
            of the layout in its order.  ``o*d`` is two axes in one dimension.  For tensors that several planes share, such as
            ``"b t bytes"``: the last dimension holds the planes.
        shape : BlockShape or str, optional
            Sizes of a block, if the dimensions do not give them: for layouts of several planes that are not in `VLLM_DIMS`, or to
            say that ``o*d`` is a latent (``no=1``); the default is K and V (``no=2``).

        Returns
        -------
        Pool
            A pool over the same memory.

        Raises
        ------
        BindError
            A name has no layer number, or two names have the same.  Dimensions, sizes or strides differ from the layout or from
            the config.  The config does not contain what is needed.

        Examples
        --------
        >>> import torch
        >>> caches = {f"model.layers.{i}.attn": torch.zeros(2, 6, 16, 4, 32) for i in range(3)}  # 2 nb nt nh hd
        >>> from kvbm import Pool
        >>> str(Pool.from_vllm(caches, "vllm/flash_attn_nhd").shape)
        'nl=3,no=2,nh=4,nt=16,hd=32,dtype=float32'
        """
        if not (vllm_config is kv_cache_config is group is None):
            one = _vllm_group(vllm_config, kv_cache_config, group, layout)
            if not isinstance(kv_caches, Mapping):
                raise BindError(f"{one}: kv_caches: expected a mapping of layers' names to tensors, got {type(kv_caches).__name__}")
            if dims is not None or shape is not None:
                raise BindError(f"{one}: dims, shape: expected none, as the config gives them; leave them out")
            return cls(one.layout, one.shape, one.arrays(kv_caches), num_blocks=one.num_blocks)  # type: ignore[call-arg]
        if layout is None:
            raise BindError(
                "vLLM: expected vllm_config= and kv_cache_config= (0.26 and newer), or a layout such as 'vllm/flash_attn_nhd'"
            )
        chosen = spec.as_layout(layout)
        shape = None if shape is None else as_shape(shape)
        if isinstance(kv_caches, Mapping):
            tensors = _by_layer(kv_caches)
        else:
            tensors = list(kv_caches) if isinstance(kv_caches, list | tuple) else [kv_caches]
        if chosen.planes:
            text = dims or VLLM_DIMS.get(chosen.name)
            return cls(chosen, shape or _shape_of_planes(chosen, tensors, text, "vLLM"), tensors)  # type: ignore[call-arg]
        if len(chosen.orders) > 1 and (dims or chosen.name in VLLM_DIMS):
            held, flat = _flat(chosen, tensors, (dims or VLLM_DIMS[chosen.name]).split(), "vLLM")
            if shape not in (None, held):
                raise BindError(f"vLLM: {chosen.name}: expected tensors of {shape}, as shape= says, got tensors of {held}")
            return cls(chosen, held, flat)  # type: ignore[call-arg]
        own = " ".join(_inner(chosen))
        usual = VLLM_DIMS.get(chosen.name, own)
        whole = bool(tensors) and len(tensors[0].shape) == len(own.split()) != len(usual.split())
        return cls._over(chosen, tensors, (dims or (own if whole else usual)).split(), "vLLM", shape)

    @classmethod
    def from_sglang(cls, token_pool: Any, *, page_size: int | None = None, layout: str | Layout | None = None) -> Self:
        """Bind one of SGLang's token pools as a pool.

        Parameters
        ----------
        token_pool : MHATokenToKVPool or MLATokenToKVPool
            An object with ``k_buffer`` and ``v_buffer``, lists of one tensor ``(slots, heads, dim)`` per layer, or with
            ``kv_buffer``, a list of ``(slots, 1, dim)``.  Its class gives the layout: ``sglang/mha_pool`` or ``sglang/mla_pool``.
        page_size : int, optional
            Tokens per page.  Default: that of the token pool.
        layout : str or Layout, optional
            Only for a pool with ``k_scale_buffer`` and ``v_scale_buffer``, such as ``"sglang/mxfp8"``: the class does not say how
            the scales are swizzled.  The planes of the layout are the data and the scales, in separate arrays.

        Returns
        -------
        Pool
            Block b is page b.  Block 0 is the page that SGLang keeps for padded tokens.

        Raises
        ------
        BindError
            The token pool is of neither kind, its slots are not whole pages, it has scales and `layout` is missing, or it has no
            scales and `layout` is given.
        """
        tokens = page_size if page_size is not None else getattr(token_pool, "page_size", None)
        if not isinstance(tokens, int) or tokens < 1:
            raise BindError(f"SGLang: page_size: expected the tokens of a page, got {quoted(tokens)}; pass page_size=")
        if getattr(token_pool, "k_scale_buffer", None) is not None:
            return cls(*_sglang_scaled(token_pool, tokens, layout))  # type: ignore[call-arg]
        if layout is not None:
            raise BindError(
                f"SGLang: {spec.as_layout(layout).name}: expected a pool with k_scale_buffer and v_scale_buffer, got "
                f"{type(token_pool).__name__} without them: leave the layout out, its class gives it"
            )
        if hasattr(token_pool, "k_buffer") and hasattr(token_pool, "v_buffer"):
            chosen = spec.load("sglang/mha_pool")
            buffers = [*token_pool.k_buffer, *token_pool.v_buffer]
            if len(token_pool.k_buffer) != len(token_pool.v_buffer):
                raise BindError(
                    f"SGLang: expected as many v_buffer as k_buffer, got {len(token_pool.v_buffer)} and {len(token_pool.k_buffer)}"
                )
            dims = ["b", "t", "h", "d"]
        elif hasattr(token_pool, "kv_buffer"):
            chosen = spec.load("sglang/mla_pool")
            buffers = [_without_heads(buffer) for buffer in token_pool.kv_buffer]
            dims = ["b", "t", "d"]
        else:
            raise BindError(
                f"SGLang: expected a pool with k_buffer and v_buffer, or with kv_buffer, got {type(token_pool).__name__}"
            )
        return cls._over(
            chosen, [_split(buffer, 0, (-1, tokens), "SGLang: slots") for buffer in buffers], dims, "SGLang"
        )

    @classmethod
    def from_trtllm(
        cls, pool: Any, *, num_kv_heads: int, tokens_per_block: int, layout: str | Layout = "trtllm/v1_pool"
    ) -> Self:
        """Bind TensorRT-LLM's primary pool as a pool.

        Parameters
        ----------
        pool : tensor
            Shape ``(num_blocks, num_layers, kv_factor, num_kv_heads * tokens_per_block * size_per_head)``.  The last dimension may
            be split into several, if these are contiguous.
        num_kv_heads, tokens_per_block : int
            The values of this rank that the engine was built with: the tensor does not contain them.
        layout : str or Layout
            Layout of the pool.

        Raises
        ------
        BindError
            The tensor has too few dimensions, or its last dimension is not a multiple of heads times tokens.
        """
        num_kv_heads = number("TensorRT-LLM: num_kv_heads", num_kv_heads, 1, 1 << 31)
        tokens_per_block = number("TensorRT-LLM: tokens_per_block", tokens_per_block, 1, 1 << 31)
        if not isinstance(getattr(pool, "shape", None), tuple):
            raise BindError(f"TensorRT-LLM: pool: expected the engine's tensor, got {quoted(pool)}")
        if len(pool.shape) < 4:
            raise BindError(
                f"TensorRT-LLM: expected at least 4 dimensions (blocks, layers, K and V, the rest), got {tuple(pool.shape)}"
            )
        rest = math.prod(pool.shape[3:])
        if rest % (num_kv_heads * tokens_per_block):
            raise BindError(
                f"TensorRT-LLM: {rest} elements per block and layer: expected a multiple of num_kv_heads * tokens_per_block = "
                f"{num_kv_heads} * {tokens_per_block}"
            )
        sizes = (*pool.shape[:3], num_kv_heads, tokens_per_block, rest // (num_kv_heads * tokens_per_block))
        return cls._over(spec.as_layout(layout), [_viewed(pool, sizes, "TensorRT-LLM")], list("blohtd"), "TensorRT-LLM")

    @classmethod
    def from_transformers(cls, cache: Any, *, tokens_per_block: int, row: int = 0) -> Self:
        """Bind one sequence of a transformers cache as a pool: layout ``hf/dynamic_cache``, a block is a range of tokens.

        Parameters
        ----------
        cache : DynamicCache or StaticCache
            An object with ``layers`` that have ``keys`` and ``values`` of shape ``(batch, heads, tokens, dim)``.
        tokens_per_block : int
            Tokens per block.
        row : int
            Index of the sequence in the batch.

        Returns
        -------
        Pool
            A pool over the current tensors.  A DynamicCache creates new tensors with every token: create a new pool then.

        Raises
        ------
        BindError
            The cache is empty, there is no such row, or the number of tokens is not a multiple of `tokens_per_block`.

        Examples
        --------
        >>> import torch, transformers
        >>> cache = transformers.DynamicCache()
        >>> keys, values = cache.update(torch.zeros(1, 2, 32, 8), torch.zeros(1, 2, 32, 8), 0)
        >>> from kvbm import Pool
        >>> Pool.from_transformers(cache, tokens_per_block=16).num_blocks
        2
        """
        layers = list(getattr(cache, "layers", ()))
        pairs = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in layers]
        if not pairs or any(tensor is None for pair in pairs for tensor in pair):
            raise BindError(
                f"transformers: expected a cache whose layers hold keys and values, got {type(cache).__name__} with "
                f"{len(layers)} layers; run the model on something first"
            )
        tensors: list[Any] = []
        flat: list[Any] = [tensor for pair in pairs for tensor in pair]
        for index, tensor in enumerate(flat):
            if len(tensor.shape) != 4 or not 0 <= row < tensor.shape[0]:
                raise BindError(
                    f"transformers: layer {index // 2}: expected (batch, heads, tokens, dim) with a row {row}, got "
                    f"{tuple(tensor.shape)}"
                )
            tensors.append(_split(tensor[row], 1, (-1, tokens_per_block), "transformers: tokens"))
        return cls._over(spec.load("hf/dynamic_cache"), tensors, ["h", "b", "t", "d"], "transformers")

    @classmethod
    def _over(
        cls, layout: Layout, tensors: Sequence[Any], dims: Sequence[str], engine: str, known: BlockShape | None = None
    ) -> Self:
        """The pool.  Reads the sizes from tensors with named dimensions, and permutes the dimensions to the layout's order."""
        wanted = _inner(layout)
        what = f"{engine}: {layout.name} ({layout.order_text})"
        if not tensors:
            raise BindError(f"{what}: expected at least one tensor, got none")
        if "*" in "".join(dims):
            tensors, dims = _unfused(tensors, dims, {"o": known.no if known else 2}, what)
        if "l" in wanted and "l" not in dims:
            tensors, dims = [_joined(tensors, what)], ["l", *dims]
        if sorted(dims) != sorted(wanted):
            raise BindError(f"{what}: expected tensors of the dimensions {' '.join(wanted)} in any order, got {' '.join(dims)}")
        sizes: dict[str, int] = {}
        for index, tensor in enumerate(tensors):
            if len(tensor.shape) != len(dims):
                raise BindError(
                    f"{what}: tensor {index}: expected {len(dims)} dimensions ({' '.join(dims)}), got {tuple(tensor.shape)}"
                )
            for axis, size in zip(dims, tensor.shape, strict=True):
                if sizes.setdefault(axis, int(size)) != size:
                    raise BindError(f"{what}: tensor {index}: axis '{axis}': expected {sizes[axis]} as in tensor 0, got {size}")
        table = [axis for term in layout.orders[0].table for axis in term.axes]
        if "o" in table:
            sizes["o"] = 2
        if "l" in table:
            sizes["l"] = len(tensors) // sizes.get("o", 1) if "o" in table else len(tensors)
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        nl, no, nh, nt, hd = (sizes.get(axis, 1) for axis in OF_A_BLOCK)
        shape = known or BlockShape(nl, no, nh, nt, hd, dtype)
        turned = [_permuted(tensor, [list(dims).index(axis) for axis in wanted]) for tensor in tensors]
        return cls(layout, shape, turned)  # type: ignore[call-arg]


def pool_hint(name: str, axes: int) -> str:
    """The end of an error about the number of axes, if `Pool.from_vllm` takes arrays of as many axes for a layout."""
    dims = VLLM_DIMS.get(name, "").split()
    if len(dims) != axes:
        return ""
    return f'; kvbm.Pool.from_vllm(tensors, "{name}") takes one tensor per layer with the dimensions ({" ".join(dims)})'


def _unfused(
    tensors: Sequence[Any], dims: Sequence[str], sizes: Mapping[str, int], what: str
) -> tuple[list[Any], list[str]]:
    """Split dimensions of two axes, such as ``o*d``, into two.  The size of the first axis is known."""
    found, names = list(tensors), list(dims)
    for name in [name for name in dims if "*" in name]:
        at, (first, _, rest) = names.index(name), name.partition("*")
        if first not in sizes:
            raise BindError(f"{what}: dims {' '.join(dims)!r}: '{name}': expected one of {', '.join(sizes)} first")
        for tensor in found:
            if len(tensor.shape) != len(names):
                raise BindError(f"{what}: expected {len(names)} dimensions ({' '.join(dims)}), got {tuple(tensor.shape)}")
        found = [_split(tensor, at, (sizes[first], -1), f"{what}: dimension '{name}'") for tensor in found]
        names[at : at + 1] = [first, rest]
    return found, names


def _flat(layout: Layout, tensors: Sequence[Any], dims: Sequence[str], engine: str) -> tuple[BlockShape, list[Any]]:
    """Shape and flattened tensors, for a layout in which K and V have different orders."""
    what = f"{engine}: {layout.name} ({layout.order_text})"
    if not tensors:
        raise BindError(f"{what}: expected at least one tensor, got none")
    (first, *_), names = _unfused(tensors, dims, {"o": 2}, what)
    for index, tensor in enumerate(tensors):
        if len(first.shape) != len(names) or tensor.shape != tensors[0].shape:
            raise BindError(
                f"{what}: tensor {index}: expected {len(dims)} dimensions ({' '.join(dims)}) as in tensor 0, got "
                f"{tuple(tensor.shape)}"
            )
    sizes = dict(zip(names, map(int, first.shape), strict=True))
    shape = BlockShape(len(tensors), 2, sizes["h"], sizes["t"], sizes["d"], str(first.dtype).removeprefix("torch."))
    return shape, [_viewed(tensor, (-1,), f"{what}: tensor {index}") for index, tensor in enumerate(tensors)]


def _joined(tensors: Sequence[Any], what: str) -> Any:
    """The tensor or array of which all are views, one per layer.  Its first dimension is the layers."""
    seen = [describe(tensor, f"{what}: tensor {index}") for index, tensor in enumerate(tensors)]
    first, held = seen[0], _memory(tensors[0])
    step = seen[1].address - first.address if len(seen) > 1 and _memory(tensors[1]) == held else 0
    ends = [one.address for one in seen]
    for index, one in enumerate(seen):
        alike, together = one[1:4] == first[1:4], _memory(tensors[index]) == held
        if alike and together and one.address == first.address + index * step and step >= 0:
            continue
        if not alike:
            found = f"shape {one.shape}, strides {one.strides} bytes and {one.dtype}"
            found = f"{found}; tensor 0 has shape {first.shape}, strides {first.strides} bytes and {first.dtype}"
        elif not together:
            found = "a tensor in other memory than tensor 0"
        elif ends == sorted(ends, reverse=True):
            found = f"views in reverse order, tensor 1 {-step:,} bytes before tensor 0; reverse the list"
        else:
            found = f"a tensor that starts {one.address - first.address:,} bytes after tensor 0; tensor 1 starts {step:,} after it"
        raise BindError(
            f"{what}: tensor {index}: expected views of one tensor of all layers, in order and at equal steps, got {found}"
        )
    if isinstance(tensors[0], np.ndarray):
        return np.lib.stride_tricks.as_strided(tensors[0], (len(seen), *first.shape), (step, *first.strides))
    size = tensors[0].element_size()
    return tensors[0].as_strided((len(seen), *first.shape), (step // size, *tensors[0].stride()), first.offset)


def _memory(tensor: Any) -> int:
    """A number that all views of one memory have."""
    if not isinstance(tensor, np.ndarray):
        return int(tensor.untyped_storage()._cdata)
    while isinstance(tensor.base, np.ndarray):
        tensor = tensor.base
    return id(tensor)


def _vllm_group(vllm_config: Any, kv_cache_config: Any, group: int | Group | None, layout: str | Layout | None) -> Group:
    if isinstance(group, Group):
        if not (vllm_config is kv_cache_config is layout is None):
            raise BindError(f"{group}: expected no other arguments, as the group was read from the config; leave them out")
        return group
    if vllm_config is None or kv_cache_config is None:
        raise BindError("vLLM: expected both vllm_config= and kv_cache_config=, as a KV connector is given them")
    found = groups(vllm_config, kv_cache_config, group=group, layout=layout)
    if len(found) > 1:
        raise BindError(
            f"vLLM: expected one group of layers with one layout, got {len(found)}: {'; '.join(map(str, found))}; pass group=, a "
            "number or one of kvbm.vllm_groups.groups(vllm_config, kv_cache_config)"
        )
    return found[0]


def _inner(layout: Layout) -> list[str]:
    """The plain axes inside an allocation, slowest first."""
    if layout.planes:
        raise BindError(
            f"{layout.name} ({layout.order_text}): it has several planes, which the dimensions of a tensor do not give; bind the "
            "tensors with Pool(layout, shape, tensors)"
        )
    terms = [str(term) for order in layout.orders for term in order.inner]
    if len(layout.orders) > 1 or any(len(term) != 1 for term in terms):
        raise BindError(
            f"{layout.name} ({layout.order_text}): its axes are split or fused, so the dimensions of a tensor cannot have their "
            "names; bind the tensors with Pool(layout, shape, tensors)"
        )
    return terms


def _shape_of_planes(layout: Layout, tensors: Sequence[Any], dims: str | None, engine: str) -> BlockShape:
    """Sizes of a block with planes that share tensors of bytes: the named dimensions, and ``hd`` computed from the bytes."""
    what = f"{engine}: {layout.name} ({layout.order_text})"
    names = (dims or "").split()
    if layout.orders[0].inner[-1:] == () or not layout.orders[0].inner[-1].planes or names[-1:] != ["bytes"]:
        raise BindError(
            f"{what}: the dimensions of tensors do not give its planes; expected shape=BlockShape(…)"
            + (", or dims such as 'b t bytes'" if layout.orders[0].inner[-1:] else "")
        )
    if any(plane.dtype is None for plane in layout.planes):
        raise BindError(
            f"{what}: a plane has the dtype of the shape, which tensors of bytes do not give; expected shape=BlockShape(…)"
        )
    if not tensors:
        raise BindError(f"{what}: expected at least one tensor, got none")
    first = tensors[0]
    if len(first.shape) != len(names):
        raise BindError(f"{what}: tensor 0: expected {len(names)} dimensions ({dims}), got {tuple(first.shape)}")
    sizes = {"l": len(tensors)} if any("l" in term.axes for term in layout.orders[0].table) else {}
    if "o" in layout.present:
        sizes["o"] = 2
    for name, size in zip(names[:-1], map(int, first.shape), strict=False):
        *known, axis = sorted(name.split("*"), key=lambda axis: axis not in sizes)
        before = math.prod(sizes[axis] for axis in known)
        if size % before:
            raise BindError(f"{what}: tensor 0: dimension '{name}': expected a multiple of {before}, got {size}")
        sizes[axis] = size // before
    if missing := [axis for axis in "blht" if axis in layout.present and axis not in sizes]:
        raise BindError(f"{what}: dims {dims!r}: axis {missing[0]!r} missing: expected it there, or shape=BlockShape(…)")
    elements = int(first.shape[-1]) * (first.element_size() if hasattr(first, "element_size") else first.itemsize)
    held = math.prod(map(int, first.shape[:-1])) * elements
    # An element has at least four bits.  Take the largest size: if a pitch leaves room, smaller sizes leave gaps.
    for hd in range(2 * elements, 0, -1):
        shape = BlockShape(sizes.get("l", 1), sizes.get("o", 1), sizes.get("h", 1), sizes.get("t", 1), hd, "uint8")
        try:
            record = layout.resolve(shape, sizes["b"])
        except LayoutError:
            continue
        if math.prod(record.first.shape) == held:  # padding not counted
            return shape
    raise BindError(
        f"{what}: tensor 0: no size of a head gives the {elements} bytes of the last dimension of {tuple(first.shape)}; "
        "expected another layout, or shape=BlockShape(…)"
    )


def _sglang_scaled(pool: Any, tokens: int, layout: str | Layout | None) -> tuple[Layout, BlockShape, list[Any]]:
    """Layout, shape and tensors of a token pool with separate scales."""
    if layout is None:
        raise BindError(
            f"SGLang: {type(pool).__name__} has scales, and does not say how they are swizzled; name the layout, such as "
            "layout='sglang/mxfp8'"
        )
    chosen = spec.as_layout(layout)
    what = f"SGLang: {chosen.name} ({chosen.order_text})"
    if [term.axes for term in chosen.orders[0].table][:1] != [tuple(plane.name for plane in chosen.planes)]:
        raise BindError(f"{what}: expected two planes in separate arrays, data and scale, such as sglang/mxfp8")
    buffers = [list(getattr(pool, name, ())) for name in ("k_buffer", "v_buffer", "k_scale_buffer", "v_scale_buffer")]
    if len(set(map(len, buffers))) != 1 or not buffers[0]:
        raise BindError(f"{what}: expected as many buffers of K, V and their scales, got {[*map(len, buffers)]}")
    data = [_split(buffer, 0, (-1, tokens), "SGLang: slots") for buffer in (*buffers[0], *buffers[1])]
    if len(data[0].shape) != 4:
        raise BindError(f"SGLang: k_buffer: expected (slots, heads, dim), got {tuple(buffers[0][0].shape)}")
    blocks, _, heads, dim = map(int, data[0].shape)
    shape = BlockShape(len(buffers[0]), 2, heads, tokens, dim * PACKED.get(chosen.planes[0].dtype or "", 1), "uint8")
    kinds = chosen.resolve(shape, blocks).kinds
    scales = [
        _viewed(buffer, kinds[-1].shape, f"{what}: scales of {blocks} pages") for buffer in (*buffers[2], *buffers[3])
    ]
    return chosen, shape, [*data, *scales]


def _by_layer(kv_caches: Mapping[str, Any]) -> list[Any]:
    """Tensors in the order of the layers' numbers; each name has one."""
    found: dict[int, str] = {}
    for name in kv_caches:
        number = number_of_layer(name)
        if number in found:
            raise BindError(f"vLLM: layers {found[number]!r} and {name!r} have the same number; pass a list in order")
        found[number] = name
    return [kv_caches[found[number]] for number in sorted(found)]


def _without_heads(buffer: Any) -> Any:
    if len(buffer.shape) != 3 or buffer.shape[1] != 1:
        raise BindError(f"SGLang: kv_buffer: expected (slots, 1, dim), got {tuple(buffer.shape)}")
    return buffer[:, 0]


def _split(tensor: Any, dim: int, sizes: tuple[int, int], what: str) -> Any:
    """Split one dimension into two; -1 is computed from the other size."""
    count = max(sizes)
    if len(tensor.shape) <= dim or tensor.shape[dim] % count or not tensor.shape[dim]:
        size = tensor.shape[dim] if len(tensor.shape) > dim else None
        raise BindError(f"{what}: expected a multiple of {count}, got {size} in a tensor of {tuple(tensor.shape)}")
    if isinstance(tensor, np.ndarray):
        return tensor.reshape(*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :])  # to split an axis never copies
    return tensor.unflatten(dim, sizes)


def _permuted(tensor: Any, axes: list[int]) -> Any:
    return tensor.transpose(axes) if isinstance(tensor, np.ndarray) else tensor.permute(axes)


def _viewed(tensor: Any, sizes: Iterable[int], what: str) -> Any:
    if isinstance(tensor, np.ndarray):
        made = tensor.reshape(*sizes)
        if tensor.size and not np.shares_memory(made, tensor):
            raise BindError(f"{what}: the pool is not contiguous where its last dimensions are joined: {tensor.strides} bytes")
        return made
    try:
        return tensor.view(*sizes)
    except RuntimeError as error:
        raise BindError(f"{what}: the pool is not contiguous where its last dimensions are joined: {error}") from None
