"""`kvbm serve-check` foretells what vLLM makes of the same sizes: groups, strides, bytes a block, chunks of host memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.cache import CacheConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from kvbm.engines.vllm import ORDERS
from kvbm.integrations.host_values import HostValues
from kvbm.integrations.vllm import models as config_json
from kvbm.integrations.vllm import serving
from kvbm.integrations.vllm.block_shapes import host_bytes
from kvbm.testing.engines import _kv_cache_planning

MODELS = Path(__file__).resolve().parent.parent / "data" / "models"


def made_by_vllm(engine: serving.Engine) -> tuple[Any, Any]:
    """The groups of vLLM, and its config of the cache, of the first rank."""
    model, shape = engine.model, engine.placement.shape(0)
    common = {
        "block_size": engine.nt,
        "num_kv_heads": shape.nh,
        "head_size": shape.hd,
        "dtype": getattr(torch, shape.dtype),
    }
    windows = {layer: group.sliding_window for group in model.groups for layer in group.layers}
    specs: dict[str, Any] = {}
    for layer in range(model.shape.nl):
        name = f"model.layers.{layer}.self_attn.attn"
        if model.is_latent:
            specs[name] = MLAAttentionSpec(**common, cache_dtype_str="auto")
        elif windows[layer]:
            specs[name] = SlidingWindowSpec(**common, sliding_window=windows[layer])
        else:
            specs[name] = FullAttentionSpec(**common)
    cache = CacheConfig(block_size=engine.nt, num_gpu_blocks_override=serving._NUM_BLOCKS)
    cache.kv_cache_layout = engine.order
    config = SimpleNamespace(
        cache_config=cache, scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None), speculative_config=None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1), model_config=SimpleNamespace(),
    )  # fmt: skip
    groups = _kv_cache_planning().get_kv_cache_groups(config, specs)
    return groups, _kv_cache_planning().get_kv_cache_config_from_groups(config, groups, 1 << 40)


@pytest.mark.parametrize(
    ("name", "sizes", "groups"),
    [("llama", (4, 2, 4, 64), [4]), ("mla", (3, 1, 1, 576), [3]), ("sliding", (6, 2, 2, 64), [2, 2, 2])],
)
def test_configs_that_transformers_writes(
    models: Callable[[str], Path], name: str, sizes: tuple[int, ...], groups: list[int]
) -> None:
    """Of the models that the other tests run."""
    held = config_json.read(str(models(name)), dtype="float32")
    assert (held.shape.nl, held.shape.no, held.shape.nh, held.shape.hd) == sizes and held.shape.dtype == "float32"
    assert [len(one.layers) for one in held.groups] == groups


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("name", "tp"), [("llama-3.1-8b", 2), ("deepseek-v3", 4), ("gemma-3-4b", 1), ("gemma-3-4b", 8), ("gemma-3n-e4b", 2)]
)
def test_groups_and_strides(name: str, tp: int, order: str) -> None:
    engine = serving.Engine(config_json.read(str(MODELS / f"{name}.json")), tp=tp, nt=32, order=order)
    held, config = made_by_vllm(engine)
    ours = engine.groups(0)
    assert [list(one.layer_names) for one in held] == [list(one.names) for one in ours]
    for one, tensor in zip(ours, config.kv_cache_tensors, strict=True):
        assert (one.strides[0], one.strides[1], one.offset) == (tensor.layer_stride, tensor.block_stride, tensor.offset)
    assert engine.block_bytes(0) == config.kv_cache_tensors[0].size // config.num_blocks


@pytest.mark.parametrize("host_values", [None, "fp8", "nvfp4"])
@pytest.mark.parametrize(("name", "tp"), [("llama-3.1-8b", 2), ("deepseek-v3", 4), ("gemma-3-4b", 4)])
def test_chunks_of_host_memory(name: str, tp: int, host_values: str | None) -> None:
    engine = serving.Engine(config_json.read(str(MODELS / f"{name}.json")), tp=tp)
    values = HostValues(host_values, engine.model.rope) if host_values else None
    nbytes = engine.block_bytes(0) if values is None else host_bytes(made_by_vllm(engine)[1], values)
    spec = CPUOffloadingSpec.__new__(CPUOffloadingSpec)
    spec._uses_shared_region = lambda: True
    config = SimpleNamespace(
        extra_config={"cpu_bytes_to_use": 3 << 30}, worker_kv_bytes_per_block=nbytes,
        parallel=SimpleNamespace(world_size=tp), replicated_layout=engine.is_shared, enable_kv_cache_events=False,
        model=SimpleNamespace(max_model_len=0),
        groups=[SimpleNamespace(tokens_per_block=16)], cache=SimpleNamespace(blocks_per_chunk=1, tokens_per_hash=16),
    )  # fmt: skip
    spec.__init__(config)
    host = serving._host(engine, 3 << 30, serving.PAGES, values)
    assert (host["bytes_a_block"], host["blocks"]) == (spec.kv_bytes_per_chunk, spec.num_chunks)
