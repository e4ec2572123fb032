"""A shared secret, without sockets: who knows it is let in, and nobody else, whatever is sent, changed, repeated or reflected."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from kvbm import BindError
from kvbm.errors import AuthenticationError
from kvbm.link.secret import FRAME, NOTE, PLAIN, Channel, Handshake, Notes, Secret, Session, open_to_all

SECRET = Secret(b"0123456789abcdef")
OTHER = Secret(b"0123456789abcdeg")


def sides(client: Secret = SECRET, server: Secret = SECRET) -> tuple[Handshake, Handshake]:
    return Handshake(client, is_server=False), Handshake(server, is_server=True)


def fed(side: Handshake, data: bytes) -> bytes:
    """What a side answers to bytes, of which it takes what it wants."""
    said = b""
    while data and side.wants:
        part, data = data[: side.wants], data[side.wants :]
        said += side.take(part)
    return said


def shaken(client: Handshake, server: Handshake) -> tuple[Session, Session]:
    fed(server, client.begins)
    fed(client, fed(server, fed(client, server.begins)))
    return client.session(), server.session()


def test_who_knows_the_secret_comes_in() -> None:
    client, server = shaken(*sides())
    for one, other in ((client, server), (server, client)):
        for message in (b"", b"one", b"one", b"x" * 10000):
            assert other.incoming.is_next(one.outgoing.code(message), message)


@pytest.mark.parametrize(("mine", "theirs"), [(SECRET, OTHER), (OTHER, SECRET), (SECRET, Secret(b"0123456789abcdef0"))])
def test_another_secret_is_refused_on_both_sides(mine: Secret, theirs: Secret) -> None:
    client, server = sides(mine, theirs)
    fed(server, client.begins)
    proof = fed(client, server.begins)
    with pytest.raises(AuthenticationError, match="does not know this side's secret"):
        fed(server, proof)
    with pytest.raises(AuthenticationError, match="different secrets"):
        fed(client, server.last_words)
    for side in (client, server):
        assert side.wants
        with pytest.raises(BindError, match="has not ended"):
            side.session()


def test_a_server_proves_it_too() -> None:
    """Who only says that the client is right is not believed."""
    client, server = sides()
    proof = fed(client, server.begins)
    for answer in (proof, bytes(FRAME), proof[:5] + os.urandom(FRAME - 5), b"kvbp\0\0\0\0" + bytes(32)):
        client, server = sides()
        fed(client, server.begins)
        with pytest.raises(AuthenticationError, match="does not know this side's secret"):
            fed(client, answer)


@pytest.mark.parametrize("is_server", [False, True])
def test_no_secret_on_the_other_side_is_known_from_four_bytes(is_server: bool) -> None:
    side = Handshake(SECRET, is_server=is_server)
    with pytest.raises(AuthenticationError, match="the other side none"):
        side.take(PLAIN)
    assert side.last_words == b""


@pytest.mark.parametrize("is_server", [False, True])
def test_what_is_reflected_is_refused(is_server: bool) -> None:
    """A side's own hello, and its own proof, which is of the other role."""
    side = Handshake(SECRET, is_server=is_server)
    with pytest.raises(AuthenticationError, match="reflected"):
        fed(side, side.begins)
    turned = side.begins[:5] + (b"C" if is_server else b"S") + side.begins[6:]  # with the other role written on it
    with pytest.raises(AuthenticationError, match="reflected"):
        fed(side_again(side), turned)


def side_again(side: Handshake) -> Handshake:
    """The same side, with the same nonce, at its beginning."""
    again = Handshake(SECRET, is_server=side._is_server)
    again.begins = side.begins
    return again


def test_a_proof_is_of_no_use_to_its_own_side() -> None:
    """Two conversations with one server: what it says in one is no proof in the other, nor the client's own in its place."""
    client, server = sides()
    fed(server, client.begins)
    proof = fed(client, server.begins)
    with pytest.raises(AuthenticationError):
        fed(client, proof)
    answer = fed(server, proof)
    again = Handshake(SECRET, is_server=True)
    fed(again, client.begins)
    with pytest.raises(AuthenticationError):
        fed(again, answer)


