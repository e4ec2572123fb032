"""How workers of vLLM engines connect, without vLLM: doors and visits between endpoints of one process."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import kvbm
from kvbm import BindError, KvbmError, Pool, Span, TransferError, TransferTimeoutError, reshard, wire
from kvbm.integrations.versions import require_version
from kvbm.integrations.vllm import VERSIONS, holding, meetings
from kvbm.integrations.vllm.holding import Hold, Holds, Push
from kvbm.integrations.vllm.identity import push_name
from kvbm.integrations.vllm.meetings import Door, Links, Visit, Want
from kvbm.link import notes
from kvbm.link import talk as talk_module
from kvbm.link.secret import Secret
from kvbm.link.talk import Reception, Talk, connect
from kvbm.reshard import Endpoint, Link

MODEL = kvbm.BlockShape(nl=2, no=2, nh=4, nt=4, hd=8, dtype="float32")
TOKENS = range(30)

#: Seconds that anything may take.
LIMIT = 30.0


class Engine:
    """The workers of an engine; prefill workers hold requests and listen."""

    def __init__(
        self, hub: wire.Hub, name: str, tp: int = 1, nt: int = 4, start: str = "1", secret: Secret | None = None
    ) -> None:
        place = reshard.vllm(MODEL, tp=tp, nt=nt, name=name)
        layout = kvbm.load("vllm/flash_attn_nhd")
        self.name, self.start, self.tp = name, start, tp
        self.pools = [Pool.allocate(layout, place.shape(rank), 32 // nt) for rank in range(tp)]
        self.table = list(range(32 // nt))[::-1]
        for rank, pool in enumerate(self.pools):
            for array in pool.arrays:
                array[:] = np.random.default_rng(rank).random(array.shape)
        self.ends = [
            Endpoint(
                name, place, rank, pool, wire=wire.memory(f"{name}/{rank}/{start}", hub), chunk_bytes=1 << 12,
                ring_bytes=1 << 16, secret_file=secret,
            )
            for rank, pool in enumerate(self.pools)
        ]  # fmt: skip
        self.links = [Links(end) for end in self.ends]
        self.asked: list[list[tuple[str, bool]]] = [[] for _ in self.ends]
        self.doors: list[Door] = []
        self.visits: list[Visit] = []

    def listen(self, word: float = LIMIT) -> int:
        """Listen at consecutive ports."""
        while len(self.doors) < self.tp:
            self.shut()
            with contextlib.suppress(KvbmError):  # another program has the next port
                self.doors.append(Door(self.links[0], "127.0.0.1", 0, self._sender(0), word))
                for rank in range(1, self.tp):
                    self.doors.append(Door(self.links[rank], "127.0.0.1", self.doors[0].port + rank, self._sender(rank), word))
        return self.doors[0].port

    def _sender(self, rank: int) -> Any:
        def begin(want: Want, link: Link) -> None:
            request, is_given_up = want.name, want.is_given_up
            if request == "unknown":
                raise TransferError("request unknown: not held here")
            if request == "broken":
                raise ZeroDivisionError
            first = (request, is_given_up) not in self.asked[rank]
            self.asked[rank].append((request, is_given_up))
            if first and not is_given_up:
                link.send(request, Span(self.table, TOKENS), timeout=LIMIT)

        return begin

    def visit(self, rank: int, port: int, ports: int, word: float = LIMIT) -> Visit:
        self.visits.append(Visit(self.links[rank], self.start, self.tp, "127.0.0.1", port, ports, word))
        return self.visits[-1]

    def load(self, visit: Visit, request: str) -> None:
        arrival = visit.link().receive(request, Span(self.table, TOKENS), timeout=LIMIT)
        visit.want(Want(request))
        arrival.synchronize(LIMIT)

    def tokens(self) -> np.ndarray[Any, Any]:
        """The part of the sequence on all ranks: (l, o, t, h, d)."""
        found = []
        for pool in self.pools:
            layers = np.stack(list(pool.arrays))  # l o b t h d
            held = layers[:, :, self.table]
            found.append(held.reshape(*held.shape[:2], -1, *held.shape[4:])[:, :, : len(TOKENS)])
        return np.concatenate(found, axis=3)

    def shut(self) -> None:
        for door in self.doors:
            door.close()
        self.doors = []

    def close(self) -> None:
        self.shut()
        for visit in self.visits:
            visit.close()
        for end in self.ends:
            end.close()


@pytest.fixture
def engines() -> Iterator[Any]:
    hub, made = wire.Hub(), []

    def engine(name: str, tp: int = 1, nt: int = 4, start: str = "1", secret: Secret | None = None) -> Engine:
        made.append(Engine(hub, name, tp, nt, start, secret))
        return made[-1]

    yield engine
    for one in made:
        one.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name == "kvbm door"]


def left(engine: Engine) -> None:
    """Wait until all connections to it have ended."""
    end = time.monotonic() + LIMIT
    while any(door._reception._talks for door in engine.doors):
        assert time.monotonic() < end
        time.sleep(0.001)


def together(*calls: Any) -> None:
    """Run each function on a separate thread; raise the first error."""
    errors: list[BaseException] = []

    def run(call: Any) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.parametrize(("tps", "nts"), [((1, 1), (4, 8)), ((2, 1), (8, 4)), ((1, 2), (4, 4)), ((2, 2), (4, 8))])
def test_requests_are_asked_for(engines: Any, tps: tuple[int, int], nts: tuple[int, int]) -> None:
    prefill, decode = (engines(name, tp, nt) for name, tp, nt in zip("pd", tps, nts, strict=True))
    port = prefill.listen()
    visits = [decode.visit(rank, port, prefill.tp) for rank in range(decode.tp)]
    for request in ("one", "another"):
        together(*(partial(decode.load, visit, request) for visit in visits))
        assert np.array_equal(prefill.tokens(), decode.tokens())
    visits[0].want(Want("not needed", is_given_up=True))
    assert all(("not needed", True) in asked for asked in prefill.asked)
    for visit in visits:
        visit.close()


def test_two_engines_ask_one(engines: Any) -> None:
    prefill, first, second = engines("p", 2), engines("first"), engines("second", nt=8)
    port = prefill.listen()
    for one in (first, second):
        one.load(one.visit(0, port, 2), one.name)
        assert np.array_equal(prefill.tokens(), one.tokens())


def test_one_link_for_both_ways(engines: Any) -> None:
    """The link is closed when its last user has ended."""
    first, second = engines("a"), engines("b")
    ports = first.listen(), second.listen()
    there, back = second.visit(0, ports[0], 1), first.visit(0, ports[1], 1)
    second.load(there, "one")
    first.load(back, "two")
    second.load(there, "three")
    assert back.link() is first.doors[0]._clients["b", "1"].link
    assert there.link() is second.doors[0]._clients["a", "1"].link
    link = back.link()
    there.close()
    left(first)
    first.doors[0]._part(first.doors[0]._clients["b", "1"])  # as if it had gone long ago
    assert not link.is_closed
    first.links[0].part(link)  # it does not wait for the endpoint's thread
    first.ends[0].call(int)
    assert link.is_closed and not first.links[0]._made


def test_who_asks_is_started_again(engines: Any) -> None:
    """A restarted decode engine has the same name and new links; the old link is closed."""
    prefill, before = engines("p"), engines("d")
    port = prefill.listen()
    visit = before.visit(0, port, 1)
    before.load(visit, "one")
    visit.close()
    left(prefill)
    before.close()
    after = engines("d", start="2")
    after.load(after.visit(0, port, 1), "two")
    assert np.array_equal(prefill.tokens(), after.tokens())
    assert list(prefill.doors[0]._clients) == [("d", "2")]


def test_a_connection_that_broke_long_ago_is_made_anew(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If both engines live, the link is kept; the link of an engine that has ended is closed when this is known."""
    prefill, decode, ends, other = engines("p"), engines("d"), engines("e"), engines("o")
    port = prefill.listen()
    visits = [one.visit(0, port, 1) for one in (decode, ends)]
    for visit, one in zip(visits, (decode, ends), strict=True):
        one.load(visit, one.name)
        for talk in visit._talks:
            talk.close()
    left(prefill)
    ends.close()
    monkeypatch.setattr(meetings, "_SILENT_SECONDS", -1.0)
    end = time.monotonic() + LIMIT
    while ("e", "1") in prefill.doors[0]._clients:  # it is found when somebody comes
        assert time.monotonic() < end
        visit = other.visit(0, port, 1)
        visit.link()
        visit.close()
        left(prefill)
    link = visits[0].link()
    decode.load(visits[0], "again")
    assert visits[0].link() is link and np.array_equal(prefill.tokens(), decode.tokens())


