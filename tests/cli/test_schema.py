"""The JSON schemas: the checked-in files are up to date, never stricter than the parser, and refuse what a pattern can detect."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import kvbm
import matrix
import schemas as schema
import strategies
from coordinates import in_case
from kvbm.cli.app import main
from kvbm.layout import grammar, spec
from kvbm.layout.terms import Expression
from kvbm.reshard import placement

FILES = {
    "layout": matrix.LAYOUTS / "schema.json",
    "shape": matrix.LAYOUTS / "shapes" / "schema.json",
    "placement": matrix.LAYOUTS / "placements" / "schema.json",
}
BAD = sorted((Path(__file__).parents[1] / "data" / "bad").glob("*.yaml"))
#: What no schema sees: it is right but for a size or another layout, or one part of it does not fit another.
UNSEEN = {"k_v_brackets_differ", "k_v_without_o", "pitch_of_bracketed"}
#: What no YAML parser hands to a schema.
NO_YAML = {"not_yaml", "python_tag", "repeated_key"}


class _Loader(yaml.SafeLoader):
    """YAML 1.2, as editors read it: `no` and dates are texts."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regex) for tag, regex in some if not tag.endswith((":bool", ":timestamp"))]
    for first, some in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(?:true|false)$"), list("tf"))


def refused(kind: str, text: str) -> list[str]:
    """The schema's errors for a file."""
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft7Validator(schema.SCHEMAS[kind]())
    return [error.message for error in validator.iter_errors(yaml.load(text, _Loader))]


@pytest.mark.parametrize("kind", sorted(FILES))
def test_checked_in(kind: str) -> None:
    """``KVBM_UPDATE_GOLDEN=1`` updates the file, which `kvbm schema` prints."""
    if os.environ.get("KVBM_UPDATE_GOLDEN") == "1":
        FILES[kind].write_text(schema.text(kind), encoding="utf-8")
    assert FILES[kind].read_text(encoding="utf-8") == schema.text(kind)
    result = CliRunner().invoke(main, ["schema", kind])
    assert (result.exit_code, result.output) == (0, schema.text(kind))


@pytest.mark.parametrize("kind", sorted(FILES))
def test_is_a_schema(kind: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft7Validator.check_schema(schema.SCHEMAS[kind]())
    patterns = [
        value
        for key, value in re.findall(r'"(pattern)": ("(?:[^"\\]|\\.)*")', schema.text(kind))
        for value in [json.loads(value)]
    ]
    assert bool(patterns) is (kind != "shape")
    for pattern in patterns:
        assert not re.search(r"\(\?[P<#]|\\[AZz]", pattern), "JavaScript reads it too"


def test_shipped_files() -> None:
    for path in sorted(matrix.LAYOUTS.rglob("*.yaml")):
        with in_case(path):
            _shipped_files(path)


def _shipped_files(path: Path) -> None:
    kind = "shape" if path.parent.name == "shapes" else "layout"
    assert refused(kind, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("like: nhd", True),
        ("like: vllm/deepseek_v4\npitch: {b: 4096 B}", True),
        ("like: vllm/deepseek_v4\naxes: {s: 9}\nplanes: {scale: {offset: 3}}\ntitle: x", True),
        ("like: x.yaml\npitch: {q: 3}", True),
        ("like: nhd\norder: b l o h t d", False),
        ("like: [nhd]", False),
        ("like: vllm/deepseek_v4\nplanes: {scale: {order: s t}}", False),
        ("title: x", False),
        ("order: '[l] b <a b>'\nplanes: {a: {order: t d}}", False),
    ],
)
def test_like_another(text: str, good: bool) -> None:
    assert bool(refused("layout", text)) is not good


def test_bad_files() -> None:
    for path in BAD:
        with in_case(path):
            _bad_files(path)


def _bad_files(path: Path) -> None:
    if path.stem in NO_YAML:
        return
    unseen = path.stem in UNSEEN or path.stem.startswith(("shape_", "plan_"))
    assert bool(refused("layout", path.read_text(encoding="utf-8"))) is not unseen


@given(strategies.one(limit=700))
@strategies.cases(400)
@pytest.mark.slow  # 0.5 s
def test_never_stricter_than_the_parser(drawn: tuple[strategies.Sizes, strategies.Declared]) -> None:
    _, declared = drawn
    assert refused("layout", declared.yaml) == []


@given(st.text("bloht d/%()[]{}8B16", max_size=24))
@strategies.cases(2000)
@pytest.mark.slow  # 0.5 s
def test_texts_that_the_parser_takes(text: str) -> None:
    declared = f"order: {json.dumps('b ' + text)}\n"
    try:
        spec.parse(declared)
    except kvbm.SpecError:
        return
    assert refused("layout", declared) == []


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("64", True),
        ("64 B", True),
        ("64B", True),
        ("0x40 B", True),
        ("nt*584 B", True),
        ("round_up(nt * (hd + 8) * es, 576) B", True),
        ("min(max(nb, 4), nh) // 2 % 7 - 1", True),
        ("1.5", False),
        ("nh / 2", False),
        ("nt ** 2", False),
        ("nt nh", False),
        ("nt +", False),
        ("ceil(nt)", False),
        ("nx", False),
        ("esB", False),
        ("", False),
        ("B", False),
    ],
)
def test_expressions(text: str, good: bool) -> None:
    declared = f"order: b l o h t d\npitch: {{b: {json.dumps(text)}}}\n"
    assert (refused("layout", declared) == []) is good
    if good:
        spec.parse(declared)
    else:
        with pytest.raises(kvbm.SpecError):
            spec.parse(declared)


