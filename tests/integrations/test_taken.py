"""`integrations.taken`: the table has all that the integrations take, and what an engine lacks is named.  No engine runs here."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import kvbm
import taking
from kvbm.integrations import taken, versions
from kvbm.integrations.taken import TAKEN, _lines, lacking
from kvbm.integrations.versions import require_version

ENTRIES = [
    (key, module, name, attribute, parameters, is_replaced)
    for key, modules in TAKEN.items() for module, names in modules.items() for name, text in names.items()
    for is_replaced, attribute, parameters in [(False, "", None), *_lines(text)]
]  # fmt: skip


def attributes_of(name: str) -> set[str]:
    return {attribute for _, _, known, attribute, _, _ in ENTRIES if known == name}


# ---- complete ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # half a second
def test_all_imports_are_in_the_table() -> None:
    known = {(module, name) for _, module, name, *_ in ENTRIES}
    found = taking.imports()
    assert len(found) > 40
    missing = {(module, name) for module, name in found if (module, name or "__version__") not in known}
    assert not missing, f"add to integrations/taken.py: {sorted(missing)}"
    modules = {module for module, _ in found}
    assert {"vllm.v1.request", "sglang.version", "lmcache._version", "transformers"} <= modules


@pytest.mark.slow  # 0.6 s
def test_all_that_is_called_of_a_base_is_in_the_table() -> None:
    """And no method in the table is one that nobody replaces."""
    seen = 0
    for name, bases, _, calls in taking.replaced():
        known = set[str]().union(*map(attributes_of, bases))
        missing = set(calls) - known - {"__init__"}
        assert not missing, f"{name}: add to {sorted(bases)} in integrations/taken.py: {sorted(missing)}"
        seen += len(calls)
    assert seen > 30
    everywhere: dict[str, set[str]] = {}
    for _, bases, methods, _ in taking.replaced():
        for base in bases:
            everywhere.setdefault(base, set()).update(methods)
    for _, _, name, attribute, _, is_replaced in ENTRIES:
        if is_replaced and name in everywhere:
            assert attribute in everywhere[name], f"{name}.{attribute}: nobody replaces it"


def test_attributes_of_objects_are_in_the_table() -> None:
    found = taking.attributes()
    assert len(found) > 25
    missing = {(name, attribute) for name, attribute in found if attribute not in attributes_of(name)}
    assert not missing, f"add to integrations/taken.py: {sorted(missing)}"


# ---- each entry that is missing has its sentence -----------------------------------------------------------------------


def function(parameters: list[str], more: str = "") -> Any:
    """A function of these arguments, and of one more that must be given."""
    names = ", ".join(["self", *(name.removesuffix("?") for name in parameters), *([more] if more else [])])
    scope: dict[str, Any] = {}
    exec(f"def made({names}): pass", scope)
    return scope["made"]


class Engine:
    """Modules with all that a part of the table names; what is left out or changed is said by module, name and attribute."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, key: str, without: tuple[str, ...] = (), more: str = "") -> None:
        roots = {module.split(".")[0] for module in taken.TAKEN[key]}
        for name in [name for name in sys.modules if name.split(".")[0] in roots and made.get(name) is not sys.modules[name]]:
            monkeypatch.delitem(sys.modules, name)  # the engine itself
        for module, names in taken.TAKEN[key].items():
            parts = module.split(".")
            for end in range(1, len(parts) + 1):
                if (part := ".".join(parts[:end])) not in made:
                    made[part] = ModuleType(part)
                    made[part].__path__ = []  # type: ignore[attr-defined]
                    monkeypatch.setitem(sys.modules, part, made[part])
            if without == (module,):
                monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
                continue
            for name, text in names.items():
                if without != (module, name):
                    setattr(made[module], name, self._item(text, without[2] if without[:2] == (module, name) else None, more))

    @staticmethod
    def _item(text: str, without: str | None, more: str) -> Any:
        found = type("Made", (), {"__init__": function([])})
        for _, attribute, parameters in _lines(text):
            changed = attribute == without
            if not attribute:
                return function(["x", *(parameters or [])][1:], more if changed else "")
            if not changed or more:
                setattr(found, attribute, None if parameters is None else function(parameters, more if changed else ""))
        return found


made: dict[str, ModuleType] = {}


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> Iterator[None]:
    made.clear()
    versions._WARNED.clear()
    yield
    versions._WARNED.clear()


@pytest.mark.parametrize("key", TAKEN)
def test_an_engine_that_has_all_lacks_nothing(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Engine(monkeypatch, key)
    assert list(lacking(key)) == []


@pytest.mark.parametrize("key", TAKEN)
def test_each_missing_module_and_name_is_named(key: str) -> None:
    for module, names in TAKEN[key].items():
        for without in [(module,), *((module, name) for name in names)]:
            made.clear()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(taken, "TAKEN", {key: {module: names}})
                Engine(patch, key, without)
                [text] = lacking(key)
            assert text.startswith(".".join(without)), without


@pytest.mark.parametrize("key", TAKEN)
def test_each_missing_attribute_and_each_new_argument_is_named(key: str) -> None:
    seen = 0
    for one, module, name, attribute, parameters, _ in ENTRIES:
        if one != key or not attribute or attribute == "__init__":
            continue
        for more in ("", *(["new"] if parameters is not None else [])):
            made.clear()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(taken, "TAKEN", {key: {module: {name: TAKEN[key][module][name]}}})
                Engine(patch, key, (module, name, attribute), more)
                [text] = lacking(key)
            assert text.startswith(f"{module}.{name}.{attribute} (expected {'the arguments' if more else 'it, got none'}"), text
            assert not more or "new" in text.rpartition("got")[2]
            seen += 1
    assert seen


def test_objects_have_what_their_class_assigns_or_annotates() -> None:
    class Base:
        one: int

        def __init__(self) -> None:
            self.two = 2

    class Derived(Base):
        def begin(self) -> None:
            self.three = 3

    assert [taken._has(Derived, name) for name in ("one", "two", "three", "begin", "four")] == [True] * 4 + [False]


# ---- versions ----------------------------------------------------------------------------------------------------------


def test_an_unknown_version_that_has_all_warns_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    Engine(monkeypatch, "vLLM")
    for _ in range(2):
        require_version("vLLM", "0.99.1", "0.32", "0.34")
    [record] = caplog.records
    said = record.getMessage()
    assert record.name == "kvbm.integrations.versions"
    assert "vLLM 0.99.1 was not tested, only 0.32 or newer, before 0.34. It has all names" in said


def test_an_unknown_version_that_lacks_something_is_refused_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    Engine(monkeypatch, "vLLM", ("vllm.v1.core.block_pool", "BlockPool", "touch"))
    for _ in range(2):
        with pytest.raises(
            kvbm.BindError,
            match=r"vllm: expected vLLM 0\.32 or newer, before 0\.34, got 0\.99, which lacks vllm\.v1\.core\.block_pool\."
            r"BlockPool\.touch \(expected it, got none\); install one of these",
        ):
            require_version("vLLM", "0.99", "0.32", "0.34")


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="no transformers")
def test_transformers() -> None:
    """The installed one has all of it, and all that is replaced there is in the table."""
    assert list(lacking("transformers")) == []
