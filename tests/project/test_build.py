"""Repeated `setup.py build_ext` in one tree, with a shell script as compiler: only changed files are compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fatbins
from kvbm.errors import BuildError

ROOT = Path(__file__).resolve().parents[2]
CXX = shutil.which("g++") or shutil.which("clang++")

#: Notes the file that it compiles in `calls`; what it writes to the file after -o are its arguments, in a link the objects.
COMPILER = """#!/bin/sh
all="$*"
while [ $# -gt 0 ]; do
  case "$1" in -o) out="$2" ;; *.cpp) basename "$1" >> "{calls}" ;; esac
  shift
done
echo "$all" > "$out"
"""


class Tree:
    """A checkout with two layouts and a small extension; `build` returns the names of the files that were compiled."""

    def __init__(self, folder: Path) -> None:
        self.root, self.calls = folder, folder / "calls"
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, folder)
        for name in ("cuda", "src", "tools"):
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("_core*", "__pycache__", "*.egg-info")
            )
        for name in ("nhd.yaml", "universal.yaml"):
            (folder / "layouts").mkdir(exist_ok=True)
            shutil.copy(ROOT / "layouts" / name, folder / "layouts")
        self.write("src/kvbm/_core.pyx", 'include "core/one.pxi"\n')
        self.write("src/kvbm/core/one.pxi", "number = 1\n")
        self.write("compiler", COMPILER.format(calls=self.calls))
        (folder / "compiler").chmod(0o755)

    def write(self, name: str, text: str) -> None:
        (self.root / name).write_text(text, encoding="utf-8")

    def add(self, name: str, text: str) -> None:
        self.write(name, (self.root / name).read_text(encoding="utf-8") + text)

    @property
    def linked(self) -> str:
        (extension,) = (self.root / "src" / "kvbm").glob("_core*.so")
        return extension.read_text(encoding="utf-8")

    @property
    def generated(self) -> list[Path]:
        return list((self.root / "build" / "generated").iterdir())

    def build(self, *options: str) -> set[str]:
        self.calls.write_text("", encoding="utf-8")
        compiler = str(self.root / "compiler")
        settings = {"CC": compiler, "CXX": compiler, "LDSHARED": compiler, "LDCXXSHARED": compiler, "KVBM_CUDA": "0"}
        drop = {"PYTHONPATH", "KVBM_BUILD_DIR", "KVBM_LAYOUTS", "KVBM_REQUIRE_CUDA"}
        done = subprocess.run(
            [sys.executable, "setup.py", "build_ext", "--inplace", *options],
            cwd=self.root,
            env={name: value for name, value in os.environ.items() if name not in drop} | settings,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return set(self.calls.read_text(encoding="utf-8").split())


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    pytest.importorskip("Cython")
    pytest.importorskip("setuptools")
    tree = Tree(tmp_path_factory.mktemp("tree"))
    assert {"_core.cpp", "copy_engine.cpp", "runtime.cpp", "kernels_host.cpp", "kvbm_images.cpp"} <= tree.build()
    return tree


@pytest.mark.slow  # starts setup.py
def test_nothing_changed_nothing_compiled(tree: Tree) -> None:
    """A checkout gives files new times: only their text counts.  Python files and unused headers are in no object."""
    before = tree.linked
    for path in tree.root.rglob("*"):
        os.utime(path)
    tree.write("cuda/unused.h", "// nobody includes it\n")
    tree.add("src/kvbm/errors.py", "# more\n")
    assert tree.build() == set() and tree.linked == before


@pytest.mark.slow  # starts setup.py
def test_a_header_compiles_what_includes_it_and_its_way_back_compiles_nothing(tree: Tree) -> None:
    before, old = tree.linked, (tree.root / "cuda" / "words.cuh").read_text(encoding="utf-8")
    tree.add("cuda/words.cuh", "// more\n")
    assert tree.build() == {"kernels_host.cpp", "runtime.cpp", "digest.cpp"}
    assert tree.linked != before
    tree.write("cuda/words.cuh", old)
    assert tree.build() == set()
    assert tree.linked == before, "the objects were taken again and the extension was not linked again"


@pytest.mark.slow
def test_a_file_that_the_pyx_includes(tree: Tree) -> None:
    before = tree.linked
    tree.add("src/kvbm/core/one.pxi", "other = 2\n")
    assert tree.build() == {"_core.cpp"} and tree.linked != before
    tree.write("src/kvbm/core/one.pxi", "number = 1\n")
    assert tree.build() == set() and tree.linked == before


@pytest.mark.slow
def test_a_layout_that_is_added_and_one_that_goes(tree: Tree) -> None:
    """The kernels' text is generated again if it may have changed, else reused, in another folder too."""
    before, kept = tree.linked, set(tree.generated)
    shutil.copy(ROOT / "layouts" / "vllm" / "paged_attn_v0.yaml", tree.root / "layouts")
    assert "kernels_host.cpp" in tree.build() and tree.linked != before
    kept_now = set(tree.generated)
    assert len(kept_now - kept) == 1
    (tree.root / "layouts" / "paged_attn_v0.yaml").unlink()
    assert tree.build() == set() and tree.linked == before
    assert tree.build("--build-temp", "elsewhere") == set() and tree.linked == before
    assert set(tree.generated) == kept_now


