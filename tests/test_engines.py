"""Pools over engines' caches: tensors made as the engine makes them, converted, and compared by plain indexing."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvbm
from kvbm import BindError

NL, NB, NT, NH, HD = 3, 5, 8, 4, 16
IDS = [4, 0, 2]


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Every element another value, and another in every call."""
    numbered.next += 1 << 20
    count = torch.Size(shape).numel()
    return torch.arange(numbered.next, numbered.next + count, dtype=torch.int32).view(shape).view(dtype)


numbered.next = 0  # type: ignore[attr-defined]


def stored(pool: kvbm.Pool) -> torch.Tensor:
    """Blocks `IDS` of a pool as ``b l o h t d``."""
    shape = pool.shape
    out = torch.zeros(len(IDS), shape.nl, shape.no, shape.nh, shape.nt, shape.hd, dtype=torch.float32)
    kvbm.convert(pool, kvbm.Pool(kvbm.load("operational_hnd"), shape, list(out)), IDS)
    return out.view(torch.int32)


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape and torch.equal(got, want.contiguous().view(torch.int32))


# ---- vLLM ----------------------------------------------------------------------------------------------------------


def flash_attn(order: str) -> torch.Tensor:
    """(2, num_blocks, block_size, num_kv_heads, head_size) to look at; in memory as the cache layout says."""
    if order == "nhd":
        return numbered(2, NB, NT, NH, HD)
    return numbered(2, NB, NH, NT, HD).permute(0, 1, 3, 2, 4)


@pytest.mark.parametrize("order", ["nhd", "hnd"])
@pytest.mark.parametrize("how", ["by name", "list"])
def test_vllm_flash_attn(order: str, how: str) -> None:
    caches = [flash_attn(order) for _ in range(NL)]
    given: Any = caches
    if how == "by name":  # in no order at all
        given = {f"model.layers.{i}.self_attn.attn": caches[i] for i in (2, 0, 1)}
    pool = kvbm.Pool.from_vllm(given, f"vllm/flash_attn_{order}")
    assert (pool.shape.nl, pool.shape.no, pool.shape.nh, pool.shape.nt, pool.shape.hd, pool.num_blocks) == (
        NL, 2, NH, NT, HD, NB,
    )  # fmt: skip
    want = torch.stack([cache[:, IDS] for cache in caches])  # l o b t h d
    same(stored(pool), want.permute(2, 0, 1, 4, 3, 5))


@pytest.mark.parametrize(("is_", "named"), [("nhd", "hnd"), ("hnd", "nhd")])
def test_a_wrong_layout_is_seen_by_its_strides(is_: str, named: str) -> None:
    with pytest.raises(BindError, match=r"stride|contiguous"):
        kvbm.Pool.from_vllm([flash_attn(is_)] * NL, f"vllm/flash_attn_{named}")


def test_vllm_flashinfer_one_tensor_for_all_layers_and_latents() -> None:
    caches = [numbered(NB, 2, NH, NT, HD).permute(0, 1, 3, 2, 4) for _ in range(NL)]
    want = torch.stack([cache[IDS] for cache in caches])  # l b o t h d
    same(stored(kvbm.Pool.from_vllm(caches, "vllm/flashinfer_hnd")), want.permute(1, 0, 2, 4, 3, 5))
    cross = numbered(NB, NH, NL, 2, NT, HD)
    same(stored(kvbm.Pool.from_vllm(cross, "vllm/cross_layer_hnd")), cross[IDS].permute(0, 2, 3, 1, 4, 5))
    packed = numbered(NL, NB, NH, NT, 2, HD)
    same(stored(kvbm.Pool.from_vllm(packed, kvbm.load("vllm/LBHNC"))), packed[:, IDS].permute(1, 0, 4, 2, 3, 5))
    latents = [numbered(NB, NT, 576) for _ in range(NL)]
    pool = kvbm.Pool.from_vllm(latents, "vllm/mla")
    assert (pool.shape.no, pool.shape.nh, pool.shape.hd) == (1, 1, 576)
    same(stored(pool), torch.stack(latents)[:, IDS].permute(1, 0, 2, 3)[:, :, None, None])


def test_vllm_dims_may_be_named() -> None:
    views = [numbered(NB, 2, NT, NH, HD).permute(3, 0, 1, 2, 4) for _ in range(NL)]  # h b o t d to look at
    pool = kvbm.Pool.from_vllm(views, "vllm/flashinfer_nhd", dims="h b o t d")
    same(stored(pool), torch.stack(views)[:, :, IDS].permute(2, 0, 3, 1, 4, 5))


# ---- SGLang, TensorRT-LLM ------------------------------------------------------------------------------------------


def test_sglang() -> None:
    k, v = ([numbered(NB * NT, NH, HD) for _ in range(NL)] for _ in range(2))
    pool = kvbm.Pool.from_sglang(SimpleNamespace(k_buffer=k, v_buffer=v, page_size=NT))
    want = torch.stack([torch.stack(side) for side in (k, v)]).view(2, NL, NB, NT, NH, HD)
    same(stored(pool), want[:, :, IDS].permute(2, 1, 0, 4, 3, 5))
    latent = SimpleNamespace(kv_buffer=[numbered(NB * NT, 1, 576) for _ in range(NL)])
    pool = kvbm.Pool.from_sglang(latent, page_size=NT)
    want = torch.stack(latent.kv_buffer).view(NL, NB, NT, 576)
    same(stored(pool), want[:, IDS].permute(1, 0, 2, 3)[:, :, None, None])


