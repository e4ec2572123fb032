"""The other engine of a link in a process of its own (test_link.py): a rank that receives, or sends, until it is killed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

import kvbm
from kvbm import Pool, Span, reshard, wire
from programs import meeting

SHAPE = "llama-3.1-8b,nl=4,hd=64,dtype=uint16"
BLOCKS, TOKENS = 64, 1000


def endpoint(engine: str, kind: str, port: int | str) -> reshard.Endpoint:
    """`kind` is that of a wire, ``mapped`` before it; ``direct``: mapped, and peers open the pools."""
    is_direct = kind.startswith("direct ")
    its = carrier(kind.replace("direct", "mapped"), engine, port)
    return on_wire(engine, its, "shared" if is_direct else "cpu")


def on_wire(engine: str, its: Any, device: str = "cpu", **options: Any) -> reshard.Endpoint:
    """Of one of two engines, each of one rank: prefill in blocks of 16, decode of 64, other layouts."""
    model = kvbm.load_shape(SHAPE)
    is_prefill = engine == "prefill"
    place = reshard.vllm(model, nt=16 if is_prefill else 64, name=engine)
    layout = kvbm.load("vllm/flash_attn_nhd" if is_prefill else "vllm/flash_attn_hnd")
    pool = Pool.allocate(layout, place.shape(0), 4 * BLOCKS if is_prefill else BLOCKS, device)
    for number, array in enumerate(pool.arrays):
        array[:] = np.random.default_rng(number).integers(0, 1 << 16, array.shape, np.uint16) if is_prefill else 0
    return reshard.Endpoint(engine, place, 0, pool, wire=its, chunk_bytes=1 << 20, ring_bytes=1 << 25, **options)


def carrier(kind: str, name: str, port: int | str) -> Any:
    if kind.startswith("mapped "):
        return wire.mapped(carrier(kind.removeprefix("mapped "), name, port), drop_seconds=20)
    if kind == "nixl":
        return wire.nixl(name, drop_seconds=20)
    return wire.torch(name, meeting.join(port), drop_seconds=20)


def meet(mine: reshard.Endpoint, engine: str, other: str, folder: Path) -> reshard.Link:
    """The cards go by files."""
    part = folder / f"{engine}.part"
    part.write_bytes(mine.card())
    part.rename(folder / engine)
    end = time.monotonic() + 60
    while not (folder / other).exists():
        assert time.monotonic() < end
        time.sleep(0.002)
    return mine.meet([(folder / other).read_bytes()])


def span(engine: str) -> Span:
    return Span(np.arange(-(-TOKENS // (16 if engine == "prefill" else 64)))[::-1].copy(), range(TOKENS))


def main(engine: str, kind: str, folder: str, port: str) -> None:
    """One transfer after the other, all of which must be right."""
    at = Path(folder)
    with endpoint(engine, kind, port) as mine:
        link = meet(mine, engine, "decode" if engine == "prefill" else "prefill", at)
        for number in range(10_000):
            begin = link.send if engine == "prefill" else link.receive
            begin(str(number), span(engine), timeout=30).synchronize()
