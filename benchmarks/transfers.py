"""Transfers against the copy engine's own speed, in one run: ``python benchmarks/transfers.py [--section pcie]…``.

Random data, random block ids that change from call to call, medians.  Every figure that is asked for stands beside its
yardstick of the same run.  The CSV names machine and commit in its header.

pcie          GB/s across PCIe by pair, direction, batch and strategy, over one contiguous pinned copy of the same bytes
sms           the direct kernel on a few multiprocessors
interference  how much a running matrix product is slowed down
overhead      host time of a call
graph         replays of a captured copy, over those of a captured memcpy
soak          a million copies, without growth
p2p           between two GPUs, over one contiguous peer copy
pools         time to allocate pinned pools
"""

from __future__ import annotations

import csv
import datetime as dt
import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from run import check, commit, machine
from run import pool as gpu_pool

import kvbm
from kvbm import kernels

ROOT = Path(__file__).resolve().parent

#: On the GPU, on the host, and which way: the pairs of the section `pcie`.
PAIRS = [
    ("nhd", "universal", "d2h"),
    ("universal", "nhd", "h2d"),
    ("nhd", "vllm/flash_attn_nhd", "d2h"),
    ("vllm/LBHNC", "universal", "d2h"),
    ("universal", "vllm/paged_attn_v0", "h2d"),
]
BATCHES = (1, 4, 16, 64)
STRATEGIES = ("auto", "direct", "staged", "engine")
#: Ratio to the contiguous copy that `auto` is asked for, by batch.
ASKED = {1: 0.90, 4: 0.95, 64: 0.985}
#: Copies of the engine above which a batch is not measured: the driver takes half a microsecond each.
MOST_RUNS = 200_000

Row = dict[str, Any]
console = Console(stderr=True)


# ---- pools, ids, clocks --------------------------------------------------------------------------------------------


def pinned_pool(name: str, shape: kvbm.BlockShape, blocks: int) -> kvbm.Pool:
    """Pinned memory of kvbm's own, as torch tensors over it, full of random bytes."""
    made = kvbm.Pool.allocate(kvbm.load(name), shape, blocks, "pinned")
    random = np.random.default_rng(3)
    noise = random.integers(0, 256, 64 << 20, np.uint8)
    for array in made.arrays:
        flat = array.reshape(-1).view(np.uint8)
        for start in range(0, flat.size, noise.size):
            flat[start : start + noise.size] = noise[: flat.size - start]
    return made


def same(src: kvbm.Pool, dst: kvbm.Pool, src_ids: np.ndarray, dst_ids: np.ndarray) -> None:
    """run.py's check, at sampled coordinates; it takes tensors."""
    check(*(as_tensors(side) for side in (src, dst)), src_ids, dst_ids)


def as_tensors(pool: kvbm.Pool) -> Any:
    """What `check` asks of a pool, with its arrays as torch tensors."""
    arrays = [torch.from_numpy(a.reshape(-1).view(np.uint8)) if isinstance(a, np.ndarray) else a for a in pool.arrays]
    return type("Side", (), {"arrays": arrays, "shape": pool.shape, "layout": pool.layout, "resolved": pool.resolved})


def rotating(src_blocks: int, dst_blocks: int, batch: int, sets: int = 8) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(11)
    return itertools.cycle(
        [
            (
                random.permutation(src_blocks)[:batch].astype(np.int32),
                random.permutation(dst_blocks)[:batch].astype(np.int32),
            )
            for _ in range(sets)
        ]
    )


def seconds(call: Callable[[torch.cuda.Stream], Any], rounds: int, stream: torch.cuda.Stream) -> float:
    """Median time of a call between events around it on its stream; it is in the queue before the clock starts."""
    device = stream.device
    for _ in range(3):
        call(stream)
    torch.cuda.synchronize(device)
    times = []
    with torch.cuda.device(device), torch.cuda.stream(stream):
        for _ in range(rounds):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(1_000_000)
            start.record(stream)
            call(stream)
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


_buffers: dict[tuple[str, int], torch.Tensor] = {}


