"""The changes that tools/site_hook.py, a hook of mkdocs, makes to a page's HTML, and the search of the site."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mkdocs")
ROOT = Path(__file__).resolve().parents[2]
PAGE = SimpleNamespace(file=SimpleNamespace(src_uri="reference/cli.md"))


@pytest.fixture(scope="module")
def site() -> Any:
    spec = importlib.util.spec_from_file_location("site_hook", ROOT / "tools" / "site_hook.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("html", "want"),
    [
        ('<p><img alt="A" src="a.svg" /></p>', '<p><a class="picture" href="a.svg"><img alt="A" src="a.svg" /></a></p>'),
        ('<p><a href="b.html"><img alt="A" src="a.svg"></a></p>', None),  # a link already
        ("<td><code>-h</code></td><td><code>Sentinel.UNSET</code></td>", "<td><code>-h</code></td><td></td>"),
        ("<td><code>8192</code></td>", None),
        ("<td><code>save(path, pool, ids, *)</code></td>", '<td><code class="long">save(path, pool, ids, *)</code></td>'),
        ("<td><code>[b] l o {t h d}</code></td>", None),
    ],
)
def test_html_of_a_page(site: Any, html: str, want: str | None) -> None:
    assert site.on_page_content(html, PAGE, None, None) == (html if want is None else want)


def test_an_option_without_a_default(site: Any) -> None:
    """The output of mkdocs-click for kvbm's own commands: the page has no internals of click."""
    import markdown
    from mkdocs_click._docs import make_command_docs

    from kvbm.cli.app import main

    text = "\n".join(make_command_docs("kvbm", main, style="table"))
    html = site.on_page_content(markdown.markdown(text, extensions=["tables"]), PAGE, None, None)
    assert "--version" in html and "Sentinel" not in html


def test_only_the_gallery_has_a_search_field(site: Any) -> None:
    html = "<h1>Layouts</h1><p>one</p><h2>vllm</h2><p>two</p>"
    assert site.on_page_content(html, PAGE, None, None) == html
    gallery = SimpleNamespace(file=SimpleNamespace(src_uri="gallery/README.md"))
    found = site.on_page_content(html, gallery, None, None)
    before, _, behind = found.partition("<h2>vllm")
    assert before.startswith("<h1>Layouts</h1><p>one</p>") and "<input" in before and behind == "</h2><p>two</p>"


def test_every_command_is_on_the_page(site: Any) -> None:
    """mkdocs-click shows the commands that a group has loaded."""
    from mkdocs_click._docs import make_command_docs

    from kvbm.cli.app import main

    site.on_startup("build", False)
    text = "\n".join(make_command_docs("kvbm", main, style="table"))
    names = main.list_commands(None)  # type: ignore[arg-type]
    assert len(names) > 15 and not [name for name in names if f"\n## {name}\n" not in text]


def test_the_search_splits_names_of_layouts() -> None:
    """A search for a part of a name finds it: the separator of the search splits at slashes, dots and underscores."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    (separator,) = re.findall(r"^ +separator: '(.+)'", text, re.MULTILINE)
    assert re.split(separator, "vllm/flash_attn_nhd hd-128, b.l") == ["vllm", "flash", "attn", "nhd", "hd", "128", "b", "l"]


def test_what_the_search_shows_first(site: Any) -> None:
    """Pages of commands, variables and Python count more; the sources have no front matter, which a code host would show."""
    def boost(uri: str) -> Any:
        page = SimpleNamespace(file=SimpleNamespace(src_uri=uri), meta={})
        site.on_page_markdown("text", page, None, None)
        return page.meta.get("search", {}).get("boost", 1)

    order = ["reference/cli.md", "reference/python/pools.md", "engines/vllm.md"]
    assert sorted(order, key=boost, reverse=True) == order and len({boost(uri) for uri in order}) == 3
    assert boost("reference/errors.md") < 1 < boost("reference/cli.md") < boost("reference/environment.md")
    for uri in ("reference/cli.md", "reference/environment.md", "reference/errors.md", "reference/python/pools.md"):
        assert (ROOT / "docs" / uri).is_file()


def test_nothing_is_cut(site: Any) -> None:
    """Long lines of code wrap, long names in tables may break, and the copy button leaves prompts and output out."""
    style = (ROOT / "docs" / "site.css").read_text(encoding="utf-8")
    style = re.sub(r"/\*.*?\*/", "", style, flags=re.DOTALL)
    rules = {head.strip(): body for head, body in re.findall(r"([^{}]+?)\{([^{}]*)\}", style)}
    assert "pre-wrap" in rules[".md-typeset pre > code"]
    assert "overflow-wrap: anywhere" in rules[".md-typeset table:not([class]) td code.long"]
    assert "display: none" in rules["[data-md-copying] .gp,\n[data-md-copying] .go"]


def test_commands_and_output_are_told_apart() -> None:
    """By the lexer of ``console``, which every block with prompts has: the copy button goes by its classes."""
    pygments = pytest.importorskip("pygments")
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_by_name

    import pages

    for page in pages.PAGES:
        for spoken, _, body in pages.fences(pages.read(page)):
            assert spoken == "console" or not body.startswith("$ "), (page, body[:80])
    html = pygments.highlight("$ kvbm doctor\nok     kvbm\n", get_lexer_by_name("console"), HtmlFormatter())
    assert '<span class="gp">$ </span>' in html and '<span class="go">ok     kvbm</span>' in html
