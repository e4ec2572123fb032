"""The command line: ``kvbm link serve | send``.

Only click is imported here before something runs, as for every command.
"""

from __future__ import annotations

import contextlib
import json
import re
import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import click

from .._arguments import quoted
from ..errors import BindError, KvbmError
from ..layout.shapes import load_shape
from .click_classes import INTERRUPTED, Group, Real, Whole, print_error
from .common import (
    device_option,
    json_option,
    layout_option,
    new_table,
    print_json,
    print_prose,
    print_table,
    progress,
    shape_option,
    size_of,
    size_option,
    terminal,
)
from .complete import some_of
from .values import numbers

if TYPE_CHECKING:
    from ..link.secret import Secret
    from ..link.talk import Talk
    from ..link.trial import Row, Sender, Side

#: The default port of `serve` and `send`.
PORT = 29555

#: Most seconds that senders have to end after Ctrl-C.
_STOPS = 6.0


def _sizes(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...]:  # noqa: ARG001
    return () if value is None else tuple(dict.fromkeys(map(size_of, value.split(","))))


def _address(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, int] | None:  # noqa: ARG001
    """``HOST``, ``HOST:PORT`` or ``[HOST]:PORT``."""
    if value is None:
        return None
    if value.isdecimal():
        raise click.BadParameter(f"expected HOST:PORT, got a number alone, {quoted(value, 100)}: write 127.0.0.1:{value[:20]}")
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([^\s:\[\]/]+))(?::(\d{1,5}))?", value)
    if match is None or int(match[3] or 0) >= 1 << 16:
        raise click.BadParameter(f"expected HOST:PORT, or [HOST]:PORT for IPv6, got {quoted(value, 100)}")
    return match[1] or match[2], int(match[3]) if match[3] else PORT


def _side_options(layout: str, nt: int) -> Callable[[Any], Any]:
    """The options that both commands have."""

    def add(command: Any) -> Any:
        for option in (
            click.option("--tokens-per-block", "nt", type=Whole(1, 1 << 20), default=nt, show_default=True, metavar="N",
                         help="Tokens per block on this side."),
            layout_option("--layout", default=layout, show_default=True, help="Layout of this side's pool."),
            device_option("Where this side's pool is."),
        ):  # fmt: skip
            command = option(command)
        return command

    return add


_WIRES = click.Choice(["torch", "nixl"])

_secret_option = click.option(
    "--secret-file", metavar="FILE", help="A secret of 16 bytes or more, which both sides have; only its owner can read the file.",
    shell_complete=some_of(files=True),
)  # fmt: skip


def _secret(path: str | None) -> Secret | None:
    from ..link.secret import Secret

    return None if path is None else Secret.read(path)


@click.group(cls=Group)
def link() -> None:
    """Test two machines: send sequences from one to the other, and measure.

    On one machine run `kvbm link serve`, on the other `kvbm link send HOST`. Both on one machine work, too.
    """


@link.command(examples=["kvbm link serve", "kvbm link serve --listen 127.0.0.1:29600 --layout vllm/LBHNC --once"])
@click.option("--listen", "address", callback=_address, metavar="HOST:PORT",
              help="Address to listen on; port 0 selects a free port. Without a secret, a loopback or private one.  "
              f"[default: 127.0.0.1:{PORT}; with a secret 0.0.0.0:{PORT}]")  # fmt: skip
@_secret_option
@click.option("--insecure", is_flag=True, help="Listen at any address without a secret: everybody who reaches it comes in.")
@click.option("--wire", "only", type=_WIRES, help="Accept only this wire.  [default: any]")
@_side_options("vllm/flash_attn_hnd", 64)
@size_option("--memory", default="16GiB", help="The most memory that senders may request, together.")
@click.option("--timeout", type=Real(0.1, 3600), default=60.0, show_default=True, metavar="S",
              help="The most seconds that a sender may be waited for at a time.")  # fmt: skip
