"""`nixl_files`: files as peers, by NIXL's POSIX backend: a put writes to a file, and a get reads from it."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BindError, TransferError
from .agents import Reached, Transfers
from .protocol import Card, Op, Slab, Slice

__all__ = ["nixl_files"]


def nixl_files(folder: Path | str) -> _Files:
    """A wire whose peers are the files of a folder.

    Call ``file(name, nbytes)`` for the card of one, and `Wire.connect` with it.

    Notes
    -----
    Files read and send no notes: a put takes none, and its `Op` says when the bytes are written.  They are in the page cache
    then, not yet on the disk.  Dropping a peer closes the file.
    """
    return _Files(Path(folder))


@dataclass
class _File(Reached):
    """An open file."""

    number: int = -1
    memory: Any = None


class _Files(Transfers[_File]):
    transport = "nixl/files"

    def __init__(self, folder: Path) -> None:
        super().__init__("files", "POSIX")
        self._folder = folder

    def card(self) -> bytes:
        return Card(self.name, self.slab).write(self.transport)

    def file(self, name: str, nbytes: int) -> bytes:
        """The card of a file of the folder, which is made if it is not there, and made longer if it is shorter."""
        card = Card(f"{name}#{secrets.token_hex(4)}", Slab(1, nbytes)).write(self.transport)  # a file has no address
        number = os.open(self._path(Card.read(card, self.transport)), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            if os.fstat(number).st_size < nbytes:
                os.truncate(number, nbytes)
        finally:
            os.close(number)
        return card

    def connect(self, card: bytes) -> str:
        held = self._read(card)
        if held.name in self._peers:
            return held.name
        path = self._path(held)
        try:
            number = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise BindError(f"card of {held.name}: {error}") from None
        if os.fstat(number).st_size < held.slab.nbytes:
            os.close(number)
            raise BindError(f"card of {held.name}: {path} is shorter than {held.slab.nbytes} bytes")
        try:
            region = [(0, held.slab.nbytes, number, "")]
            memory = self._agent.call("register", self._agent.nixl.register_memory, region, "FILE")
        except TransferError:
            os.close(number)
            raise
        self._peers[held.name] = _File(held, number=number, memory=memory)
        return held.name

    def put(self, peer: str, local: Slice, remote: Slice, note: bytes = b"") -> Op:
        return self._transfer("WRITE", peer, local, remote, note)

    def get(self, peer: str, local: Slice, remote: Slice) -> Op:
        return self._transfer("READ", peer, local, remote)

    def note(self, peer: str, note: bytes) -> None:
        self._peer(peer)
        self._check_note(note)
        raise BindError(f"{peer}: a file reads no notes")

    def poll(self) -> list[tuple[str, bytes]]:
        for far in self._peers.values():
            self._settled(far)
        return []

    def drop(self, peer: str) -> None:
        far = self._peers.get(peer)
        if far is None or far.number < 0:
            return
        far.lost = far.lost or "it was dropped"
        while not self._settled(far):  # the disk ends each
            pass
        self._agent.deregister(far.memory)
        os.close(far.number)
        far.number = -1

    def close(self) -> None:
        for peer in self._peers:
            self.drop(peer)
        if self._memory is not None:
            self._agent.deregister(self._memory)
            self._memory = None

    def _transfer(self, what: str, peer: str, local: Slice, remote: Slice, note: bytes = b"") -> Op:
        far = self._check(peer, local, remote, note)
        if note:
            raise BindError(f"{peer}: a file reads no notes")
        return self._start(what, far, local, ("FILE", (remote[0], remote[1], far.number)), self.name)

    def _path(self, card: Card) -> Path:
        name = card.name.rpartition("#")[0]
        if not name or name.startswith(".") or "/" in name:
            raise BindError(f"card of {card.name}: expected a file of {self._folder}, by its name")
        return self._folder / name
