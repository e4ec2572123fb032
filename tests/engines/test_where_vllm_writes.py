"""Where the installed vLLM writes, asked of its attention backends: as the catalogue says, and a wrong layout is reported."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheLayout, UniformTypeKVCacheSpecs
from vllm.v1.worker.utils import allocate_kv_cache

import kvbm
from conftest import has_avx512
from kvbm.engines.vllm import ORDERS, groups
from kvbm.testing.engines import _kv_cache_planning, vllm_caches, vllm_writes

# vLLM has a library for each kind of CPU; not all have all operators.
fp8 = pytest.mark.skipif(not has_avx512(), reason="no AVX-512")
amx = pytest.mark.skipif(not (has_avx512() and torch.cpu._is_avx512_bf16_supported()), reason="no AVX-512 with BF16")

CASES: list[Any] = [
    ({"dtype": "float32", "isa": "vec"}, "vllm/cpu_vec"),
    ({"dtype": "float16", "isa": "vec", "nt": 96}, "vllm/cpu_vec"),
    ({"dtype": "bfloat16", "isa": "vec", "hd": 128, "nh": 1}, "vllm/cpu_vec"),
    ({"dtype": "float32", "hd": 80, "nt": 64}, "vllm/cpu_vec"),
    ({"dtype": "bfloat16", "isa": "vec16", "nt": 16}, "vllm/cpu_vec"),
    pytest.param({"dtype": "bfloat16", "isa": "vec", "cache_dtype": "fp8_e4m3"}, "vllm/cpu_vec", marks=fp8),
    pytest.param({"dtype": "float32", "isa": "vec", "cache_dtype": "fp8_e5m2"}, "vllm/cpu_vec", marks=fp8),
    pytest.param({"dtype": "bfloat16", "isa": "amx"}, "vllm/cpu_amx", marks=amx),
    pytest.param({"dtype": "bfloat16", "isa": "amx", "nt": 64, "hd": 128, "nh": 3}, "vllm/cpu_amx", marks=amx),
    pytest.param({"dtype": "bfloat16", "isa": "amx", "cache_dtype": "fp8", "nt": 64}, "vllm/cpu_amx", marks=amx),
    ({"backend": "CPU_MLA", "dtype": "float32", "hd": 576, "nt": 16}, "vllm/mla"),
    ({"backend": "CPU_MLA", "dtype": "bfloat16", "hd": 576, "nt": 16, "order": "LBNHC"}, "vllm/mla"),
    ({"backend": "CPU_MLA", "dtype": "float16", "hd": 576, "nt": 16, "order": "LHBNC"}, "vllm/mla"),
]


@pytest.mark.parametrize(
    ("given", "layout"), CASES, ids=lambda part: part if isinstance(part, str) else "-".join(map(str, part.values()))
)
def test_it_writes_where_the_catalogue_says(given: dict[str, Any], layout: str) -> None:
    (found,) = vllm_writes(*vllm_caches(**given))
    assert found and found.layout.startswith(f"{layout} ("), str(found)
    assert found.compared == 2 * 3 * (1 if "MLA" in found.engine else 2 * given.get("nh", 2)) * given.get(
        "nt", 32
    ) * given.get("hd", 64)


@pytest.mark.parametrize(
    ("isa", "wrong"),
    [
        ("vec", "vllm/LBHNC"),
        ("vec", "vllm/cpu_amx"),
        pytest.param("amx", "vllm/cpu_vec", marks=amx),
        pytest.param("amx", "vllm/LBHNC", marks=amx),
    ],
)
def test_a_wrong_layout_is_reported(isa: str, wrong: str) -> None:
    caches = vllm_caches(dtype="bfloat16", isa=isa)
    before = {name: view.clone() for name, view in caches[0].items()}
    (found,) = vllm_writes(*caches, layout=wrong)
    assert not found and found.wrong > found.compared // 2 and wrong in str(found)
    assert "vLLM 0." in found.engine and found.misplaced
    for one in found.misplaced:  # where it is said to be, the right layout says so
        (right,) = groups(*caches[1:])
        pool = kvbm.Pool.from_vllm(caches[0], group=right)
        layer = right.names.index(one.layer)
        entry, offset = pool.resolved.address(one.block, l=layer, o=one.o, h=one.head, t=one.token, d=one.element)
        allocation = caches[0][right.names[0]].untyped_storage().data_ptr()
        assert one.found == (int(pool.addresses[int(entry)]) + int(offset) - allocation,) != (one.expected,)
    assert all(view.equal(before[name]) for name, view in caches[0].items())  # put back


def same_as_views(pool: kvbm.Pool, views: list[torch.Tensor]) -> None:
    """What backends of GPUs write into a view, K and V of a head side by side, by indexing."""
    for layer, view in enumerate(views):
        view.copy_((layer * view.numel() + 1) + torch.ones(view.shape).flatten().cumsum(0).view(view.shape))
    out = kvbm.Pool.allocate(kvbm.load("operational_hnd"), pool.shape, pool.num_blocks)
    kvbm.convert(pool, out)
    for layer, view in enumerate(views):
        key, value = view.chunk(2, dim=-1)  # b h t d
        for block, array in enumerate(out.arrays):
            assert (array[layer, 0] == key[block].numpy()).all() and (array[layer, 1] == value[block].numpy()).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layers", [[[0, 1, 2]], [[0, 3, 4], [1, 2]]], ids=["one group", "two groups"])
def test_views_of_every_order(order: str, layers: list[list[int]]) -> None:
    """Strides are the engine's own; groups overlay each other."""
    kv_caches, vllm_config, kv_cache_config = vllm_caches("FLEX_ATTENTION", order, layers=layers, nh=4, nt=16, hd=32)
    found = groups(vllm_config, kv_cache_config)
    assert [list(one.layers) for one in found] == layers and found[0].layout == kvbm.load(f"vllm/{order}")
    pools = [kvbm.Pool.from_vllm(kv_caches, group=one) for one in found]
    assert len({int(pool.addresses[0]) for pool in pools}) == 1
    for one, pool in zip(found, pools, strict=True):
        same_as_views(pool, [kv_caches[name] for name in one.names])


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_layers_of_one_group_whose_sizes_differ(order: str) -> None:
    """A part each: heads of 32 in two layers, of 64 in one."""
    _, vllm_config, given = vllm_caches("FLEX_ATTENTION", order, layers=[[0, 1, 2]], nh=4, nt=16, hd=32)
    (group,) = given.kv_cache_groups
    specs = dict.fromkeys(group.layer_names, group.kv_cache_spec)
    specs[group.layer_names[1]] = dataclasses.replace(group.kv_cache_spec, head_size=64, head_size_v=64)
    held = KVCacheGroupSpec(group.layer_names, UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs))
    kv_cache_config = _kv_cache_planning().get_kv_cache_config_from_groups(vllm_config, [held], 1)
    kv_caches = allocate_kv_cache(kv_cache_config, torch.device("cpu"), KVCacheLayout[order])
    found = groups(vllm_config, kv_cache_config)
    assert [(one.index, one.layers, one.shape.hd) for one in found] == [(0, (0, 2), 32), (0, (1,), 64)]
    for one in found:
        same_as_views(kvbm.Pool.from_vllm(kv_caches, group=one), [kv_caches[name] for name in one.names])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC"])
@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "TRITON_MLA"])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_backends_of_gpus(backend: str, order: str, cache_dtype: str) -> None:
    """By their own operators.  FlashInfer is left out where it is not installed."""
    if backend == "FLASHINFER":
        pytest.importorskip("flashinfer")
    sizes = {"nh": 4, "nt": 64, "hd": 576 if "MLA" in backend else 128}
    (found,) = vllm_writes(
        *vllm_caches(backend, order, dtype="bfloat16", cache_dtype=cache_dtype, device="cuda", **sizes)
    )
    assert found, str(found)
