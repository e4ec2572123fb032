"""kvbm.store.upkeep and ``kvbm store``: what is in a folder, whether it is as it was, and room; beside readers and writers."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from kvbm import BindError, BlockShape, Pool, load
from kvbm.cli.app import main
from kvbm.cli.store import _when
from kvbm.integrations.host_values import FORMATS, HostValues
from kvbm.store.folder import Folder, Part
from kvbm.store.keys import Chain, Content, key_of_json
from kvbm.store.shelf import Shelf
from kvbm.store.upkeep import gc, held, verify

UNIT = BlockShape(nl=2, no=2, nh=4, nt=4, hd=8, dtype="float32")
TOKENS = list(range(64))
NAMES = Chain(4, TOKENS).keys(0, 64)

#: What a file says of values that were divided by 2 before they were written.
SCALED_CAST = '{"": {"dtype": "float32", "from": "float64", "scale": 2.0}}'


def stored(root: Path, weights: str = "a", heads: range = range(4)) -> Folder:
    """16 units of a model, of some heads; unit k was used k hours ago."""
    model = {"weights": weights}
    folder = Folder(root, Content(key_of_json(model), f"org/{weights}", (0, 1), UNIT))
    folder.make(model)
    pool = Pool.allocate(load("universal"), BlockShape(2, 2, len(heads), 4, 8, "float32"), 16)
    for number, array in enumerate(pool.arrays):
        array[...] = number + 1
    done = Shelf(folder.content, pool, heads, threads=1).write(folder, np.arange(16), pool.digest(), NAMES, range(0, 64, 4))
    assert done.good.all()
    for hours, name in enumerate(NAMES):
        for path in folder.home(name).iterdir():
            os.utime(path, (time.time() - 3600 * hours,) * 2)
    return folder


def call(*words: object) -> Result:
    return CliRunner().invoke(main, ["store", *map(str, words)], env={"COLUMNS": "200"})


def snapshot(root: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.lstat().st_mtime_ns, path.lstat().st_size) for path in sorted(root.rglob("*"))}


def old(root: Path) -> tuple[Path, Path]:
    """Folders of an earlier version: of vLLM's tier, and of SGLang's storage."""
    tier, pages = root / ("0" * 24), root / "org-a-universal-0123"
    for path in (tier / "ab" / NAMES[0] / "heads-0-3.safetensors", pages / f"{NAMES[1]}.l0-2.h0-4.safetensors"):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x" * 100)
    for path in (tier, pages):
        (path / "content.json").write_text(json.dumps({"title": "org/a", "model_fields": {}}))
    return tier, pages


def test_what_is_listed(tmp_path: Path) -> None:
    """Contents with their model and sizes, those of an earlier version with the reason; nothing else, and nothing is changed."""
    one = stored(tmp_path)
    stored(tmp_path, "b", range(2))
    old(tmp_path)
    (tmp_path / "strange").mkdir()
    (tmp_path / "link").symlink_to(one.root)
    before = snapshot(tmp_path)
    found = {entry["title"] + entry["problem"][:31]: entry for entry in json.loads(call("ls", tmp_path, "--json").stdout)}
    assert set(found) == {"org/a", "org/b", "org/ait was written by an earlier ve"}
    assert found["org/a"]["units"] == 16 and found["org/a"]["content"] == one.content.key
    assert found["org/a"]["bytes"] == sum(path.stat().st_size for path in one.root.rglob("*.safetensors"))
    assert found["org/a"]["fields"]["model"] == {"weights": "a"}
    text = call("ls", tmp_path)
    assert text.exit_code == 0 and one.content.key[:12] in text.output and "which named units in another way" in text.output
    sums = json.loads(call("du", tmp_path, "--json").stdout)
    assert (sums["units"], sums["incomplete"]) == (34, 18)  # of b heads are missing, and two are of an earlier version
    assert snapshot(tmp_path) == before
    assert "no contents" in call("ls", tmp_path / "strange").output and call("ls", tmp_path / "none").exit_code == 2


def change(byte: int) -> Any:
    def do(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[byte] ^= 1
        path.write_bytes(data)

    return do


DAMAGES: dict[str, tuple[Any, int]] = {
    "first byte": (change(4096), 21), "last byte": (change(-1), 21), "a digest": (change(4090), 21), "the header": (change(1), 14),
    "cut": (lambda path: os.truncate(path, path.stat().st_size - 1), 14), "empty": (lambda path: os.truncate(path, 0), 14),
    "another unit": (lambda path: path.write_bytes(next(path.parents[2].rglob(f"{NAMES[5]}/*")).read_bytes()), 14),
    "strange heads": (lambda path: path.rename(path.with_name("heads-3-9.safetensors")), 14),
    "no heads": (lambda path: path.rename(path.with_name("heads-3-2.safetensors")), 14),
    "zeros before heads": (lambda path: path.rename(path.with_name("heads-00-03.safetensors")), 14),
    "a link": (lambda path: (path.unlink(), path.symlink_to("nothing")), 14),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), 14),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_byte_is_verified(tmp_path: Path, damage: str) -> None:
    """The file is named, and stays: an engine removes it."""
    folder = stored(tmp_path)
    good = call("verify", tmp_path)
    assert good.exit_code == 0 and "16 units" in good.output and "all as they were" in good.output
    [path] = folder.home(NAMES[3]).iterdir()
    do, code = DAMAGES[damage]
    do(path)
    before = snapshot(tmp_path)
    done = call("verify", tmp_path, "--json")
    [wrong] = json.loads(done.stdout)["wrong"]
    assert done.exit_code == wrong["exit_code"] == code and NAMES[3] in wrong["path"] and snapshot(tmp_path) == before


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rope", [0, 16])
def test_quantised_values_are_verified(tmp_path: Path, name: str, rope: int) -> None:
    """Those of K and V, and of a latent, whose layout is not shipped; and each byte of a unit counts."""
    values, shape = HostValues(name, rope), BlockShape(2, 1, 1, 4, 128 + rope, "bfloat16") if rope else replace(UNIT, hd=32)
    shape = replace(shape, dtype="bfloat16")
    content = Content(key_of_json({}), "org/a", (0, 1), shape, values.layout, values.text(shape.dtype))
    folder, pool = Folder(tmp_path, content), Pool.allocate(values.layout, shape, 2)
    folder.make({})
    for array in pool.arrays:
        array.reshape(-1).view(np.uint8)[...] = np.random.default_rng(4).integers(0, 256, array.nbytes, np.uint8)
    shelf = Shelf(content, pool, range(shape.nh), threads=1)
    assert shelf.write(folder, np.arange(2), pool.digest(), NAMES[:2], [0, 4]).good.all()
    assert list(verify(held(tmp_path))) == [] and held(tmp_path)[0].incomplete() == []
    done = call("verify", tmp_path)
    assert done.exit_code == 0 and "2 units" in done.output and json.loads(call("du", tmp_path, "--json").stdout)["incomplete"] == 0
    [path] = folder.home(NAMES[1]).iterdir()
    start = path.stat().st_size - values.layout.resolve(shape, 1).nbytes
    for byte in (start, start + (path.stat().st_size - start) // 2, -1):
        change(byte)(path)
        assert call("verify", tmp_path).exit_code == 21
        change(byte)(path)
    assert call("verify", tmp_path).exit_code == 0


def test_a_content_that_says_what_it_is_not(tmp_path: Path) -> None:
    """A changed description, one that has other sizes, or a layout that nobody knows: no units are read by it."""
    folder = stored(tmp_path)
    path = folder.root / "content.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps({**said, "model": {"weights": "b"}}))
    assert "content.json was changed" in held(tmp_path)[0].described.problem
    path.write_text(json.dumps(said))
    folder.root.rename(tmp_path / ("0" * 64))
    assert "content.json was changed" in held(tmp_path)[0].described.problem
    strange = (
        {"shape": {"nl": -1}}, {"shape": None}, {"layers": [None]}, {"values": {}, "layers": "x"}, {"fingerprint": "0"},
        {"layers": [1e400]}, {"layers": [1.5]}, {"layers": "12"},
        {"shape": {**said["content"]["shape"], "dtype": "float7"}},
    )  # fmt: skip
    for number, change in enumerate(strange):
        content = {**said["content"], **change}
        made = tmp_path / key_of_json(content)
        made.mkdir()
        (made / "content.json").write_text(json.dumps({**said, "content": content}))
        done = call("verify", tmp_path)
        assert done.exit_code == 14 and done.output.count("content.json: ") == number + 1, done.output
        assert call("ls", tmp_path).exit_code == call("du", tmp_path).exit_code == 0


def spoil(folder: Folder, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something by which `verify` cannot read units, of which one is junk."""
    home, description = folder.home(NAMES[0]), folder.root / "content.json"
    (home / "heads-0-3.safetensors").write_bytes(b"junk")
    if what == "changed":
        description.write_text(description.read_text().replace('"hd": 8', '"hd": 9'))
    elif what == "cut":
        description.write_text(description.read_text()[:-40])
    elif what == "missing":
        description.unlink()
    elif what == "elsewhere":
        (folder.root / "zz").mkdir()
        home.rename(folder.root / ("00" if home.name[:2] != "00" else "01") / home.name)
    elif what in ("a link", "a prefix that is a link"):
        given = home if what == "a link" else home.parent
        given.rename(folder.folder / "moved")
        given.symlink_to(folder.folder / "moved")
    else:
        bad, scandir = {"a unit": home, "a prefix": home.parent, "all": folder.root}[what], os.scandir

        def failing(path: Any) -> Any:
            if str(path) == str(bad):
                raise OSError(5, os.strerror(5), str(path))
            return scandir(path)

        monkeypatch.setattr("os.scandir", failing)


