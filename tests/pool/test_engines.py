"""Pools on engines' caches: tensors are made as the engine makes them, converted, and compared by plain indexing."""

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
    """Every element has a different value, also in different calls."""
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
    """(2, num_blocks, block_size, num_kv_heads, head_size) as a view; in memory in the order of the cache layout."""
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


@pytest.mark.parametrize("shape", ["nl=3,no=1,nh=4,nt=8,hd=32,dtype=float32", "nl=3,no=2,nh=4,nt=8,hd=16,dtype=int32"])
def test_a_shape_that_the_tensors_do_not_have_is_refused(shape: str) -> None:
    """Also where K and V have orders of their own, and the tensors give only the sizes."""
    caches = [numbered(NB, NH, NT, 2 * HD) for _ in range(NL)]
    assert kvbm.Pool.from_vllm(caches, "vllm/cpu_vec", shape=f"nl=3,no=2,nh=4,nt=8,hd={HD},dtype=float32").num_blocks == NB
    with pytest.raises(BindError, match=re.escape(f"expected tensors of {shape}, as shape= says, got tensors of nl=3,no=2")):
        kvbm.Pool.from_vllm(caches, "vllm/cpu_vec", shape=shape)


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


def per_layer(order: str, nb: int = NB) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Arguments of `register_kv_caches` since 0.26: views [B, H, N, C] of one storage by name, and all of it as l b h n c."""
    sizes = {"L": NL, "B": nb, "H": NH, "N": NT, "C": 2 * HD}
    whole = numbered(*(sizes[axis] for axis in order)).permute([order.index(axis) for axis in "LBHNC"])
    return {f"model.layers.{layer}.self_attn.attn": whole[layer] for layer in (2, 0, 1)}, whole


@pytest.mark.parametrize("order", ["LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
@pytest.mark.parametrize("how", ["by name", "list", "whole"])
def test_vllm_views_of_one_storage(order: str, how: str) -> None:
    caches, whole = per_layer(order)
    want = whole.unflatten(4, (2, HD))  # l b h t o d: K and V of a token and head
    given: Any = caches if how == "by name" else [caches[name] for name in sorted(caches)]
    if how == "whole":  # the older form
        axes = [*(order.replace("N", "T").lower().replace("c", "")), "o", "d"]
        given = want.permute(["lbhtod".index(axis) for axis in axes])
    pool = kvbm.Pool.from_vllm(given, f"vllm/{order}")
    assert (pool.shape.nl, pool.shape.no, pool.shape.nh, pool.shape.nt, pool.shape.hd, pool.num_blocks) == (
        NL, 2, NH, NT, HD, NB,
    )  # fmt: skip
    assert pool.addresses.tolist() == [whole.data_ptr()]
    same(stored(pool), want[:, IDS].permute(1, 0, 4, 2, 3, 5))


def test_vllm_strides_of_a_real_one() -> None:
    """(8192, 4, 32, 128) with strides (16384, 4096, 128, 1), with a tenth of the blocks; copies back reach the views."""
    nb, layers = 819, 2
    memory = torch.zeros(layers * nb * 16384, dtype=torch.bfloat16)
    views = {
        f"model.layers.{i}.self_attn.attn": memory.as_strided((nb, 4, 32, 128), (16384, 4096, 128, 1), i * nb * 16384)
        for i in range(layers)
    }
    pool = kvbm.Pool.from_vllm(views, "vllm/LBHNC")
    assert str(pool.shape) == "nl=2,no=2,nh=4,nt=32,hd=64,dtype=bfloat16" and pool.num_blocks == nb
    store = kvbm.Pool.allocate(kvbm.load("universal"), pool.shape, 1)
    (entry,) = (torch.from_numpy(array.view("int16")) for array in store.arrays)  # h l o t d
    entry.view(-1).copy_(torch.arange(entry.numel()) + 1)
    kvbm.convert(store, pool, [0], [700])
    for layer, view in enumerate(views.values()):
        got = view[700].view(torch.int16).unflatten(2, (2, 64))  # h t o d
        assert torch.equal(got, entry[:, layer].permute(0, 2, 1, 3))
        assert not view[:700].any() and not view[701:].any()


def test_vllm_one_layer_and_latents() -> None:
    caches, whole = per_layer("LBHNC")
    pool = kvbm.Pool.from_vllm([caches["model.layers.1.self_attn.attn"]], "vllm/LBHNC")
    same(stored(pool), whole[1:2].unflatten(4, (2, HD))[:, IDS].permute(1, 0, 4, 2, 3, 5))
    shape = kvbm.BlockShape(NL, 1, NH, NT, 2 * HD, "float32")
    pool = kvbm.Pool.from_vllm(caches, "vllm/LBHNC", shape=shape)
    same(stored(pool), whole[:, IDS].permute(1, 0, 2, 3, 4)[:, :, None])


@pytest.mark.parametrize("name", ["cpu", "cpu_vec"])
def test_vllm_cpu(name: str) -> None:
    """The shapes do not show K's order: (head_size, block_size) per block and head."""
    older = name == "cpu"
    caches = [numbered(2, NB, NH, NT, HD) if older else numbered(NB, NH, NT, 2 * HD) for _ in range(NL)]
    pool = kvbm.Pool.from_vllm(caches, f"vllm/{name}")
    assert (pool.shape.nl, pool.shape.nh, pool.shape.nt, pool.shape.hd, pool.num_blocks) == (NL, NH, NT, HD, NB)
    halves = torch.stack(caches).view(NL, 2, NB, NH, -1) if older else torch.stack(caches).view(NL, NB, NH, 2, -1)
    k, v = halves.unbind(1 if older else 3)
    want = torch.stack([k.unflatten(3, (HD, NT)).transpose(3, 4), v.unflatten(3, (NT, HD))])  # o l b h t d
    same(stored(pool), want[:, :, IDS].permute(2, 1, 0, 3, 4, 5))


