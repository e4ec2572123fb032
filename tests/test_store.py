"""Pools in files: whatever a file says, it is a pool, or an error of kvbm's in one sentence."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvbm
from kvbm import store

SHAPE = kvbm.BlockShape(nl=1, no=2, nh=1, nt=2, hd=2, dtype="int16")
GOOD: dict[str, Any] = {
    "__metadata__": {
        "kvbm.format": "1",
        "kvbm.layout": "universal",
        "kvbm.fingerprint": kvbm.load("universal").fingerprint,
        "kvbm.shape": '{"nl": 1, "no": 2, "nh": 1, "nt": 2, "hd": 2, "dtype": "int16"}',
        "kvbm.num_blocks": "1",
    },
    "alloc_00000": {"dtype": "I16", "shape": [1, 1, 2, 2, 2], "data_offsets": [0, 16]},
}
DEEP = "[" * 100_000
LONG = "9" * 5000


def write(path: Path, header: str | bytes, body: int = 16) -> Path:
    raw = header if isinstance(header, bytes) else header.encode("utf-8", "surrogatepass")
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(body))
    return path


def take(path: Path) -> kvbm.Pool:
    """All of what a command asks a file for."""
    stored = store.read(path)
    stored.shape, stored.num_blocks, stored.layout_name, stored.fingerprint  # noqa: B018
    return stored.pool(kvbm.load("universal"))


def changed(place: tuple[str, ...], value: Any) -> str:
    """The good header with a JSON text in one place."""
    header = json.loads(json.dumps(GOOD))
    into = header
    for key in place[:-1]:
        into = into[key]
    into[place[-1]] = "HERE"
    return json.dumps(header).replace('"HERE"', value if isinstance(value, str) else json.dumps(value))


def test_the_good_one(tmp_path: Path) -> None:
    assert take(write(tmp_path / "in", json.dumps(GOOD))).num_blocks == 1


SHAPE_AT, OFFSETS = ("alloc_00000", "shape"), ("alloc_00000", "data_offsets")


@pytest.mark.parametrize(
    "header",
    [
        DEEP,
        "[]",
        "null",
        "7",
        b"\xff\xfe",
        changed(("alloc_00000",), DEEP + "]" * 100_000),
        changed(("alloc_00000",), "[]"),
        changed(("__metadata__",), "[]"),
        changed(("__metadata__",), "null"),
        *(
            changed(SHAPE_AT, text)
            for text in ('"16"', "[[16]]", "{}", "[{}]", "[1e400]", f"[1{'0' * 400}]", f"[{LONG}]")
        ),
        *(changed(SHAPE_AT, text) for text in ("[-1, -16]", "[true, 8]", "[8.0]", "null", str([1] * 100_000))),
        *(changed(("alloc_00000", "dtype"), text) for text in ("[]", "{}", "null", "7", '"F7"')),
        *(changed(OFFSETS, text) for text in ("[0, Infinity]", "[NaN, 16]", "[0, 16.0]", "[false, 16]", '"0"', "[0]")),
        *(changed(OFFSETS, text) for text in (f"[0, {LONG}]", "[0, -1]", "16", "[0, 16, 16]", '["0", "16"]')),
        *(changed(("__metadata__", "kvbm.num_blocks"), f'"{text}"') for text in (LONG, "-1", "1.0", "x", "", "²")),
        changed(("__metadata__", "kvbm.num_blocks"), "1"),
        *(changed(("__metadata__", "kvbm.shape"), text) for text in (json.dumps(DEEP), '"[]"', '"7"', '"{}"', "null")),
        changed(("__metadata__", "kvbm.shape"), json.dumps('{"nl": 1' + "0" * 400 + "}")),
        changed(("__metadata__", "kvbm.shape"), json.dumps(json.dumps({"nl": [], "no": 2}))),
        changed(("__metadata__", "kvbm.format"), '"2"'),
    ],
    ids=lambda header: str(header[:40]),
)
def test_hostile_headers(tmp_path: Path, header: str | bytes) -> None:
    with pytest.raises(kvbm.BindError) as error:
        take(write(tmp_path / "in", header))
    assert str(error.value).startswith(str(tmp_path / "in")) and len(str(error.value)) < 1000


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([2**63, -1, 10**30]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
PLACES = [
    ("__metadata__",), *(("__metadata__", key) for key in GOOD["__metadata__"]),
    ("alloc_00000",), *(("alloc_00000", key) for key in GOOD["alloc_00000"]), ("alloc_00001",),
]  # fmt: skip


@given(st.sampled_from(PLACES), VALUES | VALUES.map(json.dumps))
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_header(tmp_path: Path, place: tuple[str, ...], value: Any) -> None:
    with contextlib.suppress(kvbm.KvbmError):
        take(write(tmp_path / "in", changed(place, json.dumps(value))))


@given(st.binary(max_size=64))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_bytes(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "in").write_bytes(data)
    with pytest.raises(kvbm.BindError):
        take(tmp_path / "in")
    with contextlib.suppress(kvbm.KvbmError):
        take(write(tmp_path / "in", data))


def test_a_number_of_blocks_is_compared_before_anything_is_listed(tmp_path: Path) -> None:
    """Red: it took minutes and gigabytes, for a file of 2 KB."""
    meta = {**GOOD["__metadata__"], "kvbm.num_blocks": "400000000000000"}
    start = time.process_time()
    with pytest.raises(kvbm.BindError, match="no tensor 'alloc_00001'; layout 'universal' expects 400,000,000,000,000"):
        take(write(tmp_path / "in", json.dumps({**GOOD, "__metadata__": meta})))
    extra = {"alloc_00001": {"dtype": "I16", "shape": [0], "data_offsets": [16, 16]}}
    write(tmp_path / "in", json.dumps({**GOOD, **extra}))
    with pytest.raises(kvbm.BindError, match="'alloc_00001' is one too many"):
        take(tmp_path / "in")
    assert time.process_time() - start < 30


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero")):
        with pytest.raises(kvbm.BindError, match="expected a regular file"):
            store.read(path)
    with pytest.raises(FileNotFoundError):
        store.read(tmp_path / "nowhere")


def test_one_of_two_makes_a_file(tmp_path: Path) -> None:
    """Both begin; the second one to end is told, and leaves nothing."""
    path = tmp_path / "out"
    first = store.create(path, kvbm.load("universal"), SHAPE, 1)
    second = store.create(path, kvbm.load("universal"), SHAPE, 1)
    first.__enter__().arrays[0][...] = 1
    second.__enter__().arrays[0][...] = 2
    first.__exit__(None, None, None)
    with pytest.raises(FileExistsError, match="already there"):
        second.__exit__(None, None, None)
    assert (take(path).arrays[0] == 1).all() and [each.name for each in tmp_path.iterdir()] == ["out"]
    with store.create(path, kvbm.load("universal"), SHAPE, 1, force=True) as pool:
        pool.arrays[0][...] = 3
    assert (take(path).arrays[0] == 3).all()


def test_no_folder_is_made(tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError, match="no such folder"),
        store.create(tmp_path / "there" / "out", kvbm.load("universal"), SHAPE, 1),
    ):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", [("__metadata__", "kvbm.layout"), ("__metadata__", "kvbm.order"), ("alloc_00000", "dtype")])
def test_half_a_character_is_no_text(tmp_path: Path, place: tuple[str, ...]) -> None:
    """An error that quoted it could not be printed."""
    with pytest.raises(kvbm.BindError, match="surrogates not allowed") as error:
        take(write(tmp_path / "in", changed(place, '"\\ud800"')))
    str(error.value).encode()


def test_long_texts_of_a_header_are_cut(tmp_path: Path) -> None:
    with pytest.raises(kvbm.BindError) as error:
        take(write(tmp_path / "in", changed(("__metadata__", "kvbm.fingerprint"), '"' + "x" * 5000 + '"')))
    assert len(str(error.value)) < 1000


def test_a_shape_that_does_not_fit_the_layout_names_the_file(tmp_path: Path) -> None:
    shape = json.dumps(json.dumps({"nl": 1, "no": 3, "nh": 1, "nt": 2, "hd": 2, "dtype": "int16"}))
    header = changed(("__metadata__", "kvbm.shape"), shape).replace(kvbm.load("universal").fingerprint, "")
    stored = store.read(write(tmp_path / "in", header.replace('"kvbm.fingerprint": "", ', "")))
    halves = kvbm.spec.parse("order: {k: '[b] l o h t d', v: '[b] l o h d t'}")
    with pytest.raises(kvbm.BindError, match=f"{tmp_path / 'in'}: .*no must be 1 or 2, got 3"):
        stored.pool(halves)
