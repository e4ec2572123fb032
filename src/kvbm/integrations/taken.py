"""What kvbm takes from each engine: names, attributes and signatures, to be compared with an installed version.

No engine is imported before `lacking` is called.
"""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from types import CodeType, MappingProxyType
from typing import Any

__all__ = ["TAKEN", "lacking"]

_CONNECTOR = """
    def __init__(vllm_config, role, kv_cache_config)
    def get_num_new_matched_tokens(request, num_computed_tokens)
    def update_state_after_alloc(request, blocks, num_external_tokens)
    def request_finished(request, block_ids)
    def register_kv_caches(kv_caches)
    def get_transfer_results(finished_req_ids)
    def update_connector_output(connector_output)
    def get_kv_connector_stats()
    def build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
"""

#: Engine, or engine and part of kvbm → module → name there → what is used of it, one a line.  ``def`` is a method that kvbm
#: replaces: the engine must pass no other arguments than these (``?``: those that not every version passes).  A line with
#: parentheses is called: with these arguments, and the engine must demand no others.  Other lines are attributes of the class or of
#: its objects.
TAKEN: MappingProxyType[str, dict[str, dict[str, str]]] = MappingProxyType({
    "vLLM": {
        "vllm": {"__version__": ""},
        "vllm.config.kv_transfer": {
            "KVTransferConfig": "engine_id\nkv_buffer_device\nkv_connector_extra_config\nkv_load_failure_policy\nkv_role",
        },
        "vllm.distributed.kv_transfer.kv_connector.factory": {
            "KVConnectorFactory": """
                _registry
                create_connector(config, role, kv_cache_config)
                get_connector_class(kv_transfer_config)
                register_connector(name, module_path, class_name)
            """,
        },
        "vllm.distributed.kv_transfer.kv_connector.v1.base": {
            "KVConnectorBase_V1": _CONNECTOR + """
                def bind_kv_cache_manager(kv_cache_manager)
                def build_connector_meta(scheduler_output)
                def handle_preemptions(kv_connector_metadata)
                def bind_connector_metadata(connector_metadata)
                def start_load_kv(forward_context, kwargs)
                def wait_for_layer_load(layer_name)
                def save_kv_layer(layer_name, kv_layer, attn_metadata, kwargs)
                def wait_for_save()
                def build_kv_connector_stats(data)
                def clear_connector_metadata()
                def get_block_ids_with_load_errors()
                def get_required_kvcache_layout(vllm_config)
                def has_connector_metadata()
                def requires_piecewise_for_cudagraph(extra_config)
                def shutdown()
                _get_connector_metadata()
            """,
            "KVConnectorMetadata": "",
            "KVConnectorRole": "SCHEDULER\nWORKER",
            "KVConnectorTransferResults": "finished_sending\nfinished_recving\nfailed_recving",
            "SupportsHMA": "def request_finished_all_groups(request, block_ids)",
        },
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics": {
            "KVConnectorPromMetrics": """
                def __init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
                def observe(transfer_stats_data, engine_idx)
                _counter_cls
            """,
            "KVConnectorStats": "data\ndef to_dict()\ndef reset()\ndef aggregate(other)\ndef reduce()\ndef is_empty()",
        },
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.common": {
            "OffloadingWorkerMetadata": "completed_jobs\ntransfer_stats\ndef aggregate(other)",
        },
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics": {
            "OffloadingConnectorStats": "increase_counter(counter_name, counter_increase_value)\nis_empty()",
        },
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler": {
            "OffloadingConnectorScheduler": "_jobs\n_req_status\nconfig\nmanager",
            "RequestGroupState": "next_stored_chunk_idx",
            "RequestOffloadState": "req\nreq_context\ngroup_states\nupdate_num_hit_chunks(num_cached_tokens)",
            "TransferJobStatus": "req_id",
        },
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker": {
            "OffloadingConnectorWorker": "_load_jobs\nspec\nworker\nvllm_config\nkv_cache_config",
        },
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector": {
            "OffloadingConnector": _CONNECTOR + """
                def on_new_request(request)
                def request_finished_all_groups(request, block_ids)
                def get_block_ids_with_load_errors()
                def build_connector_worker_meta()
                connector_worker
                _kv_cache_manager
            """,
        },
        "vllm.distributed.kv_transfer.kv_transfer_state": {"get_kv_transfer_group": "()"},
        "vllm.logger": {"init_logger": "(name)"},
        "vllm.platforms": {"current_platform": "device_type\nget_cpu_architecture()\nis_cpu()\nis_cuda_alike()"},
        "vllm.v1.core.block_pool": {"BlockPool": "free_blocks(ordered_blocks)\ntouch(blocks)"},
        "vllm.v1.core.kv_cache_manager": {
            "KVCacheBlocks": "blocks\nget_block_ids()",
            "KVCacheManager": "block_pool\ncoordinator\nfree(request)\nget_block_ids(request_id)\nget_blocks(request_id)",
        },
        "vllm.v1.core.kv_cache_coordinator": {"KVCacheCoordinator": "single_type_managers"},
        "vllm.v1.core.single_type_kv_cache_manager": {"SingleTypeKVCacheManager": "num_cached_block"},
        "vllm.v1.kv_cache_interface": {
            "FullAttentionSpec": "block_size\nnum_kv_heads\nhead_size\nhead_size_v\ndtype\nkv_quant_mode\nprefix_cacheable",
            "KVCacheConfig": "kv_cache_groups\nkv_cache_tensors\nnum_blocks\ntransfer_group_ids",
            "KVCacheGroupSpec": "layer_names\nkv_cache_spec",
            "KVCacheTensor": "layers\noffset\nlayer_stride\nblock_stride",
            "MLAAttentionSpec": "cache_dtype_str\nstate_content_bytes\nstate_content_size_bytes",
            "SlidingWindowSpec": "sliding_window",
        },
        "vllm.v1.kv_offload.base": {
            "GPULoadStoreSpec": "block_ids\ngroup_sizes\nblock_indices",
            "LookupResult": "HIT\nMISS\nRETRY",
            "Medium": "STORAGE",
            "OffloadingCounterMetadata": "documentation",
            "OffloadingEvent": "keys\nmedium\nremoved",
            "OffloadingWorker": """
                def submit_store(job_id, src_spec, dst_spec)
                def submit_load(job_id, src_spec, dst_spec, expedited?)
                def get_finished()
                def wait(job_ids)
                def shutdown()
            """,
            "ReqContext": "load_tier_filter\nget_state(cls)\nset_state(val)\nget_offload_key_position(key)",
            "TransferResult": "job_id",
            "get_offload_group_idx": "(key)",
        },
        "vllm.v1.kv_offload.config": {
            "OffloadingConfig": """
                canonical_layout
                engine_id
                extra_config
                groups
                worker_kv_bytes_per_block
            """,
        },
        "vllm.v1.kv_offload.cpu.common": {"CPULoadStoreSpec": "def __init__(block_ids)"},
        "vllm.v1.kv_offload.cpu.manager": {
            "CPUOffloadingManager": """
                __init__(num_chunks, cache_policy, cache_policy_module_path, enable_events, store_threshold, max_tracker_size)
                def lookup(key, req_context)
                def get_load_source(key, req_context)
                def prepare_load(keys, req_context)
                def complete_load(keys, req_context)
                def prepare_store(keys, req_context)
                def _allocate_chunks(keys)
                def reset_cache()
                complete_store(keys, req_context)
                _free_chunk(chunk)
                _get_num_free_chunks()
                _num_evictable_cache_chunks
                _policy
                counts
                events
                medium
            """,
        },
        "vllm.v1.kv_offload.cpu.policies.base": {"CachePolicy": "get(key)\nremove(key)", "ChunkStatus": "chunk_id\nref_cnt"},
        "vllm.v1.kv_offload.cpu.spec": {
            "CPUOffloadingSpec": """
                def __init__(config)
                def build_metric_definitions(extra_config)
                def _uses_shared_region()
                def get_manager()
                def get_worker(kv_caches)
                def create_worker(kv_caches)
                blocks_per_chunk
                cache_policy_module_path
                eviction_policy
                extra_config
                kv_bytes_per_chunk
                kv_events_config
                num_chunks
                replicated_layout
            """,
            "_all_workers_barrier": "()",
        },
        "vllm.v1.kv_offload.factory": {"OffloadingSpecFactory": "get_spec_cls(extra_config)"},
        "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": "DISK"},
        "vllm.v1.outputs": {"KVConnectorOutput": "finished_sending\nfinished_recving\nkv_connector_worker_meta"},
        "vllm.v1.request": {
            "Request": """
                all_token_ids
                cache_salt
                kv_transfer_params
                lora_request
                mm_features
                num_computed_tokens
                num_preemptions
                num_prompt_tokens
                prompt_embeds
                prompt_token_ids
                request_id
                status
            """,
            "RequestStatus": "FINISHED_LENGTH_CAPPED\nFINISHED_STOPPED\nWAITING_FOR_REMOTE_KVS",
        },
    },
    "vLLM lmcache": {
        "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector": {
            "LMCacheMPConnector": """
                def __init__(vllm_config, role, kv_cache_config)
                def _get_or_create_request_tracker(request)
                request_trackers
            """,
        },
    },
    "SGLang": {
        "sglang.version": {"__version__": ""},
        "sglang.srt.arg_groups.model_override_base": {"resolving_view": "(server_args)"},
        "sglang.srt.configs.model_config": {
            "ModelConfig": "from_server_args(server_args)\nhf_config\ndtype\nquantization\ncontext_len\nmodel_path\nrevision",
        },
        "sglang.srt.mem_cache.hicache_storage": {
            "HiCacheStorage": """
                def register_mem_pool_host(mem_pool_host)
                def register_mem_host_pool_v2(host_pool, host_pool_name)
                def batch_set_v1(keys, host_indices, extra_info)
                def batch_get_v1(keys, host_indices, extra_info)
                def exists(key)
                def clear()
            """,
            "PoolName": "KV\nSWA",
        },
        "sglang.srt.mem_cache.memory_pool": {"MHATokenToKVPool": "layer_num\npage_size", "MLATokenToKVPool": "qk_rope_head_dim"},
        "sglang.srt.mem_cache.pool_host.mha": {"MHATokenToKVPoolHost": ""},
        "sglang.srt.mem_cache.pool_host.mla": {"MLATokenToKVPoolHost": ""},
        "sglang.srt.mem_cache.swa_memory_pool": {"SWAKVPool": "full_kv_pool\nswa_kv_pool\nlayers_mapping\nstart_layer"},
        "sglang.srt.mem_cache.unified_cache.component_type": {"ComponentType": "FULL\nSWA"},
        "sglang.srt.mem_cache.unified_cache.unified_cache_linker": {
            "UnifiedCacheLinker": """
                def lookup(rid, transfers)
                def load(rid, transfers)
                def cancel_queued_load(rid)
                def start_layer_wise_loading()
                def finish_layer_wise_loading(counter_index)
                def offload(transfers, session_id)
                def num_completed_offloads()
                def pop_completed_offload()
                def reset()
                def close()
            """,
        },
        "sglang.srt.runtime_context": {"get_server_args": "()"},
    },
    "LMCache": {
        "lmcache._version": {"__version__": ""},
        "lmcache.lmcache_native": {"TransferDirection": "D2H\nH2D"},
        "lmcache.logging": {"init_logger": "(name)"},
        "lmcache.v1.platform.devices.cpu": {"CpuDeviceSpec": "backend_name\nops_cls\ndef is_available()"},
        "lmcache.v1.platform.devices.cpu.device_ops": {"CpuDeviceOps": ""},
        "lmcache.v1.platform.devices.cuda": {"CudaDeviceSpec": "backend_name\nops_cls\ndef is_available()"},
        "lmcache.v1.platform.devices.cuda.device_ops": {
            "CudaDeviceOps": """
                def ensure_native()
                def multi_layer_block_kv_transfer(paged_buffer_ptrs_tensor, lmcache_objects_ptrs, block_ids, device, direction,
                    shape_desc, lmcache_chunk_size, engine_kv_format, skip_prefix_n_blocks)
            """,
        },
    },
    "transformers": {
        "transformers": {"__version__": ""},
        "transformers.generation.continuous_batching": {"continuous_api": "OffloadingManager"},
        "transformers.generation.continuous_batching.offloading_manager": {
            "OffloadingManager": """
                offload_requests
                free_all_waiting_cpu_caches
                restore_scheduled_requests
                free_request_cpu_cache
                _offload_to_cpu
                reset
            """,
        },
    },
})  # fmt: skip

