"""Files behind vLLM's host memory: with the engine itself, one process after the other, and piece by piece."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_vllm_disaggregated import MOST, compared
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import LookupResult, ReqContext, TierFilter, make_offload_key
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from conftest import result, run
from kvbm import BindError, Pool, load
from kvbm.integrations.vllm import tiered
from kvbm.integrations.vllm.offload import KvbmOffloadingManager
from kvbm.integrations.vllm.tiered import Search, Settings, Tiered, TierIndex, TierWorker, Units
from kvbm.store.folder import Folder
from kvbm.store.keys import Chain
from kvbm.store.shelf import Shelf

Models = Callable[[str], Path]

#: Prompts of 200 and 100 tokens, and again from the host memory, after a reset.
RUNS = [[200, 100], [200, 100]]


def generated(
    model: Path, folder: Path | None, *, tp: int = 1, nt: int = 32, **extra: Any
) -> list[list[dict[str, Any]]]:
    """What a new process of vLLM generates."""
    transfer = {
        "kv_connector": "KvbmOffloadingConnector", "kv_connector_module_path": "kvbm.integrations.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": 64 << 20, "folder": str(folder), "folder_bytes": 1 << 30, **extra,
        },
    }  # fmt: skip
    llm: dict[str, Any] = {"model": str(model), "block_size": nt, "tensor_parallel_size": tp}
    if folder is not None:
        llm["kv_transfer_config"] = transfer
    settings = {"llm": llm, "runs": RUNS if folder else RUNS[:1], "new": 8}
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"} if tp > 1 else {}
    printed = run("generate", json.dumps(settings), **variables)
    print(*[line for line in printed.splitlines() if "kvbm: " in line], sep="\n")
    found: list[list[dict[str, Any]]] = result(printed)
    return found


@cache
def untouched(model: Path) -> list[dict[str, Any]]:
    """What vLLM itself generates."""
    return generated(model, None)[0]


def cached(run: list[dict[str, Any]]) -> list[int]:
    return [one["cached"] for one in run]


def same(found: list[dict[str, Any]], model: Path, most: float = MOST) -> bool:
    """Whether the tokens are those of vLLM itself, and the likelihoods nearly."""
    for one, other in zip(found, untouched(model), strict=True):
        if compared(one) != compared(other):
            return False
        for ours, theirs in zip(one["logprobs"], other["logprobs"], strict=True):
            assert ours == pytest.approx(theirs, abs=most)
    return True


def damage(folder: Path, keep: Path) -> None:
    """A copy of a folder with a bit of each byte of one head's K and V set, in the first unit of each sequence."""
    shutil.copytree(folder, keep)
    for file in keep.rglob("heads-0-*.safetensors"):
        data = bytearray(file.read_bytes())
        data[4096 : 4096 + (len(data) - 4096) // 2] = bytes(
            byte | 64 for byte in data[4096 : 4096 + (len(data) - 4096) // 2]
        )
        file.write_bytes(data)


def test_other_tp_and_block_size(models: Models, tmp_path: Path) -> None:
    """Stored by two ranks with blocks of 32, loaded by one with blocks of 64, in another host layout; and what must be a miss."""
    model, folder = models("llama"), tmp_path / "folder"
    first = generated(model, folder, tp=2)
    assert [cached(one) for one in first] == [[0, 0], [192, 96]] and all(same(one, model) for one in first)
    files = {file: file.stat().st_ino for file in folder.rglob("*.safetensors")}
    assert {file.name for file in files} == {"heads-0-1.safetensors", "heads-2-3.safetensors"}
    damage(folder, tmp_path / "damaged")
    shutil.copytree(tmp_path / "damaged", tmp_path / "unchecked")

    second = generated(model, folder, nt=64, host_layout="operational_nhd")
    assert [cached(one) for one in second] == [[192, 64], [192, 64]] and all(same(one, model) for one in second)
    assert files.items() <= {file: file.stat().st_ino for file in folder.rglob("*.safetensors")}.items()

    flipped = generated(model, tmp_path / "damaged", nt=64)
    assert cached(flipped[0])[0] < 192 and all(same(one, model) for one in flipped)
    unchecked = generated(model, tmp_path / "unchecked", nt=64, verify=False)
    assert cached(unchecked[0]) == [192, 64] and not same(unchecked[0], model)

    other = tmp_path / "llama"  # of the same name, the same configuration, and other weights
    run("models", "llama", str(other), "1")
    strange = generated(other, folder, nt=64)
    assert cached(strange[0]) == [0, 0] and all(same(one, other) for one in strange)
    assert len([one for one in folder.iterdir() if one.is_dir()]) == 2


#: Model → the engine that stores and the one that loads; cached tokens of it; how near likelihoods are: those of a latent differ by
#: 2e-3 on the CPU in vLLM itself, as prompts are put together.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[int], float]] = {
    "llama": ({"nt": 64}, {"tp": 2, "nt": 32, "blocks_per_chunk": 2}, [192, 64], MOST),
    "llama, units of two blocks": (
        {"nt": 32, "unit_tokens": 64, "blocks_per_chunk": 4}, {"tp": 2, "nt": 64, "unit_tokens": 64}, [128, 0], MOST,
    ),
    "mla": (
        {"nt": 64, "without_prefix_caching": True}, {"tp": 2, "nt": 32, "without_prefix_caching": True}, [192, 96], 1e-2,
    ),
    "sliding": ({"nt": 32}, {"nt": 64}, [192, 0], MOST),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_stored_by_one_rank(models: Models, tmp_path: Path, name: str) -> None:
    """Loaded by two ranks with smaller blocks; a latent, which ranks hold alike; three groups of layers, two with a window."""
    model, (writes, reads, whole, most) = models(name.split(",")[0]), CASES[name]
    assert cached(generated(model, tmp_path, **writes)[0]) == [0, 0]
    second = generated(model, tmp_path, **reads)
    assert cached(second[0]) == whole and all(same(one, model, most) for one in second)


# ---- without an engine -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"folder": "here", "folder_bytes": 1}, r"folder: expected an absolute path, got 'here'"),
        ({"folder": 7, "folder_bytes": 1}, r"folder: expected an absolute path, got 7"),
        ({"folder": "/here"}, r"folder_bytes: expected with folder, the most bytes of all its files, got none"),
        ({"folder": "/here", "folder_bytes": 0}, r"folder_bytes: expected a number from 1 on, got 0"),
        ({"folder": "/here", "folder_bytes": 1, "unit_tokens": "16"}, r"unit_tokens: expected a number from 1 on, got '16'"),
        ({"folder": "/here", "folder_bytes": 1, "model_key": 3}, r"model_key: expected a text, got 3"),
        ({"folder_bytes": 1}, r"folder_bytes: expected it only with folder"),
    ],
)  # fmt: skip
def test_settings_that_are_refused(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(BindError, match=says):
        Settings.of(extra)


FULL: dict[str, Any] = {"block_size": 32, "num_kv_heads": 4, "head_size": 64, "dtype": torch.float32}


def config(**changes: Any) -> Any:
    """What of vLLM's configuration is read, with something changed."""
    parallel = {"pipeline_parallel_size": 1, "prefill_context_parallel_size": 1, "decode_context_parallel_size": 1}
    model = {
        "model": "org/tiny", "hf_config": SimpleNamespace(to_dict=lambda: {"layers": 2}), "dtype": torch.float32,
        "quantization": None, "disable_sliding_window": False, "revision": None, "get_total_num_kv_heads": lambda: 4,
    }  # fmt: skip
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{**parallel, **changes.pop("parallel", {})}),
        model_config=SimpleNamespace(**{**model, **changes.pop("model", {})}),
        **{"speculative_config": None, "load_config": SimpleNamespace(load_format="auto"), **changes},
    )


