"""The other measurements of `kvbm bench`: interference, overhead, scale.  Small sizes; no time is asserted."""

from __future__ import annotations

import contextlib
import mmap
import sys
import time
import types
from pathlib import Path

import pytest

from benching import ran, read, run
from benchmarks import interference, overhead, plot, scale, section
from kvbm import kernels
from kvbm.bench.plot import draw
from kvbm.bench.table import read as read_tables
from kvbm.errors import CudaUnavailableError, KvbmError, SpecError

pytestmark = pytest.mark.usefixtures("small_caches")

SHAPE = "nl=2,no=2,nh=2,nt=4,hd=16,dtype=float16"  # 1 KiB a block


def column(rows: list[dict[str, str]], name: str, **where: str) -> list[str]:
    return [row[name] for row in rows if all(row[key] == value for key, value in where.items())]


def require_consistent(rows: list[dict[str, str]]) -> None:
    """Require that ns_each and gbps follow from the median; cells are rounded to five figures."""
    for row in rows:
        if row.get("median_ms"):
            seconds, n = float(row["median_ms"]) / 1e3, int(row["n"])
            assert seconds > 0
            assert float(row["ns_each"]) == pytest.approx(seconds * 1e9 / n, rel=1e-3)
            assert float(row["gbps"]) == pytest.approx(float(row["total_bytes"]) / seconds / 1e9, rel=1e-3)
        if row.get("median_us"):
            assert 0 < float(row["min_us"]) <= float(row["median_us"])
            assert float(row["ns_each"]) == pytest.approx(float(row["median_us"]) * 1e3 / int(row["count"]), rel=1e-3)


# ---- what they share -----------------------------------------------------------------------------------------------


def test_rows_are_written_as_they_come(tmp_path, capsys) -> None:
    out, shape = tmp_path / "folder" / "out.csv", section.TINY

    def rows():  # type: ignore[no-untyped-def]
        yield {"what": "first", "n": 1}
        written = out.read_text(encoding="utf-8")
        assert "first,1" in written and written.startswith("# kvbm ")
        yield {"what": "second", "n": 2}

    assert section.write_rows(rows(), ("what", "n"), "cpu", shape, out, "test") == 2
    assert [row["what"] for row in read(out.read_text(encoding="utf-8"))[1]] == ["first", "second"]
    assert capsys.readouterr().out == f"{out}: 2 figures\n"  # and the rows alone where they go to stdout


def test_rows_that_were_measured_stay_when_it_is_interrupted(tmp_path) -> None:
    ended = []

    def rows():  # type: ignore[no-untyped-def]
        try:
            yield {"n": 1}
            raise KeyboardInterrupt
        finally:
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        section.write_rows(rows(), ("n",), "cpu", section.TINY, tmp_path / "out.csv", "test")
    assert read((tmp_path / "out.csv").read_text(encoding="utf-8"))[1] == [{"n": "1"}]
    assert ended


def test_a_failed_write_ends_the_measurement_at_once(tmp_path) -> None:
    ended = []

    def rows():  # type: ignore[no-untyped-def]
        try:
            yield {"n": 1, "unknown": 2}
            yield {"n": 2}
        finally:
            ended.append(True)  # memory is given back here

    found = rows()
    with pytest.raises(ValueError, match="unknown"):
        section.write_rows(found, ("n",), "cpu", section.TINY, tmp_path / "out.csv", "test")
    assert ended


def test_measuring_nothing_is_an_error(tmp_path) -> None:
    with pytest.raises(KvbmError, match="nothing could be measured"):
        section.write_rows(iter(()), ("n",), "cpu", section.TINY, tmp_path / "out.csv", "test")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--counts", "1,x"],
        ["--counts", "0"],
        ["--counts", ""],
        ["--counts", ","],
        ["--device", "gpu"],
        ["--device", "cuda:x"],
    ],
)
def test_wrong_usage_is_refused_with_what_was_expected(arguments) -> None:
    result = run(overhead.overhead, *arguments)
    assert result.exit_code == 2
    assert "expected" in result.stderr and repr(arguments[1]) in result.stderr