@click.option("--once", is_flag=True, help="Serve one sender, then exit with its code.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead, one object per line: address, then senders.")
def serve(
    address: tuple[str, int] | None, secret_file: str | None, insecure: bool, only: str | None, device: str,
    layout: str, nt: int, memory: int, timeout: float, once: bool, as_json: bool,
) -> None:  # fmt: skip
    """Receive from `kvbm link send` until Ctrl-C.

    Who has the secret, or without one who reaches the port, can use memory of this machine and write to what this command
    allocates. Wires use further ports, which no secret protects: use it only on a network that you trust. Senders that come at
    the same time share the memory, and make each other slower.
    """
    from ..layout import spec
    from ..link.talk import Reception
    from ..link.trial import Side

    spec.load(layout)  # report an error before a sender connects
    secret = _secret(secret_file)
    if address is None:
        address = "127.0.0.1" if secret is None else "0.0.0.0", PORT  # noqa: S104  (who comes in must know the secret)
    side = Side("server", device, layout, nt)
    senders = Senders(side, only=only, memory=memory, timeout=timeout, once=once, as_json=as_json)
    opened = Reception(
        *address, senders.serve, timeout=timeout, name="kvbm link serve", secret=secret, is_insecure=insecure
    )
    with contextlib.closing(opened) as reception:
        where = "{}:{}".format(*reception.address)
        who = "with a secret" if secret is not None else "without a secret, for everybody who reaches it"
        record = {"listening": where, "secret": secret is not None}
        click.echo(json.dumps(record) if as_json else f"listening on {where}, {who}: {side}")
        sys.stdout.flush()
        try:
            while True:
                code = senders.ended.get()
                if once:
                    sys.exit(code)
        except KeyboardInterrupt:
            if senders.stop():
                raise
            if not as_json:
                click.echo(f"\n{senders.count} sender{'' if senders.count == 1 else 's'} served")
            sys.exit(INTERRUPTED)


class Senders:
    """Serves senders, each on the thread of its conversation, so none waits for another.  All of them share the memory.

    `count` is the number of those that said what they want, and `ended` has the exit codes of those that have ended.
    """

    def __init__(self, side: Side, *, only: str | None, memory: int, timeout: float, once: bool, as_json: bool) -> None:
        from ..link.trial import Memory

        self._side, self._only, self._memory, self._timeout = side, only, Memory(memory), timeout
        self._once, self._as_json = once, as_json
        self._lock = threading.Condition()
        self._running: set[Talk] = set()
        self.count = 0
        self.ended: SimpleQueue[int] = SimpleQueue()

    def serve(self, talk: Talk) -> None:
        """Serve a sender, on the thread of its conversation."""
        from ..link.trial import Served
        from ..link.trial import serve as serve_sender

        talk.wait()  # a client that sends nothing is no sender
        with self._lock:
            if self._once and self.count:
                raise BindError("this side serves one sender (kvbm link serve --once), and it has come")
            talk.is_known = True
            self.count += 1
            self._running.add(talk)
        served, failed = Served(talk.peer), None
        try:
            with _telling_peer(talk, f"{talk.peer}: the memory that was asked for"):
                serve_sender(
                    talk, self._side, talk.here, only=self._only, memory=self._memory, served=served,
                    timeout=self._timeout,
                )  # fmt: skip
        except (KvbmError, OSError) as error:
            failed = error
        except Exception as error:  # for any error, so that the command goes on
            failed = KvbmError(f"{talk.peer}: {type(error).__name__}: {error}")
            talk.fail(failed)
        finally:
            served.error = str(failed or "")
            try:
                with self._lock:
                    self._running.remove(talk)
                    self._lock.notify_all()
                    if failed is not None:
                        print_error(failed)
                    click.echo(json.dumps(served.as_json(), ensure_ascii=False) if self._as_json else str(served))
                    sys.stdout.flush()
            finally:  # also if the output is closed
                self.ended.put(0 if failed is None else getattr(failed, "exit_code", 1))

    def stop(self) -> bool:
        """Tell the senders that this side has been stopped, and wait until their memory is free.  True if there was one."""
        with self._lock:
            running = list(self._running)
            for talk in running:
                talk.fail(KeyboardInterrupt())
                talk.close()
            self._lock.wait_for(lambda: not self._running, _STOPS)
        return bool(running)


