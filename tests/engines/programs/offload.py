"""vLLM with blocks that leave for host memory and come back: ``offload.py SETTINGS``, JSON; prints JSON behind RESULT.

Settings are those of `generate.py`; and `flip`: bytes are turned in host memory before the run of this number.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from generate import generated


def worker(_: Any = None) -> Any:
    """The one that copies, in a process of vLLM's."""
    from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group

    return get_kv_transfer_group().connector_worker.worker


def flip(_: Any = None) -> None:
    """Turn a bit of each element of the first stored block: other tokens, where nobody checks."""
    import numpy as np

    lane = worker()._memory.lanes[-1][0]
    for array in lane.host.arrays:
        if array.any():
            array.view(np.uint8)[...] ^= 64
            return
    raise AssertionError("nothing is stored")


def facts(_: Any = None) -> dict[str, Any]:
    """What the worker copies, and where."""
    found = worker()
    if not hasattr(found, "_memory"):
        return {"worker": type(found).__name__}
    lanes = [lane for lanes in found._memory.lanes for lane in lanes]
    return {
        "worker": type(found).__name__,
        "groups": len(found._memory.lanes),
        "lanes": len({id(lane) for lane in lanes}),
        "shape": str(lanes[0].host.shape),
        "engine": lanes[0].out.explain(1).splitlines()[0],
        "known": [int(lane.known.sum()) for lane in lanes],
    }


def overhead(_: Any = None) -> dict[str, float]:
    """Seconds of a step with nothing to move, and of a submit of 64 blocks."""
    import numpy as np
    from vllm.v1.kv_offload.base import GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    found = worker()
    groups = len(found._memory.lanes)
    start = time.perf_counter()
    for _ in range(1000):
        found.get_finished(), found.take_failures(), found.take_stats()
    idle = (time.perf_counter() - start) / 1000
    gpu = GPULoadStoreSpec(list(range(1, 65)), [64] + [0] * (groups - 1), [0] * groups)
    cpu = CPULoadStoreSpec(list(range(64 // found._blocks_per_chunk)))
    pairs, submit = [], []
    for turn in range(20):
        start = time.perf_counter()
        found._pairs(gpu, cpu, True)
        pairs.append(time.perf_counter() - start)
        start = time.perf_counter()
        found.submit_store(10**6 + turn, gpu, cpu)
        submit.append(time.perf_counter() - start)
        found.wait({10**6 + turn})
        found._running[0].clear()
    return {"idle": idle, "pairs": float(np.median(pairs)), "submit": float(np.median(submit))}


def main(settings: dict[str, Any]) -> None:
    from vllm import LLM

    usual = {
        "skip_tokenizer_init": True, "max_model_len": 1024, "enforce_eager": True, "max_num_seqs": 4, "dtype": "float32",
        "block_size": 32, "enable_prefix_caching": True,
    }  # fmt: skip
    llm = LLM(**{**usual, **settings["llm"]})
    results: list[Any] = []
    for number, lengths in enumerate(settings["runs"]):
        if number == settings.get("flip"):
            llm.collective_rpc(flip)
        results.append(generated(llm, lengths, settings["new"]))
        time.sleep(0.2)  # what was offloaded is told at the next step
        generated(llm, [40], 2)
        assert llm.reset_prefix_cache()
    found = llm.collective_rpc(facts) if "kv_transfer_config" in settings["llm"] else []
    if settings.get("overhead"):
        found[0]["overhead"] = llm.collective_rpc(overhead)[0]
    print("RESULT", json.dumps({"runs": results, "facts": found}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
