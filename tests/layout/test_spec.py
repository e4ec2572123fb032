"""Layout files: what is accepted, and errors with file, line, the expected and the found value."""

from __future__ import annotations

import contextlib
import re
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import kvbm
from coordinates import in_case
from kvbm import BlockShape, KvbmError, LayoutError, SpecError, load
from kvbm.layout import spec
from kvbm.layout.spec import parse
from kvbm.layout.terms import SIZES, Expression

BAD = sorted((Path(__file__).parents[1] / "data" / "bad").glob("*.yaml"))


def _header(path: Path, key: str) -> str:
    found = re.search(rf"^# {key}: (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1].strip() if found else ""


def _use(path: Path) -> None:
    """Read, resolve and plan, as far as the file's header lines require."""
    layout = kvbm.load(path)
    shape, against = _header(path, "shape"), _header(path, "against")
    if shape:
        layout.resolve(kvbm.load_shape(shape), 4)
    if against:
        kvbm.plan(layout, spec.parse(f'order: "{against}"'), kvbm.load_shape(shape), num_blocks=4)


def test_bad() -> None:
    """The first line of each file has the expected error: its class, then a regex for the message."""
    for path in BAD:
        with in_case(path):
            _check_bad(path)


def _check_bad(path: Path) -> None:
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
        assert "`kvbm layouts`" in str(info.value), "the error says where they are listed"
    assert name in str(info.value) and len(str(info.value)) < 300


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("flash_attn_hnd", "vllm/flash_attn_hnd, vllm/flash_attn_nhd or vllm/flashinfer_hnd"),
        ("NHD", "nhd, dynamo/fc_nhd or operational_nhd"),
        ("univrsal", "universal, dynamo/universal or dynamo/universal_pp"),
        ("zzz", None),
    ],
)
def test_the_nearest_names_are_told(name: str, meant: str | None) -> None:
    with pytest.raises(kvbm.SpecError) as info:
        kvbm.load(name)
    assert str(info.value).partition("Did you mean ")[2] == (f"{meant}?" if meant else "")


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
    """In several folders, a folder and a file, or the shipped layouts: the error names both files."""
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


# ---- hostile files -------------------------------------------------------------------------------------------------

