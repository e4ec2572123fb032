"""docs/howto/connect.md and docs/reference/wires.md are correct: their Python runs, and their names exist."""

from __future__ import annotations

import re
from pathlib import Path

import processes
from kvbm import wire
from kvbm.wire.protocol import Ends

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = "\n".join((DOCS / page).read_text(encoding="utf-8") for page in ("howto/connect.md", "reference/wires.md"))


def test_examples(tmp_path: Path) -> None:
    script = "\n".join(re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))
    done = processes.script(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert processes.script(script.replace("ring[100:1124]", "ring[:1024]"), tmp_path).returncode


def test_names_exist() -> None:
    named = set(re.findall(r"`wire\.(\w+)\(", TEXT))
    assert named == {"memory", "nixl", "torch", "nixl_files", "nixl_objects", "mapped", "faulty"} and named <= set(wire.__all__)
    transports = TEXT.partition("# Wires")[2]
    calls = {
        name for row in re.findall(r"^\| (`\w+\(.*?`) \|", transports, re.MULTILINE) for name in re.findall(r"`(\w+)\(", row)
    }
    assert calls == {name for name in vars(wire.Wire) if not name.startswith("_")}
    assert {"_read", "_check", "_peer"} <= set(dir(Ends)) and str(wire.NOTE_BYTES) in TEXT


def test_laws_are_those_of_the_protocol() -> None:
    laws = re.compile(r"^\s*(\d)\. \*([\w ]+)\.\*", re.MULTILINE)
    assert laws.findall(TEXT) == laws.findall(wire.Wire.__doc__ or "") and len(laws.findall(TEXT)) == 7