def test_who_prefills_is_started_again(engines: Any) -> None:
    """A prefill engine restarted at the same port: the next request is loaded over a new link."""
    before, decode = engines("p"), engines("d")
    port = before.listen()
    visit = decode.visit(0, port, 1)
    decode.load(visit, "one")
    before.close()
    after = engines("p", start="2")
    after.doors.append(Door(after.links[0], "127.0.0.1", port, after._sender(0)))
    decode.load(visit, "two")
    assert np.array_equal(after.tokens(), decode.tokens())


def test_a_connection_that_broke_is_made_anew(engines: Any) -> None:
    """The visit connects again, and its link stays the same."""
    prefill, decode = engines("p"), engines("d")
    visit = decode.visit(0, prefill.listen(), 1)
    decode.load(visit, "one")
    link = visit.link()
    visit._talks[0].close()
    with contextlib.suppress(KvbmError):
        visit.want(Want("nothing", is_given_up=True))
    decode.load(visit, "two")
    assert visit.link() is link and np.array_equal(prefill.tokens(), decode.tokens())


@pytest.mark.parametrize("name", ["unknown", "broken"])
def test_what_is_not_there(engines: Any, name: str) -> None:
    """An error for a request that is not held; the next one is loaded."""
    prefill, decode = engines("p", 2), engines("d")
    visit = decode.visit(0, prefill.listen(), 2)
    with pytest.raises(KvbmError, match=r"not held here|ZeroDivisionError"):
        visit.want(Want(name))
    decode.load(visit, "one")
    assert np.array_equal(prefill.tokens(), decode.tokens())


def test_nobody_is_there(engines: Any) -> None:
    """An engine that cannot be reached is not tried again at once, so that later requests need not wait."""
    decode = engines("d")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    visit = decode.visit(0, port, 1)
    with pytest.raises(KvbmError, match="refused: does a vLLM engine with KvbmConnector"):
        visit.link()
    with pytest.raises(TransferError, match="tried again after"):
        visit.want(Want("one", is_given_up=True))


def test_ranks_that_do_not_come_are_not_waited_for(engines: Any) -> None:
    prefill, decode = engines("p"), engines("d", 2)
    visit = decode.visit(0, prefill.listen(0.2), 1)
    with pytest.raises(KvbmError, match=r"of 2 ranks only \[0\] have come"):
        visit.link()


