"""One engine of two: ``disaggregate.py prefill|decode SETTINGS FOLDER``; the folder is where they wait for each other.

Settings are JSON: ``llm`` (arguments of `vllm.LLM`), ``lengths`` of prompts, ``new`` tokens that are generated, and for the engine
that decodes ``kill``: before this request it kills the other one; for the one that prefills ``other``: it is given other prompts.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from generate import prompt


def main(role: str, settings: dict[str, Any], folder: Path) -> None:
    from vllm import LLM, SamplingParams

    usual = {
        "skip_tokenizer_init": True, "max_model_len": 1024, "enforce_eager": True, "max_num_seqs": 4, "dtype": "float32",
        "enable_prefix_caching": True,
    }  # fmt: skip
    llm = LLM(**{**usual, **settings["llm"]})

    def run(tokens: list[int], new: int, params: dict[str, Any] | None = None) -> Any:
        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(temperature=0, max_tokens=new, detokenize=False, ignore_eos=True, extra_args=extra, logprobs=3)
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

    results = []
    if role == "prefill":
        put("pid", os.getpid())
    else:
        run(prompt(64), 2)  # the first step of a process may not be one of a single token
    for number, length in enumerate(settings["lengths"]):
        if role == "prefill":
            tokens = prompt(length)
            if settings.get("other"):
                tokens = [token % 1000 + 3 for token in tokens]
            put(f"{number}", run(tokens, 1, {"do_remote_decode": True, "do_remote_prefill": False}).kv_transfer_params)
            wait(f"{number}.done")
        else:
            params = wait(f"{number}")
            if settings.get("kill") == number:
                os.kill(wait("pid"), signal.SIGKILL)
            out = run(prompt(length), settings["new"], params)
            print("LP", number, [{k: round(v.logprob, 5) for k, v in one.items()} for one in out.outputs[0].logprobs[:3]], flush=True)
            results.append(list(out.outputs[0].token_ids))
            put(f"{number}.done", True)
            if settings.get("kill") == number:
                break
    print("RESULT", json.dumps(results), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