@link.command(examples=["kvbm link send 127.0.0.1", "kvbm link send 127.0.0.1:29600 --bytes 1MiB,64MiB --json"])
@click.argument("address", callback=_address, metavar="HOST[:PORT]")
@_secret_option
@click.option("--wire", type=_WIRES, default="torch", show_default=True,
              help="torch: gloo between hosts, NCCL between GPUs. nixl needs pip install 'kvbm-layouts[nixl]'.")  # fmt: skip
@click.option("--bytes", "sizes", callback=_sizes, metavar="SIZE,…",
              help="Bytes of a sequence, rounded to whole tokens.  [default: 1MiB,8MiB,64MiB,256MiB]")  # fmt: skip
@click.option("--tokens", callback=numbers, metavar="N,…", help="Tokens of a sequence, in place of --bytes.")
@shape_option(default=None)
@_side_options("vllm/flash_attn_nhd", 16)
@click.option("--iters", "repeat", type=Whole(1, 100_000), default=10, show_default=True, metavar="N",
              help="Timed sequences of each size.")  # fmt: skip
@size_option("--chunk", "chunk_bytes", help="The largest chunk, on both sides.  [default: 16MiB, more on a large GPU]")
@size_option("--ring", "ring_bytes", help="Registered memory of each side.  [default: 256MiB, more on a large GPU]")
@click.option("--timeout", type=Real(0.1, 3600), default=30.0, show_default=True, metavar="S",
              help="Seconds that a connection, an answer or a sequence may take.")  # fmt: skip
@json_option()
def send(
    address: tuple[str, int], secret_file: str | None, wire: str, sizes: tuple[int, ...], tokens: tuple[int, ...],
    shape_text: str | None, device: str, layout: str, nt: int, repeat: int, chunk_bytes: int | None,
    ring_bytes: int | None, timeout: float, as_json: bool,
) -> None:  # fmt: skip
    """Send sequences to a machine that runs `kvbm link serve`, and print the speed.

    A sequence is packed, sent in chunks, unpacked into another layout and block size, and verified by digests. The time ends
    when the receiver confirms it. The receiver compares the first and the last sequence of each size element by element. For
    comparison the table has the wire alone (one put of a contiguous slice of as many bytes) and a memcpy on this machine.

    SHAPE is of the whole model, llama-3.1-8b if not given. Exits with 23 if the peer is lost, 24 after a timeout, 31 if
    nothing answers at the address, 33 if the other side has another secret, 21 if the received data are wrong.
    """
    from ..layout import spec
    from ..link.ring import sizes_of
    from ..link.talk import connect
    from ..link.trial import Sender, Side, Terms

    if sizes and tokens:
        raise click.UsageError("--bytes and --tokens: expected one of them")
    spec.load(layout)
    model = load_shape(shape_text or "llama-3.1-8b")
    chunk_bytes, ring_bytes = sizes_of(device, chunk_bytes, ring_bytes)
    terms = Terms(wire, str(model), 1, chunk_bytes, ring_bytes, timeout)
    counts = tokens or tuple(
        dict.fromkeys(max(1, round(size / terms.token_bytes)) for size in sizes or (1 << 20, 1 << 23, 1 << 26, 1 << 28))
    )
    terms = Terms(wire, str(model), max(counts), chunk_bytes, ring_bytes, timeout)
    side, secret = Side("sender", device, layout, nt), _secret(secret_file)
    rows: list[Row] = []
    head: dict[str, Any] = {}
    report = _print_json if as_json else _print_table
    try:
        with (
            connect(*address, timeout, secret) as talk,
            _telling_peer(talk, "the memory"),
            progress("connecting") as update,
            Sender(talk, side, terms) as sender,
        ):
            head = _head(sender, talk.peer, side, terms)
            update(total=len(counts) * (repeat + 1), completed=0)
            for count in counts:
                update(description=f"{count * terms.token_bytes / 2**20:,.4g} MiB")
                rows.append(sender.measure(count, repeat, lambda: update(advance=1)))
    except (KvbmError, KeyboardInterrupt) as error:  # keep the rows that were measured
        report(head, rows, error)
        raise
    report(head, rows, None)