def test_another_model_is_refused(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = engines("p")
    monkeypatch.setattr(f"{__name__}.MODEL", kvbm.BlockShape(nl=2, no=2, nh=4, nt=4, hd=16, dtype="float32"))
    decode = engines("d")
    with pytest.raises(KvbmError):
        decode.visit(0, prefill.listen(), 1).link()


CARD = base64.b64encode(b"{}").decode()
HELLO = {"engine": "e", "start": "s", "rank": 0, "world": 1, "card": CARD}


@pytest.mark.parametrize(
    "said",
    [
        [{}],
        [{**HELLO, "world": 1 << 60}],
        [{**HELLO, "world": True}],
        [{**HELLO, "rank": -1}],
        [{**HELLO, "rank": "0"}],
        [{**HELLO, "rank": 1}],
        [{**HELLO, "card": "no base64"}],
        [{**HELLO, "card": 7}],
        [{**HELLO, "engine": ["e"], "card": None}],
        [HELLO],
        [{"error": "SystemExit", "message": "leave"}],
    ],
    ids=str,
)
def test_what_is_nonsense_is_refused(engines: Any, said: list[dict[str, Any]]) -> None:
    """A malformed message is refused, and others are served afterwards."""
    prefill, decode = engines("p"), engines("d")
    port = prefill.listen()
    with connect("127.0.0.1", port, LIMIT) as talk:
        for message in said:
            talk.say(**message)
        with pytest.raises(KvbmError):
            [talk.hear() for _ in range(3)]
    decode.load(decode.visit(0, port, 1), "one")
    assert np.array_equal(prefill.tokens(), decode.tokens())
    left_by_nonsense = [name for name in prefill.doors[0]._clients if name != ("d", "1")]
    assert not left_by_nonsense


@pytest.mark.parametrize(
    "wanted",
    [
        {}, {"want": "one"}, {"want": {}}, {"want": {"name": 7}}, {"want": {"name": ""}},
        *({"want": {"name": "one", **more}} for more in (
            {"is_given_up": 0}, {"more": 1}, {"last": 1.5}, {"groups": "0"}, {"groups": [0]}, {"groups": ["0"], "last": 8},
            {"groups": ["0"], "first": 8, "last": 8, "each": 8}, {"groups": ["0"], "last": 1 << 40, "each": 8},
            {"groups": ["0"], "first": -8, "last": 8, "each": 8}, {"groups": ["0", "0"], "last": 8, "each": 8},
            {"groups": [str(number) for number in range(65)], "last": 8, "each": 8}, {"name": "x" * 2001},
            {"groups": ["0"], "last": 1 << 16, "each": 1}, {"last": 8, "each": 1}, {"each": 1 << 900},
        )),
    ],
    ids=str,
)  # fmt: skip
def test_nonsense_that_is_wanted(engines: Any, wanted: dict[str, Any]) -> None:
    prefill, decode = engines("p"), engines("d")
    visit = decode.visit(0, prefill.listen(), 1)
    visit.link()
    visit._talks[0].say(**wanted)
    with pytest.raises(BindError, match="expected"):
        visit._talks[0].hear()
    assert prefill.asked == [[]]


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", struct.pack(">4sI", b"kvb1", 1 << 31), struct.pack(">4sI", b"kvb1", 3) + b"[1]"]
)
def test_bytes_that_are_no_message(engines: Any, data: bytes) -> None:
    prefill = engines("p")
    with socket.create_connection(("127.0.0.1", prefill.listen()), LIMIT) as one:
        one.sendall(data)
        heard = one.makefile("rb").read()
    assert json.loads(heard[8:])["error"] == "BindError"


def test_another_card_at_the_same_start_is_refused(engines: Any) -> None:
    prefill, decode, thief = engines("p"), engines("d"), engines("thief")
    port = prefill.listen()
    decode.visit(0, port, 1).link()
    with connect("127.0.0.1", port, LIMIT) as talk:
        card = base64.b64encode(thief.ends[0].card()).decode()
        talk.say(engine="d", start="1", rank=0, world=1, card=card)
        with pytest.raises(BindError, match="another card"):
            talk.hear()


def test_a_door_that_closes_wakes_all(engines: Any) -> None:
    """Workers that are waited for, workers that wait, and the listening thread; the port is free afterwards."""
    prefill, decode = engines("p"), engines("d", 2)
    port = prefill.listen()
    [door] = prefill.doors
    visits = [decode.visit(0, port, 1)]
    failed: list[BaseException] = []

    def meet() -> None:
        try:
            visits[0].link()
        except KvbmError as error:
            failed.append(error)

    waits = threading.Thread(target=meet, daemon=True)
    waits.start()
    with door._met:
        assert door._met.wait_for(lambda: any(guest.cards for guest in door._clients.values()), LIMIT)
    door.close()
    waits.join(LIMIT)
    assert failed and not door._reception._thread.is_alive()
    socket.create_server(("127.0.0.1", port)).close()


# ---- others that are silent, slow or hostile -------------------------------------------------------------------------------


def hello(end: Endpoint, **change: Any) -> dict[str, Any]:
    card = base64.b64encode(end.card()).decode()
    return {"engine": "x", "start": "s", "rank": 0, "world": 1, "card": card, **change}


def test_an_engine_that_does_not_answer_delays_no_other(engines: Any) -> None:
    """Its calls wait on its own thread, those of others end meanwhile; each fails at its own end."""
    prefill, decode = engines("p"), engines("d")
    good, ended = decode.visit(0, prefill.listen(), 1), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        bad = decode.visit(0, silent.getsockname()[1], 1)
        failed: list[str] = []

        def ask(end: float) -> None:
            try:
                bad.want(Want("r"), end)
            except KvbmError as error:
                failed.append(str(error))

        for _ in range(40):
            bad.submit(ask, time.monotonic() + LIMIT)
        good.submit(lambda: (decode.load(good, "one"), ended.set()))
        assert ended.wait(LIMIT) and not failed
        assert np.array_equal(prefill.tokens(), decode.tokens())
        bad.close()
        other = decode.visit(0, silent.getsockname()[1], 1)
        for seconds in (0.0, 0.05):
            other._failed_at = -LIMIT
            with pytest.raises(KvbmError, match=r"no answer in time|no complete message within"):
                other.link(time.monotonic() + seconds)


def test_a_server_that_is_busy_for_ever_is_not_waited_for(engines: Any) -> None:
    """Before its card, and after it."""
    decode, other = engines("d"), engines("o")
    card = base64.b64encode(other.ends[0].card()).decode()
    for said in ({"busy": True}, {"card": card}):
        talks: list[Any] = []

        def welcome(talk: Any, said: dict[str, Any] = said, talks: list[Any] = talks) -> None:
            talks.append(talk)
            talk.say(**said)
            with contextlib.suppress(KvbmError):
                while True:
                    talk.say(busy=True)
                    time.sleep(0.01)

        busy = Reception("127.0.0.1", 0, welcome, timeout=LIMIT, name="busy")
        visit = decode.visit(0, busy.port, 1)
        with pytest.raises(TransferError, match="only that it is busy"):
            visit.link(time.monotonic() + 0.2)
        assert talks
        busy.close()
        decode = engines("d")


