"""A second reader of the folder that engines share, from docs/reference/store.md, file-format.md and digest.md alone.

It shares no code with kvbm.  It finds the units of a prompt, compares digests, and rebuilds K and V of any layer and head.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

RULE, FINGERPRINT = "kvbm-store-2", "d8f046b400eefb12"
#: safetensors' code → NumPy's type of the bits
TYPES = {"F32": "<u4", "F16": "<u2", "BF16": "<u2", "I32": "<u4"}
WORDS = [0xA55C9364D6777AA3, 0xB78448C894E972E3, 0x1E2754521961FFBB, 0x055CCEA021BDA7A7]


def written(value: Any) -> Any:
    """A number without a fraction is an integer."""
    if isinstance(value, dict):
        return {name: written(one) for name, one in value.items()}
    if isinstance(value, list):
        return [written(one) for one in value]
    return int(value) if isinstance(value, float) and value == math.floor(value) else value


def key(value: Any) -> str:
    """The key of a model, and of a content."""
    text = json.dumps(written(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def weights(files: dict[str, bytes]) -> str:
    """The text of the weights, of the contents of their files by name, in order."""
    lines = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items())
    return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()[:32]}"


def unit_keys(tokens: list[int], unit: int, salt: str = "") -> list[str]:
    """The keys of the whole units of a sequence."""
    last, found, data = b"", [], salt.encode()
    if salt:
        last = hashlib.sha256(b"sglang-cache-namespace-v1\x00\x01" + struct.pack("<Q", len(data)) + data).digest()
    for at in range(0, len(tokens) - unit + 1, unit):
        last = hashlib.sha256(last + struct.pack(f"<{unit}I", *tokens[at : at + unit])).digest()
        found.append(last.hex())
    return found


def fold(x: np.ndarray) -> np.ndarray:
    return x ^ (x >> np.uint64(32))


class Reader:
    """The units of one content.

    Parameters
    ----------
    folder : Path
        The folder that engines share.
    content : str
        Key of the content.
    """

    def __init__(self, folder: Path, content: str) -> None:
        self.root, self.content = folder / content, content
        found = json.loads((self.root / "content.json").read_text("utf-8"))
        self.fields, self.model = found["content"], found["model"]
        assert self.fields["rule"] == RULE and self.fields["fingerprint"] == FINGERPRINT, self.fields
        assert key(self.fields) == content and key(self.model) == self.fields["model"], "content.json is another's"
        self.shape = self.fields["shape"]

    def files(self, unit: str) -> list[tuple[int, int, Path]]:
        """First and last head of each file of a unit."""
        home = self.root / unit[:2] / unit
        names = ((path, re.fullmatch(r"heads-(\d+)-(\d+)\.safetensors", path.name)) for path in home.glob("*"))
        return sorted((int(match[1]), int(match[2]), path) for path, match in names if match)

    def units(self, tokens: list[int], salt: str = "") -> list[str]:
        """The units of a prompt that are here with all heads, up to the first that is not."""
        found = []
        for unit in unit_keys(tokens, self.shape["nt"], salt):
            heads = {head for first, last, _ in self.files(unit) for head in range(first, last + 1)}
            if not heads.issuperset(range(self.shape["nh"])):
                break
            found.append(unit)
        return found

    def read(self, unit: str, path: Path, first: int, last: int) -> np.ndarray:
        """The bits of a file's elements ``(heads, layers, K and V, tokens, elements)``; AssertionError for one that was changed."""
        data = path.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        said, entry = header["__metadata__"], header["alloc_00000"]
        assert said["store.content"] == self.content and said["store.unit"] == unit, path
        assert said["store.heads"] == f"{first}-{last}" and said["kvbm.fingerprint"] == FINGERPRINT, path
        assert json.loads(said["kvbm.shape"]) == {**self.shape, "nh": last - first + 1}, path
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        assert end <= len(data), f"{path} is cut"
        bits = np.frombuffer(data[begin:end], TYPES[entry["dtype"]])
        sizes = [last - first + 1, *(self.shape[name] for name in ("nl", "no", "nt", "hd"))]
        elements = bits.reshape(sizes)
        wanted = [int(word, 16) for word in said["store.digests"].split(" ")]
        found = [self.digest(elements[row], first + row) for row in range(sizes[0])]
        assert found == wanted, f"{path} was changed"
        return elements

    def digest(self, elements: np.ndarray, head: int) -> int:
        """kvbm-digest-1 of one head ``(layers, K and V, tokens, elements)`` of the model, the first token at position 0."""
        nl, no, nt, hd = elements.shape
        row = hd * elements.itemsize
        cell = math.gcd(row, 16)
        cells = np.ascontiguousarray(elements).view(np.uint8).reshape(nl, no, nt, row // cell, cell)
        padded = np.zeros((*cells.shape[:-1], 16), np.uint8)
        padded[..., :cell] = cells
        words = padded.view("<u4").astype(np.uint64)
        layer, half, token, index = np.indices(cells.shape[:-1]).astype(np.uint64)
        per_row, heads = np.uint64(row // cell), np.uint64(self.shape["nh"])
        lanes = np.uint64(nl * no) * heads * per_row
        place = ((layer * np.uint64(no) + half) * heads + np.uint64(head)) * per_row + index
        keys = token * lanes + place
        factors = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
        weight = fold(fold(keys * factors[0]) * factors[1]) | np.uint64(1)
        content = np.full(keys.shape, 0xA0761D6478BD642F, np.uint64)
        for number, factor in enumerate(WORDS):
            content += words[..., number] * np.uint64(factor)
        return int((weight * fold(content)).sum(dtype=np.uint64))

    def rows(self, tokens: list[int], layer: int, half: int, head: int, salt: str = "") -> np.ndarray:
        """The bits of K (0) or V (1) of a layer of the model and of a head ``(tokens, elements)``, of all units that are here."""
        found = []
        for unit in self.units(tokens, salt):
            first, last, path = next(one for one in self.files(unit) if one[0] <= head <= one[1])
            elements = self.read(unit, path, first, last)
            found.append(elements[head - first, self.fields["layers"].index(layer), half])
        return np.concatenate(found)
