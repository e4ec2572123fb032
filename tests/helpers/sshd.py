"""A real SSH server on the loopback address: OpenSSH's sshd if it is installed, else asyncssh.

Keys, known_hosts and configuration are created for each server; the user's own files are not read or written.
$KVBM_TEST_SSHD may be ``sshd`` or ``asyncssh``.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ports import free_ports


@dataclass(frozen=True)
class Server:
    """A running server's address, and keys: it accepts `user_key` and refuses `other_key`."""

    port: int
    kind: str
    user_key: Path
    other_key: Path
    known_hosts: Path
    wrong_hosts: Path  # names another key for this server
    empty_hosts: Path

    @property
    def target(self) -> str:
        return f"{getpass.getuser()}@127.0.0.1:{self.port}"


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[Server]:
    """Run a server until the end of the ``with`` statement."""
    binary = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    kind = os.environ.get("KVBM_TEST_SSHD") or ("sshd" if binary else "asyncssh")
    keys = _keys(folder)
    port = free_ports()
    for name, key in (("known_hosts", "host"), ("wrong_hosts", "other")):
        (folder / name).write_text(f"[127.0.0.1]:{port} {keys[key]}\n", encoding="ascii")
    (folder / "empty_hosts").write_text("", encoding="ascii")
    (folder / "authorized").write_text(keys["user"] + "\n", encoding="ascii")
    paths = [folder / name for name in ("user", "other", "known_hosts", "wrong_hosts", "empty_hosts")]
    with _openssh(str(binary), folder, port) if kind == "sshd" else _asyncssh(folder, port):
        _wait(port)
        yield Server(port, kind, *paths)


def _keys(folder: Path) -> dict[str, str]:
    """Make three keys; return their public parts."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    made = {}
    for name in ("host", "user", "other"):
        key = Ed25519PrivateKey.generate()
        (folder / name).write_bytes(
            key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption())
        )
        (folder / name).chmod(0o600)
        made[name] = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH).decode()
    return made


def _wait(port: int) -> None:
    for _ in range(200):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as peer:
            if peer.recv(4) == b"SSH-":
                return
        time.sleep(0.05)
    raise AssertionError("the server does not answer")


@contextlib.contextmanager
def _openssh(binary: str, folder: Path, port: int) -> Iterator[None]:
    lines = [
        f"Port {port}",
        "ListenAddress 127.0.0.1",
        f"HostKey {folder / 'host'}",
        f"AuthorizedKeysFile {folder / 'authorized'}",
        "PidFile none",
        "StrictModes no",
        "UsePAM no",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PermitRootLogin prohibit-password",
        "Subsystem sftp internal-sftp",
    ]
    (folder / "sshd_config").write_text("\n".join(lines) + "\n", encoding="ascii")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # it wants that folder when root starts it
    command = [binary, "-D", "-f", str(folder / "sshd_config"), "-E", str(folder / "sshd.log")]
    server = subprocess.Popen(command)
    try:
        yield
    finally:
        server.terminate()
        server.wait(timeout=10)


@contextlib.contextmanager
def _asyncssh(folder: Path, port: int) -> Iterator[None]:
    import asyncssh

    async def handle(process: Any) -> None:
        quiet, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_shell(process.command or "true", stdin=quiet, stdout=pipe, stderr=pipe)
        out, err = await child.communicate()
        process.stdout.write(out.decode())
        process.stderr.write(err.decode())
        process.exit(child.returncode)

    connections: list[Any] = []

    class Noting(asyncssh.SSHServer):  # type: ignore[misc]
        def connection_made(self, conn: Any) -> None:
            connections.append(conn)

    started, ends = threading.Event(), []

    async def listen() -> None:
        loop, end = asyncio.get_running_loop(), asyncio.Event()
        ends.append(lambda: loop.call_soon_threadsafe(end.set))
        server = await asyncssh.listen(
            "127.0.0.1",
            port,
            server_factory=Noting,
            server_host_keys=[str(folder / "host")],
            authorized_client_keys=str(folder / "authorized"),
            process_factory=handle,
            sftp_factory=True,
        )
        started.set()
        await end.wait()
        server.close()
        for connection in connections:  # what is left open would be a warning in whichever test comes next
            connection.abort()
            await connection.wait_closed()

    thread = threading.Thread(target=lambda: asyncio.run(listen()), daemon=True)
    thread.start()
    assert started.wait(20)
    try:
        yield
    finally:
        ends[0]()
        thread.join(10)
        assert not thread.is_alive(), "the server does not end"
