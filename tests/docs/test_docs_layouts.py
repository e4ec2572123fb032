"""docs/reference/layouts.md: every example resolves to what an oracle expects; error messages have the words of the page."""

from __future__ import annotations

import functools
import itertools
import re
from pathlib import Path

import pytest

import kvbm
from kvbm.layout import grammar, spec
from kvbm.layout.axes import AXES
from kvbm.layout.terms import FUNCTIONS, SIZES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "layouts.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```yaml\n(# ([^\n]*)\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
REFUSED = re.findall(r"^```yaml title=\"raises an error\"\n(# ([^\n]*)\n# ([^\n]*)\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_every_example_is_found() -> None:
    assert len(EXAMPLES) + len(REFUSED) == PAGE.count("```yaml") and len(EXAMPLES) >= 15 and len(REFUSED) >= 5


@pytest.mark.parametrize(("text", "shape"), EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples(text: str, shape: str) -> None:
    """Each example parses and resolves; all elements of a block have different places inside their arrays."""
    resolved = spec.parse(text, "docs/reference/layouts.md", "example", spec.base_of).resolve(kvbm.load_shape(shape), 3)
    sizes = [allocation.nbytes for allocation in resolved.allocations]
    used: dict[int, set[int]] = {}
    opaque = any(term.opaque for term in resolved.layout.orders[0].terms)
    for part in resolved.planes:
        some = [sorted({*range(min(n, 5)), *range(0, n, max(1, n // 6)), n - 1}) for n in part.extents.values()]
        for values in itertools.product(*some):
            at = dict(zip(part.extents, values, strict=True))
            entry, offset = part.address(1, **at)
            assert offset >= 0 and offset + part.shape.itemsize <= sizes[entry]
            bits = (offset * 8 + 4 * (at.get("d", 0) % 2)) if part.shape.pack == 2 else offset * 8
            assert opaque or bits not in used.setdefault(entry, set())
            used.setdefault(entry, set()).add(bits)


@pytest.mark.parametrize(("text", "shape", "said"), REFUSED, ids=range(len(REFUSED)))
def test_refused(text: str, shape: str, said: str) -> None:
    layout = spec.parse(text, "docs/reference/layouts.md", "example")
    with pytest.raises(kvbm.LayoutError, match=re.escape(said)):
        layout.resolve(kvbm.load_shape(shape), 3)


def test_what_the_text_says() -> None:
    """Sizes in the text are those of the examples."""
    read = functools.partial(spec.parse, base=spec.base_of)
    by_shape = {text: read(text).resolve(kvbm.load_shape(shape), 3) for text, shape in EXAMPLES}
    (mla,) = [each for text, each in by_shape.items() if "hd - 64)//128" in text]
    assert mla.record == 656 and "656 bytes" in PAGE
    (v4,) = [each for text, each in by_shape.items() if "round_up(nt*584, 576" in text]
    assert v4.first.nbytes == 3 * 37440 and [part.bases[0][0] for part in v4.parts] == [0, 448, 64 * 576]


def test_all_of_the_language_is_there() -> None:
    """Every key, axis, dtype, function and size is documented, and axes have the names that the code uses."""
    for name in (*grammar.KEYS, *grammar.PLANE_KEYS, *kvbm.layout.shapes.ITEMSIZE, *AXES):
        assert f"`{name}`" in PAGE, name
    for name in (*SIZES, *FUNCTIONS):
        assert re.search(rf"\b{name}\b", PAGE), name
    keys = re.findall(r"^\| (`.*?`) \|", PAGE.split("## Keys")[1], re.MULTILINE)
    assert {key.strip("` ") for row in keys for key in row.split(",")} == {*grammar.KEYS, *grammar.PLANE_KEYS}
    anchors = re.findall(r"\]\(#([\w-]+)\)", PAGE)
    heads = [head.lower().replace(" ", "-") for head in re.findall(r"^## (.*)$", PAGE, re.MULTILINE)]
    assert anchors == heads
