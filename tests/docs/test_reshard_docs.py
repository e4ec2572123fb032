"""docs/howto/reshard.md is correct: its Python runs, its command prints what it shows, its errors are raised."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

import processes
from kvbm import BlockShape, CoverageError, Placement, SpecError, load_shape, reshard
from kvbm.cli.app import main

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "howto" / "reshard.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_examples(tmp_path: Path) -> None:
    """All examples as one script, next to decode.yaml."""
    (declared,) = blocks("yaml")
    (tmp_path / "decode.yaml").write_text(declared, encoding="utf-8")
    done = processes.script("\n".join(blocks("python")), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "prefill (tp4, 16 tokens per block) → decode" in done.stdout and "\nSenders: " in done.stdout
    wrong = "\n".join(blocks("python")).replace("[1, 6, 1]", "[1, 6, 0]").replace("[:, 1, 6, 1]", "[:, 1, 6, 0]")
    assert processes.script(wrong, tmp_path).returncode


def test_command() -> None:
    (block,) = blocks("console")
    command, *expected = block.splitlines()
    printed = CliRunner().invoke(main, shlex.split(command)[2:]).output.splitlines()
    assert expected[-1] == "…" and printed[: len(expected) - 1] == expected[:-1]


def test_forms_of_the_table() -> None:
    """Each form is accepted for its axis."""
    found = re.findall(r"^\| `([\w: ]+)` \|.*\| ([^|]+) \|$", TEXT, re.MULTILINE)
    forms = {key: re.findall(r"`([^`]+)`", row) for key, row in found}
    assert {"mesh", "shard: h", "shard: l", "shard: t", "layers"} <= set(forms)
    model = load_shape("llama-3.1-70b")
    for key, text in ((key, text) for key, texts in forms.items() for text in texts):
        axis, mesh = key.rpartition(" ")[2], "pp3 cp4 tp8" if "bounds" in text else "pp2 cp4 tp8"
        declared = (
            f"mesh: {text}\n" if key == "mesh" else f"mesh: {mesh}\nlayers: {text}\n" if key == "layers" else None
        )
        Placement.parse(
            declared or f"mesh: {mesh}\nshard: {{{axis}: '{text}'}}\n".replace("'{", "{").replace("}'", "}"), model
        )


def test_errors() -> None:
    said = dict(re.findall(r"^\| `(\w+)` \| `(.*)` \|$", TEXT, re.MULTILINE))
    spec, coverage = said["SpecError"], said["CoverageError"]
    six = BlockShape(nl=6, no=2, nh=6, nt=16, hd=16)
    with pytest.raises(SpecError, match=f"^{re.escape(spec)}$"):
        Placement.parse("title: x\nmesh: tp4\nshard:\n  h: tp\n", six, "decode.yaml")
    few = Placement("pp1", model=six, layers=[0, 1, 2, 3], name="prefill")
    with pytest.raises(CoverageError, match=f"^{re.escape(coverage)}$"):
        reshard.plan(few, Placement("pp2", shard={"l": "pp"}, model=six, name="decode"))


def test_names_exist() -> None:
    for name in ("vllm", "trtllm", "sglang", "dynamo"):
        assert f"`{name}(model" in TEXT and name in reshard.__all__
    assert len(TEXT.splitlines()) <= 150