def test_the_default_place_is_the_cpu_without_kernels_for_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(kernels, "is_using_stubs", lambda: True)
    assert section.default_place() == "cpu"
    monkeypatch.setattr(kernels, "is_using_stubs", lambda: False)
    monkeypatch.setattr(section, "_core", types.SimpleNamespace(device_count=lambda: 2))
    assert section.default_place() == "cuda:0"


# ---- overhead ------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # half a second
def test_overhead_on_the_cpu_measures_every_kind_of_ids_and_says_that_the_copy_is_included() -> None:
    result = run(overhead.overhead, "--device", "cpu", "--counts", "1,8,64", "--iters", "8")
    assert result.exit_code == 0, result.output
    comment, rows = read(result.stdout)
    require_consistent(rows)
    assert tuple(rows[0]) == overhead.COLUMNS
    wanted = {"list", "numpy int32", "numpy int64"} | ({"torch CPU int64"} if "torch" in sys.modules else set())
    for kind in wanted:
        assert column(rows, "count", call="Transfer.copy", ids=kind) == ["1", "8", "64"]
    assert column(rows, "count", call="kvbm.convert") == ["1", "8", "64"]
    assert {row["driver"] for row in rows} == {""} and rows[0]["gpu"] in comment
    assert "include the copy" in result.stderr and "CUDA tensors only" in result.stderr


