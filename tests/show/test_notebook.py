"""Representations of objects: pictures in notebooks, and reprs of one line."""

from __future__ import annotations

import html
import sys
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

import kvbm
from kvbm import reshard

SHAPE = kvbm.BlockShape(nl=2, no=2, nh=4, nt=8, hd=16, dtype="float16")
SIZES = "nl=2,no=2,nh=4,nt=8,hd=16,dtype=float16"


def _made() -> dict[str, tuple[Any, str, str]]:
    """Objects, their repr, and a text that only their picture or description has."""
    nhd, universal = kvbm.load("nhd"), kvbm.load("universal")
    pool = kvbm.Pool(nhd, SHAPE, [np.zeros((8, 4, 16), np.float16) for _ in range(3 * 4)])
    sides = (reshard.load("vllm:tp4", SHAPE), reshard.load("vllm:tp2", SHAPE))
    resharding = reshard.plan(*sides)
    return {
        "layout": (nhd, f"Layout(nhd: {nhd.order_text})", "1,024 blocks"),
        "planes": (kvbm.load("flashinfer/mla_split"), "Layout(flashinfer/mla_split: ", "latent"),
        "pool": (pool, f"Pool(nhd, {SIZES}, num_blocks=3, device=cpu)", "3 blocks"),
        "plan": (kvbm.plan(nhd, universal, SHAPE), f"Plan(nhd → universal, {SIZES}, kind=rows)", "rows_o1"),
        "resharding": (resharding, "Resharding(vllm:tp4 → vllm:tp2, messages=4)", "4 messages"),
    }


@pytest.mark.parametrize("name", list(_made()))
def test_one_line(name: str) -> None:
    shown, text, _ = _made()[name]
    assert repr(shown).startswith(text) and "\n" not in repr(shown) and len(repr(shown)) < 200
    assert repr([shown]) == f"[{shown!r}]"


@pytest.mark.parametrize("name", list(_made()))
def test_pictures(name: str) -> None:
    """One SVG element with a label, alone and in HTML; it shows this object."""
    pytest.importorskip("matplotlib")
    shown, _, said = _made()[name]
    picture = shown._repr_svg_()
    root = ET.fromstring(picture)
    assert root.tag.endswith("svg") and root.get("aria-label") == repr(shown)
    assert said in " ".join("".join(root.itertext()).split())
    page = shown._repr_html_()
    assert picture in page and ET.fromstring(page).tag == "div"


@pytest.mark.parametrize("name", list(_made()))
def test_text_without_matplotlib(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shown, _, said = _made()[name]
    page = shown._repr_html_()
    text = "".join(ET.fromstring(page).itertext())
    assert shown._repr_svg_() is None and page.startswith("<pre>") and said in text
    assert len(text.splitlines()) > 3 and html.unescape(page) == f"<pre>{text}</pre>"
