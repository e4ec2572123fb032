"""kvbm.store.keys: the names of contents and units, recomputed with hashlib alone, from the example of the page."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import unit_reader
from kvbm import BindError, BlockShape, load
from kvbm.integrations.identity import key_of_files
from kvbm.store.keys import IRRELEVANT, PARTS, RULE, Chain, Content, key_of_json, model_of, ropes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "store.md"


def example() -> dict[str, Any]:
    [text] = re.findall(r"## Example\n.*?```json\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    return json.loads(text)  # type: ignore[no-any-return]


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_the_example_of_the_page(tmp_path: Path) -> None:
    """By hashlib, by the second reader, and by kvbm: the same keys."""
    told = example()
    files = {name: text.encode() for name, text in told["files"].items()}
    of_files = sha("".join(f"{sha(data)}  {name}\n" for name, data in files.items()).encode())[:32]
    assert told["model"]["weights"] == f"sha256:{of_files}" == unit_reader.weights(files)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    assert key_of_files(tmp_path, "")[:32] == of_files
    for name in ("model", "content"):
        text = json.dumps(told[name], sort_keys=True, separators=(",", ":"))
        assert told[f"{name} key"] == sha(text.encode()) == unit_reader.key(told[name]) == key_of_json(told[name])
    config = told["config.json"]
    model = model_of(told["model"]["weights"], config, ropes(config), "bfloat16", {})
    assert model == told["model"] and told["content"]["model"] == told["model key"]
    content = Content(told["model key"], "title", (0, 1), BlockShape(2, 2, 4, 4, 8, "bfloat16"))
    assert content.fields == told["content"] and content.key == told["content key"]
    first = hashlib.sha256(struct.pack("<4I", *told["tokens"][:4])).digest()
    assert told["unit keys"] == [first.hex(), sha(first + struct.pack("<4I", *told["tokens"][4:]))]
    data = told["salt"].encode()
    root = hashlib.sha256(b"sglang-cache-namespace-v1\x00\x01" + len(data).to_bytes(8, "little") + data).digest()
    assert told["salted unit keys"][0] == sha(root + struct.pack("<4I", *told["tokens"][:4]))
    for salt, names in (("", "unit keys"), (told["salt"], "salted unit keys")):
        assert list(Chain(4, told["tokens"], salt).keys(0, 8)) == told[names] == unit_reader.unit_keys(told["tokens"], 4, salt)


def test_the_page_names_what_does_not_count() -> None:
    [line] = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("These names of a configuration")]
    assert set(re.findall(r"`(\w+)`", line)) == IRRELEVANT
    [line] = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `config` |")]
    assert set(re.findall(r"`(\w+_config)`", line)) == PARTS | {"quantization_config"}
    assert f"`{RULE}`" in PAGE.read_text("utf-8") and load("universal").fingerprint == unit_reader.FINGERPRINT


def test_json_of_keys() -> None:
    """Equal numbers, other orders of names: one key; text outside of ASCII, small numbers: as the page says."""
    assert key_of_json({"b": 1.0, "a": [2.0, 1e-6]}) == key_of_json({"a": [2, 0.000001], "b": 1}) == sha(b'{"a":[2,1e-06],"b":1}')
    assert key_of_json("é𝄞\x7f") == sha(b'"\\u00e9\\ud834\\udd1e\\u007f"')
    assert key_of_json(True) != key_of_json(1)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", "factor": 8}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "type": "llama3"}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8, "attention_factor": None}},
    ],
)
def test_rope_has_one_form(rope: dict[str, Any]) -> None:
    """Whatever names a version of the libraries has for it."""
    assert ropes(rope) == {"": {"factor": 8, "rope_theta": 5e5, "rope_type": "llama3"}}
    assert ropes({"text_config": rope, "vision_config": {"x": 1}})["text_config"]["factor"] == 8
    assert ropes({}) == {} and ropes({"rope_theta": 1e4, "rope_scaling": None})[""]["rope_type"] == "default"
    kinds = {"full": {"rope_theta": 1e6, "rope_type": "default"}, "sliding": {"rope_theta": 1e4}}
    assert ropes({"rope_parameters": kinds})[""]["sliding"] == {"rope_theta": 1e4, "rope_type": "default"}


def test_what_changes_a_content() -> None:
    """Each field; the title does not."""
    shape = BlockShape(2, 2, 4, 16, 8, "bfloat16")
    one = Content("m", "title", (0, 1), shape)
    others = [
        replace(one, model="n"), replace(one, layers=(2, 3)), replace(one, values="fp8"), replace(one, layout=load("hnd")),
        *(replace(one, shape=replace(shape, **{name: value})) for name, value in
          {"nt": 32, "nh": 8, "hd": 16, "dtype": "float16"}.items()),
    ]  # fmt: skip
    assert len({one.key, *(other.key for other in others)}) == 1 + len(others)
    assert replace(one, title="other").key == one.key


@pytest.mark.parametrize("token", [-1, 1 << 32])
def test_tokens_that_are_none(token: int) -> None:
    with pytest.raises(BindError, match=rf"expected tokens from 0 to 2\^32 - 1, got \[5, {token}\]"):
        Chain(2, [5, token]).keys(0, 2)
