"""Check where an installed engine writes its cache, and compare with the declared layout.

`vllm_writes` writes numbered keys and values with the attention backend's own function, in a running worker or in caches of
`vllm_caches`, and reads them at the places that the layout gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..engines.vllm import Group, groups
from ..errors import BindError
from ..layout.layout import Layout
from ..pool.pool import Pool

__all__ = ["Misplaced", "Written", "vllm_caches", "vllm_writes"]

#: Number of misplaced elements per layer that are searched for.
_SEARCHED = 4

#: A function of keys, values and slots: the engine writes them.
_Write = Callable[[Any, Any], None]


@dataclass(frozen=True)
class Misplaced:
    """An element that the engine writes to another place.

    Parameters
    ----------
    layer : str
        The engine's name of the layer.
    block, o, head, token, element : int
        Coordinates of the element.
    expected : int
        Offset in the engine's allocation (bytes), by the layout.
    found : tuple of int
        Offsets at which the engine wrote it, in the blocks that were compared; empty if not found.
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
    """The result of a comparison.  It is true if the engine writes as the layout declares.

    Parameters
    ----------
    engine : str
        Engine, version and attention backend.
    layout : str
        Name and order of the layout.
    compared : int
        Number of compared elements.
    wrong : int
        Number of elements at another place.
    misplaced : tuple of Misplaced
        The first of these, with the places where they were found.
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
    """Check that the installed vLLM writes as the layouts of its groups declare: every element of some blocks, in all layers.

    Parameters
    ----------
    kv_caches, vllm_config, kv_cache_config
        The objects that the KV connector of a worker receives, while no request runs; or those of `vllm_caches`.
    layout, group : optional
        As for `kvbm.vllm_groups.groups`.
    blocks : int
        Number of blocks to compare, distributed over the cache.  Their contents are restored.

    Returns
    -------
    list of Written
        One item per group of layers with the same layout.

    Raises
    ------
    BindError
        The config does not contain what is needed, or a layout has several planes: their scales are not computed here.

    Notes
    -----
    Each element has a number.  The bits of the numbers are written one after the other as zeros and ones, which every dtype holds.
    """
    import vllm

    found = []
    for one in groups(vllm_config, kv_cache_config, group=group, layout=layout):
        if one.layout.planes:
            raise BindError(f"{one}: it has several planes; expected a layout of one: scales are not compared")
        pool = Pool(one.layout, one.shape, one.arrays(kv_caches), num_blocks=one.num_blocks)
        ids = np.unique(np.linspace(0, one.num_blocks - 1, blocks).astype(np.int64))
        misplaced: list[Misplaced] = []
        compared = wrong = 0
        for number, name in enumerate(one.names):
            layer = vllm_config.compilation_config.static_forward_context[name]
            probe = _Probe(one, pool, name, number, kv_caches[name], ids, _writer(one, layer, ids, vllm_config))
            with probe.restored():
                compared += probe.count
                coordinates = probe.elsewhere()
                wrong += len(coordinates)
                misplaced += [probe.search(at) for at in coordinates[:_SEARCHED] if len(misplaced) < _SEARCHED]
        engine = f"vLLM {vllm.__version__}, {one.backend}, {one.order}"
        title = f"{one.layout.name} ({one.layout.order_text})"
        found.append(Written(engine, title, compared, wrong, tuple(misplaced[:_SEARCHED])))
    return found


class _Probe:
    """The elements of some blocks of a layer: their places by the layout, and their real places."""

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
            entry, offset = pool.resolved.address(ids[b[0]], l=number, o=half, h=h[0], t=t[0], d=d[0])
            expected[half] = pool.addresses[entry].astype(np.int64) + offset
        storage = view.untyped_storage()
        #: Offsets in the engine's allocation (bytes).
        self.expected = expected - storage.data_ptr()
        self.memory = torch.empty(0, dtype=view.dtype, device=view.device).set_(storage)
        self.numbers = torch.arange(1, self.count + 1, device=view.device).view(self.sizes)
        self.places = torch.from_numpy(self.expected // view.element_size()).to(view.device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the contents of the blocks at the end."""
        import torch

        at = torch.from_numpy(self.ids).to(self.view.device)
        saved = self.view[at].clone()
        try:
            yield
        finally:
            self.view[at] = saved

    def elsewhere(self) -> list[tuple[int, ...]]:
        """Coordinates ``o b t h d`` (b is an index of `ids`) of elements that are not at their expected places."""
        import torch

        found = torch.zeros_like(self.numbers)
        for bit in range(self.count.bit_length()):
            self.write(((self.numbers >> bit) & 1).bool(), self.sizes)
            found |= (self.memory[self.places] != 0).long() << bit
        return [tuple(at) for at in torch.nonzero(found != self.numbers).tolist()]

    def search(self, at: tuple[int, ...]) -> Misplaced:
        """Find one element: it is the only one that is not zero."""
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
    """A function that writes all tokens of some blocks with the attention backend: ones for marked elements, else zeros."""
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


