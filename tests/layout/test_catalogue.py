"""The catalogue: each layout is compared with the places where its engine writes a token's K row and V row.

The table below describes each layout a second time, in NumPy: the engine's tensors with their shapes, and the view into
which it writes the row of one token and head.  It parses no order and no YAML.  Every element of a row encodes its
coordinate, so comparing memory with `Resolved.address` detects any element at another place.
"""

# ruff: noqa: ARG005, E741  (every row has the same arguments, and l is the layer)
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import yaml

import kvbm
import plane_oracle
from coordinates import in_case
from kvbm.layout import spec
from kvbm.layout.grammar import parse
from kvbm.layout.shapes import data_dir

LAYOUTS = Path(data_dir())

#: Sizes in the engines' own words, all different where they can be: x elements are 16 bytes, g heads are a group.
#: No block is a whole number of 4 KiB, so a pitch that rounds up to pages adds padding.
SIZES = SimpleNamespace(nl=3, nb=2, bs=16, nh=6, hs=48, x=8, g=2)
MLA = SimpleNamespace(nl=3, nb=5, bs=4, nh=1, hs=24)
SCALES = SimpleNamespace(nl=1, nb=3, bs=256, nh=1, hs=12)  # rows are bs, groups are hs

Tensors = list[np.ndarray]
Shapes = Callable[[Any], list[tuple[int, ...]]]
#: (tensors, sizes, K or V, layer, block, token, head) → the place of that row, elements in the order of the head.
Row = Callable[[Tensors, Any, int, int, int, int, int], np.ndarray]


