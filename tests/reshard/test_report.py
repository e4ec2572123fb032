"""Descriptions of a resharding: long tables are shortened, bytes add up, sentences name the reasons."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest

from kvbm import BlockShape, Placement, load_shape, reshard
from kvbm.reshard.report import as_json, sentence, table
from kvbm.reshard.strips import Turns, count_common

MODEL = load_shape("llama-3.1-70b")
LATENT = load_shape("deepseek-v3")


def planned(a: str, b: str, model: BlockShape = MODEL, **options: bool) -> reshard.Resharding:
    return reshard.plan(reshard.load(a, model, name="prefill"), reshard.load(b, model, name="decode"), **options)


def rows(text: str) -> list[list[str]]:
    """Cells of the table, without its header."""
    lines = [line for line in text.splitlines() if line.startswith("  ")]
    return [re.split(r"\s{3,}", line.strip()) for line in lines[1:] if "…" not in line]


def ranks(text: str) -> list[int]:
    """Parse ``0–7, 9`` and ``0–6 by 2``."""
    found: list[int] = []
    for part in text.split(", "):
        first, last, step = re.fullmatch(r"(\d+)(?:–(\d+))?(?: by (\d+))?", part).groups()  # type: ignore[union-attr]
        found += range(int(first), int(last or first) + 1, int(step or 1))
    return found


@pytest.mark.parametrize(
    ("a", "b", "model", "options"),
    [
        ("vllm:tp4,nt16", "vllm:tp2,nt64", MODEL, {}),
        ("vllm:tp8", "vllm:tp16", LATENT, {}),
        ("vllm", "vllm:tp8,dcp8", LATENT, {}),
        ("vllm:tp16", "vllm:tp2", LATENT, {"stripe": True}),
        ("trtllm:tp2,cp4,nt32", "sglang:tp4,nt16", MODEL, {}),
    ],
)
def test_rows_stand_for_all_messages(a: str, b: str, model: BlockShape, options: dict[str, bool]) -> None:
    made = planned(a, b, model, **options)
    for tokens in (None, 1000):
        text = table(made, tokens)
        pairs = [pair for row in rows(text) for pair in itertools.product(ranks(row[0]), ranks(row[1]))]
        assert sorted(pairs) == sorted((m.src, m.dst) for m in made.messages), text


def test_very_many_messages_are_cut_with_a_count() -> None:
    made = planned("vllm:tp8,pp8", "vllm:tp16,pp5")
    text = table(made)
    (said,) = re.findall(r"… and (\d+) messages in (\d+) rows", text)
    assert len(made.messages) == 192 and len(text.splitlines()) < 40
    shown = sum(len(ranks(row[0])) * len(ranks(row[1])) for row in rows(text))
    assert shown + int(said[0]) == len(made.messages) and len(as_json(made)["messages"]) == 192
    assert "…" not in table(planned("vllm:tp8,pp2", "vllm:tp16,pp2")), "32 rows are still shown"


def test_bytes_are_those_of_the_tokens_that_both_hold() -> None:
    """For a range that ends inside a unit, and for whole units in another rank's turn."""
    rng = random.Random(5)
    for _ in range(200):
        a, b = (
            Turns(every, over, rng.randrange(over))
            for every, over in ((rng.choice([1, 2, 3, 8]), rng.choice([1, 2, 3, 4])) for _ in range(2))
        )
        stop = rng.randrange(200)
        assert a.held(stop) == sum(bool(a.holds(x)) for x in range(stop))
        assert count_common(a, b, stop) == sum(bool(a.holds(x) and b.holds(x)) for x in range(stop))
    huge = count_common(Turns(1, 7, 3), Turns(16, 4, 1), 10**15)
    assert abs(huge / (10**15 / 28) - 1) < 1e-9
    made = planned("trtllm:tp2,cp4,nt32", "sglang:tp4,nt16")
    whole = MODEL.nbytes // MODEL.nt
    assert sum(made.nbytes(m, 1000) for m in made.messages) == 1000 * whole
    assert sum(made.nbytes(m) for m in made.messages) == 4 * 16 * whole, "a unit is one of four ranks' turn"


