"""Pools in files: any file is either read as a pool, or refused with an error of kvbm's in one sentence."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvbm
import matrix
from kvbm import store
from kvbm.testing.digests import digest
from memory import placed

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
    """Read all that a command needs from a file."""
    stored = store.read(path)
    stored.shape, stored.num_blocks, stored.layout_name, stored.fingerprint  # noqa: B018
    return stored.pool(kvbm.load("universal"))


def changed(place: tuple[str, ...], value: Any) -> str:
    """The good header with a piece of its JSON replaced."""
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
        *(changed(("__metadata__", "kvbm.num_blocks"), f'"{text}"') for text in (LONG, "-1", "1.0", "x", "", "²", "١", "１")),
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


def test_what_no_header_has_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    """Each of these is a header of megabytes of which a parser of JSON would make millions of objects."""
    good, size = json.dumps(GOOD), 3_000_000
    for text in (
        "[]," * size,
        "[" * size,
        '{"a": [' + "[]," * size + "[]]}",
        changed(SHAPE_AT, "[" + "1, " * size + "1]"),
        changed(("alloc_00000",), "{" + '"a": [], ' * size + '"b": 1}'),
        changed(("alloc_00000", "dtype"), "[" + "{}," * size + "{}]"),
        changed(("__metadata__",), "[" + "{}," * size + "{}]"),
        changed(("__metadata__",), "{" + '"a": "", ' * size + '"b": ""}'),
        changed(("__metadata__", "kvbm.shape"), json.dumps("[" + "[]," * 1_000_000 + "[]]")),
        good[:-1] + ', "x": ' + "[]" * size,
        good[:-1] + "," * size + "}",
        good + " " * size + "x",
        '{"' + "\\u0041" * size + '": 1}',
    ):
        path = write(tmp_path / "in", text)
        tracemalloc.start()
        with pytest.raises(kvbm.BindError) as error:
            take(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(str(error.value)) < 1000 and str(error.value).startswith(str(path))
        assert peak < 4 * len(text) + (1 << 20), "the bytes, the text and one name"


@pytest.mark.parametrize(
    "header",
    [
        json.dumps(GOOD)[:-1] + ', "__metadata__": {}}',
        json.dumps(GOOD)[:-1] + ', "__meta\\u0064ata__": {"dtype": "I16", "shape": [0], "data_offsets": [16, 16]}}',
        json.dumps(GOOD)[:-1] + ', "alloc_00000": {"dtype": "I16", "shape": [0], "data_offsets": [16, 16]}}',
        changed(("alloc_00000",), '{"dtype": "I16", "shape": [8], "shape": [1, 1, 2, 2, 2], "data_offsets": [0, 16]}'),
        changed(("__metadata__",), json.dumps(GOOD["__metadata__"])[:-1] + ', "kvbm.num_blocks": "1"}'),
        changed(
            ("__metadata__", "kvbm.shape"),
            json.dumps('{"nl": 2, "nl": 1, "no": 2, "nh": 1, "nt": 2, "hd": 2, "dtype": "int16"}'),
        ),
        json.dumps(GOOD) + "{}",
        json.dumps(GOOD)[:-1] + ",}",
        "{,}",
        json.dumps(GOOD).encode("utf-16"),
        b"\xef\xbb\xbf" + json.dumps(GOOD).encode(),
    ],
)
def test_headers_that_readers_understand_differently(tmp_path: Path, header: str | bytes) -> None:
    with pytest.raises(kvbm.BindError):
        take(write(tmp_path / "in", header))


def test_headers_as_other_writers_write_them(tmp_path: Path) -> None:
    """With blanks, in any order, with escapes, and with a field that is not known."""
    tensor = '{"data_offsets" :[ 0,16 ] , "note":"x", "shape":[1,1,2 ,2,2],"dtype" : "I\\u00316"}'
    for text in (
        json.dumps(GOOD, indent=3),
        "\n" + json.dumps(dict(reversed(GOOD.items()))) + "   ",
        changed(("alloc_00000",), tensor),
        json.dumps(GOOD | {"\ud83d\ude00": {"dtype": "I16", "shape": [0], "data_offsets": [16, 16]}}),
    ):
        stored = store.read(write(tmp_path / "in", text))
        assert stored.tensors["alloc_00000"].shape == (1, 1, 2, 2, 2) and stored.num_blocks == 1
    with_none = {"alloc_00000": GOOD["alloc_00000"]}
    assert store.read(write(tmp_path / "in", json.dumps(with_none))).metadata == {}
    assert store.read(write(tmp_path / "in", "{}", 0)).tensors == {}


def test_texts_of_a_file_reach_messages_escaped(tmp_path: Path) -> None:
    """Escape sequences, line breaks and marks of direction."""
    evil = "x\x1b[31m\n\u202e\x9b"
    for place in (
        ("__metadata__", "kvbm.layout"), ("__metadata__", "kvbm.order"), ("__metadata__", "kvbm.fingerprint"),
        ("__metadata__", "kvbm.shape"), ("__metadata__", "kvbm.num_blocks"), ("__metadata__", "kvbm.format"),
        ("__metadata__", "kvbm.digest"), ("alloc_00000", "dtype"),
    ):  # fmt: skip
        path = write(tmp_path / "in", changed(place, json.dumps(evil)))
        for call in (
            lambda path=path: take(path),
            lambda path=path: store.load(path),
            lambda path=path: store.verify(path),
            lambda path=path: store.read(path).pool(kvbm.load("nhd")),
        ):
            with contextlib.suppress(kvbm.KvbmError):
                call()
                continue
            with pytest.raises(kvbm.KvbmError) as error:
                call()
            assert str(error.value).isprintable(), (place, str(error.value))
    names = {evil: GOOD["alloc_00000"], "__metadata__": GOOD["__metadata__"]}
    with pytest.raises(kvbm.BindError) as error:
        take(write(tmp_path / "in", json.dumps(names)))
    assert str(error.value).isprintable()


def test_names_of_files_reach_the_terminal_escaped(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from kvbm.cli.app import main

    path = tmp_path / "x\x1b[31m\u202e\x9b"
    store.save(path, noise("nhd", FEW))
    for words in (["verify", str(path)], ["digest", str(path)], ["convert", str(path), f"{path}2", "--to", "hnd"]):
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0 and "x\\x1b[31m\\u202e\\x9b" in result.output
        assert all(line.isprintable() for line in result.output.split("\n")), words
    path.write_bytes(b"x")
    for words in (["verify", str(path)], ["digest", str(path)]):
        result = CliRunner().invoke(main, words)
        assert result.exit_code and all(line.isprintable() for line in result.output.split("\n")), words


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
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@pytest.mark.slow  # 0.4 s
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


def test_a_stream_on_the_cpu_is_refused(tmp_path: Path) -> None:
    """As for every copy; no file is left."""
    pool = kvbm.Pool.allocate(kvbm.load("nhd"), kvbm.BlockShape(nl=2, no=2, nh=2, nt=4, hd=8, dtype="float16"), 2)
    with pytest.raises(kvbm.BindError, match="stream: the pool is on the CPU"):
        store.save(tmp_path / "blocks.safetensors", pool, stream=5)
    assert not list(tmp_path.iterdir())


def test_a_number_of_blocks_is_compared_before_anything_is_listed(tmp_path: Path) -> None:
    """Red: a file of 2 KB took minutes and gigabytes."""
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
    """Both begin; the second one to end gets an error, and leaves no file."""
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
    (tmp_path / "link").symlink_to("there/out")
    with (
        pytest.raises(FileNotFoundError, match="no such folder"),
        store.create(tmp_path / "link", kvbm.load("universal"), SHAPE, 1),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"a": 1}, "metadata: expected texts by name, got 1"),
        ({1: "a"}, "metadata: expected texts by name, got 1"),
        ({"a": "\ud800"}, "metadata: expected texts by name"),
        ({"a": "x" * 100_000_001}, "expected texts of at most 16,777,216 characters"),
    ],
    ids=["number", "key", "half a character", "long"],
)
def test_metadata_that_no_file_could_be_read_with(tmp_path: Path, metadata: Any, match: str) -> None:
    pool = kvbm.Pool.allocate(kvbm.load("universal"), SHAPE, 1)
    with pytest.raises(kvbm.BindError, match=match):
        store.save(tmp_path / "out", pool, metadata=metadata)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", [("__metadata__", "kvbm.layout"), ("__metadata__", "kvbm.order"), ("alloc_00000", "dtype")])
def test_half_a_character_is_no_text(tmp_path: Path, place: tuple[str, ...]) -> None:
    """Red: an error message that quoted it could not be printed."""
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
    halves = kvbm.layout.spec.parse("order: {k: '[b] l o h t d', v: '[b] l o h d t'}")
    with pytest.raises(kvbm.BindError, match=f"{tmp_path / 'in'}: .*no must be 1 or 2, got 3"):
        stored.pool(halves)


# ---- digests ---------------------------------------------------------------------------------------------------------

FEW = "nl=3,no=2,nh=2,nt=4,hd=8,dtype=bfloat16"
MLA, V4 = "nl=2,no=1,nh=1,nt=8,hd=576,dtype=bfloat16", "nl=2,no=1,nh=1,nt=64,hd=512,dtype=bfloat16"
GQA = "nl=2,no=2,nh=4,nt=128,hd=128,dtype=bfloat16"


def noise(name: str | kvbm.Layout, text: str, blocks: int = 3) -> kvbm.Pool:
    """Blocks with noise in every byte, including padding."""
    layout = kvbm.load(name) if isinstance(name, str) else name
    pool, rng = kvbm.Pool.allocate(layout, kvbm.load_shape(text), blocks), np.random.default_rng(7)
    for array in pool.arrays:
        array.view(np.uint8)[...] = rng.integers(0, 256, array.view(np.uint8).shape, np.uint8)
    return pool


def same(one: store.Digests, other: store.Digests) -> bool:
    pairs = zip(one.arrays(), other.arrays(), strict=True)
    return all(a.dtype == b.dtype == np.uint64 and np.array_equal(a, b) for a, b in pairs)


def stored(path: Path) -> store.Digests:
    found = store.read(path).digests
    assert found is not None
    return found


def test_digests_are_those_of_the_definition(tmp_path: Path) -> None:
    """Digests of blocks, layers and tokens, computed by NumPy, for every layout of a file."""
    text = 'order: "[b] t l o h d"\n'
    pool = noise(kvbm.layout.spec.parse(text, name="canonical"), FEW)
    bytes_ = [array.view(np.uint8) for array in pool.arrays]  # t l o h, bytes
    for name in ("nhd", "universal", "hnd", "vllm/LBHNC", "vllm/paged_attn_v0"):
        store.save(tmp_path / "out", pool, layout=kvbm.load(name), force=True)
        found = stored(tmp_path / "out")
        assert found.layers is not None and found.tokens is not None
        assert found.layers.shape == (3, 3) and found.tokens.shape == (3, 4)
        for block, held in enumerate(bytes_):
            assert found.blocks[block] == digest(held)
            up_to = [digest(held[:, :count], model={"": (3, 2, 2)}) if count else 0 for count in range(4)]
            assert [int(one) for one in found.layers[block]] == [(up_to[i + 1] - up_to[i]) % 2**64 for i in range(3)]
            for token in range(4):
                assert found.tokens[block, token] == digest(held[token : token + 1], token)
        assert not found.torn().any()


def test_digests_of_planes_in_four_bits(tmp_path: Path) -> None:
    text = 'order: "[<x y> l] b"\nplanes: {x: {order: t d, dtype: int4}, y: {order: t, dtype: float64}}\n'
    pool = noise(kvbm.layout.spec.parse(text, name="mine"), "nl=2,no=1,nh=1,nt=3,hd=6", 5)
    store.save(tmp_path / "out", pool, [4, 0])
    found = stored(tmp_path / "out")
    for row, block in enumerate((4, 0)):
        x, y = (np.stack([array.view(np.uint8)[block].reshape(3, -1) for array in pool.arrays[at : at + 2]], 1) for at in (0, 2))
        assert found.blocks[row] == digest({"x": x, "y": y})
        assert found.tokens is not None and found.tokens[row, 2] == digest({"x": x[2:], "y": y[2:]}, 2)


PAIRS = [
    ("nhd", "universal", FEW),
    ("vllm/LBHNC", "vllm/paged_attn_v0", FEW),
    ("vllm/tpu", "hf/dynamic_cache", FEW),
    ("operational", "operational", FEW),
    ("vllm/fp8_ds_mla", "record/mla_fp8_tensors", MLA),
    ("vllm/nvfp4", "record/nvfp4_tensors", GQA),
    ("record/mxfp8_universal", "sglang/mxfp8", GQA),
    ("vllm/deepseek_v4", "record/deepseek_v4_tokens", V4),
    ("vllm/dsa_indexer_mxfp4", "record/dsa_indexer_mxfp4_tokens", V4.replace("512", "128")),
]


@pytest.mark.parametrize(("src", "dst", "shape"), PAIRS)
def test_there_and_back(tmp_path: Path, src: str, dst: str, shape: str) -> None:
    """Digests and blocks are equal in each layout; padding belongs to neither."""
    pool = noise(src, shape, 5)
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    store.save(a, pool)
    store.convert(a, b, kvbm.load(dst))
    store.convert(b, c, kvbm.load(src), [3, 1])
    assert same(stored(a), stored(b)) and same(stored(a).take([3, 1]), stored(c))
    assert np.array_equal(stored(a).blocks, pool.digest())
    for path in (a, b, c):
        assert store.verify(path) == [] and same(store.digest(path), stored(path))
    back = store.load(b, [2, 4], layout=kvbm.load(src))
    want = kvbm.Pool.allocate(pool.layout, pool.shape, 2)
    for each in (back, want):  # what is compared is elements
        clean = kvbm.Pool.allocate(pool.layout, pool.shape, 2)
        for array in clean.arrays:
            array.view(np.uint8)[...] = 0
        kvbm.convert(*((back, clean) if each is back else (pool, clean)), None if each is back else [2, 4], [0, 1])
        each.arrays = clean.arrays
    assert all(np.array_equal(x.view(np.uint8), y.view(np.uint8)) for x, y in zip(back.arrays, want.arrays, strict=True))


def flip(path: Path, at: int, bit: int = 3) -> None:
    with path.open("rb+") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


@contextlib.contextmanager
def flipped(path: Path, at: int, bit: int = 3) -> Iterator[None]:
    flip(path, at, bit)
    yield
    flip(path, at, bit)


@pytest.mark.parametrize("name", ["nhd", "universal", "vllm/LBHNC", "vllm/paged_attn_v0"])
def test_a_flipped_bit_is_named(tmp_path: Path, name: str) -> None:
    """Everywhere in the data: first and last bytes of each tensor, and some between; the oracle gives the places."""
    path = tmp_path / "in"
    store.save(path, noise(name, FEW))
    tensors = [entry for key, entry in sorted(store.read(path).tensors.items()) if key.startswith("alloc")]
    entries, offsets = placed(matrix.orders()[name], kvbm.load_shape(FEW), 3).address(range(3))
    at = np.array([entry.begin for entry in tensors])[entries] + offsets  # b l o h t d
    picks = np.random.default_rng(3).permutation(at.size)[:25].tolist()
    picks += [int(np.flatnonzero(at == end)[0]) for entry in tensors for end in (entry.begin, entry.end - 2)][:20]
    for pick in picks:
        block, layer, _, _, token, _ = map(int, np.unravel_index(pick, at.shape))
        with flipped(path, int(at.flat[pick]) + pick % 2, pick % 8):
            (found,) = store.verify(path)
            assert (found.block, found.what, found.layers, found.tokens) == (block, "data", (layer,), (token,))
            assert found.expected == stored(path).blocks[block] != found.found
            assert store.verify(path, [b for b in range(3) if b != block]) == []
    with contextlib.ExitStack() as stack:
        for place in ((1, 0, 0, 0, 2, 0), (1, 2, 1, 1, 3, 7), (0, 1, 0, 0, 0, 0)):
            stack.enter_context(flipped(path, int(at[place])))
        zero, one = store.verify(path)
        assert (one.block, one.layers, one.tokens) == (1, (0, 2), (2, 3)) and (zero.layers, zero.tokens) == ((1,), (0,))
        said = r"in: block 1: layers 0, 2, tokens 2-3: digest 0x[0-9a-f]{16}, stored 0x[0-9a-f]{16}"
        with pytest.raises(kvbm.DigestError, match=said) as error:
            store.load(path, [1, 2])
        assert error.value.pairs == (1,) and str(error.value).startswith(str(path))
        with pytest.raises(kvbm.DigestError, match=r"block 0: layer 1, token 0: .*; and 1 more") as error:
            store.convert(path, tmp_path / "out", kvbm.load("hnd"))
        assert error.value.pairs == (0, 1) and not (tmp_path / "out").exists()
        store.load(path, verify=False)
        store.convert(path, tmp_path / "out", kvbm.load("hnd"), verify=False)
        assert [each.block for each in store.verify(tmp_path / "out")] == [0, 1], "the digests are still those of before"


def test_a_flipped_digest_is_named(tmp_path: Path) -> None:
    """The error names the digest's block, layer or token, and says that the digest was changed, not the block."""
    path = tmp_path / "in"
    store.save(path, noise("nhd", FEW))
    tensors = store.read(path).tensors
    for key, wide, expected in (
        ("kvbm.digests", 1, ((), ())),
        ("kvbm.digests.layers", 3, (None, ())),
        ("kvbm.digests.tokens", 4, ((), None)),
    ):
        entry = tensors[key]
        for at in range(entry.begin, entry.end, 5):
            row, column = divmod((at - entry.begin) // 8, wide)
            with flipped(path, at):
                (found,) = store.verify(path)
                assert (found.block, found.what) == (row, "digests")
                assert (found.layers, found.tokens) == tuple((column,) if one is None else one for one in expected)
                with pytest.raises(kvbm.DigestError, match=f"in: block {row}: its stored digests were changed"):
                    store.load(path)


def test_no_flip_goes_unseen(tmp_path: Path) -> None:
    """Any byte of a file, also in the header: an error, or the same blocks."""
    path = tmp_path / "in"
    pool = noise("universal", "nl=1,no=1,nh=1,nt=2,hd=2,dtype=int16", 2)
    store.save(path, pool)
    raw = path.read_bytes()
    text = 8 + len(raw[8:].split(b"}  ")[0])
    for at in [*range(text + 2), *range(text + 2, len(raw) - 200, 501), *range(len(raw) - 100, len(raw))]:
        with flipped(path, at, at % 8):
            try:
                if store.verify(path):
                    continue
                found = store.load(path)
            except kvbm.KvbmError:
                continue
            assert np.array_equal(found.digest(), pool.digest()), (at, raw[at - 20 : at + 20])


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("vllm/tpu", "nl=1,no=2,nh=1,nt=2,hd=576,dtype=bfloat16"),
        ("vllm/deepseek_v4", V4),
        ("vllm/nvfp4", GQA.replace("128", "64")),
    ],
)
def test_padding_is_no_part_of_a_block(tmp_path: Path, name: str, shape: str) -> None:
    """Bytes without an element may change; a change of any other byte is found."""
    pool = noise(name, shape, 2)
    store.save(tmp_path / "in", pool)
    for array in pool.arrays:
        array.view(np.uint8)[...] = 255
    store.save(tmp_path / "ones", pool)  # of which padding is zeros
    mask, told = (tmp_path / "ones").read_bytes(), []
    for entry in store.read(tmp_path / "in").blocks.values():
        rare = [at for at in range(entry.begin, entry.end) if not mask[at]][:: 1 + entry.end // 1000]
        for at in (*range(entry.begin, entry.end, (entry.end - entry.begin) // 16 + 1), *rare[:8], *rare[-8:], entry.end - 1):
            with flipped(tmp_path / "in", at):
                assert bool(store.verify(tmp_path / "in")) == bool(mask[at])
            told.append(bool(mask[at]))
    assert True in told and (False in told or pool.nbytes == 2 * pool.resolved.block_bytes)


# ---- files without, and with strange digests ---------------------------------------------------------------------------


def test_files_without_digests(tmp_path: Path) -> None:
    """They can be loaded, converted, and given digests; files with digests are not changed."""
    path, pool = tmp_path / "in", noise("nhd", FEW)
    store.save(path, pool, digests=False, metadata={"mine": "kept", "kvbm.digest": "not kept"})
    path.chmod(0o600)
    assert store.read(path).digests is None and np.array_equal(store.load(path).digest(), pool.digest())
    with pytest.raises(kvbm.BindError, match="has no digests: `kvbm digest --write`"):
        store.verify(path)
    store.convert(path, tmp_path / "bare", kvbm.load("hnd"), verify=False)
    assert store.read(tmp_path / "bare").digests is None
    store.convert(path, tmp_path / "out", kvbm.load("hnd"))
    assert np.array_equal(stored(tmp_path / "out").blocks, pool.digest())
    made = store.add_digests(path)
    assert made.digests is not None and same(made.digests, stored(tmp_path / "out")) and store.verify(path) == []
    assert made.metadata["mine"] == store.read(tmp_path / "out").metadata["mine"] == "kept"
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(kvbm.BindError, match="the file has digests"):
        store.add_digests(path)


def test_a_layout_without_digests(tmp_path: Path) -> None:
    """Layouts with bytes of elements along another axis than the last have no digests: the file is written without, and says so."""
    text = 'order: "[<x y> l] b"\nplanes: {x: {order: d t, dtype: int4}, y: {order: t, dtype: float32}}\n'
    layout = kvbm.layout.spec.parse(text, name="mine")
    pool = noise(layout, "nl=2,no=1,nh=1,nt=4,hd=6")
    with pytest.raises(kvbm.PlanError):
        pool.digest()
    store.save(tmp_path / "in", pool)
    assert store.read(tmp_path / "in").digests is None and store.load(tmp_path / "in", src_layout=layout).num_blocks == 3
    for call in (store.digest, store.add_digests):
        with pytest.raises(kvbm.PlanError, match="share a byte"):
            call(tmp_path / "in", src_layout=layout)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"__metadata__": {"kvbm.digest": "kvbm-digest-2"}}, "kvbm.digest is 'kvbm-digest-2'"),
        ({"__metadata__": {"kvbm.digest": None}}, "kvbm.digest is None"),
        ({"__metadata__": {"kvbm.shape": None}}, "no shape or number of blocks"),
        ({"kvbm.digests": {"dtype": "F64"}}, r"'kvbm.digests': expected I64 \[3\], got F64"),
        ({"kvbm.digests.layers": {"shape": [1, 9]}}, r"expected I64 \[3, 3\], got I64 \[1, 9\]"),
        ({"kvbm.digests": None, "kvbm.digest": {}}, "expected|too many|bytes"),
    ],
)
def test_strange_digests(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "in"
    store.save(path, noise("nhd", FEW))
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    for key, changes in change.items():
        for name, value in (changes or {}).items():
            header.setdefault(key, {})[name] = value
            if value is None:
                del header[key][name]
        if changes is None:
            del header[key]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    with pytest.raises(kvbm.BindError, match=said) as error:
        store.verify(path)
    assert str(error.value).startswith(str(path))


def test_other_readers_take_all_of_it(tmp_path: Path, torch: Any) -> None:
    load_file = pytest.importorskip("safetensors.numpy").load_file
    pool = noise("nhd", FEW.replace("bfloat16", "float16"))
    store.save(tmp_path / "in", pool)
    found = load_file(tmp_path / "in")
    assert np.array_equal(found["kvbm.digests"].view(np.uint64), pool.digest())
    assert pytest.importorskip("safetensors.torch").load_file(tmp_path / "in")["kvbm.digests.tokens"].dtype == torch.int64
    stored_ = store.read(tmp_path / "in")
    assert min(entry.begin for entry in stored_.blocks.values()) % 4096 == 0, "kernels use their widest words"


def test_a_wrong_copy_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong, no file is written, and an existing one stays."""
    from kvbm.store import blocks

    pool = noise("nhd", FEW)
    store.save(tmp_path / "in", pool)
    (tmp_path / "out").write_bytes(b"mine")
    right = blocks.convert_blocks

    def wrong(src: Any, dst: Any, ids: Any, into: Any, **rest: Any) -> None:
        right(src, dst, ids, into, **rest)
        right(src.section(l=1), dst.section(l=2), [ids[0]], [into[1]], **rest)

    monkeypatch.setattr(blocks, "convert_blocks", wrong)
    said = "block 1: layer 2, tokens 0-3: "
    with pytest.raises(kvbm.DigestError, match=f"in → .*out: {said}"):
        store.convert(tmp_path / "in", tmp_path / "out", kvbm.load("hnd"), force=True)
    with pytest.raises(kvbm.DigestError, match=f"Pool.* → .*out: {said}"):
        store.save(tmp_path / "out", pool, force=True)
    with pytest.raises(kvbm.DigestError, match=f"in → Pool.*: {said}"):
        store.load(tmp_path / "in", layout=kvbm.load("hnd"))
    assert {each.name: each.stat().st_size > 4 for each in tmp_path.iterdir()} == {"in": True, "out": False}


def test_blocks_that_there_are_not(tmp_path: Path) -> None:
    store.save(tmp_path / "in", noise("nhd", FEW))
    for call in (store.load, store.verify, store.digest):
        for ids, said in (([3], "0 to 2, got 3"), ([-1], "got -1"), ([1, 1], "block once"), ([], "one block"), ("1", "numbers")):
            with pytest.raises(kvbm.BindError, match=said):
                call(tmp_path / "in", ids)


def test_progress_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbm.store import blocks

    monkeypatch.setattr(blocks, "_STEP_BYTES", 1)
    monkeypatch.setattr(blocks, "_READ_BYTES", 1)
    pool, told = noise("nhd", FEW), []
    each = pool.resolved.block_bytes
    store.save(tmp_path / "in", pool, progress=lambda *said: told.append(said))
    assert told == [(done * each, 3 * each) for done in (1, 2, 3)]
    assert same(stored(tmp_path / "in"), store.Digests.of(pool)), "step by step"
    store.convert(tmp_path / "in", tmp_path / "out", kvbm.load("hnd"))
    assert store.verify(tmp_path / "out", progress=lambda *said: told.append(said)) == [] and len(told) == 6


@pytest.mark.parametrize("name", ["vllm/LBHNC", "universal", "nhd", "vllm/BLHNC"])
@pytest.mark.parametrize("most", [1, 2, 3])
def test_files_of_many_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, most: int) -> None:
    """Blocks are read while those before them are converted: whichever are chosen, they are those that were stored."""
    from kvbm.store import blocks

    monkeypatch.setattr(blocks, "_READ_BYTES", most * kvbm.load(name).resolve(kvbm.load_shape(FEW), 7).block_bytes)
    pool = noise(name, FEW, 7)
    store.save(tmp_path / "in", pool)
    held = kvbm.Pool.allocate(kvbm.load("universal"), pool.shape, 7)
    kvbm.convert(pool, held)
    right = held.digest()
    for ids in (range(7), [6, 0, 3, 4, 1], [5], [1, 2, 3, 4, 5, 6, 0], [4, 2]):
        for layout in (name, "universal"):
            for verify in (True, False):
                got = store.load(tmp_path / "in", ids, layout=layout, verify=verify)
                assert np.array_equal(got.digest(), right[list(ids)]), (ids, layout)
        store.convert(tmp_path / "in", tmp_path / "out", "universal", ids, force=True)
        assert np.array_equal(store.load(tmp_path / "out").digest(), right[list(ids)])
        assert np.array_equal(store.digest(tmp_path / "in", ids).blocks, right[list(ids)])
        assert store.verify(tmp_path / "in", ids) == []
    with (tmp_path / "in").open("rb+") as file:  # the last byte of the last tensor is of the last block
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    for ids in (range(7), [6, 0, 3, 4, 1], [1, 6, 2]):
        assert [one.block for one in store.verify(tmp_path / "in", ids)] == [6]
        for layout in (name, "universal"):
            with pytest.raises(kvbm.DigestError, match="in: block 6: "):
                store.load(tmp_path / "in", ids, layout=layout)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvbm file")]


def test_no_thread_reads_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's memory is its own again, also where its own function raises, and the traceback keeps all alive."""
    from kvbm.store import blocks

    monkeypatch.setattr(blocks, "_READ_BYTES", 1)
    store.save(tmp_path / "in", noise("nhd", FEW, 7))

    def stop(*_: int) -> None:
        raise ZeroDivisionError

    for call in (store.load, store.verify, store.digest):
        with pytest.raises(ZeroDivisionError) as kept:
            call(tmp_path / "in", progress=stop)
        assert kept.tb and not [thread for thread in threading.enumerate() if thread.name.startswith("kvbm file")]


# ---- arguments of other types ------------------------------------------------------------------------------------------

WRONG = {
    "None": None, "an int": 5, "below 0": -1, "more than 64 bits": 1 << 70, "a float": 1.5, "a text": "universal", "bytes": b"x",
    "True": True, "a list": [], "texts": ["a"], "a list of None": [None], "a list of lists": [[0]], "a list of bools": [True],
    "a tuple": (), "a dict": {"a": 1}, "numbers by number": {1: 2}, "an object": object(), "a type": kvbm.Model, "a module": kvbm,
    "an array": np.zeros(3), "two axes": np.zeros((2, 2), int), "no axis": np.array(7), "a mask": np.ma.masked_array([0]),
    "a range": range(99), "a set": {0}, "a slice": slice(2), "a complex number": 1j, "a NUL": "\0", "half a character": "\ud800",
    "a layout": kvbm.load("universal"), "a shape": SHAPE, "an exception": ValueError("x"),
}  # fmt: skip
ANY = {
    "save": ("path", "pool", "ids", "layout", "digests", "metadata", "force", "progress"),
    "load": ("path", "ids", "layout", "src_layout", "shape", "num_blocks", "device", "verify", "progress"),
    "convert": ("src", "dst", "layout", "ids", "src_layout", "shape", "num_blocks", "device", "verify", "force",
                "progress"),
    "verify": ("path", "ids", "src_layout", "progress"),
    "digest": ("path", "ids", "src_layout", "shape", "num_blocks", "progress"),
    "add_digests": ("path", "src_layout", "shape", "num_blocks", "progress"),
    "create": ("path", "layout", "shape", "num_blocks", "digests", "metadata", "force"),
    "read": ("path",),
    "layout_of": ("stored",),
    "pool": ("layout", "shape", "num_blocks"),
    "of": ("pool", "ids", "kinds"),
    "take": ("rows",),
}  # fmt: skip
#: What is no wrong one.
RIGHT = {
    "None": {"ids", "layout", "src_layout", "shape", "num_blocks", "metadata", "progress", "kinds"},
    "True": {"digests", "force", "verify"}, "a text": {"path", "dst", "layout", "src_layout"}, "no axis": {"num_blocks"},
    "an int": {"num_blocks"}, "a layout": {"layout"}, "a shape": {"shape"}, "a set": {"ids", "rows"}, "a list": {"ids", "rows"},
    "a tuple": {"ids", "rows"}, "numbers by number": {"ids", "rows"}, "a type": {"progress"},
}  # fmt: skip
#: Arguments that are a path, or an open file.
FILES = {("path", "load"), ("src", "convert"), ("path", "verify"), ("path", "digest"), ("path", "add_digests")}


@pytest.mark.parametrize(("function", "name"), [(function, name) for function, names in ANY.items() for name in names])
def test_arguments_of_other_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, name: str) -> None:
    """Each is one of kvbm's errors that begins with the wrong argument; no file is created or lost."""
    monkeypatch.chdir(tmp_path)
    pool = noise("nhd", FEW)
    store.save("in", pool)
    store.save("bare", pool, digests=False)
    stored = store.read("in")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def made(**arguments: Any) -> None:
        with store.create(**arguments):
            raise AssertionError("the arguments were taken")

    call, arguments = {
        "save": (store.save, {"path": "out", "pool": pool}),
        "load": (store.load, {"path": "in"}),
        "convert": (store.convert, {"src": "in", "dst": "out", "layout": pool.layout}),
        "verify": (store.verify, {"path": "in"}),
        "digest": (store.digest, {"path": "in"}),
        "add_digests": (store.add_digests, {"path": "bare"}),
        "create": (made, {"path": "out", "layout": pool.layout, "shape": pool.shape, "num_blocks": 2}),
        "read": (store.read, {"path": "in"}),
        "layout_of": (store.layout_of, {"stored": stored}),
        "pool": (stored.pool, {"layout": pool.layout}),
        "of": (store.Digests.of, {"pool": pool}),
        "take": (store.Digests.of(pool).take, {"rows": [0]}),
    }[function]
    for kind, wrong in (WRONG | {"a section": pool.section(l=0), "the pool": pool, "the file": stored}).items():
        if name in RIGHT.get(kind, ()) or (name, kind) == ("pool", "the pool") or (name, kind) == ("stored", "the file"):
            continue
        if kind == "a text" and name == "src" and function == "convert":
            continue
        if kind == "the file" and (name, function) in FILES:  # what `read` returned
            continue
        with pytest.raises(kvbm.KvbmError) as error:
            call(**arguments | {name: wrong})
        if kind in ("an object", "a float", "a section", "a module"):
            assert str(error.value).startswith((f"{name}: expected", "in: expected numbers of blocks")), kind
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before, kind