_LINE = re.compile(r"(def )?(\w*)(?:\(([^)]*)\))?")


def lacking(key: str) -> Iterator[str]:
    """What the installed engine does not have of ``TAKEN[key]``: a name, and what was expected of it."""
    for module, names in TAKEN[key].items():
        try:
            found = import_module(module)
        except ImportError as error:
            yield f"{module} ({error})"
            continue
        for name, text in names.items():
            try:
                item = _attribute(found, name)
            except AttributeError:
                yield f"{module}.{name}"
                continue
            for is_replaced, attribute, parameters in _lines(text):
                if why := _problem(item, is_replaced, attribute, parameters):
                    yield f"{module}.{name}{attribute and f'.{attribute}'}{why}"


def _attribute(module: Any, name: str) -> Any:
    try:
        return getattr(module, name)
    except AttributeError:
        try:
            return import_module(f"{module.__name__}.{name}")  # a module of a package
        except ImportError:
            raise AttributeError(name) from None


def _lines(text: str) -> Iterator[tuple[bool, str, list[str] | None]]:
    """Each line: whether kvbm replaces it, its name, and its parameters."""
    for found in _LINE.finditer(text):
        if found[0].strip():
            yield bool(found[1]), found[2], None if found[3] is None else re.findall(r"\w+\??", found[3])


