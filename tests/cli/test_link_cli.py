"""``kvbm link``: the messages of both sides, their measurements and how they end; in one process and in two."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from click.testing import CliRunner, Result

import kvbm
from kvbm import BindError, DigestError, KvbmError, PeerLostError, TransferTimeoutError, errors, wire
from kvbm.cli import common, link
from kvbm.cli.app import main
from kvbm.link import talk, trial
from linking import until
from processes import context
from programs import trials

LIMIT = 120.0  # seconds; nothing takes them, and nothing waits longer
SMALL = "nl=2,no=2,nh=2,nt=16,hd=16,dtype=float16"
NHD, HND = "vllm/flash_attn_nhd", "vllm/flash_attn_hnd"
HERE = Path(__file__).resolve().parents[1]
NIXL = pytest.param("nixl", marks=pytest.mark.skipif(not find_spec("nixl"), reason="NIXL is not installed"))
TORCH = pytest.param("torch", marks=pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed"))

NUMBER = {"type": "number", "minimum": 0}
COUNT = {"type": "integer", "minimum": 0}
TEXT = {"type": "string", "minLength": 1}


def whole(**properties: Any) -> dict[str, Any]:
    """The schema of an object with exactly these keys."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SIDE = whole(host=TEXT, device=TEXT, layout=TEXT, tokens_per_block=COUNT)
ROW = whole(**{one.name: COUNT if one.type == "int" else NUMBER for one in fields(trial.Row)})
ERROR = {"anyOf": [{"type": "null"}, whole(**{"class": TEXT, "exit_code": COUNT, "message": TEXT})]}
HEAD = {
    "kvbm": TEXT, "peer": TEXT, "wire": {"enum": ["torch", "nixl"]}, "shape": TEXT, "chunk_bytes": COUNT, "ring_bytes": COUNT,
    "from": SIDE, "to": SIDE, "note_us": whole(median=NUMBER, min=NUMBER, max=NUMBER),
}  # fmt: skip
SENT = whole(**HEAD, rows={"type": "array", "items": ROW}, error=ERROR)
SERVED = whole(
    peer=TEXT, wire=TEXT, device=TEXT, shape=TEXT, sequences=COUNT, nbytes=COUNT,
    stats={"type": ["object", "null"], "additionalProperties": NUMBER}, error={"type": ["string", "null"]},
)  # fmt: skip


# ---- both sides in one process, by a wire of its memory ----------------------------------------------------------------


class Serving:
    """`kvbm link serve` on a thread, serving one sender after the other."""

    def __init__(self, **options: Any) -> None:
        self.options: dict[str, Any] = {"only": None, "memory": 1 << 30, **options}
        self.side = trial.Side("server", "cpu", self.options.pop("layout", HND), 64)
        self.server = talk.listen("127.0.0.1", 0)
        self.port = self.server.getsockname()[1]
        self.served: list[trial.Served] = []
        self.errors: list[KvbmError] = []
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        while True:
            try:
                connection, _ = self.server.accept()
            except OSError:
                return
            self.served.append(trial.Served(""))
            with contextlib.closing(connection):
                try:
                    conversation = talk.Talk(connection, LIMIT)
                    with link._telling_peer(conversation, "the memory"):
                        trial.serve(
                            conversation, self.side, "127.0.0.1", only=self.options["only"],
                            memory=trial.Memory(self.options["memory"]), served=self.served[-1],
                        )  # fmt: skip
                except KvbmError as error:
                    self.errors.append(error)

    def close(self) -> None:
        """Accept no more senders; the current trial ends first."""
        with contextlib.suppress(OSError):  # it was closed before
            self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()
        self.thread.join(LIMIT)
        assert not self.thread.is_alive()


Serve = Callable[..., Serving]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Starts the receiving side; "nixl" is replaced by a wire in this process's memory."""
    hub = wire.Hub()
    monkeypatch.setattr(trial, "_NOTES", 10)
    monkeypatch.setattr(trial, "_wire", lambda name, *_: wire.memory(name, hub))
    with contextlib.ExitStack() as stack:

        def start(**options: Any) -> Serving:
            found = Serving(**options)
            stack.callback(found.close)
            return found

        yield start


def send(port: int, *more: str, **knobs: str) -> Result:
    given = ["--wire", "nixl", "--shape", SMALL, "--tokens", "40", "--iters", "2", "--timeout", "60", *more]
    return CliRunner().invoke(main, ["link", "send", f"127.0.0.1:{port}", *given], env=knobs)