SPOILT = ["changed", "cut", "missing", "elsewhere", "a link", "a prefix that is a link", "a unit", "a prefix", "all"]


@pytest.mark.parametrize("what", SPOILT)
def test_what_was_not_read_is_not_as_it_was(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: `verify` left it out, and said that all is as it was."""
    folder = stored(tmp_path)
    for number in range(2):
        (folder.root / f"{number:02x}").mkdir(exist_ok=True)
    spoil(folder, what, monkeypatch)
    done = call("verify", tmp_path)
    assert done.exit_code != 0 and "1 wrong" in done.output, done.output
    assert str(folder.root) in done.output and "Traceback" not in done.output
    monkeypatch.undo()
    listed = call("ls", tmp_path)
    assert listed.exit_code == 0 and ("note: " in listed.output or "a " in what or what == "all"), listed.output


@pytest.mark.parametrize("what", ["changed", "cut", "missing"])
def test_a_damaged_description_is_not_another_rule(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: `gc --other-rules` removed units that engines still read."""
    folder = stored(tmp_path)
    spoil(folder, what, monkeypatch)
    assert call("gc", tmp_path, "--other-rules").exit_code == 0
    assert len(list(folder.root.rglob("heads-*"))) == 16 and len(held(tmp_path)[0].units) == 16


def test_what_cannot_be_removed_stays_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: no command saw the unit again."""
    tier, _ = old(tmp_path)
    monkeypatch.setattr("kvbm.store.upkeep.remove", lambda _: 0)
    assert gc(tmp_path, other_rules=True).left_units == 2 and (tier / "content.json").exists() and len(held(tmp_path)) == 2


def test_files_of_others_stay(tmp_path: Path) -> None:
    """Red: an engine removed all old ``.tmp`` files below each folder beside its own."""
    other = tmp_path / "project" / "thesis.tmp"
    other.parent.mkdir()
    other.write_text("of somebody")
    os.utime(other, (1, 1))
    folder = stored(tmp_path)
    Folder(tmp_path, folder.content, 1).trim()
    assert other.exists() and not list(folder.root.rglob("heads-*"))


def test_a_lock_that_is_no_file(tmp_path: Path) -> None:
    """Red: a FIFO of its name was waited for."""
    stored(tmp_path)
    os.mkfifo(tmp_path / ".lock")
    assert gc(tmp_path, to_bytes=0).units == 16


def test_a_time_that_no_calendar_has() -> None:
    """Red: `ls` ended with a ValueError for a unit of the year 11476."""
    assert _when(3e11) == "in the future" and _when(0) == "-" and _when(1e9).startswith("2001-09-0")


@pytest.mark.parametrize("change", [{"kvbm.format": "3"}, {"kvbm.format": "2", "kvbm.cast": SCALED_CAST}])
def test_files_that_this_version_does_not_read(tmp_path: Path, change: dict[str, str]) -> None:
    """Red: engines took them, and only `verify` refused them."""
    folder = stored(tmp_path)
    path = folder.home(NAMES[0]) / "heads-0-3.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + size])
    head["__metadata__"] |= change
    text = json.dumps(head).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    with pytest.raises(BindError, match="kvbm"):
        folder.open(NAMES[0], Part(0, 4))
    assert not path.exists()


def test_room_by_age_and_size(tmp_path: Path) -> None:
    """The dry run says the same numbers, and changes nothing."""
    folder, other = stored(tmp_path), stored(tmp_path, "b")
    each = held(tmp_path)[0].nbytes // 16
    before = snapshot(tmp_path)
    dry = gc(tmp_path, older_than=3600 * 9.5, dry_run=True)
    assert snapshot(tmp_path) == before and (dry.units, dry.nbytes, dry.left_units) == (12, 12 * each, 20)
    assert gc(tmp_path, older_than=3600 * 9.5) == dry
    assert [folder.holds(name) for name in NAMES] == [True] * 10 + [False] * 6
    done = call("gc", tmp_path, "--to-size", f"{each * 6 + each // 2}", "--json")
    assert json.loads(done.stdout)["left_units"] == 6 and [other.holds(name) for name in NAMES[:4]] == [True] * 3 + [False]
    assert all(path.exists() for path in (folder.root / "content.json", other.root / "content.json"))
    assert call("gc", tmp_path, "--to-size", "0").exit_code == 0 and not list(tmp_path.rglob("*.safetensors"))
    assert call("gc", tmp_path).exit_code == call("gc", tmp_path, "--older-than", "soon").exit_code == 2


def test_a_clock_that_was_wrong(tmp_path: Path) -> None:
    """Times of the future do not keep units for ever: they go first by size; by age they stay, as this clock may be wrong."""
    folder = stored(tmp_path)
    [path] = folder.home(NAMES[9]).iterdir()
    os.utime(path, (time.time() + 10 * 365 * 86400,) * 2)
    [path] = folder.home(NAMES[0]).iterdir()
    os.utime(path, (time.time() + 60,) * 2)  # another machine's clock
    assert gc(tmp_path, older_than=3600 * 12.5).units == 3 and all(map(folder.holds, NAMES[:13]))
    each = held(tmp_path)[0].nbytes // 13
    assert gc(tmp_path, to_bytes=12 * each).units == 1
    assert [name for name in NAMES[:13] if not folder.holds(name)] == [NAMES[9]]
    os.utime(next(folder.home(NAMES[5]).iterdir()), (time.time() + 86400,) * 2)
    folder.most_bytes = 12 * each - 1
    assert folder.trim() == each and not folder.holds(NAMES[5]) and folder.holds(NAMES[12])


def test_contents_of_other_rules(tmp_path: Path) -> None:
    """They go as a whole, and the others stay."""
    folder = stored(tmp_path)
    tier, pages = old(tmp_path)
    (pages / "notes.txt").write_text("of somebody")
    assert gc(tmp_path, other_rules=True, dry_run=True).units == 2 and tier.exists()
    assert gc(tmp_path, other_rules=True).units == 2
    assert not tier.exists() and [path.name for path in pages.iterdir()] == ["notes.txt"]
    assert all(map(folder.holds, NAMES))


def test_what_is_nobodys_stays(tmp_path: Path) -> None:
    """Files of others, folders without a description, links out of the folder; and what is outside."""
    outside = stored(tmp_path / "outside")
    folder = stored(tmp_path / "kv")
    strange = tmp_path / "kv" / "of me" / "ab" / NAMES[0]
    strange.mkdir(parents=True)
    files = [strange / "heads-0-3.safetensors", folder.home(NAMES[0]) / "notes", folder.root / "ab.txt"]
    for file in files:
        file.write_bytes(b"x")
    (tmp_path / "kv" / "link").symlink_to(outside.root)
    (folder.root / "zz").symlink_to(outside.root / NAMES[0][:2])
    linked = folder.home(NAMES[1]) / "heads-1-2.safetensors"
    linked.symlink_to(outside.home(NAMES[1]) / "heads-0-3.safetensors")
    gc(tmp_path / "kv", to_bytes=0)
    assert all(file.exists() for file in files) and not linked.is_symlink() and all(map(outside.holds, NAMES))
    assert not any(map(folder.holds, NAMES))


def test_two_that_remove(tmp_path: Path) -> None:
    """An engine that makes room, and a command: the second one says so."""
    stored(tmp_path)
    with (tmp_path / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BindError, match=r"another process removes files there at the moment; try again"):
            gc(tmp_path, to_bytes=0)
        assert gc(tmp_path, to_bytes=0, dry_run=True).units == 16


@pytest.mark.slow  # half a second
def test_gc_and_verify_beside_a_reader_and_a_writer(tmp_path: Path) -> None:
    """A reader has right data or a miss, a writer no error, and no file is found to be wrong."""
    folder, until, seen = stored(tmp_path), time.monotonic() + 0.8, []
    whole = Pool.allocate(load("universal"), UNIT, 16)
    for number, array in enumerate(whole.arrays):
        array[...] = number + 1
    shelf = Shelf(folder.content, whole, range(4), threads=1)

    def write() -> None:
        while time.monotonic() < until:
            done = shelf.write(folder, np.arange(16), whole.digest(), NAMES, range(0, 64, 4))
            seen.extend(why for why in [done.why] if why)

    def remove() -> None:
        while time.monotonic() < until:
            gc(tmp_path, to_bytes=4000)
            seen.extend(str(wrong.error) for wrong in verify(held(tmp_path)))

    threads = [threading.Thread(target=one) for one in (write, remove)]
    for thread in threads:
        thread.start()
    into = Pool.allocate(load("universal"), UNIT, 16)
    reader, hits, misses = Shelf(folder.content, into, range(4), threads=1), 0, 0
    while time.monotonic() < until:
        done = reader.read(folder, np.arange(16), NAMES, range(0, 64, 4))
        hits, misses = hits + int(done.good.sum()), misses + int((~done.good).sum())
        assert all((into.arrays[at] == at + 1).all() for at in np.flatnonzero(done.good))
    for thread in threads:
        thread.join()
    assert hits and misses and not seen


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "", "A" * 64, "0" * 63, "0" * 64 + "/..", "é" * 64, "0" * 64 + "\n"])
def test_names_that_are_no_keys(tmp_path: Path, name: str) -> None:
    """No path is made of them."""
    folder = stored(tmp_path)
    with pytest.raises(BindError, match="expected the key of a unit, 64 hexadecimal digits"):
        folder.open(name, Part(0, 4))
    assert not folder.holds(name)
