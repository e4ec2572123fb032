"""A short run of the torture campaign, which must also detect broken code (tools/torture.py, torturing.py)."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import processes
import torturing
from kvbm import kernels
from kvbm.digest import run as digesting

TOOL = Path(__file__).resolve().parents[2] / "tools" / "torture.py"

#: Rounds of a kind.
ROUNDS = {
    ("host", "copies"): 15, ("host", "reshards"): 15, ("host", "flips"): 10, ("host", "threads"): 10, ("host", "kills"): 1,
    ("host", "readers"): 3, ("host", "full disk"): 4, ("host", "host memory"): 1, ("fake", "copies"): 10, ("fake", "flips"): 15,
    ("fake", "threads"): 10, ("fake", "device memory"): 2, ("fake", "calls"): 1,
}  # fmt: skip


def tool() -> Any:
    spec = importlib.util.spec_from_file_location("torture", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(tmp_path: Path, device: str, *words: object) -> dict[str, Any]:
    if device == "fake" and (processes.COMPILER is None or kernels.is_using_stubs()):
        pytest.skip("no C compiler for the fake driver, or no CUDA kernels")
    state = tmp_path / "state.json"
    command = [sys.executable, TOOL, *map(str, words), "--device", device, "--state", state]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(next(iter(tmp_path.glob("*.json"))).read_text(encoding="utf-8"))


def test_every_kind_has_rounds() -> None:
    kinds = {(device, kind) for kind, of in torturing.KINDS.items() for device in of.devices if device != "cuda"}
    assert kinds == set(ROUNDS)


@pytest.mark.parametrize(("has_kernels", "devices"), [(True, ["host", "fake"]), (False, ["host"])])
def test_rounds_of_the_fake_driver_need_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, has_kernels: bool, devices: list[str]
) -> None:
    """Without them, rounds run on the host only, and a device that was named is an error."""
    torture, asked = tool(), []

    class Campaign(torture.Campaign):  # type: ignore[misc]
        def run(self, *_: object) -> int:
            asked.extend(sorted({device for device, _ in self.turns}, reverse=True))
            return 0

    monkeypatch.setattr(torture, "Campaign", Campaign)
    monkeypatch.setattr(kernels, "is_using_stubs", lambda: not has_kernels)
    words = ["torture.py", "--state", str(tmp_path / "state.json")]
    monkeypatch.setattr(sys, "argv", words)
    assert torture.main() == 0 and asked == devices
    assert ("built without CUDA kernels" in capsys.readouterr().err) is not has_kernels
    if not has_kernels:
        monkeypatch.setattr(sys, "argv", [*words, "--device", "fake"])
        with pytest.raises(SystemExit):
            torture.main()
        assert "--device fake: kvbm was built without CUDA kernels" in capsys.readouterr().err


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One for all kinds: each device's process starts once."""
    made = tool().Campaign(["host", "fake"], None, 0, tmp_path_factory.mktemp("torture") / "state.json")
    yield made
    for worker in made.workers.values():
        worker.close()


@pytest.mark.slow
@pytest.mark.parametrize(("device", "kind"), ROUNDS)
def test_nothing_is_missed(campaign: Any, device: str, kind: str) -> None:
    if device == "fake" and (processes.COMPILER is None or kernels.is_using_stubs()):
        pytest.skip("no C compiler for the fake driver, or no CUDA kernels")
    done = 0
    while done < ROUNDS[device, kind]:
        done += campaign.batch(device, kind)
    counts = campaign.state["counts"][f"{device} {kind}"]
    assert not campaign.state["failed"] and counts["rounds"] >= ROUNDS[device, kind]
    outcomes = ("found", "stated error", "harmless", "late", "done", "old file", "new file")
    assert counts.get("injected", 0) == sum(counts.get(word, 0) for word in outcomes)
    assert counts.get("right") or counts["injected"]


@pytest.mark.slow
def test_a_comparison_that_is_gone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digesting.Proof, "_compare", lambda *_: None)
    with pytest.raises(AssertionError, match="what was reported is not what differs"):
        all(torturing.one_round("host", "flips", 0, number) for number in range(300))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["host", "fake"])
def test_four_thousand_copies_hold_nothing(tmp_path: Path, device: str) -> None:
    told = run(tmp_path, device, "soak", "--copies", 4_000)["grows"]
    assert {"allocations" if device == "fake" else "rss", "fds", "threads"} <= told.keys()


@pytest.mark.slow
def test_links_with_faults_hold_nothing(tmp_path: Path) -> None:
    told = run(tmp_path, "host", "links", "--transfers", 300)
    assert told["counts"]["transfers"] >= 300 and {"rss", "fds", "threads"} == told["grows"].keys()
    assert {"lose", "double", "delay", "swap", "corrupt"} <= told["counts"].keys()


@pytest.mark.sanitize
def test_one_sample_is_flat() -> None:
    assert all(of["flat"] for of in tool().judged([{"copies": 1, "rss": 1, "fds": 7}]).values())


@pytest.mark.sanitize
def test_what_grows_is_seen() -> None:
    judged = tool().judged
    samples = [{"copies": n, "rss": 10**8 + n * 100, "fds": 7, "threads": 4 + n // 800_000} for n in range(0, 10**6, 25_000)]
    told = judged(samples)
    assert [told[name]["flat"] for name in ("rss", "fds", "threads")] == [False, True, False]
    assert told["rss"]["slope"] == pytest.approx(100)


@pytest.mark.slow  # half a second
@pytest.mark.sanitize
def test_a_round_is_its_number() -> None:
    rounds = [repr(torturing.scene(torturing.random.Random("5"), "host")) for _ in range(2)]
    assert rounds[0] == rounds[1]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [kind for kind, of in torturing.KINDS.items() if "cuda" in of.devices])
def test_on_a_gpu(tmp_path: Path, kind: str) -> None:
    state = run(tmp_path, "cuda:0", "--kind", kind, "--rounds", 40)
    assert not state["failed"]
