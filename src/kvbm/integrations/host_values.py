"""The setting ``host_values`` of engines: blocks are quantised on the way to host memory.  No engine is imported."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import BindError, LayoutError
from ..layout import spec
from ..layout.layout import Layout
from ..layout.shapes import BlockShape
from ..planner.cast import PLAIN
from ..store.latents import LATENTS, layout_of_latent

__all__ = ["FORMATS", "HostValues", "latent_and_rope"]

#: The name of the setting.
_SETTING = "host_values"


class _Format(NamedTuple):
    """Quantised values: elements of K and V that share a scale (0: all of a token and head), their layout, and a name of both."""

    group: int
    layout: str
    text: str


#: Value of the setting → format.  Those of latents are `kvbm.store.latents.LATENTS`.
FORMATS = {
    "fp8": _Format(0, "record/per_token_head_fp8_planes", "fp8 e4m3, one float32"),
    "mxfp8": _Format(32, "record/mxfp8_universal", "fp8 e4m3, one e8m0"),
    "nvfp4": _Format(16, "record/nvfp4_universal", "fp4 e2m1, one e4m3"),
}


@dataclass(frozen=True)
class HostValues:
    """Blocks in host memory, and in files behind it, with quantised values.  All groups of layers have the same kind.

    `name` is the setting.  If `rope` is not 0, the layers hold a latent, of which the last `rope` elements keep their format.
    """

    name: str
    rope: int = 0

    @classmethod
    def of(cls, given: Mapping[str, Any], rope: int = 0, where: str = "kv_connector_extra_config") -> HostValues | None:
        """The setting among those of an engine, whose name for messages is `where`; None if it is not there.

        Raises `BindError` if its value is unknown, or a layout is given beside it.
        """
        name = given.get(_SETTING)
        if name is None:
            return None
        if not isinstance(name, str) or name not in FORMATS:
            raise BindError(
                f"{where}: {_SETTING}: expected one of {', '.join(FORMATS)}, got {name!r:.100}; leave it out to "
                "keep the engine's values"
            )
        if given.get("host_layout") is not None:
            raise BindError(
                f"{where}: host_layout: expected none beside {_SETTING}, which has its own, got "
                f"{given['host_layout']!r:.100}; leave one of the two out"
            )
        return cls(name, rope)

    @property
    def layout(self) -> Layout:
        """The layout of a block in host memory and in files: one buffer, heads outermost."""
        return layout_of_latent(self.name, self.rope) if self.rope else _layout_of_heads(self.name)

    @property
    def group(self) -> int:
        """Elements that share a scale; 0: all of a token and head."""
        return LATENTS[self.name].group if self.rope else FORMATS[self.name].group

    def text(self, dtype: str) -> str:
        """What the values are: for the log, and for the names of what is stored."""
        each = f"{self.group} elements" if self.group else "token and head"
        kept = f"; the last {self.rope} elements of the latent (rope) are kept" if self.rope else ""
        return f"{FORMATS[self.name].text} per {each}, from {dtype}{kept}"

    def require(self, shape: BlockShape, what: str) -> None:
        """Raise `BindError` if blocks of this shape cannot be cast.  `what` names the layers."""
        where, help_ = f"{_SETTING} {self.name}: {what}", f"leave {_SETTING} out"
        if shape.dtype not in PLAIN:
            raise BindError(f"{where}: expected a cache of {', '.join(PLAIN)}, got {shape.dtype}; {help_}")
        if (shape.no == 1) != bool(self.rope):
            kinds = "K and V, and the configuration of the model a latent"
            kinds = kinds if self.rope else "a latent, and the configuration of the model no qk_rope_head_dim"
            raise BindError(f"{where}: expected all layers of the kind that the configuration says, got {kinds}; {help_}")
        size = shape.hd - self.rope
        if size < 1 or (self.group and size % self.group):
            kept = f" beside the {self.rope} of the rope part" if self.rope else ""
            raise BindError(
                f"{where}: expected a multiple of {self.group} elements per token and head{kept}, as {self.group} share a scale, "
                f"got {size}; use another value, or {help_}"
            )

    def block_bytes(self, shape: BlockShape) -> int:
        """Bytes of a block of this shape; `BindError` if the layout does not fit it."""
        try:
            return self.layout.resolve(shape, 1).nbytes
        except LayoutError as error:
            raise BindError(f"{_SETTING}: {error}; leave {_SETTING} out") from None


@functools.cache
def _layout_of_heads(name: str) -> Layout:
    return spec.load(FORMATS[name].layout)


@functools.cache
def latent_and_rope(rope: int) -> Layout:
    """The layout ``vllm/mla`` with names for the two parts of the latent: the same bytes."""
    return spec.parse(
        'order: "[l] b t <latent rope>"\n'
        f"axes: {{c: hd - {rope}, r: {rope}}}\n"
        "planes: {latent: {order: c}, rope: {order: r}}\n",
        name="latent and rope",
    )
