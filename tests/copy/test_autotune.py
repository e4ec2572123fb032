"""Measuring the strategies: when it is done, what it runs, and what `auto` chooses without it."""

from __future__ import annotations

import _thread
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from test_cost_model import DRIVER, GPU, KIB, MIB, PLAIN

import kvbm
from kvbm.cli import app, doctor
from kvbm.copy import autotune, cost_model, strategies, tables
from kvbm.copy.cost_model import Row, Way
from kvbm.planner import plan
from processes import FakeDriver

ALL = {"direct": Way(4 * KIB), "staged": Way(2 * MIB), "engine": Way(4 * KIB)}
BUILT_IN = ((7, "direct"), (8, "staged"))  # for d2h


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """A new cache folder, a machine without a tuning table, and no measuring unless a test requests it."""
    monkeypatch.setenv("KVBM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("KVBM_TUNE", raising=False)
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr("kvbm.system.machine.gpu_and_driver", lambda _: (GPU, DRIVER))
        monkeypatch.setattr(autotune, "measure", Measured(kvbm.KvbmError("this test did not ask for it")))
    tables.reload()
    yield
    tables.reload()


def limits(direction: str, ways: dict[str, Way] = ALL, block: int = 2 * MIB) -> cost_model.Choice:
    autotune.ensure(direction, 0)
    return tables.limits(direction, 0, ways, block, cost_model.CHUNK_BYTES)


# ---- without a table -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("direction", "runs", "found"),
    [
        ("d2d", {"direct": 64, "staged": 64, "engine": 64}, ((0, "direct"),)),
        ("d2h", {"direct": 64, "staged": 2 * MIB}, ((7, "direct"), (8, "staged"))),
        ("h2d", {"direct": 64, "staged": 2 * MIB}, ((2, "direct"), (3, "staged"))),
        ("d2h", {"direct": 64, "staged": 32 * KIB}, ((0, "direct"),)),  # the copy engine wants long pieces
        ("h2d", {"direct": 64}, ((0, "direct"),)),
        ("h2d", {"staged": 64}, ((0, "staged"),)),
        ("h2d", {"engine": 64}, ((0, "engine"),)),
        ("p2p", {"direct": 64, "staged": 64}, ((0, "direct"),)),
        ("p2p", {"staged": 64, "engine": 64}, ((0, "staged"),)),
        ("p2p", {"engine": 64}, ((0, "engine"),)),
    ],
)
def test_the_built_in_rule(direction: str, runs: Any, found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBM_TUNE", "0")
    got, why = limits(direction, {name: Way(run) for name, run in runs.items()})
    assert got == found
    assert ("KVBM_TUNE=0" in why and "built-in rule" in why) == (direction != "d2d")


def test_a_table_is_read_where_measuring_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBM_TUNE", "0")
    cost_model.save(PLAIN)
    why = limits("d2h").why
    assert "measured on this machine" in why and GPU in why and DRIVER in why and PLAIN.date in why
    assert "KVBM_TUNE=0" in limits("h2d").why


def test_one_gpu_alone_is_never_measured() -> None:
    assert limits("d2d") == (((0, "direct"),), "one kernel on one GPU is the fastest way there")
    cost_model.save(PLAIN)  # which does not know d2d
    tables.reload()
    assert limits("d2d").limits == ((0, "direct"),)
    assert autotune.measure.asked == []  # type: ignore[attr-defined]


class Measured:
    """Replaces `measure`: takes a while, and counts its calls."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.asked = error, []  # type: ignore[var-annotated]

    def __call__(self, device: int, *, directions: Any, peers: Any) -> cost_model.Table:
        assert bool(peers) == (directions == ("p2p",)), "no context on a GPU that this process does not use"
        self.asked.append((device, *directions))
        time.sleep(0.05)
        if self.error:
            raise self.error
        rows = (Row(d, name, KIB, MIB, MIB, t) for d in directions for name, t in (("direct", 2e-4), ("engine", 1e-4)))
        return cost_model.Table(GPU, DRIVER, "2026-01-31", "0.0.7", tuple(rows))


def test_measured_once_a_machine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    measured = Measured()
    monkeypatch.setattr(autotune, "measure", measured)
    monkeypatch.setattr(autotune, "_used_peers", lambda _: [1])
    answers: list[Any] = []
    with caplog.at_level(logging.INFO, "kvbm"):
        threads = [threading.Thread(target=lambda: answers.append(limits("d2h"))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(answers) == 8 and {str(found) for found, _ in answers} == {"((0, 'engine'),)"}
    assert measured.asked == [(0, "d2h", "h2d", "d2d")]
    assert "KVBM_TUNE=0" in caplog.text and str(cost_model.path(GPU, DRIVER)) in caplog.text
    tables.reload()  # as another process
    for direction in ("h2d", "d2h", "d2d"):
        assert "2026-01-31" in limits(direction)[1]
    assert len(measured.asked) == 1
    limits("p2p")
    assert measured.asked[1:] == [(0, "p2p")], "only what is missing"
    tables.reload()
    assert cost_model.load(GPU, DRIVER).directions == cost_model.DIRECTIONS  # type: ignore[union-attr]


def test_measuring_that_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    measured = Measured(kvbm.CudaError("out of memory on cuda:0"))
    monkeypatch.setattr(autotune, "measure", measured)
    for _ in range(3):
        found, why = limits("d2h")
        assert found == BUILT_IN
        assert "built-in rule" in why and "out of memory on cuda:0" in why
    assert len(measured.asked) == 1, "not at every transfer"
    assert len(caplog.records) == 1
    assert not cost_model.path(GPU, DRIVER).exists()
    tables.reload()
    limits("d2h")
    assert len(measured.asked) == 2


def test_a_bug_in_here_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    cost_model.save(PLAIN)
    monkeypatch.setattr(cost_model.Table, "choose", lambda *_: 1 // 0)
    found, why = limits("d2h")
    assert found == BUILT_IN and "division" in why


def test_not_while_a_capture_is_going_on(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, asked = Measured(), []
    stream = SimpleNamespace(cuda_stream=0)
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        current_stream=lambda: stream,
        is_current_stream_capturing=lambda: bool(asked.append(stream.cuda_stream)) or stream.cuda_stream == 7,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    monkeypatch.setattr(autotune, "measure", measured)
    stream.cuda_stream = 7
    assert "capture" in limits("d2h")[1]
    assert not measured.asked
    stream.cuda_stream = 0
    assert "measured on this machine" in limits("d2h")[1]
    assert measured.asked and asked == [7], "the default stream must not even be asked"


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVBM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    measured = Measured()
    monkeypatch.setattr(autotune, "measure", measured)
    for _ in range(2):
        assert "measured on this machine" in limits("d2h")[1]
    assert len(measured.asked) == 1
    assert "cannot be kept" in caplog.text


# ---- measuring -----------------------------------------------------------------------------------------------------


def test_synthetic_layouts_have_the_runs_that_they_are_filed_under() -> None:
    for run, block, sizes_ in autotune.grid():
        near, far, shape = autotune._shapes(run, block)
        assert shape.nbytes == block and all(size % block == 0 for size in sizes_)
        for src, dst, gathers in ((near, far, True), (far, near, False)):
            made = kvbm.plan(src, dst, shape, num_blocks=64)
            steps = made.staged(gathers=gathers)
            move = steps[1].flat(None, 0) if gathers else steps[0].flat(0, None)
            for nest in (made, move, made.flat(0, 0)):
                assert min(part.run_bytes for part in nest.parts) == run


def test_ctrl_c_ends_the_measuring_thread() -> None:
    stop, ended = threading.Event(), []

    def work() -> list[Row]:
        _thread.interrupt_main()
        ended.append(stop.wait(20))
        return []

    with pytest.raises(KeyboardInterrupt):
        autotune._on_a_thread(work, stop)
    assert ended == [True]


class TestOnTheFakeDriver:
    def test_measure_and_auto(self, fake_gpu: FakeDriver, tmp_path: Path) -> None:
        """Every strategy runs, nothing leaks, and a transfer follows the table."""
        fake_gpu("tune.measure_and_auto", KVBM_CACHE_DIR=str(tmp_path))

    def test_no_memory_to_measure_with(self, fake_gpu: FakeDriver, tmp_path: Path) -> None:
        fake_gpu("tune.no_memory_to_measure_with", KVBM_CACHE_DIR=str(tmp_path), FAKE_REGISTER="2")


@pytest.mark.gpu
def test_measure_on_a_gpu(tmp_path: Path) -> None:
    """All strategies within seconds, nothing leaks, and a transfer follows the table."""
    import torch

    torch.cuda.init()
    device = torch.cuda.current_device()
    autotune.measure(0, directions=("d2d",))  # contexts and kernels are loaded
    free = torch.cuda.mem_get_info(0)[0]
    begin = time.perf_counter()
    made = autotune.measure(0)
    assert time.perf_counter() - begin < 10
    assert torch.cuda.current_device() == device
    if "PYTEST_XDIST_WORKER" not in os.environ:  # other processes use the GPU's memory too
        assert torch.cuda.mem_get_info(0)[0] >= free - 32 * MIB
    for direction in ("d2h", "h2d"):
        for run in autotune.RUNS:
            names = {row.strategy for row in made.rows if (row.direction, row.run_bytes) == (direction, run)}
            assert names == set(strategies.STRATEGIES)
    assert "d2d" in made.directions and ("p2p" in made.directions) == (torch.cuda.device_count() > 1)
    assert all(1e-7 < row.seconds < 1 for row in made.rows)
    cost_model.save(made)
    shape = kvbm.BlockShape(nl=4, no=2, nh=8, nt=16, hd=128)
    near, far = kvbm.load("nhd"), kvbm.load("universal")
    stream = torch.cuda.Stream()
    with kvbm.Pool.allocate(near, shape, 256, "cuda:0") as src, kvbm.Pool.allocate(far, shape, 256, "pinned") as dst:
        for ends in ((src, dst), (dst, src)):
            with kvbm.Transfer(*ends) as move:
                assert made.date in move.explain()
                for n in (1, 8, 64, 256):
                    done = move.copy(range(n), range(n), stream=stream)
                    done.synchronize()
                    assert (
                        f"{n} block{'s' if n > 1 else ''} ({plan.size_text(n * shape.nbytes)}): {done.strategy}"
                        in (move.explain(n))
                    )


@pytest.mark.gpu
def test_a_capture_elsewhere_stays_whole() -> None:
    """`ensure` does not measure on a thread that captures; `measure` never ends a capture, even if called."""
    import torch

    x = torch.zeros(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
        assert "capture" in limits("d2h")[1]
        made = autotune.measure(0, directions=("d2h",))
        x += 1
    graph.replay()
    torch.cuda.synchronize()
    assert made.directions == ("d2h",) and bool((x == 2).all())


# ---- the command ---------------------------------------------------------------------------------------------------


def call(*args: str) -> Any:
    return CliRunner().invoke(app.main, ["tune", *args], env={"COLUMNS": "200"})


def test_tune(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def measure(device: int, progress: Callable[[int, int], object]) -> cost_model.Table:
        calls.append(device)
        progress(1, 2)
        return PLAIN

    result = call("--show")
    assert result.exit_code == 1 and "`kvbm tune` makes it" in result.output
    monkeypatch.setattr(autotune, "measure", measure)
    monkeypatch.setenv("KVBM_TUNE", "0")  # is for what happens by itself
    limits("d2h")
    result = call("--device", "3")
    assert result.exit_code == 0, result.output
    assert calls == [3] and cost_model.load(GPU, DRIVER) == PLAIN
    assert "measured on this machine" in limits("d2h")[1], "this process takes it too"
    assert str(cost_model.path(GPU, DRIVER)) in result.output and "2026-01-31" in result.output
    (row,) = [line.split() for line in result.output.splitlines() if " 4 KiB" in line]
    (end, _), _ = PLAIN.choose("d2h", dict.fromkeys(strategies.STRATEGIES, Way(4 * KIB)), MIB).limits
    text = f"direct up to {plan.size_text(end * MIB)}, then staged"
    assert " ".join(row) == f"d2h 4 KiB {text} 49.8 54.6 11.1"
    shown = call("--show")
    assert shown.exit_code == 0 and shown.output == result.output and calls == [3]


def test_tune_without_a_gpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvbm", "tune"],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert done.returncode == kvbm.CudaUnavailableError.exit_code, done.stderr
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr and not done.stdout
    assert not (tmp_path / "cache").exists()


def test_tune_is_in_the_help_and_doctor_tells_of_it() -> None:
    assert "tune" in CliRunner().invoke(app.main, ["--help"]).output
    info = {"name": GPU, "capability": (9, 0), "sms": 132, "memory": 1 << 37}
    core = SimpleNamespace(
        driver_version=lambda: 13000,
        device_count=lambda: 2,
        device_info=lambda _: info,
        has_memcpy_batch=lambda: True,
    )
    ((mark, text),) = [(mark, text) for mark, what, text in doctor._gpus(core, "", "") if what == "tuning"]
    assert mark == "note" and "kvbm tune" in text and GPU in text
    cost_model.save(PLAIN)
    ((mark, text),) = [(mark, text) for mark, what, text in doctor._gpus(core, "", "") if what == "tuning"]
    assert mark == "ok" and str(cost_model.path(GPU, DRIVER)) in text
