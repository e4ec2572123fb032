"""Hook of mkdocs: pages of the repository that lie outside ``docs/`` are pages of the site, too.

Sources keep the links that work in a checkout, such as ``../../examples/vllm/router.py``.  In the site the files that such links
name lie under ``project/``: Markdown as pages, everything else as it is.  A link to a file that does not exist is a warning, which
``mkdocs build --strict`` turns into an error.

A picture is a link to itself: on a narrow screen it scrolls (``docs/site.css``), and the link shows it alone.  Long names in tables
are marked, so that they alone may break there.
"""

from __future__ import annotations

import inspect
import logging
import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r'(?<!">)<img\b[^>]*?\bsrc="([^"]+)"[^>]*>')
LONG = re.compile(r"<code>(?=[^<]{21,}</code>)")
ALONE = {"index.md", "tutorial.md"}  # the only pages of their sections: a list of pages beside them has one entry
#: Pages that come first in the search, among those that have what is searched: how often their words count.
#: Names of errors begin as those of commands do, and are found anyway.
BOOST = {"reference/cli.md": 4, "reference/environment.md": 16, "reference/python/": 2, "reference/errors.md": 0.1}
NO_DEFAULT = "<td><code>Sentinel.UNSET</code></td>"  # mkdocs-click, of an option without a default, since click 8.3
log = logging.getLogger("mkdocs.hooks.site")


def in_repository(page: str) -> str:
    """Path in the repository of a page of the site, from its path under ``docs/``."""
    return page.removeprefix("project/") if page.startswith("project/") else f"docs/{page}"


def in_site(path: str) -> str:
    """The reverse of `in_repository`."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"project/{path}"


def targets(text: str, page: str) -> set[str]:
    """Files of the repository that a page's links name."""
    folder = posixpath.dirname(in_repository(page))
    found = {link[1] for link in LINK.findall(FENCE.sub("", text))}
    return {posixpath.normpath(posixpath.join(folder, link)) for link in found if not re.match(r"\w+:", link)}


def on_startup(command: str, dirty: bool) -> None:  # noqa: ARG001
    """Load the commands that `kvbm` loads when they are used: mkdocs-click shows no others.

    The options that every command has are described once on the page, and not in each table.  Examples, which mkdocs-click does not
    know, become part of the description.
    """
    from click import Command, Context, Group

    from kvbm.cli.app import main
    from kvbm.cli.click_classes import GLOBAL

    for option in GLOBAL:
        option.hidden = True
    context = Context(main)
    for name in main.lazy:
        loaded = main.get_command(context, name)
        assert loaded is not None
        main.add_command(loaded, name)

    def show_examples(command: Command) -> None:
        if examples := getattr(command, "examples", ()):
            lines = "\n".join(examples)
            command.help = f"{inspect.cleandoc(command.help or '')}\n\n**Examples:**\n\n```sh\n{lines}\n```"
        for name in command.list_commands(context) if isinstance(command, Group) else ():
            below = command.get_command(context, name)
            assert below is not None
            show_examples(below)

    show_examples(main)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link to outside of ``docs/``, and what is linked to from there."""
    todo = [(file.src_uri, file.content_string) for file in files.documentation_pages()]
    named = re.findall(r"project/[\w./-]+\.md", Path(config.config_file_path).read_text(encoding="utf-8"))
    todo += [("index.md", f"[page](../{in_repository(page)})") for page in named]
    while todo:
        page, text = todo.pop()
        for path in sorted(targets(text, page)):
            if path.startswith(("docs/", "..")) or files.get_file_from_path(in_site(path)):
                continue
            if not (ROOT / path).is_file():
                log.warning("%s links to %s, which is not a file of the repository", in_repository(page), path)
                continue
            files.append(File.generated(config, in_site(path), abs_src_path=os.fspath(ROOT / path)))
            if path.endswith(".md"):
                todo.append((in_site(path), (ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Turn links between files of the repository into links between pages of the site; say what the theme shows of a page."""
    here = page.file.src_uri
    if here in ALONE:
        page.meta["hide"] = ["navigation"]
    for start, boost in BOOST.items():
        if here.startswith(start):
            page.meta.setdefault("search", {})["boost"] = boost
    folder = posixpath.dirname(in_repository(here))

    def turned(link: re.Match[str]) -> str:
        if re.match(r"\w+:", link[2]):
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        return f"{link[1]}{posixpath.relpath(in_site(path), posixpath.dirname(here) or '.')}{link[3]}"

    return LINK.sub(turned, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Make pictures links, mark long names, empty cells that stand for no default, and give the gallery a search field."""
    linked = PICTURE.sub(r'<a class="picture" href="\1">\g<0></a>', html)
    html = LONG.sub('<code class="long">', linked.replace(NO_DEFAULT, "<td></td>"))
    if page.file.src_uri != "gallery/README.md":
        return html
    before, head, after = html.partition("<h2")
    field = (ROOT / "tools" / "gallery_search.html").read_text(encoding="utf-8")  # on a code host the page is read without it
    return f"{before}{field}{head}{after}"
