"""The kernels: their classes, what is compiled of each (`Form`), and the names by which Python and C know them.

The templates of the classes are in ``cuda/``; ``compile/codegen.py`` chooses the forms that are built.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

from ..errors import PlanError

#: Most modes of a kernel, and most parts of one launch (``KVBM_MAX_OUTER``, ``_INNER`` and ``_PARTS`` of ``cuda/kvbm.h``).
MAX_OUTER, MAX_INNER, MAX_PARTS = 4, 8, 4

#: Bytes of the widest load and store.
WIDEST = 16


@dataclass(frozen=True, slots=True, order=True)
class Form:
    """The compiled part of a kernel: its class, numbers of modes and word.  Sizes and strides are arguments."""

    #: ``copy``: a chunk is one run.  ``rows``: runs are copied whole, in another order.  ``tile``: source and
    #: destination are contiguous along different axes, so elements are transposed in a tile.  ``record``: rows of
    #: several parts, the planes of a block.  ``page_in``, ``page_out``: as ``record``, with the source or the
    #: destination in shared memory.  ``digest``: cells are read and summed up.  ``cast``: elements change their format,
    #: and their scales are made or used.
    kind: str
    #: Number of modes that select a chunk, and of modes inside it (for tiles: without the two that span the tile).
    outer: int
    inner: int
    #: For tiles, and for digests of transposed cells: bytes that stay together.  For casts: elements that a thread
    #: moves at a time.
    element: int
    #: Bytes of a load and store; 0 for records and pages, as each part has its own word.  For casts: see
    #: `CastPart.form`.
    word: int
    sm_limited: bool = False  # True if the kernel accepts a limit of multiprocessors
    #: True if the kernel also digests what it copies.  Each word is then a cell; of a cast, see `kvbm.digest.cells`.
    sums: bool = False
    #: For casts: formats of the source and of the destination, and of stored scales, such as ``bf16_e4m3_f32``.
    values: str = ""

    @property
    def name(self) -> str:
        """The form's part of a kernel's name.  It contains everything that changes the result."""
        prefix = "few_" if self.sm_limited else "sum_" if self.sums else ""
        if self.kind == "copy":
            return f"{prefix}copy_o{self.outer}_w{self.word}"
        if self.kind == "rows":
            return f"{prefix}rows_o{self.outer}_i{self.inner}_w{self.word}"
        if self.kind == "cast":
            return f"{'sum_' * self.sums}cast_{self.values}_o{self.outer}_i{self.inner}_e{self.element}"
        if self.kind == "digest":
            turned = f"_e{self.element}" if self.element else ""
            return f"digest_o{self.outer}_i{self.inner}{turned}_w{self.word}"
        if self.of_planes:
            return f"{prefix}{self.kind}_o{self.outer}_i{self.inner}"
        return f"{prefix}tile_o{self.outer}_r{self.inner}_e{self.element}_w{self.word}"

    @property
    def of_planes(self) -> bool:
        """True if the kernel accepts any number of parts, each with its own word."""
        return self.kind in ("record", "page_in", "page_out")

    @property
    def digests(self) -> bool:
        """True if the kernel digests; one that is `sm_limited` does if it is given keys."""
        return self.sums or self.kind == "digest" or (self.sm_limited and self.kind == "rows")

    @property
    def modes(self) -> int:
        """Number of inner modes in its arguments, including the two sides of a tile."""
        return self.inner + 2 if self.kind == "tile" else self.inner

    def runs(self, wanted: Form) -> bool:
        """True if a kernel of this form can do the work of `wanted`, with extents of one for surplus modes."""
        kinds = {"copy", "rows"} if self.kind == "rows" else {self.kind}
        mine, theirs = ((form.sm_limited, form.sums, form.element, form.word, form.values) for form in (self, wanted))
        return wanted.kind in kinds and mine == theirs and self.outer >= wanted.outer and self.inner >= wanted.inner


#: The forms that are compiled into one kernel: one, or one for K and one for V if they share a launch.
Kernel = tuple[Form, ...]


def kernel_name(kernel: Kernel) -> str:
    """The symbol of a kernel, and its name between Python and C."""
    return "__".join(form.name for form in kernel)


def parse_kernel(name: str) -> Kernel:
    """The kernel of a name.  Raises `PlanError` if the text is not the name of a kernel."""
    forms = []
    for part in name.split("__"):
        if match := _CAST.fullmatch(part):
            prefix, values, outer, inner, element = match.groups()
            forms.append(Form("cast", int(outer), int(inner), int(element), 0, sums=prefix is not None, values=values))
            continue
        match = _NAME.fullmatch(part)
        if match is None:
            raise PlanError(f"kernel {name!r}: expected names such as rows_o1_i3_w16, got {part!r}")
        prefix, kind, outer, inner, element, word = match.groups()
        sizes = int(outer), int(inner or 1), int(element or 0), int(word or 0)
        forms.append(Form(kind, *sizes, prefix == "few_", prefix == "sum_"))
        if forms[-1].name != part:
            raise PlanError(f"kernel {name!r}: expected {forms[-1].name!r}, got {part!r}")
    return tuple(forms)


_CAST = re.compile(r"(sum_)?cast_([a-z0-9]+_[a-z0-9]+(?:_[a-z0-9]+)?)_o(\d)_i(\d)_e(\d)")
_NAME = re.compile(
    r"(few_|sum_)?(copy|rows|tile|record|page_in|page_out|digest)_o(\d+)(?:_[ir](\d+))?(?:_e(\d+))?(?:_w(\d+))?"
)

#: Cached, as there are few forms and many plans.
form_of = functools.lru_cache(maxsize=None)(Form)


def widest_word(*values: int) -> int:
    """Largest power of two, at most `WIDEST`, that divides all values."""
    common = math.gcd(WIDEST, *values)
    return common & -common
