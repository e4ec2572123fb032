"""Layouts of latents (MLA) with quantised values.

They are not shipped: the rope part of a latent keeps its format, and each model has a size of it, from which they are made.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from ..layout import spec
from ..layout.layout import Layout

__all__ = ["LATENTS", "Latent", "layout_of_latent", "layouts_of_latents"]


class Latent(NamedTuple):
    """How a latent is quantised: dtypes of elements and scales, and elements that share a scale."""

    dtype: str
    scale: str
    group: int


#: Name → how latents are quantised.  With float32 scales, a latent has as many as in `vllm/fp8_ds_mla`.
LATENTS = {
    "fp8": Latent("float8_e4m3fn", "float32", 128),
    "mxfp8": Latent("float8_e4m3fn", "float8_e8m0fnu", 32),
    "nvfp4": Latent("float4_e2m1fn", "float8_e4m3fn", 16),
}


@functools.lru_cache(64)
def layout_of_latent(name: str, rope: int) -> Layout:
    """The layout of a latent whose last `rope` elements keep their format: one buffer, with a name of `LATENTS`."""
    form = LATENTS[name]
    return spec.parse(
        'order: "[b] h l o <latent scale rope>"\n'
        f"axes: {{c: hd - {rope}, s: (hd - {rope})//{form.group}, r: {rope}}}\n"
        "planes:\n"
        f"  latent: {{order: t c, dtype: {form.dtype}}}\n"
        f"  scale: {{order: t s, dtype: {form.scale}, scales: latent}}\n"
        "  rope: {order: t r}\n",
        name=f"latent in {name}",
    )


def layouts_of_latents(hd: int, rope: int) -> Iterator[Layout]:
    """The layouts that a latent of `hd` elements may have in files."""
    if 0 < rope < hd:
        for name in LATENTS:
            yield layout_of_latent(name, rope)