def test_trtllm() -> None:
    primary = numbered(NB, NL, 2, NH * NT * HD)
    pool = kvbm.Pool.from_trtllm(primary, num_kv_heads=NH, tokens_per_block=NT)
    same(stored(pool), primary[IDS].view(len(IDS), NL, 2, NH, NT, HD))


# ---- transformers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
def test_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokens = NB * NT
    pairs = [[numbered(2, NH, tokens, HD) for _ in range(2)] for _ in range(NL)]
    if kind == "DynamicCache":
        cache = transformers.DynamicCache()
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=NL, hidden_size=NH * HD, num_attention_heads=NH, num_key_value_heads=NH, head_dim=HD
        )
        cache = transformers.StaticCache(config=config, max_cache_len=tokens)
    for layer, (keys, values) in enumerate(pairs):
        cache.update(keys, values, layer, {"cache_position": torch.arange(tokens)})
    pool = kvbm.Pool.from_transformers(cache, tokens_per_block=NT, row=1)
    want = torch.stack([torch.stack([side[1] for side in pair]) for pair in pairs])  # l o h tokens d
    want = want.view(NL, 2, NH, NB, NT, HD)[:, :, :, IDS]
    same(stored(pool), want.permute(3, 0, 1, 2, 4, 5))


# ---- refused -------------------------------------------------------------------------------------------------------

LAYERS = [numbered(2, NB, NT, NH, HD) for _ in range(2)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kvbm.Pool.from_vllm({"a.0.b": LAYERS[0], "c.0.d": LAYERS[1]}, "vllm/flash_attn_nhd"), "'a.0.b' and 'c.0.d'"),
        (lambda: kvbm.Pool.from_vllm({"attn": LAYERS[0]}, "vllm/flash_attn_nhd"), "'attn': expected one number"),
        (lambda: kvbm.Pool.from_vllm({"a.1.b.2": LAYERS[0]}, "vllm/flash_attn_nhd"), "got 2; pass a list"),
        (lambda: kvbm.Pool.from_vllm([], "vllm/flash_attn_nhd"), "expected at least one tensor, got none"),
        (lambda: kvbm.Pool.from_vllm([LAYERS[0][0]], "vllm/flash_attn_nhd"), "tensor 0: expected 5 dimensions (o b t h d)"),
        (lambda: kvbm.Pool.from_vllm([LAYERS[0], LAYERS[1][:, 1:]], "vllm/flash_attn_nhd"), "tensor 1: axis 'b': expected 5"),
        (lambda: kvbm.Pool.from_vllm(LAYERS, "vllm/flash_attn_nhd", dims="o b t d"), "in any order, got o b t d"),
        (lambda: kvbm.Pool.from_vllm(LAYERS, "vllm/paged_attn_v0"), "split or fused"),
        (lambda: kvbm.Pool.from_vllm(LAYERS, "vllm/nothing"), "vllm/nothing"),
        (lambda: kvbm.Pool.from_sglang(SimpleNamespace(page_size=16)), "expected a pool with k_buffer"),
        (lambda: kvbm.Pool.from_sglang(SimpleNamespace(k_buffer=[])), "page_size: expected"),
        (
            lambda: kvbm.Pool.from_sglang(SimpleNamespace(k_buffer=LAYERS, v_buffer=LAYERS[:1], page_size=1)),
            "as many v_buffer as k_buffer, got 1 and 2",
        ),
        (
            lambda: kvbm.Pool.from_sglang(
                SimpleNamespace(k_buffer=[LAYERS[0].view(-1, NH, HD)], v_buffer=[LAYERS[1].view(-1, NH, HD)], page_size=7)
            ),
            "slots: expected a multiple of 7, got 80",
        ),
        (lambda: kvbm.Pool.from_sglang(SimpleNamespace(kv_buffer=LAYERS, page_size=8)), "expected (slots, 1, dim)"),
        (lambda: kvbm.Pool.from_trtllm(LAYERS[0][0, 0], num_kv_heads=4, tokens_per_block=8), "at least 4 dimensions"),
        (lambda: kvbm.Pool.from_trtllm(LAYERS[0], num_kv_heads=5, tokens_per_block=8), "multiple of num_kv_heads"),
        (
            lambda: kvbm.Pool.from_trtllm(LAYERS[0].transpose(3, 4), num_kv_heads=4, tokens_per_block=2),
            "not contiguous where",
        ),
        (lambda: kvbm.Pool.from_transformers(SimpleNamespace(layers=[]), tokens_per_block=8), "run the model"),
        (
            lambda: kvbm.Pool.from_transformers(cache_of(LAYERS[0][0].transpose(1, 2)), tokens_per_block=16),
            "tokens: expected a multiple of 16, got 8",
        ),
        (
            lambda: kvbm.Pool.from_transformers(cache_of(LAYERS[0][0].transpose(1, 2)), tokens_per_block=8, row=5),
            "layer 0: expected (batch, heads, tokens, dim) with a row 5",
        ),
    ],
)  # fmt: skip
def test_refused(call: Any, message: str) -> None:
    with pytest.raises(kvbm.KvbmError, match=re.escape(message)):
        call()


def cache_of(keys: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(layers=[SimpleNamespace(keys=keys, values=keys + 1)])