@pytest.mark.parametrize("after", ["nothing", "a hello", "a card of its own", "a part of a want"])
def test_one_byte_and_silence_delay_nobody(engines: Any, after: str) -> None:
    """Many of them, at every stage of a conversation; renewed as often as they like."""
    prefill, decode, stranger = engines("p"), engines("d"), engines("s")
    port, silent = prefill.listen(), []
    with contextlib.ExitStack() as stack:
        for number in range(20):
            if after == "nothing":
                one = stack.enter_context(socket.create_connection(("127.0.0.1", port), LIMIT))
                one.sendall(b"k")
                silent.append(one)
                continue
            talk = stack.enter_context(connect("127.0.0.1", port, LIMIT))
            world = 2 if after == "a hello" else 1
            start = str(number) if after == "a hello" else "s"
            talk.say(**hello(stranger.ends[0], start=start, world=world))
            talk.hear("card")
            if after == "a part of a want":
                talk.hear("met")
            talk._socket.send(b"kvb1\0\0")
        decode.load(decode.visit(0, port, 1), "one")
        assert np.array_equal(prefill.tokens(), decode.tokens())
        [door] = prefill.doors
        door.tell(door._clients["d", "1"].link, "lost", "why")
        end = time.monotonic() + LIMIT
        while (found := decode.visits[0].lost()) != {"lost": "why"}:
            assert not found and time.monotonic() < end


def test_nothing_of_others_is_computed_under_a_lock(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the cards of one engine are compared, which may take for ever, another one is served."""
    prefill, decode, slow = engines("p"), engines("d"), engines("slow")
    port, began, goes_on = prefill.listen(), threading.Event(), threading.Event()
    meet = prefill.ends[0].meet

    def stopped(cards: Any, timeout: float) -> Link:
        if any(b'"slow"' in card for card in cards):
            began.set()
            assert goes_on.wait(LIMIT)
        return meet(cards, timeout=timeout)

    monkeypatch.setattr(prefill.ends[0], "meet", stopped)
    waits = threading.Thread(target=slow.visit(0, port, 1).link, daemon=True)
    waits.start()
    assert began.wait(LIMIT)
    decode.load(decode.visit(0, port, 1), "one")
    assert np.array_equal(prefill.tokens(), decode.tokens())
    goes_on.set()
    waits.join(LIMIT)
    assert not waits.is_alive()


def test_a_lock_that_is_held_ends_with_the_callers_limit(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same engine is met by another caller, which may take for ever.  Who has more time gets the link in the end."""
    prefill, decode = engines("p"), engines("d")
    port, began, goes_on = prefill.listen(), threading.Event(), threading.Event()
    links, end = decode.links[0], decode.ends[0]
    meet, cards = end.meet, [one.card() for one in prefill.ends]

    def stopped(cards: Any, timeout: float) -> Link:
        began.set()
        assert goes_on.wait(LIMIT)
        return meet(cards, timeout=timeout)

    monkeypatch.setattr(end, "meet", stopped)
    found: list[Link] = []
    first = threading.Thread(target=lambda: found.append(links.meet(cards, time.monotonic() + LIMIT)), daemon=True)
    first.start()
    assert began.wait(LIMIT)
    with pytest.raises(TransferTimeoutError, match="another call for it has not ended"):
        links.meet(cards, time.monotonic() + 0.01)
    visit = decode.visit(0, port, 1)
    with visit._lock:
        for call in (visit.link, partial(visit.want, Want("one"))):
            with pytest.raises(TransferTimeoutError, match="in time"):
                call(end=time.monotonic() + 0.01)
    goes_on.set()
    first.join(LIMIT)
    assert links.meet(cards, time.monotonic() + LIMIT) is found[0] and not links._made[frozenset(cards)].error
    for _ in range(2):
        links.part(found[0])
    assert not links._made


def test_names_are_compared_before_placements_are_read(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of 600 groups is refused, whose placements nobody reads; so is one of another model."""
    from kvbm.link import endpoint

    prefill, decode = engines("p"), engines("d")
    port = prefill.listen()
    card = json.loads(decode.ends[0].card())
    [group] = card["groups"].values()
    many = {"groups": {str(number): {**group, "planes": ""} for number in range(600)}}
    few = {"groups": {str(number): group for number in range(60)}}
    read: list[Any] = []
    monkeypatch.setattr(endpoint, "load_shape", lambda text: read.append(text))
    for change in (many, few, {"groups": {"": group, "more": group}}, {"model": "other"}):
        text = base64.b64encode(json.dumps({**card, **change}).encode()).decode()
        with socket.create_connection(("127.0.0.1", port), LIMIT) as one:
            data = json.dumps({**hello(decode.ends[0]), "card": text}).encode()
            with contextlib.suppress(OSError):  # it was refused before all of it had come
                one.sendall(struct.pack(">4sI", b"kvb1", len(data)) + data)
            with contextlib.suppress(ConnectionError):
                assert json.loads(one.makefile("rb").read()[8:])["error"] == "BindError"
        assert not read and not prefill.doors[0]._clients


def test_strangers_of_one_host_have_a_share(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of too many is sent away, and somebody who says who it is stays."""
    monkeypatch.setattr(talk_module, "_STRANGERS", 4)
    prefill, decode = engines("p"), engines("d")
    port = prefill.listen()
    visit = decode.visit(0, port, 1)
    visit.link()
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(("127.0.0.1", port), LIMIT)) for _ in range(9)]
        for one in strangers[:5]:
            with contextlib.suppress(ConnectionError):
                assert one.recv(1) == b""
        assert len(prefill.doors[0]._reception._talks) <= 5
        decode.load(visit, "one")
        assert np.array_equal(prefill.tokens(), decode.tokens())