def buffer(where: str, turn: int, nbytes: int) -> torch.Tensor:
    """Random bytes on a GPU, or in pinned memory; kept for the next yardstick."""
    held = _buffers.get((where, turn))
    if held is None or held.numel() < nbytes:
        random = torch.randint(-120, 120, (nbytes,), dtype=torch.int8, device="cuda:0" if where == "pinned" else where)
        if where == "pinned":
            held = torch.empty(nbytes, dtype=torch.int8, pin_memory=True)
            held.copy_(random)
        else:
            held = random
        _buffers[where, turn] = held
    return held[:nbytes]


def contiguous(nbytes: int, direction: str, rounds: int, stream: torch.cuda.Stream) -> float:
    """The yardstick: one contiguous copy of as many bytes, rotating over two pairs of buffers."""
    here = f"cuda:{stream.device.index}"
    ways = {"d2h": (here, "pinned"), "h2d": ("pinned", here), "d2d": (here, here), "p2p": (here, "cuda:1")}
    turn = itertools.cycle(
        [[buffer(where, 2 * k + i, nbytes) for i, where in enumerate(ways[direction])] for k in range(2)]
    )

    def copy(stream: torch.cuda.Stream) -> None:
        src, dst = next(turn)
        with torch.cuda.stream(stream):
            dst.copy_(src, non_blocking=True)

    return seconds(copy, rounds, stream)


