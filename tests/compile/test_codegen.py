"""Generated code: the same bytes on every run and machine, and files are written only if they differ."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import fatbins
import kvbm
import matrix
from coordinates import in_case
from few import few
from kvbm.compile import codegen, nvcc, prepare
from kvbm.layout import spec
from kvbm.planner import kernel_forms

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
PROGRAMS = Path(__file__).parents[1] / "programs"
ROOT = Path(__file__).parents[2]
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
    """The complete text for two layouts, as a reader of the generated code sees it."""
    for name, text in codegen.generate(_two()).items():
        _golden(f"{name}.txt", text)


@pytest.mark.slow  # 15 s where nothing was built in the tree
def test_golden_kernels() -> None:
    """The kernels that all shipped layouts need; they are the built ones."""
    from kvbm import _core

    cache = Path(os.environ.get("KVBM_BUILD_DIR", ROOT / "build"))
    manifest = fatbins.generated(cache)["manifest.txt"]  # that of the build, if there is one in the tree
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


@pytest.mark.slow
def test_two_processes_agree(files: dict[str, str]) -> None:
    """Hash seeds, working folders and locales do not affect the text."""
    outputs = []
    for seed, locale in (("0", "C"), ("4242", "C.UTF-8")):
        env = {**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": locale}
        done = subprocess.run(
            [sys.executable, PROGRAMS / "generate.py", *SOME], env=env, capture_output=True, text=True, check=True, cwd="/"
        )
        outputs.append(json.loads(done.stdout))
    assert outputs[0] == outputs[1]
    assert outputs[0] == [list(files), {n: hashlib.sha256(t.encode()).hexdigest() for n, t in files.items()}]


@pytest.mark.slow  # generates all kernels twice
def test_order_of_layouts_does_not_matter() -> None:
    layouts = [kvbm.load(name) for name in SOME]
    assert codegen.generate(layouts)["manifest.txt"] == codegen.generate(layouts[::-1])["manifest.txt"]


@pytest.mark.slow  # plans all pairs of four layouts
def test_layouts_that_mean_the_same_ask_for_the_same() -> None:
    """They are planned once, and all named; another name for the same layout changes no kernel."""
    layouts = [kvbm.load(name) for name in ("nhd", "dynamo/stacked_nhd", "universal", "vllm/paged_attn_v0")]
    both, one = codegen.kernels(layouts), codegen.kernels([layouts[0], *layouts[2:]])
    assert list(both) == list(one)
    for name, pairs in both.items():
        swap = {"nhd": "dynamo/stacked_nhd"}
        alias = {(swap.get(src, src), swap.get(dst, dst)) for src, dst in one[name]}
        assert set(one[name]) | alias <= set(pairs)
        assert {tuple("nhd" if side == swap["nhd"] else side for side in pair) for pair in pairs} == set(one[name])


@pytest.mark.slow  # 0.5 s
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
    """A parsed name gives the same kernel: the name has everything that changes the code."""
    for line in files["manifest.txt"].splitlines():
        name = line.split("\t")[0]
        assert "__".join(form.name for form in kernel_forms.parse_kernel(name)) == name
    with pytest.raises(kvbm.PlanError, match="rows_x"):
        kernel_forms.parse_kernel("rows_x")


def test_index_of_kernels() -> None:
    from kvbm import _core

    names = _core.kernel_names()
    assert len(names) == len(set(names)) > 50
    assert all(_core.kernel_index(name) == index for index, name in enumerate(names))
    assert _core.kernel_index("no_such_kernel") == -1


@pytest.mark.slow  # every pair of layouts at every width and alignment
@pytest.mark.parametrize("src", few(sorted({src for src, _ in matrix.pairs()}), 6))
def test_every_plan_has_its_kernel(src: str) -> None:
    """For any shape and alignment, a conversion between shipped layouts finds a kernel."""
    for dst in (dst for one, dst in matrix.pairs() if one == src):
        with in_case(src, dst):
            _has_its_kernel(src, dst)


def _has_its_kernel(src: str, dst: str) -> None:
    one_of_each_width = [(dtype, shape) for dtype, shape in matrix.possible(src, dst) if dtype.startswith("uint")]
    assert one_of_each_width
    layouts = kvbm.load(src), kvbm.load(dst)
    for dtype, shape in one_of_each_width:
        made = kvbm.plan(*layouts, kvbm.BlockShape(*shape, dtype), num_blocks=(5, 3))
        assert prepare.prepare(made, 16, 16)
        for alignment in (1, 2, 4, 8):
            assert prepare.prepare(made, alignment, 16) and prepare.prepare(made, 16, alignment)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-8b/tp8", "llama-3.1-70b", "llama-3.1-70b/tp8"])
def test_real_models_have_their_own_kernels(name: str) -> None:
    """No fallback for shipped models: exactly the planned kernel was built."""
    from kvbm import _core

    names = set(_core.kernel_names())
    for src, dst in matrix.pairs():
        if codegen.ON_HOSTS & {src, dst}:
            continue
        if matrix.latent(src) or matrix.latent(dst) or (name.endswith("tp8") and "sglang/page_unified" in (src, dst)):
            continue  # not legal at this model
        made = kvbm.plan(kvbm.load(src), kvbm.load(dst), kvbm.load_shape(name), num_blocks=64)
        assert set(made.kernels()) <= names, (src, dst, made.kernels())


def test_missing_kernel() -> None:
    from kvbm import _core

    with pytest.raises(kvbm.MissingKernelError, match=r"rows_o9.*codegen"):
        _core.Copy("rows_o9_i9_w16", [((0, 0, 0, 0), [], [(1, 1, 1)])], (1, 0), (1, 0))


# ---- kernels that keep to few multiprocessors ----------------------------------------------------------------------

FEW = [
    *(f"few_rows_o4_i8_w{word}" for word in (1, 16, 2, 4, 8)),
    "few_tile_o4_r6_e16_w16",
    *(f"few_tile_o4_r6_e{element}_w{word}" for element in (1, 2, 4, 8) for word in sorted({element, 16}, key=str)),
]


def test_few_kernels_are_few(files: dict[str, str]) -> None:
    """One small set, independent of the layouts; it is not built for particular pairs of layouts."""
    for text in (files["manifest.txt"], codegen.generate(_two())["manifest.txt"]):
        few = [line.split("\t") for line in text.splitlines() if line.startswith("few_")]
        assert [name for name, *_ in few] == FEW
        assert all(len(columns) == 2 for columns in few), "no pair of layouts is named"


def test_few_kernels_run_every_plan() -> None:
    """Each form that a shipped layout needs has its few kernel; ordinary kernels never replace it, nor it them."""
    few = [form for name in FEW for form in kernel_forms.parse_kernel(name)]
    assert all(form.sm_limited for form in few)
    names = (GOLDEN / "shipped_kernels.txt").read_text(encoding="utf-8").split()
    # Records and pages have none: their parts run one by one, as the rows that they are. What digests or casts has all
    # multiprocessors.
    wanted = {form for name in names for form in kernel_forms.parse_kernel(name) if not form.sm_limited}
    wanted = {form for form in wanted if form.kind.partition("_")[0] not in ("record", "page", "digest", "cast") and not form.sums}
    assert len(wanted) > 50
    for form in wanted:
        assert sum(kernel.runs(replace(form, sm_limited=True)) for kernel in few) == 1, form
        assert not any(kernel.runs(form) for kernel in few)
        assert not any(kernel.runs(replace(form, sm_limited=True)) for kernel in wanted)
    assert not any(kernel.runs(replace(few[0], inner=9)) for kernel in few)


@pytest.fixture(scope="module")
def cubin(files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of ptxas for kernels of either kind."""
    try:
        compiler = nvcc.find()
    except kvbm.BuildError as error:
        pytest.skip(f"no nvcc: {str(error).splitlines()[0]}")
    folder = tmp_path_factory.mktemp("cubin")
    text = "".join(text for name, text in files.items() if name.endswith(".cu"))
    chosen = [*FEW, "copy_o0_w16", "rows_o4_i8_w16", "rows_o4_i8_w1"]
    lines = [found[0] for name in chosen if (found := re.search(rf"^KVBM_KERNEL\({name},.*$", text, re.MULTILINE))]
    assert len(lines) == len(chosen)
    (folder / "few.cu").write_text('#include "permute.cuh"\nusing namespace kvbm;\n' + "\n".join(lines) + "\n")
    done = subprocess.run(
        [*compiler.command, "-cubin", "-std=c++17", "-allow-unsupported-compiler", "-arch=sm_90", "-Xptxas=-v",
         f"-I{codegen.cuda_dir()}", "-o", folder / "few.cubin", folder / "few.cu"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
def test_registers(cubin: str) -> None:
    """Rows use so few registers that a multiprocessor can hold all its warps; nothing is spilled."""
    used = {
        name: (int(stack), int(stores), int(loads), int(registers))
        for name, stack, stores, loads, registers in re.findall(
            r"entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
            r".*?Used (\d+) registers",
            cubin,
            re.DOTALL,
        )
    }
    assert len(used) == len(FEW) + 3
    for name, (stack, stores, loads, registers) in used.items():
        assert (stack, stores, loads) == (0, 0, 0), name
        threads = 1024 if name.startswith("few_rows") else 512 if name.startswith("few_") else 2048
        assert registers * threads <= 65536, (name, registers)


# ---- headers --------------------------------------------------------------------------------------------------------


def header_order() -> list[str]:
    """The headers in the order that permute.cuh gives them, and permute.cuh itself."""
    text = (codegen.cuda_dir() / "permute.cuh").read_text(encoding="utf-8")
    return [*re.findall(r"^//   (\w+\.cuh) ", text, re.MULTILINE), "permute.cuh"]


def test_headers_include_only_headers_before_them() -> None:
    order = header_order()
    assert set(order) == {path.name for path in codegen.cuda_dir().glob("*.cuh")} and len(order) == len(set(order))
    for number, name in enumerate(order):
        text = (codegen.cuda_dir() / name).read_text(encoding="utf-8")
        assert text.startswith(f"// {name}: "), "its first line says what it is"
        includes = set(re.findall(r'^#include "([^"]+)"', text, re.MULTILINE))
        assert includes <= {"kvbm.h", *order[:number]}, name
        assert text.rfind("#include") < text.find("namespace kvbm {") or name == "permute.cuh", "nothing is included later"


@pytest.mark.parametrize("name", header_order())
def test_a_header_compiles_alone(name: str, tmp_path: Path) -> None:
    compiler = next((found for one in ("c++", "g++", "clang++") if (found := shutil.which(one))), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = tmp_path / "one.cpp"
    source.write_text(f'#include "{name}"\n#include "{name}"\n')
    command = [compiler, "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{codegen.cuda_dir()}", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- the host half of the templates, in a program of its own -------------------------------------------------------

@pytest.fixture(scope="module")
def program(files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("program")
    rows = [
        line
        for line in files["kernels_host.cpp"].splitlines()
        if re.match(r"  KVBM_KERNEL\((few_\w+|copy_o0_w16),", line)
    ]
    (folder / "kernels.inc").write_text("\n".join(rows))
    command = [
        compiler,
        "-std=c++17",
        "-O1",
        f"-I{codegen.cuda_dir()}",
        f"-I{folder}",
        "-o",
        folder / "program",
        PROGRAMS / "templates.cpp",
    ]
    subprocess.run(command, check=True)

    def call(how: str, *numbers: int) -> str:
        text = " ".join(map(str, numbers))
        return subprocess.run([folder / "program", how], input=text, capture_output=True, text=True, check=True).stdout

    return call


def test_runs_of_casts(tmp_path: Path) -> None:
    """Each instruction set casts groups as the text for one value does, whatever their length, and writes nothing behind them."""
    compiler = os.environ.get("CXX", "g++")
    flags = ["-std=c++17", "-O1", "-Wno-psabi", f"-I{codegen.cuda_dir()}"]
    subprocess.run([compiler, *flags, "-o", tmp_path / "runs", PROGRAMS / "cast_runs.cpp"], check=True)
    lines = subprocess.run([tmp_path / "runs"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) >= 21 and not [line for line in lines if not line.endswith(" 0")], lines


@pytest.mark.parametrize("sms", [1, 8, 132])
@pytest.mark.parametrize("extents", [(2, 3, 1, 2, 64, 32, 1, 3, 1, 1, 2, 1), (1, 1, 1, 1, 16, 16, 1, 1, 1, 1, 1, 1)])
def test_grids(program: Callable[..., str], sms: int, extents: tuple[int, ...]) -> None:
    """Eight teams or sixteen warps per CTA; enough CTAs for all the work at once; no host half; at most a CTA's shared memory."""
    told = {
        line.split()[0]: [int(n) for n in line.split()[1:]] for line in program("grids", sms, 41, *extents).splitlines()
    }
    assert list(told) == ["copy_o0_w16", *FEW]
    for name, (teams, has_host, status, virtual, ctas, threads, shared) in told.items():
        assert status == 0
        if name == "copy_o0_w16":
            assert (teams, has_host, ctas, threads, shared) == (1, 1, virtual, 128, 0)
            continue
        assert virtual > 0
        assert threads == 512
        if "rows" in name:
            assert (teams, has_host, ctas) == (16, 0, virtual), name
            assert shared == 6144 * int(name.rpartition("_w")[2])
        else:
            assert (teams, has_host, ctas) == (8, 0, -(-virtual // 8)), name
            assert 0 < shared <= 96 << 10
            assert shared % (8 * int(name.rpartition("_w")[2])) == 0, "each team's words are aligned"


IDS = [0, 4, 5, -1, -2, 6, -(1 << 31), (1 << 31) - 1, 1 << 32, (1 << 32) - 1, -(1 << 32), -(1 << 63), (1 << 63) - 1, 3]


@pytest.mark.quick
def test_ids_are_followed_only_in_range(program: Callable[..., str]) -> None:
    """-1 skips, other ids out of range skip and are reported, all 64 bits count; no other id is followed."""
    for blocks, counted, inlined, id_bytes in itertools.product(
        [(5, 6), (0xFFFFFFFF, 0xFFFFFFFF), (14, 3)], [0, 16, 32, 48], [0, 1, 2, 3], [4, 8, 0]
    ):
        with in_case(blocks, counted, inlined, id_bytes):
            _check_ids_are_followed_only_in_range(program, id_bytes, inlined, counted, blocks)


def _check_ids_are_followed_only_in_range(
    program: Callable[..., str], id_bytes: int, inlined: int, counted: int, blocks: tuple[int, int]
) -> None:
    some = [i for i in IDS if id_bytes == 8 or -(1 << 31) <= i < 1 << 31]
    pairs = list(itertools.product(some, [2, -1, -2, 5])) if id_bytes else [(2, 2)] * 14
    pairs += [(b, a) for a, b in pairs]
    lists = [[a for a, _ in pairs], [b for _, b in pairs]]
    out = program("places", id_bytes, inlined | counted, *blocks, len(pairs), *lists[0], *lists[1]).split()
    want: list[list[str]] = [[], []]
    for i, pair in enumerate(pairs):
        src, dst = (i if not id_bytes or counted >> 4 + side & 1 else pair[side] for side in (0, 1))
        good = not id_bytes or (0 <= src < blocks[0] and 0 <= dst < blocks[1])
        noted = 0 if good or -1 in (src, dst) else 1 + i
        for turn in (0, 1):
            want[turn] += [*((str(src), str(dst)) if good else ("-", "-")), str(noted * turn)]
    assert out == want[0] + want[1]


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