def test_vllm_dims_may_be_named() -> None:
    views = [numbered(NB, 2, NT, NH, HD).permute(3, 0, 1, 2, 4) for _ in range(NL)]  # h b o t d to look at
    pool = kvbm.Pool.from_vllm(views, "vllm/flashinfer_nhd", dims="h b o t d")
    same(stored(pool), torch.stack(views)[:, :, IDS].permute(2, 0, 3, 1, 4, 5))


# ---- planes --------------------------------------------------------------------------------------------------------


def bytes_of(*shape: int) -> torch.Tensor:
    """Noise, different in every call."""
    bytes_of.next += 1
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(bytes_of.next))


bytes_of.next = 0  # type: ignore[attr-defined]


def moved(pool: kvbm.Pool, name: str) -> list[torch.Tensor]:
    """Blocks `IDS` converted to another layout: its arrays as bytes, blocks first."""
    out = kvbm.Pool.allocate(kvbm.load(name), pool.shape, len(IDS))
    for array in out.arrays:
        array.view("uint8").fill(0xEE)
    kvbm.convert(pool, out, IDS)
    return [torch.from_numpy(array.view("uint8")) for array in out.arrays]


def test_vllm_fp8_latents() -> None:
    """Tensors (blocks, block_size, 656) of bytes, by name: hd = 576 follows from 656."""
    caches = {f"model.layers.{i}.self_attn.attn": bytes_of(NB, NT, 656) for i in (2, 0, 1)}
    pool = kvbm.Pool.from_vllm(caches, "vllm/fp8_ds_mla")
    assert (pool.shape.nl, pool.shape.no, pool.shape.nh, pool.shape.nt, pool.shape.hd, pool.num_blocks) == (
        NL, 1, 1, NT, 576, NB,
    )  # fmt: skip
    in_order = torch.stack([caches[name] for name in sorted(caches)])[:, IDS]
    latent, scale, rope = in_order.split([512, 16, 128], dim=-1)
    tensors = moved(pool, "record/mla_fp8_tensors")
    for number, want in enumerate((latent, scale, rope)):
        got = torch.stack(tensors[number * NL : (number + 1) * NL])
        assert torch.equal(got, want)


