"""Layout files: what is accepted, and what is refused with file, line, what was expected and what was found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvbm
from kvbm import spec

BAD = sorted((Path(__file__).parent / "data" / "bad").glob("*.yaml"))


def _header(path: Path, key: str) -> str:
    found = re.search(rf"^# {key}: (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1].strip() if found else ""


def _use(path: Path) -> None:
    """Read, resolve and plan, as far as the file's header lines go."""
    layout = kvbm.load(path)
    shape, against = _header(path, "shape"), _header(path, "against")
    if shape:
        layout.resolve(kvbm.load_shape(shape), 4)
    if against:
        kvbm.plan(layout, spec.parse(f'order: "{against}"'), kvbm.load_shape(shape), num_blocks=4)


@pytest.mark.parametrize("path", BAD, ids=lambda p: p.stem)
def test_bad(path: Path) -> None:
    """The first line of each file says which error it must be: class, then a regex over the message."""
    names, _, pattern = _header(path, "expect").partition(" ")
    errors = tuple(getattr(kvbm, name) for name in names.strip("()").split("|"))
    with pytest.raises(errors, match=f"(?s){pattern}") as info:
        _use(path)
    assert type(info.value) in errors
    if not _header(path, "against"):
        assert path.name in str(info.value), "the error names the file"


def test_there_are_bad_files() -> None:
    assert len(BAD) > 40
    assert all(_header(path, "expect") for path in BAD)


def test_line_of_a_long_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("# one\n# two\ntitle: mine\n\nused_by:\n  - me\n\norder: '[b l o] t q d'\n", encoding="utf-8")
    with pytest.raises(kvbm.SpecError, match=re.escape(f"{path}:8: ")):
        kvbm.load(path)


def test_load_path_and_str(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text('title: mine\norder: "[b l o] t h d"\nused_by: [me, you]\n', encoding="utf-8")
    for argument in (path, str(path)):
        layout = kvbm.load(argument)
        assert (layout.name, layout.title, layout.used_by) == ("mine", "mine", ("me", "you"))
        assert layout.order_text == "[b l o] t h d"
        assert layout.file == str(path)
        assert layout.fingerprint == kvbm.load("nhd").fingerprint


@pytest.mark.parametrize(
    "name", ["nhdd", "vllm/nhd", "", "../layouts/nhd", "/etc/passwd", "shapes/llama-3.1-8b", "nhd.yml", "no/such.yaml"]
)
def test_no_such_layout(name: str) -> None:
    with pytest.raises(kvbm.SpecError) as info:
        kvbm.load(name)
    if not name.endswith((".yaml", ".yml")):
        assert "universal" in str(info.value), "the error lists what there is"
    assert name in str(info.value)


@pytest.mark.parametrize(
    ("text", "order"),
    [
        ("order: b l o h t d", "b l o h t d"),
        ('order: "[b l o] t h d"', "[b l o] t h d"),
        ('order: "[ b  l o ]t h d"', "[b l o] t h d"),
        ("order: '[l o] b h d/16B t d%16B'", "[l o] b h d/16B t d%16B"),
        ("order: b (h d)/16 t (h d)%16 l o", "b (h d)/16 t (h d)%16 l o"),
        ("order: b l o h t/8 t/2%4 d t%2", "b l o h t/8 t/2%4 d t%2"),
        ("order: '[b] l o {t h d}'", "[b] l o {t h d}"),
        ("order: {k: '[l o] b h t d', v: '[l o] b h d t'}", "k: [l o] b h t d v: [l o] b h d t"),
        ("order: {k: '[l o] b h t d', v: '[l o] b h t d'}", "[l o] b h t d"),
    ],
)
def test_good(text: str, order: str) -> None:
    layout = spec.parse(text)
    assert layout.order_text == order


def test_extra_axes() -> None:
    layout = spec.parse('axes: {g: "2", s: "hd // 16"}\norder: "b l o h t d g s"')
    assert layout.axes == {"g": "2", "s": "hd // 16"}
    resolved = layout.resolve(kvbm.BlockShape(nl=1, no=2, nh=1, nt=2, hd=32, dtype="int8"), 1)
    assert resolved.allocations[0].shape == (1, 1, 2, 1, 2, 32, 2, 2)
    assert resolved.address(0, d=3, g=1, s=1) == (0, 3 * 4 + 2 + 1)


def test_a_name_can_be_given() -> None:
    assert spec.parse("order: b l o h t d", file="x.yaml").name == "x"
    assert spec.parse("order: b l o h t d", file="x.yaml", name="y").name == "y"


def test_layout_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.yaml").write_text("order: b l o h t d\n", encoding="utf-8")
    (tmp_path / "b.yaml").write_text("order: b l o t h d\n", encoding="utf-8")
    assert [layout.name for layout in spec.load_dir(tmp_path)] == ["b", "mine/a"]
    with pytest.raises(kvbm.SpecError, match="nowhere"):
        spec.load_dir(tmp_path / "nowhere")


def test_two_files_with_one_name(tmp_path: Path) -> None:
    """Among several folders, a folder and a file, and the shipped ones: the error names both files."""
    for folder, name in (("one", "a"), ("two", "a"), ("three", "nhd")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.yaml").write_text("order: b l o h t d\n", encoding="utf-8")
    one, two, three = (tmp_path / folder for folder in ("one", "two", "three"))
    assert [layout.name for layout in spec.load_all([two, three])] == ["a", "nhd"]
    assert [layout.name for layout in spec.load_all([one, one / "a.yaml", one])] == ["a"], "one file is no clash"
    for paths in ([one, two], [one, two / "a.yaml"], [one / "a.yaml", three, two / "a.yaml"]):
        with pytest.raises(kvbm.SpecError, match="'a'") as info:
            spec.load_all(paths)
        assert str(one / "a.yaml") in str(info.value) and str(two / "a.yaml") in str(info.value)
    with pytest.raises(kvbm.SpecError, match=re.escape("layouts/nhd.yaml")) as info:
        spec.load_all([spec.layouts_dir(), three])
    assert str(three / "nhd.yaml") in str(info.value)


def test_errors_are_what_a_stranger_would_catch() -> None:
    builtin = {
        "SpecError": ValueError,
        "LayoutError": ValueError,
        "PlanError": ValueError,
        "BindError": ValueError,
        "DTypeError": TypeError,
        "BuildError": RuntimeError,
        "MissingKernelError": LookupError,
        "CudaError": RuntimeError,
        "CudaUnavailableError": kvbm.CudaError,
    }
    codes = {kvbm.KvbmError.exit_code}
    for name, base in builtin.items():
        error = getattr(kvbm, name)
        assert issubclass(error, base) and issubclass(error, kvbm.KvbmError)
        codes.add(error.exit_code)
    assert len(codes) == len(builtin) + 1, "exit codes are distinct a class"
    assert 0 not in codes and 1 not in codes and 2 not in codes, "0, 1 and 2 are success, Python and click"