def _kv_cache_planning() -> Any:
    """The module of vLLM that shares its memory out among groups of layers: vLLM 0.33 has moved it."""
    try:
        return import_module("vllm.v1.core.kv_cache_planning")
    except ModuleNotFoundError:
        return import_module("vllm.v1.core.kv_cache_utils")


def vllm_caches(
    backend: str = "CPU_ATTN",
    order: str = "LBHNC",
    *,
    layers: Sequence[Sequence[int]] = ((0, 1),),
    nh: int = 2,
    nt: int = 32,
    hd: int = 64,
    num_blocks: int = 5,
    dtype: str = "float32",
    cache_dtype: str = "auto",
    isa: str | None = None,
    device: str = "cpu",
) -> tuple[dict[str, Any], Any, Any]:
    """Create KV caches with the installed vLLM, without a model: with its specs, strides, views and attention backend.

    Parameters
    ----------
    backend : str
        A name of vLLM's ``AttentionBackendEnum``.  Backends of GPUs are not tested here.
    order : str
        Value of ``VLLM_KV_CACHE_LAYOUT``.
    layers : sequence of sequence of int
        Numbers of the layers, one sequence per group.
    nh, nt, hd, num_blocks : int
        Heads, tokens per block, elements per head (for a latent: including 64 of its rope part), blocks.
    dtype, cache_dtype : str
        Dtype of the model, and vLLM's name of the cache's dtype.
    isa : str, optional
        Instruction set of the CPU backend: ``"vec"``, ``"vec16"``, ``"amx"``.  Default: vLLM's choice for this machine.
    device : str
        Device of the caches.

    Returns
    -------
    kv_caches, vllm_config, kv_cache_config
        The first and the last are vLLM's objects.  The second has only those attributes of vLLM's config that are read.
    """
    import torch
    from vllm.config.cache import CacheConfig
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
    from vllm.v1.attention.backend import AttentionType
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MLAAttentionSpec, get_kv_quant_mode
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
    cache = CacheConfig(block_size=nt, cache_dtype=cache_dtype, num_gpu_blocks_override=num_blocks)
    cache.kv_cache_layout = order
    context: dict[str, Any] = {}
    config = SimpleNamespace(
        cache_config=cache, compilation_config=SimpleNamespace(static_forward_context=context),
        attention_config=SimpleNamespace(hisparse_config=None),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1,
            cp_kv_cache_interleave_size=1, rank=0,
        ),
        model_config=SimpleNamespace(
            dtype=model_dtype, get_total_num_kv_heads=lambda: nh, get_total_num_hidden_layers=lambda: sum(map(len, layers)),
        ),
    )  # fmt: skip
    held = [KVCacheGroupSpec([f"model.layers.{number}.self_attn.attn" for number in group], spec) for group in layers]
    kv_cache_config = _kv_cache_planning().get_kv_cache_config_from_groups(config, held, 1)
    kv_caches = allocate_kv_cache(kv_cache_config, torch.device(device), cache.get_resolved_kv_cache_layout())
    if backend == "CPU_ATTN" and isa is None:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        isa = _get_attn_isa(model_dtype, nt, hd, cache_dtype)
    impl_class = cls.get_impl_cls()
    one = torch.ones((), device=device)
    for name, view in kv_caches.items():
        impl = impl_class.__new__(impl_class)  # the constructor needs a model; set only the attributes that a write reads
        for attribute, value in {
            "num_kv_heads": nh, "head_size": hd, "kv_cache_dtype": cache_dtype, "cache_dtype": cache_dtype,
            "attn_type": AttentionType.DECODER, "kv_sharing_target_layer_name": None, "kv_lora_rank": hd - 64,
            "qk_rope_head_dim": 64, "is_kvcache_nvfp4": False, "nvfp4_fa2": False, "_is_per_token_head_quant": False,
            "fp8_dtype": torch.float8_e4m3fn,
        }.items():  # fmt: skip
            setattr(impl, attribute, value)
        context[name] = SimpleNamespace(
            impl=impl, isa=isa, kv_cache_dtype=cache_dtype, get_attn_backend=lambda: cls, _k_scale=one, _v_scale=one,
            _k_scale_float=1.0, _v_scale_float=1.0, kv_cache=view.squeeze(1) if cls.is_mla() else view,
        )  # fmt: skip
    return kv_caches, config, kv_cache_config
