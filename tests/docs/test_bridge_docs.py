"""docs/howto/arrays.md is correct: its Python runs, the refusals that it lists are raised, and its names exist."""

from __future__ import annotations

import doctest
import importlib
import os
import re
from pathlib import Path

import pytest

from processes import script

pytest.importorskip("torch")

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "howto" / "arrays.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
TORCH = [block for block in PYTHON if "cuda" not in block and "kvbm.torch" in block]
CUDA = [block for block in PYTHON if "cuda" in block or "side" in block]
OTHERS = [block for block in PYTHON if block not in TORCH and block not in CUDA]


def passes(folder: Path, *parts: str) -> None:
    text = "\n".join(parts)
    done = script(text, folder, module="torch" if "import torch" in text else "", JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_pytorch_under_the_compiler(tmp_path: Path) -> None:
    assert len(TORCH) == 5 and "fullgraph=True" in TORCH[0]
    passes(tmp_path, *TORCH)


@pytest.mark.gpu
def test_cuda(tmp_path: Path) -> None:
    assert len(CUDA) == 2
    passes(tmp_path, "import torch\nimport kvbm.torch\n" + re.findall(r"^SIZES = .*$", TEXT, re.MULTILINE)[0], *CUDA)


@pytest.mark.parametrize("block", OTHERS, ids=["numpy", "jax"])
@pytest.mark.slow
def test_others(tmp_path: Path, block: str) -> None:
    if "jax" in block:
        pytest.importorskip("jax")
    passes(tmp_path, block)


def test_the_refusals_are_those_of_the_tests() -> None:
    """Each line of the list is the expected message of a case of test_torch.py."""
    import test_torch

    (listed,) = re.findall(r"^```text\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    known = [match for _, _, match in test_torch.REFUSED.values()]
    known += [
        r"convert: input #1 is on cpu, input #0 on cuda:0; .* construct kvbm\.Transfer.* pinned .*\.to\('cuda:0'\)"
    ]
    known += [r"convert_: (in|out)put #0 requires a gradient, .*use kvbm.torch.convert"]
    for line in listed.splitlines():
        assert any(re.search(match, line) for match in known), line


def test_names_exist() -> None:
    for module, name in set(re.findall(r"`(kvbm\.(?:torch|numpy))\.(\w+)", TEXT)):
        assert hasattr(importlib.import_module(module), name), (module, name)
    root = Path(__file__).resolve().parents[2]
    for path in re.findall(r"\b(?:src|benchmarks)/[\w/]+\.py", TEXT):
        assert (root / path).is_file(), path


@pytest.mark.parametrize(
    "name", ["kvbm.memory.array_checks", "kvbm._bridge", "kvbm.jax", "kvbm.torch.functions", "kvbm.torch.fences"]
)
@pytest.mark.slow  # 0.6 s
def test_docstrings(name: str) -> None:
    if name == "kvbm.jax":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        pytest.importorskip("jax")
    module = importlib.import_module(name)
    failed, tried = doctest.testmod(module)
    assert failed == 0 and (tried > 0 or name == "kvbm.torch.fences")