HOSTILE = {
    "deep list": "[" * 5000,
    "deep mapping": "{a: " * 5000,
    "deep order": "order: " + "[" * 2000 + "]" * 2000,
    "no character": 'order: "\\UFFFFFFFF"',
    "half a pair": 'order: b\ntitle: "\\uD800"',
    "long title": "order: b\ntitle: " + "x" * 5000,
    "long order": "order: b " + "t " * 5000,
    "long file": "order: b\nnotes: " + "x" * 200_000,
    "null character": "order: b\0",
    "long split": f"order: b t/{'9' * 5000}",
    "long number": f"order: b t\npitch: {{t: {'9' * 5000}}}",
    "minuses": f"order: b t\npitch: {{t: '{'-' * 10_000}1'}}",
    "some minuses": f"order: b t\npitch: {{t: '{'-' * 990}1'}}",
    "parentheses": f"order: b t\npitch: {{t: '{'(' * 400}1{')' * 400}'}}",
    "long sum": f"order: b t\npitch: {{t: '1{'+1' * 5000}'}}",
    "huge product": f"order: b t\npitch: {{t: '1{'*nt' * 300}'}}",
    "huge axis": f"order: b x\naxes: {{x: '1{'*nt' * 300}'}}",
    "alias of itself": "&a [*a]",
    "date": "order: 2001-99-99",
    "tag": "order: !!int [b]",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.slow  # 0.5 s
def test_hostile(tmp_path: Path, text: str) -> None:
    """One sentence that names the file, without a long delay; never another exception."""
    path = tmp_path / "x.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError) as error:
        load(path)
    assert str(error.value).startswith(str(path)) and len(str(error.value)) < 5000
    str(error.value).encode()


def test_huge_where_sizes_are_known() -> None:
    layout = parse("order: b t d\npitch: {t: nt*nt*nt*hd}")
    with pytest.raises(LayoutError, match=r"expected less than 2\*\*62, got 1"):
        layout.resolve(BlockShape(nl=1, no=1, nh=1, nt=1 << 20, hd=16), 1)


FRAGMENTS = st.sampled_from(
    [*"blohtdxkv[](){}<>/%:,'\"&*!|-?#\\", "\n", " ", "\n  ", ": ", "- ", "order: ", "pitch: ", "axes: ", "planes: ", "16B", "16",
     "nt", "round_up", "//", "\\U", "\\u", "FFFFFFFF", "D800", "\0", "\ud7ff", "data", "dtype: int4", "9" * 400]
)  # fmt: skip
TEXTS = st.lists(FRAGMENTS, max_size=60).map("".join)


@given(TEXTS | TEXTS.map("order: b t d\npitch: ".__add__) | TEXTS.map("order: ".__add__) | st.text(max_size=40))
@settings(max_examples=300, deadline=None)
@pytest.mark.slow  # 1.0 s
def test_any_text(text: str) -> None:
    with contextlib.suppress(KvbmError):
        layout = parse(text)
        assert layout.fingerprint.encode()
        layout.resolve(BlockShape(nl=2, no=2, nh=2, nt=2, hd=2), 3)


OPERANDS = st.sampled_from(
    ["nt", "1", "0", "-", "+", "*", "//", "%", "(", ")", ",", "min", "max(", "round_up(", "0x", "f" * 300, "1e9", "~"]
)


@given(st.lists(OPERANDS, max_size=40).map("".join) | st.text(max_size=30))
@settings(max_examples=300, deadline=None)
def test_any_expression(text: str) -> None:
    sizes = dict.fromkeys(("nb", "nl", "no", "nh", "nt", "hd", "es"), 1 << 61)
    with warnings.catch_warnings(), contextlib.suppress(LayoutError):
        warnings.simplefilter("error")
        assert 1 <= Expression(text).evaluate(sizes) < 1 << 62


PIECES = st.sampled_from(
    ["nh", "nt", "2", "10", "+", "*", "//", "%", "(", ")", ",", "max(", "0x1", "#", "\n", " ", "\\\n", "\f", "\r"]
)


@given(st.lists(PIECES, max_size=12).map("".join).map("({})".format))
@example("(nh #*2\n)")
@example("(nh #\n*2)")
@example("(nh*\\\n2)")
@settings(max_examples=300, deadline=None)
def test_the_key_of_an_expression_says_all_of_it(text: str) -> None:
    """Layouts are compared by keys: so the key, read again, has the same value at all sizes, and nothing but blanks is left out."""
    try:
        one = Expression(text)
    except LayoutError:
        return
    again = Expression(one.key)
    assert re.fullmatch(r"(\d\w*|[a-z_]+|//|[-+*%(),])*", one.key)
    for number in range(1, 6):
        sizes = {name: number * (7 + index) for index, name in enumerate(SIZES)}
        assert attempted(one, sizes) == attempted(again, sizes)


def attempted(one: Expression, sizes: dict[str, int]) -> int | None:
    try:
        return one.evaluate(sizes)
    except LayoutError:
        return None


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("order: b l o h t d\npitch:\n  t: |\n    (nh*hd # *2\n    )\n", r"x.yaml:3: pitch of 't': .*got '# \*2'; write"),
        ("order: b l o h t d\npitch: {t: '4096 # B'}", r"x.yaml:2: pitch of 't': .*got '# ?'; write comments outside"),
        ("order: b l o h t d s\naxes: {s: '(hd #\n\n)'}", r"x.yaml:2: size of axis 's': .*got '#'"),
        ("order: b <x y>\nplanes: {x: {order: t d}, y: {offset: '(4096#\n\n) B'}}", r"x.yaml:2: offset of plane 'y': .*got '#'"),
        ("order: b <x y>\nplanes: {x: {order: t d, pitch: {t: '64#B'}}, y: {}}", r"x.yaml:2: pitch of 't': .*got '#'"),
    ],
)
def test_what_only_python_reads_is_refused(text: str, what: str) -> None:
    with pytest.raises(SpecError, match=what):
        parse(text, "x.yaml")


def test_bytes_in_hexadecimal() -> None:
    """Ten bytes and 171 elements, in a plane whose elements have one byte."""
    text = "order: b <x y>\nplanes: {x: {order: t d, dtype: uint8, pitch: {t: %s}}, y: {order: t}}"
    ten, many = parse(text % "0xA B"), parse(text % "0xAB")
    shape = BlockShape(nl=1, no=1, nh=1, nt=2, hd=4, dtype="uint8")
    assert [one.resolve(shape, 1).nbytes for one in (ten, many)] == [22, 344]
    assert ten != many and ten.fingerprint != many.fingerprint
    assert parse(text % "10 B").fingerprint == "5d1ef01e2d8bae5f"


@given(st.binary(max_size=40))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.yaml").write_bytes(data)
    with contextlib.suppress(SpecError, LayoutError):
        load(tmp_path / "x.yaml")
