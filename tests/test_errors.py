"""Texts of other programs in messages."""

from __future__ import annotations

import sys

from kvbm.errors import printable


def test_what_is_printable_has_no_control_character_and_no_mark_of_direction() -> None:
    """Every character that Unicode has; printable ones are left as they are."""
    for code in range(sys.maxunicode + 1):
        shown = printable(chr(code))
        assert shown.isprintable()
        shown.encode()
        if chr(code).isprintable():
            assert shown == chr(code)
    for text in ("\x1b[31mred\x1b[0m", "a\nb", "a\r\x08b", "\u202egnp.exe", "\u2028", "\x9b2J", "\ud800", "\u200b\ufeff"):
        shown = printable(text)
        assert shown.isprintable() and shown.encode("utf-8") and not set(shown) & {"\x1b", "\n", "\u202e", "\x9b"}
    assert printable("a\nb\x1b") == "a\\nb\\x1b"
    assert printable("décodage 解码 ↔ …") == "décodage 解码 ↔ …"


def test_what_is_printable_is_as_short_as_asked() -> None:
    for most in (1, 2, 5, 200):
        for text in ("", "x" * most, "x" * (most + 1), "\n" * most, "\U000e0001" * 9, "x" * 10**6):
            shown = printable(text, most)
            assert len(shown) <= most
            assert (shown == text) is (len(text) <= most and text.isprintable())
