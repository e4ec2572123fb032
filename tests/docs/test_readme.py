"""README, tutorial and the pages made from them are correct: their layout and Python run, and the names in them exist."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import pages
import processes
from kvbm.cli.app import main

ROOT = pages.ROOT
README, TUTORIAL, OFFLOAD = pages.read("README.md"), pages.read("docs/tutorial.md"), pages.read("docs/howto/offload.md")
ERRORS, ARCHITECTURE = pages.read("docs/reference/errors.md"), pages.read("docs/explanation/architecture.md")


def blocks(text: str, language: str) -> list[str]:
    return pages.blocks(text, language)


(MINE,) = blocks(TUTORIAL, "yaml")
(SHORT,) = blocks(README, "python")
SHIPPED, NUMPY, TORCH, CUDA, OWN = blocks(TUTORIAL, "python")
(API,) = blocks(pages.read("docs/reference/python/index.md"), "python")
SERVING, _, LISTS = blocks(OFFLOAD, "python")


def execute(folder: Path, *parts: str, layout: str = MINE) -> subprocess.CompletedProcess[str]:
    """Run blocks one after another as one script beside ``mine.yaml``."""
    (folder / "mine.yaml").write_text(layout, encoding="utf-8")
    return processes.script("\n".join(parts), folder, module="torch" if any("import torch" in part for part in parts) else "")


def passes(folder: Path, *parts: str) -> str:
    done = execute(folder, *parts)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_five_lines(tmp_path: Path) -> None:
    """Six lines with the import and the check of the result, which fails for another element; other presets pass, too."""
    assert len([line for line in SHORT.splitlines() if line]) == 7
    (tmp_path / "five.py").write_text(SHORT, encoding="utf-8")
    subprocess.run([sys.executable, "five.py"], cwd=tmp_path, check=True)  # as a user does
    wrong = {"[0][-1, 2, 0]": "[0][-1, 2, 1]", "[2, 5, -1, :, 0]": "[2, 5, -2, :, 0]", "src_ids=[5, 0, 2]": "src_ids=[4, 0, 2]"}
    for right, other in wrong.items():
        assert right in SHORT and execute(tmp_path, SHORT.replace(right, other)).returncode
    for preset in ("llama-3.2-1b/tp8", "deepseek-v3", "phi-4/tp5"):  # one head, a latent, an odd number of heads
        passes(tmp_path, SHORT.replace("llama-3.1-8b", preset))
    assert SHORT in blocks(pages.read("docs/index.md"), "python")


def test_shipped(tmp_path: Path) -> None:
    passes(tmp_path, SHIPPED)
    for right, other in (("[2, 5, 3, :, 1]", "[2, 5, 3, :, 0]"), ("[2, 5, 3, :, 1]", "[1, 5, 3, :, 1]")):
        assert right in SHIPPED and execute(tmp_path, SHIPPED.replace(right, other)).returncode


def test_own_arrays(tmp_path: Path) -> None:
    """The declared file is the one that the command prints."""
    passes(tmp_path, OWN)
    [said] = [block for block in blocks(TUTORIAL, "console") if " declare " in block]
    assert (tmp_path / "own.yaml").read_text("utf-8") == said.partition("\n")[2]
    for right, other in (("memory[2, 1, 5", "memory[2, 0, 5"), ('"[l o] b t h d"', '"[o l] b t h d"')):
        assert right in OWN and execute(tmp_path, OWN.replace(right, other)).returncode


def test_the_readme_is_short() -> None:
    """At most one and a half screens."""
    assert len(README.splitlines()) <= 90 and len(README.split()) <= 900


@pytest.mark.quick
def test_numpy(tmp_path: Path) -> None:
    assert passes(tmp_path, NUMPY) == "same bits\n"


@pytest.mark.usefixtures("torch")
@pytest.mark.slow
def test_torch(tmp_path: Path) -> None:
    passes(tmp_path, NUMPY, TORCH)


@pytest.mark.gpu
def test_cuda(tmp_path: Path) -> None:
    passes(tmp_path, NUMPY, CUDA)


@pytest.mark.gpu
def test_lists_of_tensors(tmp_path: Path) -> None:
    """The README shows only the calls; this also checks their results."""
    proof = """
