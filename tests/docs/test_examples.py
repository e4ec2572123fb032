"""The programs of examples/ run, check themselves, and are listed in the documentation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from processes import script

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PRINTED = {
    "offload_loop.py": "3 blocks out, 1 block in, 4 layers one by one: the same bits",
    "two_engines.py": "4 messages, 4,800 rows compared: all in place",
    "files.py": "found\nnot loaded: ",
    "own_kernel.py": "nhd → universal: wrong at ",
    "torch_compile.py": "6 blocks in one graph, and their gradients: the same bits",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTED)
def test_examples(name: str, tmp_path: Path) -> None:
    with_torch = name in {"offload_loop.py", "torch_compile.py"}
    if with_torch:
        pytest.importorskip("torch")
    done = script((EXAMPLES / name).read_text("utf-8"), tmp_path, module="torch" if with_torch else "")
    assert done.returncode == 0, done.stderr
    assert PRINTED[name] in done.stdout


@pytest.mark.gpu
def test_offload_loop_on_a_gpu(tmp_path: Path) -> None:
    done = script((EXAMPLES / "offload_loop.py").read_text("utf-8"), tmp_path, "--device", "cuda")
    assert done.returncode == 0 and PRINTED["offload_loop.py"] in done.stdout, done.stderr


def test_the_notebook() -> None:
    """Its code cells, in order, in one namespace; the stored file has no output."""
    book = json.loads((EXAMPLES / "layouts.ipynb").read_text("utf-8"))
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert len(cells) == 5 and not any(cell["outputs"] for cell in cells)
    names: dict[str, object] = {}
    for cell in cells:
        exec(compile("".join(cell["source"]), "layouts.ipynb", "exec"), names)
    assert names["layout"].order_text == "l b h t o d"  # type: ignore[attr-defined]


def test_every_example_is_listed() -> None:
    """In examples/README.md; single programs there or on a page of the documentation."""
    listed = set(re.findall(r"\]\(([^):]+)\)", (EXAMPLES / "README.md").read_text("utf-8")))
    for path in (*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")):
        assert path.name in listed, path.name
    assert {name for name in listed if name.endswith(".py") and "/" not in name} == set(PRINTED) | {"transformers_batching.py"}
