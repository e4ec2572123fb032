"""``kvbm`` that says on stderr when a sequence begins (test_link_cli.py), so that tests know when it is in the middle."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from typing import Any

from kvbm.cli.app import main
from kvbm.link import trial


def tell() -> None:
    """Print a line before each sequence."""
    send = trial.Sender._send

    def told(self: trial.Sender, tokens: int, **options: Any) -> Any:
        print("sequence", file=sys.stderr, flush=True)
        return send(self, tokens, **options)

    trial.Sender._send = told  # type: ignore[method-assign]


def forked(arguments: list[str], *pipes: Connection) -> None:
    """In a process of its own, whose standard output and standard error are the pipes."""
    for number, pipe in enumerate(pipes, 1):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    tell()
    main(arguments)


if __name__ == "__main__":
    tell()
    main()
