"""Resharding: which rank sends what to which rank, between two placements of one model's cache."""

from __future__ import annotations

import bisect
import hashlib
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

from .._arguments import flag, number, quoted, require_a, whole
from .._shown import Shown
from ..errors import BindError, LayoutError, PlanError
from ..layout.region import Section
from ..layout.shapes import ITEMSIZE
from ..planner.cast import Cast, CastPart, Scale, as_cast, is_one, of_layers
from ..planner.plan import between
from . import report
from .casting import Layouts, PlaneCast, as_layouts, casts_of, meaning_of, require_scales
from .placement import Placement, Strips
from .proof import prove
from .strips import ONE_TOKEN, Meeting, Unit, count_common, meet, meet_in_unit, share_a_token

#: Selects which of several equal source ranks sends: ``(destination rank, ranks)`` → one of the ranks.
Prefer = Callable[[int, Sequence[int]], int]

#: The tokens at which each side's layout splits a block.
Cuts = tuple[Sequence[int], Sequence[int]]


class Message(NamedTuple):
    """What one rank sends to another: the product of what both hold on each axis.

    Attributes
    ----------
    src, dst : int
        Source rank and destination rank.
    l, h : tuple of Meeting
        Layers and KV heads.
    t : Unit
        Tokens.
    """

    src: int
    dst: int
    l: tuple[Meeting, ...]  # noqa: E741  (the axis)
    h: tuple[Meeting, ...]
    t: Unit

    @property
    def layers(self) -> int:
        return sum(meeting.size for meeting in self.l)

    @property
    def heads(self) -> int:
        return sum(meeting.size for meeting in self.h)

    @property
    def tokens(self) -> int:
        """Tokens of a unit that the message carries."""
        return self.t.meeting.size if self.t.meeting else 0

    def of_layers(self, layers: range) -> Message | None:
        """The same message for some layers of the model; None if it has none of them."""
        found = tuple(part for meeting in self.l if (part := meeting.within(layers)) is not None)
        return self._replace(l=found) if found else None

    def part(self, side: int, *, single: bool = False) -> tuple[int, dict[str, list[int]]]:
        """What is selected of a rank's blocks: tokens of their units, and coordinates on each axis.

        `side`: 0 of the source, 1 of the destination.  `single`: of a single token, not of a unit.
        """
        unit, name = ONE_TOKEN if single else self.t, ("src", "dst")[side]
        assert unit.meeting is not None
        chosen = {
            "l": [x for meeting in self.l for x in meeting.coordinates(name)],
            "h": [x for meeting in self.h for x in meeting.coordinates(name)],
            "t": list(unit.meeting.coordinates(name)),
        }
        return (unit.src_slots, unit.dst_slots)[side], chosen


