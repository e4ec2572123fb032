"""kvbm.integrations.sglang: with SGLang itself on the CPU, and with the classes of the installed package."""

from __future__ import annotations

import errno
import hashlib
import importlib
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import HERE, Program, apart, result, run

if find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)
sys.path.insert(0, str(HERE / "programs"))
warnings.simplefilter("ignore")  # while this is collected: SGLang says what it lacks on a CPU
import numpy as np  # noqa: E402
import standins  # noqa: E402, F401  (before SGLang)
import torch  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName, PoolTransfer  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage import StorageBackendFactory  # noqa: E402
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker  # noqa: E402

import cast_oracle  # noqa: E402
import kvbm  # noqa: E402
from kvbm.integrations import sglang as integration  # noqa: E402
from kvbm.integrations.taken import lacking  # noqa: E402
from kvbm.store.keys import Chain  # noqa: E402
from unit_reader import Reader  # noqa: E402

PAGE, SLOTS = 4, 40


# ---- the engine ----------------------------------------------------------------------------------------------------------


def serve(model: Path, folder: Path, steps: list[Any], extra: dict[str, Any] | None, **engine: Any) -> dict[str, Any]:
    """What `programs/sglang_serve.py` finds; without kvbm where there is nothing to configure."""
    linker = {} if extra is None else {
        "enable_unified_cache_external_linker": True, "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": {
            "linker": "SpoiledLinker", "linker_module_path": "sglang_linkers",
            "linker_extra_config": {"host_bytes": 64 << 20, "folder": str(folder), **extra},
        },
    }  # fmt: skip
    settings = {
        "engine": {"model_path": str(model), **linker, **engine},
        "steps": steps,
        "new": 8,
        "folder": str(folder),
    }
    threads = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if engine.get("tp_size", 1) > 1 else {}
    found: dict[str, Any] = result(run("sglang_serve", json.dumps(settings), limit=400, **threads))
    return found


#: The device holds one prompt and a half, so each of these evicts the others.
TURN: list[Any] = [[200], [300], [310]]


@pytest.mark.timeout(600)
def test_tokens_come_back(models: Callable[[str], Path], tmp_path: Path) -> None:
    """What was computed comes back from host memory: the same tokens as without kvbm; wrong pages are misses, or end a request."""
    steps = [*TURN, *TURN, "lookup", [200], "load", [300], [300], "blind", [310]]
    found = serve(models("llama"), tmp_path, steps, {})
    stock = serve(models("llama"), tmp_path, TURN + TURN, None)
    tokens, cached = ([one.get(what) for (one,) in found["runs"]] for what in ("tokens", "cached"))
    right, again = ([one[what] for (one,) in stock["runs"]] for what in ("tokens", "cached"))
    assert tokens[:6] == right and again[3:] == [0, 0, 0]
    assert cached[:6] == [0, 0, 0, 192, 288, 304]
    assert tokens[6] == right[0] and cached[6] == 32  # two pages before the one that was spoiled
    assert re.search("503", found["runs"][7][0]["error"])
    assert tokens[8] == right[1] and cached[8] == 32
    assert cached[9] == 304 and tokens[9] != right[2]  # the control: nobody compares
    assert re.fullmatch(r"kv:\d+:2", found["seen"])


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_ranks(models: Callable[[str], Path], tmp_path: Path) -> None:
    """Each has its heads in host memory; where a page of one is wrong, both compute it anew."""
    steps = [*TURN, [200], "lookup", [300], [310]]
    extra = {"host_layout": "operational_nhd"}
    found = serve(models("llama"), tmp_path, steps, extra, tp_size=2, dtype="bfloat16")
    assert [one["cached"] for (one,) in found["runs"]] == [0, 0, 0, 192, 32, 304]
    tokens = [one["tokens"] for (one,) in found["runs"]]
    assert tokens[3:] == tokens[:3]


class Vllm(Program):
    """vLLM, which has an environment of its own."""

    def words(self, program: str, arguments: tuple[Any, ...]) -> list[str]:
        found = find_spec("vllm")
        assert found is not None and found.origin is not None
        python = Path(found.origin).parents[4] / "bin" / "python"
        return [str(python), *super().words(program, arguments)[1:]]


def by_vllm(
    model: Path, folder: Path, *lengths: int, tp: int = 1, nt: int = 32, alone: Sequence[int] = (), **extra: Any
) -> list[dict[str, Any]]:
    """What vLLM generates, one prompt after the other, with a folder behind its host memory.

    Those of the lengths `alone` have a salt: no other engine finds them.
    """
    transfer = {
        "kv_connector": "KvbmOffloadingConnector", "kv_connector_module_path": "kvbm.integrations.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20, "folder": str(folder), "folder_bytes": 1 << 30, **extra},
    }  # fmt: skip
    llm = {"model": str(model), "block_size": nt, "tensor_parallel_size": tp, "kv_transfer_config": transfer}
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"} if tp > 1 else {}
    paths = [str(Path(kvbm.__file__).parents[1]), str(HERE.parent), str(HERE.parent / "helpers")]  # none of SGLang's
    runs = [[length] for length in (*lengths, *alone)]
    settings = json.dumps({"llm": llm, "runs": runs, "new": 8, "likely": 20, "salted": [*alone]})
    started = Vllm("generate", settings, PYTHONPATH=os.pathsep.join(paths), **variables)
    try:
        return [one for (one,) in result(started.end(400))]
    finally:
        started.kill()