def test_who_does_not_read_is_not_waited_for(engines: Any) -> None:
    """Words about lost requests fill its socket: the conversation ends, and nobody has waited."""
    prefill, decode = engines("p"), engines("d")
    visit = decode.visit(0, prefill.listen(), 1)
    visit.link()
    [guest] = prefill.doors[0]._clients.values()
    for number in range(1 << 16):
        prefill.doors[0].tell(guest.link, f"{number}", "why" * 300)
        if not guest.talks:
            break
    left(prefill)
    assert all(why.startswith("why") for why in visit.lost().values())
    with contextlib.suppress(KvbmError):  # it finds that the conversation has ended
        visit.want(Want("nothing", is_given_up=True))
    decode.load(visit, "one")
    assert np.array_equal(prefill.tokens(), decode.tokens())


def test_names_that_one_engine_wants_refuse_no_other() -> None:
    """Each link has its share of the requests that are waited for, and gets it back."""
    first, second = (cast(Link, Hashable(name)) for name in "ab")
    told: list[Any] = []
    holds = Holds(
        lambda *_: {}, whole=("0",), layers={}, count=1, each=0, seconds=1.0, wait_seconds=LIMIT, queued=lambda: None,
        tell=lambda *what: told.append(what),
    )  # fmt: skip
    refused = 0
    for number in range(5000):
        try:
            holds.asked(Want(f"push/{number}"), first)
        except TransferError:
            refused += 1
    assert refused > 3000
    holds.asked(Want("push/mine"), second)
    holds.take_step("1", {}, (), {f"push/{number}": "why" for number in range(5000)})
    assert {name for _, name, _ in told} <= {f"push/{number}" for number in range(5000)} and not holds._waits[first]
    holds.asked(Want("push/again"), first)
    with pytest.raises(BindError, match="groups"):
        holds.asked(Want("push/parts", first=0, last=4, each=4, groups=("1",)), first)


@pytest.mark.parametrize("is_first", [True, False])
def test_another_prompt_of_the_routers_name_is_refused_at_once(is_first: bool) -> None:
    """Whoever comes first: else both wait until their time is over."""
    link, told = cast(Link, Hashable("a")), []
    holds = Holds(
        lambda *_: {}, whole=("0",), layers={}, count=1, each=0, seconds=1.0, wait_seconds=LIMIT, queued=lambda: None,
        tell=lambda *what: told.append(what),
    )  # fmt: skip
    wanted = [Want(f"push/x#tokens={number:032x}") for number in range(3)]
    if is_first:
        for want in (*wanted, Want("push/xx#tokens=0")):
            holds.asked(want, link)
    holds.begin_step({"r": Push(wanted[1].name, ([1],), 0, 4)})
    if is_first:
        assert sorted(name for _, name, why in told if "tokens" in why) == [wanted[0].name, wanted[2].name]
        assert holds._requests["r"].link is link and list(holds._wanted) == ["push/xx#tokens=0"]
    else:
        for want in (wanted[0], wanted[2]):
            with pytest.raises(TransferError, match="tokens"):
                holds.asked(want, link)
        holds.asked(wanted[1], link)
    holds.take_step("1", {}, (), {wanted[1].name: "it was aborted", "push/xx#tokens=0": "it was aborted"})
    assert not holds._named and not holds._waits
    holds.asked(wanted[0], link)  # the name may come again


class Hashable:
    """In place of a link."""

    is_closed = False

    def __init__(self, name: str) -> None:
        self.name = name


def holds_that_tell(told: list[Any], wait_seconds: float = LIMIT) -> Holds:
    return Holds(
        lambda *_: {}, whole=("0",), layers={}, count=1, each=0, seconds=1.0, wait_seconds=wait_seconds, queued=lambda: None,
        tell=lambda *what: told.append(what),
    )  # fmt: skip


