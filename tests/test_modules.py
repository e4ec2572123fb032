"""The modules of kvbm as a whole: their imports, and the environment variables that they read."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import conftest

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
FILES = {
    ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((SRC / "kvbm").rglob("*.py"))
}


def imports(name: str, text: str, is_package: bool) -> Iterator[str]:
    """A module's imports, also inside functions, as full names; without those for type checkers only."""
    package = name if is_package else name.rpartition(".")[0]
    nodes: list[ast.AST] = [ast.parse(text)]
    for node in nodes:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            nodes += node.orelse
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join(filter(None, [*parents, node.module]))
            yield from (f"{base}.{alias.name}" for alias in node.names)


@cache
def graph() -> dict[str, set[str]]:
    """Module → modules of kvbm that it imports; for `from .a import b` that is a.b if this module exists, else a."""
    found: dict[str, set[str]] = {}
    for name, path in FILES.items():
        whole = set(imports(name, path.read_text(encoding="utf-8"), path.name == "__init__.py"))
        found[name] = {n if n in FILES else n.rpartition(".")[0] for n in whole} & set(FILES) - {name}
    return found


def reaches(start: str, goal: str, edges: dict[str, set[str]]) -> bool:
    """True if imports lead from `start` to `goal`."""
    seen, todo = set(), list(edges[start])
    while todo:
        if (name := todo.pop()) == goal:
            return True
        if name not in seen:
            seen.add(name)
            todo += edges[name]
    return False


def test_no_module_imports_itself() -> None:
    """Neither through other modules, nor inside functions."""
    assert not [name for name in FILES if reaches(name, name, graph())]


def test_the_graph_is_read_right() -> None:
    """Names of packages, parents, functions, and imports for type checkers only."""
    text = (
        "import a.b\nfrom . import c\nfrom .d import e\nfrom ..f import g\n"
        "if TYPE_CHECKING:\n    import no\nelse:\n    import yes\n"
        "def f():\n    from h import i\n"
    )
    assert set(imports("p.q.r", text, False)) == {"a.b", "p.q.c", "p.q.d.e", "p.f.g", "yes", "h.i"}
    assert set(imports("p.q", "from . import c\n", True)) == {"p.q.c"}
    assert reaches("a", "a", {"a": {"b"}, "b": {"a"}}) and not reaches("a", "a", {"a": {"b"}, "b": {"b"}})
    assert {"kvbm.layout", "kvbm.errors"} <= graph()["kvbm.planner"]


# ---- the quick tests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cases", "chosen"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (4, [0, 1, 3]), (101, [0, 50, 100])]
)
def test_quick_ones_are_spread_over_the_cases(cases: int, chosen: list[int]) -> None:
    """A few cases of every test, including the first and the last; slow tests are omitted; equal names are separate tests."""

    def item(name: str, *marks: str) -> Any:
        return SimpleNamespace(nodeid=name, get_closest_marker=lambda mark: mark in marks)

    names = [f"{file}::test[{i}]" for file in ("a.py", "b.py") for i in range(cases)]
    slow = [item(f"a.py::test_slow[{i}]", "slow") for i in range(cases)]
    found = [one.nodeid for one in conftest.quick([*map(item, names), *slow])]
    assert sorted(found) == sorted(f"{file}::test[{i}]" for file in ("a.py", "b.py") for i in chosen)


# ---- environment variables -------------------------------------------------------------------------------------------

TABLE = re.compile(r"^\| (`[A-Z][^|]*?) \|", re.MULTILINE)
PREFIXES = re.compile(r"(?:KVBM|CUDA|NVCC|XDG|CONDA)_[A-Z0-9_]+|CUDACXX|CUDAHOSTCXX|LD_LIBRARY_PATH")
#: `NAME ?= value` of make, and ${NAME:-value} of the shell.
DEFAULTS = re.compile(r"^([A-Z_]+) \?=|\$\{([A-Z_]+)[:+-]", re.MULTILINE)


def strings(path: Path) -> set[str]:
    """The string constants of a Python file."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def variables() -> dict[str, str]:
    """Variable → a file that names it, in code that builds, is, or tests kvbm; without constants of C."""
    constants = set(
        re.findall(r"\b\w+_\w+\b", "".join(path.read_text("utf-8") for path in (ROOT / "cuda").glob("*.h")))
    )
    found: dict[str, str] = {}
    for path in [ROOT / "setup.py", *FILES.values(), *sorted(set((ROOT / "tests").rglob("*.py")) - {Path(__file__)})]:
        for text in strings(path):
            if PREFIXES.fullmatch(text) and text not in constants and not text.startswith("CUDA_ERROR_"):
                found[text] = str(path.relative_to(ROOT))
    for name in ("Makefile", ".ci/run", "tools/gpu_check.sh", "tools/sanitize.sh"):
        for pair in DEFAULTS.findall((ROOT / name).read_text(encoding="utf-8")):
            found["".join(pair)] = name
    return found


def test_no_tool_is_named_as_a_module_of_python() -> None:
    """Behind an editable install pytest takes a `tools/site.py` for a part of our plugin: `site`, which is imported already."""
    names = {path.stem for path in (ROOT / "tools").iterdir()}
    assert names and not names & set(sys.stdlib_module_names)


def test_every_environment_variable_is_in_the_table() -> None:
    """docs/reference/environment.md lists all variables that are read, and no others."""
    rows = TABLE.findall((ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8"))
    listed = {name for row in rows for name in re.findall(r"`([A-Z][A-Z0-9_]+)", row)}
    found = variables()
    assert {"KVBM_NVRTC", "CUDA_ARCHS", "XDG_CACHE_HOME", "KVBM_HYPOTHESIS", "JOBS", "PYTEST_ARGS"} <= set(found)
    missing = {name: path for name, path in found.items() if name not in listed}
    assert not missing, f"add a row to docs/reference/environment.md: {missing}"
    assert not listed - set(found), "in the table, and read nowhere"
