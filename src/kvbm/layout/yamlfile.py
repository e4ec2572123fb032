"""YAML files read node by node, so that every error names file and line."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import yaml

from ..errors import KvbmError, SpecError, printable
from .naming import suggestion
from .shapes import is_file
from .slips import yaml_advice

#: Most characters in a file, and in one text of it.
_LONGEST_FILE, _LONGEST_TEXT = 1 << 16, 4096


def read_text(path: Path, file: str) -> str:
    """The text of a file, at most one character more than allowed.  `file` is its name in error messages.

    Raises `SpecError` if the file does not exist, is not a regular file, cannot be read, or is not UTF-8.
    """
    if not is_file(path):  # opening a FIFO would wait for its writer
        if os.path.lexists(path):
            raise SpecError(f"{printable(file, 300)}: expected a regular file")
        others = ""
        with contextlib.suppress(OSError, ValueError):
            others = suggestion(path.name, [one.name for one in path.parent.glob("*.y*ml")])
        raise SpecError(f"{printable(file, 300)}: no such file{others and '.'}{others}")
    try:
        with path.open(encoding="utf-8") as stream:
            return stream.read(_LONGEST_FILE + 1)
    except UnicodeDecodeError as error:
        raise SpecError(f"{printable(file, 300)}: expected UTF-8: {error}") from None
    except OSError as error:
        raise SpecError(f"{printable(file, 300)}: {error.strerror}") from None


class YamlFile:
    """One file being read.  Its errors name the file and the line."""

    def __init__(self, file: str) -> None:
        self.file = file

    def fail(self, node: yaml.Node | None, message: str) -> NoReturn:
        raise SpecError(f"{self.line(node) if node is not None else printable(self.file, 300)}: {message}")

    def line(self, node: yaml.Node) -> str:
        """File and line of a node.  A layout that derives from another has nodes of both files."""
        return f"{printable(node.start_mark.name, 300)}:{node.start_mark.line + 1}"

    @contextlib.contextmanager
    def guarded(self, text: str) -> Iterator[None]:
        """Context manager: every error inside becomes a `KvbmError` that names the file."""
        if len(text) > _LONGEST_FILE:
            raise SpecError(f"{self.file}: expected at most {_LONGEST_FILE:,} characters")
        try:
            yield
        except KvbmError:
            raise
        except RecursionError:
            raise SpecError(f"{self.file}: nested too deeply") from None
        except (ValueError, ArithmeticError) as error:  # raised by PyYAML for impossible numbers and characters
            raise SpecError(f"{self.file}: not YAML: {error}") from None

    def root(self, text: str, least: str) -> yaml.Node:
        """The root node of the document.  `least` is the minimal content that the error for an empty file names."""
        try:
            loader = yaml.SafeLoader(text)
            loader.name = self.file  # the marks of nodes have it
            root = loader.get_single_node()
        except yaml.MarkedYAMLError as error:
            line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
            raise SpecError(f"{self.file}{line}: not YAML: {error.problem}{yaml_advice(text, error)}") from None
        except yaml.YAMLError as error:
            raise SpecError(f"{self.file}: not YAML: {error}") from None
        if root is None:
            self.fail(None, f"empty; expected at least '{least}'")
        return root

    def mapping(
        self, node: yaml.Node, what: str, known: Sequence[str] | None = None, example: str = ""
    ) -> dict[str, yaml.Node]:
        if not isinstance(node, yaml.MappingNode):
            such_as = f" such as {example}" if example else ""
            self.fail(node, f"{what}: expected a mapping{such_as}, got {kind_of(node)}")
        nodes: dict[str, yaml.Node] = {}
        for key, value in node.value:
            text = self.scalar(key, f"a key of {what}")
            if known is not None and text not in known:
                self.fail(
                    key, f"unknown key {text!r:.200}: expected one of {', '.join(known)}.{suggestion(text, known)}"
                )
            if text in nodes:
                self.fail(key, f"key {text!r:.200} is there twice")
            nodes[text] = value
        return nodes

    def scalar(self, node: yaml.Node, what: str) -> str:
        if not isinstance(node, yaml.ScalarNode):
            self.fail(node, f"{what}: expected a text, got {kind_of(node)}; a text with [ or {{ needs quotation marks")
        text = str(node.value)
        if len(text) > _LONGEST_TEXT or re.search("[\ud800-\udfff]", text):
            self.fail(
                node, f"{what}: expected at most {_LONGEST_TEXT:,} characters, none of them half of a pair (\\ud800)"
            )
        return text

    def strings(self, node: yaml.Node | None, what: str) -> tuple[str, ...]:
        if node is None:
            return ()
        if not isinstance(node, yaml.SequenceNode):
            as_list = f": write [{node.value}]" if isinstance(node, yaml.ScalarNode) and node.value else ""
            self.fail(node, f"{what}: expected a list, got {kind_of(node)}{as_list}")
        return tuple(self.scalar(item, f"an entry of {what}") for item in node.value)


def kind_of(node: yaml.Node) -> str:
    """The kind of a node for error messages; for a scalar, its value."""
    return {"MappingNode": "a mapping", "SequenceNode": "a list", "ScalarNode": f"{node.value!r:.200}"}[type(node).__name__]
