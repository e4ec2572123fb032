"""vLLM's tokens for prompts, run after run: ``generate.py SETTINGS``, which are JSON (`Settings`); prints JSON behind RESULT."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Collection
from typing import Any, NotRequired, TypedDict


class Settings(TypedDict):
    """What is run.

    Attributes
    ----------
    llm : dict
        Arguments of `vllm.LLM`.
    runs : list of list of int
        Lengths of prompts: those of a run are generated together, and before the next one the prefix cache is reset.
    new : int
        Tokens that are generated.
    salted : list of int, optional
        Lengths of prompts that have a salt: their keys are those of no other engine.
    likely : int, optional
        How many of the likeliest tokens are told with their log probabilities; 3 if not given.
    """

    llm: dict[str, Any]
    runs: list[list[int]]
    new: int
    likely: NotRequired[int]
    salted: NotRequired[list[int]]


def arguments(usual: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Of `vllm.LLM`: the usual ones, those of the JSON in ``KVBM_ENGINE_LLM`` (of this machine), and those of the test."""
    if wanted.get("load_format") == "kvbm_random":
        from structures import register

        register()
    return {**usual, **json.loads(os.environ.get("KVBM_ENGINE_LLM", "{}")), **wanted}


def prompt(length: int, seed: int | None = None) -> list[int]:
    """Tokens that no two seeds, the length if not given, have in common from the first block on."""
    return [(i * 7 + 31 * (length if seed is None else seed)) % 1000 + 3 for i in range(length)]


def logprobs(output: Any) -> list[dict[int, float]]:
    """Of the first tokens: the likeliest ones, and how likely."""
    return [{token: one.logprob for token, one in likely.items()} for likely in (output.logprobs or [])[:3]]


def generated(
    llm: Any, lengths: list[int], new: int, likely: int = 3, salted: Collection[int] = ()
) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=new, detokenize=False, ignore_eos=True, logprobs=likely)
    start = time.perf_counter()
    prompts = [{"prompt_token_ids": prompt(one), **({"cache_salt": "own"} if one in salted else {})} for one in lengths]
    found = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    return [
        {
            "tokens": list(one.outputs[0].token_ids), "cached": one.num_cached_tokens, "seconds": seconds,
            "logprobs": logprobs(one.outputs[0]),
        }
        for one in found
    ]  # fmt: skip


def main(settings: Settings) -> None:
    from vllm import LLM

    usual = {
        "skip_tokenizer_init": True, "max_model_len": 1024, "enforce_eager": True, "max_num_seqs": 4, "dtype": "float32",
        "block_size": 32, "enable_prefix_caching": True,
    }  # fmt: skip
    llm = LLM(**arguments(usual, settings["llm"]))
    results = []
    for lengths in settings["runs"]:
        salted = settings.get("salted", ())
        results.append(generated(llm, lengths, settings["new"], settings.get("likely", 3), salted))
        time.sleep(0.2)  # what was offloaded is told at the next step
        generated(llm, [40], 2)
        assert llm.reset_prefix_cache()
    print("RESULT", json.dumps(results), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