def caches(*specs: Any) -> Any:
    held = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=[f"model.layers.{2 * index + one}.attn" for one in range(2)])
        for index, spec in enumerate(specs or [FullAttentionSpec(**FULL)])
    ]
    return SimpleNamespace(kv_cache_groups=held)


def index(folder: Path, vllm_config: Any = None, kv_cache_config: Any = None, **settings: Any) -> TierIndex:
    held = kv_cache_config or caches()
    chosen = {"model_key": "tiny", **settings}
    chunks = {group: one.kv_cache_spec.block_size for group, one in enumerate(held.kv_cache_groups)}
    return TierIndex(vllm_config or config(), held, Settings(folder, 1 << 30, **chosen), chunks)


MAMBA = MambaSpec(block_size=32, shapes=((2, 2),), dtypes=(torch.float32,))
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "stages": ({"vllm_config": config(parallel={"pipeline_parallel_size": 2})}, r"pipeline_parallel_size: expected 1, got 2"),
    "context": (
        {"vllm_config": config(parallel={"decode_context_parallel_size": 4})}, r"decode_context_parallel_size: expected 1, got 4",
    ),
    "draft": ({"vllm_config": config(speculative_config=1)}, r"speculative_config: expected none"),
    "state": ({"kv_cache_config": caches(FullAttentionSpec(**FULL), MAMBA)}, r"layers\.2.*got MambaSpec; it is not stored"),
    "V": ({"kv_cache_config": caches(FullAttentionSpec(**FULL, head_size_v=32))}, r"K and V of one size"),
    "heads": (
        {"vllm_config": config(
            parallel={"tensor_parallel_size": 8},
            model={"hf_text_config": SimpleNamespace(num_key_value_heads=4, swa_num_key_value_heads=8)},
        ), "kv_cache_config": caches(FullAttentionSpec(**{**FULL, "num_kv_heads": 1}))},
        r"layers\.0.*gives each rank of tp8 one head, got several.*less tensor parallelism",
    ),
    "units": ({"unit_tokens": 24}, r"unit_tokens: expected a number that divides the blocks of 32 tokens, got 24$"),
    "large units": ({"unit_tokens": 64}, r'unit_tokens: .*, got 64; for units of several blocks set "blocks_per_chunk": 2'),
    "dummy": (
        {"model_key": "", "vllm_config": config(load_config=SimpleNamespace(load_format="dummy"))},
        r"dummy weights have no files .*; expected model_key in kv_connector_extra_config",
    ),
    "no files": ({"model_key": ""}, r"the weights of 'org/tiny' are not found here .*; expected model_key"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """By name, and before anything is stored."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    options, says = REFUSED[case]
    with pytest.raises(BindError, match=says):
        index(tmp_path / "folder", **options)
    assert not (tmp_path / "folder").exists()


def test_quantised_caches(tmp_path: Path) -> None:
    """Those with a scale for each layer are stored: whose scales they are is part of the model.  Others are refused by name."""
    from vllm.v1.kv_cache_interface import KVQuantMode

    def made(mode: str, cache_dtype: str) -> TierIndex:
        quantised = FullAttentionSpec(**{**FULL, "dtype": torch.uint8}, kv_quant_mode=KVQuantMode[mode])
        return index(tmp_path, config(cache_config=SimpleNamespace(cache_dtype=cache_dtype)), caches(quantised))

    [one], [other] = (made("FP8_PER_TENSOR", name)._contents for name in ("fp8", "fp8_e5m2"))
    assert (one.shape.dtype, other.shape.dtype) == ("float8_e4m3fn", "float8_e5m2")
    plain = index(tmp_path)._contents[0]
    assert len({plain.key, one.key, other.key}) == 3 and one.model == other.model != plain.model
    for mode, cache_dtype in (("FP8_PER_TENSOR", "fp8_inc"), ("INT8_PER_TOKEN_HEAD", "int8_per_token_head")):
        with pytest.raises(BindError, match=rf"kv_cache_dtype: .* got {mode}; other quantised ones are not stored in files"):
            made(mode, cache_dtype)

    folder, blocks, names = Folder(tmp_path, one, 1 << 30), np.array([2, 0]), [f"{n:064x}" for n in range(4)]
    folder.make({})
    with Pool.allocate(load("universal"), replace(one.shape, nt=32), 3) as host:
        held = [array.view(np.uint8) for array in host.arrays]
        for array in held:
            array[...] = np.random.default_rng(array.size).integers(0, 256, array.shape)  # NaN among them
        before, shelf = [array.copy() for array in held], Shelf(one, host, range(4))
        written = shelf.write(folder, blocks, host.digest(blocks), names, [0, 16, 32, 48])
        for array in held:
            array[...] = 0
        read = shelf.read(folder, blocks, names, [0, 16, 32, 48])
        assert written.good.all() and read.good.all()
        assert [np.array_equal(*pair) for pair in zip(held, before, strict=True)] == [True, False, True]
        shelf.close()


def test_contents(tmp_path: Path) -> None:
    """Groups have folders of their own; the configuration and the name that the operator gives tell models apart."""
    window = SlidingWindowSpec(**FULL, sliding_window=64)
    latent = MLAAttentionSpec(**{**FULL, "num_kv_heads": 1, "head_size": 576})
    made = index(tmp_path, kv_cache_config=caches(FullAttentionSpec(**FULL), window, latent))
    shapes = [content.shape for content in made._contents]
    assert [(shape.nl, shape.no, shape.nh, shape.nt, shape.hd) for shape in shapes] == [(2, 2, 4, 16, 64)] * 2 + [
        (2, 1, 1, 16, 576)
    ]
    assert [content.layers for content in made._contents] == [(0, 1), (2, 3), (4, 5)]
    others = [
        config(model={"dtype": torch.bfloat16}), config(model={"quantization": "fp8"}),
        config(model={"disable_sliding_window": True}), config(model={"hf_config": SimpleNamespace(to_dict=lambda: {"layers": 3})}),
    ]  # fmt: skip
    keys = {index(tmp_path, one)._contents[0].key for one in [config(), *others]}
    assert len(keys) == 5 and index(tmp_path, model_key="x")._contents[0].key not in keys
    told = config(
        model={"hf_config": SimpleNamespace(to_dict=lambda: {"layers": 2, "_name_or_path": "x"}), "model": "y"}
    )
    assert index(tmp_path, told)._contents[0].key in keys


def request(tokens: int = 100, **changes: Any) -> Any:
    return SimpleNamespace(
        **{
            "lora_request": None,
            "mm_features": [],
            "prompt_embeds": None,
            "resumable": False,
            "cache_salt": None,
            **changes,
        },
        all_token_ids=list(range(tokens)),
    )


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search is waited for, however busy the machine is."""
    monkeypatch.setattr(tiered, "SEARCH_SECONDS", 60.0)


class Scheduler:
    """A manager whose tier holds what it is told, and keys of a request."""

    def __init__(self, folder: Path, chunks: int = 4, **options: Any) -> None:
        self.manager = KvbmOffloadingManager(num_chunks=chunks, **options)
        self.manager.tier = self.tier = index(folder)
        self.context, self.keys = self.new(request())
        self.held: set[str] = set()
        for tier in self.tier._tiers:
            tier.holds = self.held.__contains__  # type: ignore[method-assign]

    def new(self, request: Any, name: bytes = b"") -> tuple[Any, list[Any]]:
        context = ReqContext("one")
        self.tier.begin(request, context)
        keys = [make_offload_key(name.ljust(31, b"k") + bytes([chunk]), 0) for chunk in range(3)]
        for chunk, key in enumerate(keys):
            context.set_offload_key_position(key, 32 * (chunk + 1))
        return context, keys

    def names(self, chunk: int) -> tuple[str, ...]:
        found = self.tier.units(self.keys[chunk], self.context)
        assert found is not None
        return found.names

    def looked_up(self) -> list[LookupResult]:
        """What a request of the same tokens, which comes now, finds."""
        self.context._state.pop(Search, None)
        return [self.manager.lookup(key, self.context) for key in self.keys]


HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING


def test_a_chunk_of_files(tmp_path: Path) -> None:
    """It is a hit when all of its units are there; its load takes a chunk of host memory, which then holds it."""
    one = Scheduler(tmp_path, store_threshold=2)
    manager = one.manager
    assert one.looked_up() == [MISS] * 3
    one.held |= {*one.names(0), one.names(1)[0]}
    assert one.looked_up() == [HIT, MISS, MISS]
    one.held |= {*one.names(1)}
    spec = manager.prepare_load(one.keys[:2], one.context)
    assert spec.block_ids.tolist() == [0, 1] and [units.names for units in spec.tiered.units] == [
        one.names(0),
        one.names(1),
    ]
    assert [(units.chunk, units.first) for units in spec.tiered.units] == [(0, 0), (1, 32)]
    assert one.looked_up() == [PENDING, PENDING, MISS]
    assert manager.get_load_source(one.keys[0], one.context) is CacheHitSource.DISK
    manager.complete_load(set(one.keys[:2]), one.context)
    one.held.clear()
    assert one.looked_up() == [HIT, HIT, MISS]
    assert manager.get_load_source(one.keys[0], one.context) is CacheHitSource.HOST
    one.held |= {*one.names(2)}
    spec = manager.prepare_load(one.keys, one.context)  # of both kinds
    assert spec.block_ids.tolist() == [0, 1, 2] and [units.chunk for units in spec.tiered.units] == [2]
    manager.complete_load(set(one.keys), one.context)
    assert (manager._num_evictable_cache_chunks, manager._num_write_pending_chunks) == (
        3,
        0,
    ) and manager.counts is not None


def test_stores_are_written(tmp_path: Path) -> None:
    one = Scheduler(tmp_path)
    made = one.manager.prepare_store(one.keys[:2], one.context)
    assert [units.names for units in made.store_spec.tiered.units] == [one.names(0), one.names(1)]
    assert made.store_spec.block_ids.tolist() == [units.chunk for units in made.store_spec.tiered.units]
    one.manager.complete_store(one.keys[:2], one.context)
    assert not one.manager.prepare_store(one.keys[:2], one.context).keys_to_store


def test_room(tmp_path: Path) -> None:
    """A hit is a promise: there are chunks for it and all before it, which nobody reads or writes."""
    one = Scheduler(tmp_path, chunks=3)
    for chunk in range(3):
        one.held |= {*one.names(chunk)}
    others, keys = one.new(request(), b"others")
    assert one.manager.prepare_store(keys[:2], others) is not None
    assert one.looked_up() == [HIT, MISS, MISS]
    one.manager.complete_store(keys[:2], others)
    assert one.looked_up() == [HIT] * 3
    one.manager.prepare_load(one.keys, one.context)
    assert [one.manager.lookup(key, others) for key in keys[:2]] == [MISS] * 2  # they made room


def test_room_that_other_chunks_of_the_request_take(tmp_path: Path) -> None:
    """A chunk in memory that is loaded with one of the files makes no room for it: the engine stopped."""
    one = Scheduler(tmp_path, chunks=2)
    others, keys = one.new(request(), b"others")
    one.manager.prepare_store(one.keys[1:2], one.context)
    one.manager.complete_store(one.keys[1:2], one.context)
    assert one.manager.prepare_store(keys[:1], others) is not None  # somebody writes to it for a long time
    one.held |= {*one.names(0)}
    assert one.looked_up() == [HIT, MISS, MISS]
    assert one.manager.prepare_load(one.keys[:1], one.context).block_ids.tolist() == [0]


def test_room_of_groups_with_other_chunks(tmp_path: Path) -> None:
    """Each group's chunks are counted by their own tokens."""
    held = caches(FullAttentionSpec(**FULL), FullAttentionSpec(**{**FULL, "block_size": 16}))
    tier = index(tmp_path, kv_cache_config=held)
    for one in tier._tiers:
        one.holds = lambda _: True  # type: ignore[method-assign]
    context = ReqContext("one")
    tier.begin(request(), context)
    key = make_offload_key(b"k" * 32, 0)
    context.set_offload_key_position(key, 64)
    assert [tier.holds(key, context, room) for room in (5, 6)] == [False, True]  # 2 of 32 tokens and 4 of 16


def test_a_read_that_fails(tmp_path: Path) -> None:
    """What could not be read is a miss, until it has been written anew."""
    one = Scheduler(tmp_path)
    one.held |= {*one.names(0), *one.names(1)}
    spec = one.manager.prepare_load(one.keys[:2], one.context)
    one.manager.distrust({int(spec.block_ids[1])})
    assert one.looked_up() == [PENDING, MISS, MISS]
    one.manager.complete_load(one.keys[:2], one.context)
    assert one.looked_up() == [HIT, MISS, MISS]
    one.manager.prepare_store([one.keys[1]], one.context)
    one.manager.complete_store([one.keys[1]], one.context)
    assert one.looked_up() == [HIT, HIT, MISS]
    assert one.tier.holds(one.keys[1], one.context, 4)


def test_memory_that_fails_while_it_is_read(tmp_path: Path) -> None:
    """Files take its place once nobody reads it any more."""
    one = Scheduler(tmp_path)
    one.manager.prepare_store(one.keys[:1], one.context)
    one.manager.complete_store(one.keys[:1], one.context)
    one.held |= {*one.names(0)}
    [chunk] = one.manager.prepare_load(one.keys[:1], one.context).block_ids
    one.manager.distrust({int(chunk)})
    assert one.looked_up() == [MISS] * 3
    one.manager.complete_load(one.keys[:1], one.context)
    assert one.looked_up() == [HIT, MISS, MISS]
    assert one.manager.prepare_load(one.keys[:1], one.context).tiered.units[0].names == one.names(0)


def test_what_nobody_has_compared_is_not_written() -> None:
    for verify in (True, False):
        worker = TierWorker.__new__(TierWorker)
        worker._copier, worker._stores = SimpleNamespace(memory=SimpleNamespace(verify=verify)), {}  # type: ignore[assignment]
        worker.stores(1, Tiered(Settings(Path("/here"), 1), (), ()))
        assert [*worker._stores] == [1] * verify


def worker(folder: Path) -> tuple[TierWorker, Tiered]:
    """One whose host memory is two blocks of 32 tokens, and what it is told of a chunk of units."""
    made = index(folder)
    content = made._contents[0]
    host = Pool.allocate(load("universal"), replace(content.shape, nt=32), 2)
    store = SimpleNamespace(host=host, digests=host.digest(), known=np.ones(2, np.bool_), verify=True)
    copier = SimpleNamespace(memory=SimpleNamespace(stores=[[store]], verify=True), blocks_per_chunk=1)
    found = TierWorker.__new__(TierWorker)
    found._copier, found._unit_contents, found._tiers, found._count = copier, (replace(content, model=""),), [], lambda *_: None
    found._shelves = [Shelf(content, host, range(4), threads=1)]
    found._threads, found._reads, found._writes, found._stores = ThreadPoolExecutor(1), {}, {}, {}
    found._late = []
    return found, Tiered(made._settings, made._contents, (Units(0, 1, 0, Chain(16, range(32)).keys(0, 32)),))


def test_a_folder_that_a_worker_cannot_write_to(tmp_path: Path) -> None:
    """No error: what is not written is a miss later, and what cannot be read is one now."""
    one, tiered = worker(tmp_path / "folder")
    shutil.rmtree(tmp_path / "folder")
    (tmp_path / "folder").write_text("a file in its place")
    one.stores(1, tiered)
    assert one.write(1, "stored")
    one.read(2, tiered)
    one.close()
    assert one.has_written() == ["stored"] and one.has_read({2}) == [2]
    assert one._copier.memory.stores[0][0].known.tolist() == [True, False]


def test_a_folder_that_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler does not wait for it: it asks again.  What was found is true for some time, from the first chunk on."""
    monkeypatch.setattr(tiered, "SEARCH_SECONDS", 0.002)
    one, go, asked = Scheduler(tmp_path), threading.Event(), []
    one.held |= {*one.names(0), *one.names(1)}

    def holds(name: str) -> bool:
        asked.append(name)
        return go.wait(60) and name in one.held

    one.tier._tiers[0].holds = holds  # type: ignore[method-assign]
    assert one.looked_up() == [LookupResult.RETRY] * 3 and len(asked) == 1
    go.set()
    assert one.context.get_state(Search).done.wait(60)
    again = lambda: [one.manager.lookup(key, one.context) for key in one.keys]  # noqa: E731
    assert again() == [HIT, HIT, MISS] and asked == [*one.names(0), *one.names(1), one.names(2)[0]]
    one.held.clear()
    assert again() == [HIT, HIT, MISS]
    later = time.monotonic() + 2
    monkeypatch.setattr(tiered.time, "monotonic", lambda: later)
    assert again() == [MISS] * 3
    one.held |= {*one.names(1)}
    one.context._state.pop(Search)
    assert one.manager.lookup(one.keys[1], one.context) is HIT  # what comes before is on the GPU
    assert one.manager.lookup(one.keys[0], one.context) is MISS


def test_a_folder_that_does_not_answer_stops_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as of a server that is gone: misses, without a wait once all threads are in it; and hits when it answers again."""
    monkeypatch.setattr(tiered, "SEARCH_SECONDS", 0.002)
    one, go = Scheduler(tmp_path), threading.Event()
    one.held |= {*one.names(0)}
    one.tier._tiers[0].holds = lambda name: go.wait(60) and name in one.held  # type: ignore[method-assign]
    first, clock = one.context, time.monotonic()
    monkeypatch.setattr(tiered.time, "monotonic", lambda: clock)
    assert one.looked_up() == [LookupResult.RETRY] * 3
    other = one.new(request())[0]
    for key in one.keys:
        other.set_offload_key_position(key, first.get_offload_key_position(key))
    assert one.manager.lookup(one.keys[0], other) is LookupResult.RETRY
    clock += tiered.SEARCH_LIMIT + 1
    for context in (first, other):
        assert [one.manager.lookup(key, context) for key in one.keys] == [MISS] * 3
    assert one.looked_up() == [MISS] * 3 and first.get_state(Search).done.is_set()  # not searched
    go.set()
    assert all(search.done.wait(60) for search in one.tier._late)
    monkeypatch.setattr(tiered, "SEARCH_SECONDS", 60.0)
    assert one.looked_up() == [HIT, MISS, MISS]


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_read_that_does_not_end_is_a_miss_and_writes_nothing_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_waited_for: bool
) -> None:
    """Its block of host memory may hold another request's then."""
    one, told = worker(tmp_path)
    one.stores(1, told)
    assert one.write(1, "stored")
    futures.wait(one._writes[1][2], 60)
    assert one.has_written() == ["stored"]
    [store] = one._copier.memory.stores[0]
    go, fetch = threading.Event(), Shelf._fetch
    monkeypatch.setattr(Shelf, "_fetch", lambda *given: go.wait(60) and fetch(*given))
    monkeypatch.setattr(tiered, "FILES_LIMIT", 0.01 if is_waited_for else 0.0)
    one.read(2, told)
    assert one.has_read({2} if is_waited_for else None) == [2] and not store.known[1]
    store.host.arrays[1][...] = 7  # of another request
    store.digests[1], store.known[1] = 99, True
    go.set()
    one._threads.shutdown(wait=True)
    assert (store.host.arrays[1] == 7).all() and store.digests[1] == 99 and store.known[1] and not one.has_read()