def test_one_message_of_one_rank() -> None:
    made = planned("vllm", "vllm")
    assert str(made) == (
        "prefill (tp1, 16 tokens per block) → decode (tp1, 16 tokens per block): 1 message, unit 16 tokens: 1 block → 1 block\n"
        "  from   to   heads   layers   tokens per unit   bytes   rows of\n"
        "     0    0   0–7     0–79     16 of 16          5 MiB     256 B\n"
        "proven: every coordinate of decode once, from a rank that holds it; 1 of 1 source rank sends 1 message"
    )
    assert sentence(planned("vllm:tp8", "vllm", LATENT)).endswith("; 1 of 8 source ranks sends 1 message")


def test_a_rank_that_takes_nothing() -> None:
    """A group of layers of which a stage holds none, and a whole side without any."""
    a, b = (Placement("pp2", shard={"l": "pp"}, model=MODEL, layers=layers, name="x") for layers in ([0, 1], [1]))
    made = reshard.plan(a, b)
    assert [(m.src, m.dst) for m in made.messages] == [(0, 0)] and "shares of 0 to 1" in made.explain()
    _, nothing = reshard.gather(a, b)
    assert (
        not nothing.messages and "nothing to send" in str(nothing) and "there is nothing to send" in nothing.explain()
    )
    assert json.dumps(as_json(nothing))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (planned("vllm:tp4,nt16", "vllm:tp2,nt64"), "and a rank of decode gets its own from up to 2 of them."),
        (planned("vllm:pp3", "sglang:pp3"), "Layers: prefill has 3 shares of 26 to 27, decode has 3 shares of 26 to 27, and"),
        (planned("vllm:tp4,dcp4", "vllm", LATENT), "Tokens: prefill: 4 ranks take turns of 1 token; decode: every rank holds all"),
        (planned("vllm:nt16", "vllm:nt64"), "No larger number divides 16 and 64."),
        (planned("vllm:nt64", "vllm:nt64"), "A larger one would not lie in one block of a rank."),
        (planned("vllm:tp4,dcp4,nt16", "vllm:tp3,dcp3,nt16", LATENT), "In one of 16 tokens the turns of both sides do not fit"),
        (planned("vllm:nt24", "vllm:nt24").refit(((), ()), 16), "begin at other positions; otherwise it would be 24."),
        (planned("vllm:nt48", "vllm:nt16").refit(((3,), ())), "at 3, which parts a larger one; otherwise it would be 16."),
        (planned("vllm:nt5", "vllm:nt7"), "Token by token: a unit is one token"),
        (planned("vllm:nt16", "vllm:nt64"), "at most 15 tokens at each end go one by one"),
        (planned("vllm:tp8", "vllm:tp2"), "Senders: no two ranks of prefill have the same to send"),
        (planned("vllm:tp4,pp2", "vllm", LATENT), "ranks of prefill hold the same: 0–3, and so on, 2 groups. One of a group sends"),
        (planned("vllm:tp4", "vllm", LATENT, stripe=True), "All of a group send, a share of the layers each"),
        (planned("vllm", "vllm:tp4", LATENT), "Receivers: 4 ranks of decode hold the same, and each gets all of it."),
        (reshard.gather(reshard.vllm(LATENT), reshard.vllm(LATENT, tp=4))[0], "get a share of the layers each in this step"),
    ],
)  # fmt: skip
def test_sentences(made: reshard.Resharding, said: str) -> None:
    text = made.explain()
    assert said in text, text
    assert [line.partition(":")[0] for line in text.splitlines()][:6] == [
        "Layers",
        "KV heads",
        "Tokens",
        "Unit",
        "Token by token",
        "Senders",
    ]


def test_json_holds_the_same() -> None:
    made = planned("vllm:tp4,pp2,nt16", "vllm:tp2,nt64")
    said = json.loads(json.dumps(as_json(made, 1000)))
    assert said["fingerprint"] == made.fingerprint and said["source"]["mesh"] == "pp2 tp4"
    assert [(m["from"], m["to"], m["bytes"]) for m in said["messages"]] == [
        (m.src, m.dst, made.nbytes(m, 1000)) for m in made.messages
    ]
    assert said["destination"]["ranks"][1]["heads"] == [4, 5, 6, 7]
