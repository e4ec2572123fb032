"""What an author probably meant: orders that are nearly right, and texts that YAML reads as something else."""

from __future__ import annotations

import re

import yaml

from .axes import BLOCK_SIZES

#: Words for the axes, in place of their letters.
_WORDS = {
    "b": "block blocks nb num_blocks page pages",
    "l": "layer layers nl num_layers",
    "o": "kv no",
    "h": "head heads nh num_heads kv_head kv_heads num_kv_heads",
    "t": "token tokens nt block_size page_size slot slots seq",
    "d": "dim dims hd head_dim head_size element elements",
}
_LETTER = {word: axis for axis, words in _WORDS.items() for word in words.split()}
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")


def meant_order(text: str) -> str:
    """The text of an order with the usual slips mended.  It need not be legal.

    Mended are separators, words in place of letters, capitals, blanks inside splits, brackets behind other axes, and several pairs
    of brackets.

    >>> meant_order("B, L, O, H, D / 16b, T, D % 16b")
    'b l o h d/16B t d%16B'
    >>> meant_order("layer [block] kv [head] token dim")
    '[b h] l o t d'
    """
    text = re.sub(r"\s*([/%])\s*([0-9]+)(?:\s*([bB])(?![A-Za-z0-9_]))?", lambda m: m[1] + m[2] + "B" * bool(m[3]), text)
    if "," in text and re.fullmatch(r"\s*\(.*\)\s*", text):  # as torch prints a shape
        text = text.strip()[1:-1]
    text = re.sub(r"[,;|*×-]|->|→|[“”‘’]", " ", text)
    text = re.sub(r"(?<![/%A-Za-z0-9_])2(?![A-Za-z0-9_])", "o", text)
    text = re.sub(r"[A-Za-z_]+", lambda m: m[0] if m[0] == "B" else _LETTER.get(m[0].lower(), m[0].lower()), text)
    text = re.sub(r"(?<![0-9])B", "b", text)
    inside = _BRACKETS.findall(text)
    if len(inside) > 1 or (inside and not text.lstrip().startswith("[")):
        text = f"[{' '.join(inside)}] {_BRACKETS.sub(' ', text)}"
    return " ".join(re.sub(r"\[\s+", "[", re.sub(r"\s+\]", "]", text)).split())


def meant_shape(text: str) -> str:
    """The text of a block shape with the usual slips mended.  It need not be legal.

    Mended are capitals, other separators, sizes without names in their usual sequence, and a dtype without its name.

    >>> meant_shape("NL: 2; no=2 nh=4, nt=16 hd=8 bfloat16")
    'nl=2,no=2,nh=4,nt=16,hd=8,dtype=bfloat16'
    >>> meant_shape("(2, 2, 4, 16, 8)"), meant_shape("Llama-3.1-8B,tp=2")
    ('nl=2,no=2,nh=4,nt=16,hd=8', 'llama-3.1-8b/tp2')
    """
    text = re.sub(r"\s*[:=]\s*", "=", text.lower().strip(" ()[]{}"))
    parts = [part for part in re.split(r"[\s,;]+", text) if part]
    degree = next((part for part in parts[1:] if re.fullmatch(r"tp=?\d+", part)), "")
    parts = [part for part in parts if part != degree or not degree]
    if parts and degree:
        parts[0] += f"/{degree.replace('=', '')}"
    if len(parts) in (5, 6) and all(part.isdecimal() for part in parts[:5]):
        parts[:5] = [f"{name}={size}" for name, size in zip(BLOCK_SIZES, parts[:5], strict=True)]
    parts[1:] = [part if "=" in part else f"dtype={part}" for part in parts[1:]]
    return ",".join(parts)


def meant_array(text: str) -> str:
    """The text of arrays on the command line (``[COUNTx]SHAPE[:STRIDES]``) with the usual slips mended.  It need not be legal.

    >>> meant_array("2x3x4"), meant_array("2 3 4"), meant_array("32 * (2, 3, 4)"), meant_array("32x[2,3,4] : [12 4 1")
    ('2,3,4', '2,3,4', '32x2,3,4', '32x2,3,4:12,4,1')
    """
    shape, colon, strides = text.partition(":")
    numbers, between = re.findall(r"-?[0-9]+", shape), re.findall(r"[0-9]([^0-9]+)(?=[0-9])", shape)
    # 32x2,3 has a count, and 2x3x4 and 2x3 have none: there every separator is an x.
    times = [bool(re.search("[x*×]", one)) for one in between]
    if times and times[0] and (not all(times) or re.search(r"[(\[]", between[0])):
        numbers = [f"{numbers[0]}x{numbers[1]}", *numbers[2:]]
    return ",".join(numbers) + colon + ",".join(re.findall(r"-?[0-9]+", strides))


def yaml_advice(text: str, error: yaml.MarkedYAMLError) -> str:
    """What to do about a text that is not YAML, by what PyYAML raised: the end of a message, or an empty text."""
    lines, problem = text.splitlines(), str(error.problem)
    marks = [mark.line for mark in (error.problem_mark, error.context_mark) if mark is not None]
    if "quoted scalar" in str(error.context):
        return f": the quotation mark of line {error.context_mark.line + 1} is not closed" if error.context_mark else ""
    for number in marks:
        found = re.match(r"\s*(?:- +)?(\w+) *: *(.*?)\s*(?: #.*)?$", lines[number]) if number < len(lines) else None
        if found is None or not found[2] or found[2][0] in "\"'":
            continue
        key, value = found[1], found[2]
        if value[0] == "{" and ":" in value:
            return ": between { and }, texts with brackets, braces or commas need quotation marks"
        if value[0] in "[{]}%@`&*!" or ": " in value:
            why = "': '" if value[0] not in "[{]}%@`&*!" else f"'{value[0]}' at its beginning"
            return f': a text with {why} needs quotation marks: {key}: "{value}"'
    if "block mapping start" in problem:
        return ": keys of one mapping need the same indentation"
    if "'\\t'" in problem:
        return ": indent with blanks, not with tabs"
    return ""
