"""Asks an installed engine where it writes, and compares with the layout that is declared.

`vllm_writes` sends numbered keys and values through the attention backend's own write of a KV cache, in a running worker or in
caches of `vllm_caches`, and reads them where the layout says they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..errors import BindError
from ..layout import Layout
from ..pool import Pool
from ..vllm_groups import Group, groups

__all__ = ["Misplaced", "Written", "vllm_caches", "vllm_writes"]

#: Elements of a layer that are searched for where they are not at their place.
_SEARCHED = 4

#: Keys and values of tokens, and slots → nothing; the engine writes them.
_Write = Callable[[Any, Any], None]


@dataclass(frozen=True)
class Misplaced:
    """An element that the engine writes elsewhere.

    Parameters
    ----------
    layer : str
        The engine's name.
    block, o, head, token, element : int
    expected : int
        Bytes from the beginning of the engine's allocation, as the layout says.
    found : tuple of int
        Where the engine wrote it, within the blocks that were looked at; empty if nowhere.
    """

    layer: str
    block: int
    o: int
    head: int
    token: int
    element: int
    expected: int
    found: tuple[int, ...]

    def __str__(self) -> str:
        places = ", ".join(f"{place:,}" for place in self.found) or "nowhere in the blocks"
        return (
            f"{self.layer}: {'KV'[self.o]} of block {self.block}, head {self.head}, token {self.token}, element {self.element}: "
            f"expected at byte {self.expected:,}, found at {places}"
        )


@dataclass(frozen=True)
class Written:
    """What an engine writes where; true where that is as declared.

    Parameters
    ----------
    engine : str
        With its version and the attention backend.
    layout : str
        Its name and order.
    compared : int
        Elements.
    wrong : int
        Those that were elsewhere.
    misplaced : tuple of Misplaced
        A few of them, searched for.
    """

    engine: str
    layout: str
    compared: int
    wrong: int
    misplaced: tuple[Misplaced, ...]

    def __bool__(self) -> bool:
        return self.compared > 0 and not self.wrong

    def __str__(self) -> str:
        if self:
            return f"{self.engine}: {self.layout}: {self.compared:,} elements, each at its place"
        lines = [f"{self.engine}: {self.layout}: {self.wrong:,} of {self.compared:,} elements are elsewhere"]
        return "\n  ".join([*lines, *map(str, self.misplaced)])


def vllm_writes(
    kv_caches: Mapping[str, Any],
    vllm_config: Any,
    kv_cache_config: Any,
    *,
    layout: str | Layout | None = None,
    group: int | None = None,
    blocks: int = 3,
) -> list[Written]:
    """Whether the installed vLLM writes where the layouts of its groups say: every element of a few blocks, in all layers.

    Parameters
    ----------
    kv_caches, vllm_config, kv_cache_config
        Of a worker, as its KV connector is given them, when no request runs; or of `vllm_caches`.
    layout, group : optional
        As for `kvbm.vllm_groups.groups`.
    blocks : int
        How many, spread over the cache; their content is put back.

    Returns
    -------
    list of Written
        One for each group of layers that lie alike.

    Raises
    ------
    BindError
        What the config does not say; layouts of several planes, whose scales this does not compute.

    Notes
    -----
    Elements are numbered, and written bit by bit of their numbers as zeros and ones, which every dtype holds.
    """
    import vllm

    found = []
    for one in groups(vllm_config, kv_cache_config, group=group, layout=layout):
        if one.layout.planes:
            raise BindError(f"{one}: it has several planes; expected a layout of one: scales are not compared")
        pool = Pool(one.layout, one.shape, one.arrays(kv_caches), num_blocks=one.num_blocks)
        ids = np.unique(np.linspace(0, one.num_blocks - 1, blocks).astype(np.int64))
        compared, wrong, misplaced = 0, 0, []
        for number, name in enumerate(one.names):
            layer = vllm_config.compilation_config.static_forward_context[name]
            probe = _Probe(one, pool, name, number, kv_caches[name], ids, _writer(one, layer, ids, vllm_config))
            with probe.restored():
                compared += probe.count
                coordinates = probe.elsewhere()
                wrong += len(coordinates)
                misplaced += [probe.search(at) for at in coordinates[:_SEARCHED] if len(misplaced) < _SEARCHED]
        engine = f"vLLM {vllm.__version__}, {one.backend}, {one.order}"
        said = f"{one.layout.name} ({one.layout.order_text})"
        found.append(Written(engine, said, compared, wrong, tuple(misplaced[:_SEARCHED])))
    return found


class _Probe:
    """The elements of some blocks of a layer: where the layout says they are, and where they are."""

    def __init__(
        self, group: Group, pool: Pool, name: str, number: int, view: Any, ids: np.ndarray[Any, Any], write: _Write
    ) -> None:
        import torch

        self.name, self.view, self.ids, self.write = name, view, ids, write
        shape = group.shape
        self.sizes = (shape.no, len(ids), shape.nt, shape.nh, shape.hd)
        self.count = int(np.prod(self.sizes))
        _, b, t, h, d = np.ogrid[tuple(slice(size) for size in self.sizes)]
        expected = np.zeros(self.sizes, np.int64)
        for half in range(shape.no):
            entry, offset = pool.resolved.address(ids[b[0]], l=number, o=half, h=h[0], t=t[0], d=d[0])  # type: ignore[call-overload]
            expected[half] = pool.addresses[entry].astype(np.int64) + offset
        storage = view.untyped_storage()
        #: Bytes from the beginning of the engine's allocation.
        self.expected = expected - storage.data_ptr()
        self.memory = torch.empty(0, dtype=view.dtype, device=view.device).set_(storage)
        self.numbers = torch.arange(1, self.count + 1, device=view.device).view(self.sizes)
        self.places = torch.from_numpy(self.expected // view.element_size()).to(view.device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The blocks are as before, at the end."""
        import torch

        at = torch.from_numpy(self.ids).to(self.view.device)
        saved = self.view[at].clone()
        try:
            yield
        finally:
            self.view[at] = saved

    def elsewhere(self) -> list[tuple[int, ...]]:
        """Coordinates ``o b t h d``, b counting `ids`, of elements that are not where they are expected."""
        import torch

        found = torch.zeros_like(self.numbers)
        for bit in range(self.count.bit_length()):
            self.write(((self.numbers >> bit) & 1).bool(), self.sizes)
            found |= (self.memory[self.places] != 0).long() << bit
        return [tuple(at) for at in torch.nonzero(found != self.numbers).tolist()]

    def search(self, at: tuple[int, ...]) -> Misplaced:
        """Where one element is: it alone is not zero."""
        import torch

        marked = torch.zeros_like(self.numbers, dtype=torch.bool)
        marked[at] = True
        self.write(marked, self.sizes)
        size, steps = self.view.element_size(), self.view.stride()
        places = set()
        for block in map(int, self.ids):
            for where in torch.nonzero(self.view[block] != 0).tolist():
                inside = sum(index * step for index, step in zip((block, *where), steps, strict=True))
                places.add((self.view.storage_offset() + inside) * size)
        o, b, t, h, d = at
        return Misplaced(self.name, int(self.ids[b]), o, h, t, d, int(self.expected[at]), tuple(sorted(places)))