def test_scalars_as_people_write_them() -> None:
    good = "title: 70\norder: b l o h t d s\naxes: {s: 4}\npitch: {b: 4096}\nused_by: [me, 2]\nnotes: yes\n"
    spec.parse(good)
    assert refused("layout", good) == []
    assert refused("layout", good.replace("s: 4", "s: 0"))
    assert refused("layout", good.replace(" s\n", " q\n").replace("{s: 4}", "{}")) == [], "the parser sees it"
    assert refused("layout", "order: b l o h t s\n"), "declared nowhere"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("nl: 32", "nl: 0"),
        ("no: 2", "no: two"),
        ("bfloat16", "float7"),
        ("nh: 8\n", ""),
        ("hd:", "head:"),
        ("[1, 2", "[0, 2"),
    ],
)
def test_bad_shapes(old: str, new: str) -> None:
    text = (matrix.LAYOUTS / "shapes" / "llama-3.1-8b.yaml").read_text(encoding="utf-8")
    assert old in text and refused("shape", text.replace(old, new))


def test_the_code_is_what_is_described() -> None:
    """The schema has every key, dtype and name of an expression, and nothing else."""
    layout, shape = schema.layout_schema(), schema.shape_schema()
    assert tuple(layout["properties"]) == grammar.KEYS
    assert shape["properties"]["dtype"]["enum"] == list(kvbm.layout.shapes.ITEMSIZE)
    said: Any = layout["properties"]["pitch"]["additionalProperties"]["pattern"]
    for name in ("nb", "nl", "no", "nh", "nt", "hd", "es"):
        Expression(name)
        assert name in said


# ---- planes --------------------------------------------------------------------------------------------------------

PLANES = """order: "[l] b t <data scale>"
axes: {s: hd//32}
planes:
  data: {order: d, dtype: float8_e4m3fn}
  scale: {order: {k: s%4 s/4, v: s%4 s/4}, dtype: float8_e8m0fnu, offset: nt*hd B, pitch: {s/4: 4 B}, shared: h}
"""


@pytest.mark.parametrize(
    ("old", "new", "good"),
    [
        ("", "", True),
        ("l] b t <data scale>", "l] b t <  data   scale >", True),
        ("[l] b t <data scale>", "[<data scale> l] b t", True),
        ("[l] b t <data scale>", "[l <data scale>] b t", True),
        ("<data scale>", "<data scale> ", True),
        ("order: d,", "", True),
        ("order: d,", "order: ,", True),
        ("order: d,", "order: '',", True),
        ("order: d,", "order: '[] d/16B o d%16B',", True),
        ("offset: nt*hd B", "offset: 0", True),
        ("offset: nt*hd B", "offset: 0 B", True),
        ("dtype: float8_e8m0fnu", "dtype: int4", True),
        ("shared: h", "shared: ", True),
        ("shared: h", "shared: t h", True),
        ("<data scale>", "<data, scale>", False),
        ("<data scale>", "<data scale", False),
        ("<data scale>", "<data>", False),
        ("<data scale>", "<>", False),
        ("<data scale>", "<data Scale>", False),
        ("<data scale>", "<data scale> o", False),
        ("<data scale>", "<data scale> <data scale>", False),
        ("order: d,", "order: b d,", False),
        ("order: d,", "order: '[o] d',", False),
        ("order: d,", "order: d o d,", False),
        ("order: d,", "order: d/2,x,", False),
        ("order: d,", "order: q d,", None),
        ("order: d,", "order: 8,", False),
        ("order: d,", "ordre: d,", False),
        ("dtype: float8_e8m0fnu", "dtype: float7", False),
        ("offset: nt*hd B", "offset: -1", False),
        ("offset: nt*hd B", "offset: 1.5", False),
        ("shared: h", "shared: d", False),
        ("shared: h", "shared: b", False),
        ("shared: h", "shared: [h]", False),
        ("{order: d, dtype: float8_e4m3fn}", "float8_e4m3fn", False),
        ("{s/4: 4 B}", "{s/4: 4.5}", False),
        ("  data: {order: d, dtype: float8_e4m3fn}\n", "", False),
    ],
)  # fmt: skip
def test_planes(old: str, new: str, good: bool | None) -> None:
    """The schema agrees with the parser (None: only the parser can detect the error)."""
    assert old in PLANES
    text = PLANES.replace(old, new)
    if re.search(r"\[[^]]*<", text):  # planes in arrays of their own start there
        text = text.replace("offset: nt*hd B, ", "")
    try:
        spec.parse(text)
        taken = True
    except kvbm.SpecError:
        taken = False
    assert taken is bool(good), text
    assert (refused("layout", text) == []) is (taken or good is None)


