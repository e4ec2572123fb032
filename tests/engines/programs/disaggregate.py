"""One engine of two: ``disaggregate.py prefill|decode SETTINGS FOLDER``; the folder is where they wait for each other.

Settings are JSON: ``llm`` (arguments of `vllm.LLM`) and ``steps``, each a prompt that one prefills and the other decodes, which it
does again by itself at the end, for comparison; ``counts`` are those of kvbm at vLLM's Prometheus endpoint before that:

- ``length`` and ``seed`` of the prompt (those of one seed begin alike);
- ``again``: the prefix cache of the engine that decodes is kept;
- ``params``: what is changed in what the engine that prefills says;
- ``other``: the engine that prefills is given another prompt;
- ``kill``: it is killed before the other one decodes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from generate import logprobs, prompt

#: Tokens that are generated.
NEW = 12


def told(out: Any) -> dict[str, Any]:
    [one] = out.outputs
    found = {"tokens": list(one.token_ids), "logprobs": logprobs(one), "cached": out.num_cached_tokens}
    return {**found, "reason": one.finish_reason}


def main(role: str, settings: dict[str, Any], folder: Path) -> None:
    from vllm import LLM, SamplingParams

    usual = {
        "skip_tokenizer_init": True, "max_model_len": 1024, "enforce_eager": True, "max_num_seqs": 4, "dtype": "float32",
        "enable_prefix_caching": True, "disable_log_stats": False,
    }  # fmt: skip
    llm = LLM(**{**usual, **settings["llm"]})

    def run(tokens: list[int], new: int, params: dict[str, Any] | None = None) -> Any:
        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(
            temperature=0, max_tokens=new, detokenize=False, ignore_eos=True, extra_args=extra, logprobs=3
        )
        return llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)[0]

    def wait(name: str) -> Any:
        end = time.monotonic() + 180
        while not (folder / name).exists():
            assert time.monotonic() < end, f"{name}: not there"
            time.sleep(0.02)
            if role == "prefill":
                run([5, 6, 7], 1)  # an engine without requests stands still
        return json.loads((folder / name).read_text())

    def put(name: str, value: Any) -> None:
        (folder / f"{name}.part").write_text(json.dumps(value))
        (folder / f"{name}.part").rename(folder / name)

    results: list[dict[str, Any]] = []
    if role == "prefill":
        put("pid", os.getpid())
    else:
        run(prompt(64), 2)  # the first step of a process may not be one of a single token
    for number, step in enumerate(settings["steps"]):
        tokens = prompt(step["length"], step.get("seed"))
        if role == "prefill":
            if step.get("other"):
                tokens = [token % 1000 + 3 for token in tokens]
            put(f"{number}", run(tokens, 1, {"do_remote_decode": True, "do_remote_prefill": False}).kv_transfer_params)
            wait(f"{number}.done")
            continue
        params = wait(f"{number}")
        if step.get("kill"):
            os.kill(wait("pid"), signal.SIGKILL)
        if not step.get("again"):
            assert llm.reset_prefix_cache()
        of_this = {"remote_prefill_cached_tokens": None}  # else vLLM counts those of the other engine
        loaded = told(run(tokens, NEW, {**params, **of_this, **step.get("params", {})}))
        results.append(loaded)
        put(f"{number}.done", True)
        if step.get("kill"):
            break
    counts = {one.name: one.value for one in llm.get_metrics() if one.name.startswith("vllm:kvbm_")}
    if role == "decode":
        for step, found in zip(settings["steps"], results, strict=True):
            assert llm.reset_prefix_cache()
            found["alone"] = told(run(prompt(step["length"], step.get("seed")), NEW))
            found["counts"] = counts
    print("RESULT", json.dumps(results), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
