"""The README stays true: its layout and its Python are run, and its commands print what it says they print."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvbm.cli import main

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """One ``##`` section, its title left out."""
    match = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
    assert match, f"README has no section {title!r}"
    return match[1]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


FIVE = section("Declare a layout in five minutes")
(MINE,) = blocks(FIVE, "yaml")
SHORT, NUMPY, TORCH, CUDA = blocks(FIVE, "python")
API, LISTS, COMPILED = blocks(section("Python"), "python")
(SERVING,) = blocks(section("Move blocks beside a running model"), "python")
(RESHARD,) = blocks(section("Between engines that spread a cache differently"), "python")
CONSOLE = blocks(README, "console")


def execute(folder: Path, *parts: str, layout: str = MINE) -> subprocess.CompletedProcess[str]:
    """Run blocks one after another as one script beside ``mine.yaml``."""
    (folder / "mine.yaml").write_text(layout, encoding="utf-8")
    (folder / "example.py").write_text("\n".join(parts), encoding="utf-8")
    return subprocess.run([sys.executable, "example.py"], cwd=folder, capture_output=True, text=True, check=False)


def passes(folder: Path, *parts: str) -> str:
    done = execute(folder, *parts)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_five_lines(tmp_path: Path) -> None:
    assert len(SHORT.splitlines()) == 6  # and the look at the result
    passes(tmp_path, SHORT)
    wrong = MINE.replace("t d%16B", "d/16B d%16B").replace("h d/16B d/16B", "h t d/16B")
    assert wrong != MINE and execute(tmp_path, SHORT, layout=wrong).returncode


def test_numpy(tmp_path: Path) -> None:
    assert passes(tmp_path, NUMPY) == "same bits\n"


@pytest.mark.usefixtures("torch")
@pytest.mark.slow
def test_torch(tmp_path: Path) -> None:
    passes(tmp_path, NUMPY, TORCH)


@pytest.mark.usefixtures("torch")
@pytest.mark.slow
def test_compiled(tmp_path: Path) -> None:
    passes(tmp_path, COMPILED)


@pytest.mark.gpu
def test_cuda(tmp_path: Path) -> None:
    passes(tmp_path, NUMPY, CUDA)


@pytest.mark.gpu
def test_lists_of_tensors(tmp_path: Path) -> None:
    """And what they hold: the README only shows the calls."""
    proof = """
want = torch.stack([torch.stack(block) for block in blocks]).view(nb, nl, no, nt, nh, hd)
assert torch.equal(universals, want.permute(0, 4, 1, 2, 3, 5))
assert torch.equal(operationals, want.view(nb, nl, no, nt * nh * hd))
"""
    passes(tmp_path, LISTS, proof)


@pytest.mark.gpu
def test_serving_loop(tmp_path: Path) -> None:
    printed = passes(tmp_path, SERVING)
    assert "64 blocks (128 MiB)" in printed and "'copies': 3, 'blocks': 3, 'bytes': 6291456" in printed


def test_serving_loop_names_what_there_is() -> None:
    """Without a GPU it cannot run; that it calls what exists can be seen."""
    import ast

    import kvbm

    calls = [node for node in ast.walk(ast.parse(SERVING)) if isinstance(node, ast.Call)]
    copies = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "copy"]
    known = set(inspect.signature(kvbm.Transfer.copy).parameters)
    assert len(copies) == 2 and all({word.arg for word in call.keywords} <= known for call in copies)
    assert all(hasattr(kvbm.Transfer, name) for name in ("explain", "stats", "close"))


def test_resharding(tmp_path: Path) -> None:
    assert len(list(filter(None, RESHARD.splitlines()))) < 15
    passes(tmp_path, RESHARD)
    assert execute(tmp_path, RESHARD.replace("[:, 1, 6, 1]", "[:, 1, 6, 0]")).returncode, "of another head"


