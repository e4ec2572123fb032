"""Digests of tokens in a worker: kept for other engines that ask for them, and compared with theirs.  vLLM is not imported."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import BindError, KvbmError, TransferTimeoutError, printable
from ...link.secret import Secret
from ...link.talk import Reception, Talk, connect
from ...pool.pool import Pool
from ...reshard import Placement, Span

__all__ = ["Keeper", "Kept", "Origin", "compare", "cuts", "digests_of", "failed", "new_start"]

#: Most digests per message: each has 16 characters.
_MOST_IN_MESSAGE = 4096

#: Most bytes of digests that a worker keeps, the oldest are dropped; and about the bytes of a request beside its digests.
_MOST_KEPT, _EACH = 256 << 20, 1024

#: Most ranks of another engine, and most characters of a name or host.
_MOST_RANKS, _MOST_NAME = 4096, 1000

Digests = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Kept:
    """Digests ``(heads, tokens)`` of a group's tokens, from `first` on, on one rank.  Heads and layers are the model's numbers."""

    heads: tuple[int, ...]
    layers: tuple[int, ...]
    first: int
    digests: Digests

    @property
    def last(self) -> int:
        """The last token plus one."""
        return self.first + int(self.digests.shape[1])

    def sums(self, heads: Sequence[int], first: int, last: int, step: int) -> Digests:
        """Digests of some heads, of the tokens from `first` to `last` cut at multiples of `step`."""
        rows = [self.heads.index(head) for head in heads]
        edges = cuts(first, last, step)
        if not edges:
            return np.zeros(0, np.uint64)
        tokens = self.digests[rows, first - self.first : last - self.first].sum(axis=0, dtype=np.uint64)
        return np.add.reduceat(tokens, np.array(edges) - first, dtype=np.uint64)


def cuts(first: int, last: int, step: int) -> list[int]:
    """The first token of each part of `first` to `last`, cut at multiples of `step`."""
    return [] if first >= last else [first, *range(first // step * step + step, last, step)]


def digests_of(place: Placement, rank: int, pool: Pool, span: Span, stream: Any = None, wait: Any = None) -> Kept:
    """The digests of a span's tokens: one per head and token, which do not depend on layout and block size.

    Raises `PlanError` if tokens of this layout cannot be digested one by one.
    """
    part, tokens, nt = place.part(rank), np.array(span.tokens, np.int64), pool.shape.nt
    heads = tuple(range(pool.shape.nh)) if part.heads is None else tuple(part.heads)
    layers = tuple(range(pool.shape.nl)) if part.layers is None else tuple(part.layers)
    table = np.asarray(span.table, np.int64)
    ids = table[tokens // nt] * nt + tokens % nt
    rows = np.zeros((len(heads), len(tokens)), np.uint64)
    given = {} if pool.device == "cpu" else {"stream": stream, "wait": wait}
    for row in range(len(heads) if len(tokens) else 0):
        rows[row] = pool.section(h=row).units(1).digest(ids, tokens=tokens, model=part, **given)
    return Kept(heads, layers, int(span.tokens.start), rows)


# ---- where they are kept -----------------------------------------------------------------------------------------------


class Keeper:
    """Keeps digests of requests that were computed here, and answers workers of other engines; port 0 is any free port.

    `seconds` is the time limit for digests that are not computed yet, and for silence of the other side.  With a `secret`,
    others must know it.  Without one, `is_insecure` allows any address.
    """

    def __init__(self, host: str, port: int, seconds: float, secret: Secret | None, *, is_insecure: bool) -> None:
        self._kept: OrderedDict[str, dict[str, Kept] | str] = OrderedDict()
        self._nbytes, self._seconds, self._changed = 0, seconds, threading.Condition()
        self._reception = Reception(
            host, port, self._serve, timeout=seconds, name="kvbm guard", secret=secret, is_insecure=is_insecure
        )
        self.port = self._reception.port

    def put(self, key: str, found: dict[str, Kept] | str) -> None:
        """Keep the digests of a request by group, or the reason why there are none."""
        with self._changed:
            if key in self._kept:
                self._nbytes -= _nbytes(self._kept.pop(key))
            self._kept[key] = found
            self._nbytes += _nbytes(found)
            while self._nbytes > _MOST_KEPT and len(self._kept) > 1:
                self._nbytes -= _nbytes(self._kept.popitem(last=False)[1])
            self._changed.notify_all()

    def _get(self, key: str) -> dict[str, Kept]:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._kept, self._seconds):
                raise TransferTimeoutError(f"{printable(key)}: no digests of it within {self._seconds:g} s, or not any more")
            found = self._kept[key]
        if isinstance(found, str):
            raise BindError(found)
        return found

    def _serve(self, talk: Talk) -> None:
        """``ask`` a key, get its groups; then ``group``, ``heads``, ``first``, ``last``, ``step``: get sums."""
        key = talk.hear("ask")["ask"]
        if not isinstance(key, str) or len(key) > _MOST_NAME:
            raise BindError(f"{talk.peer}: ask: expected the key of a request, got {key!r:.100}")
        talk.is_known, talk.timeout = True, self._seconds
        kept = self._get(key)
        talk.say(groups={
            name: [list(one.heads), list(one.layers), one.first, one.last] for name, one in kept.items()
        })  # fmt: skip
        while True:
            asked = talk.hear("group", "heads", "first", "last", "step")
            one = kept.get(str(asked["group"]))
            heads, (first, last, step) = asked["heads"], (asked[name] for name in ("first", "last", "step"))
            if (
                one is None or not isinstance(heads, list) or any(type(number) is not int for number in (*heads, first, last, step))
                or not set(heads) <= set(one.heads) or len(heads) > len(one.heads)  # each once, or it takes much memory
                or not (one.first <= first <= last <= one.last and step > 0) or (last - first) // step > _MOST_IN_MESSAGE
            ):  # fmt: skip
                raise BindError(f"{talk.peer}: expected a group, heads and tokens that are here, got {asked!r:.200}")
            talk.say(sums=one.sums(heads, first, last, step).astype("<u8").tobytes().hex())

    def close(self) -> None:
        """Free the port."""
        self._reception.close()


def _nbytes(found: dict[str, Kept] | str) -> int:
    """Bytes to count: many requests of few tokens, and reasons, take memory, too."""
    return _EACH + (len(found) if isinstance(found, str) else sum(int(one.digests.nbytes) for one in found.values()))


# ---- those of another engine -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Origin:
    """Where the digests of a request are, from its untrusted parameters.

    `tokens` is the number of its first tokens that have digests, and `inputs` are hashes of these and of the other inputs
    (`identity.inputs_of`).
    """

    key: str
    host: str
    port: int
    workers: int
    tokens: int
    inputs: str

    @classmethod
    def of(cls, given: Any) -> Origin:
        """Read them.  Raises `BindError` if one is missing or has a wrong type."""
        if not isinstance(given, dict):
            raise BindError(
                f"kv_transfer_params: kvbm_guard: expected what the engine that prefilled said, got {given!r:.100}; it needs the "
                "guard, too, and the router must pass all of its kv_transfer_params on"
            )
        kinds = {"key": str, "host": str, "port": int, "workers": int, "tokens": int, "inputs": str}
        found = tuple(given.get(name) for name in kinds)
        for (name, kind), value in zip(kinds.items(), found, strict=True):
            if type(value) is not kind or (isinstance(value, str) and not 0 < len(value) <= _MOST_NAME):
                raise BindError(f"kv_transfer_params: kvbm_guard: {name}: expected {kind.__name__}, got {value!r:.100}")
        made = cls(*found)  # type: ignore[arg-type]
        if not 0 < made.port < 1 << 16 or not 0 < made.workers <= _MOST_RANKS:
            raise BindError(f"kv_transfer_params: kvbm_guard: expected a port and a number of workers, got {made}")
        return made


def compare(
    own: Callable[[], Mapping[str, tuple[Kept, int]]], origin: Origin, seconds: float, secret: Secret | None,
    settle: float, whole: Collection[str] = (),
) -> str:  # fmt: skip
    """Compare own digests with those of the engine that computed the tokens.  Returns what is wrong; empty if all are equal.

    `own` returns the digests and the block size of each group.  It is called a second time if they differ and `settle` is not
    0: the seconds for a connector that says too early that it has loaded.  It is 0 if a step has used the blocks already, as
    what comes after it does not make its tokens right.  `seconds` is the time limit of all answers.  `whole` are the groups
    without a window: all of their tokens must have digests there.

    Raises `KvbmError` if there is no answer that all tokens can be compared with.
    """
    mine = dict(own())
    end = time.monotonic() + seconds
    theirs: list[tuple[str, tuple[int, ...], int, Digests]] = []
    left = {name: set(kept.heads) for name, (kept, _) in mine.items() if kept.digests.shape[1]}
    for rank in range(origin.workers):
        if any(left.values()):
            theirs += _ask(origin, rank, mine, left, end, secret, whole)
    if any(left.values()):
        raise BindError(f"{origin.key}: heads {sorted(set().union(*left.values()))} of it are on no rank of the other engine")
    wrong = _wrong(mine, theirs)
    if not wrong or not settle:
        return wrong
    time.sleep(settle)
    again = dict(own())
    return "" if not _wrong(again, theirs) else wrong


def _wrong(mine: Mapping[str, tuple[Kept, int]], theirs: Sequence[tuple[str, tuple[int, ...], int, Digests]]) -> str:
    count, total, where = 0, 0, ""
    for name, heads, first, sums in theirs:
        kept, step = mine[name]
        differ = np.flatnonzero(kept.sums(heads, first, kept.last, step) != sums)
        total += len(sums)
        count += len(differ)
        if len(differ) and not where:
            where = f"group {name}, from token {cuts(first, kept.last, step)[differ[0]]} on"
    return f"{count} of {total} digests of blocks differ from those of the engine that computed them: {where}" if count else ""


def _ask(
    origin: Origin, rank: int, mine: Mapping[str, tuple[Kept, int]], left: dict[str, set[int]], end: float,
    secret: Secret | None, whole: Collection[str],
) -> list[tuple[str, tuple[int, ...], int, Digests]]:  # fmt: skip
    """Sums of a rank's heads that are in `left`, which loses them: group, heads, first token, one sum per block."""
    found = []
    with connect(origin.host, origin.port + rank, _rest(end), secret, "the guard of a worker") as talk:
        talk.say(ask=origin.key)
        groups = talk.hear("groups", within=_rest(end))["groups"]
        for name, wanted in left.items():
            if not wanted:
                continue
            kept, step = mine[name]
            held, layers, begin, stop = _described(groups, name, talk.peer)
            if tuple(layers) != kept.layers:
                raise BindError(f"{talk.peer}: group {name}: expected layers {kept.layers}, got {layers!r:.200}")
            heads = tuple(sorted(wanted & set(held)))
            first = max(kept.first, begin)  # a window begins there in a later block, by less than one of this side's
            if stop < kept.last or first >= kept.last or first - kept.first >= (1 if name in whole else step):
                raise BindError(
                    f"{talk.peer}: group {name}: expected tokens {kept.first} to {kept.last}, got digests of {begin} to {stop}"
                )
            if not heads:
                continue
            wanted.difference_update(heads)
            sums: list[Digests] = []
            edges = cuts(first, kept.last, step)
            for at in range(0, len(edges), _MOST_IN_MESSAGE):
                some = edges[at : at + _MOST_IN_MESSAGE + 1]
                until = some[-1] if len(some) > _MOST_IN_MESSAGE else kept.last
                talk.say(group=name, heads=list(heads), first=some[0], last=until, step=step)
                sums.append(_sums(talk.hear("sums", within=_rest(end))["sums"], len(some[:_MOST_IN_MESSAGE]), talk.peer))
            found.append((name, heads, first, np.concatenate(sums)))
    return found


