"""What an operator of kvbm.torch costs beyond the direct call: eager, compiled, and in the first backward.

    python -m benchmarks operator-overhead [cpu|cuda]

Host times are the fastest of several rounds of many calls on blocks too small to matter; on a GPU the stream is drained
between rounds, so that no call waits for room in its queue.  "direct" is `kvbm.convert` on pools that were bound before; the
functional operator also allocates its results, and what allocating as many takes is taken off.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import click
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


def memory(name: str, shape: kvbm.BlockShape, device: str, blocks: int = BLOCKS) -> list[torch.Tensor]:
    dtype = getattr(torch, shape.dtype)
    resolved = kvbm.load(name).resolve(shape, blocks)
    return [torch.randn(one.shape, device=device).to(dtype) for one in resolved.allocations]


def eager(src: str, dst: str, layers: int, device: str) -> tuple[str, ...]:
    shape = kvbm.BlockShape(nl=layers, no=2, nh=1, nt=2, hd=4, dtype="float32")
    text = str(shape)
    given, into = memory(src, shape, device), memory(dst, shape, device)
    pools = kvbm.Pool(kvbm.load(src), shape, given), kvbm.Pool(kvbm.load(dst), shape, into)
    ids = torch.arange(BLOCKS)
    run = lambda call: microseconds(call, device)  # noqa: E731
    direct, by_ids = run(lambda: kvbm.convert(*pools)), run(lambda: kvbm.convert(*pools, ids, ids))
    empty = run(lambda: [torch.empty_like(one) for one in into])
    functional = run(lambda: kvbm.torch.convert(given, src, dst, text)) - empty
    mutating = run(lambda: kvbm.torch.convert_(given, into, src, dst, text))
    mutating_ids = run(lambda: kvbm.torch.convert_(given, into, src, dst, text, ids, ids))
    with torch.inference_mode():
        inference = run(lambda: kvbm.torch.convert_(given, into, src, dst, text))
    figures = direct, functional - direct, mutating - direct, inference - direct, mutating_ids - by_ids
    return f"{src} → {dst}", f"{len(given)} + {len(into)}", *(f"{figure:.1f}" for figure in figures)


# ---- compiled --------------------------------------------------------------------------------------------------------


def compiled(device: str) -> Sequence[tuple[str, ...]]:
    """The operator beside PyTorch's own for the same result, each alone in a compiled function."""
    src, dst, layers = "vllm/flash_attn_nhd", "vllm/BHLNC", 8
    shape = kvbm.BlockShape(nl=layers, no=2, nh=1, nt=2, hd=4, dtype="float32")
    given = memory(src, shape, device)
    for one in given:
        torch._dynamo.mark_static_address(one)  # as a cache is: CUDA graphs read it where it lies

    def operator() -> Any:
        return kvbm.torch.convert(given, src, dst, str(shape))

    def native() -> Any:  # [l] o b t h d -> b h l t o d
        return [torch.stack(given).permute(2, 4, 0, 3, 1, 5).contiguous()]

    want = native()[0]
    rows = []
    for mode in ("eager", "default", "reduce-overhead"):
        calls = [
            each if mode == "eager" else torch.compile(each, fullgraph=True, mode=mode) for each in (operator, native)
        ]
        for call in calls * 5:
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(call()[0], want)
        rows.append((mode, *(f"{microseconds(call, device):.1f}" for call in calls)))
    return rows


# ---- gradients -------------------------------------------------------------------------------------------------------


def backward(blocks: int, device: str) -> tuple[str, ...]:
    """Wall time from the call to the end of the work: each direction for the first time in the process, then again."""
    src, dst, layers = "vllm/flash_attn_nhd", "universal", 8
    shape = kvbm.BlockShape(nl=layers, no=2, nh=8, nt=16, hd=64 + blocks, dtype="float32")  # kept by nobody yet
    given = [one.requires_grad_() for one in memory(src, shape, device, blocks)]
    grads = memory(dst, shape, device, blocks)
    for _ in range(3):  # the allocator and autograd's own first time, on another operator
        torch.autograd.backward([one.clone() for one in given], [torch.ones_like(one) for one in given])
    torch.cuda.empty_cache()
    times = []
    for _ in range(6):
        for one in given:
            one.grad = None
        begin = drained(device)
        out = kvbm.torch.convert(given, src, dst, str(shape))
        middle = drained(device)
        torch.autograd.backward(out, grads)
        times.append((middle - begin, drained(device) - middle))
        assert all(one.grad is not None for one in given)
    first, later = times[0], [sorted(column)[2] for column in zip(*times[1:], strict=True)]
    return str(blocks), *(f"{1e3 * seconds:.2f}" for seconds in (*first, *later))


def drained(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def table(title: str, columns: str, rows: Sequence[tuple[str, ...]]) -> None:
    print(f"\n{title}\n\n| {columns} |\n|{'---|' * (columns.count('|') + 1)}")
    for row in rows:
        print("|", " | ".join(row), "|", flush=True)


@click.command()
@click.argument("device", default="cpu", type=click.Choice(["cpu", "cuda"]))
def operator_overhead(device: str) -> None:
    """Print what an operator of kvbm.torch costs beyond the direct call: three tables."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")
    print(torch.cuda.get_device_name() if device == "cuda" else "CPU", "with PyTorch", torch.__version__)
    over = "layouts | tensors | direct, µs | convert, over | convert_, over | the same in inference mode | convert_ with ids, over"
    table("Eager", over, [eager(*case, device) for case in CASES])
    table("Milliseconds a direction", "blocks | first forward | first backward | then forward | then backward",
          [backward(blocks, device) for blocks in (4, 64, 512)])  # fmt: skip
    table("Compiled, µs a call", "mode | kvbm.torch.convert | PyTorch's own", compiled(device))