def test_overhead_without_torch_measures_the_rest_and_says_so(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run(overhead.overhead, "--device", "cpu", "--counts", "4", "--iters", "5")
    assert result.exit_code == 0, result.output
    assert {row["ids"] for row in read(result.stdout)[1]} == {"list", "numpy int32", "numpy int64"}
    assert "torch is not installed" in result.stderr


def test_arguments_take_turns_and_settling_is_not_forgotten() -> None:
    seen: list[int] = []
    settled: list[int] = []
    overhead.host_seconds(seen.append, [1, 2, 3], lambda: settled.append(len(seen)), 40)
    timed = seen[-40:]
    assert set(timed[::3]) != set(timed[1::3]) and set(seen) == {1, 2, 3}
    waits = [after - before for before, after in zip(settled[:-1], settled[1:], strict=True)]
    assert max(waits) <= overhead._QUEUE and settled[-1] == len(seen)


def test_after_a_long_call_the_stream_is_waited_for_at_once() -> None:
    order: list[str] = []

    def long(_: object) -> None:
        order.append("call")
        time.sleep(0.002)

    overhead.host_seconds(long, [0], lambda: order.append("settle"), 6)
    assert order == ["call", "settle"] * 9


@pytest.mark.gpu
def test_overhead_on_the_gpu_measures_ids_and_lists_of_tensors() -> None:
    rows = ran(
        overhead.overhead, "--device", "cuda:0", "--counts", "1,64,4096", "--tensors", "160,300", "--iters", "20"
    )
    require_consistent(rows)
    kinds = {"list", "numpy int32", "numpy int64", "torch CPU int64", "torch CUDA int64"}
    assert {row["ids"] for row in rows if row["call"] == "Transfer.copy"} == kinds
    for name in ("block_to_universal", "universal_to_block", "block_to_operational", "operational_to_block"):
        assert column(rows, "count", call=f"kernels.{name}") == ["160", "320"]
    assert all(row["driver"] for row in rows)


# ---- scale ---------------------------------------------------------------------------------------------------------

SMALL = [
    *("--shape", SHAPE, "--memory", "0.001", "--layers", "1,2,4", "--ids", "1,16,128", "--num-blocks", "8"),
    *("--copies", "200", "--iters", "3"),
]  # fmt: skip


@pytest.mark.slow
def test_scale_on_the_cpu_measures_blocks_layers_ids_and_a_soak(tmp_path) -> None:
    result = run(scale.scale, "--device", "cpu", *SMALL)
    assert result.exit_code == 0, (result.output, result.exception)
    _, rows = read(result.stdout)
    require_consistent(rows)
    assert tuple(rows[0]) == scale.COLUMNS
    # 0.001 GiB are 1,073,741 bytes: twice 524 blocks of 1 KiB.
    assert column(rows, "n", what="blocks") == ["1", "2", "4", "8", "16", "32", "64", "128", "256", "512", "524"]
    assert column(rows, "total_bytes", what="blocks") == [str(1024 * int(n)) for n in column(rows, "n", what="blocks")]
    assert column(rows, "n", what="layers") == ["1", "2", "4"]
    assert column(rows, "total_bytes", what="layers") == [str(8 * 512 * n) for n in (1, 2, 4)]
    assert column(rows, "n", what="ids_cpu") == ["1", "16", "128"]
    assert column(rows, "n", what="soak_host") == [str(20 * turn) for turn in range(11)]
    assert column(rows, "grown_mib", what="soak_host")[0] == "0.0"
    assert "pinned memory needs a GPU" in result.stderr and not column(rows, "n", what="pools")
    (tmp_path / "scale.csv").write_text(result.stdout, encoding="utf-8")
    pytest.importorskip("matplotlib")
    assert list(draw(read_tables(tmp_path / "scale.csv"), known=plot.STUDIES)) == ["scale"]


def test_scale_takes_one_section_and_another_pair() -> None:
    arguments = ["--device", "cpu", *SMALL, "--what", "layers", "--pair", "nhd:hnd"]
    rows = ran(scale.scale, *arguments)
    assert {row["what"] for row in rows} == {"layers"}
    assert {row["notes"] for row in rows} == {"nhd:hnd, 8 blocks"}


def test_scale_leaves_out_what_does_not_fit_and_says_so() -> None:
    result = run(scale.scale, "--device", "cpu", *SMALL, "--memory", "0.00001", "--what", "blocks,layers,ids")
    assert "layers: 4: 8 blocks do not fit" in result.stderr
    assert "ids: 128 blocks" in result.stderr
    _, rows = read(result.stdout)
    assert column(rows, "n", what="blocks") == ["1", "2", "4", "5"]
    assert column(rows, "n", what="ids_cpu") == ["1"]
    result = run(scale.scale, "--device", "cpu", *SMALL, "--memory", "0.0000001", "--what", "blocks")
    assert isinstance(result.exception, KvbmError) and "nothing could be measured" in str(result.exception)


def test_scale_goes_on_after_a_section_that_ran_out_of_memory(monkeypatch) -> None:
    def hungry(run):  # type: ignore[no-untyped-def]
        yield scale.row("blocks", 1, "blocks", 1024, 1.0, "")
        raise MemoryError

    monkeypatch.setitem(scale.SECTIONS, "blocks", hungry)
    result = run(scale.scale, "--device", "cpu", *SMALL, "--what", "blocks,ids")
    assert result.exit_code == 0
    assert {row["what"] for row in read(result.stdout)[1]} == {"blocks", "ids_cpu"}
    assert "blocks: the rest is left out: MemoryError" in result.stderr


@pytest.mark.slow
def test_a_soak_that_takes_too_long_is_stopped_and_says_so() -> None:
    result = run(
        scale.scale, "--device", "cpu", "--what", "soak", "--shape", SHAPE, "--copies", "100000000", "--seconds", "0.05"
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    counts = [int(n) for n in column(read(result.stdout)[1], "n", what="soak_host")]
    assert counts[0] == 0 and 0 < counts[-1] < 100_000_000 and len(counts) == 2
    assert f"stopped after {counts[-1]:,} of 100,000,000" in result.stderr


@pytest.mark.slow
def test_a_soak_sees_memory_that_is_never_given_back(monkeypatch) -> None:
    kept = []
    before = scale.Transfer.copy

    def leaking(self, *arguments, **rest):  # type: ignore[no-untyped-def]
        kept.append(mmap.mmap(-1, 64 << 10))  # not from the heap, where earlier tests may have left room
        kept[-1].write(bytes(64 << 10))
        return before(self, *arguments, **rest)

    monkeypatch.setattr(scale.Transfer, "copy", leaking)
    rows = ran(scale.scale, "--device", "cpu", *SMALL, "--what", "soak", "--copies", "400")
    assert float(column(rows, "grown_mib", what="soak_host")[-1]) > 15  # 25 MiB are kept


@pytest.mark.parametrize("pair", ["nhd", ":nhd", "nhd:"])
def test_a_pair_is_two_layouts(pair) -> None:
    with pytest.raises(SpecError, match="expected SRC:DST"):
        scale.split_pair(pair)


def test_a_wrong_copy_is_not_measured(monkeypatch) -> None:
    def broken(self, src_ids, dst_ids, **rest):  # type: ignore[no-untyped-def]
        return None

    monkeypatch.setattr(scale.Transfer, "copy", broken)
    result = run(scale.scale, "--device", "cpu", *SMALL, "--what", "blocks")
    assert isinstance(result.exception, KvbmError) and "wrong" in str(result.exception)


@pytest.mark.gpu
def test_scale_on_the_gpu_measures_every_section(tmp_path) -> None:
    _, rows = read(_gpu_scale(tmp_path))
    require_consistent(rows)
    assert column(rows, "n", what="ids_gpu") == column(rows, "n", what="ids_host") == ["1", "64", "4096", "32768"]
    assert column(rows, "n", what="layers") == ["1", "4"]
    assert column(rows, "n", what="blocks")[:3] == ["1", "2", "4"]
    for what in ("soak_gpu", "soak_host"):
        assert column(rows, "n", what=what) == [str(300 * turn) for turn in range(11)]
    # The pool is of whole blocks; on a machine with less than 3 GiB of free memory it is left out.
    assert column(rows, "unit", what="pools") in (["GiB"], [])
    # 32,768 blocks of 1 KiB cannot be moved in less time than the GPU's memory takes; nor can the clock have timed the host.
    on_gpu = [float(ms) for ms in column(rows, "median_ms", what="ids_gpu")]
    assert on_gpu[-1] > on_gpu[0] > 0


def _gpu_scale(tmp_path: Path) -> str:
    out = tmp_path / "scale.csv"
    result = run(
        scale.scale, "--device", "cuda:0", "--shape", "llama-3.1-8b,nl=4", "--memory", "0.1", "--layers", "1,4",
        "--ids", "1,64,4096,32768", "--num-blocks", "4", "--copies", "3000", "--iters", "5", "--pools", "1", "--out", str(out),
    )  # fmt: skip
    assert result.exit_code == 0, (result.output, result.exception)
    return out.read_text(encoding="utf-8")


@pytest.mark.gpu
def test_the_gpus_time_of_a_call_does_not_contain_the_hosts() -> None:
    from kvbm.system.clock import GpuClock

    with GpuClock(0) as clock:

        def slow(stream: object) -> None:
            time.sleep(0.02)
            clock.delay(100_000)

        assert 0.00005 < scale._gpu_seconds(clock, slow, 1.0, 3) < 0.01


# ---- interference --------------------------------------------------------------------------------------------------


def test_interference_without_a_gpu_is_refused() -> None:
    result = run(interference.interference, "--device", "cpu")
    assert isinstance(result.exception, CudaUnavailableError)
    assert "needs a GPU" in str(result.exception) and "cpu" in str(result.exception)


def test_interference_without_torch_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(KvbmError, match=r"pip install 'kvbm-layouts\[bench\]'"):
        interference._torch()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pair", "nhd"], "expected SRC:DST"),
        (["--pair", "operational:universal"], "does not promise the order"),
    ],
)
def test_interference_refuses_at_once_what_cannot_be_copied(arguments, message) -> None:
    result = run(interference.interference, "--device", "cuda:0", *arguments)
    assert isinstance(result.exception, KvbmError) and message in str(result.exception)


