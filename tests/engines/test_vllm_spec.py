"""Pieces of vLLM's offloading with kvbm, with vLLM's own classes and without an engine."""

from __future__ import annotations

import logging
import math
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata, TransferStats
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

import taking
from kvbm import BindError, DigestError, load
from kvbm.integrations import vllm as integration
from kvbm.integrations.taken import TAKEN, lacking
from kvbm.integrations.vllm import offload
from kvbm.integrations.vllm.copier import Copier, HostMemory
from kvbm.integrations.vllm.pages import pages_of


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM's modules import
def test_this_version_has_all_that_is_taken_of_it() -> None:
    """And each method that kvbm replaces here is compared with the engine's."""
    assert list(lacking("vLLM")) == [] and list(lacking("vLLM lmcache")) == []
    known = {name: names[name] for key in ("vLLM", "vLLM lmcache") for names in TAKEN[key].values() for name in names}
    classes = {name: getattr(import_module(module), name) for key in TAKEN if "vLLM" in key for module, names in TAKEN[key].items()
               for name in names}  # fmt: skip
    seen = 0
    for name, bases, methods, _ in taking.replaced():
        for base in bases & classes.keys() - {"CPULoadStoreSpec"}:
            for method in methods:
                if method in vars(object) or method == "supports_sleep_mode" or not hasattr(classes[base], method):  # not in 0.32
                    continue
                assert f"def {method}(" in known[base], f"{name}.{method}: add it to {base} in integrations/taken.py"
                seen += 1
    assert seen > 45


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_another_version_warns_or_is_refused_by_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    assert integration.KvbmOffloadingSpec is offload.KvbmOffloadingSpec
    said = [record.getMessage() for record in caplog.records if record.name == "vllm.kvbm"]
    assert len(said) == 1 and "vLLM 0.99.0 was not tested" in said[0]
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    monkeypatch.delattr(KVConnectorFactory, "register_connector")
    says = r"got 0\.99\.1, which lacks vllm\.\S*factory\.KVConnectorFactory\.register_connector \(expected it, got none\)"
    with pytest.raises(BindError, match=says):
        _ = integration.KvbmOffloadingSpec


def test_names() -> None:
    """The connector by its name alone, once vLLM has called `register`; twice is once."""
    integration.register()
    integration.register()
    assert KVConnectorFactory.get_connector_class_by_name("KvbmOffloadingConnector") is offload.KvbmOffloadingConnector
    assert integration.KvbmOffloadingSpec is offload.KvbmOffloadingSpec
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = integration.Nothing


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({}, "cpu_bytes_to_use: expected a number from 1 on, got None"),
        ({"cpu_bytes_to_use": "64MiB"}, "cpu_bytes_to_use: expected a number from 1 on, got '64MiB'"),
        ({"cpu_bytes_to_use": True}, "cpu_bytes_to_use: expected a number"),
        ({"cpu_bytes_to_use": float("nan")}, "cpu_bytes_to_use: expected a number"),
        ({"cpu_bytes_to_use": 1 << 26, "blocks_per_chunk": 1.5}, "blocks_per_chunk: expected a number from 1 on, got 1.5"),
        ({"cpu_bytes_to_use": 1 << 26, "store_threshold": [2]}, "store_threshold: expected a number from 0 on"),
        ({"cpu_bytes_to_use": 1 << 26, "offload_prompt_only": "false"}, "offload_prompt_only: expected true or false, got 'false'"),
        ({"cpu_bytes_to_use": 1 << 26, "spec_name": "CPUOffloadingSpec"}, "spec_name: expected KvbmOffloadingSpec"),
    ],
)  # fmt: skip
def test_settings_of_vllm_that_are_wrong_are_named(extra: dict[str, Any], says: str) -> None:
    transfer = SimpleNamespace(kv_connector_extra_config=dict(extra))
    with pytest.raises(BindError, match=f"kv_connector_extra_config: {says}"):
        offload.KvbmOffloadingConnector(SimpleNamespace(kv_transfer_config=transfer), None, None)


def test_settings_of_vllm_that_are_right() -> None:
    for given in (1 << 26, "67108864", 6.4e7):
        extra = {"cpu_bytes_to_use": given, "blocks_per_chunk": 4, "offload_prompt_only": False, "store_threshold": 0}
        offload._require_settings(offload._completed(SimpleNamespace(kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config=extra))).kv_connector_extra_config)  # fmt: skip


def stored(manager: Any, keys: list[bytes], context: ReqContext) -> list[int]:
    """Their chunks."""
    output = manager.prepare_store(keys, context)
    manager.complete_store(keys, context)
    return output.store_spec.block_ids.tolist()