def test_what_one_engine_asked_for_in_vain_is_remembered_for_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for thousands of names.  What is remembered of others stays, and others may still ask for these names."""
    hostile, other = (cast(Link, Hashable(name)) for name in "ab")
    told: list[Any] = []
    holds = holds_that_tell(told)
    holds.take_step("1", {}, (), {"push/lost": "why"})
    holds._past.add("1/0/sent", other, "")
    for turn in range(10):
        for number in range(1000):
            holds.asked(Want(f"push/{turn}-{number}"), hostile)
        with monkeypatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: 1e9)
            holds.ended()
        assert len(told) == 1000 * (turn + 1) and not holds._wanted and not holds._waits
    assert len(holds._past) == holding._MOST_PAST
    holds.asked(Want("1/0/sent"), other)  # it has been sent: asked twice
    for name, link, why in (
        ("1/0/sent", hostile, "another engine"), ("push/lost", other, "why"), ("push/9-999", hostile, "in time"),
    ):  # fmt: skip
        with pytest.raises(TransferError, match=why):
            holds.asked(Want(name), link)
    holds.asked(Want("push/9-999"), other)  # which may have been right, and too early
    assert set(holds._wanted) == {"push/9-999"}
    cast(Any, hostile).is_closed = True
    holds._past.add("push/last", other, "why")
    assert len(holds._past) == 3 and hostile not in holds._past._by_link


@pytest.mark.slow  # 0.6 s
@pytest.mark.sanitize
def test_engines_that_want_much_leave_room_for_others() -> None:
    """Another engine is waited for all the same.  Who wants most loses its newest request, and is told."""
    many = [cast(Link, Hashable(str(number))) for number in range(12)]
    told: list[Any] = []
    holds = holds_that_tell(told)
    for number in range(holding._SHARE):
        for link in many:
            with contextlib.suppress(TransferError):
                holds.asked(Want(f"push/{link!r}-{number}"), link)
    assert len(holds._wanted) == holding._MOST_WANTED and not told
    late = cast(Link, Hashable("late"))
    for number in range(100):
        holds.asked(Want(f"push/late-{number}"), late)
    assert len(holds._wanted) == holding._MOST_WANTED and len(told) == 100 and late not in {link for link, _, _ in told}
    assert sum(holds._waits.values()) == holding._MOST_WANTED and holds._waits[late] == 100
    with pytest.raises(TransferError, match="others are waited for"):
        holds.asked(Want("push/more"), max(many, key=lambda link: holds._waits[link]))


def test_nobody_is_told_while_a_lock_is_held() -> None:
    """Telling may wait for a peer that does not read."""
    first, second = (cast(Link, Hashable(name)) for name in "ab")
    found: list[tuple[bool, str]] = []
    holds = holds_that_tell([])
    holds._tell = lambda *what: found.append((holds._lock.locked(), what[-1]))
    holds.take_step("1", {}, (), {})
    holds.asked(Want("1/0/r"), first)
    holds.asked(Want("push/x"), second)
    holds.take_step("1", {"r": Hold(([],), 0, LIMIT, 0, "push/x")}, (), {})
    holds.take_step("1", {}, (), {"push/y": "why"})
    assert [is_locked for is_locked, _ in found] == [False] and "another engine" in found[0][1]


@pytest.mark.parametrize("asks_first", [True, False])
def test_other_inputs_are_refused_at_once_by_their_names(asks_first: bool) -> None:
    """Both engines know a request by the router's name, with another adapter.  Nobody waits for what cannot come."""
    link, other = (cast(Link, Hashable(name)) for name in "ab")
    told: list[Any] = []
    holds = holds_that_tell(told)
    holds.take_step("1", {}, (), {})
    ours = {"r": Hold(([],), 0, LIMIT, 0, push_name("x", "adapter=1,image=2"))}
    wanted, plain = push_name("x", "adapter=3,image=2"), push_name("x", "")
    why = "adapter: that of the request here is another"
    if asks_first:
        holds.asked(Want(wanted), link)
        holds.asked(Want(plain), other)
        holds.take_step("1", ours, (), {})
        assert {(of, name): why for of, name, why in told}.keys() == {(link, wanted), (other, plain)}
        assert any(text.startswith(why) for *_, text in told) and any(text.startswith("adapter, image: ") for *_, text in told)
    else:
        holds.take_step("1", ours, (), {})
        for name, said in ((wanted, why), (plain, "adapter, image: that")):
            with pytest.raises(TransferError, match=said):
                holds.asked(Want(name), link)
    assert not holds._wanted and not holds._waits and holds._requests["r"].link is None
    holds.asked(Want(push_name("x", "adapter=1,image=2")), link)
    holds.asked(Want(push_name("x#y", "")), link)  # another request
    assert set(holds._named) == {"push/x", "push/x%23y"}
    holds.take_step("1", {}, (), {push_name("x#y", ""): "why"})
    holds.ended()
    assert not holds._named


