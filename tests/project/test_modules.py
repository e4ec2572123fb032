"""The modules of kvbm as a whole: their imports, and the environment variables that they read."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import conftest
import processes

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
FILES = {
    ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((SRC / "kvbm").rglob("*.py"))
}


#: The rooms, in the order of docs/explanation/architecture.md: a module imports only its own room and those before it.
ROOMS = (
    ("_version", "_shown", "errors", "_arguments", "system"),
    ("layout",),
    ("planner",),
    ("compile",),
    ("memory",),
    ("digest",),
    ("engines",),
    ("matching",),
    ("pool",),
    ("copy",),
    ("kernels", "_bridge"),
    ("numpy", "cupy", "numba", "jax", "torch"),
    ("reshard",),
    ("store",),
    ("wire",),
    ("link",),
    ("integrations",),
    ("show",),
    ("cli",),
    ("testing", "bench", "__main__"),
)
#: Modules that only give names to users.  They may name modules of any room.  kvbm itself imports only `kvbm.reshard` of them.
FACADES = ("kvbm", "kvbm.reshard", "kvbm.reshard.metrics", "kvbm.shapes", "kvbm.vllm_groups")
#: Commands of `kvbm` that are defined above the command line, and imported when they are used.
COMMANDS = {("kvbm.cli.app", name) for name in ("kvbm.bench.cli", "kvbm.bench.demo", "kvbm.testing.smoke")}


def imports(name: str, text: str | ast.AST, is_package: bool, literal: bool = True) -> Iterator[str]:
    """A module's imports as full names: also inside functions, for type checkers, and (if `literal`) by texts.

    A text text is an argument of `import_module`, or a relative name of a module in a table, such as ``"..testing.smoke"``.
    """
    package = name if is_package else name.rpartition(".")[0]

    def absolute(level: int, rest: str) -> str:
        parents = package.split(".")[: len(package.split(".")) - level + 1] if level else []
        return ".".join(filter(None, [*parents, rest]))

    for node in ast.walk(ast.parse(text) if isinstance(text, str) else text):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{absolute(node.level, node.module or '')}.{alias.name}" for alias in node.names)
        elif literal and isinstance(node, ast.Constant) and isinstance(node.value, str):
            if found := re.fullmatch(r"(\.+)([a-z_][\w.]*)", node.value):
                yield absolute(len(found[1]), found[2])
            elif node.value in FILES and node.value not in FACADES:
                yield node.value


@cache
def graph() -> dict[str, set[str]]:
    """Module → modules of kvbm that it imports; for `from .a import b` that is a.b if this module exists, else a."""
    found: dict[str, set[str]] = {}
    for name, path in FILES.items():
        found[name] = modules(imports(name, path.read_text(encoding="utf-8"), path.name == "__init__.py")) - {name}
    return found


def modules(names: Iterable[str]) -> set[str]:
    """Imported names → modules of kvbm that have them.  The compiled half stands below all rooms."""
    names = {name for name in names if not name.startswith("kvbm._core")}
    return {name if name in FILES else name.rpartition(".")[0] for name in names} & set(FILES)


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


def floor(module: str) -> int:
    """The place of a module's room in `ROOMS`."""
    room = module.split(".")[1]
    return next(number for number, names in enumerate(ROOMS) if room in names)


