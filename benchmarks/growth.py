"""The cost of links by the number of ranks of both engines, up to 64 on each side: ``python -m benchmarks growth``.

All ranks are endpoints in one process, connected by `wire.memory`, with pools of a small model.
It prints the table of ``docs/howto/connect.md``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import click
import numpy as np

from kvbm import wire
from kvbm.layout import spec
from kvbm.layout.shapes import BlockShape
from kvbm.link.chunk import MOST
from kvbm.link.flows import WINDOW
from kvbm.pool.pool import Pool
from kvbm.reshard import Endpoint, Placement, Resharding, Span

__all__ = ["CASES", "Grown", "grow", "growth", "table"]

MODEL = BlockShape(nl=64, no=2, nh=8, nt=16, hd=16, dtype="uint8")

#: Number of tokens in the sequence that all ranks send and receive.
TOKENS = 1024

#: Mesh, shares and tokens per block of both sides.
CASES: dict[str, tuple[tuple[str, dict[str, str], int], ...]] = {
    "tp 1 → 1": (("tp1", {}, 16), ("tp1", {}, 64)),
    "tp 4 → 2": (("tp4", {"h": "tp"}, 16), ("tp2", {"h": "tp"}, 64)),
    "tp 8 → 8": (("tp8", {"h": "tp"}, 16), ("tp8", {"h": "tp"}, 64)),
    "pp 4, tp 4 → tp 16, a head for two ranks": (
        ("pp4 tp4", {"l": "pp", "h": "tp"}, 16), ("tp16", {"h": "tp/2", "t": "tp%2 by 16"}, 64),
    ),
    "pp 8, tp 8 → tp 64, a head for eight ranks": (
        ("pp8 tp8", {"l": "pp", "h": "tp"}, 16), ("tp64", {"h": "tp/8", "t": "tp%8 by 16"}, 64),
    ),
    "pp 8, tp 8 → cp 64: each rank to each": (("pp8 tp8", {"l": "pp", "h": "tp"}, 16), ("cp64", {"t": "cp by 16"}, 16)),
}  # fmt: skip


class Grown(NamedTuple):
    """The results of one case.

    Attributes
    ----------
    ranks : (int, int)
    messages : int
        Messages of the plan.
    card, cards : int
        Bytes of the largest card of a sending rank, and of all cards that a receiving rank reads.
    peers : int
        Largest number of peers of a receiving rank.
    window : int
        Bytes of slots that give each of these peers its whole window at once, with chunks of the largest size.
    least : int
        Bytes of slots with one slot per peer.
    meet, all_meet, sequence : float
        Seconds of `Endpoint.meet` for one receiving rank, for all ranks one after the other, and of a sequence of `TOKENS` over
        all links.
    """

    ranks: tuple[int, int]
    messages: int
    card: int
    cards: int
    peers: int
    window: int
    least: int
    meet: float
    all_meet: float
    sequence: float


def grow(case: str) -> Grown:
    """Create all endpoints of a case, connect them, and send a sequence."""
    hub, sides = wire.Hub(), []
    with contextlib.ExitStack() as stack:
        for number, (mesh, shard, nt) in enumerate(CASES[case]):
            name = ("prefill", "decode")[number]
            place: Any = Placement(mesh, shard=shard, model=MODEL, nt=nt, name=name)
            layout = spec.load(("vllm/flash_attn_nhd", "vllm/flash_attn_hnd")[number])
            sides.append([
                stack.enter_context(
                    Endpoint(
                        name, place, rank, Pool.allocate(layout, place.shape(rank), TOKENS // nt),
                        wire=wire.memory(f"{name}/{rank}", hub), chunk_bytes=1 << 18, slots=8,
                    )
                )
                for rank in range(place.world)
            ])  # fmt: skip
        cards = [[end.card() for end in side] for side in sides]
        began = time.perf_counter()
        into = [end.meet(cards[0]) for end in sides[1]]
        one = (time.perf_counter() - began) / len(into)
        to = [end.meet(cards[1]) for end in sides[0]]
        every = time.perf_counter() - began
        seconds = []
        for key in ("first", "second"):
            began = time.perf_counter()
            handles = []
            for links, side, call in ((into, 1, "receive"), (to, 0, "send")):
                nt = CASES[case][side][2]
                for rank, link in enumerate(links):
                    turns = sides[side][rank].groups[""][0].strips(rank).t
                    span = Span(np.arange(TOKENS // nt // turns.over), range(TOKENS))
                    handles.append(getattr(link, call)(key, span, timeout=120.0))
            for handle in handles:
                handle.synchronize()
            seconds.append(time.perf_counter() - began)
        made = into[0]._plans[False][""]
        assert isinstance(made, Resharding)
        peers = max(
            len({message.src for message in made.messages if message.dst == rank}) for rank in range(made.dst.world)
        )
    return Grown(
        (len(sides[0]), len(sides[1])), len(made.messages), max(map(len, cards[0])), sum(map(len, cards[0])), peers,
        peers * WINDOW * MOST, peers * MOST, one, every, seconds[1],
    )  # fmt: skip


#: Columns of the table.
COLUMNS = (
    "", "ranks", "messages", "a card, KB", "cards that a rank reads, KB", "peers", "meet of a rank, ms", "a sequence, ms",
    "slots for all windows, MiB", "one slot each, MiB",
)  # fmt: skip


def table(found: dict[str, Grown]) -> Iterator[str]:
    """Rows of Markdown."""
    yield f"| {' | '.join(COLUMNS)} |".replace("|  |", "| |")
    yield "|" + "---|" * len(COLUMNS)
    for case, one in found.items():
        cells = (
            case, f"{one.ranks[0]} × {one.ranks[1]}", f"{one.messages:,}", f"{one.card / 1e3:.1f}", f"{one.cards / 1e3:.1f}",
            str(one.peers), f"{one.meet * 1e3:.1f}", f"{one.sequence * 1e3:.0f}", f"{one.window >> 20:,}", f"{one.least >> 20:,}",
        )  # fmt: skip
        yield f"| {' | '.join(cells)} |"


@click.command()
def growth() -> None:
    """Print the cost of links by the number of ranks of both engines, as a table of Markdown."""
    click.echo("\n".join(table({case: grow(case) for case in CASES})))