def test_a_manager_forgets_what_failed() -> None:
    """A miss at once; free when nobody reads it any more; stored anew it is trusted; the books are those of vLLM's manager."""
    manager, context = offload.KvbmOffloadingManager(num_chunks=2, enable_events=True), ReqContext("one")
    keys = [b"a" * 36, b"b" * 36]
    first, second = stored(manager, keys, context)
    manager.prepare_load([keys[0]], context)
    manager.distrust({first})
    assert [manager.lookup(key, context) for key in keys] == [LookupResult.MISS, LookupResult.HIT]
    assert manager.prepare_store([b"c" * 36, b"d" * 36], context) is None  # one is being read, by whom it failed
    manager.complete_load([keys[0]], context)
    list(manager.take_events())
    assert manager.lookup(keys[0], context) is LookupResult.MISS
    [event] = manager.take_events()
    assert (event.keys, event.removed) == ([keys[0]], True)
    assert manager._num_evictable_cache_chunks == 1 and manager._get_num_free_chunks() == 1
    assert stored(manager, [keys[0]], context) == [first]
    assert [manager.lookup(key, context) for key in keys] == [LookupResult.HIT] * 2
    manager.distrust({second})
    assert stored(manager, [keys[1]], context) == [second]  # no lookup before: it is not taken for stored
    assert manager.lookup(keys[1], context) is LookupResult.HIT
    manager.distrust({first, second})
    others = [b"e" * 36, b"f" * 36]
    assert set(stored(manager, others, context)) == {first, second}  # evicted before anybody asked
    assert [manager.lookup(key, context) for key in others] == [LookupResult.HIT] * 2
    manager.distrust({first})
    manager.reset_cache()
    assert set(stored(manager, keys, context)) == {first, second}
    assert [manager.lookup(key, context) for key in keys] == [LookupResult.HIT] * 2


def test_what_ranks_tell_is_joined() -> None:
    """Failures of all ranks, whichever has them."""
    one = offload._Metadata({1: 1}, TransferStats())
    other = offload._Metadata({1: 1, 2: 1}, TransferStats(), {2}, {7})
    for both in (one.aggregate(other), other.aggregate(one)):
        assert (both.completed_jobs, both.failed_jobs, both.failed_chunks) == ({1: 2, 2: 1}, {2}, {7})
        assert isinstance(both, OffloadingWorkerMetadata)


def canonical(step: int, layers: int = 3) -> CanonicalKVCaches:
    """Pages of 96 bytes, at a step."""
    memory = torch.randint(-128, 128, (layers, 8, step), dtype=torch.int8)
    tensors = [CanonicalKVCacheTensor(pages[:, :96], 96) for pages in memory]
    return CanonicalKVCaches(tensors, [[CanonicalKVCacheRef(index, 96) for index in range(layers)]])


def worker(caches: CanonicalKVCaches, reports: bool) -> offload.KvbmOffloadingWorker:
    """Of a model of which nothing is known."""
    config = SimpleNamespace(groups=[SimpleNamespace(group_id=0, layer_names=("a", "b", "c"))])
    groups = pages_of({}, caches, config, SimpleNamespace(), SimpleNamespace(kv_cache_groups=[]))
    assert groups[0][0].unknown.startswith("vLLM: ")
    return offload.KvbmOffloadingWorker(Copier(HostMemory(load("universal"), groups, 4, "cpu"), 2), reports)


def test_pages_as_bytes() -> None:
    """Nothing is asked of the config then, and nothing is unknown; layers whose pages differ in size are apart."""
    caches = canonical(96)
    caches.tensors.append(CanonicalKVCacheTensor(torch.zeros(8, 32, dtype=torch.int8), 32))
    caches.group_data_refs[0].append(CanonicalKVCacheRef(3, 32))
    config = SimpleNamespace(groups=[SimpleNamespace(group_id=0, layer_names=("a", "b", "c", "d"))])
    [pages] = pages_of({}, caches, config, SimpleNamespace(), SimpleNamespace(), declared=False)
    assert [(one.pool.shape.nl, one.pool.shape.hd, one.unknown) for one in pages] == [(3, 96, ""), (1, 32, "")]


@pytest.mark.parametrize("order", ["LBNHC", "LBHNC", "BLHNC", "LHBNC"])
def test_blocks_that_do_not_lie_in_their_pages(order: str) -> None:
    """With heads outermost vLLM's pages hold one head each; copied as bytes the others would be lost, and nothing would see it."""
    sizes = {"L": 3, "B": 8, "H": 2, "N": 4, "C": 6}
    whole = torch.zeros([sizes[axis] for axis in order])
    memory = whole.permute([order.index(axis) for axis in "LBHNC"])
    step = 4 * memory.stride(1)
    page = step if order == "LHBNC" else 4 * math.prod(memory.shape[2:])
    flat = whole.view(-1).view(torch.int8)
    pages = [flat.as_strided((8, page), (step, 1), 4 * layer.storage_offset()) for layer in memory]
    caches = CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(one, one.shape[1]) for one in pages],
        group_data_refs=[[CanonicalKVCacheRef(number, one.shape[1]) for number, one in enumerate(pages)]],
    )
    config = SimpleNamespace(groups=[SimpleNamespace(group_id=0, layer_names=("a", "b", "c"))])
    tensors = dict(zip("abc", memory, strict=True))
    if order == "LHBNC":
        with pytest.raises(BindError, match="a: a block's elements lie 864 bytes apart, and vLLM says a page of 96 bytes"):
            pages_of(tensors, caches, config, SimpleNamespace(), SimpleNamespace(), declared=False)
    else:
        assert len(pages_of(tensors, caches, config, SimpleNamespace(), SimpleNamespace(), declared=False)) == 1


