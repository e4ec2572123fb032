"""Notes through shared memory, for peers on one host: neither side makes a call of the operating system for a note."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from .. import _core
from ..errors import BindError
from ..system.memory_files import memory_file, open_memory_file

#: Sent by the other wire: this side's later notes are in its box.
MARKER: Final = b"kvbm mail 1 \x00\xc4\x8f\x1d\x93\x62\xe0\x5b"

#: Bytes at the end of a box that say whose it is: a descriptor of one that is closed may be another's the next moment.
_OWNER: Final = 16

_BOX: Final = -(-(_core.MAIL_BYTES + _OWNER) // mmap.PAGESIZE) * mmap.PAGESIZE


class Lane:
    """The boxes of one connection: this side writes its own, and the peer reads it.

    Notes keep their order.  The last note that goes by the other wire (`send`) is `MARKER`; a side reads the peer's box
    after that has come.  It is repeated until the peer has taken a note: if it were lost, all notes after it would be.
    After the first put with a note, all notes go by the other wire again: only that delivers them in the order of its
    puts.
    """

    def __init__(self, own: str, peer: str, send: Callable[[bytes], None]) -> None:
        self.file = memory_file("mail", _BOX)  # this side's box, which the peer opens
        self.mail: _core.Mail | None = None  # both boxes, after the peer's was opened
        self._own, self._send = mmap.mmap(self.file, _BOX), send
        self._own[-_OWNER:], self._expected = _owner(own, peer), _owner(peer, own)
        self._pid = os.getpid()
        self._far: mmap.mmap | None = None
        self.takes = False  # the peer's notes come through its box
        self._posts = self._is_ended = False
        self._waiting: deque[bytes] = deque()  # for a free slot

    def open(self, pid: int, number: int) -> None:
        """Open the peer's box: a memory file of a process, by its number there.  Raises `BindError` for another end's box."""
        file = open_memory_file(pid, number, "mail", _BOX)
        try:
            self._far = mmap.mmap(file, _BOX, access=mmap.ACCESS_READ)
        finally:
            os.close(file)
        if self._far[-_OWNER:] != self._expected:
            raise BindError("its box of notes is another end's")
        own, far = (np.frombuffer(pages, np.uint8) for pages in (self._own, self._far))
        self.mail = _core.Mail(int(own.ctypes.data), int(far.ctypes.data), (own, far))

    def note(self, note: bytes) -> None:
        """Send a note: through the box if the peer reads it, else by the other wire."""
        if self._is_ended or self.mail is None or not (self._posts or self.mail.is_read):
            self._send(note)
            return
        if not self.mail.is_taken:
            self._send(MARKER)
        self._posts = True
        self._waiting.append(note)
        self._flush()

    def post(self, note: bytes) -> bool:
        """Send a note through the box.  False: it was not sent.  Any thread may call it, also while another one uses the lane.

        A child of this process has the same box, and would overwrite its notes: it sends nothing.
        """
        mail = self.mail
        return self._posts and not self._waiting and mail is not None and os.getpid() == self._pid and mail.post(note)

    def expect(self, copies: _core.Foreseen) -> None:
        """Begin copies with one of the next notes in the peer's box.  Any thread may call it, but none of a child."""
        mail = self.mail
        if self.takes and mail is not None and os.getpid() == self._pid:
            mail.expect(copies)

    def end(self) -> None:
        """Send all later notes by the other wire."""
        self._posts, self._is_ended = False, True
        while self._waiting:
            self._send(self._waiting.popleft())

    def heard(self, note: bytes) -> bool:
        """True for a note of the other wire that only says that later ones are in the peer's box."""
        if note == MARKER and self.mail is not None:
            self.takes = True
            return True
        return False

    @property
    def has_note(self) -> bool:
        """True if a note of the peer waits in its box."""
        return self.takes and self.mail is not None and self.mail.has_note

    def take(self) -> list[bytes]:
        """The notes in the peer's box: all, but for what it posts meanwhile.  Raises `BindError` if it holds something else."""
        found: list[bytes] = []
        if self._waiting:
            self._flush()
        if self.takes and self.mail is not None:
            while len(found) < _core.MAIL_SLOTS and (note := self.mail.take()) is not None:
                found.append(note)
        return found

    def _flush(self) -> None:
        """Post the notes that wait for a free slot."""
        while self._waiting and self.mail is not None and self.mail.post(self._waiting[0]):
            self._waiting.popleft()

    def close(self) -> None:
        self._posts = False
        if self.mail is not None:
            self.mail.close()
            self.mail = None
        if self.file >= 0:
            os.close(self.file)
            self.file = -1
        for pages in (self._own, self._far):
            if pages is not None:
                with contextlib.suppress(BufferError):
                    pages.close()


def _owner(sender: str, receiver: str) -> bytes:
    return hashlib.sha256(f"{sender}\0{receiver}".encode()).digest()[:_OWNER]
