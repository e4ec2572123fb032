"""vLLM's config objects, replaced by objects with the same attributes: groups of layers, their pools and placements; errors."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvbm
from kvbm import BindError
from kvbm.engines.vllm import ORDERS, groups
from kvbm.errors import SpecError
from kvbm.integrations.vllm.caches import Caches
from kvbm.reshard import presets

NB, NH, NT, HD = 5, 4, 16, 32
IDS = [4, 0, 2]


class Engine(SimpleNamespace):
    """The arguments of a connector: `kv_caches`, `vllm_config`, `kv_cache_config`; `views` has each layer as ``b h n c``."""

    def pools(self, **more: Any) -> list[kvbm.Pool]:
        return [kvbm.Pool.from_vllm(self.kv_caches, group=one) for one in self.groups(**more)]

    def pool(self, **more: Any) -> kvbm.Pool:
        return kvbm.Pool.from_vllm(self.kv_caches, **{**self.configs, **more})

    @property
    def configs(self) -> dict[str, Any]:
        return {"vllm_config": self.vllm_config, "kv_cache_config": self.kv_cache_config}

    def groups(self, **more: Any) -> Any:
        return groups(self.vllm_config, self.kv_cache_config, **more)


def engine(
    order: str = "LBHNC",
    layers: tuple[list[int], ...] = ([0, 1, 2],),
    *,
    backend: str = "FLASH_ATTN",
    isa: str | None = None,
    nh: int = NH,
    content: int = 2 * HD,
    dtype: torch.dtype = torch.float32,
    pad: int = 0,
    tp: int = 1,
    pp: int = 1,
    rank: int = 0,
    cache_dtype: str = "auto",
    model_heads: int = NH,
    model_layers: int | None = None,
    **said: Any,
) -> Engine:
    """An engine whose groups use the same memory; `content` in elements of `dtype`, `pad` after each page, in elements."""
    page = nh * NT * content + pad
    most = max(map(len, layers))
    memory = torch.randint(
        -(2**31), 2**31, (NB * most * page,), dtype=torch.int32, generator=torch.Generator().manual_seed(7)
    )
    memory = memory.view(torch.uint8)[: len(memory) * dtype.itemsize].view(dtype)
    size = dtype.itemsize
    spec = SimpleNamespace(
        block_size=NT, num_kv_heads=nh, head_size=HD, head_size_v=HD, dtype=dtype, num_head_slots=None, state_content_bytes=None,
        state_content_size_bytes=content * size, tokens_per_state=1, kv_quant_mode=SimpleNamespace(name="NONE"),
        sliding_window=None, dcp_sharded=True,
    )  # fmt: skip
    vars(spec).update(said)
    made, tensors = {}, []
    for group in layers:
        names = [f"model.layers.{number}.self_attn.attn" for number in group]
        sizes = {"L": len(group), "B": NB, "H": nh, "N": NT, "C": content}
        if order[0] == "B":
            rows = memory.view(NB, most * page)[:, : len(group) * page]
        else:
            rows = memory[: NB * len(group) * page].view(1, -1)
        if pad:  # pages apart
            outer = [sizes[axis] for axis in order[:2]]
            rows = (
                rows.reshape(*outer, page)[..., :-pad] if order[0] == "L" else rows.unflatten(1, (-1, page))[..., :-pad]
            )
            whole = rows.unflatten(2, [sizes[axis] for axis in order[2:]])
        else:
            inner = order if order[0] == "L" else order[1:]
            whole = rows.unflatten(1, [sizes[axis] for axis in inner])
            whole = whole[0] if order[0] == "L" else whole
        whole = whole.permute([order.index(axis) for axis in "LBHNC"])
        made.update(zip(names, whole, strict=True))
        steps = [step * size for step in whole.stride()]
        tensors.append(
            SimpleNamespace(size=memory.nbytes, layers=names, layer_stride=steps[0], block_stride=steps[1], offset=0)
        )
    context = {
        name: SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend), isa=isa)
        for name in made
    }
    return Engine(
        kv_caches=made, views=list(made.values()),
        vllm_config=SimpleNamespace(
            cache_config=SimpleNamespace(kv_cache_layout=order, cache_dtype=cache_dtype),
            compilation_config=SimpleNamespace(static_forward_context=context),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=tp, pipeline_parallel_size=pp, decode_context_parallel_size=1, rank=rank,
                prefill_context_parallel_size=1, cp_kv_cache_interleave_size=1,
            ),
            model_config=SimpleNamespace(
                get_total_num_kv_heads=lambda: model_heads,
                get_total_num_hidden_layers=lambda: model_layers or sum(map(len, layers)),
            ),
        ),
        kv_cache_config=SimpleNamespace(
            num_blocks=NB, kv_cache_layout=order, kv_cache_tensors=tensors,
            kv_cache_groups=[SimpleNamespace(layer_names=one.layers, kv_cache_spec=spec) for one in tensors],
        ),
    )  # fmt: skip


def stored(pool: kvbm.Pool) -> torch.Tensor:
    """Blocks `IDS` of a pool as bits, ``b l o h t d``."""
    out = kvbm.Pool.allocate(kvbm.load("operational_hnd"), pool.shape, len(IDS))
    kvbm.convert(pool, out, IDS)
    return torch.stack([torch.from_numpy(array.view(f"int{8 * pool.shape.itemsize}")) for array in out.arrays])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(getattr(torch, f"int{8 * tensor.dtype.itemsize}"))


def side_by_side(views: list[torch.Tensor]) -> torch.Tensor:
    return bits(torch.stack(views)[:, IDS].unflatten(4, (2, HD)).permute(1, 0, 4, 2, 3, 5))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_order(order: str, dtype: torch.dtype) -> None:
    held = engine(order, dtype=dtype)
    (one,) = held.groups()
    assert one.layout == kvbm.load(f"vllm/{order}") and (one.layers, one.order) == ((0, 1, 2), order)
    pool = held.pool()
    assert str(pool.shape) == f"nl=3,no=2,nh={NH},nt={NT},hd={HD},dtype={str(dtype)[6:]}" and pool.num_blocks == NB
    assert pool.addresses.tolist() == [held.views[0].data_ptr()]
    assert torch.equal(stored(pool), side_by_side(held.views))


@pytest.mark.parametrize("order", ORDERS)
def test_groups_that_overlay_each_other(order: str) -> None:
    """Two groups of three and two layers in one allocation: with blocks outermost, the smaller group leaves gaps."""
    held = engine(order, ([0, 3, 4], [1, 2]))
    first, second = held.groups()
    assert (first.layers, second.layers, second.index) == ((0, 3, 4), (1, 2), 1)
    assert dict(second.layout.pitch).keys() == ({"b"} if order[0] == "B" else set())
    pools = held.pools()
    assert pools[0].addresses[0] == pools[1].addresses[0]
    assert torch.equal(stored(pools[0]), side_by_side(held.views[:3]))
    assert torch.equal(stored(pools[1]), side_by_side(held.views[3:]))
    assert torch.equal(stored(held.pool(group=1)), side_by_side(held.views[3:]))
    with pytest.raises(BindError, match=r"got 2: group 0 .*; group 1 of vLLM \(2 layers.*pass group="):
        held.pool()


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_padded_pages(order: str) -> None:
    held = engine(order, pad=64)
    (one,) = held.groups()
    assert one.layout.pitch
    assert torch.equal(stored(held.pool()), side_by_side(held.views))


@pytest.mark.parametrize("order", ORDERS)
def test_latents(order: str) -> None:
    held = engine(
        order, nh=1, content=HD, backend="FLASHMLA", cache_dtype_str="auto", head_size_v=0, model_heads=16, tp=2, rank=1,
    )  # fmt: skip
    (one,) = held.groups()
    assert one.layout.name == "vllm/mla" and one.heads == 1
    assert torch.equal(stored(held.pool()), bits(torch.stack(held.views)[:, IDS].permute(1, 0, 2, 3, 4)[:, :, None]))
    placement, rank = presets.of_vllm(one)
    assert rank == 1 and str(placement.strips(rank).h) == "0"


def cpu_vec(view: torch.Tensor) -> torch.Tensor:
    """A view of the CPU backend's memory as ``b h o t d``."""
    halves = view.reshape(NB, NH, 2, -1)
    return torch.stack(
        [halves[:, :, 0].unflatten(2, (HD, NT)).transpose(2, 3), halves[:, :, 1].unflatten(2, (NT, HD))], 2
    )