@dataclass(frozen=True)
class Resharding(Shown):
    """A copy between two engines that distribute one cache differently.  The constructor proves that it is complete.

    Attributes
    ----------
    src, dst : Placement
        The placements of the source and of the destination.
    sends, takes : tuple of Strips
        What each source rank can send, and what each destination rank receives: all that it holds, or a share of it (`gather`).
    messages : tuple of Message
        The messages, sorted by destination rank.
    cuts : two sequences of int
        The tokens at which each side's layout splits a block.
    cast : Scale, optional
        Values change their format on the way.  Its layers are those of the model.
    layouts : (Layout, Layout), optional
        The layouts of both sides, which say what a cast changes.

    Raises
    ------
    CoverageError
        A coordinate of a destination rank would be missing, written twice, or come from the wrong place; or a message would have a
        part of a group of elements that share a scale.
    PlanError
        There is no cast between the formats of both sides.
    """

    src: Placement
    dst: Placement
    sends: tuple[Strips, ...]
    takes: tuple[Strips, ...]
    messages: tuple[Message, ...]
    cuts: Cuts = ((), ())
    cast: Scale | None = None
    layouts: Layouts | None = None

    def __post_init__(self) -> None:
        _require_one_model(self.src, self.dst, self.cast)
        require_scales(self.title, self.src.model, self.cast)
        object.__setattr__(self, "cuts", _whole_cuts(self.cuts))
        prove(self)

    @property
    def title(self) -> str:
        return f"{self.src.name} → {self.dst.name}"

    @cached_property
    def casts(self) -> tuple[PlaneCast, ...]:
        """The planes whose values change.  None if the layouts are not known."""
        if self.cast is None or self.layouts is None:
            return ()
        return casts_of(self.title, (self.src, self.dst), self.layouts, self.cast)

    def cast_of(self, message: Message) -> Scale | None:
        """The cast of a message: its layers have their own scales of the caller."""
        require_a(Message, "message", message, "a message of this resharding")
        layers = [layer for meeting in message.l for layer in meeting.coordinates("first")]
        return None if self.cast is None else of_layers(self.cast, layers)

    def section(self, message: Message, side: int, *, single: bool = False) -> Section:
        """A message's part of the blocks of its source (0) or destination (1), in the layout of that side.

        Raises `PlanError` if the layout does not fit the blocks of the rank, or the message would cut what is one
        element in it.
        """
        assert self.layouts is not None
        place, layout = (self.src, self.dst)[side], self.layouts[side]
        tokens, chosen = message.part(side, single=single)
        try:
            found = layout.resolve(place.shape((message.src, message.dst)[side]), 1).section.cut(tokens)
            for axis, coordinates in chosen.items():
                found = found.select(axis, tuple(coordinates))
        except LayoutError as error:
            raise PlanError(f"{self.title}: {place.name}: {error}") from None
        return found

    @cached_property
    def cast_parts(self) -> tuple[CastPart, ...]:
        """The loop nests of the casts of one message."""
        if not self.casts or not self.messages:
            return ()
        scales = [(message, self.cast_of(message)) for message in self.messages]
        message, scale = next((one for one in scales if one[1] and not is_one(one[1])), scales[0])  # else none of them multiplies
        sides = [self.section(message, side) for side in (0, 1)]
        return between(sides[0], sides[1], self.title, cast=scale).casts

    @cached_property
    def coded(self) -> int:
        """The side whose format takes fewer bytes (0 the source, 1 the destination): processes send that one."""
        if not self.casts or not self.messages:
            return 0
        src, dst = (self.section(self.messages[0], side).block_bytes for side in (0, 1))
        return int(dst < src)

    def refit(self, cuts: Cuts, shift: int = 0, layouts: Layouts | None = None) -> Resharding:
        """The same messages in other units, for these `cuts` and, if given, other layouts.

        The units also divide `shift`, the distance (tokens) of the positions at which both sides' block tables begin.
        """
        cuts, layouts = _whole_cuts(cuts), layouts or self.layouts
        if cuts == self.cuts and layouts is self.layouts and all(shift % m.t.tokens == 0 for m in self.messages):
            return self
        sizes = self.src.nt, self.dst.nt
        messages = [
            m._replace(t=meet_in_unit(self.sends[m.src].t, self.takes[m.dst].t, sizes, cuts, shift))
            for m in self.messages
        ]
        return replace(self, messages=tuple(messages), cuts=cuts, layouts=layouts)

    @property
    def unit(self) -> int:
        """Tokens of the smallest unit of all messages."""
        return min((message.t.tokens for message in self.messages), default=1)

    def nbytes(self, message: Message, tokens: int | None = None) -> int:
        """Bytes of a message, for layouts in which all elements have the model's dtype.  Of two dtypes, those of the smaller one.

        Parameters
        ----------
        message : Message
            The message.
        tokens : int, optional
            Length of a sequence from its beginning.  Default: the tokens of one unit that the message carries.
        """
        require_a(Message, "message", message, "a message of this resharding")
        if not 0 <= message.src < len(self.sends) or not 0 <= message.dst < len(self.takes):
            raise BindError(f"message: expected one of {self.title}, got one from rank {message.src} to {message.dst}")
        tokens = None if tokens is None else number("tokens", tokens, 0, 1 << 48)
        model = min(self.src.model, self.dst.model, key=lambda model: ITEMSIZE[model.dtype] / model.pack)
        src_turns, dst_turns = self.sends[message.src].t, self.takes[message.dst].t
        count = message.tokens if tokens is None else count_common(src_turns, dst_turns, tokens)
        return message.layers * message.heads * model.no * model.hd * count * ITEMSIZE[model.dtype] // model.pack

    @cached_property
    def fingerprint(self) -> str:
        """A hash.  It is equal on both sides if both have the same plan."""
        meaning: tuple[Any, ...] = self.src.fingerprint, self.dst.fingerprint, self.messages, self.cuts
        if self.cast is not None:
            text = f"Scale({self.cast.text})" if self.cast.is_given else repr(self.cast)  # a long repr is cut off
            meaning += text, self.cast.is_given, *map(meaning_of, self.layouts or ())
        return hashlib.sha256(repr(meaning).encode()).hexdigest()[:16]

    def explain(self) -> str:
        """The resharding in sentences: the overlaps on each axis, the unit, the tokens that are copied one by one, the senders."""
        return report.explain(self)

    def __repr__(self) -> str:
        return f"Resharding({self.title}, messages={len(self.messages)})"

    def __str__(self) -> str:
        return report.table(self)


