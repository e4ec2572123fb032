"""pytest plugin: a test with the fixture `kvbm_case` runs for every pair of the layouts of ``--kvbm-layouts``.

pytest loads it in every run if kvbm is installed.  So nothing is imported here before a test uses the fixture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .layouts import LayoutCase

#: Option → its help text.
_OPTIONS = {
    "layouts": "layouts whose pairs `kvbm_case` goes through: names or paths of YAML files (nhd,hnd,universal,…)",
    "dtypes": "dtypes for them (bfloat16)",
    "batches": "numbers of blocks for them (1,7)",
    "device": "where their arrays are: cpu, cuda or cuda:N (cpu)",
    "framework": "whose arrays they are: numpy or torch (numpy on the CPU)",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--kvbm-layouts`` and the other options."""
    group = parser.getgroup("kvbm", "kvbm: copy kernels between declared layouts")
    for name, text in _OPTIONS.items():
        group.addoption(f"--kvbm-{name}", dest=f"kvbm_{name}", metavar="LIST" if name[-1] == "s" else "TEXT", help=text)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise each test that uses `kvbm_case`."""
    if "kvbm_case" not in metafunc.fixturenames:
        return
    from ..errors import KvbmError
    from .layouts import layout_cases

    given = {name: metafunc.config.getoption(f"kvbm_{name}") for name in _OPTIONS}
    wanted: dict[str, Any] = {name: given[name] for name in ("device", "framework") if given[name] is not None}
    wanted |= {name: _listed(name, given[name]) for name in ("layouts", "dtypes") if given[name] is not None}
    try:
        if given["batches"] is not None:
            wanted["batches"] = [int(text) for text in _listed("batches", given["batches"])]
        cases = list(layout_cases(**wanted))
    except (KvbmError, ValueError) as error:
        raise pytest.Collector.CollectError(f"--kvbm-…: {error}") from None  # the sentence, no traceback
    metafunc.parametrize("kvbm_case", cases, ids=str, indirect=True)


def _listed(name: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if "" in parts:
        raise pytest.Collector.CollectError(f"--kvbm-{name}: expected a list such as a,b,c, got {text!r}")
    return parts


@pytest.fixture
def kvbm_case(request: pytest.FixtureRequest) -> LayoutCase:
    """A copy between two declared layouts: a `kvbm.testing.LayoutCase`.  Its memory is freed after the test."""
    import dataclasses

    case: LayoutCase = request.param
    return dataclasses.replace(case)
