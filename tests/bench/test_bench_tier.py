"""`python -m benchmarks tier`: rows, the check of what was read, and the page cache.  Small sizes; no time is asserted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import benching
from benching import MODEL, run
from benchmarks import race, tier
from kvbm.store.folder import Folder

pytestmark = pytest.mark.usefixtures("small_caches")

ARGUMENTS = ("--shape", str(MODEL), "--iters", "2", "--threads", "2", "--folder")


def test_the_tier_and_plain_files_beside_the_device(tmp_path: Path) -> None:
    rows = benching.ran(tier.tier, *ARGUMENTS, str(tmp_path), "--num-blocks", "3,6")
    assert tuple(rows[0]) == race.COLUMNS and not list(tmp_path.iterdir()), "nothing is left"
    keys = [
        (n, f"{case}, units of 16 KiB", by) for n in ("3", "6") for case in tier.CASES for by in ("device", "plain files", "kvbm")
    ]
    assert [(row["n"], row["case"], row["by"]) for row in rows] == keys
    for row in rows:
        assert int(row["total_bytes"]) == int(row["n"]) * MODEL.nbytes and row["beside"] == "device"
    times = {(row["n"], row["case"].partition(",")[0], row["by"]): float(row["median_ms"]) for row in rows}
    for n, case, by in times:
        if case == "store":
            assert times[n, case, by] < times[n, "store to the disk", by], "the time of fsync is added"


def _bytes(count: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, count * 10_000, np.uint8)


@pytest.mark.parametrize(("count", "threads"), [(1, 4), (3, 2), (4, 4)])
def test_files_are_whole_by_any_number_of_threads(
    tmp_path: Path, count: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "STEP_BYTES", 999)
    data = _bytes(count)
    files = tier.Files(tmp_path / "x", data, count, threads)
    for _ in range(2):
        files.clear()
        files.store()
        assert b"".join(path.read_bytes() for path in files.paths) == data.tobytes()
        files.forget()
        files.load()
        files.check()
    files.paths[0].write_bytes(bytes(10_000))
    files.load()
    with pytest.raises(tier.WrongCopyError, match="x: what was read is not what was written"):
        files.check()
    files.paths[0].write_bytes(b"short")
    with pytest.raises(tier.WrongCopyError, match="cut short"):
        files.load()
    files.close()


def test_what_was_not_read_is_not_taken_for_what_was_read_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(self: tier.Tier) -> None:
        del self

    monkeypatch.setattr(tier.Tier, "load", nothing)
    found = run(tier.tier, *ARGUMENTS, str(tmp_path), "--num-blocks", "3")
    assert found.exit_code == 1 and "kvbm: what was read is not what was written" in str(found.exception)


@pytest.mark.parametrize("what", ["write", "open"])
def test_a_tier_that_fails_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Folder, what, full)
    found = run(tier.tier, *ARGUMENTS, str(tmp_path), "--num-blocks", "3")
    assert found.exit_code == 1 and "No space left" in str(found.exception)


def test_units_that_are_there_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier.Tier, "clear", lambda _: None)
    found = run(tier.tier, *ARGUMENTS, str(tmp_path), "--num-blocks", "3")
    assert found.exit_code == 1 and f"expected {3 * MODEL.nbytes} bytes to be moved, got 0" in str(found.exception)


def test_a_cache_that_keeps_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on tmpfs."""
    monkeypatch.setattr(tier, "_dropped", lambda path: int(path.suffix == ".safetensors"))
    found = run(tier.tier, *ARGUMENTS, str(tmp_path), "--num-blocks", "3")
    assert found.exit_code == 0 and "the page cache kept files" in found.stderr
    monkeypatch.setattr(tier, "_dropped", lambda _: 0)
    assert not run(tier.tier, *ARGUMENTS, str(tmp_path), "--num-blocks", "3").stderr


def test_pages_in_the_cache_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(5 * 4096 - 1))
    monkeypatch.setattr(tier.os, "posix_fadvise", lambda *_: None)
    assert tier._dropped(path) == 5
