"""`python -m benchmarks digest`: rows, the check before them, and the columns for comparison.  Small sizes; no time is asserted."""

from __future__ import annotations

import contextlib
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import benching
import kvbm
from benching import MODEL, ON_CPU, run
from benchmarks import digest, race
from kvbm.bench import measure
from kvbm.bench.check import WrongCopyError

pytestmark = pytest.mark.usefixtures("small_caches")


def ran(*arguments: str) -> list[dict[str, str]]:
    rows = benching.ran(digest.digest, *ON_CPU, *arguments)
    assert tuple(rows[0]) == race.COLUMNS
    return rows


@pytest.mark.slow  # half a second
def test_every_pair_is_measured_beside_its_copy() -> None:
    rows = ran("--what", "copies")
    assert list(dict.fromkeys(row["case"] for row in rows)) == [f"{src} → {dst}" for src, dst, _ in digest.PAIRS]
    assert {row["beside"] for row in rows} == {"copy"}
    assert {row["by"] for row in rows if row["case"] == "nhd → universal"} == {"copy + digests", "copy, verified"}
    assert {row["asked"] for row in rows if row["by"] == "copy + digests"} == {">= 0.7"}
    assert {row["n"] for row in rows} == {"1", "4", "16", "64"}


def test_quick_runs_and_the_table(tmp_path: Path) -> None:
    out = tmp_path / "results" / "digest.csv"
    found = run(digest.digest, *ON_CPU, "--quick", "--out", str(out))
    assert found.exit_code == 0, (found.output, found.exception)
    assert "staged: left out: it needs a GPU" in found.stderr
    assert "NumPy's sum" in found.stdout and "zlib.crc32" in found.stdout
    assert out.read_text("utf-8").startswith("# kvbm abc1234")


def test_checksums_that_are_installed_stand_beside_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums that are not installed have no rows."""
    hashed: list[int] = []
    fake = types.SimpleNamespace(xxh3_64_intdigest=lambda piece: hashed.append(len(piece)))
    monkeypatch.setitem(sys.modules, "xxhash", fake)
    monkeypatch.setitem(sys.modules, "crc32c", None)
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    rows = ran("--what", "alone", "--quick")
    assert [row["beside"] for row in rows] == ["NumPy's sum", "xxh3_64", "zlib.crc32"]
    assert hashed[0] == 16 and set(hashed[1:]) == {MODEL.nbytes} and not (len(hashed) - 1) % 64


def test_a_digest_that_is_wrong_is_seen() -> None:
    with contextlib.ExitStack() as stack:
        src, dst = (
            stack.enter_context(measure.random_pool(kvbm.load(name), MODEL, 4, "cpu", seed=seed))
            for seed, name in enumerate(("nhd", "universal"))
        )
        out, clock = digest._Digests(4, "cpu", stack), measure.make_clock("cpu")
        ids = np.array([0, 1]), np.array([2, 3])
        with kvbm.Transfer(src, dst) as move:
            digest._check(src, dst, move, ids, out, clock, "case")

            class Wrong:
                def copy(self, *ids: Any, digests: Any, **_: Any) -> Any:
                    done = move.copy(*ids, digests=digests)
                    digests[1] ^= np.uint64(1 << 63)
                    return done

            with pytest.raises(WrongCopyError, match="case: 1 of 2 digests of a copy are not those of the source"):
                digest._check(src, dst, Wrong(), ids, out, clock, "case")  # type: ignore[arg-type]


# ---- as on a GPU: the CPU's pools, and what is asked of a GPU --------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU replaces the GPU and pinned memory; it is read by torch on the CPU."""
    torch = pytest.importorskip("torch")
    pool, transfer = measure.random_pool, kvbm.Transfer
    monkeypatch.setattr(digest.Run, "on_gpu", property(lambda _: True))
    monkeypatch.setattr(digest, "random_pool", lambda *given, seed=1: pool(*given[:3], "cpu", seed=seed))
    monkeypatch.setattr(digest, "Transfer", lambda src, dst, _, **rest: transfer(src, dst, **rest))

    def readers(memory: measure.Memory, *_: Any) -> Any:
        whole = torch.from_numpy(memory.array).view(torch.int64)
        return digest.torch_readers(torch, whole, lambda _: contextlib.nullcontext())

    monkeypatch.setattr(digest, "_gpu_readers", readers)


@pytest.mark.slow  # a whole study
@pytest.mark.usefixtures("gpu")
def test_what_is_asked_for_on_a_gpu() -> None:
    rows = ran("--iters", "5")
    asked = {(row["case"], row["n"]): row["asked"] for row in rows if row["by"] == "copy + digests"}
    for src, dst, is_mixed in digest.PAIRS:
        for n in (1, 4, 16, 64, 256):
            assert asked[f"{src} → {dst}", str(n)] == (">= 0.95" if is_mixed or n < 64 else ">= 0.98")
    assert asked["nhd → universal, staged to pinned memory", "64"] == ">= 0.99"
    alone = [row for row in rows if row["by"] == "digest"]
    assert [row["asked"] for row in alone] == ["", "", "", ">= 0.85"] * 2
    assert all(row["beside"].startswith("read (torch.sum of ") for row in alone)


@pytest.mark.usefixtures("gpu")
def test_a_gpu_without_anybody_who_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "_gpu_readers", lambda *_: iter(()))
    rows = ran("--what", "alone", "--quick")
    assert [(row["beside"], row["asked"]) for row in rows] == [("itself", "")]


def test_memory_that_does_not_suffice_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = digest.random_pool

    def some(layout: kvbm.Layout, *rest: Any, **more: Any) -> Any:
        if layout.name == "nhd":
            raise MemoryError("no room")
        return pool(layout, *rest, **more)

    monkeypatch.setattr(digest, "random_pool", some)
    notes: list[str] = []
    rows = list(digest.measure(digest.Run("cpu", MODEL, 1, True, notes.append), ("copies",)))
    assert notes == ["nhd → universal: left out: no room", "universal → nhd: left out: no room"]
    assert {row["case"] for row in rows} == {"vllm/fp8_ds_mla → record/mla_fp8_planes"}
