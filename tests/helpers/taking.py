"""What kvbm's integrations take from engines, read from their source: imports, replaced methods, `super` calls, attributes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import kvbm.integrations

ROOT = Path(kvbm.integrations.__file__).parent
ENGINES = ("vllm", "sglang", "lmcache", "transformers")

#: Names of variables, and of attributes behind a point, that hold an object of vLLM → the class in `TAKEN` that has its attributes.
VARIABLES = {
    "request": "Request", "kv_cache_config": "KVCacheConfig", "connector_output": "KVConnectorOutput",
    ".coordinator": "KVCacheCoordinator", ".block_pool": "BlockPool",
    "context": "ReqContext", "current_platform": "current_platform", ".connector_worker": "OffloadingConnectorWorker",
    ".scheduler": "OffloadingConnectorScheduler",
}  # fmt: skip

#: What is kvbm's own among them: dispatch on a name of another engine's object, or kvbm's variable of that name.
OWN = {("Request", "resumable"), ("ReqContext", "update")}


def trees(folder: str = "") -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def imports() -> set[tuple[str, str]]:
    """Module and name of each import from an engine; the name is empty for a module itself."""
    found = set()
    for _, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in ENGINES:
                found |= {(str(node.module), alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {(alias.name, "") for alias in node.names if alias.name.split(".")[0] in ENGINES}
    return found


def replaced() -> Iterator[tuple[str, set[str], list[str], list[str]]]:
    """Each class whose bases are an engine's: its name, the names of these bases, its methods, what it calls of `super`."""
    for _, tree in trees():
        froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
        names = {alias.name for node in froms for alias in node.names}
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)} & names
            calls = [
                call.attr for call in ast.walk(node)
                if isinstance(call, ast.Attribute) and isinstance(call.value, ast.Call) and ast.unparse(call.value) == "super()"
            ]  # fmt: skip
            if bases:
                yield node.name, bases, [one.name for one in node.body if isinstance(one, ast.FunctionDef)], calls


def attributes() -> set[tuple[str, str]]:
    """Class of vLLM, and attribute, of all that is read of the `VARIABLES`."""
    found = set()
    for _, tree in trees("vllm"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                value = node.value
                name = value.id if isinstance(value, ast.Name) else f".{value.attr}" if isinstance(value, ast.Attribute) else ""
                if name in VARIABLES:
                    found.add((VARIABLES[name], node.attr))
    return found - OWN