def test_a_trial(serve: Serve) -> None:
    """The JSON matches its schema; the numbers have the requested sizes and are consistent."""
    serving = serve()
    done = send(serving.port, "--tokens", "1,16,100", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    jsonschema.validate(found, SENT)
    assert found["error"] is None and found["kvbm"] == kvbm.__version__ and found["shape"] == SMALL
    assert (found["from"]["layout"], found["to"]["layout"]) == (NHD, HND)
    assert (found["from"]["tokens_per_block"], found["to"]["tokens_per_block"]) == (16, 64)
    assert [(row["tokens"], row["nbytes"]) for row in found["rows"]] == [(n, n * 256) for n in (1, 16, 100)]
    for row in found["rows"]:
        assert row["chunks"] == 1 and row["min_ms"] <= row["median_ms"] <= row["max_ms"]
        for name, ratio in (("raw", "raw_ratio"), ("memcpy", "memcpy_ratio")):
            assert row[ratio] == pytest.approx(row[f"{name}_ms"] / row["median_ms"])
            assert row[f"{name}_gbps"] == pytest.approx(row["nbytes"] / row[f"{name}_ms"] / 1e6)
        assert row["bandwidth_gbps"] == pytest.approx(row["nbytes"] / row["median_ms"] / 1e6)
    serving.close()
    (served,) = serving.served
    jsonschema.validate(served.as_json(), SERVED)
    assert not serving.errors and served.sequences == 9 and served.stats and served.stats["failed"] == 0


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_the_terminal(serve: Serve, width: int) -> None:
    done = send(serve().port, "--tokens", "10,40", COLUMNS=str(width), FORCE_COLOR="1", TERM="dumb")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert max(map(len, lines)) <= width and "…" not in done.output
    (title,) = (line.split() for line in lines if line.startswith("tokens"))
    assert title[:5] == ["tokens", "MB", "chunks", "ms", "GB/s"]
    assert [line.split()[0] for line in lines if line.split()[:1] in (["10"], ["40"])] == ["10", "40"]
    assert lines[-1] == "All of it came and was right."


@pytest.mark.parametrize(
    "shape", ["nl=3,no=1,nh=1,nt=16,hd=24,dtype=bfloat16", "nl=1,no=2,nh=3,nt=16,hd=10,dtype=float8_e4m3fn"]
)
@pytest.mark.parametrize("layouts", [("universal", "operational_nhd"), ("nhd", "hnd")], ids="→".join)
def test_other_shapes_and_layouts(serve: Serve, shape: str, layouts: tuple[str, str]) -> None:
    done = send(
        serve(layout=layouts[1]).port,
        "--shape",
        shape,
        "--layout",
        layouts[0],
        "--tokens",
        "150",
        "--tokens-per-block",
        "48",
    )
    assert done.exit_code == 0, done.output


def test_several_chunks_and_few_slots(serve: Serve) -> None:
    shape = "nl=2,no=2,nh=2,nt=64,hd=64,dtype=float16"
    done = send(serve().port, "--shape", shape, "--tokens", "4096", "--chunk", "1MiB", "--ring", "5MiB", "--json")
    (row,) = json.loads(done.stdout)["rows"]
    assert row["nbytes"] == 1 << 22 and row["chunks"] >= 4 and row["stalls"] > 0


def test_one_sender_after_the_other(serve: Serve) -> None:
    serving = serve()
    assert [send(serving.port).exit_code for _ in range(3)] == [0, 0, 0]
    serving.close()
    assert [one.sequences for one in serving.served] == [3, 3, 3] and not serving.errors


# ---- what comes wrong ------------------------------------------------------------------------------------------------


def faulty(monkeypatch: pytest.MonkeyPatch, script: Any) -> None:
    """The sender's link puts wrong bytes; its bare wire does not."""
    made: Any = trial._wire
    monkeypatch.setattr(
        trial,
        "_wire",
        lambda name, *rest: wire.faulty(made(name, *rest), script) if name == "sender" else made(name, *rest),
    )


def test_chunks_that_came_wrong_are_counted(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty(monkeypatch, [wire.Fault("bit", at=1), wire.Fault("row", at=3)])
    done = send(serve().port, "--json")
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["rows"]
    assert row["chunks_wrong"] == 2


def test_what_stays_wrong_is_an_error_of_both(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes that were measured before the error are printed."""
    faulty(monkeypatch, [wire.Fault("word", at=at) for at in range(3, 9)])
    serving = serve()
    done = send(serving.port, "--tokens", "10,40", "--json")
    assert done.exit_code == DigestError.exit_code
    found = json.loads(done.stdout)
    jsonschema.validate(found, SENT)
    assert [row["tokens"] for row in found["rows"]] == [10] and found["error"]["class"] == "DigestError"
    serving.close()
    assert [type(error) for error in serving.errors] == [DigestError]


def test_a_block_that_is_wrong_in_memory_is_found(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if all digests were right."""
    wrong = trial.Coded.wrong

    def broken(self: trial.Coded, tokens: int) -> str:
        self.pool.arrays[1][1, int(self.table[0]), 1, 7, 3] += 1  # layer 1, V, head 1, token 7
        return wrong(self, tokens)

    monkeypatch.setattr(trial.Coded, "wrong", broken)
    done = send(serve().port)
    assert done.exit_code == DigestError.exit_code
    assert "1 words of tokens 0–39 are wrong, the first in layer 1, V, head 1, token 7" in done.output


@pytest.mark.parametrize("layout", ["universal", "operational_hnd", NHD])
@pytest.mark.parametrize("shape", [SMALL, "nl=1,no=1,nh=1,nt=8,hd=3,dtype=float16"])
def test_coded_pools(layout: str, shape: str) -> None:
    """All tokens of all blocks are the sequence's, in words that differ; data after its end are ignored."""
    made = trial.Coded(trial.Side("a", "cpu", layout, 16), kvbm.load_shape(shape), 40, lambda: None)
    with contextlib.closing(made):
        made.spoil()
        assert made.wrong(1) and made.wrong(40)
        made.fill()
        assert not made.wrong(40)
        code = np.concatenate([made.code(block) for block in range(len(made.table))], axis=3)
        if code.itemsize == 8:
            assert len(np.unique(code)) == code.size
        other = trial.Coded(
            trial.Side("b", "cpu", "universal", 64), kvbm.load_shape(shape.replace("nt=16", "nt=64")), 40, lambda: None
        )
        with contextlib.closing(other):
            there = np.concatenate([other.code(block) for block in range(len(other.table))], axis=3)
        assert np.array_equal(code[:, :, :, :40], there[:, :, :, :40]), "both sides make the same"


# ---- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "arguments", "said"),
    [
        ({"only": "torch"}, (), "serves torch alone"),
        ({"memory": 1 << 20}, (), "bytes were asked for; this side gives 1,048,576"),
        ({}, ("--wire", "torch", "--device", "cuda:0"), "use --wire nixl"),
        ({}, ("--chunk", "64MiB", "--ring", "1MiB"), "expected room for a slot each way"),
        ({"layout": "vllm/mla"}, (), "server"),
    ],
    ids=["wire", "memory", "device", "ring", "layout"],
)  # fmt: skip
def test_what_the_other_side_refuses(
    serve: Serve, options: dict[str, Any], arguments: tuple[str, ...], said: str
) -> None:
    """Both sides report the reason, and the next sender is served."""
    serving = serve(**options)
    done = send(serving.port, *arguments)
    until(lambda: serving.errors, "an error is said", LIMIT)
    (error,) = serving.errors
    assert done.exit_code == error.exit_code != 0
    assert f"127.0.0.1:{serving.port} says: {error}" in done.stderr
    if options != {"layout": "vllm/mla"}:
        assert said in str(error)
    serving.options.update(only=None, memory=1 << 30)
    serving.side = trial.Side("server", "cpu", HND, 64)
    assert send(serving.port).exit_code == 0


def test_a_card_of_another_version(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """On either side: both sides report it."""
    cards = trial.End.cards
    for engine in ("server", "sender"):

        def changed(self: trial.End, engine: str = engine) -> dict[str, str]:
            found = cards(self)
            if self.side.engine == engine:
                found["card"] = found["card"].replace('"kvbm-link": 5', '"kvbm-link": 1')
            return found

        monkeypatch.setattr(trial.End, "cards", changed)
        serving = serve()
        done = send(serving.port)
        says = "expected version 5, or 6 with a cast: both sides need the same kvbm, got version 1"
        assert done.exit_code == BindError.exit_code and says in done.stderr
        serving.close()
        (error,) = serving.errors
        assert says in str(error)


def test_another_version_of_the_command(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    hello = trial._hello
    monkeypatch.setattr(trial, "_hello", lambda **more: {**hello(**more), "kvbm-link-trial": 2, "kvbm": "9.9"})
    done = send(serve().port)
    assert done.exit_code == BindError.exit_code
    assert "expected version 1 of `kvbm link`, got 2 (kvbm 9.9 there" in done.stderr


GOOD = {"wire": "nixl", "shape": SMALL, "tokens": 4, "chunk_bytes": 1, "ring_bytes": 1, "timeout": 1.0}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("wire", "tcp"), ("wire", 1), ("shape", "/etc/passwd"), ("shape", "a.yaml"), ("shape", "nl=0"), ("shape", "x" * 201),
        ("tokens", True), ("tokens", 0), ("tokens", 1 << 40), ("tokens", "4"), ("chunk_bytes", -1), ("ring_bytes", 1.5),
        ("timeout", 0.0), ("timeout", 1e9), ("timeout", float("nan")), ("timeout", None),
    ],
    ids=lambda value: str(value)[:12],
)  # fmt: skip
def test_terms_that_are_none(name: str, value: Any) -> None:
    assert trial.Terms.read(GOOD).model.nl == 2
    with pytest.raises(KvbmError):
        trial.Terms.read({**GOOD, name: value}).model  # noqa: B018
    with pytest.raises(BindError, match=name):
        trial.Terms.read({key: held for key, held in GOOD.items() if key != name})


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"do": "receive", "count": 0}, "count"), ({"do": "receive", "count": 1 << 50}, "count"), ({"do": "receive"}, "count"),
        ({"do": "eval", "count": 1}, "expected receive, echo or end"), ({"what": 1}, "expected a message with do"),
    ],
    ids=["none", "many", "missing", "unknown", "other"],
)  # fmt: skip
def test_orders_that_are_none(serve: Serve, monkeypatch: pytest.MonkeyPatch, told: dict[str, Any], said: str) -> None:
    monkeypatch.setattr(trial.Sender, "notes", lambda self: (self.talk.say(**told), self.talk.hear("ready"))[1:])
    serving = serve()
    done = send(serving.port)
    assert done.exit_code == BindError.exit_code and said in done.stderr
    serving.close()
    assert said in str(serving.errors[0])