def test_vllm_indexer_and_padded_pages() -> None:
    caches = [bytes_of(NB, NT, 132) for _ in range(NL)]
    pool = kvbm.Pool.from_vllm(caches, "vllm/dsa_indexer")
    assert (pool.shape.nt, pool.shape.hd, pool.num_blocks) == (NT, 128, NB)
    keys = torch.stack(caches)[:, IDS].flatten(2)  # all keys of a page, then all scales
    want = torch.cat([keys[..., : NT * 128].unflatten(2, (NT, 128)), keys[..., NT * 128 :].unflatten(2, (NT, 4))], -1)
    assert torch.equal(torch.stack(moved(pool, "record/dsa_indexer_tokens")), want)
    nt, page = 64, 37440  # 64 * 584 bytes, rounded up to 576
    memory = [bytes_of(NB * page) for _ in range(NL)]
    views = [one.as_strided((NB, nt, 584), (page, 584, 1)) for one in memory]
    pool = kvbm.Pool.from_vllm(views, "vllm/deepseek_v4")
    assert (pool.shape.hd, pool.num_blocks) == (512, NB)
    pages = torch.stack(memory).view(NL, NB, page)[:, IDS]
    tokens, scales = pages[..., : nt * 576].unflatten(2, (nt, 576)), pages[..., nt * 576 : nt * 584]
    want = torch.cat([tokens, scales.unflatten(2, (nt, 8))], -1)
    assert torch.equal(torch.stack(moved(pool, "record/deepseek_v4_tokens")), want)


