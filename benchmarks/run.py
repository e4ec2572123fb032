"""Ratios of conversions to a memcpy of the same bytes, in one run: ``python benchmarks/run.py [--device cuda:0|cpu]``.

Random data, random block ids that change from call to call, pools larger than every cache, medians.  Every measured copy
is checked once, bitwise, at sampled coordinates.  The CSV names machine and commit in its header.
"""

from __future__ import annotations

import csv
import datetime as dt
import functools
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import kvbm
from kvbm import transfer

ROOT = Path(__file__).resolve().parent

#: (source, destination, ratio asked for on the GPU)
PAIRS = [
    ("nhd", "universal", 0.92),
    ("universal", "nhd", 0.92),
    ("hnd", "universal", 0.92),
    ("universal", "hnd", 0.92),
    ("nhd", "hnd", 0.92),
    ("hnd", "nhd", 0.92),
    ("nhd", "operational", 0.92),
    ("operational", "nhd", 0.92),
    ("vllm/LBHNC", "universal", 0.92),
    ("universal", "vllm/LBHNC", 0.92),
    ("nhd", "vllm/paged_attn_v0", 0.75),
    ("vllm/paged_attn_v0", "nhd", 0.75),
]
CPU_ASKED = 0.8
ASKED_AT = 64  # blocks


def pool(name: str, shape: kvbm.BlockShape, blocks: int, device: str) -> kvbm.Pool:
    """A pool of random data.  Stacked chunks lie in one array a layer, as an engine's do, in random order there."""
    layout = kvbm.load(name)
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[shape.itemsize]
    resolved = layout.resolve(shape, blocks)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randint(-120, 120, sizes, dtype=torch.int8, device=device).view(-1).view(bits).view(dtype(shape))

    if name in ("nhd", "hnd"):
        chunk = resolved.allocations[0]
        per_layer = [
            random(shape.no * blocks * chunk.nbytes).view(shape.no, blocks, *chunk.shape) for _ in range(shape.nl)
        ]
        arrays = [per_layer[layer][o][b] for b in range(blocks) for layer in range(shape.nl) for o in range(shape.no)]
    else:
        arrays = [random(a.nbytes).view(a.shape) for a in resolved.allocations]
    return kvbm.Pool(layout, shape, arrays)


def dtype(shape: kvbm.BlockShape) -> torch.dtype:
    found: torch.dtype = getattr(torch, shape.dtype)
    return found


