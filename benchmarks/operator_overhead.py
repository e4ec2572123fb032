"""What an operator of kvbm.torch costs beyond the direct call: host time a call, on blocks too small to matter.

    python benchmarks/operator_overhead.py [cpu|cuda]

Every figure is the fastest of several rounds of many calls; on a GPU the stream is drained between rounds, so that no call
waits for room in its queue.  "direct" is `kvbm.convert` on pools that were bound before; the functional operator also
allocates its results, which `torch.empty_strided` alone is timed for and which is taken off.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import kvbm
import kvbm.torch

#: Source, destination and layers, from one tensor a side to many.
CASES = (
    ("vllm/LBHNC", "vllm/LBNHC", 1),
    ("vllm/flash_attn_nhd", "vllm/LBHNC", 32),
    ("vllm/flash_attn_nhd", "hf/dynamic_cache", 32),
)
BLOCKS = 4


def microseconds(call: Callable[[], Any], device: str, rounds: int = 80, calls: int = 50) -> float:
    """The fastest round's time a call."""
    best = float("inf")
    for _ in range(rounds):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - begin) / calls)
    return 1e6 * best


def memory(name: str, shape: kvbm.BlockShape, device: str) -> list[torch.Tensor]:
    resolved = kvbm.load(name).resolve(shape, BLOCKS)
    return [torch.zeros(one.shape, device=device) for one in resolved.allocations]


def measure(src: str, dst: str, layers: int, device: str) -> tuple[str, ...]:
    shape = kvbm.BlockShape(nl=layers, no=2, nh=1, nt=2, hd=4, dtype="float32")
    text = str(shape)
    given, into = memory(src, shape, device), memory(dst, shape, device)
    pools = kvbm.Pool(kvbm.load(src), shape, given), kvbm.Pool(kvbm.load(dst), shape, into)
    ids = torch.arange(BLOCKS)
    run = lambda call: microseconds(call, device)  # noqa: E731
    direct, by_ids = run(lambda: kvbm.convert(*pools)), run(lambda: kvbm.convert(*pools, ids, ids))
    kinds, options = [(tuple(t.shape), t.stride()) for t in into], {"dtype": torch.float32, "device": into[0].device}
    empty = run(lambda: [torch.empty_strided(*kind, **options) for kind in kinds])
    functional = run(lambda: kvbm.torch.convert(given, src, dst, text)) - empty
    mutating = run(lambda: kvbm.torch.convert_(given, into, src, dst, text))
    mutating_ids = run(lambda: kvbm.torch.convert_(given, into, src, dst, text, ids, ids))
    figures = direct, functional, functional - direct, mutating - direct, by_ids, mutating_ids - by_ids
    return f"{src} → {dst}", f"{len(given)} + {len(into)}", *(f"{figure:.1f}" for figure in figures)


def main() -> None:
    """Print a table."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    torch.set_num_threads(1)
    print(
        "| layouts | tensors | direct, µs | convert | over direct | convert_ over | direct, ids | convert_, ids, over |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for case in CASES:
        print("|", " | ".join(measure(*case, device)), "|")


if __name__ == "__main__":
    main()
