"""vLLM whose blocks leave for an LMCache server and come back: ``lmcache_offload.py MODEL``; prints JSON behind RESULT.

The device plugin is that of LMCACHE_DEVICE_BACKEND; what its copies were is counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from generate import arguments, prompt

from ports import free_ports


def server() -> tuple[Any, int]:
    """An LMCache server, when it answers, and its port."""
    port = free_ports(2)
    web = port + 1
    command = [
        str(Path(sys.executable).parent / "lmcache"), "server", "--host", "127.0.0.1", "--port", str(port), "--http-port", str(web),
        "--chunk-size", "64", "--l1-size-gb", "1", "--eviction-policy", "LRU", "--supported-transfer-mode", "engine_driven",
        "--disable-observability",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    for _ in range(600):
        try:
            urlopen(f"http://127.0.0.1:{web}/").close()
            break
        except OSError as error:
            if hasattr(error, "code"):  # it answers, whatever it says
                break
            assert process.poll() is None, "the server is gone"
            time.sleep(0.1)
    return process, port


def quiet() -> None:
    """Let vLLM look at all modules: llvmlite's library, which LMCache imports, answers to any name with a function."""
    import llvmlite.binding.ffi as ffi

    kind = type(ffi.lib)
    found = kind.__getattr__

    def get(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return found(self, name)

    kind.__getattr__ = get


def counted(calls: list[list[Any]], spoil: list[bool]) -> str:
    """Count the copies of LMCache's operations for the CPU, and zero what comes back where `spoil` says so; their class."""
    from lmcache.v1.multiprocess.transfer_context.base import resolve_device_ops

    ops = resolve_device_ops("cpu")
    stock = type(ops).multi_layer_block_kv_transfer

    def transfer(
        self: Any,
        paged_buffer_ptrs_tensor: Any,
        lmcache_objects_ptrs: list[int] | list[torch.Tensor],  # noqa: F821  (LMCache reads it)
        *others: Any,
    ) -> None:
        calls.append([str(others[2].name), len(others[0])])
        if spoil[0] and others[2].name == "H2D":
            for one in lmcache_objects_ptrs:
                one.zero_()
        stock(self, paged_buffer_ptrs_tensor, lmcache_objects_ptrs, *others)

    type(ops).multi_layer_block_kv_transfer = transfer
    return type(ops).__name__


def main(model: str) -> None:
    quiet()
    from vllm import LLM, SamplingParams

    process, port = server()
    transfer = {
        "kv_connector": "KvbmLMCacheConnector", "kv_connector_module_path": "kvbm.integrations.lmcache", "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
    }  # fmt: skip
    calls: list[list[Any]] = []
    spoil = [False]
    try:
        name = counted(calls, spoil)
        usual = {
            "skip_tokenizer_init": True, "max_model_len": 512, "enforce_eager": True, "max_num_seqs": 4, "dtype": "float32",
            "block_size": 32, "enable_prefix_caching": True, "num_gpu_blocks_override": 17,
        }  # fmt: skip
        llm = LLM(**arguments(usual, {"model": model, "kv_transfer_config": transfer}))
        sampling = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
        runs = []
        for turn in range(3):
            spoil[0] = turn == 2
            for length in (300, 310, 320):  # the engine has room for one and a half
                [one] = llm.generate([{"prompt_token_ids": prompt(length)}], sampling, use_tqdm=False)
                runs.append([list(one.outputs[0].token_ids), one.num_cached_tokens])
                time.sleep(0.3)
    finally:
        process.kill()
        process.wait()
    print("RESULT", json.dumps({"runs": runs, "calls": calls, "ops": name}), flush=True)


if __name__ == "__main__":
    code = 1
    try:
        main(sys.argv[1])
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)  # its threads wait for the server