def test_a_layout_of_the_same_shape_fails_as_the_readme_says(tmp_path: Path) -> None:
    (other,) = re.findall(r'change the order to `"(.*?)"`', FIVE)
    wrong, count = re.subn(r'^order: ".*"$', f'order: "{other}"', MINE, flags=re.MULTILINE)
    assert count == 1 and wrong != MINE
    done = execute(tmp_path, NUMPY, layout=wrong)
    assert done.returncode == 1 and "AssertionError" in done.stderr and "Pool(" not in done.stderr, done.stderr


def test_the_refused_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(MINE.replace("16B", "80B"), encoding="utf-8")
    result = CliRunner().invoke(main, ["check", "mine.yaml"])
    (said,) = blocks(FIVE, "text")
    assert (result.exit_code, result.output) == (12, said)
    assert "exit code 12" in FIVE


def test_python(tmp_path: Path) -> None:
    """What the API section prints is what its comments say."""
    printed = passes(tmp_path, API).splitlines()
    said = re.findall(r"^print\(.*\)  # (.*)$", API, re.MULTILINE)
    for comment in said:
        if re.search(r"[0-9]", comment):
            assert any(comment.startswith(line) for line in printed), (comment, printed)
    assert sum(bool(re.search(r"[0-9]", comment)) for comment in said) == 3


@pytest.mark.parametrize("block", CONSOLE, ids=lambda block: block.splitlines()[0])
def test_commands(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``…`` on a line of its own stands for any lines; spaces at the end of a line do not count."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(MINE, encoding="utf-8")
    command, *expected = block.splitlines()
    prompt, program, *arguments = shlex.split(command)
    assert (prompt, program) == ("$", "kvbm")
    printed = CliRunner().invoke(main, arguments, env={"COLUMNS": "100"}).output
    printed = "\n".join(line.rstrip() for line in printed.splitlines())
    pattern = "\n".join(expected)
    if "…" in expected:
        pieces = re.split(r"^…$", pattern, flags=re.MULTILINE)
        assert re.fullmatch("(?s:.*)".join(map(re.escape, pieces)), printed), printed
    else:
        assert printed == pattern


def test_errors_and_exit_codes() -> None:
    """The table names every error, its built-in class and its exit code."""
    from kvbm import errors

    rows = re.findall(r"^\| `(\w+)` \(`(\w+)`\) \|.*\| (\d+) \|$", README, re.MULTILINE)
    said = {name: (base, int(code)) for name, base, code in rows}
    known = {
        name: (error.__mro__[1 if error.__mro__[1] is not errors.KvbmError else 2].__name__, error.exit_code)
        for name, error in vars(errors).items()
        if isinstance(error, type) and issubclass(error, errors.KvbmError) and error is not errors.KvbmError
    }
    assert said == known


def test_shipped_names_are_shipped() -> None:
    import kvbm

    names = set(kvbm.layouts())
    mentioned = set(re.findall(r"`((?:hf|vllm)/\w+)`", README))
    assert mentioned and mentioned <= names
    assert {name for name in names if "/" not in name} <= set(re.findall(r"`(\w+)`", section("The layout language")))


def test_links_and_files_are_there() -> None:
    root = Path(__file__).resolve().parent.parent
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (root / target).exists(), target
    (tree,) = [block for block in blocks(section("How it works"), "") if "permute.cuh" in block]
    named = {name.rpartition("/")[2] for name in re.findall(r"[\w./]+\.(?:pyx?|h|cuh|cpp|in|sh)\b", tree)}
    folders = (
        "cuda",
        "src/kvbm",
        "src/kvbm/bench",
        "src/kvbm/integrations",
        "src/kvbm/integrations/lmcache",
        "src/kvbm/integrations/sglang",
        "src/kvbm/integrations/vllm",
        "src/kvbm/reshard",
        "src/kvbm/store",
        "src/kvbm/testing",
        "src/kvbm/torch",
        "src/kvbm/wire",
        "tests",
        "benchmarks",
        "tools",
    )
    there = {path.name for folder in folders for path in (root / folder).iterdir()}
    assert len(named) > 15 and named <= there, named - there
    there = [path for path in (root / "src" / "kvbm").rglob("*") if path.suffix in {".py", ".pyx", ".pyi"}]
    modules = {path.name for path in there if not path.name.startswith("__")}
    assert modules - {"_core.pyi"} <= named, modules - named