@pytest.mark.skipif(CXX is None, reason="no C++ compiler")
@pytest.mark.parametrize("source", sorted((ROOT / "cuda").glob("*.cpp")), ids=lambda path: path.name)
def test_sources_are_what_the_compiler_says(source: Path) -> None:
    command = [CXX, "-std=c++17", "-MM", f"-I{source.parent}", source]
    rule = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    _, names = rule.replace("\\\n", " ").split(":", 1)
    assert {Path(name) for name in names.split()} == set(fatbins.sources(source, source.parent))


def test_sources(tmp_path: Path) -> None:
    """Headers are searched for beside the file first, then in the folders; cycles end; missing ones are system headers."""
    (tmp_path / "deep").mkdir()
    texts = {
        "a.pyx": "include 'deep/b.pxi'\n",
        "deep/b.pxi": 'cdef extern from "c.h":\n    pass\n',
        "a.cu": '#include <vector>\n  #  include "c.h"\n// #include "deep/b.pxi"\n#include <d.h>\n',
        "c.h": '#include "a.cu"\n',
        "d.h": "",
        "deep/d.h": "",
        "macro.cpp": "#include WHICH\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert fatbins.sources(tmp_path / "a.pyx") == [tmp_path / "a.pyx", tmp_path / "deep" / "b.pxi"]
    found = fatbins.sources(tmp_path / "a.cu", tmp_path / "deep")
    assert found == [tmp_path / name for name in ("a.cu", "c.h", "d.h")]
    with pytest.raises(BuildError, match=r"macro\.cpp: expected #include .* got #include WHICH"):
        fatbins.sources(tmp_path / "macro.cpp")


def test_what_a_build_needs_is_what_make_dev_installs() -> None:
    """`make dev` builds without isolation: it reads the requirements of the build from pyproject.toml."""
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    assert any(r.startswith("cython") for r in requires)
    assert '["build-system"]["requires"]' in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_gpu_check(tmp_path: Path) -> None:
    """A wheel from elsewhere is installed.  Every stage ends with a summary, also after a timeout, which is a failure."""
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        "  --version) echo Python 3 ;;\n"
        "  *install*) echo Successfully installed $* ;;\n"
        "  *alone*) sleep 60 ;;\n"
        "  *) echo '3 passed in 0.1s' ;;\n"
        "esac\n"
    )
    python.chmod(0o755)
    shutil.copytree(ROOT / "tools", tmp_path / "tree" / "tools")
    settings = {"PYTHON": str(python), "WHEEL": "/there/kvbm.whl", "LIMIT": "1", "OUT": str(tmp_path / "out")}
    done = subprocess.run(
        [tmp_path / "tree" / "tools" / "gpu_check.sh", "build", "test"],
        env={"PATH": os.environ["PATH"], "KVBM_COMMIT": "abc", **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    first, second = done.stdout.split(", commit abc\n")[1:]
    row = "\n".join(line for line in first.splitlines() if line.startswith("build"))
    assert " ok " in row and row.endswith("/there/kvbm.whl"), done.stdout
    assert [line.split()[:2] for line in second.splitlines()] == [["build", "ok"], ["test", "ok"], ["alone", "FAILED,"]]
    assert done.returncode == 1 and (tmp_path / "out" / "summary.txt").read_text().endswith(second)