NAMES = st.sampled_from(["a", "bb", "tbt", "scale", "d_8", "b", "o"])


@pytest.mark.slow  # half a second
@given(
    st.lists(NAMES, min_size=2, max_size=3),
    st.text("lohtd /%()[]{}816", max_size=12),
    st.lists(st.text("bohtds /%()[]{}8B16", max_size=8), min_size=3, max_size=3),
    st.booleans(),
)
@strategies.cases(1500)
def test_planes_that_the_parser_takes(planes: list[str], text: str, orders: list[str], apart: bool) -> None:
    """Letters in names of planes are not axes, in any context."""
    names = f"<{' '.join(planes)}>"
    declared = {"order": f"[l {names}] b {text}" if apart else f"b {text} {names}"}
    own = {name: {"order": order} for name, order in zip(planes, orders, strict=False)}
    text = json.dumps({**declared, "axes": {"s": "hd//8"}, "planes": own})
    try:
        spec.parse(text)
    except kvbm.SpecError:
        return
    assert refused("layout", text) == [], text


def test_planes_are_what_is_described() -> None:
    said = schema.layout_schema()["properties"]["planes"]["additionalProperties"]["properties"]
    assert tuple(said) == grammar.PLANE_KEYS and said["dtype"]["enum"] == list(kvbm.layout.shapes.ITEMSIZE)


# ---- placements ----------------------------------------------------------------------------------------------------

PLACEMENT = """title: 8
mesh: pp2 tp8
shard: {h: tp/4, t: tp%4 by 1, l: {over: pp, bounds: [0, 5, '12']}}
layers: [0-2, 5, 7-11 by 2]
nt: 64
"""


@pytest.mark.parametrize(
    ("old", "new", "good"),
    [
        ("", "", True),
        ("mesh: pp2 tp8", "mesh: ' pp2   tp8 '", True),
        ("h: tp/4", "h: ' tp/4%2 '", True),
        ("by 1", "by nt", True),
        ("{over: pp, bounds: [0, 5, '12']}", "pp", True),
        ("[0-2, 5, 7-11 by 2]", "3", True),
        ("[0-2, 5, 7-11 by 2]", "0 - 11 by 6", True),
        ("nt: 64", "nt: '64'", True),
        ("mesh: pp2 tp8", "mesh: pp2,tp8", False),
        ("mesh: pp2 tp8", "mesh: [pp2, tp8]", False),
        ("mesh: pp2 tp8", "mesh: tp", False),
        ("mesh: pp2 tp8\n", "", False),
        ("h: tp/4", "h: tp//4", False),
        ("h: tp/4", "h: tp by 4", False),
        ("h: tp/4", "h: {over: tp, bounds: [0, 2]}", False),
        ("h: tp/4", "o: tp", False),
        ("tp%4 by 1", "tp%4", False),
        ("tp%4 by 1", "tp%4 by 0", False),
        ("bounds:", "bound:", False),
        ("[0, 5, '12']", "[0, 5, 12.5]", False),
        ("[0-2, 5, 7-11 by 2]", "[]", False),
        ("[0-2, 5, 7-11 by 2]", "[0..2]", False),
        ("nt: 64", "nt: 0", False),
        ("nt: 64", "nt: 1.5", False),
        ("title: 8", "tittle: 8", False),
        ("h: tp/4", "h: cp", None),
        ("h: tp/4", "h: tp/3", None),
        ("[0, 5, '12']", "[0, 12, 5]", None),
        ("nt: 64", "nt: 999999999", None),
    ],
)
def test_placements(old: str, new: str, good: bool | None) -> None:
    """The schema agrees with the parser (None: only the parser can detect the error)."""
    assert old in PLACEMENT
    text = PLACEMENT.replace(old, new)
    try:
        kvbm.Placement.parse(text, kvbm.BlockShape(nl=12, no=2, nh=2, nt=16, hd=64))
        taken = True
    except kvbm.SpecError:
        taken = False
    assert taken is bool(good), text
    assert (refused("placement", text) == []) is (taken or good is None), text


@given(st.text("tpnby0123458/% -,[]", max_size=14), st.sampled_from(["mesh", "h", "t", "l", "layers", "nt"]))
@strategies.cases(1500)
def test_placements_that_the_parser_takes(text: str, key: str) -> None:
    values: dict[str, Any] = {"mesh": "tp8", "shard": {"h": "tp%2"}}
    values["shard" if key in {"h", "t", "l"} else key] = {key: text} if key in {"h", "t", "l"} else text
    declared = json.dumps(values)
    try:
        kvbm.Placement.parse(declared, kvbm.BlockShape(nl=8, no=2, nh=2, nt=16, hd=64))
    except kvbm.SpecError:
        return
    assert refused("placement", declared) == [], declared


def test_placements_are_what_is_described() -> None:
    said = schema.placement_schema()["properties"]
    assert tuple(said) == placement.KEYS and tuple(said["shard"]["properties"]) == tuple(placement.SHARED)