def upward(edges: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Imports of rooms that come later, and of the package itself."""
    return sorted(
        (name, other)
        for name, others in edges.items()
        for other in others
        if name not in FACADES and (name, other) not in COMMANDS
        if (other in FACADES and other != "kvbm.reshard") or floor(other) > floor(name)
    )


@pytest.mark.slow  # 1.1 s
def test_a_room_imports_only_the_rooms_before_it() -> None:
    """Also inside functions, for type checkers, and by literal names."""
    assert upward(graph()) == []


def test_an_upward_import_is_found() -> None:
    names = {"kvbm.layout.spec": {"kvbm.pool.pool"}, "kvbm.pool.pool": {"kvbm.layout.spec", "kvbm"}, "kvbm": {"kvbm.cli"}}
    assert upward(names) == [("kvbm.layout.spec", "kvbm.pool.pool"), ("kvbm.pool.pool", "kvbm")]


@pytest.mark.slow  # 3.0 s
def test_no_module_imports_itself() -> None:
    """Neither through other modules, nor inside functions.  Imports between rooms have their order; these are within rooms."""
    rooms = [[name for name in FILES if name not in FACADES and floor(name) == number] for number in range(len(ROOMS))]
    for room in rooms:
        inside = {name: running(name) & set(room) for name in room}
        assert not [name for name in room if reaches(name, name, inside)]

def running(name: str) -> set[str]:
    """The imports of a module, without those for type checkers only, and without names that a package looks up lazily."""
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in (getattr(node.test, "id", ""), getattr(node.test, "attr", "")):
            node.body = [ast.Pass()]
    return modules(imports(name, tree, FILES[name].name == "__init__.py", literal=False)) - {name}


@pytest.mark.slow  # 0.6 s
def test_what_describes_imports_nothing_that_is_built_or_installed_later() -> None:
    """The build runs these rooms with Python and PyYAML alone."""
    rooms = ("kvbm.layout.", "kvbm.planner.", "kvbm.compile.codegen", "kvbm.compile.nvcc", "kvbm.digest.cells")
    for name in FILES:
        if name.startswith(rooms):
            text = FILES[name].read_text(encoding="utf-8")
            whole = {found.partition(".")[0] for found in imports(name, text, False)}
            assert not whole & {"numpy", "torch", "click", "rich", "cuda", "ml_dtypes"}, name
            assert "kvbm._core" not in set(imports(name, text, False)), name


def test_the_root_has_only_public_modules_and_the_start_of_everything() -> None:
    root = {name.removeprefix("kvbm.") for name, path in FILES.items() if path.parent == SRC / "kvbm"}
    assert len(root) <= 14 and root <= {
        "kvbm", "__main__", "_version", "_shown", "_arguments", "_bridge", "errors", "kernels", "numpy", "cupy", "numba", "jax",
        "shapes", "vllm_groups",
    }  # fmt: skip


@pytest.mark.slow  # 1.0 s
def test_the_graph_is_read_right() -> None:
    """Names of packages, parents, functions, imports for type checkers, and literal names."""
    text = (
        "import a.b\nfrom . import c\nfrom .d import e\nfrom ..f import g\n"
        "if TYPE_CHECKING:\n    import too\n"
        "def f():\n    from h import i\n    import_module('.j', __package__)\n    import_module('kvbm.pool')\n"
    )
    assert set(imports("p.q.r", text, False)) == {
        "a.b", "p.q.c", "p.q.d.e", "p.f.g", "too", "h.i", "p.q.j", "kvbm.pool",
    }  # fmt: skip
    assert set(imports("p.q", "from . import c\n", True)) == {"p.q.c"}
    assert reaches("a", "a", {"a": {"b"}, "b": {"a"}}) and not reaches("a", "a", {"a": {"b"}, "b": {"b"}})
    assert {"kvbm.layout.layout", "kvbm.errors"} <= graph()["kvbm.planner.plan"]


# ---- the selections of tests ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cases", "chosen"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (4, [0, 1, 3]), (101, [0, 50, 100])]
)
def test_the_sample_is_spread_over_the_cases(cases: int, chosen: list[int]) -> None:
    """A few cases of every test, including the first and the last; slow tests are omitted; equal names are separate tests.

    Of a test that starts no process one case is quick as well.
    """

    def made(name: str, function: Any, *given: str) -> Any:
        return SimpleNamespace(
            nodeid=name,
            function=function,
            _fixtureinfo=SimpleNamespace(name2fixturedefs={}),
            given=set(given),
            get_closest_marker=lambda mark: mark in given,
        )

    items = [made(f"{file}::test[{i}]", graph.__wrapped__) for file in ("a.py", "b.py") for i in range(cases)]  # type: ignore[misc]
    items += [made(f"c.py::test[{i}]", starts_python) for i in range(cases)]
    items += [made(f"a.py::test_slow[{i}]", graph.__wrapped__, "slow") for i in range(cases)]
    for one in items:
        one.add_marker = one.given.add
    conftest.choose(items)
    sample = [one.nodeid for one in items if "sample" in one.given]
    assert sample == [f"{file}::test[{i}]" for file in ("a.py", "b.py", "c.py") for i in chosen]
    assert [one.nodeid for one in items if "quick" in one.given] == [f"{f}::test[{(cases - 1) // 2}]" for f in ("a.py", "b.py")]


def starts_python() -> object:
    return [_python() for _ in range(1)]


def _python() -> object:
    return processes.subprocess.run


def test_what_starts_a_process_is_seen_through_functions_and_classes() -> None:
    assert conftest.starts_process(starts_python) and conftest.starts_process(_python)
    assert not conftest.starts_process(reaches) and not conftest.starts_process(imports)


# ---- environment variables -------------------------------------------------------------------------------------------

TABLE = re.compile(r"^\| (`[A-Z][^|]*?) \|", re.MULTILINE)
PREFIXES = re.compile(r"(?:KVBM|CUDA|NVCC|XDG|CONDA)_[A-Z0-9_]+|CUDACXX|CUDAHOSTCXX|LD_LIBRARY_PATH")
#: `NAME ?= value` of make, and ${NAME:-value} of the shell.
DEFAULTS = re.compile(r"^([A-Z_]+) \?=|\$\{([A-Z_]+)[:+-]", re.MULTILINE)


def strings(path: Path) -> set[str]:
    """The string constants of a Python file."""
    text = path.read_text(encoding="utf-8")
    nodes = ast.walk(ast.parse(text)) if PREFIXES.search(text) else ()
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


#: What the build runs beside kvbm itself.
BUILD = (ROOT / "setup.py", ROOT / "tools" / "fatbins.py")


def variables() -> dict[str, str]:
    """Variable → a file that names it, in code that builds, is, or tests kvbm; without constants of C."""
    constants = set(
        re.findall(r"\b\w+_\w+\b", "".join(path.read_text("utf-8") for path in (ROOT / "cuda").glob("*.h")))
    )
    found: dict[str, str] = {}
    for path in [*BUILD, *FILES.values(), *sorted(set((ROOT / "tests").rglob("*.py")) - {Path(__file__)})]:
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


@pytest.mark.slow  # 2.8 s
def test_every_environment_variable_is_in_the_table() -> None:
    """docs/reference/environment.md lists all variables that are read, and no others."""
    rows = TABLE.findall((ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8"))
    listed = {name for row in rows for name in re.findall(r"`([A-Z][A-Z0-9_]+)", row)}
    found = variables()
    assert {"KVBM_NVRTC", "CUDA_ARCHS", "XDG_CACHE_HOME", "KVBM_HYPOTHESIS", "JOBS", "PYTEST_ARGS"} <= set(found)
    missing = {name: path for name, path in found.items() if name not in listed}
    assert not missing, f"add a row to docs/reference/environment.md: {missing}"
    assert not listed - set(found), "in the table, and read nowhere"
