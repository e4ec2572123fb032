"""What a beginner gets wrong, and every word of the answer.

``tests/data/messages`` has the cases: an input between ``<<<`` and ``>>>``, then the message.  ``layouts.txt`` has layout files
(at Llama 3.1 8B, with 4 blocks), ``calls.txt`` has Python.  ``KVBM_UPDATE_GOLDEN=1`` writes what the messages are now.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvbm
from kvbm.layout.spec import parse
from kvbm.matching import match

HERE = Path(__file__).parents[1] / "data" / "messages"
SHAPE = "nl=2,no=2,nh=4,nt=16,hd=8,dtype=float16"


def cases(name: str) -> Iterator[tuple[str, str]]:
    text = (HERE / name).read_text(encoding="utf-8")
    yield from re.findall(r"^<<<\n(.*?)\n>>>\n(.*?)\n(?=\n<<<|\Z)", text, re.DOTALL | re.MULTILINE)


def a_layout(text: str) -> None:
    parse(text, "mine.yaml").resolve("llama-3.1-8b", 4)


def a_call(text: str) -> None:
    def a(*shape: int) -> Any:
        return np.zeros(shape, "float16")

    def which(array: str) -> None:
        match.parse([array], kvbm.load_shape(SHAPE))

    eval(text, {"which": which, "kvbm": kvbm, "np": np, "a": a, "S": SHAPE, "nhd": kvbm.load("nhd").resolve(SHAPE, 6)})


@pytest.mark.parametrize(("name", "run"), [("layouts.txt", a_layout), ("calls.txt", a_call)])
def test_messages(name: str, run: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # where there are no files
    (tmp_path / "mine.yaml").write_text("order: b l o h t d\n", encoding="utf-8")
    now = []
    for given, _ in cases(name):
        with pytest.raises(kvbm.KvbmError) as info:
            run(given)
        now.append(f"<<<\n{given}\n>>>\n{info.value}\n")
    assert len(now) > 20
    if os.environ.get("KVBM_UPDATE_GOLDEN"):
        (HERE / name).write_text("\n".join(now), encoding="utf-8")
    for case, (given, message) in zip(now, cases(name), strict=True):
        assert case == f"<<<\n{given}\n>>>\n{message}\n"
    assert (HERE / name).read_text(encoding="utf-8") == "\n".join(now), "nothing else is in the file"
