"""Blocks that vLLM's offloading quantises on the way to host memory and files: with the engine itself, and its specs of layers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_vllm_offload import STEPS
from test_vllm_offload import offload as offloaded
from test_vllm_tier import caches, config, index
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from conftest import apart, has_avx512, result, run
from kvbm import BindError
from kvbm.integrations.host_values import HostValues
from kvbm.integrations.vllm import offload
from kvbm.integrations.vllm.block_shapes import host_bytes

Models = Callable[[str], Path]

#: Prompts of 24 whole blocks each, together 96: more than the host memory has room for, and fewer than quantised ones.
LENGTHS, WHOLE = [770, 780, 785, 795], 768
HOST = 8 << 20


def generated(model: Path, extra: dict[str, Any], runs: Any = (LENGTHS, LENGTHS), **llm: Any) -> tuple[list[Any], str]:
    """What a new process of vLLM generates for the prompts, run after run with a reset between, and its log."""
    transfer = {
        "kv_connector": "KvbmOffloadingConnector", "kv_connector_module_path": "kvbm.integrations.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": HOST, **extra},
    }  # fmt: skip
    arguments = {"model": str(model), "dtype": "bfloat16", "kv_transfer_config": transfer, **llm}
    printed = run("generate", json.dumps({"llm": arguments, "runs": runs, "new": 4, "likely": 20}))
    print(*[line for line in printed.splitlines() if "kvbm: " in line], sep="\n")
    return result(printed), printed


def cached(found: list[dict[str, Any]]) -> list[int]:
    return [one["cached"] for one in found]


def test_twice_the_blocks_come_back_nearly_the_same(models: Models, tmp_path: Path) -> None:
    """And from files, in an engine with other blocks; an engine without the setting shares nothing with them.

    The bound is vLLM's own fp8 cache on the same prompts: it has the same elements with one scale for all, so its error is larger,
    in the mean and at most.
    """
    model, folder = models("llama"), {"folder": str(tmp_path), "folder_bytes": 1 << 30}
    plain, log = generated(model, {})
    assert "kvbm: 64 blocks" in log

    first, log = generated(model, {"host_values": "fp8", **folder})
    said = "host_values fp8: fp8 e4m3, one float32 per token and head, from bfloat16; blocks of 69632 bytes in host memory"
    assert f"{said} (131072 in the engine): 120 blocks" in log and "kvbm: 120 blocks" in log
    assert cached(first[0]) == [0] * 4 and apart(first[0], plain[0]).most == 0
    assert cached(first[1]) == [WHOLE] * 4  # without the setting there is no room for all of them
    assert sum(cached(plain[1])) < 3 * WHOLE
    alike = [at for at, tokens in enumerate(cached(plain[1])) if tokens in (0, WHOLE)]  # vLLM 0.33 evicts the end of a prompt first
    lost = apart(first[1], plain[0])
    # What vLLM computes again is the same bits with AVX-512 only: without it, a product depends on what else is in the step.
    noise = apart([plain[1][at] for at in alike], [plain[0][at] for at in alike])
    assert len(alike) >= 3 and (noise.most == 0 or not has_avx512()) and noise.mean < lost.mean / 10
    if has_avx512():
        own, _ = generated(model, {}, [LENGTHS], kv_cache_dtype="fp8")
        theirs = apart(own[0], plain[0])
        print("errors", lost, theirs)
        assert lost.mean < theirs.mean and lost.most < theirs.most

    # With AMX, vLLM's attention ends the process (SIGILL) if its first step computes few tokens: a prompt of its own comes before.
    second, _ = generated(model, {"host_values": "fp8", **folder}, [[300], LENGTHS], block_size=64)
    assert cached(second[1]) == [WHOLE] * 4
    other = apart(second[1], first[1])
    print("other blocks", other)
    assert other.mean < lost.mean / 2 and other.most < lost.most / 2  # the same bits of K and V

    third, log = generated(model, folder, [LENGTHS])
    assert cached(third[0]) == [0] * 4 and apart(third[0], plain[0]).most == 0
    assert re.search(r"blocks beside these are not used: \w+: .*values: .*fp8 e4m3", log)
    assert len([one for one in tmp_path.iterdir() if one.is_dir()]) == 2


@pytest.mark.long
@pytest.mark.skipif(not has_avx512(), reason="no AVX-512")
def test_files_of_a_cache_that_is_quantised_already(models: Models, tmp_path: Path) -> None:
    """VLLM's own fp8 cache: an engine with other blocks continues with the same bits; one with another cache shares nothing."""
    model, folder = models("llama"), {"folder": str(tmp_path), "folder_bytes": 1 << 30}
    first, _ = generated(model, folder, [LENGTHS], kv_cache_dtype="fp8")
    again, _ = generated(model, folder, [[300], LENGTHS], kv_cache_dtype="fp8", block_size=64)
    assert cached(first[0]) == [0] * 4 and cached(again[1]) == [WHOLE] * 4
    plain, log = generated(model, folder, [LENGTHS])
    assert cached(plain[0]) == [0] * 4 and re.search(r"blocks beside these are not used: \w+: .*float8_e4m3fn", log)
    same, fp8 = apart(again[1], first[0]), apart(plain[0], first[0])
    print("errors", same, fp8)
    assert same.mean < fp8.mean / 2 and same.most < fp8.most / 2
    assert [one["tokens"] for one in again[1]] == [one["tokens"] for one in first[0]]


