"""A router before two vLLM engines: each request is prefilled in one and decoded in the other.

It is as small as it can be, for trying things out: one engine of each kind, no retries, no encryption.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import socket
import struct
import threading
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATHS = ("/v1/completions", "/v1/chat/completions")

#: Bytes of a request at most, and seconds that an engine may take.
MOST, SECONDS = 64 << 20, 600


def prefill_of(request: dict[str, Any]) -> dict[str, Any]:
    """What the engine that prefills is asked: one token, and to hold the blocks."""
    one = {key: value for key, value in request.items() if key not in ("stream_options", "min_tokens", "n", "best_of")}
    one |= {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
    if "max_completion_tokens" in request:
        one["max_completion_tokens"] = 1
    return one


def both_of(request: dict[str, Any], port: int, prefill: str, workers: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What both engines are asked at once: the prompt is sent while it is computed."""
    name = uuid.uuid4().hex
    one = prefill_of(request)
    one["kv_transfer_params"]["transfer_id"] = name
    there = {"remote_host": urllib.parse.urlsplit(prefill).hostname, "remote_port": port, "remote_workers": workers}
    return one, {**request, "kv_transfer_params": {"do_remote_prefill": True, "transfer_id": name, **there}}


def decode_of(request: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """What the engine that decodes is asked: where the blocks are. What a client says of that is dropped."""
    one = {key: value for key, value in request.items() if key != "kv_transfer_params"}
    if params := answer.get("kv_transfer_params"):
        one["kv_transfer_params"] = params
    return one


class Router(BaseHTTPRequestHandler):
    """One request; `server` has the addresses of both engines."""

    server: Any

    def do_POST(self) -> None:
        request = None
        with contextlib.suppress(ValueError):
            if 0 <= (size := int(self.headers.get("Content-Length", 0))) <= MOST:
                request = json.loads(self.rfile.read(size))
        if self.path not in PATHS or not isinstance(request, dict):
            self._refuse(400, f"expected a JSON object of at most {MOST >> 20} MiB at {' or '.join(PATHS)}")
            return
        if self.server.push:
            first, second = both_of(request, *self.server.push)
            threading.Thread(target=self._prefill, args=(first,), daemon=True).start()
        else:
            second = decode_of(request, self._prefill(prefill_of(request)))
        try:
            response = self._ask(self.server.decode, second)
        except urllib.error.HTTPError as error:
            response = error  # it is an answer, too
        except (OSError, http.client.HTTPException) as error:
            self._refuse(502, f"decode: {error}")
            return
        with response:
            headers = {name: response.headers[name] for name in ("Content-Type", "Content-Length") if name in response.headers}
            self._pass_on(response.status, headers, iter(lambda: response.read1(1 << 16), b""))

    def _prefill(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            with self._ask(self.server.prefill, request) as response:
                return dict(json.loads(response.read()))
        except (OSError, ValueError, http.client.HTTPException) as error:  # the engine that decodes prefills it, too
            self.log_message("prefill: %s", error)
            return {}

    def _ask(self, engine: str, request: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        if authorization := self.headers.get("Authorization"):
            headers["Authorization"] = authorization
        asked = urllib.request.Request(engine + self.path, json.dumps(request).encode(), headers)  # noqa: S310  (the operator's)
        return urllib.request.urlopen(asked, timeout=SECONDS)  # noqa: S310

    def _refuse(self, status: int, why: str) -> None:
        error = {"message": why, "type": http.client.responses[status], "code": status}
        self._pass_on(status, {"Content-Type": "application/json"}, iter([json.dumps({"error": error}).encode()]))

    def _pass_on(self, status: int, headers: dict[str, str], parts: Iterator[bytes]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()  # HTTP/1.0: the end of the answer is that of the connection
        try:
            for part in parts:
                self.wfile.write(part)
        except (OSError, http.client.HTTPException) as error:
            self.log_message("in the middle of an answer: %s", error)
            # The connection is reset: closed, half an answer would look like a whole one.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()


def serve(port: int, prefill: str, decode: str, push: tuple[int, int] | None = None) -> ThreadingHTTPServer:
    """A router that listens; `serve_forever` runs it.  `push`: kv_port and workers of the engine that prefills."""
    server: Any = ThreadingHTTPServer(("127.0.0.1" if port == 0 else "", port), Router)
    server.prefill, server.decode = prefill.rstrip("/"), decode.rstrip("/")
    server.push = push and (push[0], server.prefill, push[1])
    return server  # type: ignore[no-any-return]


def url(text: str) -> str:
    """An engine's URL as it was given.  Without a scheme, no request would reach the engine."""
    try:
        parts = urllib.parse.urlsplit(text)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise argparse.ArgumentTypeError(f"expected http://HOST:PORT, got {text!r}")
    return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", type=url, default="http://127.0.0.1:8100", help="the engine that prefills")
    parser.add_argument("--decode", type=url, default="http://127.0.0.1:8200", help="the engine that decodes")
    parser.add_argument("--push", action="store_true", help="ask both at once: the prompt is sent while it is computed")
    parser.add_argument("--kv-port", type=int, default=14600, help="with --push: of the engine that prefills")
    parser.add_argument("--workers", type=int, default=1, help="with --push: its workers, tp by pp")
    given = parser.parse_args()
    push = (given.kv_port, given.workers) if given.push else None
    serve(given.port, given.prefill, given.decode, push).serve_forever()
