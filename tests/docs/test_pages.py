"""Every page: its Python runs, its commands print what it shows, and its links and anchors exist."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

import kvbm
import pages
import processes
from kvbm.cli.app import main

#: Files, not names of Python.
FILES = {"kvbm.h"}
#: Pages whose blocks have tests that do more than run them.
ELSEWHERE = {
    "README.md": "test_readme.py",
    "docs/tutorial.md": "test_readme.py",
    "docs/howto/arrays.md": "test_bridge_docs.py",
    "docs/howto/connect.md": "test_connect_docs.py",
    "docs/howto/files.md": "test_files_docs.py",
    "docs/howto/reshard.md": "test_reshard_docs.py",
    "docs/howto/testing.md": "test_testing.py",
    "docs/howto/tune.md": "test_bench.py",
    "docs/engines/transformers.md": "test_transformers.py",
    "docs/reference/python/index.md": "test_readme.py",
    "docs/reference/wire.md": "test_chunk.py",
    "docs/reference/wires.md": "test_connect_docs.py",
}
#: Blocks that show a part of an engine, or need an engine.
PARTS = {"docs/engines/pools.md"}
ON_A_GPU = "needs a GPU"


def python(page: str, title: str = "") -> list[str]:
    return [body for spoken, named, body in pages.fences(pages.read(page)) if spoken == "python" and named == title]


def test_every_page_with_python_is_run() -> None:
    with_python = {page for page in pages.PAGES if pages.blocks(pages.read(page), "python")}
    here = {page for page in with_python if python(page)} - set(ELSEWHERE) - PARTS
    assert here == set(HERE) and set(ELSEWHERE) | PARTS <= with_python
    for page, test in ELSEWHERE.items():
        [file] = (pages.ROOT / "tests").rglob(test)
        text = file.read_text("utf-8")
        assert all(part in text for part in Path(page).parts[-1:]), (page, test)


HERE = [
    "docs/index.md", "docs/howto/add-layout.md", "docs/howto/find-layout.md", "docs/howto/offload.md", "docs/howto/cast.md",
    "docs/reference/logging.md",
]  # fmt: skip


@pytest.mark.parametrize("page", HERE)
def test_python(page: str, tmp_path: Path) -> None:
    """All blocks of a page run as one script; their output is the comments after print."""
    script = "\n".join(python(page))
    done = processes.script(script, tmp_path, module="torch" if "import torch" in script else "")
    assert done.returncode == 0, done.stderr
    if page.endswith("add-layout.md"):
        assert done.stdout.strip() in pages.read(page), "the declaration that it shows"
    for said in re.findall(r"^print\(.*\)  # (.*)$", script, re.MULTILINE):
        assert any(said == line or said.startswith(f"{line}:") for line in done.stdout.splitlines()), (said, done.stdout)


def test_the_arrays_that_a_pool_allocates(tmp_path: Path) -> None:
    """The last block of the page of engines' pools, which needs no engine; without the view the elements are no bits."""
    *_, block = python("docs/engines/pools.md")
    view = '.view("uint16")'
    assert block.count(view) == 1
    for text, code in ((block, 0), (block.replace(view, ""), 1)):
        done = processes.script(text, tmp_path)
        assert done.returncode == code, done.stderr


def _exists(name: str) -> bool:
    """Whether a dotted name is a module or what one holds; a module that needs a missing package counts."""
    there: Any = kvbm
    for at, part in enumerate(parts := name.split(".")[1:], 2):
        try:
            there = getattr(there, part, None) or importlib.import_module(".".join(["kvbm", *parts][:at]))
        except ModuleNotFoundError as error:
            return not (error.name or "").startswith("kvbm")
    return True