def _problem(item: Any, is_replaced: bool, attribute: str, parameters: list[str] | None) -> str | None:
    """What is wrong with an attribute; empty if it is not there, None if nothing is."""
    if attribute and not _has(item, attribute):
        return " (expected it, got none)"
    if parameters is None:
        return None
    found = _parameters(getattr(item, attribute) if attribute else item)
    if found is None:
        return None
    wanted = [name.removesuffix("?") for name in parameters]
    needed = {name for name in parameters if not name.endswith("?")}
    known = {name for name, _ in found}
    demanded = known if is_replaced else {name for name, is_needed in found if is_needed}
    if needed <= known and demanded <= set(wanted):
        return None
    return f" (expected the arguments ({', '.join(wanted)}), got ({', '.join(name for name, _ in found)}))"


def _parameters(function: Any) -> list[tuple[str, bool]] | None:
    """Parameters, and if a call must give them; None if they are not known, or are any."""
    try:
        found = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    if any(one.kind is one.VAR_POSITIONAL for one in found):
        return None
    return [(one.name, one.default is one.empty and one.kind is not one.VAR_KEYWORD) for one in found if one.name != "self"]


def _has(item: Any, name: str) -> bool:
    """Whether an object has an attribute, or the objects of a class have it: its methods or annotations assign it."""
    if hasattr(item, name):
        return True
    if not isinstance(item, type):
        return False
    for base in item.__mro__:
        if name in getattr(base, "__annotations__", {}):
            return True
        if any(name in _assigned(function.__code__) for function in vars(base).values() if inspect.isfunction(function)):
            return True
    return False


def _assigned(code: CodeType) -> set[str]:
    """Names of attributes that a function assigns."""
    return {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}