def test_a_recorded_conversation_cannot_be_played_again() -> None:
    client, server = sides()
    fed(server, client.begins)
    proof = fed(client, server.begins)
    answer = fed(server, proof)
    again = Handshake(SECRET, is_server=True)
    fed(again, client.begins)
    with pytest.raises(AuthenticationError):
        fed(again, proof)
    fresh = Handshake(SECRET, is_server=False)
    fed(fresh, server.begins)
    with pytest.raises(AuthenticationError):
        fed(fresh, answer)


def test_any_changed_bit_of_the_handshake_is_refused() -> None:
    """On either way: the hellos are part of the proofs."""
    for frame in range(4):
        for bit in range(8 * FRAME):
            with pytest.raises(AuthenticationError):
                shaken_with(frame, bit)


def shaken_with(frame: int, bit: int) -> None:
    """A handshake of which one bit of one frame changes on its way."""
    client, server = sides()

    def sent(data: bytes, number: int) -> bytes:
        changed = bytearray(data)
        changed[bit // 8] ^= (number == frame) << bit % 8
        return bytes(changed)

    fed(server, sent(client.begins, 0))
    proof = fed(client, sent(server.begins, 1))
    fed(client, sent(fed(server, sent(proof, 2)), 3))


def test_a_man_in_the_middle_cannot_swap_parts_of_two_conversations() -> None:
    """Hellos, proofs, and messages."""
    (c1, s1), (c2, s2) = sides(), sides()
    fed(s1, c1.begins), fed(s2, c2.begins)
    p1, p2 = fed(c1, s1.begins), fed(c2, s2.begins)
    with pytest.raises(AuthenticationError):
        fed(s1, p2)
    with pytest.raises(AuthenticationError):
        fed(c1, fed(s2, p2))
    (c1, s1), (c2, s2) = sides(), sides()
    fed(s1, c2.begins)  # it turned the first hellos around
    with pytest.raises(AuthenticationError):
        fed(s1, fed(c1, s1.begins))
    one, other = shaken(*sides()), shaken(*sides())
    assert not one[1].incoming.is_next(other[0].outgoing.code(b"a"), b"a")
    assert p1 != p2


@pytest.mark.parametrize("garbage", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(400), b"\x16\x03\x01" * 50, b'{"engine": 1}' * 9])
def test_garbage_is_refused(garbage: bytes) -> None:
    side = Handshake(SECRET, is_server=True)
    if garbage:
        with pytest.raises(AuthenticationError, match="another program"):
            fed(side, garbage)
    with pytest.raises(BindError, match="expected 4 bytes"):
        Handshake(SECRET, is_server=True).take(garbage[:3])


# ---- messages --------------------------------------------------------------------------------------------------------


def channels() -> tuple[Channel, Channel]:
    return Channel(b"k" * 32), Channel(b"k" * 32)


