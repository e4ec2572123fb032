"""Finding nvcc, choosing its targets and caching its output, with a shell script as compiler."""

from __future__ import annotations

import doctest
import os
import re
from pathlib import Path

import pytest

import fatbins
from kvbm.compile import nvcc
from kvbm.errors import BuildError
from kvbm.system.cache import replacing

CUDA = Path(fatbins.__file__).parents[1] / "cuda"
BANNER = "Cuda compilation tools, release {0}, V{0}.88"


def fake(folder: Path, release: str = "13.0", fails: bool = False) -> Path:
    """An nvcc that writes its arguments, with a fatbin header, to the file after -o; and one line per call to `calls`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "nvcc"
    path.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = --version ] && {{ echo "{BANNER.format(release)}"; exit 0; }}\n'
        f'echo "$@" >> "{folder}/calls"\n'
        'all="$*"\n'
        'while [ "$1" != -o ]; do shift; done\n'
        "size=$((${#all} + 1))\n"
        'printf "\\120\\355\\125\\272\\1\\0\\20\\0\\\\$(printf %03o $((size & 255)))\\\\$(printf %03o $((size >> 8)))" > "$2"\n'
        'printf "\\0\\0\\0\\0\\0\\0" >> "$2"\n'
        'echo "$all" >> "$2"\n' + ("echo 'error: no such thing'; exit 3\n" if fails else "")
    )
    path.chmod(0o755)
    return path


def calls(compiler: Path) -> int:
    log = compiler.parent / "calls"
    return len(log.read_text().splitlines()) if log.exists() else 0


def environment(**variables: str | Path) -> dict[str, str]:
    """Only variables that a shell script needs, and the given ones."""
    return {"PATH": "/usr/bin:/bin"} | {name: str(value) for name, value in variables.items()}


def test_doctests() -> None:
    for module, least in ((nvcc, 1), (fatbins, 3)):
        found = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
        assert found.attempted >= least and found.failed == 0


def test_order(tmp_path: Path) -> None:
    """CUDACXX, CUDA_HOME, CUDA_PATH, wheels, PATH: each is used only if the earlier ones name no compiler."""
    named = fake(tmp_path / "named")
    home, other = fake(tmp_path / "home" / "bin"), fake(tmp_path / "other" / "bin")
    wheel = fake(tmp_path / "site" / "nvidia" / "cu13" / "bin")
    path = fake(tmp_path / "path")
    everything = environment(CUDACXX=named, CUDA_HOME=tmp_path / "home", CUDA_PATH=tmp_path / "other")
    everything["PATH"] += f":{path.parent}"
    sites = [str(tmp_path / "site")]
    for origin, expected in (("CUDACXX", named), ("CUDA_HOME", home), ("CUDA_PATH", other), ("wheel", wheel)):
        found = nvcc.find(everything, sites)
        assert (found.origin, found.command, found.version) == (origin, (str(expected),), "13.0.88")
        everything.pop(origin, None)
    assert nvcc.find(everything, []).origin == "PATH"
    assert str(path) in str(nvcc.find(everything, []))


def test_what_is_passed_over_is_told(tmp_path: Path) -> None:
    fake(tmp_path / "old" / "bin", release="12.2")
    good = fake(tmp_path / "good" / "bin")
    found = nvcc.find(environment(CUDA_HOME=tmp_path / "old", CUDA_PATH=tmp_path / "good"), [])
    assert found.command == (str(good),)
    (reason,) = found.passed_over
    assert "CUDA_HOME" in reason and "12.2" in reason and "12.8" in reason


def test_the_compiler_asked_for_by_name_or_none(tmp_path: Path) -> None:
    fake(tmp_path / "good" / "bin")
    with pytest.raises(BuildError, match="CUDACXX=/nowhere/nvcc"):
        nvcc.find(environment(CUDACXX="/nowhere/nvcc", CUDA_HOME=tmp_path / "good"), [])
    with pytest.raises(BuildError, match="another program"):
        nvcc.find(environment(CUDACXX="/bin/echo"), [])
    with pytest.raises(BuildError, match=r"no CUDA compiler: .*CUDA_HOME.*/empty.*Next: install"):
        nvcc.find(environment(CUDA_HOME=tmp_path / "empty"), [])


def test_a_launcher_in_front(tmp_path: Path) -> None:
    found = nvcc.find(environment(CUDACXX=f"/usr/bin/env {fake(tmp_path)}"), [])
    assert found.command == ("/usr/bin/env", str(tmp_path / "nvcc"))


@pytest.mark.parametrize(
    ("archs", "ptx", "expected"),
    [
        ("", "", "sm_80 sm_90 sm_100 sm_120 compute_80"),
        ("sm_90,8.0", "", "sm_80 sm_90 compute_80"),
        ("100;90", "none", "sm_90 sm_100"),
        ("none", "90", "compute_90"),
        ("90a", "", "sm_90a"),
    ],
)
def test_targets(archs: str, ptx: str, expected: str) -> None:
    assert str(fatbins.targets({"CUDA_ARCHS": archs, "CUDA_PTX_ARCHS": ptx})) == expected


@pytest.mark.parametrize(
    ("archs", "expected"),
    [
        ("", ["80 sm_80", "90 sm_90", "90 sm_100", "90 sm_120", "80 compute_80"]),
        ("75 86 89 100a 103", ["75 sm_75", "80 sm_86", "89 sm_89", "100a sm_100a", "90 sm_103", "75 compute_75"]),
    ],
)
def test_targets_of_the_same_text_share_its_ptx(archs: str, expected: list[str]) -> None:
    flags = fatbins.targets({"CUDA_ARCHS": archs}).flags
    assert flags == ["-gencode=arch=compute_{},code={}".format(*each.split()) for each in expected]


def test_where_the_text_of_device_code_changes() -> None:
    """PTX is shared between architectures only if no line of the text tells them from each other."""
    compared = {
        (operator, int(value) // 10)
        for path in CUDA.iterdir()
        for operator, value in re.findall(r"__CUDA_ARCH__\s*([<>=!]+)\s*(\d+)", path.read_text(encoding="utf-8"))
    }
    assert compared == {(">=", text) for text in fatbins.TEXTS}
    for path in CUDA.iterdir():  # nothing else is asked: families, features, and what CUDA's headers define of them
        assert not re.search(r"__CUDA_ARCH_\w+__|__CUDA_(ARCH_)?FEAT", path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize(
    ("archs", "ptx", "got"), [("hopper", "", "hopper"), ("90", "9", "'9'"), ("none", "none", "both")]
)
def test_targets_that_are_none(archs: str, ptx: str, got: str) -> None:
    with pytest.raises(BuildError, match=got):
        fatbins.targets({"CUDA_ARCHS": archs, "CUDA_PTX_ARCHS": ptx})


@pytest.fixture
def tree(tmp_path: Path) -> tuple[Path, Path]:
    """A source that includes a header, and the header's folder."""
    include = tmp_path / "include"
    include.mkdir()
    (include / "kvbm.h").write_text("// one\n")
    source = tmp_path / "kernels_00.cu"
    source.write_text('#include "kvbm.h"\n__global__ void k() {}\n')
    return source, include


