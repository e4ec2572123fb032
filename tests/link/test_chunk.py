"""Wire format 1 as docs/reference/wire.md defines it: golden chunks, a reader that follows only this page, cuts and trailers."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_packer import memory

import chunking
import digest_oracle
import processes
import reshard_oracle
from chunking import Told, case, engine
from kvbm import BindError, BlockShape, DigestError, Placement, Pool, Span, load, reshard
from kvbm.link.chunk import MOST, TRAILER, cut, key_of, mark_of
from kvbm.reshard import Cut, Packer, Trailer
from kvbm.reshard.sequence import Parts
from kvbm.reshard.strips import Family, Meeting
from linking import gpu_memory
from memory import aligned
from reshard_oracle import Run
from strategies import cases

HERE = Path(__file__).resolve().parents[1]
TEXT = (HERE.parent / "docs" / "reference" / "wire.md").read_text(encoding="utf-8")
GOLDEN = HERE / "data" / "wire.json"

# ---- golden chunks -----------------------------------------------------------------------------------------------------


ONE = (("tp", 1),)
#: Name → case, the chunk's ranks, and the largest chunk.
MADE = {
    "ranks that share tokens, two of three layers": (
        case(
            engine(ONE, 8, "nhd"),
            engine((("cp", 2), ("tp", 2)), 4, "universal", heads=("tp", 1, 2), tokens=("cp", 1, 2)),
            (3, 2, 2, 8, "float16"), range(3, 29), range(1, 3),
        ),
        (0, 3), 512,
    ),
    "two planes, with padding": (
        case(
            engine(ONE, 4, "vllm/dsa_indexer", bounds=(0, 2), group=(0, 1)),
            engine((("tp", 2),), 8, "record/dsa_indexer_tokens", bounds=(0, 2), group=(0, 1)),
            (2, 1, 1, 128, "bfloat16"), range(3, 9),
        ),
        (0, 1), MOST,
    ),
    "elements of four bits": (
        case(
            engine((("tp", 2),), 4, "nhd", heads=("tp", 1, 2)),
            engine(ONE, 2, "vllm/flash_attn_hnd"),
            (3, 2, 2, 32, "int4"), range(1, 7),
        ),
        (1, 0), MOST,
    ),
}  # fmt: skip


def zeros(nbytes: int) -> np.ndarray:
    return aligned(np.zeros(nbytes, np.uint8))


def packed(name: str, memory: tuple[Any, Any] = (aligned, reshard_oracle.host_arrays)) -> tuple[Run, Any, Any, list[Any]]:
    """The run, plan, message and chunks of a case."""
    one, (src, dst), most = MADE[name]
    run = Run(one, *memory)
    made = run.steps[0].made
    tokens, there, _ = one.sequences[0]
    sent = Cut(Packer(made, src, run.pools[0][src]), Span(there.tables[src], tokens), layers=one.layers, most=most)
    slots = {(dst, chunk.number): memory[0](np.zeros(chunk.size, np.uint8)) for chunk in sent.chunks[dst]}
    sent.pack(slots, key="golden", epoch=3).synchronize()
    return run, made, sent.chunks[dst], list(slots.values())


def golden() -> list[dict[str, Any]]:
    if os.environ.get("KVBM_UPDATE_GOLDEN") == "1":
        entries = []
        for name, (one, ranks, most) in MADE.items():
            run, made, _, slots = packed(name)
            message = next(m for m in made.messages if (m.src, m.dst) == ranks)
            told = chunking.told_of(run, made, message, one.sequences[0][0], 0, one.layers)
            entries.append({
                "what": name,
                "planes": {plane: {"axes": axes, "item": item} for plane, (axes, item) in told.planes.items()},
                "model": told.counts, "offsets": told.offsets, "units": told.units, "tokens": told.tokens,
                "most": most, "key": "golden", "chunks": [
                    [data[at : at + 32].tobytes().hex() for at in range(0, data.size, 32)] for data in slots
                ],
            })  # fmt: skip
        lines = [",\n ".join(f'"{key}": {json.dumps(value)}' for key, value in entry.items()) for entry in entries]
        GOLDEN.write_text("[\n" + ",\n".join(f"{{{entry}}}" for entry in lines) + "\n]\n", encoding="utf-8")
    return list(json.loads(GOLDEN.read_text(encoding="utf-8")))


def read(entry: dict[str, Any]) -> tuple[Told, list[bytes]]:
    planes = {plane: (said["axes"], said["item"]) for plane, said in entry["planes"].items()}
    told = Told(planes, entry["model"], entry["offsets"], entry["units"], entry["tokens"])
    return told, [bytes.fromhex("".join(lines)) for lines in entry["chunks"]]


def test_golden_chunks_are_read_by_the_page_alone() -> None:
    """Places of all elements, digests, cuts, trailers."""
    entries = golden()
    assert {entry["what"] for entry in entries} == set(MADE)
    for entry in entries:
        one = MADE[entry["what"]][0]
        told, some = read(entry)
        parts = chunking.cut(told, entry["most"])
        assert len(parts) == len(some)
        seen: set[tuple[Any, ...]] = set()
        for number, (data, (units, tokens)) in enumerate(zip(some, parts, strict=True)):
            found = chunking.trailer(data)
            assert (found["magic"], found["version"], found["reserved"]) == (b"KVBM", 1, 0)
            assert (found["chunk"], found["chunks"], found["units"], found["nbytes"]) == (
                number,
                len(some),
                len(units),
                len(data) - 64,
            )
            assert found["digest"] == chunking.digest(told, data, units, tokens)
            for plane, axes, got, at, _ in chunking.planes_of(told, data, units, tokens):
                held, item = told.planes[plane]
                others = sorted(held)
                grid = np.ix_(np.array([0]), np.array(at), *(np.array(held[axis]) for axis in others))
                want = reshard_oracle.values(one, plane, others, grid, item)[0]
                assert np.array_equal(got, want.transpose([*(["t", *others].index(axis) for axis in axes), len(axes)]))
                for place in itertools.product(*(at if axis == "t" else held[axis] for axis in axes)):
                    assert (plane, place) not in seen
                    seen.add((plane, place))
        for plane, (held, _) in told.planes.items():  # all of it, once
            tokens_of_it = len(told.units) * len(told.offsets) + len(told.tokens)
            assert sum(name == plane for name, _ in seen) == tokens_of_it * np.prod([len(x) for x in held.values()])


@pytest.mark.parametrize("name", MADE)
def test_golden_chunks_are_packed_to_the_byte(name: str) -> None:
    (entry,) = (entry for entry in golden() if entry["what"] == name)
    *_, slots = packed(name)
    assert [slot.tobytes() for slot in slots] == read(entry)[1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", MADE)
def test_golden_chunks_are_packed_to_the_byte_on_a_gpu(name: str) -> None:
    (entry,) = (entry for entry in golden() if entry["what"] == name)
    *_, slots = packed(name, gpu_memory())
    assert [slot.cpu().numpy().tobytes() for slot in slots] == read(entry)[1]


@pytest.mark.parametrize("name", MADE)
def test_golden_chunks_are_unpacked(name: str) -> None:
    one, (src, dst), most = MADE[name]
    run = Run(one, aligned, reshard_oracle.host_arrays)
    (entry,) = (entry for entry in golden() if entry["what"] == name)
    tokens, _, there = one.sequences[0]
    got = Cut(
        Packer(run.steps[0].made, dst, run.pools[1][dst], side="dst"),
        Span(there.tables[dst], tokens),
        layers=one.layers,
        most=most,
    )
    slots = {(src, n): aligned(np.frombuffer(data, np.uint8)) for n, data in enumerate(read(entry)[1])}
    got.unpack(slots, key="golden", epoch=3, verify="before")
    if len(got.chunks) == 1:  # all that the rank gets
        assert np.array_equal(run.buffers[1][dst], run.scene.after[dst])
    wrong = run.buffers[1][dst] != run.scene.sides[1][dst].before
    assert np.array_equal(run.buffers[1][dst][wrong], run.scene.after[dst][wrong]) and wrong.any()


# ---- the page ----------------------------------------------------------------------------------------------------------


def test_the_example_of_the_page() -> None:
    """The bytes in the text are those of a packed chunk."""
    (block,) = (
        text for text in re.findall(r"^```text\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL) if "digest;" in text
    )
    lines = [line[6:53] for line in block.splitlines()]
    expected = bytes.fromhex(" ".join(lines))
    assert [int(line[:4]) for line in block.splitlines()] == list(range(0, len(expected), 16))
    model = BlockShape(nl=1, no=2, nh=2, nt=2, hd=8, dtype="int16")
    src = Placement("tp1", model=model, name="prefill")
    dst = Placement("tp2", shard={"h": "tp"}, model=model, nt=4, name="decode")
    for layout in ("nhd", "universal", "vllm/flash_attn_hnd"):
        pool = Pool.allocate(load(layout), model, 2)
        for p, o, h, d in itertools.product(range(4), range(2), range(2), range(8)):
            entry, at = pool.resolved.address(p // 2, l=0, o=o, h=h, t=p % 2, d=d)
            memory(pool)[entry][at : at + 2] = np.frombuffer(
                struct.pack("<h", 256 * p + 128 * o + 16 * h + d), np.uint8
            )
        sent = Cut(Packer(reshard.plan(src, dst), 0, pool), Span([0, 1], range(1, 4)))
        slot = zeros(160)
        sent.pack({(1, 0): slot}, key="request-17", epoch=1)
        assert slot.tobytes() == expected


def test_the_table_of_the_page() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+) \| `(\w+)` \|", TEXT, re.MULTILINE)
    assert [name for *_, name in rows] == list(chunking.FIELDS) == list(Trailer._fields)
    at = 0
    for offset, width, name in rows:
        assert int(offset) == at
        at += int(width)
        data = bytearray(TRAILER)
        data[8:14] = b"KVBM\1\0"
        if name not in ("magic", "version", "reserved"):
            data[int(offset)] = 7
            assert getattr(Trailer.read(data), name) == 7
    assert at == TRAILER == 64


def test_the_python_of_the_page(tmp_path: Path) -> None:
    done = processes.script("\n".join(re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)), tmp_path)
    assert done.returncode == 0, done.stderr


# ---- trailers ----------------------------------------------------------------------------------------------------------

numbers = st.tuples(
    st.integers(0, 2**64 - 1), st.just(b"KVBM"), st.just(1), st.just(0), *[st.integers(0, 2**64 - 1)] * 3,
    *[st.integers(0, 2**16 - 1)] * 2, *[st.integers(0, 2**32 - 1)] * 5,
)  # fmt: skip


@given(numbers)
@cases(200)
def test_trailers_are_read_as_they_were_written(fields: Any) -> None:
    one = Trailer(*fields)
    data = one.write()
    assert len(data) == TRAILER and Trailer.read(data) == one
    assert chunking.trailer(data) == one._asdict()
    apart = np.zeros((TRAILER, 2), np.uint8)
    apart[:, 0] = list(data)
    assert Trailer.read(apart[:, 0]) == one


@pytest.mark.parametrize("name", [name for name in Trailer._fields if name != "magic"])
def test_numbers_that_fit_no_field_are_not_written(name: str) -> None:
    good = Trailer(0, b"KVBM", 1, 0, *range(10))
    for wrong in (-1, 1 << 64, None, "5", 1.5, [5]):
        with pytest.raises(BindError, match="trailer: expected numbers that fit their fields"):
            good._replace(**{name: wrong}).write()


def test_what_is_no_trailer_is_not_compared_with() -> None:
    good = Trailer(0, b"KVBM", 1, 0, *range(10))
    for wrong in (None, (1,), tuple(good), good.write()):
        with pytest.raises(BindError, match=r"expected a kvbm\.reshard\.Trailer"):
            good.require(wrong)  # type: ignore[arg-type]


def test_tokens_that_no_cache_has() -> None:
    """Refused before memory is allocated for them."""
    model = BlockShape(nl=2, no=2, nh=8, nt=16, hd=128, dtype="bfloat16")
    made = reshard.plan(reshard.vllm(model, tp=2), reshard.vllm(model, nt=64))
    for tokens in (range(1 << 40), range(5, 6 + (1 << 28))):
        with pytest.raises(BindError, match="tokens: expected at most 268,435,456 of a sequence"):
            reshard.chunks(made, made.messages[0], tokens)
    assert len(reshard.chunks(made, made.messages[0], range(1 << 47, (1 << 47) + 5), origins=(1 << 47, 1 << 47))) == 1


@given(st.binary(max_size=80))
@cases(300)
def test_bytes_by_chance_are_no_trailer(data: bytes) -> None:
    with pytest.raises(
        BindError, match=f"trailer: expected 64 bytes, got {len(data)}" if len(data) != 64 else "magic: expected"
    ):
        Trailer.read(data)


@given(numbers, numbers)
@cases(200)
def test_the_first_field_that_differs_is_named(a: Any, b: Any) -> None:
    one, other = Trailer(*a), Trailer(*b)
    wrong = [name for name in Trailer._fields[1:] if getattr(one, name) != getattr(other, name)]
    if not wrong:
        one.require(other)
        return
    with pytest.raises(BindError, match=f"^a chunk: {wrong[0]}: expected "):
        one.require(other)


@pytest.mark.parametrize(("at", "value", "words"), [
    (12, 2, "version: expected 1, got 2"), (12, 0, "version: expected 1, got 0"), (13, 1, "version: expected 1, got 257"),
    (14, 1, "reserved: expected 0, got 1"), (15, 128, "reserved: expected 0, got 32768"), (8, 0, "magic: expected b'KVBM', got"),
])  # fmt: skip
def test_other_versions_are_refused(at: int, value: int, words: str) -> None:
    data = bytearray(Trailer(0, b"KVBM", 1, 0, *range(10)).write())
    data[at] = value
    with pytest.raises(BindError, match=re.escape(words)):
        Trailer.read(data, "here")


def test_a_digest_that_is_right_or_not() -> None:
    one = Trailer(5, b"KVBM", 1, 0, *range(10))
    one.require_digest(5)
    for written, words in ((False, "none of it was written"), (True, "its blocks were written: do not use them")):
        with pytest.raises(
            DigestError, match=rf"here: digest: expected 0x0000000000000005, got 0x0000000000000006; {words}"
        ):
            one.require_digest(6, "here", written=written)


def test_keys_and_marks() -> None:
    assert key_of("request-17") == key_of(b"request-17") == 0x0536295CEA73E3D7
    assert key_of("ü") == key_of("ü".encode()) != key_of("u")
    with pytest.raises(BindError, match=r"key: expected text that UTF-8 has, got 'a\\ud800'"):
        key_of("a\ud800")
    seen = {
        mark_of(range(a, b), (c, d), range(e, f), most)
        for a, b, c, d, e, f, most in itertools.product((3, 4), (5, 6), (1, 2), (1, 2), (3, 4), (5, 6), (16, 17))
    }
    assert len(seen) == 2**7
    given = range(1, 4), (0, 0), range(1), MOST
    assert mark_of(*given, least=1 << 20) == mark_of(*given)
    assert mark_of(*given, least=1 << 26) == chunking.mark(*given, least=1 << 26) != mark_of(*given)
    assert (
        mark_of(range(1, 4), (0, 0), range(1), MOST) == chunking.mark(range(1, 4), (0, 0), range(1), MOST) == 0x3E6982C8
    )


# ---- cuts --------------------------------------------------------------------------------------------------------------

MODEL = BlockShape(nl=1, no=1, nh=1, nt=1, hd=1, dtype="uint8")
MESSAGE = reshard.plan(Placement("tp1", model=MODEL), Placement("tp1", model=MODEL)).messages[0]


@given(
    st.integers(0, 300), st.integers(0, 40), st.integers(1, 40000), st.integers(1, 2000), st.integers(1, 1 << 25),
    st.sampled_from((1 << 20, 1 << 26, 1)),
)  # fmt: skip
@cases(300)
def test_a_cut_is_what_the_page_says(units: int, tokens: int, u: int, v: int, more: int, least: int) -> None:
    u, v = 16 * u, 16 * v
    most = (u if units else 0) + more
    if tokens and v > most:
        most = v
    parts = Parts(np.arange(units), np.arange(tokens))
    found = cut(MESSAGE, parts, (u, v), most, least)
    told = Told({}, {}, [0], list(range(units)), list(range(tokens)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "sizes", lambda _: (u, v))
        assert [(chunk.units, chunk.tokens) for chunk in found] == chunking.cut(told, most, least)
    assert [x for chunk in found for x in chunk.units] == list(range(units))
    assert [x for chunk in found for x in chunk.tokens] == list(range(tokens))
    total = units * u + tokens * v
    for number, chunk in enumerate(found):
        assert (chunk.number, chunk.of) == (number, len(found)) and 0 < chunk.nbytes <= most and chunk.nbytes % 16 == 0
        assert chunk.nbytes == len(chunk.units) * u + len(chunk.tokens) * v and chunk.size == chunk.nbytes + 64
    assert bool(found) == bool(total)
    # About four, of `least` or more; a unit may be larger, and single tokens make one more.
    for chunk in [one for one in found[:-1] if one.units][:-1]:
        assert chunk.nbytes + u > min(most, max(least, total // 4))
    assert len(found) <= 1 or total > min(least, most)


@pytest.mark.parametrize(("parts", "most", "words"), [
    (
        (1, 0), 4095,
        "rank 0: a unit takes 4096 bytes, and a chunk at most 4095: expected most=4096 "
        "(chunk_bytes= of an Endpoint) or more; or send fewer layers",
    ),
    ((0, 1), 1023, "rank 0 → rank 0: a single token takes 1024 bytes, and a chunk at most 1023: expected most=1024"),
    ((1, 1), 1024, "a unit takes 4096 bytes"),
    *(((1, 1), most, "most: expected bytes of a chunk, below 2**32, got") for most in (0, -1, 1 << 32, "x", 1.5, None, True)),
])  # fmt: skip
def test_what_cannot_be_cut(parts: tuple[int, int], most: Any, words: str) -> None:
    with pytest.raises(BindError, match=re.escape(words)):
        cut(MESSAGE, Parts(*map(np.arange, parts)), (4096, 1024), most)


@pytest.mark.parametrize("seed", range(30))
def test_both_sides_and_the_plan_alone_find_the_same_chunks(seed: int) -> None:
    rng = random.Random(seed)
    model = BlockShape(
        nl=rng.randrange(1, 5), no=2, nh=4, nt=4, hd=rng.choice([3, 8, 16]), dtype=rng.choice(["float16", "int8"])
    )
    shards: list[tuple[str, dict[str, Any]]] = [
        ("tp4", {"h": "tp"}), ("tp8", {"h": "tp"}), ("tp1", {}), ("cp2", {"t": "cp by nt"}),
        ("cp2 tp2", {"h": "tp", "t": "cp by 1"}),
    ]  # fmt: skip
    src, dst = (
        Placement(mesh, shard=shard, model=model, nt=rng.choice([4, 8, 6]), name=name)
        for (mesh, shard), name in zip(rng.sample(shards, 2), ("src", "dst"), strict=True)
    )
    made = reshard.plan(src, dst)
    first = rng.randrange(40)
    tokens = range(first, first + rng.randrange(60))
    layers = rng.choice([None, range(1)])
    most, least = 16384, rng.choice([1, 4096, 1 << 20])
    sides: list[dict[tuple[int, int], Any]] = []
    for side, place in (("src", src), ("dst", dst)):
        found = {}
        for rank in range(place.world):
            pool = Pool.allocate(load("nhd"), place.shape(rank), 30)
            packer = Packer(made, rank, pool, side=side)
            for peer, some in Cut(packer, Span(range(30), tokens), layers=layers, most=most, least=least).chunks.items():
                found[(rank, peer) if side == "src" else (peer, rank)] = some
        sides.append(found)
    alone = {(m.src, m.dst): reshard.chunks(made, m, tokens, layers=layers, most=most, least=least) for m in made.messages}
    assert sides[0] == sides[1] == alone
    assert any(alone.values()) == bool(tokens)


@pytest.mark.slow  # half a second
def test_a_unit_is_what_the_page_says() -> None:
    """Computed from blocks, turns and origins alone; also turns of which neither divides the other."""
    rng, odd = random.Random(1), 0
    model = BlockShape(nl=1, no=1, nh=1, nt=1, hd=1, dtype="uint8")
    for _ in range(400):
        sides, places = [], []
        for name in ("src", "dst"):
            nt, k = rng.choice([1, 2, 3, 4, 6, 7, 8, 12, 16, 24, 28, 48]), rng.choice([1, 1, 2, 3, 4])
            every = rng.choice([x for x in (1, 2, 3, 4, 6, nt, 2 * nt) if x % nt == 0 or nt % x == 0]) if k > 1 else 1
            shard = {"t": f"cp by {every}"} if k > 1 else {}
            sides.append((nt, every, k))
            places.append(Placement(f"cp{k}", shard=shard, model=model, nt=nt, name=name))
        distance = rng.choice([0, 0, rng.randrange(50)])
        found = {m.t.tokens for m in reshard.plan(*places).refit(((), ()), distance).messages}
        assert found == {chunking.unit(sides, distance)}, (sides, distance)
        odd += found != {chunking.unit([(nt * k, 1, 1) for nt, _, k in sides], distance)}
    assert odd > 40


def test_what_is_no_cut_of_a_plan() -> None:
    """All arguments are checked, even if nothing would be sent; origins may be any integers."""
    src = Placement("pp3 tp2", shard={"l": "pp", "h": "tp"}, model=BlockShape(3, 2, 4, 24, 8, "int8"), name="src")
    dst = Placement("cp2", shard={"t": "cp by 4"}, model=src.model, name="dst")
    made = reshard.plan(src, dst)
    one, tokens = made.messages[0], range(8, 60)

    def chunks(**changes: Any) -> Any:
        given = {"made": made, "message": one, "tokens": tokens, **changes}
        return reshard.chunks(given.pop("made"), given.pop("message"), given.pop("tokens"), **given)

    for name, wrong, words in (
        ("made", [None, 5, src], "made: expected a Resharding"),
        ("message", [None, 5, np.int64(5), np.zeros(3), one._replace(src=7), tuple(one)], "message: expected one of the 12 of src"),
        ("tokens", [None, 5, "x", range(-4, 9), range(0, 9, 2), range((1 << 48) + 1)], "tokens: expected range"),
        ("origins", [None, 5, (0,), (0, 0, 0), np.zeros(2, int), {0: 0, 1: 0}], "origins: expected the source's and the"),
        ("origins", [(-1, 0), (0, 16), ("a", 0), (0, True), (0.0, 0), (1 << 64, 0), "00"], "origin: expected a position"),
        ("origins", [(0, 4)], "dst rank 0: origin 4: expected a multiple of 8, a whole turn"),
        ("layers", [5, "x", [0], range(4), range(0), range(0, 3, 2), range(-1, 2)], "layers: expected a range within 0 to 3"),
        ("most", [None, 0, -1, True, 1 << 32, 1 << 64, "x", 1.5, np.zeros(2, int)], "most: expected bytes of a chunk"),
        ("least", [None, 0, -1, True, 1 << 32, 1 << 64, "x", 1.5, np.zeros(2, int)], "least: expected bytes of a chunk"),
    ):  # fmt: skip
        for value in wrong:
            for layers in ({}, {"layers": range(1, 2)}) if name != "layers" else ({},):  # of the second, none
                with pytest.raises(BindError, match=words):
                    chunks(**layers, **{name: value})
    for kind in (np.uint8, np.uint64, np.int8):
        assert chunks(origins=(kind(1), kind(8))) == chunks(origins=(1, 8)) != chunks(origins=(0, 8))


def test_layers_of_a_meeting() -> None:
    """Those in a range, for any steps; none twice."""
    meetings = [Meeting(3, 1, 0, ()), Meeting(2, 0, 5, (Family(4, 3, 1, 2),)), Meeting(0, 0, 0, (Family(9, 1, 1, 1),))]
    for meeting, a, b in itertools.product(meetings, range(14), range(14)):
        triples = list(zip(*(meeting.coordinates(name) for name in ("first", "src", "dst")), strict=True))
        found = meeting.within(range(a, b))
        got = (
            []
            if found is None
            else list(zip(*(found.coordinates(name) for name in ("first", "src", "dst")), strict=True))
        )
        assert got == [one for one in triples if one[0] in range(a, b)]


def test_the_readers_digest_is_the_other_oracles() -> None:
    """Two oracles of the digest agree."""
    told = Told({"": ({"l": [1, 3], "o": [0, 1], "h": [2], "d": list(range(8))}, 2)}, {"l": 4, "h": 3}, [0, 1], [6], [])
    data = np.random.default_rng(1).integers(0, 256, 2 * 2 * 1 * 2 * 16, np.uint8)
    block = digest_oracle.Block({"": ("lohtd", data.reshape(2, 2, 1, 2, 8, 2))}, {"l": ([1, 3], 4), "h": ([2], 3)})
    assert chunking.digest(told, data.tobytes() + bytes(64), range(1), range(0)) == block.digest(6)