def runs(src: kvbm.Pool, dst: kvbm.Pool) -> int:
    """Copies a block that the engine's strategy makes, at most."""
    made = kvbm.plan(src.layout, dst.layout, src.shape, num_blocks=(src.num_blocks, dst.num_blocks))
    return sum(part.nbytes // part.run_bytes for part in made.parts)


def row(section: str, what: str, **rest: Any) -> Row:
    """One line of the CSV; `ratio` is reached, `asked` is asked for, `better` says which way."""
    line = dict.fromkeys(
        ("section", "what", "strategy", "blocks", "bytes", "value", "unit", "ratio", "asked", "better"), ""
    )
    return {**line, "section": section, "what": what, **rest}


def call_of(move: kvbm.Transfer, ids: Iterator[tuple[np.ndarray, np.ndarray]]) -> Callable[[torch.cuda.Stream], Any]:
    return lambda stream: move.copy(*next(ids), stream=stream)


# ---- sections ------------------------------------------------------------------------------------------------------


def ends(
    src_name: str, dst_name: str, direction: str, shape: kvbm.BlockShape, held: int
) -> tuple[kvbm.Pool, kvbm.Pool]:
    src = pinned_pool(src_name, shape, held) if direction[0] == "h" else gpu_pool(src_name, shape, held, "cuda:0")
    dst = pinned_pool(dst_name, shape, held) if direction[2] == "h" else gpu_pool(dst_name, shape, held, "cuda:0")
    return src, dst


def pcie(shape: kvbm.BlockShape, rounds: int) -> Iterator[Row]:
    stream = torch.cuda.Stream()
    for src_name, dst_name, direction in PAIRS:
        src, dst = ends(src_name, dst_name, direction, shape, 2 * max(BATCHES))
        moves = {name: kvbm.Transfer(src, dst, name) for name in STRATEGIES}
        for batch in BATCHES:
            nbytes = batch * shape.nbytes
            yardstick = contiguous(nbytes, direction, rounds, stream)
            found = {}
            for name, move in moves.items():
                if name == "engine" and runs(src, dst) * batch > MOST_RUNS:
                    continue
                sets = rotating(src.num_blocks, dst.num_blocks, batch)
                if batch in (min(BATCHES), max(BATCHES)):
                    checked = next(sets)
                    move.copy(*checked, stream=stream).synchronize()
                    same(src, dst, *checked)
                found[name] = seconds(call_of(move, sets), rounds, stream), move
            yardstick = min(yardstick, contiguous(nbytes, direction, rounds, stream))
            for name, (time_taken, move) in found.items():
                took = move.explain(batch).splitlines()[1].rsplit(": ")[-1].rstrip(".")
                yield row(
                    "pcie", f"{direction} {src_name} -> {dst_name}", strategy=name if name == took else f"{name} ({took})",
                    blocks=batch, bytes=nbytes, value=round(nbytes / time_taken / 1e9, 2), unit="GB/s",
                    ratio=round(yardstick / time_taken, 3), asked=ASKED.get(batch, "") if name == "auto" else "", better="more",
                )  # fmt: skip
        for move in moves.values():
            move.close()
        close(src, dst)


def close(*pools: kvbm.Pool) -> None:
    torch.cuda.synchronize()
    for pool in pools:
        pool.close()
    gc.collect()
    torch.cuda.empty_cache()


def sms(shape: kvbm.BlockShape, rounds: int) -> Iterator[Row]:
    stream, batch = torch.cuda.Stream(), 64
    for src_name, dst_name, direction in PAIRS[:2]:
        src, dst = ends(src_name, dst_name, direction, shape, 2 * batch)
        nbytes = batch * shape.nbytes
        yardstick = contiguous(nbytes, direction, rounds, stream)
        for count in (4, 8, 16, 32):
            with kvbm.Transfer(src, dst, "direct", max_sms=count) as move:
                sets = rotating(src.num_blocks, dst.num_blocks, batch)
                checked = next(sets)
                move.copy(*checked, stream=stream).synchronize()
                same(src, dst, *checked)
                time_taken = seconds(call_of(move, sets), rounds, stream)
            yield row(
                "sms", f"{direction} {src_name} -> {dst_name}, {count} SMs", strategy="direct", blocks=batch, bytes=nbytes,
                value=round(nbytes / time_taken / 1e9, 2), unit="GB/s", ratio=round(yardstick / time_taken, 3),
                asked=0.92 if count == 8 else "", better="more",
            )  # fmt: skip
        close(src, dst)


def interference(shape: kvbm.BlockShape, _rounds: int) -> Iterator[Row]:
    """Slow-down of 8192³ products while copies run beside them without a pause; its yardstick is the memcpy's."""
    model, side = torch.cuda.Stream(), torch.cuda.Stream()
    a, b, c = (torch.randn(8192, 8192, device="cuda").to(torch.bfloat16) for _ in range(3))
    batch = 64

    def product(copy: Callable[[torch.cuda.Stream], Any] | None) -> float:
        """Seconds a product; the copies outlast the products, which is checked."""
        times = []
        for _ in range(3):
            torch.cuda.synchronize()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
            with torch.cuda.stream(model):
                torch.cuda._sleep(4_000_000)
                for event in events[:-1]:
                    event.record(model)
                    torch.matmul(a, b, out=c)
                events[-1].record(model)
            while copy and not events[-1].query():
                last = [copy(side) for _ in range(2)]
                last[0].synchronize()  # one is always waiting
            torch.cuda.synchronize()
            times += [x.elapsed_time(y) / 1e3 for x, y in itertools.pairwise(events[2:])]
        return statistics.median(times)

    with torch.cuda.stream(model):
        for _ in range(5):
            torch.matmul(a, b, out=c)
    for src_name, dst_name, direction in PAIRS[:2]:
        src, dst = ends(src_name, dst_name, direction, shape, 2 * batch)
        plain = [buffer(where, 0, batch * shape.nbytes) for where in ("cuda:0", "pinned")]
        if direction == "h2d":
            plain.reverse()

        def memcpy(stream: torch.cuda.Stream, plain: list[torch.Tensor] = plain) -> torch.cuda.Event:
            with torch.cuda.stream(stream):
                plain[1].copy_(plain[0], non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
            return event

        alone = product(None)
        reference = product(memcpy) / alone
        yield row("interference", f"{direction} memcpy", value=round(reference, 3), unit="x", better="less")
        for name, given in (
            ("staged", {}),
            ("staged", {"max_sms": 8}),
            ("direct", {"max_sms": 8}),
            ("direct", {}),
            ("engine", {}),
        ):
            if name == "engine" and runs(src, dst) * batch > MOST_RUNS:
                continue
            with kvbm.Transfer(src, dst, name, **given) as move:
                slowed = product(call_of(move, rotating(src.num_blocks, dst.num_blocks, batch))) / alone
            asked = name == "staged" and not given
            budget = ", ".join(f"{key}={value}" for key, value in given.items())
            yield row(
                "interference", f"{direction} {src_name} -> {dst_name} {budget}".rstrip(), strategy=name, blocks=batch,
                value=round(slowed, 3), unit="x", ratio=round(slowed / reference, 3), asked=1.0 if asked else "", better="less",
            )  # fmt: skip
        close(src, dst)


def per_call(call: Callable[[], Any], settle: Callable[[], Any], rounds: int, calls: int = 50) -> float:
    """Median nanoseconds of a call; the stream is waited for often enough that its queue never fills."""
    times = []
    for _ in range(20):
        call()
    settle()
    for _ in range(rounds):
        for _ in range(calls):
            start = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - start)
        settle()
    return statistics.median(times)


def overhead(_shape: kvbm.BlockShape, rounds: int) -> Iterator[Row]:
    """Host time; the blocks are small, so that the GPU is never what is waited for."""
    small = kvbm.BlockShape(nl=2, no=2, nh=2, nt=4, hd=16, dtype="bfloat16")
    src, dst = (gpu_pool(name, small, 8192, "cuda:0") for name in ("vllm/LBHNC", "vllm/BLHNC"))
    stream = torch.cuda.Stream()
    move = kvbm.Transfer(src, dst, "direct")
    random = np.random.default_rng(1)
    for batch, asked in ((1, ""), (64, 6_000), (4096, 25_000)):
        numbers = [random.permutation(8192)[:batch].astype(np.int32) for _ in range(2)]
        kinds = {
            "list": [ids.tolist() for ids in numbers],
            "numpy int32": numbers,
            "numpy int64": [ids.astype(np.int64) for ids in numbers],
            "torch CPU int64": [torch.from_numpy(ids.astype(np.int64)) for ids in numbers],
            "torch CUDA int64": [torch.from_numpy(ids.astype(np.int64)).cuda() for ids in numbers],
        }
        for name, ids in kinds.items():
            taken = per_call(lambda ids=ids: move.copy(*ids, stream=stream), stream.synchronize, rounds)
            on_device = "CUDA" in name
            yield row(
                "overhead", f"Transfer.copy, {name} ids", strategy="direct", blocks=batch, value=round(taken / 1e3, 2), unit="us",
                ratio=round(taken / asked, 3) if asked else "", asked=1.0 if asked and not on_device else "", better="less",
            )  # fmt: skip
    convert = per_call(lambda: kvbm.convert(src, dst, *kinds["numpy int32"], stream=stream), stream.synchronize, rounds)
    yield row(
        "overhead",
        "kvbm.convert, numpy int32 ids",
        blocks=4096,
        value=round(convert / 1e3, 2),
        unit="us",
        better="less",
    )
    move.close()
    chunks, whole = lists(64, 160)
    with torch.cuda.stream(stream):
        taken = per_call(lambda: kernels.block_to_universal(chunks, whole, "nhd"), stream.synchronize, rounds, 10)
    each = taken / (64 * 160)
    yield row(
        "overhead", "block_to_universal, 64 x 160 torch tensors", blocks=64, value=round(each, 1), unit="ns a tensor",
        ratio=round(each / 150, 3), asked=1.0, better="less",
    )  # fmt: skip
    close(src, dst)


def lists(blocks: int, chunks: int) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Chunks ``[nl * no]`` of a block as tensors of their own, and whole blocks."""
    nl = chunks // 2
    held = torch.zeros(blocks * chunks, 4, 2, 16, dtype=torch.bfloat16, device="cuda")
    whole = torch.zeros(blocks, 2, nl, 2, 4, 16, dtype=torch.bfloat16, device="cuda")
    flat = list(held.unbind())
    return [flat[i * chunks : (i + 1) * chunks] for i in range(blocks)], list(whole.unbind())


def graph(shape: kvbm.BlockShape, rounds: int) -> Iterator[Row]:
    """Replays on one GPU; several captured sets of blocks take turns, so that no cache holds them."""
    stream = torch.cuda.Stream()
    held = 64
    src, dst = (gpu_pool(name, shape, held, "cuda:0") for name in ("nhd", "universal"))
    for batch, asked in ((1, 1.15), (4, ""), (16, "")):
        sets = rotating(held, held, batch, sets=8)
        with kvbm.Transfer(src, dst, "direct") as move:
            checked = next(sets)
            move.copy(*checked, stream=stream).synchronize()
            same(src, dst, *checked)
            mine = [captured(functools.partial(move.copy, *next(sets)), stream) for _ in range(8)]
            buffers = [
                [torch.randint(-120, 120, (batch * shape.nbytes,), dtype=torch.int8, device="cuda") for _ in range(2)]
                for _ in range(8)
            ]
            theirs = [captured(functools.partial(copy_tensor, *pair), stream) for pair in buffers]
            taken, yardstick = (replayed(itertools.cycle(graphs), 4 * rounds, stream) for graphs in (mine, theirs))
        yield row(
            "graph", "d2d nhd -> universal, one replay", strategy="direct", blocks=batch, bytes=batch * shape.nbytes,
            value=round(taken * 1e6, 2), unit="us", ratio=round(taken / yardstick, 3), asked=asked, better="less",
        )  # fmt: skip
        del mine, theirs
    close(src, dst)


def copy_tensor(src: torch.Tensor, dst: torch.Tensor, stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        dst.copy_(src, non_blocking=True)


def captured(work: Callable[..., Any], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made, stream=stream):
        work(stream=stream)
    return made


def replayed(graphs: Iterator[torch.cuda.CUDAGraph], rounds: int, stream: torch.cuda.Stream) -> float:
    def replay(stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            next(graphs).replay()

    return seconds(replay, rounds, stream)


def soak(_shape: kvbm.BlockShape, _rounds: int) -> Iterator[Row]:
    """Small blocks, every strategy in turn; stops early where a minute would not do, and says so."""
    small = kvbm.BlockShape(nl=2, no=2, nh=2, nt=4, hd=16, dtype="bfloat16")
    stream = torch.cuda.Stream()
    gpu, host = gpu_pool("vllm/LBHNC", small, 1024, "cuda:0"), pinned_pool("vllm/BLHNC", small, 1024)
    other = gpu_pool("vllm/BLHNC", small, 1024, "cuda:0")
    moves = [
        kvbm.Transfer(*sides, name)
        for sides in ((gpu, other), (gpu, host), (host, gpu))
        for name in ("direct", "direct", "direct", "staged", "engine")
    ]
    random = np.random.default_rng(5)
    ids = [(random.permutation(1024)[:4].tolist(), random.permutation(1024)[:4].tolist()) for _ in range(16)]

    def copies(count: int, until: float = float("inf")) -> int:
        for turn in range(count):
            moves[turn % len(moves)].copy(*ids[turn % 16], stream=stream)
            if turn % 256 == 255:
                stream.synchronize()
                if time.monotonic() > until:
                    break
        stream.synchronize()
        return turn + 1

    def held() -> tuple[int, int]:
        gc.collect()
        status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        rss = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS"))
        return torch.cuda.mem_get_info()[0], rss

    copies(20_000)
    before, start = held(), time.monotonic()
    done = copies(1_000_000, start + 50)
    after, taken = held(), time.monotonic() - start
    what = f"{done:,} copies in {taken:.1f} s" + ("" if done >= 1_000_000 else " (stopped: 50 s)")
    for name, grown, allowed in (
        ("GPU memory", before[0] - after[0], 2 << 20),
        ("resident memory", after[1] - before[1], 8 << 20),
    ):
        yield row(
            "soak", f"{what}: {name} grown", value=round(grown / (1 << 20), 2), unit="MiB", ratio=round(grown / allowed, 3),
            asked=1.0, better="less",
        )  # fmt: skip
    for move in moves:
        move.close()
    close(gpu, other, host)


def p2p(shape: kvbm.BlockShape, rounds: int) -> Iterator[Row]:
    if torch.cuda.device_count() < 2:
        console.print("p2p: one GPU, left out")
        return
    batch = 64
    src, dst = gpu_pool("nhd", shape, 2 * batch, "cuda:0"), gpu_pool("universal", shape, 2 * batch, "cuda:1")
    nbytes = batch * shape.nbytes
    here, there = torch.cuda.Stream(0), torch.cuda.Stream(1)
    yardstick = contiguous(nbytes, "p2p", rounds, here)
    for name in STRATEGIES:
        for where, stream in (("source", here), ("destination", there)):
            with kvbm.Transfer(src, dst, name) as move:
                sets = rotating(src.num_blocks, dst.num_blocks, batch)
                checked = next(sets)
                move.copy(*checked, stream=stream).synchronize()
                same(src, dst, *checked)
                taken = seconds(call_of(move, sets), rounds, stream)
            yield row(
                "p2p", f"nhd -> universal, stream of the {where}", strategy=name, blocks=batch, bytes=nbytes,
                value=round(nbytes / taken / 1e9, 1), unit="GB/s", ratio=round(yardstick / taken, 3),
                asked=0.95 if name == "auto" else "", better="more",
            )  # fmt: skip
    close(src, dst)


def pools(shape: kvbm.BlockShape, _rounds: int) -> Iterator[Row]:
    available = next(
        int(line.split()[1]) << 10
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        if line.startswith("MemAvailable")
    )
    for gib in (1, 8, 32):
        if gib << 30 > available // 3:
            console.print(f"pools: {gib} GiB is more than a third of the free memory, left out")
            continue
        start = time.perf_counter()
        made = kvbm.Pool.allocate(kvbm.load("universal"), shape, (gib << 30) // shape.nbytes, "pinned")
        taken = time.perf_counter() - start
        start = time.perf_counter()
        made.close()
        freed = time.perf_counter() - start
        yield row(
            "pools", f"{gib} GiB pinned in {taken:.2f} s, closed in {freed:.2f} s", blocks=made.num_blocks, bytes=made.nbytes,
            value=round(made.nbytes / taken / 1e9, 2), unit="GB/s", better="more",
        )  # fmt: skip


SECTIONS = {each.__name__: each for each in (pcie, sms, interference, overhead, graph, soak, p2p, pools)}


# ---- the command ---------------------------------------------------------------------------------------------------


def verdict(line: Row) -> str:
    """Whether what was asked for is reached; empty where nothing was."""
    if line["asked"] == "" or line["ratio"] == "":
        return ""
    reached = line["ratio"] >= line["asked"] if line["better"] == "more" else line["ratio"] <= line["asked"]
    return "yes" if reached else "NO"


def write(path: Path, header: str, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as out:
        out.write(header + "\n")
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


@click.command()
@click.option(
    "--section", "names", multiple=True, type=click.Choice(list(SECTIONS)), help="Which; all if none is named."
)
@click.option("--shape", "shape_text", default="llama-3.1-70b", show_default=True)
@click.option("--rounds", default=15, show_default=True, help="Timed calls a figure.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=ROOT / "results" / "transfers_gpu.csv", show_default=True
)
@click.pass_context
def main(context: click.Context, names: tuple[str, ...], shape_text: str, rounds: int, out: Path) -> None:
    """Measure transfers beside the copy engine's own speed; appends to one CSV and prints what was asked and reached."""
    if not torch.cuda.is_available():
        click.echo("benchmarks/transfers.py: no GPU that torch can use; run it on a machine with one", err=True)
        context.exit(2)
    if kernels.is_using_stubs():
        click.echo(
            "benchmarks/transfers.py: kvbm was built without CUDA kernels; rebuild it with nvcc at hand", err=True
        )
        context.exit(2)
    shape = kvbm.load_shape(shape_text)
    header = f"# kvbm {commit()}, {machine('cuda:0')}, {shape}, {dt.date.today()}"
    rows: list[Row] = []
    for name in names or SECTIONS:
        start, found = time.monotonic(), []
        for line in SECTIONS[name](shape, max(rounds, 15)):
            found.append(line)
            console.print(
                *(str(line[key]) for key in ("section", "what", "strategy", "blocks", "value", "unit", "ratio"))
            )
        if found:
            write(out, header, found)
        rows += found
        console.print(f"{name}: {time.monotonic() - start:.0f} s")
    table = Table(title=header[2:], title_justify="left")
    for column in ("what", "strategy", "blocks", "value", "unit", "ratio", "asked", "reached"):
        table.add_column(column, justify="left" if column in ("what", "strategy", "unit") else "right", overflow="fold")
    for line in rows:
        if line["asked"] != "":
            cells = (str(line[key]) for key in ("strategy", "blocks", "value", "unit", "ratio", "asked"))
            table.add_row(f"{line['section']}: {line['what']}", *cells, verdict(line))
    Console(width=150).print(table)
    asked = [line for line in rows if verdict(line)]
    short = [line for line in asked if verdict(line) == "NO"]
    click.echo(
        f"{out.name}: {len(rows)} figures, {len(asked) - len(short)} of {len(asked)} that were asked for reached"
    )


if __name__ == "__main__":
    main()
