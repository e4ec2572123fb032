"""Pictures in files: SVG and PNG, pages for `kvbm show --html` and `kvbm plan --html`, and the gallery for `kvbm gallery`.

Equal layouts give files with equal bytes: files contain no date and no random name.  Text in a picture stays text.
"""

from __future__ import annotations

import html as markup
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import LayoutError, SpecError
from ..layout import spec
from ..layout.axes import AXES
from ..layout.layout import Layout
from ..layout.resolved import Resolved
from ..layout.shapes import load_shape
from ..planner.plan import Plan, count_text
from .as_json import of_plan
from .facts import address_lines, axis_rows, exact_size, facts, halves, one_block
from .figure import draw_layout, looks
from .plan_figure import draw_plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GALLERY_BLOCKS = 1024

# ---- files ---------------------------------------------------------------------------------------------------------


def check_path(path: Path, *suffixes: str) -> None:
    """Raise an error before drawing if the file cannot be written.

    Raises `SpecError`: the path has another suffix, is a folder, or its folder does not exist.
    """
    if path.suffix.lower() not in suffixes:
        raise SpecError(f"{path}: expected a file that ends in {' or '.join(suffixes)}, got {path.name!r}")
    if path.is_dir():
        raise SpecError(f"{path}: expected a file, got a folder")
    if not path.parent.is_dir():
        raise SpecError(f"{path}: expected a file in a folder that is there; {path.parent} is not: make it first")


def save(figure: Figure, path: Path, settings: Mapping[str, Any] | None = None) -> None:
    """Write a picture: SVG, in which text stays text, or PNG at 200 dots per inch.

    The settings are those of `looks` that it was drawn with.  Raises `SpecError` if the path ends in neither .svg nor .png, is
    a folder, or its folder does not exist.
    """
    check_path(path, ".svg", ".png")
    path.write_bytes(_bytes(figure, path.suffix.lower().lstrip("."), settings))


def _bytes(figure: Figure, form: str, settings: Mapping[str, Any] | None = None) -> bytes:
    made = io.BytesIO()
    metadata: dict[str, Any] = {"Date": None, "Creator": "kvbm"} if form == "svg" else {"Software": "kvbm"}
    with looks(settings):
        figure.savefig(made, format=form, dpi=200 if form == "png" else 72, metadata=metadata)
    if form == "png":
        return made.getvalue()
    # A third of matplotlib's output is indentation, comments, and an id per element.
    text = re.sub(rb"<!--.*?-->", b"", made.getvalue(), flags=re.DOTALL)
    text = re.sub(rb'<g id="(?:patch|line2d|text)_[0-9]+">', b"<g>", text)
    return b"\n".join(filter(None, map(bytes.strip, text.splitlines()))) + b"\n"


def svg_element(figure: Figure, label: str) -> str:
    """A picture as an element of a page.  Screen readers read `label`."""
    svg = _bytes(figure, "svg").decode("utf-8")
    label = markup.escape(label, quote=True)
    return svg[svg.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;color:#1b1f24;background:#fff;max-width:800px;margin:2em auto;padding:0 1em}"
    "svg{width:100%;height:auto}table{border-collapse:collapse;margin:1em 0}"
    "th,td{text-align:left;padding:.25em .9em;border-bottom:1px solid #e4e8ec}td.n{text-align:right}"
    "pre{background:#f3f5f7;padding:.8em;overflow-x:auto}"
)


def page(resolved: Resolved) -> str:
    """A self-contained HTML file: the picture of a layout, its axes and its address.

    Raises `KvbmError`: matplotlib is not installed.
    """
    layout = resolved.layout
    say = markup.escape
    svg = svg_element(draw_layout(resolved), f"Layout {layout.name}: {layout.order_text}")
    table_rows = [*facts(resolved), ("runs of a block", one_block(resolved)), ("read from", layout.read_from)]
    body = [f"<h1>{say(layout.name)}</h1>", svg, "<table>"]
    body += [f"<tr><th>{say(key)}</th><td>{say(value)}</td></tr>" for key, value in table_rows if value]
    body.append("</table>\n<h2>Axes, slowest first</h2>\n<table>")
    body.append("<tr><th>axis</th><th>what</th><th>extent</th><th>stride</th><th>padding</th></tr>")
    body += [
        f"<tr><th>{say(name)}</th><td>{say(what)}</td>"
        + "".join(f'<td class="n">{say(cell)}</td>' for cell in rest)
        + "</tr>"
        for name, what, *rest in axis_rows(resolved)
    ]
    body.append("</table>")
    body += [f"<pre>{say(chr(10).join(address_lines(half.part, half.o or 0, 88)))}</pre>" for half in halves(resolved)]
    return _document(layout.name, body)