#: Model, ``kv_connector_extra_config``, arguments of the engine; bytes of a block of a rank; cached tokens of whole chunks.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], int, list[int]]] = {
    "llama": ("llama", {"host_values": "nvfp4"}, {}, 4 * 2 * 4 * 32 * 36, [192, 96]),
    "llama, bfloat16, blocks of 64, two a chunk, tp 2": (
        "llama", {"host_values": "mxfp8", "blocks_per_chunk": 2},
        {"dtype": "bfloat16", "block_size": 64, "tensor_parallel_size": 2}, 4 * 2 * 2 * 64 * 66, [128, 0],
    ),
    "sliding window, three groups": ("sliding", {"host_values": "fp8"}, {}, 2 * 2 * 2 * 32 * 68, [192, 96]),
    "MLA, one copy of both ranks": (
        "mla", {"host_values": "nvfp4", "without_prefix_caching": True},
        {"tensor_parallel_size": 2, "attention_config": {"backend": "CPU_MLA"}, "block_size": 16},
        3 * 16 * (256 + 32 + 256), [192, 96],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [name if name == "llama" else pytest.param(name, marks=pytest.mark.long) for name in CASES])
def test_reload(models: Models, case: str) -> None:
    """As many tokens come back as without the setting; what is counted are quantised bytes; changed bits are a miss."""
    name, extra, llm, nbytes, whole = CASES[case]
    found = offloaded(models(name), STEPS[:8], extra, settings={"overhead": False}, **llm)
    print(case, found["facts"], found["counters"])
    first, second, flipped, last = ([one["cached"] for one in each] for each in found["runs"])
    assert (first, second, last) == ([0, 0], whole, whole) and flipped[0] < whole[0]
    counters, writers = found["counters"], 1 if name == "mla" else len(found["facts"])
    assert counters["vllm:kvbm_offload_failed_blocks"] >= 1
    stored, loaded = (counters[f"vllm:kvbm_offload_{what}_blocks"] for what in ("stored", "loaded"))
    assert loaded > stored / writers > 0
    assert counters["vllm:kvbm_offload_stored_bytes"] == stored * nbytes == counters["vllm:kv_offload_store_bytes"]
    assert counters["vllm:kvbm_offload_loaded_bytes"] == loaded * nbytes
    assert all(facts["shared"] == (name == "mla") for facts in found["facts"])


@pytest.mark.skipif(not has_avx512(), reason="no AVX-512: vLLM 0.33 refuses it itself")
def test_a_cache_that_is_quantised_already(models: Models) -> None:
    """The engine does not start, and says why."""
    with pytest.raises(AssertionError, match=r"BindError: host_values: layer .*quantised ones are not quantised .*leave"):
        generated(models("llama"), {"host_values": "fp8"}, kv_cache_dtype="fp8")


# ---- without an engine -----------------------------------------------------------------------------------------------

FULL: dict[str, Any] = {"block_size": 32, "num_kv_heads": 4, "head_size": 64, "dtype": torch.bfloat16}