def by_sglang(model: Path, folder: Path, *lengths: int, **engine: Any) -> list[dict[str, Any]]:
    """What SGLang generates, with stand-ins for HiCache's copies on a GPU and the folder behind it."""
    extra = {
        "backend_name": "kvbm", "interface_v1": 1, "module_path": "kvbm.integrations.sglang", "class_name": "KvbmStorage",
        "path": str(folder), "prefetch_threshold": 16,
    }  # fmt: skip
    cache = {
        "enable_hierarchical_cache": True, "hicache_mem_layout": "page_first_direct", "hicache_io_backend": "direct",
        "hicache_write_policy": "write_through", "hicache_storage_backend": "dynamic", "hicache_ratio": 1.2,
        "hicache_storage_prefetch_policy": "wait_complete", "hicache_storage_backend_extra_config": json.dumps(extra),
    }  # fmt: skip
    found = serve(model, folder.parent, [[length] for length in lengths], None, **{**cache, **engine})
    return [one for (one,) in found["runs"]]


def told(found: list[dict[str, Any]], what: str) -> list[Any]:
    return [one[what] for one in found]


@pytest.mark.timeout(900)
def test_sglang_continues_what_vllm_stored(models: Callable[[str], Path], tmp_path: Path) -> None:
    """By pages of 64 from blocks of 32, with vLLM's tokens; and the second reader finds the units of both engines.

    Log probabilities differ as those of the engines do where each computes all of a prompt: by the order of sums in float32.
    """
    folder = tmp_path / "kv"
    first = by_vllm(models("llama"), folder, 200, alone=[300], unit_tokens=64, blocks_per_chunk=2)
    second = by_sglang(models("llama"), folder, 200, 300, page_size=64)
    assert told(first, "cached") == [0, 0] and told(second, "cached") == [192, 0]
    assert told(second, "tokens") == told(first, "tokens")
    loaded, computed = (apart([second[at]], [first[at]], 3) for at in range(2))
    print("log probabilities", loaded, computed)
    assert loaded.mean < 3 * computed.mean and loaded.most < 3 * computed.most < 1e-4
    [content] = [one.name for one in folder.iterdir() if one.is_dir()]
    reader = Reader(folder, content)
    for length in (200, 300):
        tokens = [(i * 7 + 31 * length) % 1000 + 3 for i in range(length)]
        assert len(reader.units(tokens)) == length // 64
        rows = [reader.rows(tokens, layer, half, head) for layer in range(4) for half in range(2) for head in range(4)]
        assert all(row.any() for row in rows) and len({row.tobytes() for row in rows}) == len(rows)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_engines_of_other_ranks_and_pages(models: Callable[[str], Path], tmp_path: Path) -> None:
    """What two ranks of SGLang stored, one of vLLM continues, and the reverse; other angles and weights share nothing.

    Log probabilities are those of the engine that has computed all, but for the order of sums; those of other weights are far away.
    """
    folder, model = tmp_path / "kv", models("llama")
    first = by_sglang(model, folder, 200, 300, tp_size=2)
    files = sorted(folder.rglob("*.safetensors"))
    assert {path.name for path in files} == {"heads-0-1.safetensors", "heads-2-3.safetensors"} and len(files) == 2 * (12 + 19)
    second = by_vllm(model, folder, 200, 300, 310, nt=64)
    assert told(second, "cached") == [192, 256, 0] and told(second[:2], "tokens") == told(first, "tokens")
    third = by_sglang(model, folder, 310, 200)
    assert told(third, "cached") == [256, 192] and told(third, "tokens") == told([second[2], first[0]], "tokens")
    fourth = by_vllm(model, folder, 300, tp=2)
    assert told(fourth, "cached") == [288] and fourth[0]["tokens"] == first[1]["tokens"]
    for found, exact in ((second[:2], first), (third, [second[2], first[0]]), (fourth, first[1:])):
        print("log probabilities", apart(found, exact, 3))
        assert apart(found, exact, 3).most < 1e-4

    theta = json.dumps({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    other = by_sglang(model, folder, 200, json_model_override_args=theta)
    assert told(other, "cached") == [0] and other[0]["tokens"] != first[0]["tokens"]
    strange = by_sglang(models("llama 1"), folder, 200)  # the same configuration
    assert told(strange, "cached") == [0] and strange[0]["tokens"] != first[0]["tokens"]
    assert apart(strange, first[:1]).mean > 0.1
    assert len([one for one in folder.iterdir() if one.is_dir()]) == 3
    for path in folder.rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    wrong = by_sglang(model, folder, 200, 300)
    assert told(wrong, "cached") == [0, 0] and told(wrong, "tokens") == told(first, "tokens")


# ---- the linker, with SGLang's pools -------------------------------------------------------------------------------------


def coded(tensor: Any, seed: int) -> None:
    """Fill with what no other element has."""
    flat = tensor.view(torch.int32).view(-1)
    flat.copy_(torch.arange(flat.numel(), dtype=torch.int32) + (seed << 20))


def mha(layers: int = 5, heads: int = 2, **more: Any) -> Any:
    made = MHATokenToKVPool(
        size=SLOTS, page_size=PAGE, dtype=torch.float32, head_num=heads, head_dim=8, layer_num=layers, device="cpu",
        enable_memory_saver=False, **more,
    )  # fmt: skip
    return fill(made)


def mla() -> Any:
    made = MLATokenToKVPool(
        size=SLOTS, page_size=PAGE, dtype=torch.float32, kv_lora_rank=8, qk_rope_head_dim=4, layer_num=3, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    return fill(made)


def sliding() -> Any:
    made = SWAKVPool(
        size=SLOTS, size_swa=SLOTS, page_size=PAGE, dtype=torch.float32, head_num=2, head_dim=8, swa_attention_layer_ids=[0, 1, 3],
        full_attention_layer_ids=[2, 4], device="cpu",
    )  # fmt: skip
    fill(made.full_kv_pool)
    fill(made.swa_kv_pool, 100)
    return made


def buffers(pool: Any) -> list[Any]:
    """What the engine reads, layer by layer."""
    if isinstance(pool, SWAKVPool):
        return [*buffers(pool.full_kv_pool), *buffers(pool.swa_kv_pool)]
    names = ("k_buffer", "v_buffer") if hasattr(pool, "k_buffer") else ("kv_buffer",)
    return [buffer for name in names for buffer in getattr(pool, name)]


def fill(pool: Any, seed: int = 0) -> Any:
    for index, buffer in enumerate(buffers(pool)):
        coded(buffer, seed + index + 1)
    return pool


def params(pool: Any, **more: Any) -> Any:
    allocator = SimpleNamespace(get_kvcache=lambda: pool)
    usual = {"page_size": PAGE, "mtp_draft_device_pools": (), "sidecar_draft_device_pools": ()}
    return SimpleNamespace(token_to_kv_pool_allocator=allocator, **{**usual, **more})


FULL = {ComponentType.FULL}
SWA = {ComponentType.FULL, ComponentType.SWA}


def linked(pool: Any, components: Any = FULL, more: dict[str, Any] | None = None, **extra: Any) -> Any:
    config = {
        "linker": "KvbmLinker", "linker_module_path": "kvbm.integrations.sglang",
        "linker_extra_config": {"host_bytes": 1 << 20, **extra},
    }  # fmt: skip
    return create_unified_cache_linker(
        None, params(pool, **(more or {})), backend="dynamic", config=config, components=components
    )


def slots(pages: list[int]) -> Any:
    return torch.tensor([page * PAGE + at for page in pages for at in range(PAGE)])


def transfer(keys: str, pages: list[int] | None = None, name: Any = PoolName.KV) -> Any:
    return PoolTransfer(name=name, keys=list(keys), device_indices=None if pages is None else slots(pages))


def offload(linker: Any, *transfers: Any) -> bool:
    assert linker.offload(list(transfers)) and linker.num_completed_offloads() == 1
    done: bool = linker.pop_completed_offload()
    assert linker.num_completed_offloads() == 0
    return done


def load(linker: Any, *transfers: Any, rid: str = "r") -> bool:
    assert linker.load(rid, list(transfers))
    index = linker.start_layer_wise_loading()
    counter = linker.layer_done_counter
    counter.set_consumer(index)
    for layer in range(len(counter._part_of)):
        counter.wait_until(layer)
    landed: bool = linker.finish_layer_wise_loading(index)
    assert linker.finish_layer_wise_loading(-1)
    return landed


def snapshot(pool: Any) -> list[Any]:
    return [buffer.clone() for buffer in buffers(pool)]


def expect(pool: Any, before: list[Any], moved: dict[int, int], which: slice = slice(None)) -> None:
    """Pages hold what others held before; all else is as it was."""
    for found, was in list(zip(buffers(pool), before, strict=True))[which]:
        wanted = was.clone()
        for source, target in moved.items():
            wanted[target * PAGE : (target + 1) * PAGE] = was[source * PAGE : (source + 1) * PAGE]
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("layout", ["universal", "operational_nhd", "hnd"])
@pytest.mark.parametrize("make", [mha, mla])
def test_pages_move(make: Callable[[], Any], layout: str) -> None:
    pool = make()
    if make is mla and layout != "universal":
        layout = "sglang/host_mla_page_first"
    linker, before = linked(pool, host_layout=layout), snapshot(pool)
    assert linker.lookup("r", [transfer("ab")]) == []
    assert offload(linker, transfer("ab", [5, 2]))
    assert linker.lookup("r", [transfer("abc")]) == [1, 2]
    assert load(linker, transfer("ab", [7, 9]))
    expect(pool, before, {5: 7, 2: 9})
    linker.close()


def quantised(page: Any, group: int, fmt: str, scale: str, kept: int = 0) -> Any:
    """What comes back of a page ``(tokens, heads, elements)``, by the oracle of casts; the last elements are kept."""
    x = page.numpy()
    values = x[..., : x.shape[-1] - kept]
    codes, scales, _ = cast_oracle.quantise(values.reshape(*values.shape[:-1], -1, group), fmt, scale)
    back = cast_oracle.dequantise(codes, scales, fmt, scale, "float32").view("f4").reshape(values.shape)
    return torch.from_numpy(np.concatenate([back, x[..., x.shape[-1] - kept :]], -1))


def wide(kind: Any, **sizes: int) -> Any:
    """A pool of random elements whose groups are whole."""
    made = kind(
        size=SLOTS, page_size=PAGE, dtype=torch.float32, layer_num=5, device="cpu", enable_memory_saver=False, **sizes
    )
    for index, buffer in enumerate(buffers(made)):
        buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(index)))
    return made


@pytest.mark.parametrize(
    ("values", "fmt", "scale", "groups"),
    [("fp8", "float8_e4m3fn", "float32", (64, 128)), ("mxfp8", "float8_e4m3fn", "float8_e8m0fnu", (32, 32)),
     ("nvfp4", "float4_e2m1fn", "float8_e4m3fn", (16, 16))],
)  # fmt: skip
@pytest.mark.parametrize("is_latent", [False, True])
def test_quantised_pages(values: str, fmt: str, scale: str, groups: tuple[int, int], is_latent: bool) -> None:
    """Pages come back by parts of the layers with the values of the oracle; as many fit as quantised bytes say."""
    kept = 32 if is_latent else 0
    sizes = {"kv_lora_rank": 256, "qk_rope_head_dim": kept} if is_latent else {"head_num": 2, "head_dim": 64}
    pool = wide(MLATokenToKVPool if is_latent else MHATokenToKVPool, **sizes)
    group, count = groups[is_latent], 256 if is_latent else 2 * 2 * 64
    token = count // 2 + count // 16 if values == "nvfp4" else count + count // group * (4 if values == "fp8" else 1)
    linker, before = linked(pool, host_values=values, host_bytes=3 * 5 * PAGE * (token + 4 * kept)), snapshot(pool)
    assert linker.pools[PoolName.KV].host.num_blocks == 3
    assert offload(linker, transfer("ab", [5, 2])) and linker.lookup("r", [transfer("ab")]) == [1, 2]
    assert load(linker, transfer("ab", [7, 3]))
    for found, was in zip(buffers(pool), before, strict=True):
        for source, target in ((5, 7), (2, 3)):
            page = was[source * PAGE : (source + 1) * PAGE]
            assert torch.equal(found[target * PAGE : (target + 1) * PAGE], quantised(page, group, fmt, scale, kept))
            assert torch.equal(found[source * PAGE : (source + 1) * PAGE], page)
    spoil(linker, "b")
    assert linker.lookup("s", [transfer("ab")]) == [1]
    linker.close()


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"host_values": "fp9"}, r"linker_extra_config: host_values: expected one of fp8, mxfp8, nvfp4, got 'fp9'"),
        ({"host_values": "fp8", "host_layout": "universal"}, r"linker_extra_config: host_layout: expected none beside host_values"),
        ({"host_values": "nvfp4"}, r"host_values nvfp4: MHATokenToKVPool: expected a multiple of 16 elements .* got 8"),
    ],
)  # fmt: skip
def test_values_that_are_refused(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(kvbm.BindError, match=says):
        linked(mha(), **extra)


def test_sliding_window() -> None:
    """Pages of both kinds; of those of the window the last ones are enough."""
    pool = sliding()
    linker, before = linked(pool, SWA), snapshot(pool)
    assert offload(linker, transfer("abc", [1, 2, 3]), transfer("bc", [4, 5], PoolName.SWA))
    wanted = [transfer("abc"), transfer("c", name=PoolName.SWA)]
    assert linker.lookup("r", wanted) == [2, 3]
    assert load(linker, transfer("abc", [6, 7, 8]), transfer("c", [9], PoolName.SWA))
    kinds = [linker.kinds[name] for name in (PoolName.KV, PoolName.SWA)]  # layers 2 and 4; 0, 1 and 3
    parts = [[len(kind.part(layers)) for kind in kinds] for layers in (range(2), range(2, 4), range(4, 5))]
    assert parts == [[0, 2], [1, 1], [1, 0]] and kinds[0].part(range(4, 5)) == range(1, 2)
    full = 2 * len(pool.full_kv_pool.k_buffer)
    expect(pool, before, {1: 6, 2: 7, 3: 8}, slice(0, full))
    expect(pool, before, {5: 9}, slice(full, None))


def spoil(linker: Any, key: str) -> None:
    pages = linker.pools[PoolName.KV]
    pages.host.arrays[pages._pages[key]].view("u1").reshape(-1)[7] ^= 1


def test_a_flipped_bit_is_a_miss() -> None:
    linker = linked(mha())
    assert offload(linker, transfer("abc", [1, 2, 3]))
    spoil(linker, "b")
    assert linker.lookup("r", [transfer("abc")]) == [1]
    assert offload(linker, transfer("abc", [1, 2, 3]))  # anew
    assert linker.lookup("s", [transfer("abc")]) == [1, 2, 3]
    spoil(linker, "b")  # after the lookup
    assert not load(linker, transfer("abc", [4, 5, 6]), rid="s")
    assert linker.lookup("t", [transfer("abc")]) == [1]


def test_without_a_check_at_lookup() -> None:
    linker = linked(mha(), check_at_lookup=False)
    assert offload(linker, transfer("ab", [1, 2]))
    spoil(linker, "a")
    assert linker.lookup("r", [transfer("ab")]) == [1, 2]
    assert not load(linker, transfer("ab", [4, 5]))
    assert linker.lookup("r", [transfer("ab")]) == []


def test_pages_of_a_batch_that_runs_make_no_room() -> None:
    """Though another batch begins and ends meanwhile: its copy from host memory may still run."""
    linker = linked(mha(), host_bytes=3 * 2 * 5 * 2 * PAGE * 8 * 4)
    assert offload(linker, transfer("abc", [1, 2, 3]))
    assert linker.lookup("r", [transfer("a")]) == [1] and linker.load("r", [transfer("a", [6])])
    first = linker.start_layer_wise_loading()
    assert linker.lookup("s", [transfer("b")]) == [1] and load(linker, transfer("b", [7]), rid="s")
    assert linker.start_layer_wise_loading() == -1
    assert offload(linker, transfer("de", [4, 5]))  # in place of b and c, which were asked for later than a
    assert linker.lookup("t", [transfer("a")]) == [1]
    assert linker.finish_layer_wise_loading(first)
    assert linker.start_layer_wise_loading() == -1  # which lets go what the lookup found
    assert offload(linker, transfer("fgh", [1, 2, 3]))
    assert linker.lookup("t", [transfer("a")]) == []


def test_room() -> None:
    """The page that was not asked for the longest makes room, but none that a lookup found for the next batch."""
    pool = mha()
    linker = linked(pool, host_bytes=3 * 2 * 5 * 2 * PAGE * 8 * 4)
    assert offload(linker, transfer("abc", [1, 2, 3]))
    assert linker.lookup("r", [transfer("a")]) == [1]
    assert linker.start_layer_wise_loading() == -1  # which lets it go, but it was asked for last
    assert offload(linker, transfer("d", [4]))
    assert [key in linker.pools[PoolName.KV] for key in "abcd"] == [True, False, True, True]
    assert linker.lookup("r", [transfer("a")]) == [1]
    assert not offload(linker, transfer("efg", [5, 6, 7]))  # "a" is held
    assert linker.start_layer_wise_loading() == -1
    assert offload(linker, transfer("efg", [5, 6, 7]))
    assert linker.lookup("r", [transfer("a")]) == []
    before = snapshot(pool)
    assert linker.load("r", [transfer("a", [8])]) and not linker.finish_layer_wise_loading(
        linker.start_layer_wise_loading()
    )
    expect(pool, before, {})
    assert (
        linker.load("q", [transfer("e", [8])]) and linker.cancel_queued_load("q") and not linker.cancel_queued_load("q")
    )
    linker.reset()
    assert linker.lookup("r", [transfer("e")]) == [] and offload(linker, transfer("efg", [5, 6, 7]))


REFUSED = {
    "a draft": (mha, FULL, {"mtp_draft_device_pools": (1,)}, {}, "a draft model's cache"),
    "a state": (mha, {ComponentType.FULL, ComponentType.MAMBA}, {}, {}, "expected MHATokenToKVPool"),
    "no window": (sliding, FULL, {}, {}, "expected MHATokenToKVPool"),
    "pages": (mha, FULL, {"page_size": 8}, {}, "expected pages of 8 tokens"),
    "bytes": (mha, FULL, {}, {"host_bytes": 10}, "expected at least"),
    "text": (mha, FULL, {}, {"host_bytes": "1 GB"}, "host_bytes: expected int"),
    "unknown": (mha, FULL, {}, {"host_size": 10}, "host_size"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused(case: str) -> None:
    make, components, more, extra, message = REFUSED[case]
    with pytest.raises(kvbm.BindError, match=message):
        linked(make(), components, more, **extra)


def test_slots_that_are_no_pages() -> None:
    linker = linked(mha())
    with pytest.raises(kvbm.BindError, match="whole pages"):
        linker.offload([PoolTransfer(name=PoolName.KV, keys=["a"], device_indices=torch.arange(2, 2 + PAGE))])


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that lacks nothing is used; one that does is refused by its name."""
    assert list(lacking("SGLang")) == []
    monkeypatch.setattr("sglang.version.__version__", "0.6.0")
    assert integration.KvbmLinker
    monkeypatch.setattr("sglang.version.__version__", "0.6.1")
    monkeypatch.delattr("sglang.srt.mem_cache.hicache_storage.HiCacheStorage.exists")
    with pytest.raises(kvbm.BindError, match=r"before 0.5.24, got 0.6.1, which lacks sglang\S*Storage.exists "):
        integration.KvbmLinker  # noqa: B018


# ---- the storage backend, with SGLang's host pools -----------------------------------------------------------------------

HEADS, LAYERS = 4, 3

#: Where SGLang has an element (`init_kv_buffer`): of keys or values, a layer, a slot and a head.
PLACES: dict[str, Callable[[int, int, int, int], tuple[Any, ...]]] = {
    "layer_first": lambda o, layer, slot, head: (o, layer, slot, head),
    "page_first": lambda o, layer, slot, head: (o, slot, layer, head),
    "page_first_direct": lambda o, layer, slot, head: (o, slot // PAGE, layer, slot % PAGE, head),
    "page_head": lambda o, layer, slot, head: (o, slot // PAGE, head, slot % PAGE, layer),
}
LATENTS: dict[str, Callable[[int, int], tuple[Any, ...]]] = {
    "layer_first": lambda layer, slot: (layer, slot),
    "page_first": lambda layer, slot: (slot, layer),
    "page_first_direct": lambda layer, slot: (slot // PAGE, layer, slot % PAGE),
}


def host_pool(layout: str, heads: int = HEADS) -> Any:
    pool = mha(LAYERS, heads)
    [info] = pool.get_device_pool_infos()
    made = MHATokenToKVPoolHost(
        info.buffer_info,
        1.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=SLOTS,
        start_layer=0,
        end_layer=LAYERS,
    )
    made.kv_buffer.zero_()
    return made


def latent_pool(layout: str) -> Any:
    pool = mla()
    [info] = pool.get_device_pool_infos()
    made = MLATokenToKVPoolHost(
        info.buffer_info, 1.0, 0, PAGE, layout, pin_memory=False, device_capacity_tokens=SLOTS, start_layer=0, end_layer=LAYERS,
        target_layer_num=LAYERS,
    )  # fmt: skip
    made.kv_buffer.zero_()
    return made


@pytest.fixture(autouse=True)
def identity() -> Iterator[dict[str, Any]]:
    """The fields of the engine of a test without one."""
    fields: dict[str, Any] = {"config": {"rope": {"theta": 10000}}, "weights": "sha256:1", "more": {}}
    storage = importlib.import_module("kvbm.integrations.sglang.storage")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "stored_model_of", lambda given: {**fields, **({"weights": f"named {given}"} if given else {})})
        yield fields


def backend(folder: Path, host: Any, rank: int = 0, ranks: int = 1, model: str = "org/model", **extra: Any) -> Any:
    settings = {
        "backend_name": "kvbm", "module_path": "kvbm.integrations.sglang", "class_name": "KvbmStorage", "interface_v1": 1,
        "path": str(folder), **extra,
    }  # fmt: skip
    config = HiCacheStorageConfig(
        tp_rank=rank, tp_size=ranks, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=isinstance(host, MLATokenToKVPoolHost), enable_storage_metrics=False, is_page_first_layout=False,
        model_name=model, extra_config=settings,
    )  # fmt: skip
    made = StorageBackendFactory.create_backend("dynamic", config, host)
    made.register_mem_pool_host(host)
    return made


def write(host: Any, page: int, first_head: int, number: int) -> None:
    """What a page of tokens ``number`` holds, in the heads from `first_head` on."""
    for o, layer, token, head in elements(host.head_num):
        host.kv_buffer[PLACES[host.layout](o, layer, page * PAGE + token, head)] = value(
            o, layer, token, first_head + head, number
        )


def value(o: int, layer: int, token: int, head: int, number: int) -> Any:
    return torch.arange(8) + 8 * (head + HEADS * (token + PAGE * (layer + LAYERS * (o + 2 * number)))) + 1.0


def elements(heads: int) -> Iterator[tuple[int, int, int, int]]:
    return (
        (o, layer, token, head)
        for o in range(2)
        for layer in range(LAYERS)
        for token in range(PAGE)
        for head in range(heads)
    )


def holds(host: Any, page: int, first_head: int, number: int) -> bool:
    return all(
        torch.equal(
            host.kv_buffer[PLACES[host.layout](o, layer, page * PAGE + token, head)],
            value(o, layer, token, first_head + head, number),
        )
        for o, layer, token, head in elements(host.head_num)
    )


@pytest.mark.parametrize("target", PLACES)
@pytest.mark.parametrize("source", PLACES)
def test_stored_by_two_ranks_loaded_by_one(tmp_path: Path, source: str, target: str) -> None:
    hosts = [host_pool(source, HEADS // 2) for _ in range(2)]
    for rank, host in enumerate(hosts):
        for page, number in ((1, 0), (3, 1)):
            write(host, page, rank * HEADS // 2, number)
        store = backend(tmp_path, host, rank, 2)
        assert store.batch_exists(["k0", "k1"]) == 0
        assert store.batch_set_v1(["k0", "k1"], slots([1, 3])) == [True, True]
        assert store.batch_exists(["k0", "k1", "k2"]) == 2 * rank  # a unit is there when all of its heads are
    one = host_pool(target)
    found = backend(tmp_path, one)
    assert found.batch_exists(["k1", "k0"]) == 2
    assert found.batch_get_v1(["k1", "k0", "k2"], slots([4, 2, 0])) == [True, True, False]
    assert holds(one, 4, 0, 1) and holds(one, 2, 0, 0)
    assert not one.kv_buffer[PLACES[target](0, 0, 0, 0)].any()
    assert len(list(tmp_path.rglob("*.safetensors"))) == 4 and found.stats == {"stored": 0, "loaded": 2, "lost": 1}
    store.close()


@pytest.mark.parametrize("layout", LATENTS)
def test_latents(tmp_path: Path, layout: str) -> None:
    """Stored by one rank, in any of the layouts; loaded by all."""
    host = latent_pool("page_first")
    for layer in range(LAYERS):
        for token in range(PAGE):
            host.kv_buffer[LATENTS["page_first"](layer, 2 * PAGE + token)] = 100.0 * layer + token + 1
    assert backend(tmp_path, host, 0, 2).batch_set_v1(["k"], slots([2])) == [True]
    other = latent_pool(layout)
    assert backend(tmp_path, other, 1, 2).batch_get_v1(["k"], slots([1])) == [True]
    for layer in range(LAYERS):
        for token in range(PAGE):
            assert (other.kv_buffer[LATENTS[layout](layer, PAGE + token)] == 100.0 * layer + token + 1).all()


def stored_page(folder: Path, key: str = "k") -> tuple[Any, Path]:
    host = host_pool("page_first")
    write(host, 1, 0, 0)
    store = backend(folder, host)
    assert store.batch_set_v1([key], slots([1])) == [True]
    [path] = folder.rglob("*.safetensors")
    return store, path


def others(store: Any, path: Path) -> list[str]:
    """What else is in the folder of a content."""
    found = [one for one in store.folder.root.rglob("*") if one.is_file() and one != path]
    return [one.name for one in found]


def test_a_page_has_the_key_of_its_unit(tmp_path: Path) -> None:
    """SGLang's own chain is that of the rule, with a salt and without."""
    from sglang.srt.mem_cache.utils import storage_namespace_seed

    tokens = list(range(50, 50 + 3 * PAGE))
    for salt in ("", "é"):
        seed = storage_namespace_seed(None, salt or None)
        keys, last = [], bytes.fromhex(seed) if seed else b""
        for at in range(3):
            page = b"".join(token.to_bytes(4, "little") for token in tokens[at * PAGE : (at + 1) * PAGE])
            last = hashlib.sha256(last + page).digest()
            keys.append(last.hex())
        assert tuple(keys) == Chain(PAGE, tokens, salt).keys(0, 3 * PAGE)
    store, path = stored_page(tmp_path, keys[0])
    assert path.parent.name == keys[0] and path.parent.parent.name == keys[0][:2]
    assert store.exists(keys[0]) and not store.exists(keys[1])


def test_a_wrong_file_is_a_miss(tmp_path: Path) -> None:
    """A byte that was flipped, a file that is cut off, one that is none: a miss each, and stored anew."""
    store, path = stored_page(tmp_path)
    content = path.read_bytes()
    assert store.batch_get_v1(["k"], slots([2])) == [True]
    flipped = bytearray(content)
    flipped[-5] ^= 1
    for count, wrong in enumerate((bytes(flipped), content[:-100], content[:100], b"")):
        path.write_bytes(wrong)
        assert store.batch_exists(["k"]) == 1
        assert store.batch_get_v1(["k"], slots([2])) == [False]
        assert store.stats["lost"] == count + 1 and store.batch_exists(["k"]) == 0
        assert store.batch_set_v1(["k"], slots([1])) == [True] and path.exists()
        assert store.batch_get_v1(["k"], slots([2])) == [True] and holds(store.mem_pool_host, 2, 0, 0)
    assert others(store, path) == ["content.json"]  # nothing temporary stays
    store.clear()
    assert not store.exists("k")


def test_a_file_of_another_page_is_a_miss(tmp_path: Path) -> None:
    """A whole file with right digests, under a name that is not its own."""
    host = host_pool("page_first")
    store = backend(tmp_path, host)
    for page in range(2):
        write(host, page, 0, page)
    assert store.batch_set_v1(["a", "b"], slots([0, 1])) == [True] * 2
    first, second = sorted(tmp_path.rglob("*.safetensors"))
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    assert sorted(store.batch_get_v1(["a", "b"], slots([2, 3]))) == [False, True]
    assert not first.exists()
    first.write_bytes(kept)
    assert store.batch_get_v1(["a", "b"], slots([2, 3])) == [True, True] and holds(host, 2, 0, 0)


def test_names_and_files_that_a_disk_refuses(tmp_path: Path) -> None:
    """No error that ends the thread of SGLang's that asks: a miss, and a page that is not stored."""
    store, path = stored_page(tmp_path)
    for key in ("é" * 128, "\ud800", "../../x", "a" * 300, "", ".", "A" * 64):
        assert store.batch_get_v1([key], slots([2])) == [False] and not store.exists(key)
        assert store.batch_set_v1([key], slots([1])) == [True] and store.batch_get_v1([key], slots([2])) == [True]
    assert {one.parents[2] for one in tmp_path.rglob("*.safetensors")} == {store.folder.root}
    path.unlink()
    path.mkdir()
    assert store.batch_get_v1(["k"], slots([2])) == [False]
    path.rmdir()
    store.folder.root.rename(tmp_path / "away")
    store.folder.root.write_text("a file in place of the folder")
    assert store.batch_get_v1(["k"], slots([2])) == [False] and store.batch_set_v1(["k"], slots([1])) == [False]


def test_a_file_that_cannot_be_read_now_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many open files, or a backend that was closed while SGLang's thread still reads: a miss, and nothing is removed."""
    store, path = stored_page(tmp_path)

    def refuse(_: Path) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(sys.modules["kvbm.store.folder"], "Opened", refuse)
    assert store.batch_get_v1(["k"], slots([2])) == [False] and path.exists()
    monkeypatch.undo()
    assert store.batch_get_v1(["k"], slots([2])) == [True]
    store.close()
    assert store.batch_get_v1(["k"], slots([2])) == [False] and path.exists()
    assert store.batch_set_v1(["new"], slots([2])) == [False]


def test_slots_of_host_pages_that_are_none(tmp_path: Path) -> None:
    """Tokens of several pages, or before the first one: nothing is stored or loaded."""
    store, path = stored_page(tmp_path)
    for wrong in ([4, 9, 6, 7], [4, 5, 6, 11], [-4, -3, -2, -1], [7, 6, 5, 4], [5, 6, 7, 8]):
        for call in (store.batch_set_v1, store.batch_get_v1):
            with pytest.raises(kvbm.BindError, match="expected the slots of 1 pages of 4 tokens"):
                call(["other"], torch.tensor(wrong))
    assert others(store, path) == ["content.json"]


def test_what_shares_and_what_does_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The name of the model and the layout of host memory do not count; the operator's name of weights, and the heads do."""
    store, _ = stored_page(tmp_path)
    host = store.mem_pool_host
    for same in (backend(tmp_path, host), backend(tmp_path, host, model="x"), backend(tmp_path, host_pool("layer_first"))):
        assert same.exists("k") and not same.exists("other")
    for other in (backend(tmp_path, host, model_id="weights of today"), backend(tmp_path, host, 1, 2)):
        assert not other.exists("k")
    with caplog.at_level("WARNING"):
        assert backend(tmp_path, host, heads_per_file=2, file_layout="nhd").exists("k")
    assert "file_layout: it is not needed any more: all engines write one layout into a shared folder" in caplog.text
    assert "heads_per_file: it is not needed any more" in caplog.text


def test_pages_of_other_weights_or_another_configuration_are_misses(
    tmp_path: Path, identity: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Under one name of the model.  The log says which field differs; a file that is copied there is a miss."""
    store, path = stored_page(tmp_path)
    host = store.mem_pool_host
    for field, value, said in (
        ("weights", "sha256:2", "model.weights: 'sha256:2' here and 'sha256:1' on the other side"),
        ("config", {"rope": {"theta": 500000}}, "model.config.rope.theta: '500000' here and '10000' on the other side"),
    ):
        kept, identity[field] = identity[field], value
        caplog.clear()
        with caplog.at_level("WARNING"):
            other = backend(tmp_path, host)
        assert said in caplog.text and other.folder.root != store.folder.root and not other.exists("k")
        copied = other.folder.root / path.relative_to(store.folder.root)
        copied.parent.mkdir(parents=True)
        copied.write_bytes(path.read_bytes())
        assert other.batch_get_v1(["k"], slots([2])) == [False] and not copied.exists() and path.exists()
        identity[field] = kept
    with caplog.at_level("WARNING"):
        caplog.clear()
        assert backend(tmp_path, host_pool("layer_first")).exists("k")


def test_a_limit_of_the_folder(tmp_path: Path) -> None:
    host = host_pool("page_first")
    store = backend(tmp_path, host, folder_bytes=30_000)
    for page in range(9):
        write(host, page, 0, page)
        assert store.batch_set_v1([f"k{page}"], slots([page])) == [True]
    held = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert 0 < held <= 30_000 and store.exists("k8") and not store.exists("k0")


def arguments(model: Path, **more: Any) -> Any:
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(
        **{"model_path": str(model), "device": "cpu", "skip_tokenizer_init": True, "dtype": "float32", **more}
    )


def test_fields_of_an_engine(models: Callable[[str], Path], tmp_path: Path) -> None:
    """What SGLang itself makes of its arguments: each that changes K and V is named, and no other."""
    from kvbm.integrations.sglang.identity import stored_model_of
    from kvbm.link.model import differences, named

    model, adapter = tmp_path / "model", tmp_path / "adapter"
    shutil.copytree(models("llama"), model)
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"one")
    lora = {"enable_lora": True, "lora_paths": [f"a={adapter}"]}

    def told(given: str = "", **more: Any) -> dict[str, str]:
        return named(stored_model_of(given, arguments(model, **more)))

    usual, adapted = told(), told(**lora)
    assert usual["weights"].startswith("sha256:") and stored_model_of("", arguments(model))["more"] == {}
    theta = json.dumps({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    for more, field in (
        ({"json_model_override_args": theta}, "rope..rope_theta: '10000' here and '500000'"),
        ({"json_model_override_args": json.dumps({"rms_norm_eps": 0.5})}, "overrides.rms_norm_eps: nothing here and '[0.5, 0.5]'"),
        ({"dtype": "bfloat16"}, "dtype: 'float32' here and 'bfloat16'"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "more.kv_cache_dtype: nothing here and 'fp8_e5m2'"),
        ({"weight_version": "7"}, "more.weight_version: nothing here and '7'"),
        (lora, "more.adapters.a: nothing here and"),
    ):
        assert field in differences(usual, told(**more)), more
    for more in ({"context_length": 99}, {"page_size": 64}, {"random_seed": 7}, {"mem_fraction_static": 0.1}):
        assert not differences(usual, told(**more)), more
    (adapter / "adapter_model.safetensors").write_bytes(b"two")
    assert differences(adapted, told(**lora)).startswith("more.adapters.a: ")
    [weights] = model.glob("*.safetensors")
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert differences(usual, told()).startswith("weights: 'sha256:")
    assert not differences(told("mine"), told("mine")) and "weights" in differences(told("mine"), told("yours"))
    with pytest.raises(kvbm.BindError, match=r"load_format: dummy weights have no files .* expected model_id in"):
        told(load_format="dummy")


def test_storage_refuses(tmp_path: Path) -> None:
    host = host_pool("page_first")
    for extra, message in (
        ({"interface_v1": 0}, "interface_v1"),
        ({"unit_tokens": 16}, r"unit_tokens: expected the 4 tokens of a page .* got 16; set --page-size 16, or .*: 4"),
        ({"folder_bytes": "1 GB"}, "folder_bytes: expected a number from 1 on, got '1 GB'"),
        ({"path": None}, "path: expected a text"),
    ):
        with pytest.raises(kvbm.BindError, match=message):
            backend(tmp_path, host, **extra)
    host.layout = "page_unified"
    with pytest.raises(kvbm.BindError, match="expected --hicache-mem-layout layer_first, page_first"):
        backend(tmp_path, host)
    store = backend(tmp_path, host_pool("page_first"))
    for refused in (
        lambda: store.batch_get(["k"]),
        lambda: store.batch_get_v1(["k"], torch.arange(1, 1 + PAGE)),
        lambda: store.register_mem_host_pool_v2(None, PoolName.INDEXER),
    ):
        with pytest.raises(kvbm.BindError):
            refused()
