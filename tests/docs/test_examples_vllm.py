"""examples/vllm: its commands are those of the docs, its dashboard uses exported metrics, its router forwards requests."""

from __future__ import annotations

import ast
import contextlib
import http.client
import json
import re
import runpy
import shlex
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "vllm"
INTEGRATION = ROOT / "src" / "kvbm" / "integrations" / "vllm"

# ---- commands ------------------------------------------------------------------------------------------------------------


def commands(text: str) -> list[list[str]]:
    """Every `vllm serve` of a text as words, with MODEL as the model's name."""
    text = re.sub(r"^\$ ", "", text, flags=re.MULTILINE).replace('"$MODEL"', "MODEL")
    found = re.findall(r"vllm serve MODEL(?:[^'`\n\\]|\\\n|'[^']*')*", text)
    return [shlex.split(one) for one in found]


def transfers(text: str) -> list[dict[str, Any]]:
    return [json.loads(one[one.index("--kv-transfer-config") + 1]) for one in commands(text)]


PAIRS = {"offload.sh": "engines/vllm.md", "disaggregated.sh": "engines/vllm-disaggregated.md"}


@pytest.mark.parametrize(("script", "page"), PAIRS.items())
def test_commands_are_those_of_the_docs(script: str, page: str) -> None:
    ours, theirs = ((folder / name).read_text("utf-8") for folder, name in ((EXAMPLES, script), (ROOT / "docs", page)))
    assert len(commands(ours)) == {"offload.sh": 2, "disaggregated.sh": 2}[script]
    assert commands(ours) == commands(theirs)
    done = subprocess.run(["sh", "-n", EXAMPLES / script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def settings(page: str) -> set[str]:
    """Settings in the tables of a page, and those named above the first table."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    rows = re.findall(r"^\| (`[^|]*`) \|", text, re.MULTILINE)
    return set(re.findall(r"`(\w+)`", " ".join([*rows, text.partition("## Settings\n")[2].partition("|")[0]])))


@pytest.mark.parametrize(("script", "page"), PAIRS.items())
def test_their_json_names_settings_that_exist(script: str, page: str) -> None:
    """They are in the docs' tables, and the code or vLLM reads them."""
    read = {
        one.value
        for path in (*INTEGRATION.glob("*.py"), *INTEGRATION.parent.glob("*.py"))
        for one in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(one, ast.Constant)
    }  # fmt: skip
    known = {"kv_connector", "kv_role", "kv_port", "kv_load_failure_policy", "kv_connector_extra_config"}
    for one in transfers((EXAMPLES / script).read_text("utf-8")):
        assert set(one) <= known and one["kv_role"] == "kv_both"
        assert one["kv_connector"] in read
        extra = set(one["kv_connector_extra_config"])
        assert extra <= settings(page) and extra <= read
    assert settings(page) - {"cpu_bytes_to_use", "blocks_per_chunk", "eviction_policy", "store_threshold"} <= read


@pytest.mark.parametrize("words", [(), ("prefill",), ("elsewhere", "m")])
def test_scripts_say_what_they_lack(words: tuple[str, ...]) -> None:
    done = subprocess.run(["sh", EXAMPLES / "disaggregated.sh", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and re.search(r"prefill, decode or router|a model", done.stderr)


def test_serve_check_has_the_same_settings() -> None:
    """The commands that it prints use the settings of the docs."""
    from kvbm.integrations.vllm import models, serving

    engine = serving.Engine(models.read(str(ROOT / "tests" / "data" / "models" / "llama-3.1-8b.json")))
    found = serving.as_json(engine, 64 << 30, "universal", to=engine)
    mine = found["offloading"]["kv_transfer_config"]
    theirs, _ = transfers((EXAMPLES / "offload.sh").read_text("utf-8"))
    assert mine.keys() == theirs.keys() and mine["kv_connector"] == theirs["kv_connector"]
    assert set(mine["kv_connector_extra_config"]) <= settings("engines/vllm.md")
    sides = transfers((EXAMPLES / "disaggregated.sh").read_text("utf-8"))
    for side, other in zip(("prefill", "decode"), sides, strict=True):
        mine = found["disaggregation"][side]["kv_transfer_config"]
        assert {**mine, "kv_connector_extra_config": 0} == {**other, "kv_connector_extra_config": 0}
        assert mine["kv_connector_extra_config"].keys() == other["kv_connector_extra_config"].keys()


# ---- the dashboard -------------------------------------------------------------------------------------------------------

BOARD = json.loads((EXAMPLES / "grafana.json").read_text(encoding="utf-8"))

#: Of vLLM itself: tests/engines/test_vllm_connector.py asks it for them.
OF_VLLM = {f"vllm:kv_offload_{way}_{what}_total" for way in ("load", "store") for what in ("bytes", "time")}


def shown() -> set[str]:
    """Metrics in the dashboard's expressions."""
    texts = [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", ())]
    return {name for text in texts for name in re.findall(r"(?:vllm:)?kv\w+(?=\{)", text)}


def exported() -> set[str]:
    """Names of kvbm's metrics in Prometheus: counters end in ``_total``."""
    found = set()
    for name in ("offload", "tiered", "metrics"):
        tree = ast.parse((INTEGRATION / f"{name}.py").read_text(encoding="utf-8"))
        texts = [one.value for one in ast.walk(tree) if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        found |= {f"{text}_total" for text in texts if re.fullmatch(r"vllm:kvbm_\w*[a-z]", text)}
    return found


def exported_by_links() -> set[str]:
    pytest.importorskip("prometheus_client")
    from kvbm.link.metrics import Links

    return {one.name + ("_total" if one.type == "counter" else "") for one in Links().describe()}


def test_the_dashboard_shows_what_is_exported() -> None:
    links = exported_by_links()
    assert len(exported()) == 5 + 3 + 12 + 6
    unknown = shown() - exported() - links - OF_VLLM
    assert not unknown, f"exported by nobody: {unknown}"
    assert exported() <= shown(), f"not shown: {exported() - shown()}"
    assert shown() & links


def test_the_dashboard_has_grafanas_form() -> None:
    assert BOARD["title"] and BOARD["uid"] and BOARD["schemaVersion"] >= 30
    variables = {one["name"] for one in BOARD["templating"]["list"]}
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["type"] in ("timeseries", "stat") and panel["title"] and panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"] and panel["targets"]
        for target in panel["targets"]:
            expr = target["expr"]
            assert target["refId"] and target["legendFormat"] and expr.count("(") == expr.count(")")
            used = set(re.findall(r"\$(\w+)", expr)) | set(re.findall(r"\$\{(\w+)\}", json.dumps(panel["datasource"])))
            assert used <= variables | {"__rate_interval", "__range"}
            for name in re.findall(r"(?:vllm:)?kv\w+(?=\{)", expr):
                is_counter = bool(re.search(rf"(?:rate|increase)\({name}\b", expr))
                assert is_counter == name.endswith("_total"), expr


def test_docs_name_what_is_exported() -> None:
    text = "".join((ROOT / "docs" / page).read_text("utf-8") for page in (*PAIRS.values(), "engines/guard.md"))
    assert {name.removesuffix("_total") for name in exported()} == set(re.findall(r"`(vllm:kvbm_\w*[a-z])`", text))


# ---- the router ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["127.0.0.1:8100", "ftp://here:1", "http://", "http://here:x", ""])
@pytest.mark.parametrize("option", ["--prefill", "--decode"])
def test_the_router_takes_urls_only(option: str, given: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Red: without http:// it started, and each request failed."""
    monkeypatch.setattr(sys, "argv", ["router.py", "--port", "-1", option, given])
    with pytest.raises(SystemExit):
        runpy.run_path(str(EXAMPLES / "router.py"), run_name="__main__")
    assert f"{option}: expected http://HOST:PORT, got {given!r}" in capsys.readouterr().err



class Engine(ThreadingHTTPServer):
    """Answers as vLLM does, and records its requests."""

    def __init__(self, status: int = 200, **answer: Any) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.status, self.answer = status, answer
        self.asked: list[tuple[str, dict[str, Any], str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: Any

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, request, self.headers.get("Authorization")))
        text = json.dumps(self.server.answer).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def running(*servers: Any) -> Iterator[None]:
    threads = [threading.Thread(target=one.serve_forever, args=(0.01,)) for one in servers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for one, thread in zip(servers, threads, strict=True):
            one.shutdown()
            thread.join()
            one.server_close()


@pytest.fixture
def program() -> Any:
    found = runpy.run_path(str(EXAMPLES / "router.py"))
    found["Router"].log_message = lambda *_: None
    return found


def ask(port: int, request: Any, path: str = "/v1/completions") -> tuple[int, Any]:
    data = request if isinstance(request, bytes) else json.dumps(request).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer key"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers), timeout=30
        ) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


PARAMS = {"do_remote_prefill": True, "remote_request_id": "a/b"}
REQUEST = {
    "model": "m",
    "prompt": "p",
    "max_tokens": 20,
    "n": 2,
    "stream_options": {},
    "kv_transfer_params": {"remote_host": "evil"},
}


def test_both_engines_are_asked_at_once(program: Any) -> None:
    """Each request has a new name; the decode engine gets it without waiting for the prefill engine."""
    prefill, decode = Engine(), Engine(text="done")
    asked = threading.Barrier(2)
    answered = threading.Event()
    prefill.process_request = lambda *of: (asked.wait(30), answered.wait(30), Engine.process_request(prefill, *of))
    router = program["serve"](0, prefill.url, decode.url, (14600, 2))
    with running(prefill, decode, router):
        assert ask(router.server_port, REQUEST) == (200, {"text": "done"})
        asked.wait(30)
        answered.set()
        while not prefill.asked:
            pass
        asked.reset()
    [(_, first, _)], [(_, second, _)] = prefill.asked, decode.asked
    name = first["kv_transfer_params"].pop("transfer_id")
    assert first["kv_transfer_params"] == {"do_remote_decode": True} and first["max_tokens"] == 1 and len(name) == 32
    assert second["max_tokens"] == 20 and second["kv_transfer_params"] == {
        "do_remote_prefill": True, "transfer_id": name, "remote_host": "127.0.0.1", "remote_port": 14600, "remote_workers": 2,
    }  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_request_is_prefilled_and_then_decoded(program: Any, path: str) -> None:
    """Transfer parameters from a client reach neither engine."""
    prefill, decode = Engine(kv_transfer_params=PARAMS), Engine(text="done")
    router = program["serve"](0, prefill.url + "/", decode.url)
    with running(prefill, decode, router):
        assert ask(router.server_port, REQUEST, path) == (200, {"text": "done"})
    one = {
        "model": "m",
        "prompt": "p",
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True},
    }
    assert prefill.asked == [(path, one, "Bearer key")]
    assert decode.asked == [(path, {**REQUEST, "kv_transfer_params": PARAMS}, "Bearer key")]


def test_without_a_prefill_it_is_decoded_all_the_same(program: Any) -> None:
    prefill, decode = Engine(status=500), Engine(text="done")
    router = program["serve"](0, prefill.url, decode.url)
    with running(prefill, decode, router):
        assert ask(router.server_port, REQUEST) == (200, {"text": "done"})
    assert [set(one) & {"kv_transfer_params"} for _, one, _ in decode.asked] == [set()]


def test_errors_are_passed_on(program: Any) -> None:
    prefill, decode = Engine(kv_transfer_params=PARAMS), Engine(status=418, error="no")
    router = program["serve"](0, prefill.url, decode.url)
    with running(prefill, decode, router):
        assert ask(router.server_port, REQUEST) == (418, '{"error": "no"}')
        for request, path in ((REQUEST, "/v1/models"), ([], "/v1/completions"), (b"{", "/v1/completions")):
            status, text = ask(router.server_port, request, path)
            error = json.loads(text)["error"]
            assert status == error["code"] == 400 and error["message"].startswith("expected a JSON object")
    decode = Engine()
    decode.server_close()
    router, prefill = program["serve"](0, prefill.url, decode.url), None
    with running(router):
        status, text = ask(router.server_port, REQUEST)
        assert status == 502 and json.loads(text)["error"]["message"].startswith("decode: ")


@pytest.mark.parametrize("head", ["Transfer-Encoding: chunked\r\n\r\n6\r\n", "Content-Length: 12\r\n\r\n"])
def test_half_an_answer_does_not_look_like_a_whole_one(program: Any, head: str) -> None:
    """Red: the text of an error 502 was put behind it, or it just ended."""

    def answer(connection: Any, _: Any) -> None:
        connection.recv(1 << 16)
        connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n{head}data: ".encode())
        connection.close()

    prefill, decode = Engine(kv_transfer_params=PARAMS), Engine()
    decode.process_request = answer  # type: ignore[method-assign, assignment]
    router = program["serve"](0, prefill.url, decode.url)
    with running(prefill, decode, router), pytest.raises((http.client.IncompleteRead, ConnectionError)):
        ask(router.server_port, REQUEST)