class _Moment:
    """An event that was recorded at a given millisecond."""

    def __init__(self, at: float) -> None:
        self.at = at

    def elapsed_time(self, later: _Moment) -> float:
        return later.at - self.at


def test_the_rate_of_copies_is_of_those_that_ended_beside_the_products() -> None:
    begin, end = _Moment(10), _Moment(20)
    # One copy every 2 ms while products run; slower before and faster after.
    copies = [_Moment(at) for at in (0, 5, 10, 12, 14, 16, 18, 20, 20.5, 21)]
    assert interference._rate(begin, end, copies, 1000) == pytest.approx(500_000)
    few = [_Moment(at) for at in (0, 15, 30)]
    assert interference._rate(begin, end, few, 1000) == pytest.approx(1000 / 0.015)


class _Event:
    """Replaces torch's events: the products are done at the hundredth query; each record is one millisecond later."""

    now = 0.0
    queries = 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self, _: object) -> None:
        _Event.now += 1
        self.at = _Event.now

    def elapsed_time(self, later: _Event) -> float:
        return later.at - self.at

    def query(self) -> bool:
        _Event.queries += 1
        return _Event.queries > 100

    def synchronize(self) -> None:
        pass


def _fake_torch() -> types.SimpleNamespace:
    def nothing(*_, **__) -> None:  # type: ignore[no-untyped-def]
        return None

    def tensor(*_, **__):  # type: ignore[no-untyped-def]
        return types.SimpleNamespace(to=nothing)

    context = contextlib.nullcontext
    cuda = types.SimpleNamespace(
        Event=_Event, Stream=lambda _: object(), device=context, stream=context, synchronize=nothing, _sleep=nothing
    )
    return types.SimpleNamespace(cuda=cuda, randn=tensor, bfloat16=None, matmul=nothing)