@pytest.mark.parametrize("step", [96, 128])
def test_pages_that_nobody_knows(step: int) -> None:
    """They are copied as bytes, and their padding is not; what vLLM is told is true."""
    caches = canonical(step)
    before = torch.stack([one.tensor for one in caches.tensors]).clone()
    copies = worker(caches, True)
    assert copies.submit_store(1, GPULoadStoreSpec([5, 6, 7], [3], [0]), CPULoadStoreSpec([1, 0]))
    copies.wait({1})
    [result] = copies.get_finished()
    assert (result.job_id, result.success, result.transfer_size) == (1, True, 3 * 3 * 96) and result.transfer_time > 0
    assert copies.submit_load(2, CPULoadStoreSpec([1, 0]), GPULoadStoreSpec([0, 1], [2], [1]))
    [result] = copies.get_finished()
    assert (result.job_id, result.transfer_size) == (2, 2 * 3 * 96)
    after = torch.stack([one.tensor for one in caches.tensors])
    assert torch.equal(after[:, :2], before[:, 6:]) and torch.equal(after[:, 2:], before[:, 2:])
    assert not copies.take_failures().jobs
    assert copies.take_stats().reduce() == {
        offload.STORED[0]: 3, offload.STORED[1]: 864, offload.LOADED[0]: 2, offload.LOADED[1]: 576,
    }  # fmt: skip
    assert copies.take_stats() is None and copies.get_finished() == []
    copies.shutdown()


@pytest.mark.parametrize("reports", [True, False])
def test_a_load_that_fails(reports: bool) -> None:
    """Is told once, with what it wrote; where nobody asks it is an error."""
    copies = worker(canonical(96), reports)
    copies.submit_store(1, GPULoadStoreSpec([5, 6], [2], [0]), CPULoadStoreSpec([1]))
    assert len(copies.get_finished()) == 1
    copies.copier.memory.stores[0][0].host.arrays[3].reshape(-1)[17] ^= 1
    copies.submit_load(2, CPULoadStoreSpec([1]), GPULoadStoreSpec([3, 4], [2], [0]))
    if not reports:
        with pytest.raises(DigestError, match=r"chunks \[1\] of host memory have changed since they were stored"):
            copies.get_finished()
        return
    assert [one.success for one in copies.get_finished()] == [True]  # vLLM asserts that it is
    failures = copies.take_failures()
    assert (failures.jobs, failures.blocks, failures.chunks) == ({2}, {4}, {1})
    assert copies.take_failures() == offload.Failures()
    assert copies.take_stats().reduce()[offload.FAILED] == 1


def spec(**extra: Any) -> offload.KvbmOffloadingSpec:
    config = SimpleNamespace(
        extra_config={"cpu_bytes_to_use": 1 << 20, **extra}, groups=[], enable_kv_cache_events=False,
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1), canonical_layout=extra.get("canonical_layout", False),
        parallel=SimpleNamespace(world_size=2), worker_kv_bytes_per_block=1 << 16, replicated_layout=False,
        model=SimpleNamespace(max_model_len=0),
    )  # fmt: skip
    return offload.KvbmOffloadingSpec(config)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"verify": "no"}, r"verify: expected true or false, got 'no'"),
        ({"canonical_layout": True}, r"canonical_layout: host_layout replaces it"),
        ({"folder": "/here", "folder_bytes": 1, "host_layout": "pages"}, r"host_layout: expected a layout, as folder .* 'pages'"),
        ({"folder": "here", "folder_bytes": 1}, r"folder: expected an absolute path, got 'here'"),
        ({"cpu_bytes_to_use": 1000}, r"cpu_bytes_to_use: expected at least 131072 bytes, .* got 1000"),
    ],
)  # fmt: skip
def test_settings_that_are_refused(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(BindError, match=says):
        spec(**extra)


def test_settings() -> None:
    """The layout is the catalogue's; the manager is ours; there are counters for all that is counted."""
    for extra, name, is_declared in (({}, "universal", False), ({"folder": "/x", "folder_bytes": 1}, "universal", True)):
        assert (spec(**extra).host_layout.name, spec(**extra).is_declared) == (name, is_declared)
    made = spec(host_layout="operational_nhd")
    assert made.is_declared
    assert (made.host_layout.name, made.verify, made.num_chunks) == ("operational_nhd", True, 8)
    assert isinstance(made.get_manager(), offload.KvbmOffloadingManager) and made.get_manager() is made.get_manager()
    assert {*offload.STORED, *offload.LOADED, offload.FAILED} <= offload.KvbmOffloadingSpec.build_metric_definitions(
        {}
    ).keys()
