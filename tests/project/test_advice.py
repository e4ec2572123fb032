"""What messages and pages advise exists: the parameters of the function that was called, commands, and their flags."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest

import kvbm
from kvbm.cli.app import main

ROOT = Path(kvbm.__file__).parent
PAGES = Path(__file__).parents[2]

#: Advice ``name=`` in a message.  A name inside a text of sizes (``nl=…,no=…``) follows a comma or a digit, and is none.
_ADVISED = re.compile(
    r"\b(?:pass|expected|unless|or|and|use|such as|with|add|another|name)\b[^;:.]{0,60}?(?<![\w,.=-])([a-z][a-z_]*)="
)

#: Who plans a cast.
CASTING = (
    "kvbm.convert",
    "kvbm.Transfer",
    "kvbm.plan",
    "kvbm.store.save",
    "kvbm.store.load",
    "kvbm.store.convert",
    "kvbm.torch.convert",
    "kvbm.torch.convert_",
    "kvbm.numpy.convert",
    "kvbm.numpy.convert_",
    "kvbm.jax.convert",
    "kvbm.reshard.plan",
    "kvbm.reshard.Local",
)

#: File and advised parameter → the public functions in which a caller may read it.
READ_IN: dict[tuple[str, str], tuple[str, ...]] = {
    ("cli/common.py", "nl"): ("kvbm.BlockShape",),
    ("copy/executor.py", "cast"): ("kvbm.convert", "kvbm.Transfer"),
    ("copy/executor.py", "strategy"): ("kvbm.Transfer",),
    ("copy/transfer.py", "digests"): ("kvbm.Transfer.copy",),
    ("engines/adapters.py", "group"): ("kvbm.Pool.from_vllm",),
    ("engines/adapters.py", "kv_cache_config"): ("kvbm.Pool.from_vllm",),
    ("engines/adapters.py", "layout"): ("kvbm.Pool.from_sglang",),
    ("engines/adapters.py", "page_size"): ("kvbm.Pool.from_sglang",),
    ("engines/adapters.py", "shape"): ("kvbm.Pool.from_vllm",),
    ("engines/adapters.py", "vllm_config"): ("kvbm.Pool.from_vllm",),
    ("engines/vllm.py", "group"): ("kvbm.vllm_groups.groups", "kvbm.Pool.from_vllm"),
    ("engines/vllm.py", "layout"): ("kvbm.vllm_groups.groups", "kvbm.Pool.from_vllm"),
    ("integrations/transformers/batching.py", "request_id"): (
        "kvbm.integrations.transformers.Batching.reserve",
        "kvbm.integrations.transformers.Batching.restore",
    ),
    ("integrations/transformers/batching.py", "new_id"): ("kvbm.integrations.transformers.HandOver.__call__",),
    ("kernels.py", "stream"): ("kvbm.kernels.vectorized_copy", "kvbm.kernels.memcpy_batch"),
    ("layout/shapes.py", "nl"): ("kvbm.BlockShape",),
    ("matching/declare.py", "shape"): ("kvbm.declare",),
    ("link/chunk.py", "most"): ("kvbm.reshard.chunks", "kvbm.reshard.Cut"),
    ("link/endpoint.py", "cast"): ("kvbm.reshard.Endpoint",),
    ("link/endpoint.py", "direct"): ("kvbm.reshard.Endpoint",),
    ("matching/match.py", "no"): ("kvbm.BlockShape",),
    ("matching/match.py", "num_blocks"): ("kvbm.Pool",),
    ("memory/allocation.py", "device"): ("kvbm.Pool.allocate", "kvbm.store.load"),
    ("memory/array_checks.py", "nl"): ("kvbm.BlockShape",),
    ("memory/array_checks.py", "shape"): (
        "kvbm.Pool",
        "kvbm.torch.convert",
        "kvbm.torch.convert_",
        "kvbm.numpy.convert",
        "kvbm.jax.convert",
    ),
    ("planner/cast.py", "cast"): CASTING,
    ("planner/plan.py", "cast"): CASTING,
    ("reshard/messages.py", "cast"): ("kvbm.reshard.plan",),
    ("reshard/packer.py", "layouts"): ("kvbm.reshard.plan",),
    ("memory/streams.py", "stream"): (
        "kvbm.convert",
        "kvbm.Transfer.copy",
        "kvbm.Pool.digest",
        "kvbm.store.save",
        "kvbm.testing.locate",
    ),
    ("pool/digester.py", "out"): ("kvbm.Pool.digest", "kvbm.PoolSection.digest"),
    ("pool/digester.py", "tokens"): ("kvbm.Pool.digest", "kvbm.PoolSection.digest", "kvbm.Transfer.copy"),
    ("pool/pool.py", "num_blocks"): ("kvbm.Pool",),
    ("reshard/presets.py", "layers"): ("kvbm.reshard.presets.of_vllm",),
    ("reshard/presets.py", "model"): ("kvbm.reshard.presets.of_vllm",),
    ("reshard/report.py", "prefer"): ("kvbm.reshard.plan",),
    ("reshard/sequence.py", "origin"): ("kvbm.Span",),
    ("store/blocks.py", "cast"): ("kvbm.store.save", "kvbm.store.load", "kvbm.store.convert"),
    ("store/casting.py", "cast"): ("kvbm.store.load", "kvbm.store.convert", "kvbm.store.Stored.pool"),
    ("store/file.py", "cast"): ("kvbm.store.load",),
    ("store/file.py", "dtype"): ("kvbm.store.load",),
    ("store/file.py", "verify"): ("kvbm.store.load", "kvbm.store.convert"),
    ("torch/operators.py", "dtype"): ("kvbm.BlockShape",),
    ("wire/_torch.py", "backend"): ("kvbm.wire.torch",),
}


@cache
def _texts(path: Path) -> tuple[str, ...]:
    return tuple(_read(path))


def _read(path: Path) -> Iterator[str]:
    """Every text of a module that is not a docstring; values in it are ``…``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module | ast.AsyncFunctionDef) and ast.get_docstring(
            node, clean=False
        ):
            inside.add(id(node.body[0].value))  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
            inside |= {id(part) for part in node.values}
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


