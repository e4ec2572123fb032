"""Where the installed vLLM writes, asked of its attention backends: as the catalogue says, and a wrong layout is reported."""

from __future__ import annotations

from typing import Any

import pytest

import kvbm
from kvbm.testing.engines import vllm_caches, vllm_writes
from kvbm.vllm_groups import ORDERS, groups

# fmt: off
CASES: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "float32", "isa": "vec"}, "vllm/cpu_vec"),
    ({"dtype": "float16", "isa": "vec", "nt": 96}, "vllm/cpu_vec"),
    ({"dtype": "bfloat16", "isa": "vec", "hd": 128, "nh": 1}, "vllm/cpu_vec"),
    ({"dtype": "float32", "hd": 80, "nt": 64}, "vllm/cpu_vec"),
    ({"dtype": "bfloat16", "isa": "vec16", "nt": 16}, "vllm/cpu_vec"),
    ({"dtype": "bfloat16", "isa": "vec", "cache_dtype": "fp8_e4m3"}, "vllm/cpu_vec"),
    ({"dtype": "float32", "isa": "vec", "cache_dtype": "fp8_e5m2"}, "vllm/cpu_vec"),
    ({"dtype": "bfloat16", "isa": "amx"}, "vllm/cpu_amx"),
    ({"dtype": "bfloat16", "isa": "amx", "nt": 64, "hd": 128, "nh": 3}, "vllm/cpu_amx"),
    ({"dtype": "bfloat16", "isa": "amx", "cache_dtype": "fp8", "nt": 64}, "vllm/cpu_amx"),
    ({"backend": "CPU_MLA", "dtype": "float32", "hd": 576, "nt": 16}, "vllm/mla"),
    ({"backend": "CPU_MLA", "dtype": "bfloat16", "hd": 576, "nt": 16, "order": "LBNHC"}, "vllm/mla"),
    ({"backend": "CPU_MLA", "dtype": "float16", "hd": 576, "nt": 16, "order": "LHBNC"}, "vllm/mla"),
]
# fmt: on


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
    ("isa", "wrong"), [("vec", "vllm/LBHNC"), ("vec", "vllm/cpu_amx"), ("amx", "vllm/cpu_vec"), ("amx", "vllm/LBHNC")]
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


@pytest.mark.parametrize("order", ORDERS)
def test_views_of_every_order(order: str) -> None:
    """Strides are the engine's own; what backends of GPUs write into a view, K and V of a head side by side, by indexing."""
    kv_caches, vllm_config, kv_cache_config = vllm_caches("FLEX_ATTENTION", order, nl=3, nh=4, nt=16, hd=32)
    (one,) = groups(vllm_config, kv_cache_config)
    assert one.layout == kvbm.load(f"vllm/{order}") and one.order == order
    pool = kvbm.Pool.from_vllm(kv_caches, vllm_config=vllm_config, kv_cache_config=kv_cache_config)
    for layer, view in enumerate(kv_caches.values()):
        view.copy_((layer * view.numel() + 1) + view.new_ones(view.shape).flatten().cumsum(0).view(view.shape))
    out = kvbm.Pool.allocate(kvbm.load("operational_hnd"), pool.shape, 5)
    kvbm.convert(pool, out)
    for layer, view in enumerate(kv_caches.values()):
        key, value = view.split(32, dim=-1)  # b h t d
        for block, array in enumerate(out.arrays):
            assert (array[layer, 0] == key[block].numpy()).all() and (array[layer, 1] == value[block].numpy()).all()
