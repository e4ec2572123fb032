"""Ports to listen on."""

from __future__ import annotations

import random
import socket


def free_ports(count: int = 1) -> int:
    """The first of `count` consecutive ports that are free.

    They are below the ports that Linux gives to other sockets by itself: a server may take seconds until it listens.
    """
    while True:
        port = random.SystemRandom().randrange(10000, 32000)
        try:
            for number in range(count):
                with socket.socket() as one:
                    one.bind(("127.0.0.1", port + number))
        except OSError:
            continue
        return port
