"""Pictures in files: SVG and PNG, the page of a layout for `kvbm show --html`, and the gallery of all layouts for `kvbm gallery`.

Equal layouts make equal bytes: text stays text, and no date and no random name is in a file.
"""

from __future__ import annotations

import html as markup
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import spec
from .errors import LayoutError, SpecError
from .facts import address_lines, axis_rows, facts, halves, one_block
from .layout import Layout
from .picture import draw_layout, looks
from .resolved import Resolved
from .shapes import load_shape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_path", "gallery", "gallery_index", "page", "save"]

_GALLERY_BLOCKS = 1024

# ---- files ---------------------------------------------------------------------------------------------------------


def check_path(path: Path, *suffixes: str) -> None:
    """Refuse a file that could not be written, before anything is drawn.

    Raises
    ------
    SpecError
        Another suffix; no folder to write to.
    """
    if path.suffix.lower() not in suffixes:
        raise SpecError(f"{path}: expected a file that ends in {' or '.join(suffixes)}, got {path.name!r}")
    if path.is_dir():
        raise SpecError(f"{path}: expected a file, got a folder")
    if not path.parent.is_dir():
        raise SpecError(f"{path}: expected a file in a folder that is there; {path.parent} is not: make it first")


def save(figure: Figure, path: Path, settings: Mapping[str, Any] | None = None) -> None:
    """Write a picture: SVG with text as text, or PNG at twice the size.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
    path : Path
    settings : mapping, optional
        Those of `looks` that the figure was drawn with.

    Raises
    ------
    SpecError
        The file ends in neither .svg nor .png; no folder to write to.
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
    # A third of what matplotlib writes is indents, comments, and a number for each element.
    text = re.sub(rb"<!--.*?-->", b"", made.getvalue(), flags=re.DOTALL)
    text = re.sub(rb'<g id="(?:patch|line2d|text)_[0-9]+">', b"<g>", text)
    return b"\n".join(filter(None, map(bytes.strip, text.splitlines()))) + b"\n"


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;color:#1b1f24;background:#fff;max-width:800px;margin:2em auto;padding:0 1em}"
    "svg{width:100%;height:auto}table{border-collapse:collapse;margin:1em 0}"
    "th,td{text-align:left;padding:.25em .9em;border-bottom:1px solid #e4e8ec}td.n{text-align:right}"
    "pre{background:#f3f5f7;padding:.8em;overflow-x:auto}"
)


def page(resolved: Resolved) -> str:
    """The picture of a layout, its axes and its address in one HTML file that needs no other.

    Raises
    ------
    KvbmError
        matplotlib is not installed.
    """
    layout = resolved.layout
    say = markup.escape
    svg = _bytes(draw_layout(resolved), "svg").decode("utf-8")
    label = say(f"Layout {layout.name}: {layout.order_text}", quote=True)
    svg = svg[svg.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    told = [*facts(resolved), ("runs of a block", one_block(resolved)), ("read from", layout.read_from)]
    body = [f"<h1>{say(layout.name)}</h1>", svg, "<table>"]
    body += [f"<tr><th>{say(key)}</th><td>{say(value)}</td></tr>" for key, value in told if value]
    body.append("</table>\n<h2>Axes, slowest first</h2>\n<table>")
    body.append("<tr><th>axis</th><th>what</th><th>extent</th><th>the next one lies</th><th>padding</th></tr>")
    body += [
        f"<tr><th>{say(name)}</th><td>{say(what)}</td>"
        + "".join(f'<td class="n">{say(cell)}</td>' for cell in rest)
        + "</tr>"
        for name, what, *rest in axis_rows(resolved)
    ]
    body.append("</table>")
    body += [f"<pre>{say(chr(10).join(address_lines(half.part, half.o or 0, 88)))}</pre>" for half in halves(resolved)]
    head = f'<meta charset="utf-8"><title>{say(layout.name)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(body) + "\n</body></html>\n"


# ---- the gallery ---------------------------------------------------------------------------------------------------


def _meanings(layouts: Sequence[Layout]) -> dict[str, list[Layout]]:
    """Names by what they mean; short names before those of a folder, and the first one is drawn."""
    found: dict[str, list[Layout]] = {}
    for layout in sorted(layouts, key=lambda layout: ("/" in layout.name, layout.name)):
        found.setdefault(layout.fingerprint, []).append(layout)
    return found


def _file(layout: Layout) -> str:
    return layout.name.replace("/", "-") + ".svg"


def gallery_index(layouts: Sequence[Layout]) -> str:
    """The text of the gallery's ``README.md``: every name by folder, and each picture once."""
    meanings = _meanings(layouts)
    groups: dict[str, list[Layout]] = {}
    for layout in sorted(layouts, key=lambda layout: ("/" in layout.name, layout.name)):
        groups.setdefault(layout.name.rpartition("/")[0], []).append(layout)
    lines = [
        "# Gallery of layouts",
        "",
        "Made by `kvbm gallery`; do not edit. One row a level, slowest first: the first member of each is opened in the row "
        "below it. Blue is K, orange is V.",
        "Planes have colours of their own; dots stand for bytes of other planes.",
        f"Blocks are those of Llama 3.1 8B, latents those of DeepSeek-V3, or what else is legal; {_GALLERY_BLOCKS:,} of them. "
        f"{len(layouts)} names are {len(meanings)} layouts: names with one meaning share a picture.",
    ]
    for folder, members in groups.items():
        lines += ["", f"## {folder}" if folder else "## Short names", "", "| name | order | what |", "|---|---|---|"]
        for layout in members:
            file = _file(meanings[layout.fingerprint][0])
            cells = (f"[`{layout.name}`]({file})", f"`{layout.order_text}`", layout.title.replace("|", "\\|"))
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
    """Draw every layout, one SVG a meaning, and write an index of them.

    Parameters
    ----------
    out : Path
        Folder; made if it is not there.  Other files in it are left alone.
    layouts : sequence of Layout, optional
        The shipped ones if not given.

    Returns
    -------
    list of Path
        What was written.

    Raises
    ------
    KvbmError
        matplotlib is not installed.
    """
    layouts = spec.load_dir(spec.layouts_dir()) if layouts is None else layouts
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for first, *_ in _meanings(layouts).values():
        written.append(out / _file(first))
        shape = spec.example_shape(first)
        if shape is None:
            raise LayoutError(
                f"{first.name} ({first.order_text}): no shape is known at which it is legal, so it has no picture"
            )
        save(draw_layout(first.resolve(load_shape(shape), _GALLERY_BLOCKS)), written[-1])
    written.append(out / "README.md")
    written[-1].write_text(gallery_index(layouts), encoding="utf-8")
    return written
