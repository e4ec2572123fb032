"""Time to the first token of a prompt from host memory: ``reload.py MODEL [TOKENS [ROUNDS [VALUES]]]``.

Engines in processes of their own take turns: without offloading, with vLLM's, and with kvbm as the copier.  vLLM's copier needs a
GPU: without one a memmove a page and layer stands for it, with vLLM's connector, scheduler and manager as they are.  For each of
VALUES, which are separated by commas, there is one more engine with kvbm and that ``host_values``.  Prints JSON behind RESULT.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from generate import arguments, prompt
from torch import cuda

#: Bytes of host memory.
HOST = int(os.environ.get("KVBM_ENGINE_HOST", 1 << 29))

STAND_IN = {} if cuda.is_available() else {"spec_name": "MemmoveSpec", "spec_module_path": "memmove_spec"}

#: ``host_values`` that an engine may have.
VALUES = ("fp8", "mxfp8", "nvfp4")

#: Seconds until the threads of the engine before sleep.
PAUSE = 0.5


def connector(name: str, **extra: Any) -> dict[str, Any]:
    module = None if name == "OffloadingConnector" else "kvbm.integrations.vllm"
    return {
        "kv_connector": name, "kv_role": "kv_both", "kv_connector_module_path": module,
        "kv_connector_extra_config": {"cpu_bytes_to_use": HOST, **extra},
    }  # fmt: skip


WAYS = {
    "computed": None,
    "vLLM": connector("OffloadingConnector", **STAND_IN),
    "kvbm": connector("KvbmOffloadingConnector"),
    "kvbm, no digests": connector("KvbmOffloadingConnector", verify=False),
    **{f"kvbm, {values}": connector("KvbmOffloadingConnector", host_values=values) for values in VALUES},
}


def serve(model: str, way: str, tokens: int) -> None:
    """Answer each line of stdin with the seconds of one more run."""
    from vllm import LLM, SamplingParams

    usual = {
        "skip_tokenizer_init": True, "max_model_len": tokens + 64, "max_num_batched_tokens": tokens + 64, "enforce_eager": True,
        "max_num_seqs": 4, "dtype": "float32", "block_size": 32, "enable_prefix_caching": True, "disable_log_stats": False,
        "hf_overrides": {"max_position_embeddings": tokens + 64},
    }  # fmt: skip
    llm = LLM(**arguments(usual, {"model": model, "kv_transfer_config": WAYS[way]}))
    first = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)

    def run(length: int, seed: int) -> tuple[float, Any]:
        ids = {"prompt_token_ids": prompt(length, seed)}
        start = time.perf_counter()
        [found] = llm.generate([ids], first, use_tqdm=False)
        return time.perf_counter() - start, found

    def reset() -> None:
        for _ in range(3):  # what was offloaded is told at a later step
            run(40, 0)
        assert llm.reset_prefix_cache()

    run(tokens, 1)
    print("RESULT", 0, flush=True)
    for _ in sys.stdin:
        reset()
        seconds, found = run(tokens, 1)
        result = {"seconds": seconds, "cached": found.num_cached_tokens, "tokens": list(found.outputs[0].token_ids)}
        print("RESULT", json.dumps(result), flush=True)


def answer(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
        seen.append(line)
    raise AssertionError("".join(seen[-40:]))


def main(model: str, tokens: str = "4096", rounds: str = "9", values: str = "") -> None:
    left_out = {f"kvbm, {one}" for one in VALUES if one not in values.split(",")}
    found: dict[str, list[Any]] = {way: [] for way in WAYS if way not in left_out}
    processes = {}
    for way in found:
        command = [sys.executable, __file__, "serve", model, way, tokens]
        processes[way] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    for process in processes.values():
        answer(process)
    try:
        for turn in range(int(rounds) + 1):
            for way, process in processes.items():
                assert process.stdin is not None
                time.sleep(PAUSE)
                print(turn, file=process.stdin, flush=True)
                result = answer(process)
                print(f"{turn} {way}: {result['seconds'] * 1e3:.1f} ms", flush=True)
                found[way] += [result] if turn else []
    finally:
        for process in processes.values():
            process.communicate()
    facts = {
        way: {
            "median_ms": statistics.median(one["seconds"] for one in runs) * 1e3,
            "least_ms": min(one["seconds"] for one in runs) * 1e3,
            "cached": sorted({one["cached"] for one in runs}),
            "tokens": sorted({one["tokens"][0] for one in runs}),
        }
        for way, runs in found.items()
    }
    print("RESULT", json.dumps({"tokens": int(tokens), "rounds": int(rounds), "ways": facts}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "all")
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main(*sys.argv[1:])