def test_a_product_is_timed_alone_and_with_copies_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    _Event.now, _Event.queries = 0.0, 0
    pauses: list[float] = []
    monkeypatch.setattr(interference.time, "sleep", pauses.append)
    model = interference.Model(_fake_torch(), 0, 16, products=4, rounds=2)
    streams: list[object] = []
    beside = model.beside(streams.append, 1000)
    # The second round's products are over at its first query; the last nine are a warm-up and the copies alone.
    assert len(streams) == 100 + 9 and set(streams) == {model.side}
    assert beside.rate_alone == pytest.approx(8 * 1000 / 1e-3)  # by a clock that only ticks at events
    assert beside.product == beside.alone == pytest.approx(1e-3) and beside.slowdown == pytest.approx(1)
    assert len(pauses) == 4 and min(pauses) > 0  # alone and with copies, twice


def test_every_strategy_is_measured_but_staged_ones_within_a_gpu() -> None:
    found = interference._strategies("d2h", (4, 8))
    assert [(name, options.get("max_sms")) for name, options in found] == [
        ("staged", None), ("staged", 8), ("direct", 4), ("direct", 8), ("direct", None), ("engine", None),
    ]  # fmt: skip
    assert [name for name, _ in interference._strategies("d2d", (4,))] == ["direct", "direct", "engine"]


@pytest.mark.gpu
def test_interference_on_the_gpu_measures_every_direction_and_strategy(tmp_path) -> None:
    out = tmp_path / "interference.csv"
    result = run(
        interference.interference, "--device", "cuda:0", "--shape", "llama-3.1-8b,nl=4", "--num-blocks", "4", "--size", "1024",
        "--iters", "6", "--sms", "4,8", "--out", str(out),
    )  # fmt: skip
    assert result.exit_code == 0, (result.output, result.exception)
    _, rows = read(out.read_text(encoding="utf-8"))
    assert tuple(rows[0]) == interference.COLUMNS
    for direction in ("d2h", "h2d", "d2d"):
        mine = [row for row in rows if row["direction"] == direction]
        assert (mine[0]["backend"], mine[0]["ratio"]) == ("memcpy", "1.0")
        found = {(row["backend"], row["max_sms"]) for row in mine}
        assert found >= {("direct", ""), ("direct", "4"), ("direct", "8")}
        assert (("staged", "") in found) == (direction != "d2d")
        for row in mine:
            slowdown = float(row["product_ms"]) / float(row["alone_ms"])
            assert float(row["slowdown"]) == pytest.approx(slowdown, rel=1e-3)
            assert float(row["ratio"]) == pytest.approx(slowdown / float(row["memcpy_slowdown"]), rel=1e-3)
            assert float(row["copy_gbps"]) > 0 and float(row["copy_alone_gbps"]) > 0
    pytest.importorskip("matplotlib")
    assert list(draw(read_tables(out), known=plot.STUDIES)) == ["interference"]


@pytest.mark.gpu
def test_interference_leaves_out_what_the_copy_engine_would_take_too_long_for(monkeypatch, capsys) -> None:
    monkeypatch.setattr(interference, "MOST_RUNS", 3)
    rows = ran(
        interference.interference, "--device", "cuda:0", "--shape", "llama-3.1-8b,nl=2", "--num-blocks", "2", "--size", "256",
        "--iters", "3", "--sms", "8", "--direction", "d2h",
    )  # fmt: skip
    assert "engine" not in {row["backend"] for row in rows}