def test_a_write_that_does_not_end_keeps_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing waits behind it."""
    one, told = worker(tmp_path)
    begun, go = threading.Event(), threading.Event()
    monkeypatch.setattr(Shelf, "write", lambda *_: begun.set() or go.wait(60))
    monkeypatch.setattr(tiered, "FILES_LIMIT", 0.0)
    one.stores(1, told)
    assert one.write(1, "stored") and begun.wait(60) and one.has_written() == ["stored"]
    one.stores(2, told)
    assert not one.write(2, "another")  # no job is queued behind it
    go.set()
    one._threads.shutdown(wait=True)
    assert not one._writes and not one.has_written()


def test_requests_of_more_than_tokens(tmp_path: Path) -> None:
    """They are left to host memory; a salt makes other names; a filter of tiers is kept to."""
    one = Scheduler(tmp_path)
    one.held |= {*one.names(0)}
    assert one.looked_up()[0] is HIT
    for more in (
        {"lora_request": 1},
        {"mm_features": [1]},
        {"prompt_embeds": 1},
        {"resumable": True},
        {"cache_salt": "x"},
    ):
        context, keys = one.new(request(**more))
        assert one.manager.lookup(keys[0], context) is MISS
        made = one.manager.prepare_store(keys[2:], context)
        assert hasattr(made.store_spec, "tiered") == ("cache_salt" in more)
        one.manager.complete_store(keys[2:], context, success=False)
    half, _ = one.new(request(cache_salt="\ud800"))  # half a character, as JSON may have one
    assert half.get_state(Chain).keys(0, 16) != one.context.get_state(Chain).keys(0, 16)
    one.context.load_tier_filter = TierFilter(matchers=())
    assert one.looked_up()[0] is MISS


def test_a_reset(tmp_path: Path) -> None:
    """The weights may be others from now on: nothing is stored, and nothing found."""
    one = Scheduler(tmp_path)
    one.held |= {*one.names(0)}
    assert one.looked_up()[0] is HIT
    one.manager.reset_cache()
    assert one.looked_up()[0] is MISS
    assert not hasattr(one.manager.prepare_store(one.keys, one.context).store_spec, "tiered")


def test_names_are_free_of_seeds(tmp_path: Path) -> None:
    """Keys of vLLM differ from process to process; what is looked for does not."""
    one = Scheduler(tmp_path)
    context, keys = one.new(request(), b"another process")
    assert not {*keys} & {*one.keys}
    assert one.tier.units(keys[1], context) == one.tier.units(one.keys[1], one.context)
    assert isinstance(one.tier._tiers[0], Folder)