def held(*specs: Any, parts: tuple[int, ...] = ()) -> Any:
    """What of vLLM's configuration of the cache is read: groups of two layers, in one part each or as many as told."""
    made = caches(*specs)
    names = [name for group in made.kv_cache_groups for name in group.layer_names]
    sizes = parts or (2,) * len(specs)
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    made.kv_cache_tensors = [
        SimpleNamespace(layers=names[at : at + size]) for at, size in zip(starts, sizes, strict=True)
    ]
    return made


def test_bytes_of_blocks() -> None:
    """The largest group counts; layers in two parts of the cache are two pools, each from a multiple of 256 bytes on."""
    small, window = FullAttentionSpec(**{**FULL, "block_size": 16}), SlidingWindowSpec(**FULL, sliding_window=64)
    size = 2 * 2 * 4 * 32 * 68
    assert host_bytes(held(FullAttentionSpec(**FULL)), HostValues("fp8")) == size == 256 * 136
    assert host_bytes(held(small, window), HostValues("fp8")) == size
    odd = FullAttentionSpec(**{**FULL, "num_kv_heads": 1, "block_size": 2})  # a layer: 2 × 2 × 68 = 272
    assert host_bytes(held(odd), HostValues("fp8")) == 768 and host_bytes(held(odd, parts=(1, 1)), HostValues("fp8")) == 1024
    latent = MLAAttentionSpec(**{**FULL, "num_kv_heads": 1, "head_size": 576})
    assert host_bytes(held(latent), HostValues("fp8", 64)) == 2 * 32 * (512 + 16 + 128)
    uniform = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=dict.fromkeys("ab", FullAttentionSpec(**FULL)))
    assert host_bytes(held(uniform), HostValues("fp8")) == size


MAMBA = MambaSpec(block_size=32, shapes=((2, 2),), dtypes=(torch.float32,))
REFUSED = {
    "state": ([FullAttentionSpec(**FULL), MAMBA], r"layers\.2.*got MambaSpec; it is not quantised on the way"),
    "quantised": (
        [FullAttentionSpec(**{**FULL, "dtype": torch.uint8}, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)],
        r"layers\.0.*kv_cache_dtype: expected elements as the model has them",
    ),
    "V": ([FullAttentionSpec(**FULL, head_size_v=32)], "K and V of one size"),
    "heads": ([FullAttentionSpec(**{**FULL, "head_size": 72})], "multiple of 32 elements .* got 72"),
    "latent": ([MLAAttentionSpec(**{**FULL, "num_kv_heads": 1, "head_size": 576})], "no qk_rope_head_dim"),
    "sizes": (
        [UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={
            "a": FullAttentionSpec(**FULL), "b": FullAttentionSpec(**{**FULL, "head_size": 128})})],
        "expected layers of one size in a group, got 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_groups_that_are_refused(case: str) -> None:
    """By the name of a layer, and with what to do."""
    specs, says = REFUSED[case]
    with pytest.raises(BindError, match=rf"^host_values.*{says}.*leave host_values out"):
        host_bytes(held(*specs), HostValues("mxfp8"))


def test_the_spec_alone_is_refused() -> None:
    """With vLLM's own connector it is not told the sizes of heads."""
    given = SimpleNamespace(extra_config={"cpu_bytes_to_use": 1, "host_values": "fp8"})
    with pytest.raises(BindError, match=r'host_values: expected kv_connector "KvbmOffloadingConnector"'):
        offload.KvbmOffloadingSpec(given)


def test_keys_of_files(tmp_path: Path) -> None:
    """Values are part of the key of a folder, and its description names them; without the setting they are the model's."""
    of = config(model={"dtype": torch.bfloat16})
    groups = caches(FullAttentionSpec(**FULL))
    chunks = {0: 32}

    def made(values: HostValues | None) -> Any:
        from kvbm.integrations.vllm.tiered import Settings, TierIndex

        return TierIndex(of, groups, Settings(tmp_path, 1 << 30, model_key="tiny"), chunks, values)

    found = [made(values)._contents[0] for values in (None, *map(HostValues, ("fp8", "mxfp8", "nvfp4")))]
    assert len({one.key for one in found}) == 4 and len({one.model for one in found}) == 1
    assert found[0] == index(tmp_path, of, groups)._contents[0]
    told = json.loads((tmp_path / found[1].key / "content.json").read_text())
    assert told["content"]["values"] == "fp8 e4m3, one float32 per token and head, from bfloat16"
    plain = json.loads((tmp_path / found[0].key / "content.json").read_text())
    assert plain["content"]["values"] == "bfloat16"