def test_vllm_nvfp4() -> None:
    """(blocks, 2 * heads, block_size, hd/2 + hd/16); the shape does not show that the data come first."""
    caches = [bytes_of(NB, 2 * NH, NT, 36) for _ in range(NL)]
    pool = kvbm.Pool.from_vllm(caches, "vllm/nvfp4")
    assert (pool.shape.no, pool.shape.nh, pool.shape.nt, pool.shape.hd) == (2, NH, NT, 64)
    pages = torch.stack(caches)[:, IDS].reshape(NL, len(IDS), 2, -1)
    data = pages[..., : NH * NT * 32].unflatten(3, (NH, NT, 32))
    scale = pages[..., NH * NT * 32 :]
    k = scale[:, :, 0].unflatten(2, (NH, NT, 4))
    v = scale[:, :, 1].unflatten(2, (NH, NT // 4, 4, 4)).transpose(-1, -2).flatten(3, 4)
    got = torch.stack(moved(pool, "record/nvfp4_universal"))  # [b] h l o <data scale>
    want = torch.cat([data.flatten(4), torch.stack([k, v], 2).flatten(4)], -1).permute(1, 3, 0, 2, 4)
    assert torch.equal(got.view(want.shape), want)


def test_vllm_planes_with_dims_or_a_shape() -> None:
    caches = [bytes_of(NB, NH, NT, 36) for _ in range(NL)]
    mine = kvbm.layout.spec.parse(
        'order: "[l] b h t <data scale>"\naxes: {s: hd//16}\n'
        "planes: {data: {order: d, dtype: int4}, scale: {order: s, dtype: int8}}",
        name="mine",
    )
    pool = kvbm.Pool.from_vllm(caches, mine, dims="b h t bytes")
    assert str(pool.shape).startswith(f"nl={NL},no=1,nh={NH},nt={NT},hd=64,")
    with pytest.raises(BindError, match=r"mine \(.*\): the dimensions of tensors do not give its planes.*shape=BlockShape"):
        kvbm.Pool.from_vllm(caches, mine)
    shape = kvbm.BlockShape(NL, 1, NH, NT, 64, "bfloat16")
    assert kvbm.Pool.from_vllm(caches, mine, shape=shape).num_blocks == NB
    wide = kvbm.BlockShape(NL, 1, NH, NT, 192, "bfloat16")
    tensors = [numbered(NB, NT, NH, 160, dtype=torch.float32) for _ in range(NL)]
    pool = kvbm.Pool.from_vllm([t.view(torch.uint8) for t in tensors], "vllm/diff_kv", shape=wide)
    assert pool.num_blocks == NB
    latent, rope = [numbered(NB, NT, 512) for _ in range(NL)], [numbered(NB, NT, 64) for _ in range(NL)]
    shape = kvbm.BlockShape(NL, 1, 1, NT, 576, "float32")
    assert kvbm.Pool.from_vllm([*latent, *rope], "flashinfer/mla_split", shape=shape).num_blocks == NB


def scaled_pool(**changes: Any) -> SimpleNamespace:
    """A token pool of pages of 128 tokens and heads of 128, scales in tiles of 512 bytes."""
    pages, heads = 3, 2
    parts: dict[str, Any] = {"page_size": 128}
    for side in "kv":
        parts[f"{side}_buffer"] = [bytes_of(pages * 128, heads, 128).view(torch.float8_e4m3fn) for _ in range(NL)]
        parts[f"{side}_scale_buffer"] = [bytes_of(pages, heads, 512).view(torch.float8_e8m0fnu) for _ in range(NL)]
    return SimpleNamespace(**{**parts, **changes})


def test_sglang_scales() -> None:
    tokens = scaled_pool()
    pool = kvbm.Pool.from_sglang(tokens, layout="sglang/mxfp8")
    assert str(pool.shape).startswith(f"nl={NL},no=2,nh=2,nt=128,hd=128,") and pool.num_blocks == 3
    out = kvbm.Pool.allocate(kvbm.load("record/mxfp8_tensors"), pool.shape, 3)
    kvbm.convert(pool, out)
    data, scales = out.arrays[: 2 * NL], out.arrays[2 * NL :]
    for number, (side, layer) in enumerate((side, layer) for side in "kv" for layer in range(NL)):
        want = getattr(tokens, f"{side}_buffer")[layer].view(torch.uint8).view(3, 128, 2, 128)
        assert torch.equal(torch.from_numpy(data[number].view("uint8")), want)
        tiles = getattr(tokens, f"{side}_scale_buffer")[layer].view(torch.uint8).view(3, 2, 32, 4, 4)
        want = tiles.permute(0, 3, 2, 1, 4).reshape(3, 128, 2, 4)  # token t lies at t%32, t/32
        assert torch.equal(torch.from_numpy(scales[number].view("uint8")), want)


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
@pytest.mark.slow
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
        (lambda: kvbm.Pool.from_vllm([], "vllm/cpu"), "expected at least one tensor, got none"),
        (lambda: kvbm.Pool.from_vllm([LAYERS[0], LAYERS[1][:, 1:]], "vllm/cpu"), "tensor 1: expected 5 dimensions (o b h t d)"),
        (lambda: kvbm.Pool.from_vllm([LAYERS[0][0]], "vllm/cpu"), "tensor 0: expected 5 dimensions (o b h t d)"),
        (lambda: kvbm.Pool.from_vllm([flash_attn("hnd")], "vllm/cpu"), "tensor 0: the pool is not contiguous"),
        (lambda: kvbm.Pool.from_vllm([*per_layer("LBHNC")[0].values()], "vllm/LBHNC"), "in order and at equal steps"),
        (
            lambda: kvbm.Pool.from_vllm([one.clone() for one in per_layer("LBHNC")[0].values()], "vllm/LBHNC"),
            "in other memory",
        ),
        (lambda: kvbm.Pool.from_vllm(per_layer("LBNHC")[0], "vllm/LBHNC"), "these strides are those of vllm/LBNHC"),
        (lambda: kvbm.Pool.from_vllm([LAYERS[0][0][..., 1:]], "vllm/LBHNC"), "dimension 'o*d': expected a multiple of 2, got 15"),
        (lambda: kvbm.Pool.from_vllm([LAYERS[0][0, 0]], "vllm/LBHNC"), "expected 4 dimensions (b h t o*d), got (8, 4, 16)"),
        (lambda: kvbm.Pool.from_vllm([flash_attn("hnd")], "vllm/flash_attn_nhd"), "these strides are those of vllm/flash_attn_hnd"),
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
        (lambda: kvbm.Pool.from_vllm([], "vllm/fp8_ds_mla"), "expected at least one tensor, got none"),
        (lambda: kvbm.Pool.from_vllm([bytes_of(NB, NT, 654)], "vllm/fp8_ds_mla"), "no size of a head gives the 654 bytes"),
        (lambda: kvbm.Pool.from_vllm([bytes_of(NB, NT * 656)], "vllm/fp8_ds_mla"), "expected 3 dimensions (b t bytes)"),
        (lambda: kvbm.Pool.from_vllm([bytes_of(NB, 5, NT, 36)], "vllm/nvfp4"), "'o*h': expected a multiple of 2, got 5"),
        (lambda: kvbm.Pool.from_vllm([bytes_of(NB, 36)], "vllm/nvfp4", dims="b bytes"), "axis 'h' missing"),
        (lambda: kvbm.Pool.from_vllm([bytes_of(NB, NT, 656)], "vllm/mla_v41"), "no size of a head gives the 656"),
        (
            lambda: kvbm.Pool.from_vllm([bytes_of(NB, NT, NH, 640)], "vllm/diff_kv", dims="b t h bytes"),
            "a plane has the dtype of the shape",
        ),
        (
            lambda: kvbm.Pool.from_vllm([bytes_of(NB, NT, 656)[:, ::2]], "vllm/fp8_ds_mla"),
            "expected bytes of shape (5, 4, 656)",
        ),
        (lambda: kvbm.Pool.from_vllm([bytes_of(NB, 64, 584)], "vllm/deepseek_v4"), "dense, 187200 bytes with the padding"),
        (lambda: kvbm.Pool.from_sglang(scaled_pool()), "has scales, and does not say"),
        (lambda: kvbm.Pool.from_sglang(scaled_pool(), layout="vllm/nvfp4"), "expected two planes in separate arrays"),
        (lambda: kvbm.Pool.from_sglang(scaled_pool(k_scale_buffer=[]), layout="sglang/mxfp8"), "got [3, 3, 0, 3]"),
        (
            lambda: kvbm.Pool.from_sglang(SimpleNamespace(k_buffer=[], v_buffer=[], page_size=4), layout="sglang/mxfp8"),
            "leave the layout out",
        ),
        (
            lambda: kvbm.Pool.from_trtllm(
                LAYERS[0], num_kv_heads=4, tokens_per_block=8, layout="record/per_token_head_fp8_planes"
            ),
            "it has several planes",
        ),
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


def test_vllm_views_that_are_not_in_order() -> None:
    views = list(per_layer("LBHNC")[0].values())
    views = sorted(views, key=lambda view: view.storage_offset())
    step = views[1].storage_offset() * views[0].element_size()
    for given, said in (
        (views[::-1], f"views in reverse order, tensor 1 {step:,} bytes before tensor 0; reverse the list"),
        ([views[0], views[2], views[1]], f"starts {step:,} bytes after tensor 0; tensor 1 starts {2 * step:,} after it"),
        ([view.clone() for view in views], "a tensor in other memory than tensor 0"),
        ([views[0], views[1][1:], views[2]], "; tensor 0 has shape ("),
    ):
        with pytest.raises(BindError, match=re.escape(said)):
            kvbm.Pool.from_vllm(given, "vllm/LBHNC")
