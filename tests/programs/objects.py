"""Objects as peers (test_wire.py), in moto's S3 server in this process.

By NIXL's variant for CUDA 12: the backend of the other one needs libcuobjclient.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

os.environ["AWS_EC2_METADATA_DISABLED"] = "true"  # no address but the server's is asked

import boto3
import nixl_cu12  # noqa: F401 - before kvbm looks for NIXL
import numpy as np
import pytest
import test_chunks
from botocore.exceptions import ClientError
from moto.server import ThreadedMotoServer

import pages
from kvbm import BindError, PeerLostError, TransferTimeoutError, wire
from kvbm.wire.protocol import Card

BUCKET = "kvbm-test"
DENIED = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
KEYS = {"access_key": "one", "secret_key": "two", "region": "us-east-1"}


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.001)


def documented(url: str) -> None:
    """The block of docs/howto/connect.md; keys come from the environment."""
    os.environ.update(AWS_ACCESS_KEY_ID="one", AWS_SECRET_ACCESS_KEY="two", AWS_REGION="us-east-1")
    [block] = [
        body
        for _, title, body in pages.fences(pages.read("docs/howto/connect.md"))
        if title == "needs an S3 store"
    ]
    assert "http://127.0.0.1:9000" in block and '"bucket"' in block
    exec(block.replace("http://127.0.0.1:9000", url).replace('"bucket"', f'"{BUCKET}"'), {})


@contextlib.contextmanager
def store_of(answer: Callable[[int], bytes | None]) -> Iterator[tuple[str, threading.Event]]:
    """The URL of a store, which answers a read of so many bytes when the event is set; None: not allowed."""
    go_on = threading.Event()

    def serve(peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):
            asked = peer.recv(1 << 16).decode().lower()
            first, last = map(int, asked.partition("range: bytes=")[2].split()[0].split("-"))
            go_on.wait()
            body = answer(last - first + 1)
            said, body = ("206 Partial Content", body) if body else ("403 Forbidden", DENIED)
            head = f"HTTP/1.1 {said}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            peer.sendall(head.encode() + body)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(store.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as store:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{store.getsockname()[1]}", go_on


def two_reads(slab: np.ndarray) -> None:
    """A get fails at once, and its last byte, which is read alone, comes later: the error is raised when both have ended."""

    def answer(nbytes: int) -> bytes | None:
        if nbytes > 1:
            return None
        time.sleep(0.5)
        return b"x"

    before = slab.copy()
    before[4095] = ord("x")
    with store_of(answer) as (url, go_on):
        go_on.set()
        objects = wire.nixl_objects(BUCKET, endpoint=url, **KEYS)
        objects.register(wire.Slab.of(slab))
        peer = objects.connect(objects.object("one", 4096))
        op = objects.get(peer, wire.Slice(0, 4096), wire.Slice(0, 4096))
        with pytest.raises(PeerLostError):
            until(op.query)
        assert (slab[4095:] == before[4095:]).all()  # the store's own words may be before
        objects.close()


def silent(slab: np.ndarray) -> None:
    """A store that accepts connections and does not answer: drop and close raise an error, and can be called again."""
    with store_of(lambda _: None) as (url, go_on):
        objects = wire.nixl_objects(BUCKET, endpoint=url, drop_seconds=0.2, **KEYS)
        objects.register(wire.Slab.of(slab))
        peer, other = (objects.connect(objects.object(name, 4096)) for name in ("one", "two"))
        op = objects.get(peer, wire.Slice(0, 8), wire.Slice(0, 8))
        for call in (partial(objects.drop, peer), partial(objects.drop, peer), objects.close, objects.close):
            with pytest.raises(TransferTimeoutError, match=rf"transfers of {peer} still run after 0.2 s.*call this again"):
                call()
        assert not op.query(), "it is not known to have ended"
        with pytest.raises(PeerLostError, match="this side is closed"):
            objects.get(other, wire.Slice(0, 8), wire.Slice(0, 8))
        go_on.set()

        def closed() -> bool:
            with contextlib.suppress(TransferTimeoutError):
                objects.close()
                return True
            return False

        until(closed)
        with pytest.raises(PeerLostError, match="dropped"):
            op.query()


def main() -> None:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    store = boto3.client(
        "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="one", aws_secret_access_key="two"
    )
    store.create_bucket(Bucket=BUCKET)

    def read(key: str) -> bytes:
        return bytes(store.get_object(Bucket=BUCKET, Key=key)["Body"].read())

    slab = np.random.default_rng(5).integers(0, 256, 1 << 16, np.uint8)
    before = slab.copy()
    objects = wire.nixl_objects(BUCKET, prefix="cache/", endpoint=url, **KEYS)
    objects.register(wire.Slab.of(slab))
    peer = objects.connect(objects.object("a-chunk", 4096))
    with pytest.raises(ClientError):
        read("cache/a-chunk")
    for start in (100, 5000):  # the second put replaces the first one
        until(objects.put(peer, wire.Slice(start, 4096), wire.Slice(0, 4096)).query)
        assert read("cache/a-chunk") == before[start : start + 4096].tobytes()
    assert (slab == before).all()
    until(objects.get(peer, wire.Slice(20000, 1000), wire.Slice(3096, 1000)).query)
    assert (slab[20000:21000] == before[5000 + 3096 : 5000 + 4096]).all()
    slab[20000:21000] = before[20000:21000]
    assert (slab == before).all(), "bytes beside the slice were written"

    for part in (wire.Slice(0, 4095), wire.Slice(1, 4095), wire.Slice(96, 4000)):
        with pytest.raises(BindError, match="whole object"):
            objects.put(peer, wire.Slice(0, part.nbytes), part)
    for call in (partial(objects.note, peer, b"x"), partial(objects.put, peer, *[wire.Slice(0, 4096)] * 2, b"x")):
        with pytest.raises(BindError, match="no notes"):
            call()
    for call in (objects.get, objects.put):
        with pytest.raises(BindError, match="slice"):
            call(peer, wire.Slice(0, 8), wire.Slice(4090, 8))
    assert read("cache/a-chunk") == before[5000:9096].tobytes() and objects.poll() == []

    store.put_object(Bucket=BUCKET, Key="cache/short", Body=b"only this")
    for name, start in (("not-stored", 96), ("short", 96), ("short", 0)):  # "only this" ends before, and in the slice
        other = objects.connect(objects.object(name, 4096))
        with pytest.raises(PeerLostError, match=f"'cache/{name}' in bucket '{BUCKET}'.*has it 4096 bytes"):
            until(objects.get(other, wire.Slice(30000, 24), wire.Slice(start, 24)).query)
        with pytest.raises(PeerLostError):
            objects.get(other, wire.Slice(0, 8), wire.Slice(0, 8))
        slab[30000:30024] = before[30000:30024]  # the store's own words may have come there
        assert (slab == before).all(), "bytes beside the slice were written"
    until(objects.get(peer, wire.Slice(40000, 4096), wire.Slice(0, 4096)).query)
    assert (slab[40000:44096] == before[5000:9096]).all() and (slab[:40000] == before[:40000]).all()

    again = objects.connect(objects.object("a-chunk", 4096))
    assert again != peer
    objects.drop(peer)
    objects.drop(peer)
    with pytest.raises(PeerLostError, match="dropped"):
        objects.get(peer, wire.Slice(0, 8), wire.Slice(0, 8))
    until(objects.get(again, wire.Slice(0, 8), wire.Slice(0, 8)).query)
    for name in ("../one", "a/../one", "./one", "a//one", "/one", "one/", "..", "."):
        with pytest.raises(BindError, match=r"object .*expected no empty part"):
            objects.object(name, 8)
        with pytest.raises(BindError, match=r"object .*expected no empty part"):
            objects.connect(Card(f"{name}#1", wire.Slab(1, 8)).write("nixl/objects"))
    for prefix in ("/", "a//", "../", "/a/"):
        with pytest.raises(BindError, match="expected no empty part"):
            wire.nixl_objects(BUCKET, prefix=prefix, endpoint=url, **KEYS)
    objects.close()
    objects.close()

    two_reads(slab)
    silent(slab)
    wrong = wire.nixl_objects("another-bucket", endpoint=url, **KEYS)
    wrong.register(wire.Slab.of(slab))
    peer = wrong.connect(wrong.object("one", 16))
    with pytest.raises(PeerLostError, match="bucket 'another-bucket'"):
        until(wrong.put(peer, wire.Slice(0, 16), wire.Slice(0, 16)).query)
    wrong.close()
    for endpoint in ("127.0.0.1:80", "ftp://127.0.0.1", f"{url}/path", "http://"):
        with pytest.raises(BindError, match="endpoint"):
            wire.nixl_objects(BUCKET, endpoint=endpoint, **KEYS)

    def damage(name: str) -> None:
        body = bytearray(read(f"chunks/{name}"))
        body[0] ^= 1
        store.put_object(Bucket=BUCKET, Key=f"chunks/{name}", Body=bytes(body))

    documented(url)
    assert len(read("cache/request-17.0")) == 4096
    opened = partial(wire.nixl_objects, BUCKET, prefix="chunks/", endpoint=url, **KEYS)
    test_chunks.chunks_are_stored(opened, lambda its: its.object, damage)
    server.stop()


if __name__ == "__main__":
    main()