class Work:
    """What the threads of a door do while it is entered: calls of functions, bytes that are read and parsed, memory at its peak."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def __enter__(self) -> Work:
        self.calls = self.received = self.parsed = self.peak = 0
        receive, loads = Talk._receive, json.loads

        def received(talk: Talk) -> None:
            before = len(talk._data)
            receive(talk)
            self.received += len(talk._data) - before if _is_door() else 0

        def parsed(text: str | bytes, **more: Any) -> Any:
            self.parsed += len(text) if _is_door() else 0
            return loads(text, **more)

        self._patch.setattr(Talk, "_receive", received)
        self._patch.setattr(json, "loads", parsed)
        threading.setprofile(self._count)
        tracemalloc.start()
        return self

    def _count(self, frame: Any, event: str, argument: Any) -> None:  # noqa: ARG002
        self.calls += event in ("call", "c_call") and _is_door()

    def __exit__(self, *_: object) -> None:
        self.peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        threading.setprofile(None)  # type: ignore[arg-type]
        self._patch.undo()


def _is_door() -> bool:
    return threading.current_thread().name.startswith("kvbm door ")


def first_messages(end: Endpoint) -> dict[str, list[bytes]]:
    """What a stranger may begin with, as data to send one after the other."""
    most, card = talk_module.MOST, json.loads(end.card())
    group = card["groups"][""]

    def framed(text: bytes) -> bytes:
        return struct.pack(">4sI", b"kvb1", len(text)) + text

    def hello(**change: Any) -> bytes:
        of_card = json.dumps({**card, **change}).encode()
        told = {"engine": "e", "start": "1", "rank": 0, "world": 1, "card": base64.b64encode(of_card).decode()}
        return framed(json.dumps(told).encode())

    good = hello()
    return {
        "nothing": [], "one byte": [b"k"], "half a frame": [good[: len(good) // 2]], "a length and silence": [good[:8]],
        "a length of 4 GiB": [b"kvb1\xff\xff\xff\xff"], "another program": [b"GET / HTTP/1.1\r\n\r\n" * 1000],
        "deep nesting": [framed(b"[" * most)], "deep objects": [framed(b'{"a":' * (most // 6))],
        "huge numbers": [framed(b'{"rank":' + b"9" * (most - 9) + b"}")],
        "many large numbers": [framed(b"[" + b",".join([b"9" * 4299] * (most // 4301)) + b"]")],
        "a long string": [framed(b'{"engine":"' + b"x" * (most - 13) + b'"}')],
        "escapes": [framed(b'{"engine":"' + b"\\u1234" * (most // 6 - 9) + b'"}')],
        "repeated keys": [framed(b"{" + b",".join([b'"engine":1'] * 2000) + b"}")],
        "4,096 names": [framed(b"{" + b",".join(b'"%x":1' % n for n in range(2000)) + b"}"), framed(
            json.dumps({"want": {"name": "r", "groups": [f"{n:x}" for n in range(4000)]}}).encode())],
        "busy for ever": [framed(b'{"busy":true}') * 200] * 20,
        "600 groups": [hello(groups={f"{n}": {} for n in range(600)})],
        "600 groups that are large": [hello(groups={f"{n}": {"placement": "x" * 90} for n in range(600)})],
        "a card that is deep": [framed(json.dumps({"engine": "e", "start": "1", "rank": 0, "world": 1, "card": base64.b64encode(
            b"[" * 60_000).decode()}).encode())],
        "a model with many fields": [hello(model={f"field {n}": "x" for n in range(2000)})],
        "a wire that is none": [hello(model="other", wire="x" * 40_000)],
        "other groups": [hello(groups={"other": group})],
        "numbers in the card": [hello(sends=10**4000, takes=10**4000, world=10**4000)],
        "a world that is none": [framed(json.dumps({"engine": "e", "start": "1", "rank": 0, "world": 10**4000}).encode())],
        "an error of its own": [framed(json.dumps({"error": "BindError", "message": "\x1b" * 20_000}).encode())],
    }  # fmt: skip


@pytest.mark.parametrize("is_secret", [False, True])
def test_a_stranger_costs_little_before_it_is_refused(
    engines: Any, monkeypatch: pytest.MonkeyPatch, is_secret: bool
) -> None:
    """Whatever it says first: at most 1 MiB, and so few calls and bytes that they take no 10 ms of a processor.

    With a secret also what a member has said before.  Work is counted, and no time.  A call of Python takes about 0.1 µs, and
    parsing JSON about 10 ns a byte.
    """
    prefill = engines("p", secret=Secret(b"0123456789abcdef") if is_secret else None)
    port, end = prefill.listen(), prefill.ends[0]
    told = first_messages(engines("plain").ends[0])
    if is_secret:
        said: list[bytes] = []
        send = Talk._send
        monkeypatch.setattr(Talk, "_send", lambda talk, data, seconds: (said.append(data), send(talk, data, seconds)))
        connect("127.0.0.1", port, LIMIT, end.secret).close()
        until_left(prefill, 0)
        monkeypatch.undo()
        told["a recorded hello"], told["a recorded conversation"] = said[:1], [*said, *said]
    for name, data in told.items():
        with Work(monkeypatch) as work, socket.create_connection(("127.0.0.1", port), LIMIT) as stranger:
            with contextlib.suppress(OSError):  # it was refused before the end
                for part in data:
                    stranger.sendall(part)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(1 << 16):
                    pass  # until the door has closed it
            until_left(prefill, 0)
        assert work.peak < 1 << 20, (name, work.peak)
        assert work.received <= 3 * talk_module.MOST and work.parsed <= 2 * talk_module.MOST, (name, work.received, work.parsed)
        assert work.calls < 4000, (name, work.calls)
        assert not is_secret or not work.parsed, name
    assert not prefill.doors[0]._clients and not end.links


def test_who_is_refused_is_in_the_log_once_a_minute(
    engines: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its address and why, without control characters.  Who comes and goes, or is welcome, is not."""
    prefill, decode = engines("p"), engines("d")
    port = prefill.listen()
    decode.load(decode.visit(0, port, 1), "one")
    socket.create_connection(("127.0.0.1", port), LIMIT).close()
    for _ in range(3):
        with connect("127.0.0.1", port, LIMIT) as talk:
            talk.say(engine="e\x1b[31m", start="\n", rank=7, world=2, card="")
            with pytest.raises(BindError):
                talk.hear("card")
    until_left(prefill, 1)
    [line] = [record.getMessage() for record in caplog.records if record.name == talk_module.__name__]
    assert line.startswith("kvbm door: refused 127.0.0.1:") and "expected a rank of a world, got 7 of 2" in line
    monkeypatch.setattr(talk_module, "_LOGGED", 0.0)
    caplog.clear()
    with connect("127.0.0.1", port, LIMIT) as talk:
        talk.say(engine="e", start="1", rank=0, world=1, card="\x1b[31m\n")
        with pytest.raises(BindError):
            talk.hear("card")
    until_left(prefill, 1)
    [line] = [record.getMessage() for record in caplog.records if record.name == talk_module.__name__]
    assert line.isprintable() and "x1b" in line and "(2 more times since its last line here)" in line