def common_shift(made: Resharding, shift: int) -> int:
    """One of few shifts for which `Resharding.refit` makes the same messages as for the given one, so that they can be cached."""
    places = (made.src, made.sends), (made.dst, made.takes)
    most = math.gcd(*(place.nt * strips.t.over for place, ranks in places for strips in ranks))
    return math.gcd(shift, most) % most


# ---- planning ------------------------------------------------------------------------------------------------------


def plan(
    src: Placement, dst: Placement, *, stripe: bool = False, prefer: Prefer | None = None, cuts: Cuts = ((), ()),
    cast: Cast = None, layouts: Any = None,
) -> Resharding:  # fmt: skip
    """Plan the copy of a cache from one engine to another, and prove it.

    Parameters
    ----------
    src, dst : Placement
        Source and destination; both of one model.
    stripe : bool
        If several source ranks hold the same, each sends a share of the layers.  False: one of them sends all.  A replicated
        source then uses the network cards of all its ranks.
    prefer : callable, optional
        A function of ``(destination rank, source ranks that hold the same)`` that returns the rank that sends.  Default: the rank
        with the least to send so far; of several, the nearest one.  The function must give the same result on all ranks.
    cuts : two sequences of int
        The tokens at which each side's layout splits a block.  `Local` computes them from its pools.
    cast : {"amax"} or kvbm.Scale, optional
        Values change their format on the way, as for `kvbm.Transfer`.  The models may then differ in their dtype.  Scales by layer
        are those of all layers of the model: each message takes those of its own.
    layouts : (layout, layout), optional
        The layouts of both sides: of a cast they say what changes, and which elements share a scale.  `Local` takes those of its
        pools.

    Returns
    -------
    Resharding
        The plan.  Printing it shows a table.

    Raises
    ------
    PlanError
        The placements have different models, `src` or `dst` is not a placement, `cuts`, `cast` or `layouts` has a wrong form,
        `prefer` returns another rank, or there is no cast between the formats of the layouts.
    CoverageError
        No source rank holds some part of the destination, or elements that share a scale would be in several messages.

    Examples
    --------
    >>> from kvbm import Placement, load_shape
    >>> model = load_shape("llama-3.1-70b")
    >>> prefill = Placement("tp4", shard={"h": "tp"}, model=model, nt=16, name="prefill")
    >>> decode = Placement("tp2", shard={"h": "tp"}, model=model, nt=64, name="decode")
    >>> print(plan(prefill, decode))
    prefill (tp4, 16 tokens per block) → decode (tp2, 64 tokens per block): 4 messages, unit 16 tokens: 1 block → 1/4 block
      from   to   heads             layers   tokens a unit      bytes   rows of
         0    0   0–1               0–79     16 of 16        1.25 MiB     256 B
         1    0   2–3               0–79     16 of 16        1.25 MiB     256 B
         2    1   4–5 → local 0–1   0–79     16 of 16        1.25 MiB     256 B
         3    1   6–7 → local 2–3   0–79     16 of 16        1.25 MiB     256 B
    5 MiB in all, for a unit of each
    proven: every coordinate of decode once, from a rank that holds it; 4 of 4 source ranks send 1 message each
    """
    scale, layouts = as_cast(cast), as_layouts(layouts)
    _require_one_model(src, dst, scale)
    stripe = flag("stripe", stripe, PlanError)
    cuts = _whole_cuts(cuts)
    sends = tuple(map(src.strips, range(src.world)))
    takes = tuple(map(dst.strips, range(dst.world)))
    messages = _messages(src, dst, sends, takes, stripe, prefer, cuts)
    return Resharding(src, dst, sends, takes, messages, cuts, scale, layouts)


