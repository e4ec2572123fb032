"""``kvbm`` with a standard output of another kind (test_cli.py, test_conventions.py)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import sys
import termios

import kvbm.cli.app  # noqa: F401 - it is there, and takes no time, in each program
from kvbm.__main__ import main


def run(*words: str) -> None:
    """As ``kvbm WORDS``: ends the process."""
    sys.argv = ["kvbm", *words]
    main()


def into_a_closed_pipe(*words: str) -> None:
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 1)
    run(*words)


def onto_a_full_disk(*words: str) -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    run(*words)


def in_a_terminal(folder: str, *words: str) -> None:
    """In a terminal of 80 columns.  Print what it shows."""
    child, near = pty.fork()
    if not child:
        os.chdir(folder)
        os.environ.pop("COLUMNS", None)
        os.environ["TERM"] = "xterm"
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        run(*words)
    shown = b""
    with contextlib.suppress(OSError):  # of the other end, when the command ends
        while part := os.read(near, 1 << 16):
            shown += part
    print(shown.decode(), end="")
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
