"""Where ends of `wire.torch` meet, some of which are killed.

A ``FileStore`` does not do: who is killed while it writes to its file leaves the others reading there without end.
"""

from __future__ import annotations

from typing import Any


def host() -> Any:
    """The store; it is gone with this process."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def join(port: int | str) -> Any:
    """The same one, for any process."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", int(port), is_master=False)