def gather(src: Placement, dst: Placement, **options: Any) -> tuple[Resharding, Resharding]:
    """Plan a copy in two steps, for a destination with ranks that hold the same: each receives a share, then they exchange.

    Parameters
    ----------
    src, dst : Placement
        Source and destination; both of one model.
    **options
        As for `plan`.

    Returns
    -------
    tuple of Resharding
        The first step copies from the source to the destination; equal ranks get a share of the layers each, so every byte is sent
        once.  In the second step every destination rank sends its share to the others, from and into the same pools.  A cast
        takes place in the first step.

    Raises
    ------
    PlanError, CoverageError
        As `plan`.
    """
    cast, layouts = as_cast(options.pop("cast", None)), as_layouts(options.pop("layouts", None))
    _require_one_model(src, dst, cast)
    stripe, prefer = options.pop("stripe", False), options.pop("prefer", None)
    cuts = _whole_cuts(options.pop("cuts", ((), ())))
    if options:
        raise PlanError(f"gather: expected stripe, prefer, cuts, cast and layouts, got {quoted(next(iter(options)))}")
    everything = tuple(map(dst.strips, range(dst.world)))
    groups: dict[Strips, list[int]] = {}
    for rank, strips in enumerate(everything):
        groups.setdefault(strips, []).append(rank)
    shares = list(everything)
    for strips, ranks in groups.items():
        for index, rank in enumerate(ranks):
            shares[rank] = strips._replace(l=strips.l.share(index, len(ranks)))
    sends = tuple(map(src.strips, range(src.world)))
    messages = _messages(src, dst, sends, tuple(shares), stripe, prefer, cuts)
    first = Resharding(src, dst, sends, tuple(shares), messages, cuts, cast, layouts)
    others = tuple(strips._replace(l=strips.l.without(share.l)) for strips, share in zip(everything, shares, strict=True))
    among = (cuts[1], cuts[1])
    second = Resharding(
        dst, dst, tuple(shares), others, _messages(dst, dst, tuple(shares), others, False, None, among), among
    )
    return first, second


def require_made(made: Any) -> None:
    """Raise `BindError` unless `made` is a resharding."""
    require_a(Resharding, "made", made, "a Resharding of kvbm.reshard.plan")


def require_layers(layers: Any, most: int) -> range:
    """The range of the model's layers; all layers for None."""
    found = range(most) if layers is None else layers
    if not (isinstance(found, range) and found.step == 1 and 0 <= found.start < found.stop <= most):
        raise BindError(f"layers: expected a range within 0 to {most} of the model, got {quoted(layers)}")
    return found


def _require_one_model(src: Placement, dst: Placement, cast: Scale | None) -> None:
    for what, place in (("src", src), ("dst", dst)):
        require_a(Placement, what, place, "a kvbm.Placement", PlanError)
    src_model, dst_model = src.model, dst.model
    sizes = {"nl": "layers", "no": "of K and V", "nh": "KV heads", "hd": "elements per head"}
    for axis, what in (sizes if cast else sizes | {"dtype": ""}).items():
        a, b = getattr(src_model, axis), getattr(dst_model, axis)
        # A model of records says uint8, or the dtype of its values: the planes say what is held, and the pools' are compared.
        if a != b and not (axis == "dtype" and {a, b} & {"uint8", "int8"}):
            advice = ", or cast= to change values on the way (at the command line: --cast 1.0)" if axis == "dtype" else ""
            raise PlanError(
                f"{src.name} → {dst.name}: {axis}: {a}{what and f' {what}'} in one model, {b} in the other; expected two "
                f"placements of one model{advice}"
            )