def _described(groups: Any, name: str, peer: str) -> tuple[list[int], list[int], int, int]:
    one = groups.get(name) if isinstance(groups, dict) else None
    if (
        not isinstance(one, list) or len(one) != 4
        or any(not isinstance(some, list) or any(type(number) is not int for number in some) for some in one[:2])
        or any(type(number) is not int for number in one[2:])
    ):  # fmt: skip
        raise BindError(f"{peer}: expected digests of group {name}, got {groups!r:.200}; do both have the same groups of layers?")
    return one[0], one[1], one[2], one[3]


def _sums(text: Any, count: int, peer: str) -> Digests:
    if not isinstance(text, str) or len(text) != 16 * count:
        raise BindError(f"{peer}: expected {count} digests, got {text!r:.100}")
    try:
        return np.frombuffer(bytes.fromhex(text), "<u8").astype(np.uint64)
    except ValueError:
        raise BindError(f"{peer}: expected digests, got {text!r:.100}") from None


def _rest(end: float) -> float:
    rest = end - time.monotonic()
    if rest <= 0:
        raise TransferTimeoutError("the engine that prefilled: no digests in time")
    return rest


def new_start() -> str:
    """A name of this start of an engine, which no other one has."""
    return secrets.token_hex(8)


def failed(error: Exception) -> str:
    """The reason of an error, for the log."""
    return printable(str(error) if isinstance(error, KvbmError) else f"{type(error).__name__}: {error}", 2000)
