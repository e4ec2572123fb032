"""Generated text: the same bytes every time, everywhere; written only where it differs."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvbm
import matrix
from kvbm import codegen, planner, spec

GOLDEN = Path(__file__).parent / "data" / "golden"
UPDATE = os.environ.get("KVBM_UPDATE_GOLDEN") == "1"


#: Layouts of every kind, few enough that generating takes no time; all are generated once, in `test_golden_kernels`.
SOME = ("nhd", "universal", "operational", "vllm/LBHNC", "vllm/paged_attn_v0", "hf/dynamic_cache")


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return codegen.generate([kvbm.load(name) for name in SOME])


def _golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if UPDATE:
        path.write_text(text, encoding="utf-8")
    assert path.is_file(), f"{path} is missing: KVBM_UPDATE_GOLDEN=1 writes it"
    assert text == path.read_text(encoding="utf-8"), (
        f"{name} changed: read the difference; KVBM_UPDATE_GOLDEN=1 accepts it"
    )


def _two() -> list[kvbm.Layout]:
    return [kvbm.load("nhd"), kvbm.load("universal")]


def test_golden_text() -> None:
    """The text for two layouts, whole: what a reader of the generated code sees."""
    for name, text in codegen.generate(_two()).items():
        _golden(f"{name}.txt", text)


def test_golden_kernels() -> None:
    """Which kernels all shipped layouts ask for; and that they are what was built."""
    from kvbm import _core

    manifest = codegen.generate()["manifest.txt"]
    names = [line.split("\t")[0] for line in manifest.splitlines()]
    _golden("shipped_kernels.txt", "\n".join(names) + "\n")
    assert set(names) <= set(_core.kernel_names())


@pytest.mark.parametrize(
    "pair", [("nhd", "universal"), ("nhd", "vllm/paged_attn_v0"), ("hf/dynamic_cache", "vllm/LBHNC")]
)
def test_golden_plans(pair: tuple[str, str]) -> None:
    """Loop nests of known pairs at a known model."""
    plan = kvbm.plan(kvbm.load(pair[0]), kvbm.load(pair[1]), kvbm.load_shape("llama-3.1-70b/tp8"), num_blocks=(64, 32))
    name = "-".join(pair).replace("/", ".")
    _golden(f"plan-{name}.txt", f"{plan}\n\n{plan.explain()}\n")


_SCRIPT = """
import hashlib, json, sys
import kvbm
from kvbm import codegen
files = codegen.generate([kvbm.load(name) for name in sys.argv[1:]])
print(json.dumps([list(files), {n: hashlib.sha256(t.encode()).hexdigest() for n, t in files.items()}]))
"""


def test_two_processes_agree(files: dict[str, str]) -> None:
    """Hash seeds, working folders and locales do not show in the text."""
    outputs = []
    for seed, locale in (("0", "C"), ("1", "C.UTF-8"), ("4242", "POSIX")):
        env = {**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": locale}
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT, *SOME], env=env, capture_output=True, text=True, check=True, cwd="/"
        )
        outputs.append(json.loads(done.stdout))
    assert outputs[0] == outputs[1] == outputs[2]
    assert outputs[0] == [list(files), {n: hashlib.sha256(t.encode()).hexdigest() for n, t in files.items()}]


def test_order_of_layouts_does_not_matter() -> None:
    layouts = [kvbm.load(name) for name in SOME]
    assert codegen.generate(layouts)["manifest.txt"] == codegen.generate(layouts[::-1])["manifest.txt"]


def test_files(files: dict[str, str]) -> None:
    images = [name for name in files if re.fullmatch(r"kernels_\d\d\.cu", name)]
    assert 1 <= len(images) <= 8
    assert images == sorted(images) == [f"kernels_{i:02}.cu" for i in range(len(images))]
    assert {"kernels_host.cpp", "manifest.txt"} <= set(files)
    for name, text in files.items():
        assert text.endswith("\n") and "\r" not in text and "$" not in text, name
        assert not re.search(r"20\d\d-\d\d|/home|/tmp|/root", text), f"{name}: a date or a path of the machine"
    for name in images:
        assert '#include "permute.cuh"' in files[name]


def test_every_kernel_is_instantiated_once(files: dict[str, str]) -> None:
    names = [line.split("\t")[0] for line in files["manifest.txt"].splitlines()]
    assert names == sorted(names) and len(set(names)) == len(names)
    device = {n: t for n, t in files.items() if n.endswith(".cu")}
    for line in files["manifest.txt"].splitlines():
        name, file = line.split("\t")[:2]
        found = {n: len(re.findall(rf"^KVBM_KERNEL\({name},", t, re.MULTILINE)) for n, t in device.items()}
        assert found == {n: int(n == file) for n in device}, name
        assert len(re.findall(rf"\bKVBM_KERNEL\({name},", files["kernels_host.cpp"])) == 1
    assert f"kvbm_num_kernels = {len(names)};" in files["kernels_host.cpp"]


def test_every_kernel_has_its_loop_nest_above(files: dict[str, str]) -> None:
    for name, text in files.items():
        if name.endswith(".cu"):
            lines = text.splitlines()
            for before, line in zip(lines, lines[1:], strict=False):
                if line.startswith("KVBM_KERNEL("):
                    assert before.startswith("//"), line


def test_names_tell_everything(files: dict[str, str]) -> None:
    """A name parses back to itself: everything that changes the bits is in it."""
    for line in files["manifest.txt"].splitlines():
        name = line.split("\t")[0]
        assert "__".join(form.name for form in planner.Form.parse(name)) == name
    with pytest.raises(kvbm.PlanError, match="rows_x"):
        planner.Form.parse("rows_x")


def test_index_of_kernels() -> None:
    from kvbm import _core

    names = _core.kernel_names()
    assert len(names) == len(set(names)) > 50
    assert all(_core.kernel_index(name) == index for index, name in enumerate(names))
    assert _core.kernel_index("no_such_kernel") == -1


@pytest.mark.parametrize(("src", "dst"), matrix.pairs())
def test_every_plan_has_its_kernel(src: str, dst: str) -> None:
    """Whatever the shape and the alignment, a conversion between shipped layouts finds a kernel."""
    from kvbm import transfer

    one_of_each_width = [(dtype, shape) for dtype, shape in matrix.possible(src, dst) if dtype.startswith("uint")]
    assert one_of_each_width
    for dtype, shape in one_of_each_width:
        nl, no, nh, nt, hd = shape
        made = kvbm.plan(kvbm.load(src), kvbm.load(dst), kvbm.BlockShape(nl, no, nh, nt, hd, dtype), num_blocks=(5, 3))
        for alignment in (1, 2, 4, 8, 16):
            assert transfer.prepare(made, alignment, 16) and transfer.prepare(made, 16, alignment)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-8b/tp8", "llama-3.1-70b", "llama-3.1-70b/tp8"])
def test_real_models_have_their_own_kernels(name: str) -> None:
    """No fallback for the models that are shipped: exactly the planned kernel was built."""
    from kvbm import _core

    names = set(_core.kernel_names())
    for src, dst in matrix.pairs():
        made = kvbm.plan(kvbm.load(src), kvbm.load(dst), kvbm.load_shape(name), num_blocks=64)
        assert set(made.kernels()) <= names, (src, dst, made.kernels())


def test_missing_kernel() -> None:
    from kvbm import _core

    with pytest.raises(kvbm.MissingKernelError, match=r"rows_o9.*codegen"):
        _core.Copy("rows_o9_i9_w16", [((0, 0, 0, 0), [], [(1, 1, 1)])], (1, 0), (1, 0))


# ---- writing -------------------------------------------------------------------------------------------------------


def test_write_and_check(tmp_path: Path, files: dict[str, str]) -> None:
    out = tmp_path / "new" / "out"
    written = codegen.write(files, out)
    assert sorted(p.name for p in written) == sorted(files)
    assert {p.name: p.read_text(encoding="utf-8") for p in out.iterdir()} == files
    assert codegen.check(files, out) == []


def test_write_touches_only_what_differs(tmp_path: Path, files: dict[str, str]) -> None:
    codegen.write(files, tmp_path)
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    assert codegen.write(files, tmp_path) == []
    assert all(path.stat().st_mtime == 1 for path in tmp_path.iterdir())
    (tmp_path / "kernels_host.cpp").write_text("// edited\n", encoding="utf-8")
    assert [p.name for p in codegen.write(files, tmp_path)] == ["kernels_host.cpp"]
    assert (tmp_path / "kernels_host.cpp").read_text(encoding="utf-8") == files["kernels_host.cpp"]
    assert (tmp_path / "manifest.txt").stat().st_mtime == 1


def test_check_finds_what_differs(tmp_path: Path, files: dict[str, str]) -> None:
    codegen.write(files, tmp_path)
    (tmp_path / "kernels_00.cu").write_text(files["kernels_00.cu"] + " ", encoding="utf-8")
    (tmp_path / "manifest.txt").unlink()
    (tmp_path / "kernels_77.cu").write_text("// an old one\n", encoding="utf-8")
    found = codegen.check(files, tmp_path)
    for name in ("kernels_00.cu", "manifest.txt", "kernels_77.cu"):
        assert sum(name in line for line in found) == 1
    assert len(found) == 3
    assert (tmp_path / "kernels_77.cu").exists(), "check changes nothing"
    codegen.write(files, tmp_path)
    assert not (tmp_path / "kernels_77.cu").exists()
    assert codegen.check(files, tmp_path) == []


def test_write_leaves_what_is_not_its_own(tmp_path: Path, files: dict[str, str]) -> None:
    (tmp_path / "notes.txt").write_text("mine\n", encoding="utf-8")
    (tmp_path / "kernels_mine.cu").write_text("mine\n", encoding="utf-8")
    codegen.write(files, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == (tmp_path / "kernels_mine.cu").read_text() == "mine\n"
    assert not list(tmp_path.glob(".*")), "no temporary files are left"


def test_a_new_layout_asks_for_its_kernels() -> None:
    mine = spec.parse('order: "[b l] h/2 t/4 d o h%2 t%4"', name="mine")
    text = codegen.generate([*_two(), mine])["manifest.txt"]
    assert "mine → nhd" in text and "universal → mine" in text
    assert set(codegen.generate(_two())["manifest.txt"].split("\n")) != set(text.split("\n"))
