"""kvbm.store.folder: files of units of tokens, for any tp and block size."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbm import BindError, BlockShape, Pool, load, store
from kvbm.integrations.identity import neighbours
from kvbm.store import folder as tiers
from kvbm.store.folder import Folder, Part, described
from kvbm.store.keys import Chain, Content, key_of_json
from kvbm.store.shelf import Shelf, Shelved

#: A unit of the whole model: 4 heads, 4 tokens.
UNIT = BlockShape(nl=3, no=2, nh=4, nt=4, hd=8, dtype="float32")
TOKENS = [7 * i % 101 for i in range(64)]
NAMES = Chain(4, TOKENS).keys(0, 64)
CONTENT = Content("weights", "org/a model", (0, 1, 5), UNIT)


def element(layer: Any, half: Any, head: Any, token: Any, at: Any) -> Any:
    return (((layer * 2 + half) * 4 + head) * 64 + token) * 8 + at + 1.0


def blocks(tp: int = 1, rank: int = 0, nt: int = 4, layout: str = "universal", *, empty: bool = False) -> Pool:
    """A rank's part of the 64 tokens, with a different number in each element; or memory for it."""
    heads = 4 // tp
    shape = replace(UNIT, nh=heads, nt=nt)
    plain = Pool.allocate(load("universal"), shape, 64 // nt)
    grid = np.meshgrid(np.arange(heads) + rank * heads, range(3), range(2), range(nt), range(8), indexing="ij")
    for block, array in enumerate(plain.arrays):
        head, layer, half, token, at = grid
        array[...] = 0 if empty else element(layer, half, head, token + block * nt, at)
    if layout == "universal":
        return plain
    pool = Pool.allocate(load(layout), shape, 64 // nt)
    from kvbm import convert

    convert(plain, pool)
    return pool


def shelf(pool: Pool, tp: int = 1, rank: int = 0, **options: Any) -> Shelf:
    heads = 4 // tp
    return Shelf(CONTENT, pool, range(rank * heads, (rank + 1) * heads), **options)


def moved(of: Shelf, pool: Pool, tier: Folder, what: str, some: slice = slice(None)) -> Shelved:
    """Read or write blocks."""
    ids, nt = np.arange(pool.num_blocks)[some], pool.shape.nt
    units = list(dict.fromkeys(token // 4 for block in ids.tolist() for token in range(block * nt, (block + 1) * nt)))
    names, firsts = [NAMES[unit] for unit in units], [4 * unit for unit in units]
    if what == "read":
        return of.read(tier, ids, names, firsts)
    return of.write(tier, ids, pool.digest(ids), names, firsts)


def stored(folder: Path, tp: int = 1, nt: int = 4, ranks: range | None = None, most: int = 1 << 30) -> Folder:
    """A tier with all 64 tokens, of all ranks or some."""
    tier = Folder(folder, CONTENT, most)
    for rank in range(tp) if ranks is None else ranks:
        pool = blocks(tp, rank, nt)
        done = moved(shelf(pool, tp, rank), pool, tier, "write")
        assert done.good.all() and not done.why
    return tier


def loaded(tier: Folder, verify: bool = True) -> tuple[Shelved, Pool]:
    pool = blocks(empty=True)
    return moved(shelf(pool, verify=verify), pool, tier, "read"), pool


def test_names() -> None:
    """Names follow from the tokens alone, in any form; they must not change, or stored data are lost."""
    chain = Chain(4, TOKENS)
    assert chain.keys(16, 24) == NAMES[4:6] and chain.keys(0, 64) == NAMES and len({*NAMES}) == 16
    assert NAMES[0] == "d65077fca326b5f2f62ac0984fb27ffcea84261846ac52ecfc997ac23295e603"
    others = [9, *TOKENS[1:]]
    assert not {*Chain(4, others).keys(0, 64)} & {*NAMES}  # what comes before counts
    assert not {*Chain(4, TOKENS, "salt").keys(0, 64)} & {*NAMES}
    assert not {*Chain(8, TOKENS).keys(0, 64)} & {*NAMES}
    grown = [*TOKENS[:30]]
    growing = Chain(4, grown)
    assert growing.keys(0, 28) == NAMES[:7]
    grown += TOKENS[30:]
    assert growing.keys(0, 64) == NAMES


@pytest.mark.parametrize(("first", "last"), [(0, 6), (2, 8), (60, 68), (8, 4), (-4, 4)])
def test_tokens_that_are_no_units(first: int, last: int) -> None:
    with pytest.raises(BindError, match=rf"whole units of 4, got {first} to {last}"):
        Chain(4, TOKENS).keys(first, last)


def test_contents_that_differ() -> None:
    """Weights, layers, sizes, dtype, tokens per unit: each changes the key; the model's name does not."""
    others = [
        replace(CONTENT, model="others"), replace(CONTENT, layers=(0, 1, 4)), replace(CONTENT, layers=(1, 0, 5)),
        *(replace(CONTENT, shape=replace(UNIT, **{name: 2 * getattr(UNIT, name)})) for name in ("nl", "no", "nh", "nt", "hd")),
        replace(CONTENT, shape=replace(UNIT, dtype="int32")),
    ]  # fmt: skip
    assert len({CONTENT.key, *(one.key for one in others)}) == 1 + len(others)
    assert replace(CONTENT, title="/models/x/").key == CONTENT.key


def test_the_same_weights_under_another_path(tmp_path: Path) -> None:
    """Another engine finds the data, at whatever path its weights are."""
    stored(tmp_path)
    assert all(map(Folder(tmp_path, replace(CONTENT, title="/mnt/copies/b/"), 1 << 30).holds, NAMES))


@pytest.mark.parametrize(
    ("tp", "nt", "to_tp", "to_nt", "layout"),
    [
        (1, 4, 1, 4, "universal"), (2, 8, 1, 16, "universal"), (1, 16, 2, 8, "operational_nhd"), (4, 4, 2, 32, "universal"),
        (2, 16, 4, 4, "operational_hnd"), (1, 64, 4, 64, "nhd"),
        (1, 2, 2, 8, "universal"), (4, 1, 1, 2, "nhd"), (2, 32, 4, 1, "hnd"),
    ],
)  # fmt: skip
def test_other_ranks_and_blocks(tmp_path: Path, tp: int, nt: int, to_tp: int, to_nt: int, layout: str) -> None:
    """Data written by one engine's ranks are read by other ranks, whose blocks may be smaller than a unit.

    The digests are those of the new blocks.
    """
    tier = stored(tmp_path, tp, nt)
    assert all(map(tier.holds, NAMES)) and len(tier.parts(NAMES[3])) == tp
    for rank in range(to_tp):
        pool = blocks(to_tp, rank, to_nt, layout, empty=True)
        done = moved(shelf(pool, to_tp, rank), pool, tier, "read")
        expected = blocks(to_tp, rank, to_nt, layout)
        assert done.good.all() and (done.digests == expected.digest()).all()
        assert done.nbytes == expected.shape.nbytes * (64 // to_nt)
        assert all(np.array_equal(ours, theirs) for ours, theirs in zip(pool.arrays, expected.arrays, strict=True))


def test_files_are_those_of_the_store(tmp_path: Path) -> None:
    """kvbm.store can read and verify them; their metadata describe them."""
    tier = stored(tmp_path, 2)
    files = sorted(tier.root.rglob("*.safetensors"))
    assert len(files) == 32 and all(not store.verify(file) for file in files)
    said = store.read(tier.home(NAMES[5]) / "heads-2-3.safetensors")
    assert (said.layout_name, said.shape, said.num_blocks) == ("universal", replace(UNIT, nh=2), 1)
    assert said.metadata["store.unit"] == NAMES[5] and said.metadata["store.content"] == CONTENT.key
    tier.make({"weights": "a"})
    told = json.loads((tier.root / "content.json").read_text())
    assert told == {"title": "org/a model", "content": CONTENT.fields, "model": {"weights": "a"}}


def test_a_part_that_is_missing(tmp_path: Path) -> None:
    """A unit does not exist until all ranks have written it; parts of several engines can form one."""
    tier = stored(tmp_path, 2, ranks=range(1))
    assert not any(map(tier.holds, NAMES))
    done, pool = loaded(tier)
    assert not done.good.any() and "heads 0 to 3: some are in no file" in done.why and not any(map(np.any, pool.arrays))
    stored(tmp_path, 4, ranks=range(3, 4))
    assert not any(map(tier.holds, NAMES))
    stored(tmp_path, 4, ranks=range(1, 3))
    done, pool = loaded(tier)
    assert all(map(tier.holds, NAMES)) and done.good.all()
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(pool.arrays, blocks().arrays, strict=True))


def test_what_is_there_is_left(tmp_path: Path) -> None:
    """No file is written twice."""
    tier, pool = stored(tmp_path), blocks()
    before = {file: file.stat().st_ino for file in tier.root.rglob("*.safetensors")}
    done = moved(shelf(pool), pool, tier, "write")
    assert done.good.all() and done.nbytes == 0
    assert before == {file: file.stat().st_ino for file in tier.root.rglob("*.safetensors")}


def test_memory_that_was_changed(tmp_path: Path) -> None:
    """A block of host memory that differs from what was stored there is not written."""
    tier, pool = Folder(tmp_path, CONTENT, 1 << 30), blocks(nt=8)
    digests = pool.digest()
    pool.arrays[2].reshape(-1)[11] += 1
    done = shelf(pool).write(tier, np.arange(4), digests[:4], NAMES[:8], range(0, 32, 4))
    assert done.good.tolist() == [True, True, False, True] and "1 blocks of host memory are not" in done.why
    assert [tier.holds(name) for name in NAMES[:8]] == [True] * 4 + [False] * 2 + [True] * 2


def test_a_unit_of_several_blocks(tmp_path: Path) -> None:
    """It is written only if all of them are what was stored, and a file that was changed is a miss of all of them."""
    tier, pool = Folder(tmp_path, CONTENT, 1 << 30), blocks(nt=2)
    digests = pool.digest()
    pool.arrays[5].reshape(-1)[3] += 1
    done = shelf(pool).write(tier, np.arange(8), digests[:8], NAMES[:4], range(0, 16, 4))
    assert done.good.tolist() == [True] * 4 + [False] * 2 + [True] * 2 and "1 blocks of host memory are not" in done.why
    assert [tier.holds(name) for name in NAMES[:4]] == [True, True, False, True]
    flip(-1)(tier.home(NAMES[1]) / "heads-0-3.safetensors", tier)
    into = blocks(nt=2, empty=True)
    done = shelf(into).read(tier, np.arange(8), NAMES[:4], range(0, 16, 4))
    assert done.good.tolist() == [True] * 2 + [False] * 4 + [True] * 2 and done.why
    assert done.nbytes == 4 * into.shape.nbytes and not any(array.any() for array in into.arrays[2:6])
    expected = blocks(nt=2)
    assert all(np.array_equal(into.arrays[block], expected.arrays[block]) for block in (0, 1, 6, 7))
    assert (done.digests[done.good] == expected.digest([0, 1, 6, 7])).all()


def flip(byte: int) -> Callable[[Path, Folder], None]:
    def change(file: Path, _: Folder) -> None:
        data = bytearray(file.read_bytes())
        data[byte] ^= 4
        file.write_bytes(data)

    return change


def cut(size: int) -> Callable[[Path, Folder], None]:
    return lambda file, _: os.truncate(file, size if size >= 0 else file.stat().st_size + size)


def replaced(by: str) -> Callable[[Path, Folder], None]:
    """Replace a file by a whole file of another unit, of other heads, or of another content."""

    def change(file: Path, tier: Folder) -> None:
        if by == "unit":
            other = tier.home(NAMES[4]) / file.name
        elif by == "heads":
            other = file.with_name("heads-2-3.safetensors")
        else:
            pool, theirs = blocks(2), Folder(tier.folder / "more", replace(CONTENT, model="others"), 1 << 30)
            moved(shelf(pool, 2), pool, theirs, "write")
            other = theirs.home(NAMES[3]) / file.name
        file.write_bytes(other.read_bytes())

    return change


def edited(key: str, value: str | None) -> Callable[[Path, Folder], None]:
    """Change a text in the metadata, with the same length of the file."""

    def change(file: Path, _: Folder) -> None:
        data = file.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        if value is None:
            del header["__metadata__"][key]
        else:
            header["__metadata__"][key] = value
        text = json.dumps(header, separators=(",", ":")).encode()
        assert len(text) <= size
        file.write_bytes(data[:8] + text.ljust(size) + data[8 + size :])

    return change


DAMAGES = {
    "first byte": flip(4096), "last byte": flip(-1), "header": flip(9), "length of the header": flip(1), "empty": cut(0),
    "cut in the header": cut(100), "cut in the data": cut(-1), "another unit": replaced("unit"), "other heads": replaced("heads"),
    "another content": replaced("content"), "no digests": edited("store.digests", None),
    "few digests": edited("store.digests", "0"),
    "bad digests": edited("store.digests", "x y"), "another digest": edited("store.digests", "0 0"),
    "no name": edited("store.unit", None), "another layout": edited("kvbm.fingerprint", "0"),
    "no shape": edited("kvbm.shape", None),
    "another shape": edited("kvbm.shape", json.dumps({"nl": 3, "no": 2, "nh": 2, "nt": 2, "hd": 16, "dtype": "float32"})),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_that_are_not_what_was_stored(tmp_path: Path, damage: str) -> None:
    """A miss, and the file is removed; other units are read.  Written again it is a hit."""
    tier = stored(tmp_path, 2)
    file = tier.home(NAMES[3]) / "heads-0-1.safetensors"
    DAMAGES[damage](file, tier)
    done, pool = loaded(tier)
    assert done.good.tolist() == [unit != 3 for unit in range(16)] and done.why
    assert not pool.arrays[3].any() and all(pool.arrays[unit].all() for unit in range(16) if unit != 3)
    assert not file.exists() and not tier.holds(NAMES[3])
    stored(tmp_path, 2)
    assert loaded(tier)[0].good.all()


STRANGERS: dict[str, Callable[[Path], object]] = {
    "a folder": lambda file: (file.unlink(), file.mkdir()), "a FIFO": lambda file: (file.unlink(), os.mkfifo(file)),
    "a link to nothing": lambda file: (file.unlink(), file.symlink_to("nothing")),
    "a link to itself": lambda file: (file.unlink(), file.symlink_to(file)),
    "a link to a unit": lambda file: (file.rename(file.parents[4] / "out"), file.symlink_to(file.parents[4] / "out")),
    "zeros before heads": lambda file: file.rename(file.with_name("heads-00-03.safetensors")),
    "heads that are none": lambda file: file.rename(file.with_name("heads-0-4.safetensors")),
    "heads in reverse": lambda file: file.rename(file.with_name("heads-3-0.safetensors")),
}  # fmt: skip


@pytest.mark.parametrize("what", STRANGERS)
def test_what_cannot_be_a_file_of_a_unit_is_no_hit(tmp_path: Path, what: str) -> None:
    """Else the unit is found for ever, never read, and never written again.  Nothing outside the folder is written."""
    tier = stored(tmp_path / "kv")
    file = tier.home(NAMES[3]) / "heads-0-3.safetensors"
    STRANGERS[what](file)
    outside = (tmp_path / "out").read_bytes() if "to a unit" in what else b""
    assert [tier.holds(name) for name in NAMES[2:5]] == [True, False, True]
    pool = blocks()
    done = moved(shelf(pool), pool, tier, "write")
    is_stuck = what in ("a folder", "a FIFO")
    assert done.good[3] == tier.holds(NAMES[3]) == (not is_stuck) and ("it is not replaced" in done.why) == is_stuck
    assert loaded(tier)[0].good.tolist() == [unit != 3 or not is_stuck for unit in range(16)]
    assert not outside or (tmp_path / "out").read_bytes() == outside


def test_links_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    """Who may write to the folder must not make an engine write elsewhere, nor beyond the limit of bytes."""
    tier, mine = Folder(tmp_path / "kv", CONTENT, 1 << 30), tmp_path / "mine"
    mine.write_text("mine")
    tier.root.mkdir(parents=True)
    (tier.root / "content.json").symlink_to(mine)
    tier.make({})
    assert mine.read_text() == "mine" and json.loads((tier.root / "content.json").read_text())["title"] == CONTENT.title
    tier.root.rename(tmp_path / "elsewhere")
    tier.root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BindError, match="expected a folder, got a link: the limit of bytes would not count its files"):
        tier.make({})


def test_digits_of_other_scripts_are_no_digests(tmp_path: Path) -> None:
    """`int` takes them, and signs and underscores."""
    tier = stored(tmp_path, 1)
    file = tier.home(NAMES[3]) / "heads-0-3.safetensors"
    words = store.read(file).metadata["store.digests"].split(" ")
    arabic = [word.translate({ord("0") + at: 0x660 + at for at in range(10)}) for word in words]
    for strange in (arabic, [f"+{word}" for word in words], [f"{word[0]}_{word[1:]}" for word in words], ["0" * 500] * 4):
        edited("store.digests", " ".join(strange))(file, tier)
        before = file.read_bytes()
        with pytest.raises(BindError, match=r"store.digests: expected 4"):
            tier.open(NAMES[3], Part(0, 4))
        assert not file.exists(), "it is removed"
        file.write_bytes(before)


@pytest.mark.sanitize
@pytest.mark.slow  # 0.7 s
def test_a_file_that_is_replaced_at_any_step_is_a_hit(tmp_path: Path) -> None:
    """A rank that has the same unit writes it again; here with other numbers, so that a mixture shows."""
    pool = blocks()
    tiers_ = [stored(tmp_path / "0", 1), Folder(tmp_path / "1", CONTENT, 1 << 30)]
    for array in pool.arrays:
        array[...] = -array
    assert moved(shelf(pool), pool, tiers_[1], "write").good.all()
    files = [tier.home(NAMES[3]) / "heads-0-3.safetensors" for tier in tiers_]
    place, texts = files[0], [file.read_bytes() for file in files]
    wanted = [float(element(0, 0, 0, 12, 0)), -float(element(0, 0, 0, 12, 0))]
    into = blocks(empty=True)
    reader, seen = shelf(into), set()

    def put(number: int) -> None:
        (tmp_path / "next").write_bytes(texts[number])
        (tmp_path / "next").replace(place)

    def read(last: int) -> int:
        put(0)
        count = 0

        def step(*_: Any) -> None:
            nonlocal count
            count += 1
            if count == last:
                sys.setprofile(None)
                put(1)
                sys.setprofile(step)

        sys.setprofile(step)
        try:
            done = moved(reader, into, tiers_[0], "read", slice(3, 4))
        finally:
            sys.setprofile(None)
        assert done.good.all(), (last, done.why)
        assert len({bool(x) for x in (into.arrays[3] < 0).reshape(-1)}) == 1
        seen.add(wanted.index(float(into.arrays[3].reshape(-1)[0])))
        return count

    for last in range(1, read(-1), 9):
        read(last)
    assert seen == {0, 1} and place.exists()


@pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning", "ignore:.*fork.*:DeprecationWarning")
def test_without_checks_a_flipped_byte_is_read(tmp_path: Path) -> None:
    """The control for the test above; a file that is cut short is still a miss."""
    tier = stored(tmp_path)
    flip(-1)(tier.home(NAMES[3]) / "heads-0-3.safetensors", tier)
    cut(-1)(tier.home(NAMES[4]) / "heads-0-3.safetensors", tier)
    done, pool = loaded(tier, verify=False)
    assert done.good.tolist() == [unit != 4 for unit in range(16)]
    assert not np.array_equal(pool.arrays[3], blocks().arrays[3])


def child(work: Callable[[], None]) -> int:
    """The exit status of a process that does this."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1]


@pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning", "ignore:.*fork.*:DeprecationWarning")
@pytest.mark.quick
def test_a_writer_that_is_killed(tmp_path: Path) -> None:
    """In the middle of a file: it has no name, so it is a miss; its remains are removed when they are old."""
    pool, tier = blocks(), Folder(tmp_path, CONTENT, 1 << 30)

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))  # a file has 4096 + 3072 bytes
        moved(shelf(pool), pool, tier, "write")

    assert os.WTERMSIG(child(work)) == signal.SIGXFSZ
    [left] = [file for file in tier.root.rglob("*") if file.is_file() and file.name != "content.json"]
    assert left.stat().st_size == 5000 and not any(map(tier.holds, NAMES)) and not loaded(tier)[0].good.any()
    tier.trim()
    assert left.exists()  # somebody may be writing it
    os.utime(left, (0, 0))
    tier.trim()
    assert not left.exists()
    stored(tmp_path)
    assert loaded(tier)[0].good.all()


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """An error of one sentence, and no file."""
    pool, tier = blocks(), Folder(tmp_path, CONTENT, 1 << 30)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        done = moved(shelf(pool), pool, tier, "write")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not done.good.any() and "File too large" in done.why
    assert not list(tier.root.rglob("*.safetensors")) and not list(tier.root.rglob("*.tmp"))


@pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning", "ignore:.*fork.*:DeprecationWarning")
def test_processes_that_write_one_unit(tmp_path: Path) -> None:
    """Two processes write and remove the same files; a third one reads either right data or nothing."""
    tier, until = stored(tmp_path, 2), time.monotonic() + 0.6
    pids = []
    for rank in range(2):
        pids.append(os.fork())
        if pids[-1] == 0:
            try:
                pool = blocks(2, rank)
                mine = shelf(pool, 2, rank, threads=1)
                while time.monotonic() < until:
                    moved(mine, pool, tier, "write")
                    tier.drop(NAMES[3], Part(rank * 2, rank * 2 + 2))
                moved(mine, pool, tier, "write")
            finally:
                os._exit(0)
    expected, pool = blocks().arrays, blocks(empty=True)
    reader = shelf(pool)
    while time.monotonic() < until:
        for array in pool.arrays:
            array[...] = 0
        done = moved(reader, pool, tier, "read", slice(0, 6))
        assert all(np.array_equal(pool.arrays[unit], expected[unit]) for unit in range(6) if done.good[unit])
        assert done.good[[0, 1, 2, 4, 5]].all()
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
    assert loaded(tier)[0].good.all()


def sizes(tier: Folder) -> int:
    return sum(file.stat().st_size for file in tier.folder.rglob("*.safetensors"))


def test_what_was_longest_not_used_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is kept over all contents; the last units of a sequence go first; reading counts as use."""
    now = time.time()
    monkeypatch.setattr(tiers.time, "time", lambda: now)
    tier = stored(tmp_path)
    each = sizes(tier) // 16
    others = Folder(tmp_path, replace(CONTENT, model="others"), 1 << 30)
    pool = blocks()
    moved(shelf(pool), pool, others, "write")
    assert tier.trim() == 0 and sizes(tier) == 32 * each

    def forget(of: Folder) -> None:
        for file in of.root.rglob("*.safetensors"):
            os.utime(file, (1e9, 1e9))

    forget(tier)
    done = moved(shelf(pool), pool, tier, "read", slice(0, 8))
    assert done.good.all()
    tier.most_bytes = 27 * each
    assert tier.trim() >= 5 * each and sizes(tier) <= 27 * each
    assert all(map(tier.holds, NAMES[:8])) and all(map(others.holds, NAMES))  # only what was not read
    forget(others)
    tier.most_bytes = 6 * each
    tier.trim()
    assert [tier.holds(name) for name in NAMES] == [True] * 5 + [False] * 11 and sizes(tier) == 5 * each
    assert not [home for home in tier.folder.rglob("*") if len(home.name) == 64 and not list(home.iterdir())]


def test_a_large_store_keeps_the_limit(tmp_path: Path) -> None:
    """Bytes are counted after each file, not only after all blocks of a call."""
    each, pool = sizes(stored(tmp_path / "other")) // 16, blocks()
    tier = Folder(tmp_path / "folder", CONTENT, 4 * each)
    moved(shelf(pool), pool, tier, "write")
    assert 0 < sizes(tier) <= 4 * each


def test_files_that_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of another user in a shared folder: others are removed instead, and the limit is kept."""
    theirs = stored(tmp_path)
    for file in theirs.root.rglob("*.safetensors"):
        os.utime(file, (0, 0))
    ours, pool = Folder(tmp_path, replace(CONTENT, model="ours"), 1 << 30), blocks()
    moved(shelf(pool), pool, ours, "write")
    unlink = Path.unlink

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path.is_relative_to(theirs.root):
            raise PermissionError(errno.EACCES, "not yours", str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    ours.most_bytes = sizes(ours) * 3 // 4
    removed = sizes(ours) - ours.most_bytes
    assert ours.trim() >= removed and sizes(ours) <= ours.most_bytes and all(map(theirs.holds, NAMES))


def test_what_processes_leave(tmp_path: Path) -> None:
    """Empty folders, and temporary files next to content.json: they are removed when they are old, and not before."""
    tier = stored(tmp_path)
    tier.drop(NAMES[3], Part(0, 4))
    left = [tier.home(NAMES[3]), tier.root / ".kvbm-0.tmp", tier.home(NAMES[5]) / ".kvbm-1.tmp"]
    for file in left[1:]:
        file.write_bytes(b"x")
    tier.trim()
    assert all(path.exists() for path in left)
    for path in left:
        os.utime(path, (0, 0))
    tier.trim()
    assert not any(path.exists() for path in left) and tier.holds(NAMES[5])


def test_a_process_looks_after_what_it_wrote(tmp_path: Path) -> None:
    """First at once, then after every 64th of the limit; one process at a time."""
    tier = stored(tmp_path)
    tier.most_bytes = sizes(tier) // 2
    with (tmp_path / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert tier.trim() == 0
    tier.wrote(tier.most_bytes)
    assert sizes(tier) <= tier.most_bytes
    stored(tmp_path)
    tier.wrote(1)
    assert sizes(tier) > tier.most_bytes
    tier.wrote(tier.most_bytes // 64)
    assert sizes(tier) <= tier.most_bytes


def test_files_of_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All other files in the folder stay; also on file systems without locks, and through no link."""
    tier = stored(tmp_path / "folder")
    elsewhere = stored(tmp_path / "elsewhere")
    (tmp_path / "folder" / "link").symlink_to(elsewhere.root)
    others = [
        tmp_path / "folder" / "file", tmp_path / "folder" / "a" / "b" / "c" / "heads-0-3.safetensors",
        tier.home(NAMES[0]) / "notes", tier.home(NAMES[1]) / "heads.safetensors",
    ]  # fmt: skip
    for file in others:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(1000))

    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(tiers.fcntl, "flock", flock)
    tier.most_bytes = 1
    tier.trim()
    assert (
        not any(map(tier.holds, NAMES)) and all(map(elsewhere.holds, NAMES)) and all(file.exists() for file in others)
    )


def test_folders_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BindError, match=r"folder: expected a writable folder, got .*file/inside"):
        Folder(tmp_path / "file" / "inside", CONTENT, 1).make({})


@pytest.mark.parametrize(
    ("pool", "heads", "says"),
    [
        (replace(UNIT, nt=6), range(4), r"unit_tokens: expected a number that divides the blocks of 6 tokens, or a .*, got 4"),
        (replace(UNIT, nt=3), range(4), r"unit_tokens: expected a number that divides the blocks of 3 tokens, or a .*, got 4"),
        (replace(UNIT, hd=16), range(4), r"folder: expected blocks with all heads as .* got"),
        (replace(UNIT, dtype="int32"), range(4), r"folder: expected blocks"),
        (replace(UNIT, nh=2), range(4), r"folder: expected blocks"),
    ],
    ids=["tokens", "fewer tokens", "elements", "dtype", "heads"],
)
def test_blocks_that_are_refused(pool: BlockShape, heads: range, says: str) -> None:
    with pytest.raises(BindError, match=says):
        Shelf(CONTENT, Pool.allocate(load("universal"), pool, 2), heads)


def test_cover() -> None:
    """The selection of parts: few, and either all heads or none."""
    parts = [Part(0, 2), Part(2, 4), Part(1, 3), Part(0, 1)]
    assert tiers.cover(parts, 0, 4) == [(Part(0, 2), 0, 2), (Part(2, 4), 2, 4)]
    assert tiers.cover(parts, 1, 3) == [(Part(1, 3), 1, 3)]
    assert tiers.cover(parts, 3, 4) == [(Part(2, 4), 3, 4)]
    assert tiers.cover(parts, 0, 5) is None and tiers.cover([], 0, 1) is None


def test_a_folder_names_what_differs_in_another_one(tmp_path: Path) -> None:
    """The units of other weights, or of another configuration, have a folder of their own; only of the same title it is said."""
    models = [{"weights": weights, "config": {"rope": rope}} for weights, rope in (("a", 1), ("a", 2), ("b", 1))]
    folders, said = [], []
    for model in models:
        folders.append(Folder(tmp_path, replace(CONTENT, model=key_of_json(model))))
        folders[-1].make(model)
        said.append(neighbours(folders[-1].root, folders[-1].content, model))
    assert said[0] == [] and said[1] == [f"{folders[0].root.name}: model.config.rope: '2' here and '1' on the other side"]
    assert sorted(line.split(": ", 1)[1] for line in said[2]) == [
        "model.config.rope: '1' here and '2' on the other side; model.weights: 'b' here and 'a' on the other side",
        "model.weights: 'b' here and 'a' on the other side",
    ]
    other = replace(CONTENT, model=key_of_json({"weights": "c"}), title="another")
    assert neighbours(tmp_path / other.key, other, {"weights": "c"}) == []
    assert len({folder.root for folder in folders}) == 3


#: Objects in each other: as many as a parser takes, and more than a walk through them does.
DEEP = b'{"title": "org/a model", "content": {"rule": "kvbm-store-2", "a": ' + b"[" * 900 + b"]" * 900 + b"}}"


def seen(folder: Path) -> list[str]:
    return neighbours(folder / CONTENT.key, CONTENT, {"weights": "a"})


@pytest.mark.parametrize("told", [b"", b"{", b"[]", b"null", b'{"title": 7}', b"[" * 100_000, b"\xff" * 9, bytes(1 << 20), DEEP])
def test_what_another_folder_says_is_not_trusted(tmp_path: Path, told: bytes) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "content.json").write_bytes(told)
    os.mkfifo(tmp_path / "fifo")
    assert seen(tmp_path) == []
    Folder(tmp_path, CONTENT).make({"weights": "a"})
    model = {"weights": "\x1b[2Jx"}
    Folder(tmp_path, replace(CONTENT, model=key_of_json(model))).make(model)
    [line] = seen(tmp_path)
    assert "model.weights" in line and "\x1b" not in line


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"model_fields": {"weights": "a"}, "version": "1"}, "an earlier version of kvbm, which named units in another way"),
        ({"content": {**CONTENT.fields, "rule": "kvbm-9"}}, "the rule 'kvbm-9', and this version of kvbm has 'kvbm-store-2'"),
        ({"content": CONTENT.fields, "model": {}}, "content.json was changed: it does not describe the folder of this name"),
    ],
)  # fmt: skip
def test_folders_of_other_rules_are_named_and_not_read(tmp_path: Path, told: dict[str, Any], says: str) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "content.json").write_text(json.dumps({"title": CONTENT.title, **told}))
    [line] = seen(tmp_path)
    assert line.startswith("other: ") and says in line


def test_a_content_without_a_title_is_one(tmp_path: Path) -> None:
    """Of another rule, so in a folder of any name."""
    (tmp_path / "content.json").write_text(json.dumps({"title": "", "content": {"rule": "kvbm-9"}}))
    found = described(tmp_path)
    assert found is not None and "kvbm-9" in found.problem and not found.is_damaged


@pytest.mark.gpu
def test_pinned_memory(tmp_path: Path) -> None:
    """As for an engine on a GPU."""
    tier, expected = stored(tmp_path, 2), blocks(nt=16)
    pool = Pool.allocate(load("universal"), expected.shape, 4, "pinned")
    assert moved(shelf(pool), pool, tier, "read").good.all()
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(pool.arrays, expected.arrays, strict=True))
    other = Folder(tmp_path / "other", CONTENT, 1 << 30)
    assert moved(shelf(pool), pool, other, "write").good.all() and loaded(other)[0].good.all()
