"""The proof of a resharding: every coordinate of the destination is written once, from a rank that holds it, at the right place.

It shares no code with the planner: sets of layers and heads are bits of an integer, tokens are counted by a formula.  Its cost
depends on the numbers of ranks and messages, not on the size of the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .._arguments import require_like
from ..errors import CoverageError
from .casting import PlaneCast
from .strips import Meeting, Runs, Turns, Unit

if TYPE_CHECKING:
    from .messages import Message, Resharding


def prove(made: Resharding) -> None:
    """Prove a resharding.  If the function returns, the resharding is correct.

    1. Each message's loops name coordinates that its source holds and its destination receives, at the places in both strips.  A
       loop inside one run is right if both its ends and its step are, and if digits of a position do not carry.
    2. What a destination rank receives is a product over axes.  For each turn of the source that overlaps its own, the layers and
       heads of its messages are a partition of what it receives; the turns partition the tokens.
    3. A unit is a whole part of a block on both sides, and holds exactly the tokens that both ranks hold.
    4. Of a cast, each message has whole groups of the elements that share a scale.  So each scale is written once, as each of its
       elements is, and is that of all of them.  A scale that is computed is that of elements that one rank holds in any partition.
       A scale of the caller is that of a layer of the model, which step 1 has compared with what both ranks hold.

    Raises
    ------
    CoverageError
        The message names the rank, the axis, and what is missing, written twice, or from the wrong place.
    """
    require_like("made", made, ("title", "src", "dst", "sends", "takes", "messages"), "a kvbm.reshard.Resharding")
    by_rank: dict[int, list[Message]] = {rank: [] for rank in range(made.dst.world)}
    rules = {(strips.t.every, strips.t.over) for strips in made.sends}
    for message in made.messages:
        if message.dst not in by_rank or not 0 <= message.src < made.src.world:
            raise CoverageError(
                f"{made.title}: message from rank {message.src} to rank {message.dst}: there is no such rank"
            )
        by_rank[message.dst].append(message)
    for rank, messages in by_rank.items():
        where = f"{made.title}: {made.dst.name} rank {rank}"
        for message in messages:
            _require_right(made, message, f"{where} from {made.src.name} rank {message.src}")
        _require_partition(made, rank, messages, rules, where)
    for one in made.casts:
        if one.spans:
            for message in made.messages:
                _require_whole_groups(made, message, one)


# ---- one message ---------------------------------------------------------------------------------------------------


def _require_right(made: Resharding, message: Message, where: str) -> None:
    sends, takes = made.sends[message.src], made.takes[message.dst]
    for axis, meetings in (("l", message.l), ("h", message.h)):
        for meeting in meetings:
            for side, strip, of in ((0, getattr(sends, axis), made.src), (1, getattr(takes, axis), made.dst)):
                if not _is_held(meeting, strip, side):
                    held = strip if strip.size else "none"
                    raise CoverageError(
                        f"{where}: {_AXES[axis]}: {meeting}: {of.name} holds {held}, elsewhere or not at all"
                    )
    _require_unit(message.t, (sends.t, takes.t), (made.src.nt, made.dst.nt), where)


_AXES = {"l": "layers", "h": "heads"}


def _is_held(meeting: Meeting, strip: Runs, side: int) -> bool:
    """True if a progression lies in one run of a strip, at the local coordinates that it names."""
    if len(meeting.loops) > 1:
        return False
    count, step, *locals_ = meeting.loops[0] if meeting.loops else (1, 0, 0, 0)
    first, local, move = meeting.first, (meeting.src, meeting.dst)[side], locals_[side]
    for run in strip.runs:
        turns, rest = divmod(first - run.first, run.step)
        if rest == 0 and turns >= 0 and turns + move * (count - 1) < run.length:
            return local == run.local + turns and step == move * run.step and (move > 0 or count == 1)
    return False


def _require_unit(unit: Unit, turns: tuple[Turns, Turns], sizes: tuple[int, int], where: str) -> None:
    """Check that a unit's slots are a whole part of a block on both sides, and its loops all tokens that both ranks hold."""
    meeting = unit.meeting
    if meeting is None:
        raise CoverageError(f"{where}: tokens: the two ranks have none in common")
    inside = [unit.tokens % turn.period == 0 for turn in turns]
    for turn, size, whole, slots in zip(turns, sizes, inside, (unit.src_slots, unit.dst_slots), strict=True):
        expected = unit.tokens // turn.over if whole else unit.tokens
        if slots != expected or size % slots or not (whole or turn.every % unit.tokens == 0):
            raise CoverageError(
                f"{where}: a unit of {unit.tokens} tokens in {slots} slots does not divide a block of {size}"
            )
    # The steps of the loops form a chain, and the start has only lower or other digits: no digit carries.
    width, start = 1, meeting.first
    for loop in sorted(meeting.loops, key=lambda loop: loop.step):
        if loop.extent < 2 or loop.step < 1 or loop.step % width or start % (loop.step * loop.extent) // loop.step:
            raise CoverageError(f"{where}: tokens: {loop} overlaps another loop of {meeting}")
        width = loop.step * loop.extent
    if start + sum((loop.extent - 1) * loop.step for loop in meeting.loops) >= unit.tokens:
        raise CoverageError(f"{where}: tokens: {meeting} leaves its unit of {unit.tokens}")
    for side, (turn, whole) in enumerate(zip(turns, inside, strict=True)):
        slot = (meeting.src, meeting.dst)[side]
        if whole and turn.over > 1 and start % turn.period // turn.every != turn.index:
            raise CoverageError(f"{where}: tokens: position {start} of a unit is another rank's turn")
        if slot != (start // turn.period * turn.every + start % turn.every if whole else start):
            raise CoverageError(f"{where}: tokens: position {start} of a unit is not slot {slot}")
        for loop in meeting.loops:
            below = not whole or turn.every % (loop.step * loop.extent) == 0
            if not below and loop.step % turn.period:
                raise CoverageError(f"{where}: tokens: {loop} leaves the turn of {turn}")
            if (loop.src, loop.dst)[side] != (loop.step if below else loop.step // turn.over):
                raise CoverageError(f"{where}: tokens: {loop}: expected another step of slots for {turn}")
    both = [turn for turn, whole in zip(turns, inside, strict=True) if whole]
    expected = unit.tokens // math.lcm(*(t.period for t in both)) * _common(both) if both else unit.tokens
    if meeting.size != expected:
        raise CoverageError(f"{where}: tokens: {meeting.size} of a unit, expected the {expected} that both ranks hold")


def _common(turns: Sequence[Turns]) -> int:
    """The number of positions that all of one or two turns hold, in the common period of both."""
    if len(turns) == 1:
        return turns[0].every
    a, b = turns
    # Positions in both are pairs, one of each, that are equal modulo the common divisor of both periods.
    modulus = math.gcd(a.period, b.period)
    (wholes, rest), (other_wholes, other_rest) = divmod(a.every, modulus), divmod(b.every, modulus)
    ahead = (b.index * b.every - a.index * a.every) % modulus
    # Residues in [0, rest) and in [ahead, ahead + other_rest) modulo.
    overlap = max(0, min(rest, ahead + other_rest) - ahead) + max(0, min(rest, ahead + other_rest - modulus))
    return modulus * wholes * other_wholes + wholes * other_rest + other_wholes * rest + overlap


def _require_whole_groups(made: Resharding, message: Message, one: PlaneCast) -> None:
    """Check that a message has all elements of each scale of a plane that is cast."""
    assert one.scaled is not None
    place, rank = (made.src, made.dst)[one.scaled], (message.src, message.dst)[one.scaled]
    other = (made.dst, made.src)[one.scaled]
    strips, model = place.strips(rank), place.model
    slots = (message.t.src_slots, message.t.dst_slots)[one.scaled]
    sent = {"l": message.layers, "h": message.heads, "t": message.tokens if slots == place.nt else slots}
    held = {"l": strips.l.size, "h": strips.h.size, "t": place.nt}
    whole = {"l": place.layers.size, "h": model.nh, "t": place.nt * strips.t.over}
    where = f"{made.title}: plane {one.scale!r} of {place.name}"
    for axis in one.spans:
        what = _SPANNED[axis]
        each = f"or a layout with a scale for each {what.removesuffix('s').removeprefix('KV ')}"
        if one.scaled == 1 and held[axis] != whole[axis]:
            raise CoverageError(
                f"{where}: one scale for the {what} that a rank holds, {held[axis]} of {whole[axis]}: its bits would depend on the "
                f"partition; expected all {whole[axis]} on every rank of {place.name}, {each}"
            )
        if sent[axis] != held[axis]:
            sizes = f"all {held[axis]} {what} of the rank on one rank of {other.name}"
            if axis == "t":
                sizes = f"blocks of {other.name} of a multiple of {place.nt} tokens, and tables that begin at such a distance"
            raise CoverageError(
                f"{where}: one scale for {held[axis]} {what}, and rank {message.src} sends {sent[axis]} of them to rank "
                f"{message.dst}: a group cannot be cut; expected {sizes}, {each}"
            )


_SPANNED = {"l": "layers", "h": "KV heads", "t": "tokens"}


# ---- all messages of a rank ----------------------------------------------------------------------------------------


def _require_partition(
    made: Resharding, rank: int, messages: Sequence[Message], rules: set[tuple[int, int]], where: str
) -> None:
    takes = made.takes[rank]
    if len(rules) != 1:
        raise CoverageError(f"{where}: ranks of {made.src.name} take turns by {len(rules)} rules; expected one")
    ((every, over),) = rules
    needed = [turn for turn in (Turns(every, over, index) for index in range(over)) if _common([turn, takes.t])]
    if not takes.l.size or not takes.h.size:  # it receives nothing: no message is allowed
        needed = []
    by_turn: dict[Turns, list[Message]] = {turn: [] for turn in needed}
    for message in messages:
        turn = made.sends[message.src].t
        if turn not in by_turn:
            raise CoverageError(f"{where}: rank {message.src} sends tokens that it must not get (turns: {turn})")
        by_turn[turn].append(message)
    for turn, some in by_turn.items():
        at = where if over == 1 else f"{where}: tokens {turn}"
        # For each set of heads: the layers of the ranks that send it.
        heads: dict[int, list[int]] = {}
        for message in some:
            for meeting in message.h:
                heads.setdefault(_bits(meeting), []).extend(_bits(other) for other in message.l)
        if not heads and takes.h.size and not any(set(takes.l) & set(strips.l) for strips in made.sends):
            _require_all((), takes.l, f"{at}: layers", made)  # nothing comes, as no rank has these layers
        _require_all(heads, takes.h, f"{at}: heads", made)
        for layers in heads.values():
            _require_all(layers, takes.l, f"{at}: layers", made)


def _bits(meeting: Meeting) -> int:
    """The local coordinates of a progression on the destination, as bits."""
    if not meeting.loops:
        return 1 << meeting.dst
    count, step = meeting.loops[0].extent, meeting.loops[0].dst
    return ((1 << step * count) - 1) // ((1 << step) - 1) << meeting.dst


def _require_all(sets: Iterable[int], strip: Runs, where: str, made: Resharding) -> None:
    """Check that the sets of bits are disjoint, and that their union is the strip."""
    found = 0
    for one in sets:
        if found & one:
            raise CoverageError(f"{where}: {_names(found & one, strip)} would be written twice")
        found |= one
    wanted = 0
    for run in strip.runs:
        wanted |= (1 << run.length) - 1 << run.local
    if found != wanted:
        missing = wanted & ~found
        raise CoverageError(
            f"{where}: {(wanted & found).bit_count()} of {strip.size} covered: no rank of {made.src.name} sends "
            f"{_names(missing or found & ~wanted, strip)}"
        )


def _names(bits: int, strip: Runs) -> str:
    """Local coordinates, written as coordinates of the model, for a message."""
    model = {run.local + i: run.first + i * run.step for run in strip.runs for i in range(run.length)}
    found = [model.get(i, i) for i in range(bits.bit_length()) if bits >> i & 1]
    return str(Runs.of(sorted(found)))