def cpu_amx(view: torch.Tensor) -> torch.Tensor:
    halves = view.reshape(NB, NH, 2, -1)
    k = halves[:, :, 0].unflatten(2, (NT // 16, HD // 2, 16, 2)).permute(0, 1, 2, 4, 3, 5).reshape(NB, NH, NT, HD)
    v = halves[:, :, 1].unflatten(2, (HD // 16, NT // 2, 16, 2)).permute(0, 1, 3, 5, 2, 4).reshape(NB, NH, NT, HD)
    return torch.stack([k, v], 2)


@pytest.mark.parametrize(
    ("isa", "name", "is_"), [("vec", "cpu_vec", cpu_vec), ("vec16", "cpu_vec", cpu_vec), ("amx", "cpu_amx", cpu_amx)]
)
def test_the_cpu_backend(isa: str, name: str, is_: Any) -> None:
    held = engine(backend="CPU_ATTN", isa=isa, layers=([0, 2], [1, 3]))
    for at, one in enumerate(held.groups()):
        assert one.layout.name == f"vllm/{name}"
        want = torch.stack([is_(view) for view in held.views[2 * at : 2 * at + 2]])[:, IDS]  # l b h o t d
        assert torch.equal(stored(held.pool(group=at)), bits(want.permute(1, 0, 3, 2, 4, 5)))


FP8 = SimpleNamespace(name="FP8_PER_TENSOR")


@pytest.mark.parametrize(("said", "dtype"), [("fp8", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")])
def test_eight_bits(said: str, dtype: str) -> None:
    held = engine("LBNHC", dtype=torch.uint8, kv_quant_mode=FP8, cache_dtype=said)
    pool = held.pool()
    assert pool.shape.dtype == dtype and torch.equal(stored(pool), side_by_side(held.views))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("content", "name", "width"),
    [(656, "vllm/fp8_ds_mla", 576), (352, "vllm/nvfp4_ds_mla", 576)],
)
def test_quantised_latents(order: str, content: int, name: str, width: int) -> None:
    held = engine(
        order, nh=1, content=content, dtype=torch.uint8, backend="FLASHMLA_SPARSE", cache_dtype_str=name[5:],
        state_content_bytes=content, head_size=576, head_size_v=0,
    )  # fmt: skip
    pool = held.pool()
    assert (pool.layout.name, pool.shape.hd, pool.shape.no) == (name, width, 1)
    other = kvbm.Pool.from_vllm([view.squeeze(1) for view in held.views], pool.layout) if order[0] == "L" else None
    out = kvbm.Pool.allocate(pool.layout if other is None else other.layout, pool.shape, len(IDS))
    kvbm.convert(pool, out, IDS)
    for array, view in zip(out.arrays, held.views, strict=True):
        assert torch.equal(torch.from_numpy(array).view(torch.uint8).reshape(len(IDS), NT, -1), view[IDS, 0])


def test_scales_of_tokens_and_heads_and_a_narrow_v() -> None:
    mode = SimpleNamespace(name="FP8_PER_TOKEN_HEAD")
    held = engine("LBNHC", backend="TRITON_ATTN", content=2 * (HD + 4), dtype=torch.uint8, kv_quant_mode=mode)
    pool = held.pool()
    want = kvbm.Pool.from_vllm([view.transpose(1, 2) for view in held.views], "vllm/per_token_head_fp8")
    assert (
        pool.layout == want.layout
        and pool.addresses.tolist() == want.addresses.tolist()
        and pool.shape.hd == want.shape.hd
    )
    held = engine("LBNHC", backend="FLASH_ATTN_DIFFKV", head_size=48, head_size_v=32, content=80)
    assert held.pool().layout.name == "vllm/diff_kv"


def test_a_layout_in_place_of_what_the_config_does_not_say() -> None:
    mode = SimpleNamespace(name="NVFP4")
    held = engine(
        backend="FLASHINFER", nh=2 * NH, content=18, dtype=torch.uint8, kv_quant_mode=mode, num_kv_heads=NH, num_head_slots=2 * NH,
    )  # fmt: skip
    with pytest.raises(BindError, match="SM120, and the config does not say which; pass layout= with 'vllm/nvfp4' or"):
        held.pool()
    pool = held.pool(layout="vllm/nvfp4_sm120")
    want = kvbm.Pool.from_vllm(held.views, "vllm/nvfp4_sm120")
    assert pool.shape.sizes == want.shape.sizes and pool.addresses.tolist() == want.addresses.tolist()


@pytest.mark.parametrize(("tp", "pp", "rank"), [(1, 1, 0), (2, 1, 1), (2, 2, 3), (8, 1, 5)])
def test_the_placement_of_the_rank(tp: int, pp: int, rank: int) -> None:
    nh, stage = max(1, NH // tp), rank // tp
    held = engine(
        nh=nh, layers=([3 * stage, 3 * stage + 1, 3 * stage + 2],), tp=tp, pp=pp, rank=rank, model_layers=3 * pp
    )
    (one,) = held.groups()
    placement, found = presets.of_vllm(one)
    assert found == rank and placement.shape(rank) == one.shape and tuple(placement.strips(rank).l) == one.layers
    assert placement.model.nh == NH and placement.model.nl == 3 * pp
    first = rank % tp * NH // tp
    assert tuple(placement.strips(rank).h) == tuple(range(first, first + nh))


def test_the_placement_of_a_hybrid_model() -> None:
    _, second = engine("LBHNC", ([0, 3, 4], [1, 2])).groups()
    placement, rank = presets.of_vllm(second)
    assert tuple(placement.strips(rank).l) == (1, 2) and placement.model.nl == 5
    (one,) = engine(layers=([0, 2],), pp=2, model_layers=8).groups()
    with pytest.raises(SpecError, match=r"2 stages: a rank knows only its own layers; expected layers="):
        presets.of_vllm(one)
    placement, _ = presets.of_vllm(one, layers=[0, 2, 4, 6])
    assert tuple(placement.strips(0).l) == (0, 2)
    (other,) = engine(layers=([1, 2, 3],), pp=2, model_layers=6).groups()  # a share that is not vLLM's own
    with pytest.raises(SpecError, match=r"expected layers 0–2 and .*, got layers 1, 2, 3"):
        presets.of_vllm(other)


def test_layers_of_a_draft_in_the_group_of_its_target() -> None:
    """The layer that DeepSeek V3 predicts a second token with is number 61; one that has the number of another is refused."""
    (one,) = engine(layers=([0, 1, 2, 3],), model_layers=3).groups()
    placement, rank = presets.of_vllm(one)
    assert placement.model.nl == 4 and tuple(placement.strips(rank).l) == (0, 1, 2, 3)
    twice = dataclasses.replace(one, layers=(0, 1, 2, 0))
    with pytest.raises(SpecError, match=r"each layer once, got 0, 1, 2, 0: .*without speculative decoding, or offload only"):
        presets.of_vllm(twice)
    (staged,) = engine(layers=([3, 4, 5, 6],), pp=2, tp=1, rank=1, model_layers=6).groups()
    with pytest.raises(SpecError, match=r"2 stages: a rank knows only its own layers"):
        presets.of_vllm(staged)


@pytest.mark.parametrize(
    ("nh", "tp", "total"),
    [(4, 1, 4), (2, 4, 8), (1, 4, 4), (1, 8, None)],
)
def test_layers_with_other_heads(nh: int, tp: int, total: int | None) -> None:
    """MiMo V2 has 4 KV heads in some layers and 8 in others.  Which of 8 ranks with one head each hold the same is not known."""
    held = engine(nh=nh, tp=tp, rank=tp - 1, model_heads=4)
    held.vllm_config.model_config.hf_text_config = SimpleNamespace(num_key_value_heads=4, swa_num_key_value_heads=8)
    (one,) = held.groups()
    assert one.heads == total
    if total is None:  # red: heads 0, 0, 1, 1, … of 4, where the engine may hold 0, 1, 2, 3, … of 8
        with pytest.raises(SpecError, match=r"gives each rank of tp8 one head, got several.*less tensor parallelism.*pass model="):
            presets.of_vllm(one)
        total = 8
    model = dataclasses.replace(one.shape, nh=total)
    placement, rank = presets.of_vllm(one, **({} if one.heads else {"model": model}))
    assert placement.model.nh == total and tuple(placement.strips(rank).h)[-1] == total - 1


@pytest.mark.parametrize(("per_layer", "total"), [([{}] * 2 + [{"heads": 2}], None), ([{}] * 3, 8), ([{"heads": 2}] * 3, 2)])
def test_heads_that_the_engine_says_for_each_layer(per_layer: list[dict[str, int]], total: int | None) -> None:
    """Gemma 4: `per_layer_config`, of which vLLM has what is different."""

    class Arch(list):  # type: ignore[type-arg]
        per_layer_overrides = per_layer

    held = engine(nh=1, tp=8, model_heads=8)
    said = [SimpleNamespace(total_num_kv_heads=one.get("heads", 8)) for one in per_layer]
    held.vllm_config.model_config.model_arch_config = Arch(said)
    (one,) = held.groups()
    assert one.heads == total


def test_layers_of_a_search_have_heads_that_are_not_known() -> None:
    held = engine(nh=1, tp=8, model_heads=8)
    held.vllm_config.model_config.hf_text_config = SimpleNamespace(block_configs=[{}])
    assert held.groups()[0].heads is None


def changed(held: Engine, what: str, **values: Any) -> Engine:
    target: Any = held
    for name in what.split("."):
        target = target[int(name)] if name.isdigit() else getattr(target, name)
    for key, value in values.items():
        setattr(target, key, value)
    return held


def swapped() -> Engine:
    held = engine()
    names = list(held.kv_caches)
    held.kv_caches[names[0]], held.kv_caches[names[1]] = held.views[1], held.views[0]
    return held


def without(held: Engine, name: str) -> Engine:
    del held.kv_caches[name]
    return held


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: changed(
                changed(engine(), "vllm_config.cache_config", kv_cache_layout=None),
                "kv_cache_config",
                kv_cache_layout=None,
            ),
            "kv_cache_layout: expected the layout that vLLM has resolved, in cache_config or kv_cache_config, got none",
        ),
        (lambda: changed(engine(), "vllm_config.cache_config", kv_cache_layout="LBNHC"), "got LBHNC and LBNHC"),
        (lambda: changed(engine(), "vllm_config.cache_config", kv_cache_layout="XYZ"), "expected one of LBHNC"),
        (
            lambda: changed(engine(), "kv_cache_config", kv_cache_tensors=None),
            "expected the attribute 'kv_cache_tensors' of vLLM 0.26",
        ),
        (
            lambda: changed(engine(), "kv_cache_config.kv_cache_tensors.0", layers=None),
            "the attribute 'layers' of vLLM 0.26",
        ),
        (
            lambda: changed(engine(), "kv_cache_config", kv_cache_tensors=[]),
            "expected tensors of at least one group, got none",
        ),
        (
            lambda: changed(engine(), "kv_cache_config.kv_cache_groups.0", layer_names=[]),
            "expected it in one group of kv_cache_groups, got it in 0",
        ),
        (
            lambda: changed(engine(), "vllm_config.compilation_config", static_forward_context={}),
            "static_forward_context, which names its",
        ),
        (
            lambda: changed(engine(), "kv_cache_config.kv_cache_groups.0", kv_cache_spec=SimpleNamespace()),
            "expected attention with keys and values",
        ),
        (lambda: changed(engine(), "kv_cache_config.kv_cache_tensors.0", host_resident=True), "in a host pool"),
        (
            lambda: changed(engine(), "vllm_config.parallel_config", prefill_context_parallel_size=2),
            "prefill_context_parallel_size: expected 1, got 2",
        ),
        (lambda: engine(tokens_per_state=4), "4 tokens share a state"),
        (
            lambda: engine(backend="ROCM_ATTN"),
            "ROCM_ATTN, LBHNC: kvbm does not know the order in which this backend writes a block; pass layout=",
        ),
        (
            lambda: engine(kv_quant_mode=SimpleNamespace(name="TURBOQUANT_K8V4")),
            "TURBOQUANT_K8V4: no layout is known; pass layout=",
        ),
        (
            lambda: engine(kv_quant_mode=SimpleNamespace(name="INT8_PER_TOKEN_HEAD")),
            "expected LBNHC, the order of vllm/per_token_head_int8",
        ),
        (lambda: engine(head_size_v=16), "heads of 32 in K and 16 in V: expected LBNHC with V two thirds"),
        (lambda: engine(num_head_slots=2), "expected 4 heads of 256 bytes, got 2 of 256"),
        (lambda: engine(state_content_size_bytes=260), "expected 4 heads of 256 bytes, got 4 of 260"),
        (
            lambda: engine(dtype=torch.uint8, kv_quant_mode=FP8, cache_dtype="fp8_inc"),
            "cache_dtype 'fp8_inc': kvbm does not know this format of eight-bit floats",
        ),
        (
            lambda: engine(backend="CPU_ATTN"),
            "by its instruction set (isa of the layers): expected vec, vec16, amx, got None; pass layout=",
        ),
        (
            lambda: engine(backend="CPU_ATTN", isa="neon"),
            "vec, vec16, amx, got neon; pass layout= with 'vllm/cpu_vec' or",
        ),
        (lambda: engine("LBNHC", backend="CPU_ATTN", isa="vec"), "the CPU backend: expected LBHNC"),
        (lambda: engine(nh=2, cache_dtype_str="auto", backend="FLASHMLA"), "a latent: expected 1 head, got 2"),
        (
            lambda: engine(nh=1, cache_dtype_str="auto", backend="ROCM_AITER_MLA"),
            "pass layout= with 'vllm/mla' if it is one latent",
        ),
        (
            lambda: engine(nh=1, cache_dtype_str="x", state_content_bytes=9, state_content_size_bytes=9),
            "x: expected one of 656",
        ),
        (lambda: swapped(), "expected torch.float32 81920 bytes after"),
        (
            lambda: without(engine(), "model.layers.1.self_attn.attn"),
            "layer 'model.layers.1.self_attn.attn': expected it in kv_caches, got",
        ),
        (
            lambda: changed(engine("LBNHC"), "kv_cache_config.kv_cache_tensors.0", block_stride=1 << 16),
            "expected layers 81920 and blocks 65536 bytes apart",
        ),
        (
            lambda: changed(engine("BLNHC"), "kv_cache_config.kv_cache_tensors.0", block_stride=1 << 16),
            "expected a view of shape (5, 4, 16, 64) and strides",
        ),
    ],
)
def test_what_is_not_said_is_an_error(make: Any, message: str) -> None:
    with pytest.raises(BindError, match=re.escape(message)):
        make().pool()


def test_a_group_of_states_is_left_out_by_the_groups_that_the_error_names() -> None:
    made = engine(layers=([0, 2], [1, 3]))
    made.kv_cache_config.kv_cache_groups[1].kv_cache_spec = SimpleNamespace(block_size=NT, shapes=((2, 2),))
    with pytest.raises(BindError, match=r"it has no layout here; pass group= with one of 0 to read") as caught:
        made.groups()
    number = int(re.search(r"one of (\d+)", str(caught.value))[1])  # type: ignore[index]
    assert [one.index for one in made.groups(group=number)] == [number]
    with pytest.raises(BindError, match="it has no layout here"):
        made.groups(group=1)


def test_a_view_of_another_order_is_an_error() -> None:
    one, other = engine("LBHNC"), engine("LBNHC")
    one.kv_caches = other.kv_caches
    with pytest.raises(
        BindError, match=r"and strides \(4096, 1024, 64, 1\), as the config says, got .* \(4096, 64, 256, 1\)"
    ):
        one.pool()


def test_arguments_of_from_vllm() -> None:
    held = engine()
    (one,) = held.groups()
    for given, message in [
        ({}, "expected vllm_config= and kv_cache_config= (0.26 and newer), or a layout"),
        ({"vllm_config": held.vllm_config}, "expected both vllm_config= and kv_cache_config="),
        ({"group": 0}, "expected both"),
        ({"group": one, "layout": "vllm/LBHNC"}, "expected no other arguments"),
        ({"group": one, "dims": "b h t o*d"}, "dims, shape: expected none, as the config"),
        ({**held.configs, "group": 3}, "group: expected one of 0 to 0, got 3"),
    ]:  # fmt: skip
        with pytest.raises(BindError, match=re.escape(message)):
            kvbm.Pool.from_vllm(held.kv_caches, **given)
    with pytest.raises(BindError, match="expected a mapping of layers' names to tensors, got list"):
        kvbm.Pool.from_vllm(held.views, group=one)
    with pytest.raises(BindError, match="pass another layout="):
        held.groups(layout="vllm/per_token_head_fp8")


@pytest.mark.parametrize(("said", "is_"), [("LBHNC", "BLHNC"), ("BLHNC", "LBHNC")])
def test_another_order_than_the_strides_have(monkeypatch: pytest.MonkeyPatch, said: str, is_: str) -> None:
    """One head and one token per block: one of two strides fits the wrong order by chance, so both must be checked."""
    layers, blocks = ([0, 1], 5) if is_ == "LBHNC" else ([0, 1, 2], 2)
    for name, value in (("NB", blocks), ("NT", 1)):
        monkeypatch.setattr(f"{__name__}.{name}", value)
    made = engine(is_, (layers,), nh=1, model_heads=1, block_size=1, pad=2 * HD)
    assert made.pool().num_blocks == blocks
    for config in (made.vllm_config.cache_config, made.kv_cache_config):
        config.kv_cache_layout = said
    with pytest.raises(BindError, match=r"expected layers \d+ and blocks \d+ bytes apart"):
        made.pool()


def connected(kind: str, **more: Any) -> Any:
    """A connector's caches for an engine with groups of this kind."""
    made = engine(**more)
    for number, group in enumerate(made.kv_cache_config.kv_cache_groups):
        spec = type(kind, (SimpleNamespace,), {})(**vars(group.kv_cache_spec))
        made.kv_cache_config.kv_cache_groups[number].kv_cache_spec = spec
    made.kv_cache_config.transfer_group_ids = tuple(range(len(made.kv_cache_config.kv_cache_groups)))
    return Caches(made.vllm_config, made.kv_cache_config, made.kv_caches)


@pytest.mark.parametrize("kind", ["CrossAttentionSpec", "CircularBufferSpec", "RSWASpec", "NewSpec"])
def test_tables_that_hold_no_positions_are_refused(kind: str) -> None:
    """Encoder states and rings: a prefix of their blocks would be sent as the tokens of a prompt."""
    with pytest.raises(BindError, match=f"{kind}: where its block table has a token is not known"):
        connected(kind)


@pytest.mark.parametrize("said", [{"num_kv_heads": None}, {"tokens_per_state": 4}], ids=["a state a sequence", "compressed"])
def test_states_are_not_sent(said: dict[str, Any]) -> None:
    """The way out is tested with the engine: tests/engines/test_vllm_models.py, qwen3-next."""
    with pytest.raises(BindError, match=r"MambaSpec: .* state.*in one engine, where KvbmOffloadingConnector copies"):
        connected("MambaSpec", **said)


def test_block_tables_as_spans() -> None:
    """Before a window there are no blocks; gaps elsewhere are an error."""
    made = connected("SlidingWindowSpec", layers=([0, 2], [1]), sliding_window=40)
    spans = made.spans(([0, 0, 3, 4], [1, 2]), 4 * NT - 3, 5)
    assert [(list(span.table), span.tokens) for span in spans.values()] == [
        ([-1, -1, 3, 4], range(2 * NT, 4 * NT - 3)), ([1, 2], range(5, 4 * NT - 3)),
    ]  # fmt: skip
    assert made.spans(([0, 0], [1]), 20)["0.0"].tokens == range(20, 20)
    with pytest.raises(BindError, match=r"expected blocks for all tokens from 16 on, got a table with gaps: \[0, 3, 0, 4\]"):
        made.spans(([0, 3, 0, 4], [1, 2]), 4 * NT)


@pytest.mark.parametrize("rank", [0, 1])
def test_stages_of_a_pipeline_with_other_layers_are_refused(rank: int) -> None:
    """Five layers on two stages are three and two, as in vLLM; else an error says what is not known."""
    shares = ([0, 1, 2], [3, 4])
    made = connected("FullAttentionSpec", layers=(shares[rank],), pp=2, rank=rank, model_layers=5)
    assert made.rank == rank and sorted(made.layers.values()) == shares[rank] and made.whole == {"0.0"}
    with pytest.raises(BindError, match=r"pipeline_parallel_size: 2 stages, and this one has layers .*VLLM_PP_LAYER_PARTITION"):
        connected("FullAttentionSpec", layers=(([0, 1], [2, 3, 4])[rank],), pp=2, rank=rank, model_layers=5)


def test_groups_with_a_window_do_not_keep_all_blocks() -> None:
    assert connected("SlidingWindowSpec", layers=([0, 2], [1]), sliding_window=40).whole == frozenset()
    assert connected("FullAttentionSpec", layers=([0, 2], [1]), sliding_window=40).whole == {"0.0", "1.0"}


def test_spans_that_begin_later() -> None:
    """If the other engine lacks the beginning of the first block."""
    made = connected("SlidingWindowSpec", layers=([0, 2], [1]), sliding_window=40)
    spans = made.spans(([0, 0, 3, 4], [1, 2, 5, 6]), 4 * NT, 0, {0: 2 * NT + 5})
    assert [span.tokens for span in spans.values()] == [range(2 * NT + 5, 4 * NT), range(4 * NT)]