want = torch.stack([torch.stack(block) for block in blocks]).view(nb, nl, no, nt, nh, hd)
assert torch.equal(universals, want.permute(0, 4, 1, 2, 3, 5))
assert torch.equal(operationals, want.view(nb, nl, no, nt * nh * hd))
assert torch.equal(turned, want.view(nb, nl * no, nt, nh, hd).transpose(2, 3))
"""
    passes(tmp_path, LISTS, proof)


@pytest.mark.gpu
def test_serving_loop(tmp_path: Path) -> None:
    printed = passes(tmp_path, SERVING)
    assert "64 blocks (128 MiB)" in printed and "'copies': 3, 'blocks': 3, 'bytes': 6291456" in printed


def test_serving_loop_names_what_there_is() -> None:
    """It cannot run without a GPU; the test checks that the functions that it calls exist."""
    import ast

    import kvbm

    calls = [node for node in ast.walk(ast.parse(SERVING)) if isinstance(node, ast.Call)]
    copies = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "copy"]
    known = set(inspect.signature(kvbm.Transfer.copy).parameters)
    assert len(copies) == 2 and all({word.arg for word in call.keywords} <= known for call in copies)
    assert all(hasattr(kvbm.Transfer, name) for name in ("explain", "stats", "close"))


def test_a_layout_of_the_same_shape_fails_as_the_readme_says(tmp_path: Path) -> None:
    (other,) = re.findall(r'change the order to `"(.*?)"`', TUTORIAL)
    wrong, count = re.subn(r'^order: ".*"$', f'order: "{other}"', MINE, flags=re.MULTILINE)
    assert count == 1 and wrong != MINE
    done = execute(tmp_path, NUMPY, layout=wrong)
    assert done.returncode == 1 and "AssertionError" in done.stderr and "Pool(" not in done.stderr, done.stderr


def test_the_refused_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(MINE.replace("16B", "80B"), encoding="utf-8")
    result = CliRunner().invoke(main, ["check", "mine.yaml"])
    (said,) = blocks(TUTORIAL, "text")
    assert (result.exit_code, result.output) == (12, said)
    assert "exit code 12" in TUTORIAL


def test_python(tmp_path: Path) -> None:
    """The output of the API section's code is that of its comments."""
    printed = passes(tmp_path, API).splitlines()
    said = re.findall(r"^print\(.*\)  # (.*)$", API, re.MULTILINE)
    for comment in said:
        if re.search(r"[0-9]", comment):
            assert any(comment.startswith(line) for line in printed), (comment, printed)
    assert sum(bool(re.search(r"[0-9]", comment)) for comment in said) == 3


def test_errors_and_exit_codes() -> None:
    """The table names every error, its built-in class and its exit code."""
    from kvbm import errors

    rows = re.findall(r"^\| `(\w+)` \(`(\w+)`\) \|.*\| (\d+) \|$", ERRORS, re.MULTILINE)
    said = {name: (base, int(code)) for name, base, code in rows}
    known = {
        name: (error.__mro__[1 if error.__mro__[1] is not errors.KvbmError else 2].__name__, error.exit_code)
        for name, error in vars(errors).items()
        if isinstance(error, type) and issubclass(error, errors.KvbmError) and error is not errors.KvbmError
    }
    assert said == known


def test_shipped_names_are_shipped() -> None:
    """On every page; and the gallery has all short names."""
    import kvbm

    names = set(kvbm.layouts())
    folders = "|".join(sorted({name.partition("/")[0] for name in names if "/" in name}))
    for page in pages.PAGES:
        text = re.sub(r"`[^`\n]*[/.]\w+\.\w+`", "", pages.read(page))  # paths of files
        mentioned = set(re.findall(rf"`((?:{folders})/\w+)`", text))
        assert mentioned <= names, (page, mentioned - names)
    assert {name for name in names if "/" not in name} <= set(re.findall(r"`(\w+)`", pages.read("docs/gallery/README.md")))


def test_numbers_of_layouts_are_those_of_the_shipped_ones() -> None:
    """A new layout changes them: README, the page on declarations, the output of doctor, and the changelog."""
    import kvbm

    names = kvbm.layouts()
    different = len({kvbm.load(name).fingerprint for name in names})
    for page, pattern, want in (
        ("README.md", r"(\d+) names of layouts", [len(names)]),
        ("docs/explanation/declared.md", r"(\d+) names are (\d+) different", [len(names), different]),
        ("docs/reference/cli.md", r"layouts +(\d+) in /", [len(names)]),
        ("CHANGELOG.md", r"(\d+) names for (\d+) layouts", [len(names), different]),
    ):
        found = re.search(pattern, pages.read(page))
        assert found is not None, f"{page}: expected a number of layouts, got none"
        assert [*map(int, found.groups())] == want, f"{page}: expected {want}, got {found[0]!r}: write the new numbers"


def test_the_internals_name_every_file_of_the_compiled_half() -> None:
    (tree,) = [block for block in blocks(pages.read("docs/explanation/internals.md"), "text") if "kernels.cu.in" in block]
    named = set(re.findall(r"[\w.]+\.(?:h|cuh|cpp|cu|in)\b", tree))
    assert named == {path.name for path in (pages.ROOT / "cuda").iterdir()}


def test_the_architecture_names_every_room_and_its_files() -> None:
    """Each package of kvbm is in the table of rooms, and each file that the table names is there."""
    root = pages.ROOT / "src" / "kvbm"
    rows = re.findall(r"^\| (`[a-z].*?) \| .*? \| (.*?) ?\|$", ARCHITECTURE, re.MULTILINE)
    rooms = {name for row, _ in rows for name in re.findall(r"`([a-z_]+)/?`", row)}
    found = {path.parent.name for path in root.glob("*/__init__.py")}
    found |= {path.stem for path in root.glob("*.py") if not path.stem.startswith("_")}
    assert rooms == found
    for row, files in rows:
        (room, *_) = re.findall(r"`([a-z_]+)/`", row) or [""]
        for file in re.findall(r"`([\w/]+\.py)`", files):
            assert (root / room / file).is_file() or (root / file).is_file(), (row, file)
    for file in re.findall(r"`((?:[a-z_]+/)[\w/]*\.py)`", ARCHITECTURE.partition("## Where to begin")[2]):
        assert (root / file).is_file(), file