def test_nothing_changed_nothing_compiled(tmp_path: Path, tree: tuple[Path, Path]) -> None:
    """Equal inputs give the same file; each change of an input that affects the output gives it another name."""
    source, include = tree
    script = fake(tmp_path / "bin")
    compiler = nvcc.find(environment(CUDACXX=script), [])
    target = fatbins.targets({"CUDA_ARCHS": "90"})
    out = tmp_path / "out"
    first = fatbins.fatbin(source, include, out, compiler, target)
    assert first == fatbins.fatbin(source, include, out, compiler, target) and calls(script) == 1
    flags = first.read_bytes()
    assert b"-gencode=arch=compute_90,code=sm_90" in flags and b"--compress-mode=size" in flags
    names = {first}
    (include / "other.h").write_text("// it does not include this one\n")
    assert first == fatbins.fatbin(source, include, out, compiler, target) and calls(script) == 1
    (include / "kvbm.h").write_text("// two\n")
    names.add(fatbins.fatbin(source, include, out, compiler, target))
    source.write_text('#include "kvbm.h"\n__global__ void other() {}\n')
    names.add(fatbins.fatbin(source, include, out, compiler, target))
    names.add(fatbins.fatbin(source, include, out, compiler, fatbins.targets({"CUDA_ARCHS": "80"})))
    newer = nvcc.find(environment(CUDACXX=fake(tmp_path / "newer", release="13.1")), [])
    names.add(fatbins.fatbin(source, include, out, newer, target))
    assert len(names) == 5 and {path.name for path in out.iterdir()} == {path.name for path in names}


def test_another_place_for_the_same_compiler(tmp_path: Path, tree: tuple[Path, Path]) -> None:
    """A new build environment has its nvcc at another path: the existing output is reused."""
    scripts = [fake(tmp_path / name) for name in ("one", "two")]
    found = [nvcc.find(environment(CUDACXX=script), []) for script in scripts]
    target = fatbins.targets({"CUDA_ARCHS": "90"})
    made = {fatbins.fatbin(*tree, tmp_path / "out", compiler, target) for compiler in found}
    assert len(made) == 1 and [calls(script) for script in scripts] == [1, 0]


def test_a_failure_leaves_nothing_behind(tmp_path: Path, tree: tuple[Path, Path]) -> None:
    compiler = nvcc.find(environment(CUDACXX=fake(tmp_path / "bin", fails=True)), [])
    with pytest.raises(BuildError, match=r"nvcc 13\.0\.88 failed on kernels_00\.cu.*status 3") as info:
        fatbins.fatbin(*tree, tmp_path / "out", compiler, fatbins.targets({"CUDA_ARCHS": "90"}))
    assert "no such thing" in info.value.log and "kernels_00.cu" in info.value.command
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("left", [0, 7, 16, 40, -1])
def test_a_truncated_fatbin_is_no_hit(tmp_path: Path, tree: tuple[Path, Path], left: int) -> None:
    """A file cut at any byte is compiled again, and so is one with an additional byte."""
    script = fake(tmp_path / "bin")
    compiler, target = nvcc.find(environment(CUDACXX=script), []), fatbins.targets({"CUDA_ARCHS": "90"})
    made = fatbins.fatbin(*tree, tmp_path / "out", compiler, target)
    whole = made.read_bytes()
    made.write_bytes(whole[:left] if left >= 0 else whole + b"x")
    assert fatbins.fatbin(*tree, tmp_path / "out", compiler, target) == made
    assert made.read_bytes()[:10] == whole[:10] and fatbins._is_whole(made) and calls(script) == 2


def test_processes_of_one_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two containers share a build folder: each writes to a separate file, and the last one's file is complete."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    path = tmp_path / "file"
    with replacing(path) as one, replacing(path) as other:
        assert one != other
        one.write_text("one")
        other.write_text("other")
    assert path.read_text() == "one" and list(tmp_path.iterdir()) == [path]