def plan_page(plan: Plan) -> str:
    """A self-contained HTML file: the picture of a copy, its loops with their axes, and its explanation.

    Raises `KvbmError`: matplotlib is not installed.
    """
    say = markup.escape
    body = [f"<h1>{say(plan.title)}</h1>", svg_element(draw_plan(plan), f"Copy {plan.title}"), "<table>"]
    table_rows = [
        ("source", str(plan.src.layout)),
        ("destination", str(plan.dst.layout)),
        ("shape", str(plan.shape)),
        ("one block", exact_size(plan.nbytes)),
        ("kernels", ", ".join(plan.kernels())),
    ]
    body += [f"<tr><th>{key}</th><td>{say(value)}</td></tr>" for key, value in table_rows]
    body.append("</table>\n<h2>Loops, slowest first</h2>")
    for part in of_plan(plan)["parts"]:
        if part["label"]:
            body.append(f"<h3>{say(part['label'])}: {part['form']}</h3>")
        body.append("<table>\n<tr><th>loop</th><th>axes</th><th>times</th><th>source stride</th><th>destination stride</th></tr>")
        for loop in part["loops"]:
            axes = ", ".join(f"{axis}: {AXES.get(axis, 'own axis')}" for axis in loop["axes"])
            times = "" if loop["extent"] is None else f"{loop['extent']:,}"
            sides = "".join(f'<td class="n">{_step_text(**loop[side])}</td>' for side in ("src", "dst"))
            body.append(f'<tr><th>{loop["what"]}</th><td>{say(axes)}</td><td class="n">{times}</td>{sides}</tr>')
        body.append("</table>")
    body.append("<h2>Why</h2>")
    body += [f"<p>{say(paragraph)}</p>" for paragraph in plan.explain().splitlines()]
    return _document(plan.title, body)


def _step_text(allocations: int, bytes: int) -> str:  # noqa: A002  (the keys of the records)
    return ", ".join(
        filter(None, (count_text(allocations, "allocation") if allocations else "", f"{bytes:,} B" if bytes else ""))
    )


def _document(title: str, body: Sequence[str]) -> str:
    head = f'<meta charset="utf-8"><title>{markup.escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(body) + "\n</body></html>\n"


# ---- the gallery ---------------------------------------------------------------------------------------------------


def _meanings(layouts: Sequence[Layout]) -> dict[str, list[Layout]]:
    """Layouts by fingerprint.  Names without a folder are first; the first of each group is drawn."""
    found: dict[str, list[Layout]] = {}
    for layout in sorted(layouts, key=lambda layout: ("/" in layout.name, layout.name)):
        found.setdefault(layout.fingerprint, []).append(layout)
    return found


def _file(layout: Layout) -> str:
    return layout.name.replace("/", "-") + ".svg"


def gallery_index(layouts: Sequence[Layout]) -> str:
    """The text of the gallery's ``README.md``: every name, grouped by folder; each picture once."""
    meanings = _meanings(layouts)
    groups: dict[str, list[Layout]] = {}
    for layout in sorted(layouts, key=lambda layout: ("/" in layout.name, layout.name)):
        groups.setdefault(layout.name.rpartition("/")[0], []).append(layout)
    lines = [
        "# Gallery of layouts",
        "",
        "<!-- Made by `kvbm gallery`; do not edit. -->",
        "",
        "This page lists the layouts that kvbm ships, with a picture of each. Read a picture from top to bottom: each row shows "
        "what is inside the first box of the row above.",
        "Blue is K, orange is V. Planes have other colours, and dots stand for bytes of other planes.",
        f"The pictures show {_GALLERY_BLOCKS:,} blocks of Llama 3.1 8B, or of DeepSeek-V3 for latents. A layout that needs other "
        "sizes is drawn with sizes that it accepts.",
        f"There are {len(layouts)} names for {len(meanings)} layouts. Names of the same layout share a picture.",
    ]
    for folder, members in groups.items():
        lines += ["", f"## {folder}" if folder else "## Short names", "", "| name | what | order |", "|---|---|---|"]
        for layout in members:
            file = _file(meanings[layout.fingerprint][0])
            cells = (f"[`{layout.name}`]({file})", layout.title.replace("|", "\\|"), f"`{layout.order_text}`")
            lines.append(f"| {' | '.join(cells)} |")
        for layout in members:
            first, *others = meanings[layout.fingerprint]
            if layout.name == first.name:
                also = f", also {', '.join(f'`{other.name}`' for other in others)}" if others else ""
                lines += [
                    "",
                    f"**`{layout.name}`**{also}",
                    "",
                    f"![{layout.name}: {layout.order_text}]({_file(layout)})",
                ]
    return "\n".join(lines) + "\n"


def gallery(out: Path, layouts: Sequence[Layout] | None = None) -> list[Path]:
    """Draw all layouts, by default the shipped ones, one SVG per meaning, and write an index.  Returns the files.

    The folder is created if it does not exist.  Other files in it are not changed.  Raises `KvbmError` if matplotlib is not
    installed.
    """
    layouts = spec.load_dir(spec.layouts_dir()) if layouts is None else layouts
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for first, *_ in _meanings(layouts).values():
        written.append(out / _file(first))
        shape = spec.example_shape(first)
        if shape is None:
            raise LayoutError(f"{first.name} ({first.order_text}): no shape is known at which it is legal, so it has no picture")
        save(draw_layout(first.resolve(load_shape(shape), _GALLERY_BLOCKS)), written[-1])
    written.append(out / "README.md")
    written[-1].write_text(gallery_index(layouts), encoding="utf-8")
    return written