@pytest.mark.slow  # imports every bridge's framework
def test_the_names_that_pages_use_exist() -> None:
    """Also in prose, which nothing runs.  Two pages have names of metadata with the same prefix."""
    used = {
        (page, name)
        for page in [*pages.PAGES, "CHANGELOG.md"]
        if page not in ("docs/reference/file-format.md", "docs/reference/store.md")
        for name in re.findall(r"(?<![\w./-])kvbm(?:\.[A-Za-z_]\w*)+", pages.read(page))
    }
    gone = {(page, name) for page, name in used if name not in FILES and not _exists(name)}
    assert len(used) > 100 and not gone, gone


#: Pages whose commands have tests of their own.
OF_THEIR_OWN = {"docs/howto/files.md", "docs/engines/operate.md", "docs/engines/serve-check.md", "docs/engines/transformers.md"}
CONSOLE = [
    (page, body)
    for page in pages.PAGES
    if page not in OF_THEIR_OWN
    for body in pages.blocks(pages.read(page), "console")
    if body.startswith("$ kvbm ")
]


@pytest.mark.parametrize(("page", "block"), CONSOLE, ids=[f"{page}-{i}" for i, (page, _) in enumerate(CONSOLE)])
def test_commands(page: str, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they print is what the page shows (`pages.pattern`)."""
    monkeypatch.chdir(tmp_path)
    (mine,) = pages.blocks(pages.read("docs/tutorial.md"), "yaml")
    Path("mine.yaml").write_text(mine, encoding="utf-8")
    command, *expected = block.splitlines()
    prompt, program, *arguments = shlex.split(command)
    assert (prompt, program) == ("$", "kvbm")
    printed = CliRunner().invoke(main, arguments, env={"COLUMNS": "100"}).output
    assert re.fullmatch(pages.pattern("\n".join(expected)), "\n".join(line.rstrip() for line in printed.splitlines())), printed


# ---- links ---------------------------------------------------------------------------------------------------------------

LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def anchors(text: str) -> set[str]:
    """Anchors of the headings, as on the site and on GitHub."""
    heads = re.findall(r"^#+ (.*)$", pages.FENCE.sub("", text), re.MULTILINE)
    plain = (re.sub(r"[`*\[\]]|\(http[^)]*\)", "", head).lower() for head in heads)
    return {re.sub(r"[^\w\- ]", "", head).strip().replace(" ", "-") for head in plain}


def test_links() -> None:
    """Links to files, and to headings in them."""
    for page in (*pages.PAGES, "CHANGELOG.md", "benchmarks/NOTES.md", "benchmarks/README.md"):
        _check_links(page)


def _check_links(page: str) -> None:
    for named, image in LINK.findall(pages.FENCE.sub("", pages.read(page))):
        target, _, anchor = (named or image).partition("#")
        if re.match(r"\w+:", target):
            continue
        path = (pages.ROOT / page).parent / target if target else pages.ROOT / page
        assert path.exists(), (page, target)
        assert not anchor or anchor in anchors(path.read_text(encoding="utf-8")), (page, target, anchor)


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"[\w/.-]+\.md", (pages.ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    assert {page.removeprefix("docs/") for page in pages.PAGES if page.startswith("docs/")} <= named


def test_the_gallery_has_a_search_field_in_the_site() -> None:
    """Before the first table, and on no other page; the script uses names that exist in the page."""
    pytest.importorskip("mkdocs")
    found = importlib.util.spec_from_file_location("site_hook", pages.ROOT / "tools" / "site_hook.py")
    assert found is not None and found.loader is not None
    hook = importlib.util.module_from_spec(found)
    found.loader.exec_module(hook)

    def content(uri: str) -> str:
        page = SimpleNamespace(file=SimpleNamespace(src_uri=uri))
        return str(hook.on_page_content("<p>about</p><h2>one</h2>", page, None, None))

    made = content("gallery/README.md")
    assert made.startswith("<p>about</p><form") and made.endswith("</script>\n<h2>one</h2>") and made.count('type="search"') == 1
    assert "http" not in made, "nothing is fetched"
    assert content("index.md") == "<p>about</p><h2>one</h2>"
    text = pages.read("docs/gallery/README.md")
    assert "\n## " in text and "| name | what | order |" in text and "\n**`" in text and "<script" not in text
