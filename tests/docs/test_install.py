"""How kvbm is installed: one form on every page, which works today; engines by the versions that the code takes."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

import pages

#: What stands behind `pip install`, in a checkout.  kvbm is not on PyPI: once it is, this is "kvbm-layouts", and so are the pages.
KVBM = "."

#: What precedes a page's commands, if they begin with an installation.
WHERE = "Run this in a checkout of kvbm ([install](../howto/build.md)):\n\n"

PROJECT = tomllib.loads((pages.ROOT / "pyproject.toml").read_text("utf-8"))["project"]

#: Distribution → its integration, which knows its versions.
ENGINES = {"vllm": "vllm", "sglang": "sglang", "lmcache": "lmcache", "transformers": "transformers/cache"}

#: Programs print these commands, which add an extra to the kvbm that is installed: pip then asks no index for it.
PRINTED = {"docs/reference/cli.md"}


#: A word of a command: in quotes, or up to what ends a command in a page.
WORD = re.compile(r"""'[^']*'|"[^"]*"|[\w.=<>/*-]+""")


def installs(page: str) -> list[list[str]]:
    """The words behind each `pip install` of a page, without quotes."""
    found = []
    for text in re.findall(r"pip install (.*)", pages.read(page)):
        words, rest = [], text
        while word := WORD.match(rest):
            words.append(word[0].strip("'\""))
            rest = rest[word.end() :].removeprefix(" ")
            if text[: len(text) - len(rest)][-1:] != " ":
                break
        found.append(words)
    return found


EXAMPLES = [path.relative_to(pages.ROOT).as_posix() for path in sorted((pages.ROOT / "examples").rglob("*.py"))]


@pytest.mark.parametrize("page", [page for page in [*pages.PAGES, *EXAMPLES] if installs(page)])
def test_kvbm_is_installed_in_one_way(page: str) -> None:
    """From a checkout, or as the wheel that `make wheel` has built there; extras exist."""
    for one in installs(page):
        for word in one:
            name, _, extra = word.partition("[")
            if "kvbm" in name:
                assert page in PRINTED or name == KVBM, f"{page}: pip install {word}: expected {KVBM!r}"
            if name in (KVBM, "$(ls dist/*.whl)") and extra:
                assert set(extra.rstrip("]").split(",")) <= set(PROJECT["optional-dependencies"]), (page, word)


def versions(integration: str) -> tuple[tuple[int, ...], ...]:
    """The first supported version, and the first newer one that is not."""
    folder = pages.ROOT / "src" / "kvbm" / "integrations"
    path = folder / f"{integration}.py" if "/" in integration else folder / integration / "__init__.py"
    [found] = [
        ast.literal_eval(node.value) for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "VERSIONS"
    ]  # fmt: skip
    return tuple(tuple(map(int, text.split("."))) for text in found)


@pytest.mark.parametrize("name", ENGINES)
def test_engines_are_installed_in_versions_that_kvbm_takes(name: str) -> None:
    """On every page that installs one, also in the environments of the tests."""
    low, high = versions(ENGINES[name])
    pinned = [
        (page, word.removeprefix(name)) for page in pages.PAGES for one in installs(page) for word in one
        if re.split(r"[=<>~\[]", word)[0] == name
    ]  # fmt: skip
    assert pinned
    for page, bounds in pinned:
        found = {sign: tuple(map(int, number.split("."))) for sign, number in re.findall(r"(==|>=|<)([\d.]*\d)", bounds)}
        if "==" in found:
            assert low <= found["=="] < high, (page, bounds)
        else:
            assert (found[">="], found["<"]) == (low, high), (page, bounds)
    if name != "transformers":
        text = "".join(path.read_text("utf-8") for path in (pages.ROOT / "tests" / "engines").glob("requirements*.txt"))
        text += Path(pages.ROOT / "Makefile").read_text("utf-8")
        [tested] = set(re.findall(rf"\b{name}(?:-cpu)?==([\d.]*\d)", text))
        assert {bounds for _, bounds in pinned} == {f"=={tested}"}


@pytest.mark.parametrize("page", [page for page in pages.PAGES if page.startswith("docs/engines/") and installs(page)])
def test_pages_of_engines_say_where_to_install(page: str) -> None:
    first, second = (rf"(?:\$ )?pip install {what}.*\n" for what in (r"\S+[=<>]", r"'?\."))
    assert re.search(re.escape(WHERE) + r"```(?:sh|console)\n" + first + second, pages.read(page))


def test_the_free_name_is_the_first_thing_of_a_release() -> None:
    """While there is no public address, nothing of that name is ours."""
    if PROJECT["urls"]["Repository"].startswith("https://example.invalid/"):
        assert KVBM == "."
        text = pages.read("docs/releasing.md")
        assert "kvbm-layouts" in text.partition("\n1. ")[2].partition("\n2. ")[0]
