"""Layouts and plans as texts, numbers and lists, for the output of commands with ``--json``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..layout.shapes import BlockShape
from ..planner.cast import GROUP_MODES, CastPart
from ..planner.kernel_forms import Form
from ..planner.loopnest import Mode, Part
from .elements import loop_axes
from .facts import address_lines, halves, meaning, one_block

if TYPE_CHECKING:
    from ..layout.layout import Layout
    from ..layout.resolved import Piece, Resolved
    from ..planner.plan import Plan


def of_shape(shape: BlockShape, name: str = "", title: str = "") -> dict[str, Any]:
    """Sizes and bytes of a block shape.  If it is a preset, its name and title, too."""
    named = {"name": name, "title": title} if name else {}
    return {**named, **dataclasses.asdict(shape), "bytes_per_block": shape.nbytes}


def of_layout(layout: Layout) -> dict[str, Any]:
    """The declarations of a layout file."""
    return {
        "name": layout.name,
        "title": layout.title,
        "order": layout.order_text,
        "orders": [str(order) for order in layout.orders],
        "planes": [
            {"name": plane.name, "dtype": plane.dtype, "orders": [str(order) for order in plane.orders],
             "scales": plane.scales or None}
            for plane in layout.planes
        ],
        "pitch": {term: str(pitch) for term, pitch in layout.pitch},
        "axes": layout.axes,
        "fingerprint": layout.fingerprint,
        "used_by": list(layout.used_by),
        "read_from": layout.read_from,
        "file": layout.file,
    }  # fmt: skip


def of_group(group: Sequence[Layout]) -> dict[str, Any]:
    """A group of names with the same meaning."""
    return {
        "order": group[0].order_text,
        "fingerprint": group[0].fingerprint,
        "names": [layout.name for layout in group],
    }


def of_resolved(resolved: Resolved) -> dict[str, Any]:
    """A layout at a shape and a number of blocks: its allocations, and the step of every axis."""
    every = halves(resolved)
    return {
        **of_layout(resolved.layout),
        "shape": of_shape(resolved.shape),
        "num_blocks": resolved.num_blocks,
        "bytes_per_block": resolved.block_bytes,
        "bytes": resolved.nbytes,
        "runs_of_a_block": one_block(resolved),
        "num_allocations": resolved.table_size,
        "allocations": [
            {"axes": list(kind.axes), "shape": list(kind.shape), "strides": list(kind.strides), "dtype": kind.dtype,
             "bytes": kind.nbytes}
            for kind in resolved.kinds
        ],
        "steps": [_step(half.part, half.o, piece) for half in every for piece in reversed(half.part.pieces(half.o or 0))],
        "address": [line for half in every for line in address_lines(half.part, half.o or 0, 1 << 16)],
    }  # fmt: skip


def _step(part: Resolved, o: int | None, piece: Piece) -> dict[str, Any]:
    """One declared term: the number of its members, and the distance between them in bytes or in entries of the table."""
    return {
        "plane": part.plane,
        "half": "" if o is None else "KV"[o],
        "term": str(piece.term),
        "axes": list(piece.term.axes),
        "what": meaning(piece),
        "extent": piece.extent,
        "divisor": piece.divisor,
        "stride": piece.stride,
        "allocations": piece.table,
    }


def of_plan(plan: Plan) -> dict[str, Any]:
    """A plan: its loops, slowest first, with the steps in bytes and in entries of the tables, and its kernels."""
    return {
        "src": of_layout(plan.src.layout),
        "dst": of_layout(plan.dst.layout),
        "shape": of_shape(plan.shape),
        "kind": plan.kind,
        "kernels": plan.kernels(),
        "parts": [_part(plan, part, form) for part, form in zip(plan.parts, plan.forms(), strict=True)],
        "explanation": plan.explain().splitlines(),
    }


def _part(plan: Plan, part: Part, form: Form) -> dict[str, Any]:
    named = [("chunk", mode) for mode in reversed(part.outer)]
    ids = (part.src_id.entries, part.src_id.nbytes, part.dst_id.entries, part.dst_id.nbytes)
    if isinstance(part, CastPart):
        run, *inner = (Mode(*loop) for loop in part.arguments(form)[2])
        whats = ["part of a group"] * (GROUP_MODES - 1) + ["group"] * len(inner)
        named += [(what, mode) for what, mode in reversed([*zip(whats, inner, strict=False)]) if mode.extent > 1]
        last = _loop(f"{form.element} elements", [], run.extent, 0, run.src, 0, run.dst)
    else:
        named += [("row", mode) for mode in reversed(part.inner[1:])]
        word = form.element or form.word
        last = _loop("word", [], part.run_bytes // word, 0, word, 0, word)
    loops = [
        _loop("block id", ["b"], None, *ids),
        *(
            _loop(what, loop_axes(part, mode, plan.src), mode.extent, mode.src_table, mode.src, mode.dst_table, mode.dst)
            for what, mode in named
        ),
        last,
    ]
    return {
        "label": part.label,
        "kind": part.kind,
        "form": form.name,
        "bytes": part.nbytes,
        "chunk_bytes": part.chunk_bytes,
        "run_bytes": part.run_bytes,
        "src_start": {"allocations": part.src_table_offset, "bytes": part.src_offset},
        "dst_start": {"allocations": part.dst_table_offset, "bytes": part.dst_offset},
        "loops": loops,
    }


def _loop(
    what: str, axes: list[str], extent: int | None, src_table: int, src: int, dst_table: int, dst: int
) -> dict[str, Any]:
    return {
        "what": what,
        "axes": axes,
        "extent": extent,
        "src": {"allocations": src_table, "bytes": src},
        "dst": {"allocations": dst_table, "bytes": dst},
    }
