"""What `KvbmGuard` adds to a request: ``python -m benchmarks guard``.

The engine that prefills digests the prompt; the one that decodes digests what came and asks for the other digests, over loopback.
On the CPU the figures are processor time and elapsed time; on a GPU, elapsed time with the GPU otherwise idle.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import click
import numpy as np

from kvbm import Span, convert, reshard
from kvbm.bench.measure import random_pool
from kvbm.cli.values import numbers
from kvbm.integrations.vllm.guarding import Keeper, Kept, Origin, compare, digests_of
from kvbm.layout import spec
from kvbm.layout.shapes import load_shape

__all__ = ["guard"]

#: The thread's default stream of CUDA.
_OWN_STREAM = 2


def _timed(call: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Median seconds: elapsed, and of the processor."""
    found = []
    for _ in range(repeats + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        found.append((time.perf_counter() - wall, time.process_time() - cpu))
    return statistics.median(one for one, _ in found[1:]), statistics.median(one for _, one in found[1:])


@click.command(help="Measure what the guard of vLLM's connectors adds to a request: digests on both sides, and their comparison.")
@click.option("--shape", "name", default="llama-3.1-8b", show_default=True, help="The model, such as llama-3.1-70b/tp8.")
@click.option("--layout", default="vllm/LBHNC", show_default=True, help="The layout of both engines.")
@click.option("--tokens", callback=numbers, default="1024,4096", show_default=True, help="Lengths of prompts.")
@click.option("--blocks", "sizes", callback=numbers, default="32,64", show_default=True, help="Tokens per block, both sides.")
@click.option("--device", default="cpu", show_default=True, help="cpu, or a GPU such as cuda:0.")
@click.option("--repeats", default=5, show_default=True)
def guard(name: str, layout: str, tokens: list[int], sizes: list[int], device: str, repeats: int) -> None:
    """Print a line for each length."""
    click.echo("tokens  MB        digest ms (cpu)     compare ms (cpu)      bytes of digests")
    model = load_shape(name)
    for length in tokens:
        with contextlib.ExitStack() as stack:
            sides = []
            for seed, nt in enumerate((sizes[0], sizes[-1])):
                count = -(-length // nt)
                shape = replace(model, nt=nt)
                pool = stack.enter_context(random_pool(spec.load(layout), shape, count, device, seed=seed))
                sides.append((reshard.vllm(shape), 0, pool, Span(np.arange(count), range(length))))
            sender, receiver = sides
            units, stream = range(length // sizes[0]), None if device == "cpu" else _OWN_STREAM
            convert(sender[2].units(sizes[0]), receiver[2].units(sizes[0]), units, units, stream=stream)
            made = _digests(sender, stream)
            keeper = Keeper("127.0.0.1", 0, 10.0, None, is_insecure=False)
            stack.callback(keeper.close)
            keeper.put("r", {"0.0": made})
            origin = Origin("r", "127.0.0.1", keeper.port, 1, length, "")
            digested = _timed(partial(_digests, sender, stream), repeats)
            own = partial(_own, receiver, sizes[-1], stream)
            compared = _timed(partial(_right, own, origin), repeats)
            size = model.nbytes / model.nt * length / 1e6
            click.echo(
                f"{length:<7} {size:<8.1f} {digested[0] * 1e3:>7.1f} ({digested[1] * 1e3:.1f})".ljust(36)
                + f"{compared[0] * 1e3:>7.1f} ({compared[1] * 1e3:.1f})".ljust(22) + f"{made.digests.nbytes}"
            )


def _own(side: tuple[Any, ...], nt: int, stream: int | None) -> dict[str, tuple[Kept, int]]:
    return {"0.0": (_digests(side, stream), nt)}


def _digests(side: tuple[Any, ...], stream: int | None) -> Kept:
    place, rank, pool, span = side
    return digests_of(place, rank, pool, span, stream)


def _right(own: Callable[[], dict[str, tuple[Kept, int]]], origin: Origin) -> None:
    if wrong := compare(own, origin, 60.0, None, 0.0):
        raise AssertionError(wrong)