def check(src: kvbm.Pool, dst: kvbm.Pool, src_ids: np.ndarray, dst_ids: np.ndarray) -> None:
    """Bitwise, at a few thousand coordinates: the addresses come from the layouts, not from the plan."""
    random = np.random.default_rng(7)
    seen: dict[tuple[int, int], np.ndarray] = {}

    def element(p: kvbm.Pool, side: int, entry: int, offset: int) -> bytes:
        if (side, entry) not in seen:
            seen[side, entry] = p.arrays[entry].reshape(-1).view(torch.uint8).cpu().numpy()
        return bytes(seen[side, entry][offset : offset + p.shape.itemsize])

    opaque = "{" in src.layout.order_text + dst.layout.order_text
    for _ in range(200 if opaque else 2000):
        i = int(random.integers(len(src_ids)))
        at = {axis: int(random.integers(n)) for axis, n in src.shape.sizes.items()}
        here = src.resolved.address(int(src_ids[i]), **at)
        if opaque:  # the bytes of a chunk stay as they are
            inside = (
                here[1]
                if src.layout.order_text.startswith("[b l o]")
                else here[1] % (src.shape.nbytes // src.shape.nl // src.shape.no)
            )
            there_entry, start = dst.resolved.address(int(dst_ids[i]), l=at["l"], o=at["o"])
            there = (there_entry, start + inside)
        else:
            there = dst.resolved.address(int(dst_ids[i]), **at)
        if element(src, 0, *here) != element(dst, 1, *there):
            raise SystemExit(f"WRONG: {src.layout.name} → {dst.layout.name} at {at}")


def ids(blocks: int, batch: int, sets: int = 6) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(11)
    made = [(random.permutation(blocks)[:batch].copy(), random.permutation(blocks)[:batch].copy()) for _ in range(sets)]
    while True:
        yield from made


def median_seconds(call: Callable[[], None], device: str, rounds: int) -> float:
    """Median time of a call: between events on a GPU, of the monotonic clock on the CPU."""
    for _ in range(3):
        call()
    times = []
    if device == "cpu":
        for _ in range(rounds):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    else:
        torch.cuda.synchronize()
        for _ in range(rounds):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(200_000)  # the launch is in the queue before the clock starts
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def memcpy(nbytes: int, device: str, rounds: int) -> float:
    """The yardstick: one contiguous copy of as many bytes, rotating over buffers larger than the caches."""
    pairs = [
        (
            torch.randint(-120, 120, (nbytes,), dtype=torch.int8, device=device),
            torch.empty(nbytes, dtype=torch.int8, device=device),
        )
        for _ in range(2)
    ]
    turn = 0

    def whole() -> None:
        nonlocal turn
        turn += 1
        src, dst = pairs[turn % 2]
        dst.copy_(src)

    best = median_seconds(whole, device, rounds)
    if device == "cpu":
        threads = len(os.sched_getaffinity(0))
        with ThreadPoolExecutor(threads) as workers:

            def pieces() -> None:
                nonlocal turn
                turn += 1
                src, dst = (tensor.numpy() for tensor in pairs[turn % 2])
                bounds = np.linspace(0, nbytes, threads + 1, dtype=int)
                list(workers.map(lambda a, b: np.copyto(dst[a:b], src[a:b]), bounds[:-1], bounds[1:]))

            best = min(best, median_seconds(pieces, device, rounds))
    return best


def torch_permute(shape: kvbm.BlockShape, batch: int, device: str, rounds: int) -> float:
    """What one would write without kvbm: nhd → universal as `permute().copy_()`, blocks already gathered."""
    src = torch.randint(-120, 120, (batch * shape.nbytes,), dtype=torch.int8, device=device).view(dtype(shape))
    src = src.view(batch, shape.nl, shape.no, shape.nt, shape.nh, shape.hd)
    dst = torch.empty((batch, shape.nh, shape.nl, shape.no, shape.nt, shape.hd), dtype=dtype(shape), device=device)
    return median_seconds(lambda: dst.copy_(src.permute(0, 4, 1, 2, 3, 5)), device, rounds)


def machine(device: str) -> str:
    if device == "cpu":
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(
            (line.split(":")[1].strip() for line in cpuinfo if line.startswith("model name")), platform.machine()
        )
        return f"{model}, {len(os.sched_getaffinity(0))} cores"
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split("\n")[0]
    return f"{torch.cuda.get_device_name()}, driver {driver}, torch {torch.__version__}"


def commit() -> str:
    if known := os.environ.get("KVBM_COMMIT"):
        return known
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    return run.stdout.strip() or "unknown"


def measure(
    src_name: str, dst_name: str, asked: float, shape: kvbm.BlockShape, batches: list[int], device: str, rounds: int
) -> list[dict[str, Any]]:
    """One pair at every batch size, each beside a memcpy of the same bytes."""
    held = max(batches) * 2 if device != "cpu" else max(batches) + 8
    src, dst = pool(src_name, shape, held, device), pool(dst_name, shape, held, device)
    rows = []
    for batch in batches:
        nbytes = batch * shape.nbytes
        yardstick = memcpy(nbytes, device, rounds)
        sets = ids(held, batch)
        checked = next(sets)
        kvbm.convert(src, dst, *checked)
        check(src, dst, *checked)
        seconds = median_seconds(functools.partial(_convert_next, src, dst, sets), device, rounds)
        yardstick = min(yardstick, memcpy(nbytes, device, rounds))
        rows.append(
            {
                "pair": f"{src_name} -> {dst_name}",
                "shape": str(shape).replace(",", " "),
                "blocks": batch,
                "bytes": nbytes,
                "kernel": " ".join(copy.kernel for copy in transfer._bind(src, dst).routes[None].copies if copy.kernel),
                "median_us": round(seconds * 1e6, 2),
                "gb_s": round(2 * nbytes / seconds / 1e9, 1),
                "memcpy_us": round(yardstick * 1e6, 2),
                "ratio": round(yardstick / seconds, 3),
                "asked": asked if batch == ASKED_AT or device == "cpu" else "",
            }
        )
    return rows


def _convert_next(src: kvbm.Pool, dst: kvbm.Pool, sets: Iterator[tuple[np.ndarray, np.ndarray]]) -> None:
    kvbm.convert(src, dst, *next(sets))


@click.command()
@click.option("--device", default=None, help="cuda:N or cpu; a GPU where there is one.")
@click.option("--shape", "shape_text", default=None, help="llama-3.1-70b on a GPU, llama-3.1-8b on the CPU.")
@click.option("--blocks", default=None, help="Batch sizes, e.g. 64 or 1,4,16,64.")
@click.option("--rounds", default=0, help="Timed calls a figure.")
@click.option("--pair", "only", multiple=True, help="SRC:DST instead of the usual pairs.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=None, help="CSV file; in benchmarks/results/ if not given."
)
def main(
    device: str | None, shape_text: str | None, blocks: str | None, rounds: int, only: tuple[str, ...], out: Path | None
) -> None:
    """Measure every pair against a memcpy of the same bytes."""
    device = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    gpu = device != "cpu"
    shape = kvbm.load_shape(shape_text or ("llama-3.1-70b" if gpu else "llama-3.1-8b"))
    batches = [int(b) for b in (blocks or "64").split(",")]
    rounds = rounds or (30 if gpu else 9)
    pairs = [(*text.split(":"), 0.0) for text in only] or PAIRS
    rows: list[dict[str, Any]] = []
    permuted = {batch: torch_permute(shape, batch, device, rounds) for batch in batches}
    for src_name, dst_name, asked in track(pairs, "measuring", console=Console(stderr=True)):
        rows += measure(src_name, dst_name, asked if gpu else CPU_ASKED, shape, batches, device, rounds)
    for row in rows:
        row["torch_permute_us"] = round(permuted[row["blocks"]] * 1e6, 2)
    header = f"# kvbm {commit()}, {machine(device)}, {dt.date.today()}"
    path = out or ROOT / "results" / f"spine_{'gpu' if gpu else 'cpu'}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as stream:
        stream.write(header + "\n")
        writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    table = Table(title=header[2:], title_justify="left")
    for column in ("pair", "blocks", "kernel", "median_us", "gb_s", "memcpy_us", "ratio", "asked", "torch_permute_us"):
        table.add_column(column, justify="left" if column in ("pair", "kernel") else "right", overflow="fold")
    for row in rows:
        table.add_row(*(str(row[column.header]) for column in table.columns))
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