@contextlib.contextmanager
def _telling_peer(talk: Talk, memory: str) -> Iterator[None]:
    """Tell the other side why this side gives up.  `memory` is what messages call the memory that this side needs."""
    try:
        yield
    except (KvbmError, OSError, MemoryError) as error:
        talk.fail(error)
        if isinstance(error, MemoryError):
            raise KvbmError(f"{memory} is not there: {error}") from None
        raise


def _head(sender: Sender, peer: str, side: Side, terms: Any) -> dict[str, Any]:
    notes = sender.notes()
    return {
        "peer": peer, "wire": terms.wire, "shape": terms.shape, "chunk_bytes": terms.chunk_bytes, "ring_bytes": terms.ring_bytes,
        "from": side.as_json(), "to": sender.far,
        "note_us": {name: 1e6 * of(notes) for name, of in (("median", statistics.median), ("min", min), ("max", max))},
    }  # fmt: skip


def _print_json(head: dict[str, Any], rows: Sequence[Row], error: BaseException | None) -> None:
    from dataclasses import asdict

    from .._version import __version__

    record = None
    if error is not None:
        record = {"class": type(error).__name__, "exit_code": getattr(error, "exit_code", 1), "message": str(error)}
    found = {"kvbm": __version__, **head, "rows": [asdict(row) for row in rows], "error": record}
    print_json(found)


def _print_table(head: dict[str, Any], rows: Sequence[Row], error: BaseException | None) -> None:
    if not rows:
        return
    console = terminal()
    for way in ("from", "to"):
        one = head[way]
        click.echo(f"{way:4}  {one['host']}: {one['device']}, {one['layout']}, {one['tokens_per_block']} tokens per block")
    note = head["note_us"]
    click.echo(f"by    {head['wire']}; a note there and back takes {note['median']:,.0f} µs (at least {note['min']:,.0f})")
    titles = ("tokens", "MB", "chunks", "ms", "GB/s", "wire", "of it", "memcpy", "µs per chunk", "again", "stalls")
    table = new_table(*titles, right=titles)
    table.padding = (0, 1 if console.width >= 92 else 0, 0, 0)
    for row in rows:
        table.add_row(
            f"{row.tokens:,}", f"{row.nbytes / 1e6:,.1f}", str(row.chunks), f"{row.median_ms:,.2f}", f"{row.bandwidth_gbps:.2f}",
            f"{row.raw_gbps:.2f}", f"{row.raw_ratio:.2f}", f"{row.memcpy_gbps:.1f}",
            f"{row.send_host_us:,.0f} {row.receive_host_us:,.0f}", str(row.chunks_wrong + row.notes_again), str(row.stalls),
        )  # fmt: skip
    print_table(table, console)
    for line in (
        "ms: median of the sequences, each from the call to the receiver's word that all of it is there and right.",
        "wire, memcpy: GB/s of one contiguous put by the wire alone, and of a memcpy here; of it: GB/s over the wire's.",
        "µs per chunk: processor time of the two sides' threads; again: chunks that came wrong, notes that were said again.",
        "It was stopped: sizes that are missing were not measured." if error else "All of it came and was right.",
    ):
        print_prose(line)
