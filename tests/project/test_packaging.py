"""Tests of the installed package: the wheel's own files, not the tree's."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from pathlib import Path

import pytest

import kvbm
import matrix
from kvbm.compile import codegen
from kvbm.layout import spec

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(kvbm.__file__).resolve().parent


def editable() -> bool:
    text = importlib.metadata.distribution("kvbm-layouts").read_text("direct_url.json")
    return bool(text) and json.loads(text or "{}").get("dir_info", {}).get("editable", False)


def test_the_wheel_rather_than_the_tree() -> None:
    if editable():
        assert PACKAGE == ROOT / "src" / "kvbm", "an editable install of another checkout"
    else:
        assert ROOT / "src" not in PACKAGE.parents, "the tree is on sys.path: the tests would not test what users get"


def test_layouts_travel() -> None:
    """The installed files are byte for byte those of the tree."""
    there = {p.relative_to(spec.layouts_dir()).as_posix(): p.read_bytes() for p in spec.layouts_dir().rglob("*.*")}
    here = {p.relative_to(matrix.LAYOUTS).as_posix(): p.read_bytes() for p in matrix.LAYOUTS.rglob("*.*")}
    assert there == here and len(here) > 15
    if not editable():
        assert spec.layouts_dir() == PACKAGE / "layouts"


def test_headers_travel() -> None:
    headers = {path.name for path in (ROOT / "cuda").iterdir() if path.suffix in {".h", ".cuh", ".in"}}
    assert {"kvbm.h", "permute.cuh", "words.cuh", "kernels.cu.in"} <= headers
    for name in headers:
        assert (codegen.cuda_dir() / name).read_bytes() == (ROOT / "cuda" / name).read_bytes(), name


def test_no_sources_of_the_extension_in_a_wheel() -> None:
    if editable():
        pytest.skip("an editable install is the tree")
    names = [p.name for p in PACKAGE.rglob("*")]
    assert not [n for n in names if n.endswith((".pyx", ".c", ".cpp", ".o"))]
    assert "py.typed" in names and "_core.pyi" in names


def test_the_extension_is_built_for_every_python() -> None:
    from kvbm import _core

    if getattr(sys, "_is_gil_enabled", lambda: True)():
        assert re.search(r"\.abi3\.so$", _core.__file__)
    assert Path(_core.__file__).parent == PACKAGE


def test_no_library_of_cuda_is_linked() -> None:
    """The extension can be imported on any machine: the driver is loaded at first use, and no other library is needed."""
    from kvbm import _core

    data = Path(_core.__file__).read_bytes()
    needed = re.findall(rb"lib(?:cudart|cublas|nvrtc|torch|c10)[\w.-]*\.so[.\d]*", data)
    assert not needed
    elf_needed = [name for name in (b"libcuda.so.1",) if _is_needed(Path(_core.__file__), name)]
    assert not elf_needed


def _is_needed(path: Path, library: bytes) -> bool:
    """True if the dynamic section names the library (parsed here, as readelf may not be installed)."""
    import struct

    data = path.read_bytes()
    assert data[:4] == b"\x7fELF" and data[4] == 2
    (shoff,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, shoff + i * size) for i in range(count)]
    for section in sections:
        if section[1] == 6:  # SHT_DYNAMIC
            strings = sections[section[6]]
            for at in range(section[4], section[4] + section[5], 16):
                tag, value = struct.unpack_from("<QQ", data, at)
                if tag == 1:  # DT_NEEDED
                    start = strings[4] + value
                    if data[start : data.index(b"\0", start)] == library:
                        return True
    return False


def test_what_the_build_says_is_what_is_in() -> None:
    from kvbm import _core, kernels

    info = json.loads((PACKAGE / "_build.json").read_text(encoding="utf-8"))
    assert bool(info["nvcc"]) is (_core.num_images() > 0) is not kernels.is_using_stubs()
    assert info["why_not"] or _core.num_images()


def test_requirements_name_no_torch_and_no_toolkit() -> None:
    always = [r for r in importlib.metadata.requires("kvbm-layouts") or [] if "extra ==" not in r]
    assert not [r for r in always if re.match(r"(torch|cuda-toolkit|nvidia-)", r)]
    assert [r for r in always if r.startswith("numpy")]


def test_links_of_the_description_are_absolute() -> None:
    """On a package index README's links lead to existing files of the repository, at this version's tag."""
    metadata = importlib.metadata.metadata("kvbm-layouts")
    text = metadata.get_payload()
    assert isinstance(text, str) and text.startswith("# kvbm")
    links = re.findall(r"(!?)\[[^\]\n]*\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    (address,) = [url.partition(", ")[2] for url in metadata.get_all("Project-URL") or [] if url.startswith("Repository")]
    prefixes = {kind: f"{address}/{kind}/v{metadata['Version']}/" for kind in ("raw", "blob")}
    readme = len(re.findall(r"\]\((?![a-z]+:|#)", (ROOT / "README.md").read_text(encoding="utf-8")))
    ours = 0
    for picture, link in links:
        assert re.match(r"https?://|#", link), f"a link that leads nowhere on a package index: {link}"
        if link.startswith(address):
            prefix = prefixes["raw" if picture else "blob"]
            assert link.startswith(prefix) and (ROOT / link.removeprefix(prefix).partition("#")[0]).is_file(), link
            ours += 1
    assert ours == readme > 10


def test_command() -> None:
    scripts = importlib.metadata.entry_points(group="console_scripts", name="kvbm")
    assert [s.value for s in scripts] == ["kvbm.__main__:main"]
