"""SGLang on the CPU, and prompts one after the other: ``sglang_serve.py SETTINGS`` (`Settings`, JSON); prints JSON behind RESULT."""

from __future__ import annotations

import standins  # noqa: F401  (first, in each process)

import json  # isort: split
import os
import sys
import time
from pathlib import Path
from typing import Any, TypedDict


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
    """

    engine: dict[str, Any]
    steps: list[Any]
    new: int


def prompt(length: int) -> list[int]:
    """Tokens that no two lengths have in common from the first page on."""
    return [(i * 7 + 31 * length) % 1000 + 3 for i in range(length)]


def main(settings: Settings) -> None:
    from sglang import Engine

    usual = {
        "device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch", "skip_tokenizer_init": True,
        "dtype": "float32", "page_size": 16, "max_total_tokens": 512, "context_length": 448, "max_running_requests": 2,
        "disable_cuda_graph": True, "log_level": "info", "random_seed": 0, "mem_fraction_static": 0.3,
    }  # fmt: skip
    engine = Engine(**{**usual, **settings["engine"]})
    sampling = {"temperature": 0, "max_new_tokens": settings["new"], "ignore_eos": True}
    runs = []
    for step in settings["steps"]:
        if isinstance(step, str):
            Path(os.environ["KVBM_SPOIL"]).write_text(step)
            continue
        start = time.perf_counter()
        found = engine.generate(input_ids=[prompt(length) for length in step], sampling_params=sampling)
        seconds = time.perf_counter() - start
        runs.append(
            [
                {
                    "tokens": one["output_ids"], "cached": one["meta_info"].get("cached_tokens"), "seconds": seconds,
                    "reason": one["meta_info"].get("finish_reason"),
                }
                for one in found
            ]
        )  # fmt: skip
        time.sleep(0.3)  # what was offloaded is told at a later step
    engine.shutdown()
    seen = Path(os.environ["KVBM_SEEN"])
    print("RESULT", json.dumps({"runs": runs, "seen": seen.read_text() if seen.exists() else ""}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