def test_memory_is_what_a_side_allocates(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are rounded up to blocks before they are compared: 1 token in blocks of 2**20 is refused before anything is made."""
    slabs: list[int] = []
    register = wire._memory._Memory.register

    def counted(self: Any, slab: wire.Slab) -> None:
        slabs.append(slab.nbytes)
        register(self, slab)

    monkeypatch.setattr(wire._memory._Memory, "register", counted)
    for nt in (64, 1 << 16):
        serving = serve()
        serving.side = trial.Side("server", "cpu", HND, nt)
        made: list[int] = []
        allocate = kvbm.Pool.allocate

        def counting(*given: Any, made: list[int] = made, allocate: Any = allocate, **more: Any) -> Any:
            pool = allocate(*given, **more)
            made.append(sum(array.nbytes for array in pool.arrays))
            return pool

        monkeypatch.setattr(kvbm.Pool, "allocate", counting)
        terms = trial.Terms("nixl", SMALL, 40, 1 << 20, 1 << 24, LIMIT)
        with trial.End(serving.side, terms, None, lambda: None):
            assert sum(made) + sum(slabs) <= terms.memory(nt) < 3 * (sum(made) + sum(slabs))
        monkeypatch.setattr(kvbm.Pool, "allocate", allocate)
        slabs.clear()
        made.clear()
        serving.options["memory"] = terms.memory(nt) - 1
        done = send(serving.port, "--chunk", "1MiB", "--ring", "16MiB")
        assert done.exit_code == BindError.exit_code and "this side gives" in done.stderr
        serving.close()


def test_a_sender_that_may_be_silent_for_an_hour_is_refused(serve: Serve) -> None:
    done = send(serve().port, "--timeout", "3600")
    assert done.exit_code == BindError.exit_code and "this side waits 60 s (kvbm link serve --timeout)" in done.stderr


#: What a sender asks for that gets it.
ASKED = {**GOOD, "tokens": 40, "chunk_bytes": 1 << 16, "ring_bytes": 1 << 20, "timeout": 60.0}


@contextlib.contextmanager
def together(memory: int = 1 << 30, *, once: bool = False) -> Iterator[tuple[link.Senders, int]]:
    """`kvbm link serve` as it is, and its port."""
    side = trial.Side("server", "cpu", HND, 64)
    senders = link.Senders(side, only=None, memory=memory, timeout=60.0, once=once, as_json=True)
    reception = talk.Reception("127.0.0.1", 0, senders.serve, timeout=LIMIT, name="senders")
    with contextlib.closing(reception):
        yield senders, reception.port
        senders.stop()


def test_silent_senders_keep_no_other_waiting(serve: Serve) -> None:
    """Some say nothing, or a part of something; others say what they want, and stop behind it, with all that was made for them."""
    with together() as (senders, port), contextlib.ExitStack() as stack:
        for data in (b"", b"k", framed(b"{}", 9)):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port), LIMIT))
            one.sendall(data)
        for _ in range(3):
            one = stack.enter_context(talk.connect("127.0.0.1", port, LIMIT))
            one.say(**trial._hello(device="cpu", **ASKED))
            one.hear("card", within=LIMIT)
        assert send(port).exit_code == 0 and senders.count == 4 and senders.ended.get(timeout=LIMIT) == 0
        assert len(senders._running) == 3


def test_senders_share_the_memory_and_who_gets_none_is_told_at_once(serve: Serve) -> None:
    terms = trial.Terms(**ASKED)
    with together(terms.memory(64) * 2 - 1) as (senders, port):
        with talk.connect("127.0.0.1", port, LIMIT) as silent, talk.connect("127.0.0.1", port, LIMIT) as second:
            silent.say(**trial._hello(device="cpu", **asdict(terms)))
            silent.hear("card", within=LIMIT)
            second.say(**trial._hello(device="cpu", **asdict(terms)))
            with pytest.raises(BindError, match=r"of which other senders use .*: try again later"):
                second.hear("card", within=LIMIT)
        codes = {senders.ended.get(timeout=LIMIT) for _ in range(2)}
        assert codes == {BindError.exit_code, PeerLostError.exit_code}
        with talk.connect("127.0.0.1", port, LIMIT) as third:  # the memory is back
            third.say(**trial._hello(device="cpu", **asdict(terms)))
            third.hear("card", within=LIMIT)


@pytest.mark.slow  # half a second
def test_memory_is_free_before_another_sender_may_have_it() -> None:
    """Red: what a trial had made lived on in cycles, and senders in turns got twice what `--memory` allows."""
    gc.disable()
    try:
        with trial.Memory(1 << 30).lent(trial.Terms(**ASKED), 1 << 20):
            held: dict[str, Any] = {"array": np.zeros(4)}
            held["itself"], gone = held, weakref.ref(held["array"])
            del held
        assert gone() is None
    finally:
        gc.enable()


def test_a_server_of_one_sender_refuses_the_second(serve: Serve) -> None:
    with together(once=True) as (senders, port):
        with talk.connect("127.0.0.1", port, LIMIT) as first:
            first.say(**trial._hello(device="cpu", **ASKED))
            first.hear("card", within=LIMIT)
            done = send(port)
            assert done.exit_code == BindError.exit_code and "--once" in done.stderr
        assert senders.ended.get(timeout=LIMIT) == PeerLostError.exit_code


@pytest.mark.parametrize(
    "shape", ["llama-3.1-8b", "shape.yaml", "./shape", "nl=1;no=2"], ids=["preset", "file", "path", "odd"]
)
def test_a_peer_names_no_file_of_this_machine(shape: str) -> None:
    with pytest.raises(BindError, match="shape: expected all sizes"):
        trial.Terms.read({**GOOD, "shape": shape})


# ---- messages ----------------------------------------------------------------------------------------------------------


def framed(data: bytes, size: int | None = None) -> bytes:
    return struct.pack(">4sI", b"kvb1", len(data) if size is None else size) + data


@pytest.fixture
def ends() -> Iterator[tuple[talk.Talk, socket.socket]]:
    """One end of a conversation as a `Talk`, and the other end as a socket."""
    with talk.listen("127.0.0.1", 0) as server, socket.create_connection(server.getsockname()) as other:
        connection, _ = server.accept()
        with talk.Talk(connection, LIMIT) as mine:
            yield mine, other


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", BindError, "another program is there"),
        (framed(b"", talk.MOST + 1), BindError, "expected at most"),
        (framed(b"{"), BindError, "expected JSON"),
        (framed(b"\xff"), BindError, "expected JSON"),
        (framed(b"[" * 100_000), BindError, "expected JSON"),
        (framed(b"[" * 4000), BindError, "expected JSON"),
        (framed(b'{"it": NaN}'), BindError, "expected JSON"),
        (framed(b'{"error": "KvbmError", "message": "\\u001b[2Jred\\nline"}'), KvbmError, r"says: \\x1b\[2Jred\\nline$"),
        (framed(b"[1]"), BindError, "expected an object of JSON, got a list"),
        (framed(b'{"a": 1}'), BindError, "expected a message with it, got a"),
        (framed(b"{}", 100), PeerLostError, "has gone"),
        (b"kv", PeerLostError, "has gone"),
        (b"", PeerLostError, "has gone"),
        (framed(b'{"error": "TransferTimeoutError", "message": "late"}'), TransferTimeoutError, "says: late"),
        (framed(b'{"error": "PlanError", "message": "no"}'), kvbm.PlanError, "says: no"),
        (framed(b'{"error": "SystemExit", "message": "no"}'), KvbmError, "says: no"),
        (framed(b'{"error": "annotations", "message": "no"}'), KvbmError, "says: no"),
        (framed(b'{"error": ["x"]}'), KvbmError, "says: "),
    ],
    ids=[
        "http", "long", "cut", "bytes", "deep", "deeper", "number", "escape", "list", "missing", "short",
        "head", "end", "late", "plan", "unknown", "no error", "odd",
    ],
)  # fmt: skip
def test_what_is_heard(ends: tuple[talk.Talk, socket.socket], data: bytes, error: type[KvbmError], said: str) -> None:
    mine, other = ends
    other.sendall(data)
    other.shutdown(socket.SHUT_WR)
    with pytest.raises(error, match=said) as found:
        mine.hear("it")
    assert type(found.value) is error


def test_who_is_busy_is_waited_for(ends: tuple[talk.Talk, socket.socket]) -> None:
    mine, other = ends
    other.sendall(framed(b'{"busy": true}') * 3 + framed(b'{"it": 1}'))
    assert mine.hear("it") == {"it": 1}


def test_who_is_silent_is_not(ends: tuple[talk.Talk, socket.socket]) -> None:
    mine, _ = ends
    mine.timeout = 0.01
    with pytest.raises(TransferTimeoutError, match=r"no complete message within 0\.01 s"):
        mine.hear("it")
    mine.look()  # nothing came, and nobody has gone


class Slow:
    """A socket whose other end sends a byte at a time: there is always one, and never a second."""

    def __init__(self, text: bytes) -> None:
        self.left, self.calls, self.pipe = list(text), 0, os.pipe()
        os.write(self.pipe[1], b"x")

    def fileno(self) -> int:
        return self.pipe[0]  # which can always be read

    def recv(self, _: int) -> bytes:
        self.calls += 1
        return bytes([self.left.pop(0)])

    def shutdown(self, _: int) -> None: ...

    def close(self) -> None:
        for end in self.pipe:
            os.close(end)


def test_who_sends_a_byte_at_a_time_is_not(ends: tuple[talk.Talk, socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is not looked at for each byte: 100,000 of them would cost a second of processor time."""
    mine, _ = ends
    slow = Slow(framed(b"x" * 100_000))
    for seconds in (0.05, 0.3):
        mine.timeout = seconds
        with monkeypatch.context() as patch:
            patch.setattr(mine, "_socket", slow)
            with pytest.raises(TransferTimeoutError, match=rf"no complete message within {seconds:g} s"):
                mine.wait()
        assert slow.calls < 40
    slow.close()


def test_who_is_busy_for_ever_is_not(ends: tuple[talk.Talk, socket.socket]) -> None:
    """The caller's limit holds, and somebody who says nothing else all the time is refused."""
    mine, other = ends
    other.sendall(framed(b'{"busy": true}') * 9)
    for within in (0.0, 0.01):
        with pytest.raises(TransferTimeoutError, match=rf"no complete message within {within:g} s, only that it is busy"):
            mine.hear("it", within=within)
        other.sendall(framed(b'{"busy": true}'))
    other.sendall(framed(b'{"busy": true}') * 999)
    with pytest.raises(BindError, match="times that it is busy"):
        mine.hear("it")


def test_a_part_of_a_message_is_not_waited_for_when_looking(ends: tuple[talk.Talk, socket.socket]) -> None:
    """`look` and `news` return at once, and the part has its own time limit."""
    mine, other = ends
    data = framed(b'{"it": 1}')
    for cut in range(len(data)):
        other.sendall(data[:cut])
        until(lambda most=cut: [mine.look(), len(mine._data) >= most][1], "a part is there", LIMIT)
        assert mine.news() is None
        other.sendall(data[cut:])
        assert until(mine.news, "the rest is there", LIMIT) == {"it": 1}
    other.sendall(b"k")
    mine.timeout = 0.0
    with pytest.raises(TransferTimeoutError, match="no complete message"):
        until(mine.look, "it is too late", LIMIT)


def test_no_message_takes_more_than_1_mib(ends: tuple[talk.Talk, socket.socket]) -> None:
    """Whatever JSON it is: what Python allocates for it, and for refusing it."""
    mine, _ = ends
    most = talk.MOST
    texts = [
        b"[" * most, b"[]," * (most // 3), b"[" + b"{}," * (talk._MOST_VALUES // 3) + b"{}]", b'[' + b'{"":0},' * 1364 + b"0]",
        b'{"a":"' + b"x" * (most - 20) + b'\\ud83d\\ude00"}', b'{"a":"' + b"\\u1234" * (most // 6 - 9) + b'"}',
        b'{"a":' + b"9" * (most - 9) + b"}", b'{"a":' + b"9" * 4000 + b"}", b'{"a":NaN}', b'{"a":1' + b"0" * 400 + b".0e999}",
        b'{"error":"' + b"x" * (most - 60) + b'","message":"' + b"y" * 30 + b'"}', b"\xff" * most, b" " * most,
        b"[" + b"1," * (talk._MOST_VALUES - 9) + b"1]", b"{" + b",".join(b'"%x":1' % n for n in range(2000)) + b"}",
    ]  # fmt: skip
    for text in texts:
        tracemalloc.start()
        mine._data = bytearray(framed(text[:most]))
        with contextlib.suppress(KvbmError):
            mine._unframed()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 20, (text[:20], peak)


def test_who_reads_slowly_is_not(ends: tuple[talk.Talk, socket.socket]) -> None:
    mine, theirs = ends
    mine.timeout = 0.05

    def say() -> None:
        for _ in range(1000):
            mine.say(text="x" * 60_000)

    with pytest.raises(TransferTimeoutError, match=r"did not read a message within 0\.05 s"):
        say()
    assert theirs.recv(1)


def test_looking_finds_who_has_gone(ends: tuple[talk.Talk, socket.socket]) -> None:
    mine, other = ends
    other.close()
    with pytest.raises(PeerLostError, match="has gone"):
        until(mine.look, "it is seen", LIMIT)  # which returns nothing


def test_looking_loses_nothing(ends: tuple[talk.Talk, socket.socket]) -> None:
    """`look` keeps messages that arrived meanwhile."""
    near, far = ends
    for number in range(3):
        far.sendall(framed(b'{"busy": true}') + framed(b'{"word": %d}' % number))
        until(lambda most=number: near.look() or len(near._messages) > most, "its note is kept", LIMIT)
    assert [near.hear("word")["word"] for _ in range(3)] == [0, 1, 2]


def test_a_bare_wire_is_lost_while_its_answer_is_awaited(ends: tuple[talk.Talk, socket.socket]) -> None:
    """The loss is reported at once, not at the deadline; an empty note is not an answer."""
    hub = wire.Hub()
    near, far = wire.memory("near", hub), wire.memory("far", hub)
    for one in (near, far):
        one.register(wire.Slab.of(np.zeros(8, np.uint8)))
    end = trial.End.__new__(trial.End)
    end.terms = trial.Terms("nixl", SMALL, 1, 1, 1, LIMIT)
    end.raw, end.peer = near, near.connect(far.card())
    peer = far.connect(near.card())
    far.note(peer, b"answer")
    end.until_note(ends[0])
    far.note(peer, b"")
    far.close()
    begin = time.monotonic()
    with pytest.raises(PeerLostError, match="far"):
        end.until_note(ends[0])
    assert time.monotonic() - begin < LIMIT / 2


def test_every_error_arrives_as_what_it_was(ends: tuple[talk.Talk, socket.socket]) -> None:
    mine, other = ends
    with talk.Talk(other.dup(), LIMIT) as theirs:
        for name in errors.__all__:
            theirs.fail(getattr(errors, name)("why"))
            with pytest.raises(KvbmError, match="says: why") as found:
                mine.hear("it")
            assert type(found.value).__name__ == name
        theirs.fail(MemoryError())
        with pytest.raises(KvbmError, match="says: MemoryError"):
            mine.hear("it")


# ---- the command line --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_json", [False, True])
def test_nobody_is_there(as_json: bool) -> None:
    with socket.socket() as taken:  # and nobody listens
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        found = CliRunner().invoke(main, ["link", "serve", "--listen", f"127.0.0.1:{port}"])
        assert found.exit_code == 31 and f"cannot listen on 127.0.0.1:{port}: " in found.stderr
        done = send(port, *["--json"] * as_json)
    assert (
        done.exit_code == 31
        and f"127.0.0.1:{port}: Connection refused: does `kvbm link serve` run there" in done.stderr
    )
    if as_json:
        found = json.loads(done.stdout)
        assert found["rows"] == [] and (found["error"]["class"], found["error"]["exit_code"]) == (
            "UnreachableError",
            31,
        )


def test_somebody_silent_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A side that accepts the connection and sends nothing is a timeout, however long connecting took."""
    connect = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda address, _: connect(address, LIMIT))
    with talk.listen("127.0.0.1", 0) as server:
        done = send(server.getsockname()[1], "--timeout", "0.2")
    assert done.exit_code == TransferTimeoutError.exit_code and "no complete message within 0.2 s" in done.stderr


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("4096B", 4096), ("64MiB", 1 << 26), ("64mib", 1 << 26), ("1.5GB", 1_500_000_000), ("2 k", 2000), ("3Ti", None),
     ("0", None), ("-1", None), ("1e6", None), ("64XiB", None), ("", None), ("٣", None), ("0.1", None)],
    ids=lambda value: ascii(value),
)  # fmt: skip
def test_sizes(text: str, size: int | None) -> None:
    if size is not None:
        assert common.size_of(text) == size
        return
    done = CliRunner().invoke(main, ["link", "send", "h", f"--bytes={text}"])
    assert done.exit_code == 2 and "expected bytes such as 64MiB" in done.stderr


@pytest.mark.parametrize(
    ("text", "address"),
    [("h", ("h", 29555)), ("10.0.0.1:80", ("10.0.0.1", 80)), ("[fe80::1]:7", ("fe80::1", 7)), ("[::]", ("::", 29555)),
     ("::1", None), ("h:", None), ("h:70000", None), ("http://h", None), ("h h", None), ("[h", None)],
    ids=["name", "both", "six", "any", "bare", "empty", "large", "url", "space", "open"],
)  # fmt: skip
def test_addresses(text: str, address: tuple[str, int] | None) -> None:
    context: Any = None
    if address is not None:
        assert link._address(context, context, text) == address
        return
    done = CliRunner().invoke(main, ["link", "send", text])
    assert done.exit_code == 2 and "expected HOST:PORT" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--bytes", "1MiB", "--tokens", "4"), "expected one of them"), (("--tokens", "0"), "expected numbers from 1 on"),
        (("--device", "gpu"), "expected cpu or cuda:N"), (("--wire", "tcp"), "torch"), (("--iters", "0"), "--iters"),
    ],
    ids=["both", "tokens", "device", "wire", "repeat"],
)  # fmt: skip
def test_options_that_are_none(arguments: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(main, ["link", "send", "h", *arguments])
    assert done.exit_code == 2 and said in done.stderr


# ---- two processes -----------------------------------------------------------------------------------------------------


class Process:
    """``kvbm link …`` in a separate process, whose lines are read as they arrive.

    It is forked from one that has imported the wires; if it `is_new`, it is the command as a user starts it, which takes seconds.
    """

    def __init__(self, *arguments: str, is_new: bool = False) -> None:
        self.lines: dict[str, list[str]] = {"stdout": [], "stderr": []}
        read, write = zip(*(os.pipe() for _ in self.lines), strict=True)
        pipes = [Connection(end, readable=False) for end in write]
        if is_new:
            path = os.pathsep.join([str(HERE), str(HERE / "helpers"), *filter(None, sys.path)])
            command = [sys.executable, "-m", "programs.trials", "link", *arguments]
            environment = {**os.environ, "PYTHONPATH": path}
            self.process: Any = subprocess.Popen(command, stdout=pipes[0], stderr=pipes[1], env=environment)
        else:
            self.process = context().Process(target=trials.forked, args=(["link", *arguments], *pipes), daemon=True)
            self.process.start()
        for pipe in pipes:
            pipe.close()
        self.threads = [
            threading.Thread(target=self._read, args=one, daemon=True) for one in zip(self.lines, read, strict=True)
        ]
        for thread in self.threads:
            thread.start()

    def _read(self, name: str, end: int) -> None:
        with open(end, encoding="utf-8") as pipe:
            for line in pipe:
                self.lines[name].append(line.rstrip("\n"))

    def wait_for(self, count: int, name: str = "stdout", text: str = "") -> list[str]:
        """Wait for `count` lines with this text."""
        end = time.monotonic() + LIMIT
        while len(found := [line for line in self.lines[name] if text in line]) < count:
            assert time.monotonic() < end, f"{count} lines wanted: {self.lines}"
            time.sleep(0.01)
        return found

    @property
    def code(self) -> int | None:
        """Its exit status; None while it runs."""
        return self.process.poll() if isinstance(self.process, subprocess.Popen) else self.process.exitcode

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> int:
        end = time.monotonic() + LIMIT
        while (code := self.code) is None:
            assert time.monotonic() < end, f"it goes on: {self.lines}"
            time.sleep(0.01)
        for thread in self.threads:
            thread.join(LIMIT)
        return code

    @property
    def said(self) -> str:
        return "\n".join(line for line in self.lines["stderr"] if line != "sequence")


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    made: list[Process] = []

    def process(*arguments: str, is_new: bool = False) -> Process:
        made.append(Process(*arguments, is_new=is_new))
        return made[-1]

    yield process
    for one in made:
        if one.code is None:
            one.send(signal.SIGKILL)
        one.end()


def serving(start: Callable[..., Process], *arguments: str, is_new: bool = False) -> tuple[Process, str]:
    server = start("serve", "--listen", "127.0.0.1:0", "--json", *arguments, is_new=is_new)
    return server, json.loads(server.wait_for(1)[0])["listening"]


def secret_at(folder: Path, text: str = "a secret of both sides") -> str:
    folder.mkdir(exist_ok=True)
    path = folder / "secret"
    path.write_text(text + "\n")
    path.chmod(0o600)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TORCH, NIXL])
def test_two_processes_with_a_secret(start: Callable[..., Process], tmp_path: Path, kind: str) -> None:
    """With one they measure.  With another, or none, the sender is refused, and the server goes on."""
    secret, other = secret_at(tmp_path / "a"), secret_at(tmp_path / "b", "a secret of somebody else")
    server, at = serving(start, "--secret-file", secret, "--once")
    assert json.loads(server.lines["stdout"][0])["secret"] is True
    for more, said in (((), "the other side has one, and this side none"), (("--secret-file", other), "different secrets")):
        client = start("send", at, "--wire", kind, *FEW, "--tokens", "16", *more)
        assert client.end() == errors.AuthenticationError.exit_code, client.said
        assert said in client.said and "Traceback" not in client.said
    client = start("send", at, "--wire", kind, *FEW, "--tokens", "16", "--secret-file", secret)
    assert client.end() == 0, client.said
    assert server.end() == 0, server.said


@pytest.mark.slow
def test_a_server_without_a_secret_refuses_a_sender_with_one(start: Callable[..., Process], tmp_path: Path) -> None:
    server, at = serving(start)
    assert json.loads(server.lines["stdout"][0])["secret"] is False
    client = start("send", at, "--wire", "nixl", *FEW, "--tokens", "16", "--secret-file", secret_at(tmp_path))
    assert client.end() == errors.AuthenticationError.exit_code
    assert "this side has a secret, and the other side none" in client.said
    assert server.code is None and len(server.lines["stdout"]) == 1


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "8.8.8.8:0"])
def test_a_server_without_a_secret_is_not_open_to_all(address: str) -> None:
    found = CliRunner().invoke(main, ["link", "serve", "--listen", address])
    assert found.exit_code == BindError.exit_code and "without a secret: it is" in found.stderr


@pytest.mark.parametrize("command", [("serve",), ("send", "127.0.0.1:1")], ids=lambda command: command[0])
def test_a_secret_that_others_can_read_is_refused(tmp_path: Path, command: tuple[str, ...]) -> None:
    path = Path(secret_at(tmp_path))
    path.chmod(0o644)
    found = CliRunner().invoke(main, ["link", *command, "--secret-file", str(path)])
    assert found.exit_code == BindError.exit_code and "mode 600" in found.stderr


FEW = ("--shape", "llama-3.1-8b,nl=4", "--iters", "2", "--timeout", "60")
#: Sequences without end, of some MB each.
ENDLESS = ("--shape", "llama-3.1-8b,nl=4", "--bytes", "8MiB", "--iters", "100000", "--timeout", "60")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TORCH, NIXL])
def test_two_processes(start: Callable[..., Process], kind: str) -> None:
    server, address = serving(start, "--once", "--wire", kind, is_new=kind == "torch")
    client = start("send", address, "--wire", kind, "--bytes", "100KiB,4MiB", "--json", *FEW, is_new=kind == "torch")
    assert client.end() == 0, client.said
    found = json.loads("\n".join(client.lines["stdout"]))
    jsonschema.validate(found, SENT)
    assert [row["nbytes"] for row in found["rows"]] == [98304, 1 << 22] and found["wire"] == kind
    assert all(row["raw_ms"] > 0 and row["send_host_us"] > 0 and row["receive_host_us"] > 0 for row in found["rows"])
    assert server.end() == 0, server.said
    told = json.loads(server.lines["stdout"][1])
    jsonschema.validate(told, SERVED)
    assert told["sequences"] == 6 and told["error"] is None
    assert not client.said and not server.said, "nothing but what was asked for is printed"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TORCH, NIXL])
def test_a_server_that_is_killed(start: Callable[..., Process], kind: str) -> None:
    """The sender reports the loss within its deadline."""
    server, address = serving(start)
    client = start("send", address, "--wire", kind, *ENDLESS)
    client.wait_for(3, "stderr", "sequence")
    server.send(signal.SIGKILL)
    assert client.end() == PeerLostError.exit_code, client.said
    assert "error: " in client.said and "Traceback" not in client.said


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TORCH, NIXL])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_sender_that_ends(start: Callable[..., Process], kind: str, number: signal.Signals) -> None:
    """The server reports it, and serves the next sender."""
    server, address = serving(start)
    client = start("send", address, "--wire", kind, *ENDLESS)
    client.wait_for(3, "stderr", "sequence")
    client.send(number)
    assert client.end() == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert "Traceback" not in client.said
    told = json.loads(server.wait_for(2)[1])
    assert told["error"] and "Traceback" not in server.said
    again = start("send", address, "--wire", kind, "--bytes", "1MiB", *FEW)
    assert again.end() == 0, again.said
    assert json.loads(server.wait_for(3)[2])["error"] is None


@pytest.mark.slow
def test_ctrl_c_ends_a_server_that_waits(start: Callable[..., Process]) -> None:
    server, _ = serving(start)
    server.send(signal.SIGINT)
    assert server.end() == 130 and not server.said
