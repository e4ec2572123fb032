"""Time to the first token in an engine that decodes what another one has prefilled: ``handover.py MODEL [LENGTHS [ROUNDS]]``.

A pair of engines with `KvbmConnector` and a pair with vLLM's own `NixlConnector` take turns, with blocks of one size.  Each engine
is a process of its own.  With two GPUs, prefill engines have the first one and decode engines the second one.  Lengths of prompts
are separated by commas.  The folder tests/helpers is in PYTHONPATH.  Prints JSON behind RESULT.

Each prompt is new.  It is prefilled, and then the time is taken until the decode engine has its first token: from the other engine,
and computed.  Behind each, not timed, are the tokens that follow, with the prompt in the engine's prefix cache: ``same`` counts the
prompts for which they agree.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

from generate import arguments, prompt
from torch import cuda

from ports import free_ports

#: Seconds until what an engine did before is over.
PAUSE = 0.2

#: Tokens that are compared.
NEW = 8

WAYS: dict[str, dict[str, Any]] = {
    "KvbmConnector": {"kv_connector": "KvbmConnector", "kv_connector_module_path": "kvbm.integrations.vllm"},
    "NixlConnector": {"kv_connector": "NixlConnector", "kv_buffer_device": "cuda" if cuda.is_available() else "cpu"},
}

ROLES = ("prefill", "decode")


def serve(model: str, way: str, role: str, most: int, port: int) -> None:
    """Answer each line of stdin: ``length``, ``seed``, and for the decode engine ``params`` of the other one."""
    from vllm import LLM, SamplingParams

    transfer = {"kv_role": "kv_both", "kv_load_failure_policy": "fail", **WAYS[way]}
    if way == "KvbmConnector":
        transfer["kv_port"] = port
    usual = {
        "skip_tokenizer_init": True, "max_model_len": most + 64, "max_num_batched_tokens": most + 64, "enforce_eager": True,
        "max_num_seqs": 4, "dtype": "float32", "block_size": 32, "enable_prefix_caching": True, "disable_log_stats": False,
        "hf_overrides": {"max_position_embeddings": most + 64},
    }  # fmt: skip
    llm = LLM(**arguments(usual, {"model": model, "kv_transfer_config": transfer}))

    def run(tokens: list[int], new: int = 1, params: dict[str, Any] | None = None) -> tuple[float, Any]:
        sampling = SamplingParams(
            temperature=0, max_tokens=new, detokenize=False, ignore_eos=True,
            extra_args={"kv_transfer_params": params} if params else None,
        )  # fmt: skip
        start = time.perf_counter()
        [found] = llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        return time.perf_counter() - start, found

    def settle() -> None:
        """Steps in which the connector hears what has ended."""
        for _ in range(3):
            run(prompt(40, 0))

    def measured(tokens: list[int], params: dict[str, Any] | None = None) -> dict[str, Any]:
        settle()
        assert llm.reset_prefix_cache()
        time.sleep(PAUSE)
        seconds, first = run(tokens, 1, params)
        _, rest = run(tokens, NEW)
        return {"seconds": seconds, "cached": first.num_cached_tokens, "tokens": list(rest.outputs[0].token_ids)}

    run(prompt(64))
    print("RESULT", 0, flush=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        tokens = prompt(wanted["length"], wanted["seed"])
        if role == "prefill":
            _, found = run(tokens, 1, {"do_remote_decode": True, "do_remote_prefill": False})
            settle()
            print("RESULT", json.dumps(found.kv_transfer_params), flush=True)
            continue
        params = {**wanted["params"], "remote_prefill_cached_tokens": None}  # else vLLM counts those of the other engine
        print("RESULT", json.dumps({"sent": measured(tokens, params), "computed": measured(tokens)}), flush=True)


def started(model: str, way: str, role: str, most: int) -> subprocess.Popen[str]:
    """An engine that starts."""
    side, port = ROLES.index(role), free_ports(2)
    of_role = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port), "VLLM_CPU_OMP_THREADS_BIND": str(side)}
    of_role["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a GPU that was asked for cannot be used after a fork
    if cuda.device_count() > 1:
        of_role["CUDA_VISIBLE_DEVICES"] = "1,0" if side else "0,1"  # it maps memory of the other GPU
    return subprocess.Popen(
        [sys.executable, __file__, "serve", model, way, role, str(most), str(port)], env={**os.environ, **of_role},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def answer(process: subprocess.Popen[str], wanted: dict[str, Any] | None = None) -> Any:
    """What an engine answers."""
    assert process.stdin is not None and process.stdout is not None
    if wanted is not None:
        print(json.dumps(wanted), file=process.stdin, flush=True)
    seen = []
    for line in process.stdout:
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
        seen.append(line)
    raise AssertionError("".join(seen[-60:]))


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds of one way and length."""
    found: dict[str, Any] = {"same": sum(one["sent"]["tokens"] == one["computed"]["tokens"] for one in runs), "of": len(runs)}
    for what in ("sent", "computed"):
        seconds = [one[what]["seconds"] for one in runs]
        found[what] = {
            "median_ms": statistics.median(seconds) * 1e3, "least_ms": min(seconds) * 1e3,
            "cached": sorted({one[what]["cached"] for one in runs}),
        }  # fmt: skip
    return found


def main(model: str, lengths: str = "512,2048,8192", rounds: str = "9") -> None:
    wanted = [int(length) for length in lengths.split(",")]
    processes = {(way, role): started(model, way, role, max(wanted)) for way in WAYS for role in ROLES}
    found: dict[int, dict[str, list[Any]]] = {length: {way: [] for way in WAYS} for length in wanted}
    try:
        for process in processes.values():
            answer(process)
        for turn in range(int(rounds) + 1):
            for length in wanted:
                for way in WAYS:
                    asked = {"length": length, "seed": 1 + turn}
                    params = answer(processes[way, "prefill"], asked)
                    result = answer(processes[way, "decode"], {**asked, "params": params})
                    told = ", ".join(f"{what} {one['seconds'] * 1e3:.1f} ms" for what, one in result.items())
                    print(f"{turn} {length} {way}: {told}", flush=True)
                    found[length][way] += [result] if turn else []
    finally:
        for process in processes.values():
            os.killpg(process.pid, signal.SIGKILL)  # an engine's workers, too: they would keep its memory on the GPU
            process.wait()
    facts = {str(length): {way: summary(runs) for way, runs in ways.items()} for length, ways in found.items()}
    print("RESULT", json.dumps({"rounds": int(rounds), "lengths": facts}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
    else:
        main(*sys.argv[1:])