def _writer(group: Group, layer: Any, ids: np.ndarray[Any, Any], vllm_config: Any) -> _Write:
    """The attention backend's own write, of all tokens of some blocks: ones where marked, zeros elsewhere."""
    import torch

    device, dtype = layer.kv_cache.device, vllm_config.model_config.dtype
    nt = group.shape.nt
    slots = torch.from_numpy((ids[:, None] * nt + np.arange(nt)).reshape(-1)).to(device)

    def write(marked: Any, sizes: tuple[int, ...]) -> None:
        rows = marked.to(device=device, dtype=dtype).view(sizes[0], sizes[1] * sizes[2], sizes[3], sizes[4])
        if sizes[0] == 2:
            layer.impl.do_kv_cache_update(layer, rows[0].contiguous(), rows[1].contiguous(), layer.kv_cache, slots)
            return
        rank = int(layer.impl.kv_lora_rank)
        latent, rope = rows[0, :, 0, :rank].contiguous(), rows[0, :, :, rank:].contiguous()
        layer.impl.do_kv_cache_update(latent, rope, layer.kv_cache, slots, layer.kv_cache_dtype, layer._k_scale)

    return write


def vllm_caches(
    backend: str = "CPU_ATTN",
    order: str = "LBHNC",
    *,
    nl: int = 2,
    nh: int = 2,
    nt: int = 32,
    hd: int = 64,
    num_blocks: int = 5,
    dtype: str = "float32",
    cache_dtype: str = "auto",
    isa: str | None = None,
    device: str = "cpu",
) -> tuple[dict[str, Any], Any, Any]:
    """KV caches as the installed vLLM makes them, without a model: its own specs, strides, views and attention backend.

    Parameters
    ----------
    backend : str
        A name of vLLM's ``AttentionBackendEnum``.  Those of GPUs were not run.
    order : str
        As ``VLLM_KV_CACHE_LAYOUT``.
    nl, nh, nt, hd, num_blocks : int
        Layers, heads, tokens of a block, elements of a head (of a latent, its rope part of 64 included), blocks.
    dtype, cache_dtype : str
        Of the model; of the cache, as vLLM names it.
    isa : str, optional
        Of the CPU backend: ``"vec"``, ``"vec16"``, ``"amx"``; what vLLM chooses on this machine if not given.
    device : str

    Returns
    -------
    kv_caches, vllm_config, kv_cache_config
        The first and the last are vLLM's; the second has the attributes of vLLM's that are read.
    """
    import torch
    from vllm.config.cache import CacheConfig
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
    from vllm.v1.attention.backend import AttentionType
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheLayout,
        KVCacheTensor,
        MLAAttentionSpec,
        compute_layout_strides,
        get_kv_quant_mode,
    )  # fmt: skip
    from vllm.v1.worker.utils import allocate_kv_cache

    model_dtype = getattr(torch, dtype)
    cls = AttentionBackendEnum[backend].get_class()
    common = {
        "block_size": nt, "head_size": hd, "dtype": kv_cache_dtype_str_to_dtype(cache_dtype, SimpleNamespace(dtype=model_dtype)),
        "kv_quant_mode": get_kv_quant_mode(cache_dtype),
    }  # fmt: skip
    if cls.is_mla():
        spec = MLAAttentionSpec(**common, num_kv_heads=1, cache_dtype_str=cache_dtype)
    else:
        spec = FullAttentionSpec(**common, num_kv_heads=nh)
    spec = cls.customize_spec(spec)
    chosen = KVCacheLayout[order]
    names = [f"model.layers.{number}.self_attn.attn" for number in range(nl)]
    layer_stride, block_stride, *_ = compute_layout_strides(spec, num_blocks, nl, chosen)
    config = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_layout=order, kv_cache_groups=[KVCacheGroupSpec(names, spec)],
        kv_cache_tensors=[KVCacheTensor(nl * num_blocks * spec.page_size_bytes, names, layer_stride, block_stride)],
    )  # fmt: skip
    kv_caches = allocate_kv_cache(config, torch.device(device), chosen)
    if backend == "CPU_ATTN" and isa is None:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        isa = _get_attn_isa(model_dtype, nt, hd, cache_dtype)
    impl_class = cls.get_impl_cls()
    one = torch.ones((), device=device)
    layers = {}
    for name in names:
        impl = impl_class.__new__(impl_class)  # a constructor wants a model; these are what a write reads
        for attribute, value in {
            "num_kv_heads": nh, "head_size": hd, "kv_cache_dtype": cache_dtype, "cache_dtype": cache_dtype,
            "attn_type": AttentionType.DECODER, "kv_sharing_target_layer_name": None, "kv_lora_rank": hd - 64,
            "qk_rope_head_dim": 64, "is_kvcache_nvfp4": False, "nvfp4_fa2": False, "_is_per_token_head_quant": False,
            "fp8_dtype": torch.float8_e4m3fn,
        }.items():  # fmt: skip
            setattr(impl, attribute, value)
        layers[name] = SimpleNamespace(
            impl=impl, isa=isa, kv_cache_dtype=cache_dtype, get_attn_backend=lambda: cls, _k_scale=one, _v_scale=one,
            _k_scale_float=1.0, _v_scale_float=1.0, kv_cache=kv_caches[name].squeeze(1) if cls.is_mla() else kv_caches[name],
        )  # fmt: skip
    cache = CacheConfig(block_size=nt, cache_dtype=cache_dtype)
    cache.kv_cache_layout = order
    return kv_caches, SimpleNamespace(
        cache_config=cache, compilation_config=SimpleNamespace(static_forward_context=layers),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1,
            cp_kv_cache_interleave_size=1, rank=0,
        ),
        model_config=SimpleNamespace(
            dtype=model_dtype, get_total_num_kv_heads=lambda: nh, get_total_num_hidden_layers=lambda: nl,
        ),
    ), config  # fmt: skip