def test_digests_of_other_blocks(tmp_path: Path) -> None:
    """More digests than blocks would be written over the blocks."""
    pool = noise("nhd", FEW)
    known = store.Digests.of(pool)
    for wrong in (
        known.take([0, 1]),
        store.Digests(known.blocks, known.tokens, known.layers),
        store.Digests(known.blocks.view(np.int64)),  # type: ignore[arg-type]
        store.Digests([1, 2, 3]),  # type: ignore[arg-type]
        store.Digests(known.blocks[:, None]),
    ):
        with (
            pytest.raises(kvbm.BindError, match=r"^digests: \w+: expected an array \(3,.*\) of uint64, got"),
            store.create(tmp_path / "out", pool.layout, pool.shape, 3, digests=wrong),
        ):
            raise AssertionError("they were taken")
    assert list(tmp_path.iterdir()) == []
    with store.create(tmp_path / "out", pool.layout, pool.shape, 3, digests=known) as made:
        kvbm.convert(pool, made)
    assert store.verify(tmp_path / "out") == []


# ---- readers beside writers --------------------------------------------------------------------------------------------


def at_call(last: int, call: Any, act: Any) -> int:
    """Run a function, and call another one when it makes its call number `last`, of Python or of C; return the number of calls."""
    count = 0

    def step(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == last:
            sys.setprofile(None)
            act()
            sys.setprofile(step)

    sys.setprofile(step)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def mapped(path: Path) -> list[int]:
    stored = store.read(path)
    pool = stored.pool(store.layout_of(stored))
    assert stored.digests is not None
    found = [int(one) for one in pool.digest()]
    assert found == stored.digests.blocks.tolist(), "header, digests and blocks of one file"
    return found


def reads(folder: Path) -> dict[str, Any]:
    """Functions that read the file `in`; each returns the digests of its blocks, computed from the blocks themselves."""
    path, out = folder / "in", folder / "out"

    def converted(**options: Any) -> list[int]:
        made = store.convert(path, out, kvbm.load("hnd"), force=True, **options)
        return [int(one) for one in made.pool(kvbm.load("hnd")).digest()]

    def verified() -> list[int]:
        with store.read(path) as stored:
            assert store.verify(stored) == []
            return [int(one) for one in store.digest(stored).blocks]

    return {
        "load": lambda: [int(one) for one in store.load(path).digest()],
        "load, not compared": lambda: [int(one) for one in store.load(path, verify=False).digest()],
        "load in another layout": lambda: [int(one) for one in store.load(path, layout=kvbm.load("hnd"), verify=False).digest()],
        "convert": converted,
        "convert, not compared": lambda: converted(verify=False),
        "verify": verified,
        "digest": lambda: [int(one) for one in store.digest(path).blocks],
        "mapped": lambda: mapped(path),
    }


@pytest.mark.slow
def test_a_file_that_is_replaced_at_any_step_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    """The two have other numbers of blocks, so that a header of one on bytes of the other has other places."""
    other = "nl=3,no=2,nh=1,nt=4,hd=8,dtype=float16"
    pools = [noise("nhd", other), noise("universal", FEW)]
    wanted = [[int(one) for one in pool.digest()] for pool in pools]
    for number, pool in enumerate(pools):
        store.save(tmp_path / f"kept{number}", pool)

    def put(number: int) -> None:
        (tmp_path / "next").unlink(missing_ok=True)
        os.link(tmp_path / f"kept{number}", tmp_path / "next")
        (tmp_path / "next").replace(tmp_path / "in")

    seen = set()
    for name, call in reads(tmp_path).items():
        put(0)
        calls = at_call(-1, call, None)
        for last in range(1, calls, max(1, calls // 24)):
            put(0)
            found: list[Any] = []
            at_call(last, lambda call=call, found=found: found.append(call()), lambda: put(1))
            assert found[0] in wanted, (name, last)
            seen.add((name, wanted.index(found[0])))
    assert len(seen) == 2 * len(reads(tmp_path)), "each was seen"


@pytest.mark.slow
def test_a_file_that_is_cut_at_any_step_is_an_error(tmp_path: Path) -> None:
    """A mapped one would end the process."""
    pool = noise("vllm/LBHNC", "nl=8,no=2,nh=4,nt=16,hd=64,dtype=float16")
    wanted = [int(one) for one in pool.digest()]
    store.save(tmp_path / "kept", pool)
    whole = (tmp_path / "kept").read_bytes()
    calls_ = {name: call for name, call in reads(tmp_path).items() if name != "mapped"}
    refused = 0
    for name, call in calls_.items():
        (tmp_path / "in").write_bytes(whole)
        calls = at_call(-1, call, None)
        for last in range(1, calls, max(1, calls // 16)):
            (tmp_path / "in").write_bytes(whole)
            found: list[Any] = []

            size = (1 << 13) + last * 4096 % len(whole)
            try:
                at_call(
                    last,
                    lambda call=call, found=found: found.append(call()),
                    lambda size=size: os.truncate(tmp_path / "in", size),
                )
            except kvbm.BindError as error:
                refused += 1
                assert str(error).startswith(str(tmp_path / "in")), (name, last)
            else:
                assert found == [wanted], (name, last)
    assert refused > 10


def test_what_is_open_stays_the_file_that_it_is(tmp_path: Path) -> None:
    """Header, digests and blocks, by each function that takes it."""
    old, new = noise("nhd", FEW), noise("universal", "nl=1,no=2,nh=1,nt=2,hd=8,dtype=float16")
    store.save(tmp_path / "in", old)
    with store.read(tmp_path / "in") as stored:
        store.save(tmp_path / "in", new, force=True)
        assert store.verify(stored) == [] and same(store.digest(stored), store.Digests.of(old))
        assert (store.load(stored).digest() == old.digest()).all()
        assert (stored.pool(old.layout).digest() == old.digest()).all()
        assert same(stored.digests, store.Digests.of(old))
        made = store.convert(stored, tmp_path / "out", old.layout)
        store.save(tmp_path / "out", new, force=True)
        assert made.shape == old.shape and (store.load(made).digest() == old.digest()).all()
        with pytest.raises(kvbm.BindError, match="in: the file has digests"):
            store.add_digests(stored)
    with pytest.raises(kvbm.BindError, match="in is closed; expected an open file"):
        store.load(stored)


def test_what_was_read_before_a_file_was_replaced_does_not_replace_it(tmp_path: Path) -> None:
    """Red: the new file held the old blocks, and nothing was said."""
    store.save(tmp_path / "in", noise("nhd", FEW), digests=False)
    new = noise("universal", FEW)
    with store.read(tmp_path / "in") as stored:
        store.save(tmp_path / "in", new, force=True)
        for call in (lambda: store.add_digests(stored), lambda: store.convert(stored, tmp_path / "in", "nhd", force=True)):
            with pytest.raises(kvbm.BindError, match="in: another file took its place since it was read; the new file is kept"):
                call()
        assert (store.load(tmp_path / "in").digest() == new.digest()).all()
        (tmp_path / "in").unlink()
        assert store.add_digests(stored).digests is not None  # nothing is there that could be lost


def test_digests_are_not_added_to_a_file_that_has_gone(tmp_path: Path) -> None:
    """The new file would be replaced by the old blocks."""
    store.save(tmp_path / "in", noise("nhd", FEW), digests=False)

    def replace(*_: int) -> None:
        store.save(tmp_path / "in", new, force=True)

    new = noise("universal", FEW)
    with pytest.raises(kvbm.BindError, match="in: another file took its place while it was converted; the new file is kept"):
        store.add_digests(tmp_path / "in", progress=replace)
    assert (store.load(tmp_path / "in").digest() == new.digest()).all()


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 1 << 30])
def test_blocks_that_are_read_are_those_that_are_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Of every shipped layout, in any order of blocks: one by one for half of the layouts, and at once for the others."""
    from kvbm.store import blocks, reading

    monkeypatch.setattr(blocks, "_STEP_BYTES", step)
    monkeypatch.setattr(reading, "_PIECE_BYTES", 1000)
    done = 0
    for layout in kvbm.layout.spec.load_dir(kvbm.layout.spec.layouts_dir())[step == 1 :: 2]:
        for text in (
            "nl=2,no=2,nh=4,nt=16,hd=32,dtype=bfloat16", "nl=2,no=1,nh=1,nt=64,hd=576,dtype=bfloat16",
            "nl=2,no=1,nh=1,nt=64,hd=512,dtype=float8_e4m3fn", "nl=2,no=2,nh=4,nt=16,hd=64,dtype=float4_e2m1fn",
        ):  # fmt: skip
            try:
                pool = kvbm.Pool.allocate(layout, kvbm.load_shape(text), 5)
            except kvbm.KvbmError:
                continue
            for seed, array in enumerate(pool.arrays):
                bits = np.random.default_rng(seed).integers(0, 255, (*array.shape, array.itemsize), np.uint8)
                array[...] = bits.view(array.dtype)[..., 0]
            store.save(tmp_path / "in", pool, digests=False, force=True)
            for ids in ([0, 1, 2, 3, 4], [3, 1, 2, 4], [2]):
                got = store.load(tmp_path / "in", ids, src_layout=layout, verify=False)
                want = kvbm.Pool.allocate(layout, pool.shape, len(ids))
                kvbm.convert(pool, want, ids, range(len(ids)))
                if pool.nbytes == pool.num_blocks * pool.resolved.block_bytes:
                    for one, other in zip(got.arrays, want.arrays, strict=True):
                        assert one.tobytes() == other.tobytes(), (layout.name, text, ids)
                if store.digests.Kinds.of(pool.resolved).blocks:
                    assert (got.digest() == pool.digest(ids)).all(), (layout.name, text, ids)
            done += 1
            break
    assert done > 50


# ---- whole, or not at all ----------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
import kvbm
from kvbm import store
from kvbm.system import cache
from kvbm.store import blocks, file

what, named = sys.argv[1:]
if named == "named":
    del os.O_TMPFILE
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
if what == "copy":
    blocks.convert_blocks = die
elif what == "sync":
    cache._sync = die
elif what == "replace":
    cache.Path.replace = die
store.convert("in", "out", kvbm.load("hnd"), force=True)
"""


@pytest.mark.parametrize("named", ["nameless", "named"])
@pytest.mark.parametrize("what", ["copy", "sync", "replace"])
def test_a_kill_leaves_the_old_file(tmp_path: Path, what: str, named: str) -> None:
    store.save(tmp_path / "in", noise("nhd", FEW))
    (tmp_path / "out").write_bytes(b"mine")
    done = subprocess.run([sys.executable, "-c", KILLED, what, named], cwd=tmp_path, check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL and (tmp_path / "out").read_bytes() == b"mine"
    left = {each.name for each in tmp_path.iterdir()} - {"in", "out"}
    if named == "nameless" and what != "replace" and hasattr(os, "O_TMPFILE"):
        assert not left, "a file without a name goes with its process"
    store.convert(tmp_path / "in", tmp_path / "out", kvbm.load("hnd"), force=True)
    assert store.verify(tmp_path / "out") == []


@pytest.mark.quick
def test_a_full_disk(tmp_path: Path) -> None:
    """The system's error, by a limit on the size of files: at once, and no file is left."""
    store.save(tmp_path / "in", noise("nhd", FEW))
    (tmp_path / "out").write_bytes(b"mine")
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "import kvbm; from kvbm import store\n"
        "store.convert('in', 'out', kvbm.load('hnd'), force=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 1 and "bytes wanted" in done.stderr, done.stderr
    assert (tmp_path / "out").read_bytes() == b"mine" and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("nameless", [True, False])
def test_contents_are_on_the_disk_before_the_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nameless: bool
) -> None:
    """And the name is on the disk before the call returns."""
    steps = []
    fsync, replace = os.fsync, Path.replace

    def sync(fd: int) -> None:
        steps.append("folder" if Path(f"/proc/self/fd/{fd}").samefile(tmp_path) else "file")
        fsync(fd)

    def named(part: Path, result: Path) -> Path:
        steps.append("name")
        return replace(part, result)

    if not nameless:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    store.save(tmp_path / "out", noise("nhd", FEW))
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", named)
    store.save(tmp_path / "out", noise("nhd", FEW), force=True)
    assert steps == ["file", "name", "folder"] and kvbm.store is store


@pytest.mark.parametrize("allocates", [True, False])
@pytest.mark.parametrize("nameless", [True, False])
def test_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allocates: bool, nameless: bool) -> None:
    """Also if the file system cannot allocate space: zeros are written, as a write to a mapped page without a disk block kills."""
    pool = noise("nhd", FEW)
    written = []

    def refuse(fd: int, begin: int, size: int) -> None:
        raise OSError(errno.ENOSPC if allocates else errno.EOPNOTSUPP, "no")

    def pwrite(fd: int, data: bytes, at: int) -> int:
        written.append(len(data))
        return len(data) // 2 if len(written) > 1 else os.lseek(fd, 0, os.SEEK_SET) + len(data)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    if not nameless:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    if not allocates:
        store.save(tmp_path / "zeros", pool)
        assert store.verify(tmp_path / "zeros") == []
        (tmp_path / "zeros").unlink()
    monkeypatch.setattr(os, "pwrite", pwrite)
    big = noise("nhd", FEW.replace("nt=4", "nt=4096"), 2)
    with pytest.raises(OSError, match="bytes wanted") as error:
        store.save(tmp_path / "out", big)
    assert error.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())
    assert bool(written) != allocates


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nhd", "universal"])
def test_a_pool_on_a_gpu(tmp_path: Path, name: str) -> None:
    """Its digests are computed on the GPU, the file's on the host; errors in a file are named when it is loaded to the GPU."""
    near = noise("vllm/LBHNC", FEW.replace("nt=4", "nt=16"), 70)
    store.save(tmp_path / "near", near, list(range(69, -1, -1)))
    far = store.load(tmp_path / "near", layout=kvbm.load(name), device="cuda:0")
    store.save(tmp_path / "far", far, [1, 0], layout=kvbm.load("hnd"))
    assert same(stored(tmp_path / "far"), stored(tmp_path / "near").take([1, 0]))
    assert np.array_equal(stored(tmp_path / "far").blocks, near.digest([68, 69])) and store.verify(tmp_path / "far") == []
    store.convert(tmp_path / "near", tmp_path / "out", kvbm.load("vllm/paged_attn_v0"), device="cuda:0")
    assert same(stored(tmp_path / "out"), stored(tmp_path / "near")) and store.verify(tmp_path / "out") == []
    flip(tmp_path / "near", store.read(tmp_path / "near").tensors["alloc_00000"].begin)
    for call in (
        lambda: store.load(tmp_path / "near", device="cuda:0"),
        lambda: store.convert(tmp_path / "near", tmp_path / "bad", kvbm.load("hnd"), device="cuda:0"),
    ):
        with pytest.raises(kvbm.DigestError, match="near: block 0: layer 0, token 0: "):
            call()
    assert not (tmp_path / "bad").exists()


@pytest.mark.gpu
def test_a_pool_of_torch_s(tmp_path: Path, torch: Any) -> None:
    """Data that torch's current stream is still writing are saved completely."""
    near = noise("vllm/LBHNC", FEW.replace("nt=4", "nt=16"), 70)
    tensor = torch.from_numpy(near.arrays[0].view(np.int16)).view(torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        there = tensor.cuda().clone()
        pool = kvbm.Pool(near.layout, near.shape, there)
        store.save(tmp_path / "out", pool)
    assert np.array_equal(stored(tmp_path / "out").blocks, near.digest()) and store.verify(tmp_path / "out") == []


def test_what_stands_before_the_blocks(tmp_path: Path) -> None:
    """The same bytes as `create` writes; a layout with several allocations has its blocks in several places."""
    from kvbm.store.file import framed

    layout, known = kvbm.load("universal"), store.Digests(np.array([7], np.uint64))
    data = np.arange(8, dtype=np.int16).reshape(1, 1, 2, 2, 2)
    with store.create(tmp_path / "made", layout, SHAPE, 1, digests=known, metadata={"more": "text"}) as pool:
        pool.arrays[0][...] = data
    assert framed(layout, SHAPE, 1, known, {"more": "text"}) + data.tobytes() == (tmp_path / "made").read_bytes()
    with pytest.raises(kvbm.BindError, match=r"universal: expected one allocation of 32 bytes, without padding, got 2 of 32 bytes"):
        framed(layout, SHAPE, 2, store.Digests(np.zeros(2, np.uint64)), {})
    with pytest.raises(kvbm.BindError, match=r"digests: blocks: expected an array"):
        framed(layout, SHAPE, 1, store.Digests(np.zeros(2, np.uint64)), {})


def test_a_mapping_for_which_there_is_no_room_is_an_error_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = kvbm.Pool.allocate("nhd", "nl=1,no=2,nh=1,nt=2,hd=8,dtype=float16", 2)
    store.save(tmp_path / "blocks", pool)
    stored = store.read(tmp_path / "blocks")

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr("kvbm.store.open_file.mmap.mmap", refuse)
    with pytest.raises(kvbm.errors.NotEnoughMemoryError, match=r"blocks: to map its .* bytes"):
        stored.pool("nhd")
    with pytest.raises(kvbm.errors.NotEnoughMemoryError, match=r"more: to map its .* bytes"):
        store.convert(stored, tmp_path / "more", "universal")
    assert [one.name for one in tmp_path.iterdir()] == ["blocks"]