# fmt: off
ENGINES: dict[str, tuple[Shapes, Row]] = {
    # ---- one tensor a layer
    "flash_attn_nhd": (lambda s: [(2, s.nb, s.bs, s.nh, s.hs)] * s.nl, lambda m, s, o, l, b, t, h: m[l][o, b, t, h]),
    "flash_attn_hnd": (lambda s: [(2, s.nb, s.nh, s.bs, s.hs)] * s.nl, lambda m, s, o, l, b, t, h: m[l][o, b, h, t]),
    "flashinfer_nhd": (lambda s: [(s.nb, 2, s.bs, s.nh, s.hs)] * s.nl, lambda m, s, o, l, b, t, h: m[l][b, o, t, h]),
    "flashinfer_hnd": (lambda s: [(s.nb, 2, s.nh, s.bs, s.hs)] * s.nl, lambda m, s, o, l, b, t, h: m[l][b, o, h, t]),
    "packed_layer": (lambda s: [(s.nb, s.nh, s.bs, 2 * s.hs)] * s.nl,
                     lambda m, s, o, l, b, t, h: m[l][b, h, t, o * s.hs : (o + 1) * s.hs]),
    "tpu": (lambda s: [(s.nb, s.bs, s.nh * 2, -(-s.hs // 128) * 128)] * s.nl,
            lambda m, s, o, l, b, t, h: m[l][b, t, 2 * h + o, : s.hs]),
    "lightllm_list": (lambda s: [(s.nb * s.bs, 2 * s.nh, s.hs)] * s.nl,
                      lambda m, s, o, l, b, t, h: m[l][b * s.bs + t, o * s.nh + h]),
    "cpu": (lambda s: [(2, s.nb, s.nh, s.bs * s.hs)] * s.nl,
            lambda m, s, o, l, b, t, h: m[l][0, b, h].reshape(s.hs, s.bs)[:, t] if o == 0
            else m[l][1, b, h].reshape(s.bs, s.hs)[t]),
    "cpu_vec": (lambda s: [(s.nb, s.nh, 2, s.bs * s.hs)] * s.nl,
                lambda m, s, o, l, b, t, h: m[l][b, h, 0].reshape(s.hs, s.bs)[:, t] if o == 0
                else m[l][b, h, 1].reshape(s.bs, s.hs)[t]),
    "cpu_amx": (lambda s: [(s.nb, s.nh, 2, s.bs * s.hs)] * s.nl,
                lambda m, s, o, l, b, t, h: m[l][b, h, 0].reshape(s.bs // 16, s.hs // 2, 16, 2)[t // 16, :, t % 16]
                if o == 0 else m[l][b, h, 1].reshape(s.hs // 16, s.bs // 2, 16, 2)[:, t // 2, :, t % 2]),
    # ---- one tensor for K and one for V a layer
    "pair_nhd": (lambda s: [(s.nb, s.bs, s.nh, s.hs)] * (2 * s.nl), lambda m, s, o, l, b, t, h: m[2 * l + o][b, t, h]),
    "pair_hnd": (lambda s: [(s.nb, s.nh, s.bs, s.hs)] * (2 * s.nl), lambda m, s, o, l, b, t, h: m[2 * l + o][b, h, t]),
    "hf_blocks": (lambda s: [(1, s.nh, s.nb * s.bs, s.hs)] * (2 * s.nl),
                  lambda m, s, o, l, b, t, h: m[2 * l + o][0, h, b * s.bs + t]),
    "paged_attn_v0": (lambda s: [(s.nb, s.nh, s.hs // s.x, s.bs, s.x), (s.nb, s.nh, s.hs, s.bs)] * s.nl,
                      lambda m, s, o, l, b, t, h: m[2 * l + o][b, h, :, t]),
    "aiter_shuffle": (lambda s: [(s.nb, s.nh, s.hs // s.x, s.bs, s.x), (s.nb, s.nh, s.bs // s.x, s.hs, s.x)] * s.nl,
                      lambda m, s, o, l, b, t, h: m[2 * l][b, h, :, t] if o == 0
                      else m[2 * l + 1][b, h, t // s.x, :, t % s.x]),
    "nz": (lambda s: [(s.nb, s.nh * s.hs // 16, s.bs, 16)] * (2 * s.nl),
           lambda m, s, o, l, b, t, h: m[2 * l + o][b, h * s.hs // 16 : (h + 1) * s.hs // 16, t]),
    "slots": (lambda s: [(s.nb * s.bs, s.nh, s.hs)] * (2 * s.nl),  # all K tensors, then all V tensors
              lambda m, s, o, l, b, t, h: m[o * s.nl + l][b * s.bs + t, h]),
    "slots_pages": (lambda s: [(s.nb, s.bs, s.nh, s.hs)] * (2 * s.nl),
                    lambda m, s, o, l, b, t, h: m[o * s.nl + l][b, t, h]),
    "llamacpp": (lambda s: [(s.nb * s.bs, s.nh * s.hs)] * (2 * s.nl),
                 lambda m, s, o, l, b, t, h: m[2 * l + o][b * s.bs + t, h * s.hs : (h + 1) * s.hs]),
    # ---- one tensor for all
    "paged_rows": (lambda s: [(s.nb * s.nl * 2 * s.bs, s.nh, s.hs)],
                   lambda m, s, o, l, b, t, h: m[0][((b * s.nl + l) * 2 + o) * s.bs + t, h]),
    "fc_nhd": (lambda s: [(s.nb, s.nl, 2, s.bs, s.nh, s.hs)], lambda m, s, o, l, b, t, h: m[0][b, l, o, t, h]),
    "fc_hnd": (lambda s: [(s.nb, s.nl, 2, s.nh, s.bs, s.hs)], lambda m, s, o, l, b, t, h: m[0][b, l, o, h, t]),
    "fc_universal": (lambda s: [(s.nb, s.nh, s.nl, 2, s.bs, s.hs)], lambda m, s, o, l, b, t, h: m[0][b, h, l, o, t]),
    "cross_flashinfer_hnd": (lambda s: [(s.nb, 2, s.nh, s.nl, s.bs, s.hs)],
                             lambda m, s, o, l, b, t, h: m[0][b, o, h, l, t]),
    "trtllm": (lambda s: [(s.nb, s.nl, 2, s.nh * s.bs * s.hs)],
               lambda m, s, o, l, b, t, h: m[0][b, l, o, (h * s.bs + t) * s.hs : (h * s.bs + t + 1) * s.hs]),
    "LBHNC": (lambda s: [(s.nl, s.nb, s.nh, s.bs, 2 * s.hs)],
              lambda m, s, o, l, b, t, h: m[0][l, b, h, t, o * s.hs : (o + 1) * s.hs]),
    "LBNHC": (lambda s: [(s.nl, s.nb, s.bs, s.nh, 2 * s.hs)],
              lambda m, s, o, l, b, t, h: m[0][l, b, t, h, o * s.hs : (o + 1) * s.hs]),
    "LHBNC": (lambda s: [(s.nl, s.nh, s.nb, s.bs, 2 * s.hs)],
              lambda m, s, o, l, b, t, h: m[0][l, h, b, t, o * s.hs : (o + 1) * s.hs]),
    "BLHNC": (lambda s: [(s.nb, s.nl, s.nh, s.bs, 2 * s.hs)],
              lambda m, s, o, l, b, t, h: m[0][b, l, h, t, o * s.hs : (o + 1) * s.hs]),
    "BLNHC": (lambda s: [(s.nb, s.nl, s.bs, s.nh, 2 * s.hs)],
              lambda m, s, o, l, b, t, h: m[0][b, l, t, h, o * s.hs : (o + 1) * s.hs]),
    "BHLNC": (lambda s: [(s.nb, s.nh, s.nl, s.bs, 2 * s.hs)],
              lambda m, s, o, l, b, t, h: m[0][b, h, l, t, o * s.hs : (o + 1) * s.hs]),
    "layer_first": (lambda s: [(2, s.nl, s.nb * s.bs, s.nh, s.hs)],
                    lambda m, s, o, l, b, t, h: m[0][o, l, b * s.bs + t, h]),
    "page_first": (lambda s: [(2, s.nb * s.bs, s.nl, s.nh, s.hs)],
                   lambda m, s, o, l, b, t, h: m[0][o, b * s.bs + t, l, h]),
    "page_first_direct": (lambda s: [(2, s.nb, s.nl, s.bs, s.nh, s.hs)],
                          lambda m, s, o, l, b, t, h: m[0][o, b, l, t, h]),
    "page_head": (lambda s: [(2, s.nb, s.nh, s.bs, s.nl, s.hs)], lambda m, s, o, l, b, t, h: m[0][o, b, h, t, l]),
    "page_unified": (lambda s: [(s.nb, s.nh // s.g, s.nl, 2, s.bs, s.g, s.hs)],
                     lambda m, s, o, l, b, t, h: m[0][b, h // s.g, l, o, t, h % s.g]),
    "nvshmem": (lambda s: [(s.nl, s.nb, 2, s.nh, s.bs, s.hs)], lambda m, s, o, l, b, t, h: m[0][l, b, o, h, t]),
    "flexkv_layerfirst": (lambda s: [(s.nl, 2, s.nb, s.bs, s.nh, s.hs)],
                          lambda m, s, o, l, b, t, h: m[0][l, o, b, t, h]),
    "deepspeed": (lambda s: [(s.nl, s.nb, s.bs, 2, s.nh, s.hs)], lambda m, s, o, l, b, t, h: m[0][l, b, t, o, h]),
    "lightllm": (lambda s: [(s.nl, s.nb * s.bs, 2 * s.nh, s.hs)],
                 lambda m, s, o, l, b, t, h: m[0][l, b * s.bs + t, o * s.nh + h]),
    "nanovllm": (lambda s: [(2, s.nl, s.nb, s.bs, s.nh, s.hs)], lambda m, s, o, l, b, t, h: m[0][o, l, b, t, h]),
    # ---- one tensor a block
    "stacked_nhd": (lambda s: [(s.bs, s.nh, s.hs)] * (s.nb * s.nl * 2),
                    lambda m, s, o, l, b, t, h: m[(b * s.nl + l) * 2 + o][t, h]),
    "stacked_hnd": (lambda s: [(s.nh, s.bs, s.hs)] * (s.nb * s.nl * 2),
                    lambda m, s, o, l, b, t, h: m[(b * s.nl + l) * 2 + o][h, t]),
    "operational_nhd": (lambda s: [(s.nl, 2, s.bs, s.nh, s.hs)] * s.nb, lambda m, s, o, l, b, t, h: m[b][l, o, t, h]),
    "operational_hnd": (lambda s: [(s.nl, 2, s.nh, s.bs, s.hs)] * s.nb, lambda m, s, o, l, b, t, h: m[b][l, o, h, t]),
    "universal": (lambda s: [(s.nh, s.nl, 2, s.bs, s.hs)] * s.nb, lambda m, s, o, l, b, t, h: m[b][h, l, o, t]),
    "turbomind": (lambda s: [(s.nl * s.nh * 2 * s.bs * s.hs,)] * s.nb,  # block.h: k_data, and v_data behind it
                  lambda m, s, o, l, b, t, h: m[b][(at := ((l * s.nh + h) * 2 + o) * s.bs * s.hs + t * s.hs) : at + s.hs]),
    "kv_2ltd": (lambda s: [(2, s.nl, s.bs, s.nh * s.hs)] * s.nb,
                lambda m, s, o, l, b, t, h: m[b][o, l, t, h * s.hs : (h + 1) * s.hs]),
    "kv_2td": (lambda s: [(2, s.bs, s.nh * s.hs)] * (s.nb * s.nl),
               lambda m, s, o, l, b, t, h: m[b * s.nl + l][o, t, h * s.hs : (h + 1) * s.hs]),
    "kv_t2d": (lambda s: [(s.bs, 2, s.nh * s.hs)] * (s.nb * s.nl),
               lambda m, s, o, l, b, t, h: m[b * s.nl + l][t, o, h * s.hs : (h + 1) * s.hs]),
    "ncld": (lambda s: [(s.bs, 2, s.nl, s.nh, s.hs)] * s.nb, lambda m, s, o, l, b, t, h: m[b][t, o, l, h]),
    # ---- latents: one row a token, no heads
    "mla_pages": (lambda s: [(s.nb, s.bs, s.hs)] * s.nl, lambda m, s, o, l, b, t, h: m[l][b, t]),
    "mla_slots": (lambda s: [(s.nb * s.bs, 1, s.hs)] * s.nl, lambda m, s, o, l, b, t, h: m[l][b * s.bs + t, 0]),
    "mla_fc": (lambda s: [(s.nb, s.nl, 1, s.bs * s.hs)],
               lambda m, s, o, l, b, t, h: m[0][b, l, 0, t * s.hs : (t + 1) * s.hs]),
    "mla_page_first_direct": (lambda s: [(s.nb, s.nl, s.bs, 1, s.hs)], lambda m, s, o, l, b, t, h: m[0][b, l, t, 0]),
    "mla_layer_first": (lambda s: [(s.nl, s.nb * s.bs, 1, s.hs)], lambda m, s, o, l, b, t, h: m[0][l, b * s.bs + t, 0]),
    "mla_chunk": (lambda s: [(1, s.nl, s.bs, s.hs)] * s.nb, lambda m, s, o, l, b, t, h: m[b][0, l, t]),
    "mla_page_first": (lambda s: [(s.nb * s.bs, s.nl, 1, s.hs)], lambda m, s, o, l, b, t, h: m[0][b * s.bs + t, l, 0]),
    "mla_flexkv_layerfirst": (lambda s: [(s.nl, 1, s.nb, s.bs, 1, s.hs)],
                              lambda m, s, o, l, b, t, h: m[0][l, 0, b, t, 0]),
    # ---- scale factors: b is the matrix of a batch, t its row
    "scales_128x4": (lambda s: [(s.nb, s.bs // 128, s.hs // 4, 32, 4, 4)],
                     lambda m, s, o, l, b, t, h: m[0][b, t // 128, :, t % 32, t % 128 // 32]),
    "scales_8x4": (lambda s: [(s.nb, s.bs // 8, s.hs // 4, 8, 4)],
                   lambda m, s, o, l, b, t, h: m[0][b, t // 8, :, t % 8]),
    "scales_linear": (lambda s: [(s.nb, s.bs, s.hs)], lambda m, s, o, l, b, t, h: m[0][b, t]),
}

#: Name of a file → what its engine does.  `operational` promises no order inside a chunk: the declared one is read.
CATALOGUE = {
    "nhd": "stacked_nhd", "hnd": "stacked_hnd", "operational": "operational_nhd", "universal": "universal",
    "operational_nhd": "operational_nhd", "operational_hnd": "operational_hnd", "hf/dynamic_cache": "hf_blocks",
    "hf/paged_attention": "paged_rows",
    "aibrix/LCND": "operational_nhd", "aibrix/NCLD": "ncld", "deepspeed/blocked": "deepspeed",
    "dynamo/fc_hnd": "fc_hnd", "dynamo/fc_nhd": "fc_nhd", "dynamo/fc_universal": "fc_universal",
    "dynamo/ls_block_first_hnd": "flashinfer_hnd", "dynamo/ls_block_first_nhd": "flashinfer_nhd",
    "dynamo/ls_block_second_hnd": "flash_attn_hnd", "dynamo/ls_block_second_nhd": "flash_attn_nhd",
    "dynamo/operational_hnd": "operational_hnd", "dynamo/operational_nhd": "operational_nhd",
    "dynamo/stacked_hnd": "stacked_hnd", "dynamo/stacked_nhd": "stacked_nhd", "dynamo/universal": "universal",
    "dynamo/universal_pp": "turbomind", "flashinfer/combined_hnd": "flashinfer_hnd",
    "flashinfer/combined_nhd": "flashinfer_nhd", "flashinfer/mla": "mla_pages", "flashinfer/tuple_hnd": "pair_hnd",
    "flashinfer/tuple_nhd": "pair_nhd", "flexkv/BLOCKFIRST": "fc_nhd", "flexkv/BLOCKFIRST_mla": "mla_page_first_direct",
    "flexkv/LAYERFIRST": "flexkv_layerfirst", "flexkv/LAYERFIRST_mla": "mla_flexkv_layerfirst",
    "hf/dynamic_cache_rows": "pair_hnd", "lightllm/mem_manager": "lightllm",
    "lightllm/mem_manager_list": "lightllm_list", "lmcache/KV_MLA_FMT": "mla_chunk", "llamacpp/k": "llamacpp",
    "llmd/cpu": "fc_nhd", "lmcache/KV_2LTD": "kv_2ltd", "lmcache/KV_2TD": "kv_2td", "lmcache/KV_T2D": "kv_t2d",
    "lmcache/NB_NL_TWO_BS_NH_HS": "fc_nhd", "lmcache/NB_NL_TWO_NH_BS_HS": "fc_hnd",
    "lmcache/NL_X_NBBS_ONE_HS": "mla_slots", "lmcache/NL_X_NB_BS_HS": "mla_pages",
    "lmcache/NL_X_NB_NH_BS_TWO_HS": "packed_layer", "lmcache/NL_X_NB_TWO_BS_NH_HS": "flashinfer_nhd",
    "lmcache/NL_X_NB_TWO_NH_BS_HS": "flashinfer_hnd", "lmcache/NL_X_TWO_NB_BS_NH_HS": "flash_attn_nhd",
    "lmcache/NL_X_TWO_NB_NH_BS_HS": "flash_attn_hnd", "lmcache/TWO_X_NL_X_NBBS_NH_HS": "slots",
    "lmcache/TWO_X_NL_X_NB_BS_NH_HS": "slots_pages", "lmdeploy/cambricon": "pair_hnd", "lmdeploy/pytorch": "pair_nhd",
    "lmdeploy/turbomind": "turbomind", "mlc/mla": "mla_pages", "mlc/nvshmem": "nvshmem", "mlc/paged": "flashinfer_hnd",
    "nanovllm/kv_cache": "nanovllm", "sglang/host_layer_first": "layer_first",
    "sglang/host_mla_layer_first": "mla_layer_first", "sglang/host_mla_page_first": "mla_page_first",
    "sglang/host_mla_page_first_direct": "mla_page_first_direct", "sglang/host_page_first": "page_first",
    "sglang/host_page_first_direct": "page_first_direct", "sglang/host_page_head": "page_head",
    "sglang/mha_pool": "slots", "sglang/mla_pool": "mla_slots", "sglang/page_unified": "page_unified",
    "swizzle/128x4": "scales_128x4", "swizzle/8x4": "scales_8x4", "swizzle/linear": "scales_linear",
    "trtllm/mla_pool": "mla_fc", "trtllm/v1_pool": "trtllm", "trtllm/v2_slot": "fc_hnd",
    "vllm/BHLNC": "BHLNC", "vllm/BLHNC": "BLHNC", "vllm/BLNHC": "BLNHC", "vllm/LBHNC": "LBHNC", "vllm/LBNHC": "LBNHC",
    "vllm/LHBNC": "LHBNC", "vllm/aiter_shuffle": "aiter_shuffle", "vllm/ascend_nd": "pair_nhd", "vllm/ascend_nz": "nz",
    "vllm/cpu": "cpu", "vllm/cpu_vec": "cpu_vec", "vllm/cpu_amx": "cpu_amx",
    "vllm/cross_layer_flashinfer_hnd": "cross_flashinfer_hnd",
    "vllm/cross_layer_hnd": "fc_universal", "vllm/cross_layer_nhd": "fc_nhd", "vllm/flash_attn_hnd": "flash_attn_hnd",
    "vllm/flash_attn_nhd": "flash_attn_nhd", "vllm/flashinfer_hnd": "flashinfer_hnd",
    "vllm/flashinfer_nhd": "flashinfer_nhd", "vllm/mla": "mla_pages", "vllm/mla_cross_layer": "mla_page_first_direct",
    "vllm/paged_attn_v0": "paged_attn_v0", "vllm/tpu": "tpu",
}
# fmt: on


def sizes_of(engine: str) -> tuple[Any, int]:
    """Sizes for an engine, and how many of K and V it has."""
    return (MLA, 1) if engine.startswith("mla") else (SCALES, 1) if engine.startswith("scales") else (SIZES, 2)


def written(engine: str, sizes: Any, halves: int) -> Tensors:
    """The engine's tensors after it has written every row; an element has its coordinate's number, padding has -1."""
    shapes, row = ENGINES[engine]
    memory = [np.full(shape, -1, np.int64) for shape in shapes(sizes)]
    numbers = np.arange(sizes.nb * sizes.nl * halves * sizes.nh * sizes.bs * sizes.hs)
    rows = numbers.reshape(sizes.nb, sizes.nl, halves, sizes.nh, sizes.bs, sizes.hs)
    for b, l, o, h, t in np.ndindex(rows.shape[:-1]):
        place = row(memory, sizes, o, l, b, t, h)
        assert np.all(place == -1), "the table writes an element twice"
        place[...] = rows[b, l, o, h, t].reshape(place.shape)
    return memory


def test_it_is_what_the_engine_does() -> None:
    """Every coordinate of every block is in the allocation and at the byte where the engine wrote it."""
    for name in sorted(CATALOGUE):
        with in_case(name):
            _it_is_what_the_engine_does(name)


def _it_is_what_the_engine_does(name: str) -> None:
    engine = CATALOGUE[name]
    sizes, halves = sizes_of(engine)
    memory = written(engine, sizes, halves)
    shape = kvbm.BlockShape(nl=sizes.nl, no=halves, nh=sizes.nh, nt=sizes.bs, hd=sizes.hs, dtype="bfloat16")
    resolved = kvbm.load(name).resolve(shape, sizes.nb)
    assert len(resolved.allocations) == len(memory)
    taken = 0
    axes = np.meshgrid(*map(np.arange, (sizes.nb, sizes.nl, sizes.nh, sizes.bs, sizes.hs)), indexing="ij")
    b, l, h, t, d = axes
    for o in range(halves):
        entry, offset = resolved.address(b, l=l, o=o, h=h, t=t, d=d)  # type: ignore[call-overload]
        entry, offset = np.broadcast_to(entry, b.shape), np.broadcast_to(offset, b.shape)
        want = ((((b * sizes.nl + l) * halves + o) * sizes.nh + h) * sizes.bs + t) * sizes.hs + d
        assert not np.any(offset % shape.itemsize)
        for index, tensor in enumerate(memory):
            mine = entry == index
            assert np.array_equal(tensor.reshape(-1)[offset[mine] // shape.itemsize], want[mine]), (name, o, index)
            taken += int(mine.sum())
    assert taken == sum(int((tensor >= 0).sum()) for tensor in memory), "one-to-one, and nothing is left out"
    # The memory that the engine allocates is the memory that the layout describes, to the byte.
    sizes_in_bytes = [tensor.size * shape.itemsize for tensor in memory]
    assert [allocation.nbytes for allocation in resolved.allocations] == sizes_in_bytes


def test_the_table_would_notice() -> None:
    """Two engines with tensors of the same shape have different addresses, so the comparison above can fail."""
    square = SimpleNamespace(**{**vars(SIZES), "nh": 16, "bs": 16})
    one, other = written("pair_nhd", square, 2), written("pair_hnd", square, 2)
    assert [m.shape for m in one] == [m.shape for m in other]
    assert not any(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_every_file_is_in_the_table() -> None:
    """Layouts of several planes are in the table of byte offsets, which test_planes compares."""
    assert set(CATALOGUE) | set(plane_oracle.TABLE) == set(kvbm.layouts())
    assert not set(CATALOGUE) & set(plane_oracle.TABLE)
    assert set(CATALOGUE.values()) == set(ENGINES)


def test_every_file_says_where_it_is_from() -> None:
    """Title, users and source; those of the catalogue also the tensor shapes that a user will recognise."""
    for name in sorted({*CATALOGUE, *plane_oracle.TABLE}):
        with in_case(name):
            _every_file_says_where_it_is_from(name)


def _every_file_says_where_it_is_from(name: str) -> None:
    said = yaml.safe_load((LAYOUTS / f"{name}.yaml").read_text(encoding="utf-8"))
    assert "order" in said and "like" not in said, "a shipped file says it all, whatever becomes of another"
    assert said["title"] and (said.get("used_by") or said["read_from"].startswith("this project"))
    if name in CATALOGUE:
        assert "/" in said["read_from"] or "layouts.md" in said["read_from"]
    assert said["read_from"] == kvbm.load(name).read_from
    if "notes" in said and name in CATALOGUE:
        assert "(" in said["notes"] and said["notes"].rstrip().endswith(".")
    assert not said["title"].endswith(".")


def plane_bytes(name: str) -> bytes:
    """The place of every element of every plane, at the first shape of its family."""
    family = plane_oracle.FAMILIES[plane_oracle.TABLE[name].family]
    held = plane_oracle.held(name, family.shapes[0], 2)
    parts = [
        f"{plane.name} {plane.dtype}".encode() + b"".join(p.tobytes() for p in plane.address(range(2)))
        for plane in held.planes
    ]
    return b"|".join(sorted(parts))


def test_aliases_mean_the_same_and_nothing_else_does() -> None:
    """Layouts have equal fingerprints exactly if all their addresses are equal."""
    places: dict[bytes, list[spec.Layout]] = {}
    for layout in spec.load_dir(LAYOUTS):
        if layout.name in plane_oracle.TABLE:
            key = plane_bytes(layout.name)
        else:
            engine = CATALOGUE[layout.name]
            memory = written(engine, *sizes_of(engine))
            key = b"".join(tensor.tobytes() for tensor in memory) + b"|%d|%d" % ("{" in layout.order_text, len(memory))
        places.setdefault(key, []).append(layout)
    first: dict[str, str] = {}
    for same in places.values():
        for layout in same:
            assert layout.fingerprint == same[0].fingerprint, (
                f"{layout.name}.yaml and {same[0].name}.yaml: expected one fingerprint, because their engines write every "
                f"row at the same place, got {layout.fingerprint} and {same[0].fingerprint}. If one of them has padding "
                "that the other has not, the table's sizes must not make it zero"
            )
        other = first.setdefault(same[0].fingerprint, same[0].name)
        assert other == same[0].name, (
            f"{same[0].name}.yaml and {other}.yaml: expected two fingerprints, because their engines write rows at "
            f"different places, got {same[0].fingerprint} for both"
        )


def test_sizes_show_padding_to_pages() -> None:
    """A layout whose blocks, heads or layers are padded to pages takes more memory than one without padding."""
    for sizes, halves in ((SIZES, 2), (MLA, 1)):
        shape = kvbm.BlockShape(nl=sizes.nl, no=halves, nh=sizes.nh, nt=sizes.bs, hd=sizes.hs, dtype="bfloat16")
        heads = "h o" if halves == 2 else "h"
        for order, axis, nbytes in (
            (f"[l] b {heads} t d", "b", "nh*no*nt*hd*es"),
            (f"[l] b {heads} t d", "h", "no*nt*hd*es"),
            (f"b l {heads} t d", "b", "nl*nh*no*nt*hd*es"),
            (f"b l {heads} t d", "l", "nh*no*nt*hd*es"),
        ):
            for page in (4096, 65536):
                with in_case(f"{order}, {axis} padded to {page} B"):
                    padding = f'pitch: {{{axis}: "round_up({nbytes}, {page}) B"}}'
                    plain = parse(f'order: "{order}"')
                    padded = parse(f'order: "{order}"\n{padding}')
                    sizes_in_bytes = [
                        sum(a.nbytes for a in layout.resolve(shape, sizes.nb).allocations) for layout in (plain, padded)
                    ]
                    assert sizes_in_bytes[0] < sizes_in_bytes[1]
