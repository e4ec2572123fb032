"""The operator's page: what needs no engine.  tests/engines/test_vllm_operate.py runs its engines."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest
from click.testing import CliRunner

import pages
from kvbm.cli.app import main
from kvbm.integrations.vllm import models, serving

PAGE = pages.read("docs/engines/operate.md")
BLOCKS = {title: body for _, title, body in pages.fences(PAGE) if title}
INTEGRATIONS = (pages.ROOT / "src" / "kvbm" / "integrations", pages.ROOT / "src" / "kvbm" / "link")


def transfers(title: str) -> dict[str, Any]:
    """The configuration of a command."""
    words = [word for word in shlex.split(BLOCKS[title]) if "kv_connector" in word]
    assert len(words) == 1
    found: dict[str, Any] = json.loads(words[0])
    return found


def test_serve_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pages.ROOT)
    monkeypatch.setattr(serving, "_table", lambda _: None)
    [block] = pages.blocks(PAGE, "console")
    command, *expected = block.splitlines()
    done = CliRunner().invoke(main, shlex.split(command)[2:], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert re.fullmatch(pages.pattern("\n".join(expected)), done.stdout), done.stdout


@pytest.mark.parametrize("titles", [("prefill", "decode"), ("prefill, first machine", "decode, second machine")])
def test_both_connectors_are_those_of_serve_check(titles: tuple[str, str]) -> None:
    """``--json`` has them under ``together``; addresses, secrets and folders are the operator's."""
    engine = serving.Engine(models.read(str(pages.ROOT / "tests" / "data" / "models" / "llama-3.1-8b.json")), nt=32)
    told = serving.as_json(engine, 64 << 30, to=engine)["together"]

    def plain(transfer: dict[str, Any]) -> dict[str, Any]:
        inner = transfer["kv_connector_extra_config"]["connectors"]
        for one in inner:
            extra = one.pop("kv_connector_extra_config", {})
            if "cpu_bytes_to_use" in extra:
                one["bytes"] = extra["cpu_bytes_to_use"]
        return transfer

    for side, title in zip(("prefill", "decode"), titles, strict=True):
        assert plain(transfers(title)) == plain(json.loads(json.dumps(told[side]["kv_transfer_config"])))


def test_without_another_engine_there_is_nothing_together() -> None:
    engine = serving.Engine(models.read(str(pages.ROOT / "tests" / "data" / "models" / "llama-3.1-8b.json")))
    assert serving.as_json(engine, 64 << 30)["together"] is None
    small = serving.as_json(engine, 1 << 10, to=engine)  # one of the two is refused
    assert small["together"] is None and small["disaggregation"] and len(small["refused"]) == 1


def test_settings_are_those_of_the_other_pages() -> None:
    """Every setting of the page's commands is on the page of its connector."""
    of = {"KvbmConnector": "vllm-disaggregated", "KvbmOffloadingConnector": "vllm"}
    text = {name: pages.read(f"docs/engines/{page}.md") for name, page in of.items()}
    found = 0
    for title, body in BLOCKS.items():
        if "kv_connector" not in body:
            continue
        outer = transfers(title)
        for one in outer["kv_connector_extra_config"].get("connectors", [outer]):
            for name in one.get("kv_connector_extra_config", {}):
                found += 1
                assert f"`{name}`" in text[one["kv_connector"]], name
    assert found >= 15


def test_log_lines_are_in_the_code() -> None:
    """Every text of the log that the page quotes stands in the sources; `…` and what depends on a run do not count."""
    source = "".join(path.read_text("utf-8") for folder in INTEGRATIONS for path in sorted(folder.rglob("*.py")))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # strings over several lines
    source = re.sub(r"%\w|\{[^{}]*\}", "…", source)
    rows = [cell for row in PAGE.splitlines() if row.startswith("| `") for cell in re.findall(r"`([^`]*…[^`]*)`", row)]
    rows += [line for title in BLOCKS if title.startswith("log") for line in BLOCKS[title].splitlines()]
    rows += [cell for cell in re.findall(r"`(kvbm: [^`]*)`", PAGE) if "…" not in cell]
    changing = r"\b\d[\d.]*\b|vLLM|Transfer\(.*\)|/mnt/kv\S*|'[\d.]*'|tokens: expected.*|(?<=not )(?:written|read)\b"
    pieces = [piece.strip(" ,:") for row in rows for piece in re.split(rf"…|: |{changing}", row)]
    pieces = [piece for piece in pieces if len(piece) > 8]
    assert len(pieces) >= 13
    for piece in pieces:
        assert piece in source, piece