def _modules() -> Iterator[Path]:
    yield from (path for path in sorted(ROOT.rglob("*.py")) if "bench" not in path.relative_to(ROOT).parts)


def _advice() -> set[tuple[str, str]]:
    return {
        (path.relative_to(ROOT).as_posix(), name)
        for path in _modules()
        if path.name not in ("gallery.py", "nvcc.py", "remote.py", "notebook.py")
        for text in _texts(path)
        for name in _ADVISED.findall(text)
    }


def _function(name: str) -> Any:
    words = name.split(".")
    for cut in range(len(words), 0, -1):
        try:
            found = importlib.import_module(".".join(words[:cut]))
        except ImportError as error:
            if not str(error.name).startswith("kvbm"):  # a framework that is not installed
                raise
            continue
        for word in words[cut:]:
            found = getattr(found, word)
        return found
    raise LookupError(name)


@pytest.mark.slow  # 1.5 s
def test_each_parameter_that_a_message_advises_is_one_of_the_function_that_was_called() -> None:
    """`READ_IN` names the functions in which a caller may read the advice; their signatures are asked."""
    unknown = _advice() - READ_IN.keys()
    assert all(READ_IN.values()), "advice that nobody reads"
    assert not unknown, f"say in READ_IN from which functions callers read this advice: {sorted(unknown)}"
    for (file, name), functions in READ_IN.items():
        for function in functions:
            try:
                parameters = inspect.signature(_function(function)).parameters
            except ImportError:  # a bridge of a framework that is not installed
                continue
            assert name in parameters, f"{file} advises {name}=, and {function} has {', '.join(parameters)}"


# ---- commands ------------------------------------------------------------------------------------------------------

_COMMAND = re.compile(r"(?:`|^\$ |^)kvbm((?: [a-z][a-z-]*)+)((?:[^`\n|#]*?))(?:`|\n|$)", re.MULTILINE)
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def _command(words: list[str]) -> tuple[click.Command | None, list[click.Command]]:
    """The command that these words begin with, and its parents."""
    found: click.Command = main
    around = []
    for word in words:
        if not isinstance(found, click.Group):
            break
        under = found.get_command(click.Context(found), word)
        if under is None:
            return None, around
        around.append(found)
        found = under
    return found, around


def _under(command: click.Command) -> list[click.Command]:
    """The commands of a group: ``kvbm link --wire`` is said of all of them."""
    if not isinstance(command, click.Group):
        return []
    context = click.Context(command)
    found = (command.get_command(context, name) for name in command.list_commands(context))
    return [one for one in found if one is not None]


def _named() -> Iterator[tuple[str, str, str]]:
    """Place, command and the rest of the line, of every command in a message or on a page."""
    for path in _modules():
        for text in _texts(path):
            for words, rest in re.findall(r"`kvbm((?: [a-z][a-z-]*)+)([^`]*)`", text):
                yield path.name, words, rest
    pages = [
        PAGES / "README.md",
        PAGES / "CONTRIBUTING.md",
        PAGES / "SECURITY.md",
        *sorted((PAGES / "docs").rglob("*.md")),
    ]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for words, rest in re.findall(r"`kvbm((?: [a-z][a-z-]*)+)([^`\n]*)`", text):
            yield page.name, words, rest
        for block in re.findall(r"```(?:sh|console)[^\n]*\n(.*?)```", text, re.DOTALL):
            for words, rest in re.findall(
                r"^(?:\$ )?kvbm((?: [a-z][a-z-]*)+)((?:\\\n|[^\n|#>])*)", block, re.MULTILINE
            ):
                yield page.name, words, rest


@pytest.mark.slow  # 1.3 s
def test_each_command_and_flag_that_is_named_exists() -> None:
    count = 0
    for place, words, rest in _named():
        command, around = _command(words.split())
        assert command is not None, f"{place}: kvbm{words}: no such command"
        known = {
            option
            for one in [command, *around, *_under(command)]
            for param in one.get_params(click.Context(one))
            for option in (*param.opts, *param.secondary_opts)
        }
        for flag in _FLAG.findall(rest):
            assert flag in known | {"--help", "--version"}, f"{place}: kvbm{words}{rest}: no flag {flag}"
        count += 1
    assert count > 60


@pytest.mark.slow  # 0.7 s
def test_each_flag_in_a_message_is_one_of_some_command() -> None:
    def flags(command: click.Command) -> Iterator[str]:
        for param in command.get_params(click.Context(command)):
            yield from (*param.opts, *param.secondary_opts)
        for name in command.list_commands(click.Context(command)) if isinstance(command, click.Group) else ():
            under = command.get_command(click.Context(command), name)
            assert under is not None
            yield from flags(under)

    known = {*flags(main), "--help", "--version"}
    others = {
        "--hf-overrides",
        "--no-enable-prefix-caching",
        "--enable-prefix-caching",
        "--kv-transfer-config",
    }  # of engines
    for path in _modules():
        if "integrations" in path.parts or path.name in (
            "runtime.py",
            "remote.py",
            "nvcc.py",
            "nvrtc.py",
            "serve_check.py",
            "plugin.py",
            "cache.py",
        ):  # other programs' flags
            continue
        for text in _texts(path):
            if "<!--" in text or "-->" in text:
                continue
            for flag in _FLAG.findall(text):
                assert flag in known | others, f"{path.name}: {flag}: {text[:200]}"