def until_left(engine: Engine, count: int) -> None:
    """Wait until a door has only so many conversations."""
    reception, end = engine.doors[0]._reception, time.monotonic() + LIMIT
    while len(reception._talks) > count:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_many_hosts_fill_neither_the_log_nor_the_memory(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = talk_module.Refusals("door")
    for number in range(3 * talk_module._MOST_HOSTS):
        refusals.tell(cast(Talk, SimpleNamespace(host=f"h{number}", peer=f"h{number}:1")), "why")
    assert len(caplog.records) == len(refusals._hosts) == talk_module._MOST_HOSTS
    monkeypatch.setattr(talk_module, "_LOGGED", 0.0)
    refusals.tell(cast(Talk, SimpleNamespace(host="later", peer="later:1")), "why")
    assert len(refusals._hosts) == 1


@pytest.mark.parametrize("found", ["0.32.0", "0.32.1+cpu", "0.32.1.dev7", "0.33.0"])
def test_versions_of_vllm(found: str) -> None:
    require_version("vLLM", found, *VERSIONS)


# ---- a shared secret ---------------------------------------------------------------------------------------------------

SECRET, OTHER = Secret(b"the secret of all engines"), Secret(b"the secret of nobody else")


def test_engines_with_one_secret_meet(engines: Any) -> None:
    prefill, decode = engines("p", 2, secret=SECRET), engines("d", nt=8, secret=SECRET)
    visit = decode.visit(0, prefill.listen(), 2)
    for request in ("one", "another"):
        decode.load(visit, request)
    assert np.array_equal(prefill.tokens(), decode.tokens())
    assert not any(link.stats()["notes_wrong"] for one in (prefill, decode) for end in one.ends for link in end.links)


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (SECRET, OTHER, "the two have different secrets"), (OTHER, SECRET, "the two have different secrets"),
        (SECRET, None, "this side has a secret, and the other side none"),
        (None, SECRET, "the other side has one, and this side none"),
    ],
    ids=["other", "other way", "mine alone", "theirs alone"],
)  # fmt: skip
def test_engines_with_other_secrets_refuse_each_other_at_once(
    engines: Any, monkeypatch: pytest.MonkeyPatch, ours: Secret | None, theirs: Secret | None, said: str
) -> None:
    """Without a wait for a time limit.  A server with a secret parses nothing."""
    prefill, decode = engines("p", secret=theirs), engines("d", secret=ours)
    port = prefill.listen()
    if theirs is not None:
        monkeypatch.setattr(Talk, "_parsed", lambda *_: pytest.fail("it was parsed"))
    with pytest.raises(KvbmError, match=said):
        decode.visit(0, port, 1).link()
    assert not prefill.asked[0] and not prefill.doors[0]._clients


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\n\r\n", struct.pack(">4sI", b"kvb1", 15) + b'{"engine": "e"}', b"kvbs" + bytes(60), b"k", b""],
    ids=str,
)
def test_garbage_before_the_proof_is_not_parsed(engines: Any, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    prefill, decode = engines("p", secret=SECRET), engines("d", secret=SECRET)
    port, parsed, calls = prefill.listen(), Talk._parsed, []
    monkeypatch.setattr(Talk, "_parsed", lambda talk, text: calls.append(text) or parsed(talk, text))
    with socket.create_connection(("127.0.0.1", port), LIMIT) as one:
        one.sendall(said)
        one.shutdown(socket.SHUT_WR)
        heard = one.makefile("rb").read()
    assert len(heard) in (40, 80) and heard.startswith(b"kvbs") and not calls
    decode.load(decode.visit(0, port, 1), "one")
    assert calls and np.array_equal(prefill.tokens(), decode.tokens())


class Middle:
    """A man in the middle of connections to a port: it records what both sides say, and may change it."""

    def __init__(self, port: int, change: Any = None) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port, self._to, self._change = self.server.getsockname()[1], port, change
        self.said: list[list[bytes]] = []  # connection → what the client said
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.server.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                self.said.append([])
                for ends in ((near, far, self.said[-1]), (far, near, None)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, record: list[bytes] | None) -> None:
        number = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if record is not None:
                    record.append(data)
                    parts = self._change(number, data) if self._change else [data]
                    number += 1
                else:
                    parts = [data]
                for part in parts:
                    target.sendall(part)
            target.shutdown(socket.SHUT_WR)

    def __enter__(self) -> Middle:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()


def test_a_recorded_session_is_of_no_use(engines: Any) -> None:
    prefill, decode = engines("p", secret=SECRET), engines("d", secret=SECRET)
    with Middle(prefill.listen()) as middle:
        decode.load(decode.visit(0, middle.port, 1), "one")
        asked = [*prefill.asked[0]]
        with socket.create_connection(("127.0.0.1", prefill.doors[0].port), LIMIT) as thief:
            thief.sendall(b"".join(middle.said[0]))
            thief.shutdown(socket.SHUT_WR)
            heard = thief.makefile("rb").read()
    assert len(heard) == 80 and heard[40:45] == b"kvbp\x01"  # refused
    assert asked == prefill.asked[0] == [("one", False)]


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_messages_that_a_man_in_the_middle_changes(engines: Any) -> None:
    """Changed, said twice, left out: the want does not arrive.  The control, unchanged, does."""
    changes: dict[str, Any] = {
        "flipped": lambda data: [flipped(data, len(data) // 2)], "code": lambda data: [flipped(data, len(data) - 1)],
        "twice": lambda data: [data, data], "short": lambda data: [data[:-1]], "nothing": lambda data: [data],
    }  # fmt: skip
    for what, change in changes.items():
        prefill, decode = engines(f"p-{what}", secret=SECRET), engines(f"d-{what}", secret=SECRET)

        def apply(_: int, data: bytes, change: Any = change) -> list[bytes]:
            return change(data) if b'"want"' in data else [data]  # type: ignore[no-any-return]

        with Middle(prefill.listen(), apply) as middle:
            visit = decode.visit(0, middle.port, 1)
            visit.link()
            if what in ("nothing", "twice"):  # the first of two is right; the second ends the conversation
                visit.want(Want("one", is_given_up=True))
                if what == "twice":
                    with pytest.raises(KvbmError):
                        visit._talks[0].hear()
            else:
                visit._talks[0].say(want={"name": "one", "is_given_up": True})
                if what == "short":
                    visit._talks[0]._socket.shutdown(socket.SHUT_WR)
                with pytest.raises(KvbmError):
                    visit._talks[0].hear()
        assert prefill.asked[0] == ([("one", True)] if what in ("nothing", "twice") else [])


def test_notes_of_somebody_else_are_not_read(engines: Any) -> None:
    """By a wire, in the name of the peer: they are counted, and change nothing."""
    prefill, decode = engines("p", secret=SECRET), engines("d", secret=SECRET)
    visit = decode.visit(0, prefill.listen(), 1)
    decode.load(visit, "one")
    [end], link = decode.ends, visit.link()
    [(peer, (sealed, _))] = end._codes.items()
    for note in (b"", notes.write(notes.Stop(1, 1, True, True, "why")), bytes(60)):
        end.call(lambda note=note: end.wire.note(peer, note))
    known = sealed.closed(notes.write(notes.Stopped(0, 0, False)))
    for _ in range(2):  # the second one is a repetition
        end.call(lambda: end.wire.note(peer, known))
    theirs = prefill.ends[0].links[0]
    stop = time.monotonic() + LIMIT
    while theirs.stats()["notes_wrong"] < 4:
        assert time.monotonic() < stop
        time.sleep(0.001)
    decode.load(visit, "two")
    assert theirs.stats()["notes_wrong"] == 4 and not link.lost and np.array_equal(prefill.tokens(), decode.tokens())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "8.8.8.8"])
def test_a_door_without_a_secret_is_not_open_to_all(engines: Any, host: str) -> None:
    plain, safe = engines("p"), engines("s", secret=SECRET)
    with pytest.raises(BindError, match=r"without a secret: it is (all addresses|a public address).*secret_file"):
        Door(plain.links[0], host, 0, print)
    if host == "0.0.0.0":
        Door(plain.links[0], host, 0, print, is_insecure=True).close()
        Door(safe.links[0], host, 0, print).close()
