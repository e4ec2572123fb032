"""`nixl_files`, `nixl_objects`: files and objects as peers, by NIXL's backends POSIX and OBJ: a put writes, a get reads."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .._arguments import quoted, require_a
from ..errors import BindError, PeerLostError, TransferError, TransferTimeoutError
from ._nixl import Reached, Transfers
from .protocol import Card, Op, Slab, Slice, deadline

#: Wires whose `close` has not returned: transfers may still use their slabs, so their memory is kept.
_UNSURE: set[_Storage] = set()


def nixl_files(folder: Path | str, *, drop_seconds: float = 5.0) -> _Files:
    """A wire with the files of a folder as peers.

    ``file(name, nbytes)`` returns the card of a file; pass it to `Wire.connect`.

    Parameters
    ----------
    folder : Path | str
    drop_seconds : float
        How long `Wire.drop` and `Wire.close` wait for running transfers.

    Notes
    -----
    Files have no notes, so a put accepts none.  When the `Op` of a put is done, the bytes are in the page cache, not yet on the
    disk.  Dropping a peer closes the file.
    """
    try:
        path = Path(folder)
    except Exception:  # the object's own code
        raise BindError(f"folder: expected a path, got {quoted(folder)}") from None
    return _Files(path, drop_seconds)


def nixl_objects(
    bucket: str, *, prefix: str = "", endpoint: str = "", drop_seconds: float = 5.0, **parameters: str
) -> _Objects:
    """A wire with the objects of a bucket in an S3 store as peers.

    ``object(name, nbytes)`` returns the card of an object; pass it to `Wire.connect`.

    Parameters
    ----------
    bucket : str
    prefix : str
        Before each name, as it is: ``"cache/"``.
    endpoint : str
        URL of a store other than AWS: ``"http://127.0.0.1:9000"``.
    drop_seconds : float
        How long `Wire.drop` and `Wire.close` wait for running transfers.
    **parameters : str
        Of NIXL's backend: ``access_key``, ``secret_key``, ``session_token``, ``region``, ``ca_bundle`` and others.  The AWS SDK
        takes the others from its environment variables and files.

    Notes
    -----
    S3 cannot write a part of an object: a put writes all of it, and replaces an older one.  A get reads any part.  Objects have
    no notes.  If a transfer fails, the peer is lost, for example after a get of an object that does not exist, or is shorter than
    its card says: call ``object`` again for another try.

    S3 answers a read across the end of an object with fewer bytes, and NIXL does not report it.  So a get also reads its last
    byte alone, which fails then.  What else a wrong answer of a store writes is found by digests, as those of chunks.

    NIXL cannot end a transfer, and the AWS SDK repeats one that fails.  If a store does not answer, that ends after two minutes;
    until then ``drop`` raises `TransferTimeoutError`.
    """
    return _Objects(bucket, prefix, endpoint, drop_seconds, parameters)


@dataclass
class _Stored(Reached):
    """A file or an object: the number that NIXL has for it, and what `Agent.deregister` takes."""

    number: int = -1
    memory: Any = None


class _Storage(Transfers[_Stored]):
    """Peers that hold bytes, and have no notes."""

    #: NIXL's name for the kind of memory, and what one peer is called in messages.
    kind = what = ""
    #: Bytes of a transfer, at most.
    most = 2**63

    def __init__(self, name: str, backend: str, drop_seconds: float, parameters: dict[str, str] | None = None) -> None:
        super().__init__(name, backend, parameters)
        self._drop_seconds = drop_seconds

    def put(self, peer: str, local: Slice, remote: Slice, note: bytes = b"") -> Op:
        return self._transfer("WRITE", peer, local, remote, note)

    def get(self, peer: str, local: Slice, remote: Slice) -> Op:
        return self._transfer("READ", peer, local, remote)

    def note(self, peer: str, note: bytes) -> None:
        self._peer(peer)
        self._check_note(note)
        raise BindError(f"{peer}: {self.what} reads no notes")

    def poll(self) -> list[tuple[str, bytes]]:
        for far in self._peers.values():
            self._settled(far)
        return []

    def drop(self, peer: str, seconds: float | None = None) -> None:
        if peer in self._peers:
            self._end([self._peers[peer]], "it was dropped", seconds)

    def close(self) -> None:
        self.is_closed = True
        _UNSURE.add(self)
        self._end(list(self._peers.values()), "this side is closed")
        _UNSURE.discard(self)
        if self._memory is not None:
            self._agent.deregister(self._memory)
            self._memory = None

    def _end(self, peers: list[_Stored], why: str, seconds: float | None = None) -> None:
        """End these peers, each as soon as none of its transfers is running."""
        seconds = self._drop_seconds if seconds is None else seconds
        open_ = [far for far in peers if far.number >= 0]
        for far in open_:
            far.lost = far.lost or why
        late = deadline(seconds)
        while open_:
            is_late = late()
            for far in [far for far in open_ if self._settled(far)]:
                self._agent.deregister(far.memory)
                self._release(far.number)
                far.number = -1
                open_.remove(far)
            if open_ and is_late:
                raise TransferTimeoutError(
                    f"{self.name}: transfers of {', '.join(far.card.name for far in open_)} still run after "
                    f"{seconds} s; they may still read and write the slab: do not reuse it, and call this again"
                )
            time.sleep(1e-4)

    def _made(self, name: str, nbytes: int) -> bytes:
        """A card with a token of its own.  What is stored has no address."""
        return Card(f"{name}#{secrets.token_hex(4)}", Slab(1, nbytes)).write(self.transport)

    def _connected(self, peer_card: Card, number: int, key: str = "") -> str:
        try:
            region = [(0, peer_card.slab.nbytes, number, key)]
            memory = self._agent.call("register", self._agent.nixl.register_memory, region, self.kind)
        except TransferError:
            self._release(number)
            raise
        self._peers[peer_card.name] = _Stored(peer_card, number=number, memory=memory)
        return peer_card.name

    def _transfer(self, what: str, peer: str, local: Slice, remote: Slice, note: bytes = b"") -> Op:
        far = self._check(peer, local, remote, note)
        if note:
            raise BindError(f"{peer}: {self.what} reads no notes")
        if local[1] > self.most:
            raise BindError(f"{peer}: expected a slice of at most {self.most:,} bytes, got {local[1]:,}")
        return self._start(what, far, local, (self.kind, (remote[0], remote[1], far.number)), self.name)

    def _release(self, number: int) -> None:
        """The number is no longer used."""


class _Files(_Storage):
    transport, kind, what = "nixl/files", "FILE", "a file"
    most = 0x7FFFF000  # of a call of Linux

    def __init__(self, folder: Path, drop_seconds: float) -> None:
        super().__init__("files", "POSIX", drop_seconds)
        self._folder = folder

    def file(self, name: str, nbytes: int) -> bytes:
        """The card of a file in the folder.  The file is created if it does not exist, and extended if it is shorter."""
        card = self._made(name, nbytes)
        try:
            number = os.open(self._path(Card.read(card, self.transport)), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                if os.fstat(number).st_size < nbytes:
                    os.truncate(number, nbytes)
            finally:
                os.close(number)
        except OSError as error:
            raise BindError(f"file {name}: {error}") from None
        return card

    def connect(self, card: bytes) -> str:
        peer_card = self._read(card)
        if peer_card.name in self._peers:
            return peer_card.name
        path = self._path(peer_card)
        try:
            number = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise BindError(f"card of {peer_card.name}: {error}") from None
        if os.fstat(number).st_size < peer_card.slab.nbytes:
            os.close(number)
            raise BindError(f"card of {peer_card.name}: {path} is shorter than {peer_card.slab.nbytes} bytes")
        return self._connected(peer_card, number)

    def _release(self, number: int) -> None:
        os.close(number)

    def _path(self, card: Card) -> Path:
        name = card.name.rpartition("#")[0]
        if not name or name.startswith(".") or "/" in name:
            raise BindError(f"card of {card.name}: expected the name of a file in {self._folder}")
        return self._folder / name


class _Objects(_Storage):
    transport, kind, what = "nixl/objects", "OBJ", "an object"

    def __init__(
        self, bucket: str, prefix: str, endpoint: str, drop_seconds: float, parameters: dict[str, str]
    ) -> None:
        for what, text in (("bucket", bucket), ("prefix", prefix), ("endpoint", endpoint)):
            require_a(str, what, text, "a text")
        given = {"bucket": bucket, **parameters}
        if endpoint:
            try:
                url = urlsplit(endpoint)
            except ValueError as error:
                raise BindError(f"endpoint: expected http://HOST:PORT, got {quoted(endpoint, 140)} ({error})") from None
            if url.scheme not in ("http", "https") or not url.netloc or url.path.strip("/") or url.query or url.fragment:
                raise BindError(f"endpoint: expected http://HOST:PORT or https://HOST:PORT, got {quoted(endpoint, 140)}")
            # Names of buckets before a store's own name need a name server that knows them.
            given = {"endpoint_override": url.netloc, "scheme": url.scheme, "use_virtual_addressing": "false", **given}
        _require_plain(f"{prefix}name", "prefix and name")
        super().__init__("objects", "OBJ", drop_seconds, given)
        self._bucket, self._prefix = bucket, prefix
        self._numbers = itertools.count()

    def object(self, name: str, nbytes: int) -> bytes:
        """The card of an object of the bucket, whether it exists or not."""
        self._key(f"{name}#")
        return self._made(name, nbytes)

    def connect(self, card: bytes) -> str:
        peer_card = self._read(card)
        if peer_card.name in self._peers:
            return peer_card.name
        return self._connected(peer_card, next(self._numbers), self._key(peer_card.name))

    def put(self, peer: str, local: Slice, remote: Slice, note: bytes = b"") -> Op:
        far = self._check(peer, local, remote, note)
        if tuple(remote) != (0, far.card.slab.nbytes):
            raise BindError(
                f"{peer}: a put writes a whole object: expected slice (0, {far.card.slab.nbytes}), got {tuple(remote)}; "
                "give each chunk an object"
            )
        return super().put(peer, local, remote, note)

    def get(self, peer: str, local: Slice, remote: Slice) -> Op:
        ops = [super().get(peer, local, remote)]
        if local[1] > 1:
            here, there = (Slice(offset + nbytes - 1, 1) for offset, nbytes in (local, remote))
            with contextlib.suppress(PeerLostError):  # the first one may still write: `query` says when it has ended
                ops.append(super().get(peer, here, there))
        return _All(self, self._peers[peer], ops, 1 + (local[1] > 1))

    def _key(self, name: str) -> str:
        """The object's key, from the name of its peer."""
        key = self._prefix + name.rpartition("#")[0]
        _require_plain(key, "object")
        return key

    def _why(self, peer: str) -> str:
        return (
            f" of object {self._key(peer)!r} in bucket {self._bucket!r}; NIXL does not say why: does it exist, has it "
            f"{self._peers[peer].card.slab.nbytes} bytes, and may this process read and write it?"
        )


class _All:
    """Some transfers of one peer.  If one fails, the error is raised when no other one is running."""

    def __init__(self, wire: _Objects, far: _Stored, ops: list[Op], count: int) -> None:
        self._wire, self._far, self._ops, self._count = wire, far, ops, count

    def query(self) -> bool:
        self._wire._settled(self._far)
        if any(op in self._far.ops for op in self._ops):
            return False
        if len(self._ops) < self._count:  # one of them could not start
            raise PeerLostError(f"{self._far.card.name} is lost: {self._far.lost}", peer=self._far.card.name)
        return all(op.query() for op in self._ops)


def _require_plain(key: str, what: str) -> None:
    """Clients and stores remove empty parts and dots from paths: two names would be one object, or one of another bucket."""
    if any(part in ("", ".", "..") for part in key.split("/")):
        raise BindError(f"{what} {quoted(key, 140)}: expected no empty part, no '.' and no '..' between slashes")
