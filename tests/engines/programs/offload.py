"""vLLM whose blocks leave for host memory and come back: ``offload.py SETTINGS`` (`Settings`, JSON); prints JSON behind RESULT."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from generate import arguments, prompt


class Settings(TypedDict):
    """What is run.

    Attributes
    ----------
    llm : dict
        Arguments of `vllm.LLM`.
    steps : list
        ``{"prompts": [[length, first], …]}``: the first tokens of prompts, generated together; ``"reset"``: of the prefix cache;
        ``"flip"``: a bit of each byte of a stored block.
    new : int
        Tokens that are generated.
    overhead, scheduler : bool, optional
        Whether the host's time of the worker (True), and of the scheduler (False), is measured; the first takes 65 blocks.
    """

    llm: dict[str, Any]
    steps: list[Any]
    new: int
    overhead: NotRequired[bool]
    scheduler: NotRequired[bool]


def worker() -> Any:
    """What copies, in a process of vLLM's."""
    return connector().connector_worker.worker


def connector() -> Any:
    """The connector that copies; the last one where there are several."""
    from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group

    group = get_kv_transfer_group()
    return getattr(group, "_connectors", [group])[-1]


def flip(_: Any = None) -> None:
    """Set a bit of each byte of the first stored block; twice is once, where ranks share it."""
    memory = worker().copier.memory
    array = next(array for array in memory.stores[-1][0].host.arrays if array.any())
    block = array if array.ndim == 5 else array[next(i for i in range(len(array)) if array[i].any())]
    block.view(np.uint8)[...] |= 64


def facts(_: Any = None) -> dict[str, Any]:
    """What the worker copies."""
    memory = worker().copier.memory
    stores = {id(store): store for stores in memory.stores for store in stores}
    first = next(iter(stores.values()))
    return {
        "groups": len(memory.stores), "stores": len(stores), "shape": str(first.host.shape),
        "title": first.out.explain(1).split(",")[0],
        "shared": memory.is_shared, "known": sum(int(store.known.sum()) for store in stores.values()),
    }  # fmt: skip


def median(call: Any, settle: Any = lambda: None, turns: int = 20) -> float:
    """Seconds of a call."""
    times = []
    for _ in range(turns):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
        settle()
    return statistics.median(times)


def overhead(_: Any = None) -> dict[str, float]:
    """Seconds of a worker's step: of all that is asked of the connector with nothing to move, and what a job of 64 blocks takes."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
    from vllm.v1.kv_offload.base import GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    asked = connector()
    found = asked.connector_worker.worker
    copier, groups = found.copier, len(found.copier.memory.stores)
    metadata = OffloadingConnectorMetadata(load_jobs={}, store_jobs={}, jobs_to_flush=None)

    def step() -> None:
        asked.bind_connector_metadata(metadata)
        asked.handle_preemptions(metadata)
        asked.start_load_kv(None)
        asked.wait_for_save()
        asked.get_transfer_results(set())
        asked.get_block_ids_with_load_errors()
        asked.get_kv_connector_stats()
        asked.build_connector_worker_meta()
        asked.clear_connector_metadata()

    idle = median(step, turns=500)
    gpu = GPULoadStoreSpec(list(range(1, 65)), [64] + [0] * (groups - 1), [0] * groups)
    cpu = CPULoadStoreSpec(list(range(64 // copier.blocks_per_chunk)))
    jobs = itertools.count(10**6)
    found.submit_store(next(jobs), gpu, cpu)  # what was never stored is no step of a load
    copier.finished()
    pairs = median(lambda: copier._pairs(gpu.block_ids, cpu.block_ids, gpu.group_sizes, gpu.block_indices))
    submit = median(lambda: found.submit_load(next(jobs), cpu, gpu), copier.finished)

    def begin() -> None:
        copier.finished()
        found.submit_load(next(jobs), cpu, gpu)

    begin()
    finish = median(lambda: (found.get_finished(), found.take_failures(), found.take_stats()), begin)
    copier.finished()
    stores = copier.memory.stores[0]
    ids, units = np.arange(1, 65), np.arange(64)
    digests = torch.zeros(64, dtype=torch.int64, pin_memory=bool(copier.streams))
    copies = sum(median(lambda store=store: store.back.copy(units, ids, digests=digests).synchronize()) for store in stores)
    return {"idle": idle, "pairs": pairs, "submit": submit, "copy": copies, "finish": finish}


def scheduler_overhead(llm: Any) -> dict[str, float]:
    """Seconds of the scheduler's step with nothing to move, and of storing, looking up and loading 64 chunks by its manager."""
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
    from vllm.v1.outputs import KVConnectorOutput

    asked = llm.llm_engine.engine_core.engine_core.scheduler.connector
    nothing, output = SchedulerOutput.make_empty(), KVConnectorOutput()

    def step() -> None:
        asked.build_connector_meta(nothing)
        asked.update_connector_output(output)

    found = {"idle": median(step, turns=500)}
    for name, kind in (("ours", type(asked.scheduler.manager)), ("vLLM's", CPUOffloadingManager)):
        manager, jobs = kind(num_chunks=4096), itertools.count()

        def chunks(manager: Any = manager, jobs: Any = jobs) -> None:
            context = ReqContext(str(next(jobs)))
            keys = [f"{context.req_id:>30}{i:>6}".encode() for i in range(64)]
            manager.prepare_store(keys, context)
            manager.complete_store(keys, context)
            for key in keys:
                manager.lookup(key, context)
            manager.prepare_load(keys, context)
            manager.complete_load(keys, context)

        found[f"64 chunks, {name}"] = median(chunks)
    return found


def generated(llm: Any, wanted: list[list[int]], new: int) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=new, detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt(length)[:first]} for length, first in wanted]
    found = llm.generate(prompts, sampling, use_tqdm=False)
    return [
        {"tokens": list(one.outputs[0].token_ids), "cached": one.num_cached_tokens, "ended": one.outputs[0].finish_reason}
        for one in found
    ]


def main(settings: Settings) -> None:
    from vllm import LLM

    usual = {
        "skip_tokenizer_init": True, "max_model_len": 1024, "enforce_eager": True, "max_num_seqs": 4, "dtype": "float32",
        "block_size": 32, "enable_prefix_caching": True, "disable_log_stats": False,
    }  # fmt: skip
    llm = LLM(**arguments(usual, settings["llm"]))
    results: list[Any] = []
    for step in settings["steps"]:
        if step == "reset":
            time.sleep(0.2)  # what was offloaded is told at the next step
            generated(llm, [[40, 40]], 2)
            assert llm.reset_prefix_cache()
        elif step == "flip":
            llm.collective_rpc(flip)
        else:
            results.append(generated(llm, step["prompts"], settings["new"]))
    generated(llm, [[40, 40]], 2)
    counters = {
        metric.name: metric.value
        for metric in llm.get_metrics()
        if ("offload" in metric.name or "preempt" in metric.name) and hasattr(metric, "value")
    }
    found = {
        "runs": results,
        "facts": llm.collective_rpc(facts),
        "counters": counters,
        "overhead": llm.collective_rpc(overhead)[0] if settings.get("overhead", True) else {},
        "scheduler": scheduler_overhead(llm) if settings.get("scheduler") else {},
    }
    print("RESULT", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
