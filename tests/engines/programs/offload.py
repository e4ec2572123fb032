"""vLLM whose blocks leave for host memory and come back: ``offload.py SETTINGS`` (`Settings`, JSON); prints JSON behind RESULT."""

from __future__ import annotations

import json
import sys
import time
from typing import Any, TypedDict

from generate import prompt


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
    """

    llm: dict[str, Any]
    steps: list[Any]
    new: int


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
    import numpy as np

    memory = worker().copier.memory
    array = next(array for array in memory.lanes[-1][0].host.arrays if array.any())
    block = array if array.ndim == 5 else array[next(i for i in range(len(array)) if array[i].any())]
    block.view(np.uint8)[...] |= 64


def facts(_: Any = None) -> dict[str, Any]:
    """What the worker copies."""
    memory = worker().copier.memory
    lanes = {id(lane): lane for lanes in memory.lanes for lane in lanes}
    first = next(iter(lanes.values()))
    return {
        "groups": len(memory.lanes), "lanes": len(lanes), "shape": str(first.host.shape),
        "title": first.out.explain(1).split(",")[0],
        "shared": memory.is_shared, "known": sum(int(lane.known.sum()) for lane in lanes.values()),
    }  # fmt: skip


def overhead(_: Any = None) -> dict[str, float]:
    """Seconds of a step with nothing to move, and of a submit of 64 blocks."""
    import numpy as np
    from vllm.v1.kv_offload.base import GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    found = worker()
    copier, groups = found.copier, len(found.copier.memory.lanes)
    start = time.perf_counter()
    for _ in range(1000):
        found.get_finished(), found.take_failures(), found.take_stats()
    idle = (time.perf_counter() - start) / 1000
    gpu = GPULoadStoreSpec(list(range(1, 65)), [64] + [0] * (groups - 1), [0] * groups)
    cpu = CPULoadStoreSpec(list(range(64 // copier.blocks_per_chunk)))
    pairs, submits = [], []
    for turn in range(20):
        start = time.perf_counter()
        copier._pairs(gpu.block_ids, cpu.block_ids, gpu.group_sizes, gpu.block_indices, True)
        pairs.append(time.perf_counter() - start)
        start = time.perf_counter()
        found.submit_load(10**6 + turn, cpu, gpu)
        submits.append(time.perf_counter() - start)
        copier.finished()
    return {"idle": idle, "pairs": float(np.median(pairs)), "submit": float(np.median(submits))}


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
    llm = LLM(**{**usual, **settings["llm"]})
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
        if "offload" in metric.name and hasattr(metric, "value")
    }
    found = {
        "runs": results,
        "facts": llm.collective_rpc(facts),
        "counters": counters,
        "overhead": llm.collective_rpc(overhead)[0],
    }
    print("RESULT", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