def test_messages_that_are_lost_repeated_swapped_or_changed() -> None:
    said, _ = channels()
    codes = [said.code(text) for text in (b"a", b"b", b"c")]
    assert not channels()[1].is_next(codes[1], b"b")  # the first one is missing
    heard = channels()[1]
    assert heard.is_next(codes[0], b"a") and not heard.is_next(codes[0], b"a")  # repeated
    heard = channels()[1]
    assert heard.is_next(codes[0], b"a") and not heard.is_next(codes[2], b"c")  # swapped
    for bit in range(8 * 32):
        changed = bytearray(codes[0])
        changed[bit // 8] ^= 1 << bit % 8
        assert not channels()[1].is_next(bytes(changed), b"a")
    for text in (b"", b"b", b"aa"):
        assert not channels()[1].is_next(codes[0], text)


def test_directions_have_different_keys() -> None:
    client, _ = shaken(*sides())
    code = client.outgoing.code(b"a")
    assert not client.incoming.is_next(code, b"a")


def test_notes_may_be_lost_and_are_taken_once_and_in_order() -> None:
    there, back = Notes.between(SECRET, b"a" * 32, b"b" * 32), Notes.between(SECRET, b"b" * 32, b"a" * 32)
    heard = Notes.between(SECRET, b"a" * 32, b"b" * 32)
    sent = [there.closed(text) for text in (b"0", b"", b"2", b"3")]
    assert [len(note) for note in sent] == [NOTE + 1, NOTE, NOTE + 1, NOTE + 1]
    assert heard.opened(sent[0]) == b"0" and heard.opened(sent[2]) == b"2"
    for wrong in (sent[2], sent[1], sent[0], back.closed(b"3"), b"", sent[3][:-1], sent[3] + b"x", bytes(NOTE), b"3"):
        with pytest.raises(AuthenticationError, match="note"):
            heard.opened(wrong)
    with pytest.raises(AuthenticationError):
        Notes.between(OTHER, b"a" * 32, b"b" * 32).opened(sent[3])
    assert heard.opened(sent[3]) == b"3"  # what was wrong before does not count


# ---- cards -----------------------------------------------------------------------------------------------------------


def test_cards_are_opened_by_who_has_the_secret() -> None:
    card = SECRET.sign(b'{"a": 1}')
    assert Secret.opened(card, SECRET) == b'{"a": 1}' and Secret.opened(b"{}", None) == b"{}"
    for at in range(len(card)):
        changed = bytearray(card)
        changed[at] ^= 1
        with pytest.raises(AuthenticationError):
            Secret.opened(bytes(changed), SECRET)
    for data, secret, said in (
        (card, OTHER, "another secret"), (card[:-1], SECRET, "another secret"), (card + b" ", SECRET, "another secret"),
        (card, None, "the other side has a secret, and this side none"), (b"{}", SECRET, "this side has a secret, and the other"),
        (b"", SECRET, "the other side none"), (card[:20], SECRET, "another secret"),
    ):  # fmt: skip
        with pytest.raises(AuthenticationError, match=said):
            Secret.opened(data, secret)


# ---- files and addresses ---------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "secret"
    found.write_bytes(b"0123456789abcdef \r\n\t")
    found.chmod(0o600)
    return found


def test_a_secret_is_read_without_the_white_space_at_its_end(file: Path) -> None:
    assert Secret.read(file).code(b"x") == Secret.read(str(file)).code(b"x") == SECRET.code(b"x")
    file.chmod(0o400)
    Secret.read(file)
    link = file.with_name("link")
    link.symlink_to(file)
    assert Secret.read(link).code(b"x") == SECRET.code(b"x")


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620, 0o602, 0o610, 0o644, 0o666, 0o777])
def test_a_file_that_others_can_read_or_write_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(BindError, match=rf"secret_file .*mode 600\), got {mode:03o}"):
        Secret.read(file)


def test_a_file_of_another_user_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = file.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner != 0:
        with pytest.raises(BindError, match="it belongs to"):
            Secret.read(file)
        return
    os.chown(file, 12345, -1)
    with pytest.raises(BindError, match="belongs to 12345"):
        Secret.read(file)


@pytest.mark.parametrize("held", [b"", b"\n" * 40, b"0123456789abcde\n", b"x" * 4097])
def test_secrets_that_are_too_short_or_too_long(file: Path, held: bytes) -> None:
    file.write_bytes(held)
    with pytest.raises(BindError, match="expected a secret of 16 to 4096 bytes"):
        Secret.read(file)


def test_files_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    wrong: list[Any] = [tmp_path / "missing", tmp_path, tmp_path / "fifo", None, 7, b"x", "a\0b"]
    for path in wrong:
        with pytest.raises(BindError, match="secret_file"):
            Secret.read(path)


def test_a_secret_is_not_shown_and_not_pickled(file: Path) -> None:
    secret = Secret.read(file)
    assert "0123" not in repr(secret) + str(secret)
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(secret)
    with pytest.raises(BindError) as found:
        Secret(b"sesame")
    assert "sesame" not in str(found.value)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1", ""), ("::1", ""), ("10.1.2.3", ""), ("192.168.0.1", ""), ("172.16.0.1", ""), ("169.254.1.1", ""),
        ("100.64.0.1", ""), ("fe80::1%eth0", ""), ("fd00::1", ""), ("::ffff:10.0.0.1", ""),
        ("0.0.0.0", "all addresses"), ("::", "all addresses"), ("::ffff:0.0.0.0", "all addresses"),
        ("8.8.8.8", "public"), ("172.32.0.1", "public"), ("2001:4860:4860::8888", "public"), ("::ffff:8.8.8.8", "public"),
    ],
)  # fmt: skip
def test_addresses_for_servers_without_a_secret(address: str, why: str) -> None:
    assert why in open_to_all(address) and bool(why) == bool(open_to_all(address))
