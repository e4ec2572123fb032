"""New layouts at run time: kernels compiled by NVRTC, their cache, and the fallback without NVRTC.

NVRTC needs no GPU.  The fake driver (programs/new_layouts.py) launches its output by walking the loop nest, so everything but the
code itself is tested here.  The tests at the end run the code.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import fatbins
import kvbm
import oracle
import strategies
from few import few
from kvbm import _core
from kvbm.cli import app, doctor
from kvbm.compile import codegen, prepare
from kvbm.compile import nvrtc as runtime
from kvbm.layout import spec
from kvbm.planner import kernel_forms, loopnest
from kvbm.planner.loopnest import Mode
from memory import aligned, numpy_views, placed
from processes import FakeDriver

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parent
PROGRAMS = HERE / "programs"

#: Not in the catalogue, and of structures that nothing in it has.
NEW = {
    "rows": "b t/4/2 h/4 o t%4 h%4 t/4%2 l d",
    "tile": "[l] b o h/2 d/16 t/4 h%2 d%16 t%4",
    "words": "[l o] b h/4/2 t/8 h/4%2 d/32 h%4 d%32 t%8",
}

#: Of more modes than kernels have: inside a chunk, and that pick one.
DEEP = {
    "inside": "b t%2 t/2%2 t/4%2 t/8%2 t/16 h%2 h/2%2 h/4 o l d",
    "inside_tiles": "[l] b t%2 t/2%2 t/4%2 d t/8%2 o h%2 h/2%2 h/4 t/16",
    "outside": "[t%2 t/2%2 t/4%2 h%2 h/2%2 l] b t/8%2 t/16 h/4 o d",
    "outside_tiles": "[t%2 t/2%2 t/4%2 h%2 h/2%2 l] b d t/8%2 h/4 o t/16",
    "both": "[t%2 t/2%2 t/4%2 t/8%2 t/16 h%2 h/2%2 h/4 l d%2 d/2%2 d/4] b o",
}
ABSURD = "[t%2 t/2%2 t/4%2 t/8%2 t/16%2 t/32%2 t/64 h%2 h/2%2 h/4%2 h/8%2 h/16%2 h/32%2 h/64 l%2 l/2 d] b o"


def declared(order: str, name: str = "mine") -> kvbm.Layout:
    return spec.parse(f'order: "{order}"\n', name=name)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, in a process that has compiled nothing yet."""
    monkeypatch.setenv("KVBM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("KVBM_NVRTC", raising=False)
    monkeypatch.setattr(runtime, "_found", None)
    monkeypatch.setattr(runtime, "_known", {})
    runtime._warn_unusable.cache_clear()
    return tmp_path / "cache" / "nvrtc"


def _has_nvrtc() -> bool:
    try:
        return bool(runtime._ask())
    except kvbm.BuildError:
        return False


needs_nvrtc = pytest.mark.skipif(not _has_nvrtc(), reason="NVRTC was not found: pip install 'kvbm-layouts[runtime]'")


# ---- text and compiler ---------------------------------------------------------------------------------------------


@pytest.mark.slow  # half a second
def test_the_text_is_the_build_s() -> None:
    """The same line of code, with the same loop nest above it."""
    files = codegen.generate([kvbm.load(name) for name in ("nhd", "universal", "vllm/paged_attn_v0")])
    text = "".join(text for name, text in files.items() if name.endswith(".cu"))
    names = [line.split("\t")[0] for line in files["manifest.txt"].splitlines()]
    assert any("__" in name for name in names)
    for name in names:
        *comments, line = codegen.source(name).splitlines()[5:]
        assert line == re.search(rf"^KVBM_KERNEL\({name},.*$", text, re.MULTILINE)[0]  # type: ignore[index]
        assert comments and f"{comments[0]}\n" in text


@pytest.mark.slow  # compiles with NVRTC
@needs_nvrtc
@pytest.mark.parametrize(
    "name",
    ["copy_o3_w8", "rows_o4_i8_w1", "tile_o2_r5_e1_w16", "tile_o4_r6_e2_w2", "few_tile_o0_r0_e4_w16",
     "rows_o1_i7_w16__tile_o1_r1_e2_w16"],
)  # fmt: skip
def test_every_kind_compiles(name: str, cache: Path) -> None:
    code, origin = runtime.cubin(name, 90)
    assert code[:4] == b"\x7fELF" and b".text." + name.encode() in code
    assert (origin.cached, origin.arch) == (False, 90) and origin.seconds > 0
    assert "compiled it for sm_90" in str(origin) and origin.path in str(origin)


@needs_nvrtc
def test_architectures() -> None:
    compiler = runtime._ask()
    assert 90 in compiler.archs and Path(compiler.path).is_file()
    some = runtime.Compiler("13.0", "", 0, (80, 86, 90, 100))
    found = [some.arch(capability) for capability in (80, 86, 89, 90, 75, 100, 103, 120)]
    assert found == [80, 86, 86, 90, None, 100, 100, None]


@needs_nvrtc
def test_a_gpu_that_nvrtc_does_not_know(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_capability", lambda _: 990)
    assert "sm_990" in runtime.why_not(0) and "runtime" in runtime.why_not(0)
    with pytest.raises(kvbm.BuildError, match="sm_990"):
        runtime.kernel("rows_o3_i7_w16", 0)


@pytest.mark.slow  # half a second
@needs_nvrtc
def test_errors_show_log_and_source(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC's message, the place, and the source with line numbers; nothing is cached."""
    broken = codegen.source("rows_o3_i7_w16").replace("Rows<3, 7", "Rows<3, nonsense")
    monkeypatch.setattr(runtime, "source", lambda _: broken)
    with pytest.raises(kvbm.BuildError) as caught:
        runtime.cubin("rows_o3_i7_w16", 90)
    text = str(caught.value)
    line = 1 + broken.splitlines().index(next(x for x in broken.splitlines() if "nonsense" in x))
    assert re.search(rf"rows_o3_i7_w16\.cu\({line}\): error: .*nonsense", text), text
    assert re.search(rf"^ +{line} \| KVBM_KERNEL\(rows_o3_i7_w16, Rows<3, nonsense", text, re.MULTILINE), text
    assert "KVBM_NVRTC=0" in text and "NVRTC 13" in text
    assert caught.value.log in text and "sm_90" in caught.value.command
    assert not list(cache.glob("*.cubin"))


def test_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBM_NVRTC", "0")
    assert runtime.why_not(0) == "KVBM_NVRTC=0 turns compiling at run time off"


def test_not_there(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install; NVRTC is searched for once."""
    from cuda import pathfinder

    asked = []

    def nothing(name: str) -> Any:
        asked.append(name)
        raise pathfinder.DynamicLibNotFoundError("libnvrtc.so.13 is nowhere\nand more of it")

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", nothing)
    for _ in range(2):
        reason = runtime.why_not(0)
        assert "libnvrtc.so.13 is nowhere" in reason and "pip install 'kvbm-layouts[runtime]'" in reason
        assert "and more" not in reason
    with pytest.raises(kvbm.BuildError, match="is nowhere"):
        runtime.cubin("rows_o3_i7_w16", 90)
    assert asked == ["nvrtc"]


# ---- the cache -----------------------------------------------------------------------------------------------------

NAME = "rows_o3_i7_w16"


@pytest.fixture
def compiled(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The requests to a compiler that takes no time."""
    asked: list[str] = []

    def quickly(name: str, arch: int, compiler: runtime.Compiler) -> bytes:
        asked.append(name)
        head = b"\x7fELF" + bytes(14) + (190).to_bytes(2, "little")
        return head + f"{name} {arch} {compiler.version}".encode() * 50

    monkeypatch.setattr(runtime, "_compile", quickly)
    monkeypatch.setattr(runtime, "_found", runtime.Compiler("13.0", "/there/libnvrtc.so.13", 99, (80, 90)))
    return lambda: asked


def entry(folder: Path) -> Path:
    [path] = folder.glob("*.cubin")
    return path


def test_the_cache_gives_back_what_was_compiled(compiled: Any, cache: Path) -> None:
    first, fresh = runtime.cubin(NAME, 90)
    second, origin = runtime.cubin(NAME, 90)
    assert first == second and compiled() == [NAME]
    assert (fresh.cached, origin.cached) == (False, True)
    assert Path(origin.path) == entry(cache) and "came from the cache" in str(origin)
    assert entry(cache).stat().st_mode & 0o77 == 0 and cache.stat().st_mode & 0o77 == 0, (
        "others may not write what is run"
    )


def test_everything_that_changes_a_bit_is_in_the_key(
    compiled: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = runtime.Compiler("13.0", "/there/libnvrtc.so.13", 99, (80, 90))
    keys = [runtime._key(NAME, 90, compiler)]
    keys += [runtime._key(NAME, 80, compiler), runtime._key("rows_o3_i7_w8", 90, compiler)]
    keys += [runtime._key(NAME, 90, replace(compiler, **other)) for other in ({"version": "13.1"}, {"size": 98})]
    assert runtime._key(NAME, 90, replace(compiler, path="/elsewhere")) == keys[0]
    changes: list[tuple[Any, str, Any]] = [
        (runtime, "source", lambda name: codegen.source(name) + "\n"),
        (runtime, "_OPTIONS", {**runtime._OPTIONS, "std": "c++20"}),
        (kvbm._version, "__version__", "99"),
    ]
    for where, name, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, value)
            keys.append(runtime._key(NAME, 90, compiler))
    folder = cache / "headers"
    shutil.copytree(codegen.cuda_dir(), folder)
    monkeypatch.setattr(runtime, "cuda_dir", lambda: folder)
    included = fatbins.sources(folder / "permute.cuh", folder)
    assert {"permute.cuh", "words.cuh", "planes.cuh", "kvbm.h"} <= {path.name for path in included}
    for name in [path.name for path in included]:
        (folder / name).write_bytes((folder / name).read_bytes() + b"\n")
        runtime._headers.cache_clear()
        keys.append(runtime._key(NAME, 90, compiler))
    runtime._headers.cache_clear()
    assert len(set(keys)) == len(keys)


def _spoil(data: bytes, how: str) -> bytes:
    cubin = data[len(runtime._MAGIC) + 64 :]
    if how.startswith("cut"):
        return data[: int(how[3:])]
    if how.startswith("flip"):
        at = len(data) * int(how[4:]) // 100
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    return {
        "empty": b"",
        "text": b"#!/bin/sh\n",
        "bare": cubin,
        "longer": data + b"x",
        "another": runtime._MAGIC + bytes(32) + data[len(runtime._MAGIC) + 32 :],
        "last byte gone": data[:-1],
    }[how]


@pytest.mark.parametrize(
    "how",
    ["empty", "text", "bare", "longer", "another", "last byte gone", "cut5", "cut13", "cut40", "cut80", "cut90", "cut200", "flip1",
     "flip3", "flip50", "flip99"],
)  # fmt: skip
def test_a_poisoned_file_is_replaced(how: str, compiled: Any, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    good, _ = runtime.cubin(NAME, 90)
    path = entry(cache)
    whole = path.read_bytes()
    path.write_bytes(_spoil(whole, how))
    assert path.read_bytes() != whole
    with caplog.at_level(logging.WARNING):
        again, origin = runtime.cubin(NAME, 90)
    assert again == good and not origin.cached and compiled() == [NAME, NAME]
    assert [str(path) in r.getMessage() and "replaced" in r.getMessage() for r in caplog.records] == [True]
    assert path.read_bytes() == whole and runtime.cubin(NAME, 90)[1].cached
    assert [p.name for p in cache.iterdir()] == [path.name], "no temporary file is left"


def test_a_file_that_is_whole_but_no_gpu_code(compiled: Any, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file with the right digest that is a host program is refused as a kernel."""
    import hashlib

    good, _ = runtime.cubin(NAME, 90)
    path, program = entry(cache), Path(_core.__file__).read_bytes()[:4096]
    key = path.read_bytes()[len(runtime._MAGIC) :][:32]
    for poison in (program, b"MZ" + bytes(100), b""):
        digest = hashlib.sha256(key + poison).digest()
        path.write_bytes(runtime._MAGIC + key + digest + poison)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert runtime.cubin(NAME, 90)[0] == good
        assert "no code for a GPU" in caplog.text


@pytest.mark.parametrize("how", ["group", "all", "owner", "file"])
def test_a_cache_that_others_may_write_is_not_run(
    how: str, compiled: Any, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A digest shows that a file is complete, not who wrote it: files that others could have written are compiled again."""
    good, _ = runtime.cubin(NAME, 90)
    path = entry(cache)
    before = path.read_bytes()
    if how == "owner":
        monkeypatch.setattr("os.geteuid", lambda: path.stat().st_uid + 1)
        if path.stat().st_uid == 0:
            os.chown(cache, 12345, -1)
    else:
        (path if how == "file" else cache).chmod({"group": 0o770, "all": 0o777, "file": 0o666}[how])
    with caplog.at_level(logging.WARNING):
        again, origin = runtime.cubin(NAME, 90)
    assert again == good and not origin.cached and compiled() == [NAME, NAME]
    assert ("belongs to user" if how == "owner" else "can be written by others") in caplog.text
    assert "code from there is not run" in caplog.text and path.read_bytes() == before
    assert bool(origin.path) == (how == "file"), "one file is replaced, into a folder nothing is written"


def test_a_folder_in_the_place_of_a_file(compiled: Any, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    good, _ = runtime.cubin(NAME, 90)
    path = entry(cache)
    path.unlink()
    (path / "full").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        again, origin = runtime.cubin(NAME, 90)
    assert again == good and origin.path == "" and caplog.records
    assert not list(cache.glob(".*")), "no temporary file is left"


def test_a_folder_that_cannot_be_written(
    compiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kernels are compiled without a cache; this is reported once, for any number of kernels."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVBM_CACHE_DIR", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        for name in (NAME, NAME, "rows_o3_i7_w8"):
            code, origin = runtime.cubin(name, 90)
            assert name.encode() in code and origin.path == "" and "not kept" in str(origin)
    assert compiled() == [NAME, NAME, "rows_o3_i7_w8"]
    assert [str(tmp_path / "file") in r.getMessage() for r in caplog.records] == [True]


def test_no_home(compiled: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("KVBM_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with caplog.at_level(logging.WARNING):
        assert [runtime.cubin(NAME, 90)[1].path for _ in range(2)] == ["", ""]
    assert len(caplog.records) == 1 and "home" in caplog.text


@needs_nvrtc
@pytest.mark.slow
def test_two_processes_at_once(cache: Path) -> None:
    """Both compile, or one finds the other's result: the same code, one complete file.  The next process compiles nothing."""
    import time

    def start(at: float) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, PROGRAMS / "compile_at.py", str(at)], stdout=subprocess.PIPE, text=True, cwd="/")

    at = time.time() + 2
    both = [start(at) for _ in range(2)]
    said = [process.communicate(timeout=120)[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert said[0][0] == said[1][0]
    assert len(list(cache.glob("*.cubin"))) == 1 and not list(cache.glob(".*"))
    late = start(0).communicate(timeout=120)[0].split()
    assert late == [said[0][0], "True", "False", "False", "False"], "a kernel from the cache costs no import of CUDA"


@needs_nvrtc
@pytest.mark.parametrize(
    "poison",
    [
        b"", b"{", b"[]", b"null", b'{"path": 3}', b'{"path": "/etc/passwd", "size": 1, "mtime": 1, "version": "1.0", "archs": []}',
        "version", "archs", "mtime",
    ],
    ids=repr,
)  # fmt: skip
def test_a_note_of_the_compiler_that_is_wrong(poison: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong cached record of NVRTC's place and version is ignored, and NVRTC is queried again."""
    right = runtime.find()
    [note] = cache.glob("compiler-*.json")
    if isinstance(poison, str):
        data = json.loads(note.read_bytes())
        data[poison] = {"version": "13.0; rm", "archs": ["90"], "mtime": 1}[poison]
        poison = json.dumps(data).encode()
    note.write_bytes(poison)
    monkeypatch.setattr(runtime, "_found", None)
    assert runtime.find() == right and json.loads(note.read_bytes())["version"] == right.version


def test_threads_compile_a_kernel_once(compiled: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_capability", lambda _: 90)
    quickly, barrier = runtime._compile, threading.Barrier(4)

    def slowly(*args: Any) -> bytes:
        threading.Event().wait(0.05)
        return quickly(*args)

    def need(name: str) -> runtime.Origin:
        barrier.wait()
        return runtime.kernel(name, 0)

    monkeypatch.setattr(runtime, "_compile", slowly)
    names = ["few_tile_o3_r5_e2_w16", "few_tile_o3_r5_e4_w16"] * 2
    with ThreadPoolExecutor(4) as pool:
        origins = list(pool.map(need, names))
    assert sorted(compiled()) == sorted(set(names)) and len(set(map(id, origins))) == 2
    assert all(_core.kernel_index(name) >= len(_core.kernel_names()) for name in names)
    assert not set(names) & set(_core.kernel_names())


# ---- the registry --------------------------------------------------------------------------------------------------


def test_what_cannot_be_added() -> None:
    good = ("rows", 2, 3, 0, 16, False)
    for bad in [
        ("rows", 5, 3, 0, 16, False), ("rows", -1, 3, 0, 16, False), ("rows", 2, 0, 0, 16, False), ("rows", 2, 9, 0, 16, False),
        ("rows", 2, 3, 0, 3, False), ("rows", 2, 3, 0, 32, False), ("tile", 2, 7, 2, 16, False), ("tile", 2, 1, 3, 16, False),
        ("tile", 2, 1, 2, 4, False), ("tile", 2, -1, 2, 16, False),
    ]:  # fmt: skip
        with pytest.raises(kvbm.CudaError, match="adding the kernel 'bad'"):
            _core.add_kernel("bad", [bad], b"code", 90)
    with pytest.raises(kvbm.CudaError, match="adding the kernel 'bad'"):
        _core.add_kernel("bad", [(*good[:5], True)] * 2, b"code", 90)
    for forms, code in (([], b"code"), ([good] * 9, b"code"), ([good], b"")):
        with pytest.raises(kvbm.PlanError, match="'bad'"):
            _core.add_kernel("bad", forms, code, 90)
    with pytest.raises(kvbm.PlanError, match="was built"):
        _core.add_kernel(_core.kernel_names()[0], [good], b"code", 90)
    assert _core.kernel_index("bad") == -1


def test_the_registry_is_full() -> None:
    """An error with advice, in a separate process; numbering continues, and known names accept further architectures."""
    done = subprocess.run([sys.executable, PROGRAMS / "fill_registry.py"], capture_output=True, text=True, check=True)
    assert "KVBM_TOO_MANY" in done.stdout and "KVBM_LAYOUTS" in done.stdout


def test_a_run_time_kernel_has_no_host_half(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_capability", lambda _: 90)
    name = "few_tile_o2_r5_e2_w16"  # a name that no other test of this process asks for: its code is none
    runtime.kernel(name, 0)
    copy = _core.Copy(name, [((0, 0, 0, 0), [], [(1, 16, 16)])], (1, 0), (1, 0))
    table = _core.Table(np.zeros(1, np.uint64))
    with pytest.raises(kvbm.CudaError, match=f"running {name} on the host"):
        copy.run(table, table, _core.Pairs(None, None, 1, 1))


@pytest.mark.slow
def test_run_time_kernels_prepare_as_built_ones(tmp_path: Path) -> None:
    """The grid and every prepared field, for random nests, for all structures of some layouts and all kinds."""
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None or not (ROOT / "cuda" / "runtime.cpp").is_file():
        pytest.skip("no C++ compiler, or no checkout")
    names = sorted(
        codegen.kernels(
            [
                kvbm.load(name)
                for name in ("nhd", "vllm/paged_attn_v0", "vllm/aiter_shuffle", "hf/dynamic_cache", "vllm/LBHNC")
            ]
        )
    )
    # Of records and pages there are general kernels, which are built, as all that digest or cast are.
    built = ("record_", "page_", "digest_", "sum_", "cast_", "few_rows_")
    names = [name for name in names if not name.startswith(built)]
    parsed = {name: kernel_forms.parse_kernel(name) for name in names}
    assert {(f.kind, f.sm_limited, len(forms)) for forms in parsed.values() for f in forms} == {
        ("copy", False, 1), ("copy", False, 2), ("rows", False, 1), ("tile", False, 1), ("tile", False, 2),
        ("tile", True, 1),
    }  # fmt: skip
    table = "\n".join(f"  KVBM_KERNEL({name}, 0, {len(parsed[name])}, {codegen._types(name)})" for name in names)
    forms = "\n".join(
        f"  {{{len(of)}, {{"
        + ", ".join(
            f"{{{'KVBM_TILE' if f.kind == 'tile' else 'KVBM_ROWS'}, {f.outer}, {f.inner}, {f.element}, {f.word}, "
            f"{int(f.sm_limited)}}}"
            for f in of
        )
        + "}},"
        for of in parsed.values()
    )
    (tmp_path / "kernels.inc").write_text(table)
    (tmp_path / "forms.inc").write_text(forms)
    # Not optimised: to compile it takes longer than to run it.
    command = [compiler, "-std=c++17", f"-I{ROOT / 'cuda'}", f"-I{tmp_path}", "-o", tmp_path / "prepare", PROGRAMS / "prepare.cpp"]
    subprocess.run(command, check=True)
    done = subprocess.run([tmp_path / "prepare"], capture_output=True, text=True, check=False)
    agreed, refused = map(int, re.findall(r"(\d+) (?:agreed|refused)", done.stdout) or (0, 0))
    assert done.returncode == 0, done.stdout
    assert agreed > 100 * len(names) and refused > len(names), done.stdout


# ---- more modes than a kernel has ----------------------------------------------------------------------------------


@st.composite
def parts(draw: Any) -> loopnest.Part:
    """Any loop nest, mostly with too many modes."""
    step = st.integers(-(2**40), 2**40)
    outer = [
        Mode(draw(st.integers(2, 3)), draw(step), draw(step), draw(st.integers(0, 9)), draw(st.integers(0, 9)))
        for _ in range(draw(st.integers(0, 7)))
    ]
    inner = [Mode(2, draw(st.integers(0, 2**31)), draw(st.integers(0, 2**31))) for _ in range(draw(st.integers(0, 5)))]
    inner += [Mode(1, draw(st.integers(0, 2**31)), draw(st.integers(0, 2**31))) for _ in range(draw(st.integers(0, 6)))]
    run = Mode(draw(st.sampled_from([1, 2, 4, 16, 24])), 1, 1)
    if draw(st.booleans()):  # two that span a tile, somewhere among them
        for side in (Mode(2, run.extent, 999), Mode(2, 777, run.extent)):
            inner.insert(draw(st.integers(0, len(inner))), side)
    start = [draw(st.integers(0, 99)) for _ in range(4)]
    return loopnest.Part(*start, tuple(outer), (run, *inner), (0, 0), (0, 0))


def moved(part: loopnest.Part) -> Counter[tuple[int, int, int, int]]:
    """Source and destination offsets of each run of a part."""
    at = [(part.src_offset, part.dst_offset, part.src_table_offset, part.dst_table_offset)]
    for mode in (*part.outer, *part.inner[1:]):
        step = (mode.src, mode.dst, mode.src_table, mode.dst_table)
        at = [tuple(a + i * b for a, b in zip(x, step, strict=True)) for x in at for i in range(mode.extent)]
    return Counter(at)


@pytest.mark.slow  # compiles with NVRTC
@given(parts(), st.sampled_from(["rows", "tile"]))
@strategies.cases(200)
def test_pieces_are_the_whole(part: loopnest.Part, kind: str) -> None:
    """Every run once, with no more modes than a kernel has, in pieces of one structure; parts that fit are not changed."""
    kind = kind if part.spans else "rows"
    most = kernel_forms.MAX_INNER + (kind == "tile")
    pieces = part.fit(kind)
    assert sum((moved(piece) for piece in pieces), Counter()) == moved(part)
    assert all(len(piece.outer) <= kernel_forms.MAX_OUTER and len(piece.inner) <= most for piece in pieces)
    assert {(piece.outer, piece.inner) for piece in pieces} == {(pieces[0].outer, pieces[0].inner)}
    if len(part.outer) <= kernel_forms.MAX_OUTER and len(part.inner) <= most:
        assert pieces == (part,)
    if kind == "tile":
        assert all(piece.spans == part.spans for piece in pieces)
    extents = sorted(mode.extent for mode in part.outer)
    if len(part.inner) <= most and len(extents) > kernel_forms.MAX_OUTER:
        assert len(pieces) == np.prod(extents[: -kernel_forms.MAX_OUTER]), "the shortest are peeled off"


DEEP_SHAPE = kvbm.BlockShape(nl=4, no=2, nh=8, nt=32, hd=8, dtype="uint16")
PARTNERS = ("nhd", "universal", "vllm/LBHNC", "hf/dynamic_cache")


class Side:
    """A pool of a layout that is declared here, on a guarded buffer; on the host, or where `views` puts it."""

    def __init__(self, order: str, blocks: int, *, dst: bool = False, align: int = 0, shape: Any = DEEP_SHAPE) -> None:
        self.layout, self.shape = declared(order), shape
        self.arena = placed(oracle.Order(order), shape, blocks).layout_bytes(align)
        self.before = (oracle.dest_bytes if dst else oracle.source_bytes)(self.arena, 0)
        self.buffer = aligned(self.before)
        self.pool = kvbm.Pool(self.layout, shape, numpy_views(self.arena, self.buffer, shape.dtype))


ORDERS = {name: kvbm.load(name).order_text for name in PARTNERS}


def sides(one: str, other: str, turn: int, shape: Any = DEEP_SHAPE) -> tuple[Side, Side]:
    align = (0, 2, 8)[turn % 3]
    return Side(one, 4, align=align, shape=shape), Side(other, 5, dst=True, align=(align * 2) % 24, shape=shape)


@pytest.mark.parametrize("name", few([*DEEP, *NEW], 5))
def test_any_nest_converts_on_the_host(name: str) -> None:
    """Bit-exact in both directions, with one launch per piece; guards and other blocks unchanged."""
    mine, turn = {**DEEP, **NEW}[name], 0
    shape = DEEP_SHAPE if name in DEEP else replace(DEEP_SHAPE, hd=64)
    deep = []
    for partner in PARTNERS:
        for orders in ((mine, ORDERS[partner]), (ORDERS[partner], mine)):
            turn += 1
            src, dst = sides(*orders, turn, shape)
            kvbm.convert(src.pool, dst.pool, [3, 0, -1, 2], [1, 4, 0, 2])
            want = oracle.expected_bytes(src.arena, dst.arena, src.before, dst.before, [3, 0, 2], [1, 4, 2])
            assert np.array_equal(dst.buffer, want), (orders, oracle.explain(dst.arena, dst.buffer, want))
            assert np.array_equal(src.buffer, src.before)
            made = kvbm.plan(src.layout, dst.layout, shape, num_blocks=(4, 5))
            deep.append(
                any(len(part.outer) > kernel_forms.MAX_OUTER or len(part.inner) > kernel_forms.MAX_INNER for part in made.parts)
            )
            copies = prepare.prepare(made, src.pool.alignment, dst.pool.alignment)
            assert len(copies) == sum(len(part.fit(part.kind)) for part in made.parts)
    assert any(deep) == (name in DEEP)


def test_explain_tells_of_pieces() -> None:
    shape = DEEP_SHAPE
    for name, words in (
        ("inside", "the slowest pick chunks instead"),
        ("outside", "the shortest are peeled off, which takes 8 launches"),
    ):
        made = kvbm.plan(declared(DEEP[name]), kvbm.load("nhd"), shape)
        [part] = made.parts
        text = made.explain()
        assert words in text
        assert (
            f"at most 4 modes that pick a chunk and 8 inside, and this copy {len(part.outer)} and {len(part.inner)}"
            in text
        )
    assert "Kernels have at most" not in kvbm.plan(kvbm.load("universal"), kvbm.load("nhd"), shape).explain()


@pytest.mark.slow
def test_absurd_nests_are_refused() -> None:
    """The error is raised before anything is copied; a plan can still be explained."""
    shape = kvbm.BlockShape(nl=4, no=2, nh=128, nt=128, hd=2, dtype="uint16")
    src, dst = Side(ABSURD, 1, shape=shape), Side(ORDERS["nhd"], 1, dst=True, shape=shape)
    with pytest.raises(kvbm.MissingKernelError, match=r"\d{4,} launches \(at most 4096\)"):
        kvbm.convert(src.pool, dst.pool)
    assert np.array_equal(dst.buffer, dst.before)
    assert "launches (at most 4096)" in kvbm.plan(src.layout, dst.layout, shape, num_blocks=1).explain()


def test_a_build_has_the_pieces_kernels() -> None:
    """`kvbm codegen` for a layout with too many modes generates the kernels for its pieces."""
    names = set(codegen.kernels([declared(DEEP["outside"]), kvbm.load("nhd")]))
    big = kvbm.BlockShape(nl=3, no=2, nh=32, nt=64, hd=11, dtype="bfloat16")
    for pair in itertools.permutations([declared(DEEP["outside"]), kvbm.load("nhd")]):
        made = kvbm.plan(*pair, big, num_blocks=(13, 17))
        assert made.forms()[0].outer > kernel_forms.MAX_OUTER
        assert {form.name for form in made.fit().forms()} <= names


# ---- what is said --------------------------------------------------------------------------------------------------


def test_the_host_says_what_stands_in() -> None:
    """No kernel is compiled for the host: the general one runs, and the text says how to get a better one."""
    src, dst = sides(NEW["rows"], ORDERS["nhd"], 0, replace(DEEP_SHAPE, hd=64))
    text = kvbm.Transfer(src.pool, dst.pool).explain()
    [wanted] = kvbm.plan(src.layout, dst.layout, src.shape, num_blocks=(4, 5)).kernels()
    assert wanted not in _core.kernel_names()
    assert re.search(
        rf"rows_o\d_i\d_w16 runs in place of {wanted}, which is not built in: it has \d+ modes? more than needed",
        text,
    )
    assert "KVBM_LAYOUTS" in text and "runtime" not in text
    built = kvbm.Transfer(Side(ORDERS["universal"], 4).pool, Side(ORDERS["nhd"], 5, dst=True).pool).explain()
    assert "in place of" not in built and "KVBM_LAYOUTS" not in built


def test_doctor(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def told() -> dict[str, tuple[str, str]]:
        return {what: (mark, text) for mark, what, text in doctor.findings()}

    monkeypatch.setattr(runtime, "_found", runtime.Compiler("13.7", "/there/libnvrtc.so.13", 1, (90,)))
    assert told()["NVRTC"] == ("ok", f"13.7, /there/libnvrtc.so.13; 0 kernels in {cache}")
    cache.mkdir(parents=True)
    (cache / "one.cubin").touch()
    assert "1 kernel in" in told()["NVRTC"][1]
    monkeypatch.setenv("KVBM_NVRTC", "0")
    assert told()["NVRTC"] == (
        "note",
        "KVBM_NVRTC=0 turns compiling at run time off: new structures run on general kernels",
    )
    monkeypatch.delenv("KVBM_NVRTC")
    monkeypatch.setattr(runtime, "_found", "NVRTC was not found (gone): pip install it")
    assert told()["NVRTC"] == (
        "note",
        "NVRTC was not found (gone): pip install it: new structures run on general kernels",
    )


def test_plan_tells_what_is_not_built(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(order: str) -> str:
        (tmp_path / "mine.yaml").write_text(f'order: "{order}"\n')
        done = CliRunner().invoke(
            app.main,
            ["plan", str(tmp_path / "mine.yaml"), "nhd", "--shape", "nl=4,no=2,nh=8,nt=32,hd=64,dtype=bfloat16"],
        )
        assert done.exit_code == 0, done.output
        return " ".join(done.output.split())

    monkeypatch.setattr(runtime, "_found", runtime.Compiler("13.7", "/there/libnvrtc.so.13", 1, (90,)))
    text = told(NEW["rows"])
    assert "Not built in: rows_o2_i6_w16. On a GPU, NVRTC 13.7 compiles what is missing at first use." in text
    assert "KVBM_LAYOUTS=DIR" in text
    assert "Not built in: rows_o4_i4_w16." in told(DEEP["outside"])
    assert "Not built in" not in told(ORDERS["universal"])
    monkeypatch.setenv("KVBM_NVRTC", "0")
    assert "A general kernel of more modes runs in its place (KVBM_NVRTC=0 turns" in told(NEW["rows"])


# ---- on a GPU that is not one --------------------------------------------------------------------------------------


@pytest.fixture
def launched(fake_gpu: FakeDriver, tmp_path: Path) -> Callable[..., str]:
    """Runs programs of new_layouts.py with a folder of layouts, and with the test's own cache folder."""
    folder = tmp_path / "layouts"
    folder.mkdir()
    for name, order in (*NEW.items(), *DEEP.items()):
        (folder / f"{name}.yaml").write_text(f'order: "{order}"\n')
    (folder / "halves.yaml").write_text('order:\n  k: "[l o] b h/2 t/4 h%2 t%4 d"\n  v: "[l o] b d/8 t/4 h d%8 t%4"\n')

    def run(program: str, *arguments: object, **knobs: str) -> str:
        usual = {"KVBM_NVRTC": "1", "KVBM_TUNE": "0", "KVBM_CACHE_DIR": str(tmp_path / "cache")}
        return fake_gpu(f"new_layouts.{program}", str(folder), *arguments, **(usual | knobs))

    return run


def test_a_new_layout_at_once(launched: Any, tmp_path: Path) -> None:
    """From a YAML to a conversion: compiled by the first process, cached for the next; one launch of exactly its kernel."""
    first, second = (
        [line.split() for line in launched("every", [*NEW, "halves"], nvrtc).splitlines()[:8]]
        for nvrtc in ("compiles", "cached")
    )
    assert [line[0] for line in first] == [line[0] for line in second] and len(first) == 8
    assert all("__" in line[0] for line in first[-2:]), "K and V in one launch"
    for compiled, cached in zip(first, second, strict=True):
        assert compiled[1:] == ["1", "True", "True", "False", "False"], compiled
        assert cached[1:] == ["1", "True", "False", "True", "False"], cached
    files = {path.name.partition("-")[0] for path in (tmp_path / "cache" / "nvrtc").glob("*.cubin")}
    assert files == {line[0] for line in first}, "and nothing else: what no batch takes is not compiled"


@pytest.mark.parametrize("why", ["off", "missing"])
def test_without_nvrtc_the_general_kernels_run(launched: Any, why: str) -> None:
    """The same bytes, no error; `explain` names the kernel, its cost and what to do."""
    lines = launched("every", [*NEW], why, **({"KVBM_NVRTC": "0"} if why == "off" else {})).splitlines()
    for line in lines[:6]:
        assert line.split()[2:] == ["False", "False", "False", "True"], line
    text = "\n".join(lines[6:])
    if why == "off":
        assert "KVBM_NVRTC=0 turns compiling at run time off." in text
    else:
        assert "NVRTC was not found (" in text and "pip install 'kvbm-layouts[runtime]'." in text
    assert "not built in: it has" in text and "more than needed, and each costs every word a division" in text
    assert "KVBM_LAYOUTS=DIR" in text


def test_more_modes_are_more_launches(launched: Any) -> None:
    """One launch per piece, by kernels of the pieces' structure; the copy engine is not used."""
    out = launched("more_modes_are_more_launches")
    lines = out.splitlines()
    assert lines[0].startswith("8 ")
    assert "direct is 8 launches of rows_o4_i4_w16: it reads and writes" in out and "takes 8 launches" in out
    assert lines[-5] == "8 3"
    assert (
        "strategy='engine': the loop nest has more modes than the copy engine supports; use strategy='direct'"
        in lines[-4]
    )
    assert lines[-3:-1] == [f"Transfer(outside → nhd, d2d, strategy={how})" for how in ("staged", "direct")]
    assert lines[-1] == "1 True", "what fits after all is given to the engine, too"


def test_code_for_another_gpu(launched: Any) -> None:
    """Kernels use code for the device's architecture or one that it can run; without such code an error names the kernel."""
    out = launched("code_for_another_gpu")
    assert re.match(r"KVBM_NOT_BUILT .*rows_o3_i7_w16", out)
    assert re.search(r"kernel \d+: expected 0 to \d+\n$", out)


def test_few_multiprocessors_need_no_new_kernel(launched: Any) -> None:
    """The few kernels are limited by the bus: one of each serves every nest, and none is compiled."""
    out = launched("few_multiprocessors_need_no_new_kernel")
    assert "few_rows_o4_i8_w16" in out and "in place of" not in out


# ---- on a GPU ------------------------------------------------------------------------------------------------------

HALVES = ["[l o] b h/2 t/4 h%2 t%4 d", "[l o] b d/8 t/4 h d%8 t%4"]


@pytest.fixture
def on_gpu(tmp_path: Path) -> Callable[..., list[Any]]:
    """Converts layouts that are not in the catalogue on the GPU, in a new process; returns its output for each, and the times."""
    orders = {name: [order] for name, order in (*NEW.items(), *DEEP.items())} | {"halves": HALVES}
    for name, texts in orders.items():
        lines = f'order: "{texts[0]}"' if len(texts) == 1 else f'order:\n  k: "{texts[0]}"\n  v: "{texts[1]}"'
        (tmp_path / f"{name}.yaml").write_text(lines + "\n")

    def run(**knobs: str) -> list[Any]:
        done = subprocess.run(
            [sys.executable, PROGRAMS / "convert_new_layouts.py", json.dumps(orders), str(tmp_path)],
            capture_output=True, text=True, timeout=280, cwd="/", check=False,
            env={**os.environ, "KVBM_NVRTC": "1", "KVBM_CACHE_DIR": str(tmp_path / "cache"), **knobs},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        print(done.stdout)
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


@pytest.mark.gpu
@pytest.mark.timeout(900)
@needs_nvrtc
def test_new_layouts_on_the_gpu(on_gpu: Any, tmp_path: Path) -> None:
    """Bit-exact by newly compiled kernels, by cached ones, by those after damage to the cache, and by general ones."""
    compiled, cached = on_gpu(), on_gpu()
    assert all("in place of" not in line[-1] for line in compiled + cached)
    assert sum("compiled it for" in line[-1] for line in compiled) >= 20 < len(compiled)
    assert [line[:3] for line in cached] == [line[:3] for line in compiled]
    assert all("compiled it for" not in line[-1] for line in cached)
    for before, after in zip(compiled, cached, strict=True):
        assert ("compiled it for" in before[-1]) == ("came from the cache" in after[-1]), (before, after)
    for number, path in enumerate((tmp_path / "cache" / "nvrtc").glob("*.cubin")):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] if number % 2 else data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    assert [line[-1] for line in on_gpu()] == [line[-1] for line in compiled]
    general = on_gpu(KVBM_NVRTC="0")
    assert [line[:3] for line in general] == [line[:3] for line in compiled]
    assert any("in place of" in line[-1] for line in general)
    assert all(not {"compiled it for", "came from the cache"} & set(line[-1]) for line in general)


@pytest.fixture
def gpu_sides(cache: Path) -> Callable[..., tuple[Any, Any]]:
    """Two pools on the GPU, of a new layout and of nhd, and the expected bytes from a copy on the host."""
    import torch

    from memory import torch_views

    shape = replace(DEEP_SHAPE, hd=64, dtype="bfloat16")

    def make(order: str, n: int) -> tuple[Any, Any]:
        made = []
        for dst, text in ((False, order), (True, ORDERS["nhd"])):
            side = Side(text, n, dst=dst, shape=shape)
            side.gpu = torch.from_numpy(side.before).to("cuda:0")  # type: ignore[attr-defined]
            side.pool = kvbm.Pool(side.layout, shape, torch_views(side.arena, side.gpu, shape.dtype))  # type: ignore[attr-defined]
            made.append(side)
        torch.cuda.synchronize()
        return made[0], made[1]

    return make


def exact(src: Any, dst: Any, src_ids: Any, dst_ids: Any) -> None:
    import torch

    torch.cuda.synchronize()
    want = oracle.expected_bytes(src.arena, dst.arena, src.before, dst.before, src_ids, dst_ids)
    got = dst.gpu.cpu().numpy()
    assert np.array_equal(got, want), oracle.explain(dst.arena, got, want)


@pytest.mark.gpu
@needs_nvrtc
@pytest.mark.parametrize("name", ["rows", "tile", "outside"])
def test_graphs_of_new_layouts(name: str, gpu_sides: Any) -> None:
    """Captured, also if the kernel is loaded while another stream captures; a replay copies the current contents."""
    import torch

    order = {**NEW, **DEEP}[name]
    src, dst = gpu_sides(order, 8)
    ids, to = [3, 0, 7], [1, 5, 2]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        move = kvbm.Transfer(src.pool, dst.pool, "direct")  # its kernel is compiled and loaded beside the capture
        move.copy(ids, to, stream=torch.cuda.current_stream())
    torch.cuda.synchronize()
    assert np.array_equal(dst.gpu.cpu().numpy(), dst.before), "the capture has copied"
    graph.replay()
    exact(src, dst, ids, to)
    src.before = oracle.source_bytes(src.arena, 1)
    src.gpu.copy_(torch.from_numpy(src.before))
    dst.gpu.copy_(torch.from_numpy(dst.before))
    torch.cuda.synchronize()
    graph.replay()
    exact(src, dst, ids, to)
    assert "in place of" not in move.explain()


@pytest.mark.gpu
@needs_nvrtc
def test_threads_with_new_layouts(gpu_sides: Any) -> None:
    """Threads that need new kernels at the same time, two of each: all copies succeed, and nothing is compiled twice."""
    import torch

    orders = [NEW["rows"], NEW["tile"], NEW["words"], DEEP["inside"]] * 2
    pairs = [gpu_sides(order, 6) for order in orders]
    barrier = threading.Barrier(len(pairs))
    ids = list(range(6))

    def work(pair: Any) -> None:
        torch.cuda.set_device(0)
        stream = torch.cuda.Stream()
        barrier.wait()
        for _ in range(5):
            kvbm.convert(pair[0].pool, pair[1].pool, ids, ids[::-1], stream=stream)
        stream.synchronize()

    with ThreadPoolExecutor(len(pairs)) as pool:
        list(pool.map(work, pairs))
    for src, dst in pairs:
        exact(src, dst, ids, ids[::-1])
    assert len({id(origin) for origin in runtime._known.values()}) == len(runtime._known) <= 8