def _whole_cuts(cuts: Any) -> Cuts:
    try:
        src_cuts, dst_cuts = (tuple(map(whole, one)) for one in cuts)
    except (TypeError, ValueError):
        src_cuts = dst_cuts = (None,)
    found = tuple(tuple(cut for cut in one if cut is not None and cut > 0) for one in (src_cuts, dst_cuts))
    if found != (src_cuts, dst_cuts):
        raise PlanError(f"cuts: expected two lists of tokens at which blocks are split, got {quoted(cuts)}")
    return found


def _messages(
    src: Placement, dst: Placement, sends: Sequence[Strips], takes: Sequence[Strips], stripe: bool,
    prefer: Prefer | None, cuts: Cuts,
) -> tuple[Message, ...]:  # fmt: skip
    """For every destination rank: one message from each class of equal source ranks that hold something that it receives."""
    classes: dict[Strips, list[int]] = {}
    for rank, strips in enumerate(sends):
        classes.setdefault(strips, []).append(rank)
    made: list[Message] = []
    replicas = {strips: _Replicas(ranks, src.world, dst.world, prefer) for strips, ranks in classes.items()}
    shares = {
        strips: [(one, share) for i, one in enumerate(ranks) if (share := strips.l.share(i, len(ranks))).size]
        for strips, ranks in classes.items()
        if stripe and len(ranks) > 1
    }
    both, unit_of = cache(meet), cache(partial(meet_in_unit, sizes=(src.nt, dst.nt), cuts=cuts))
    for rank, wanted in enumerate(takes):
        for held in classes:
            heads = both(held.h, wanted.h)
            if not heads or not both(held.l, wanted.l) or not share_a_token(held.t, wanted.t):
                continue
            unit, senders = unit_of(held.t, wanted.t), replicas[held]
            if held in shares:
                parts = [(one, both(share, wanted.l)) for one, share in shares[held]]
            else:
                parts = [(senders.choose(rank), both(held.l, wanted.l))]
            for one, layers in parts:
                if layers:
                    made.append(Message(one, rank, layers, heads, unit))
                    senders.add(one, made[-1].layers * made[-1].heads * made[-1].tokens / unit.tokens)
    return tuple(made)


class _Replicas:
    """Source ranks that hold the same, sorted by what each has to send so far: finds the one with the least quickly."""

    def __init__(self, ranks: Sequence[int], world: int, dst_world: int, prefer: Prefer | None) -> None:
        self._ranks, self._worlds, self._prefer = tuple(ranks), (world, dst_world), prefer
        self._load = dict.fromkeys(ranks, 0.0)
        self._with = {0.0: list(ranks)}  # load → ranks, ascending
        self._loads = [0.0]  # a heap

    def choose(self, rank: int) -> int:
        """The source rank that sends to a destination rank."""
        if self._prefer is not None:
            if not callable(self._prefer):
                raise PlanError(f"prefer: expected a function of a rank and ranks, got {quoted(self._prefer)}")
            chosen = self._prefer(rank, self._ranks)
            if (found := whole(chosen)) not in self._load:
                raise PlanError(
                    f"prefer: expected one of the ranks {quoted(list(self._ranks))} for rank {rank}, got {quoted(chosen)}"
                )
            return found
        world, dst_world = self._worlds
        least = self._with[self._loads[0]]
        at = bisect.bisect_left(least, rank * world, key=lambda one: one * dst_world)
        return min(least[max(at - 1, 0) : at + 1], key=lambda one: abs(one * dst_world - rank * world))

    def add(self, rank: int, load: float) -> None:
        """Add to what a rank has to send."""
        before = self._load[rank]
        self._load[rank] = after = before + load
        alike = self._with[before]
        del alike[bisect.bisect_left(alike, rank)]
        if after not in self._with:
            self._with[after] = []
            heapq.heappush(self._loads, after)
        bisect.insort(self._with[after], rank)
        while not self._with[self._loads[0]]:
            del self._with[heapq.heappop(self._loads)]
