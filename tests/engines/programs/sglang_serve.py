"""SGLang on the CPU, prompts one after the other: ``sglang_serve.py SETTINGS`` (`Settings`, JSON); prints JSON behind RESULT."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, TypedDict

import standins  # noqa: F401  (before SGLang, in each process)

if "enable_hierarchical_cache" in sys.argv[1]:
    import hicache_on_cpu  # noqa: F401


class Settings(TypedDict):
    """What is run.

    Attributes
    ----------
    engine : dict
        Arguments of `sglang.Engine`.
    steps : list
        ``[length, …]``: prompts that are generated together; ``"lookup"`` or ``"load"``: a page in host memory
        is spoiled before the next one that finds it.
    new : int
        Tokens that are generated.
    folder : str
        Where files say what is spoiled, and what was seen.
    """

    engine: dict[str, Any]
    steps: list[Any]
    new: int
    folder: str


def prompt(length: int) -> list[int]:
    """Tokens that no two lengths have in common from the first page on."""
    return [(i * 7 + 31 * length) % 1000 + 3 for i in range(length)]


def generated(engine: Any, lengths: list[int], new: int) -> list[dict[str, Any]]:
    sampling, prompts = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}, [prompt(one) for one in lengths]
    start = time.perf_counter()
    try:
        found = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True, top_logprobs_num=20)
    except Exception as error:  # of SGLang's server
        return [{"error": f"{type(error).__name__}: {error}"}]
    seconds = time.perf_counter() - start
    return [
        {
            "tokens": one["output_ids"], "cached": one["meta_info"]["cached_tokens"], "seconds": seconds,
            "logprobs": logprobs(one["meta_info"]["output_top_logprobs"]),
        }
        for one in found
    ]  # fmt: skip


def logprobs(found: list[list[list[Any]]]) -> list[dict[int, float]]:
    """Of the first tokens: the likeliest ones, and how likely."""
    return [{token: value for value, token, *_ in likely} for likely in found[:3]]


def main(settings: Settings) -> None:
    from sglang import Engine

    usual = {
        "device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch", "skip_tokenizer_init": True,
        "dtype": "float32", "page_size": 16, "max_total_tokens": 512, "context_length": 448, "max_running_requests": 2,
        "disable_cuda_graph": True, "log_level": "info", "random_seed": 0, "mem_fraction_static": 0.3,
    }  # fmt: skip
    engine = Engine(**{**usual, **settings["engine"]})
    runs = []
    for step in settings["steps"]:
        if isinstance(step, str):
            (Path(settings["folder"]) / "spoil").write_text(step)
            continue
        runs.append(generated(engine, step, settings["new"]))
        time.sleep(0.3)  # what was offloaded is told at a later step
    engine.shutdown()
    seen = Path(settings["folder"]) / "seen"
    print("RESULT", json.dumps({"runs": runs, "seen": seen.read_text() if seen.exists() else ""}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
