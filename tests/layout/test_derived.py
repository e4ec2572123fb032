"""Layouts that are like another: the whole layout written in one file, and messages with the file and line of either."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

import kvbm
from kvbm.compile import codegen
from kvbm.layout import spec
from kvbm.layout.grammar import parse, write

V4 = "nl=2,no=1,nh=1,nt=64,hd=512,dtype=bfloat16"


def file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_every_shipped_layout_is_like_itself(tmp_path: Path) -> None:
    for name in kvbm.layouts():
        layout, base = kvbm.load(file(tmp_path, "mine.yaml", f"like: {name}\n")), kvbm.load(name)
        assert layout == base and layout.fingerprint == base.fingerprint, name
        assert (layout.name, layout.title, layout.used_by, layout.read_from) == ("mine", "", (), ""), name


def test_what_is_given_replaces_what_was(tmp_path: Path) -> None:
    """Against the whole text, changed by PyYAML and not by kvbm."""
    shipped = yaml.safe_load((spec.layouts_dir() / "vllm" / "deepseek_v4.yaml").read_text("utf-8"))
    for change, edit in {
        "pitch: {b: 40960 B}": lambda it: it["pitch"].update(b="40960 B"),
        "axes: {s: 16}\npitch: {b: 40960 B}": lambda it: (it["axes"].update(s=16), it["pitch"].update(b="40960 B")),
        "planes: {scale: {offset: nt*576 + 64}}": lambda it: it["planes"]["scale"].update(offset="nt*576 + 64"),
        "planes: {latent: {pitch: {t: 640 B}}, rope: {pitch: {t: 640 B}}, scale: {offset: nt*640}}\n"
        "pitch: {b: 64 * 700 B}": lambda it: (
            it["planes"]["latent"].update(pitch={"t": "640 B"}), it["planes"]["rope"].update(pitch={"t": "640 B"}),
            it["planes"]["scale"].update(offset="nt*640"), it["pitch"].update(b="64 * 700 B"),
        ),
        "planes: {scale: {dtype: uint8}}": lambda it: it["planes"]["scale"].update(dtype="uint8"),
    }.items():  # fmt: skip
        whole = yaml.safe_load(yaml.safe_dump(shipped))
        edit(whole)
        mine = kvbm.load(file(tmp_path, "mine.yaml", f"like: vllm/deepseek_v4\n{change}\n"))
        assert mine == parse(yaml.safe_dump(whole)), change
        assert mine != kvbm.load("vllm/deepseek_v4"), change
        assert parse(write(mine)) == mine, "cards carry it whole"
        assert pickle.loads(pickle.dumps(mine)) == mine


def test_of_one_that_is_like_another_and_in_another_folder(tmp_path: Path) -> None:
    file(tmp_path, "base.yaml", "like: vllm/flash_attn_nhd\npitch: {b: 8192 B}\ntitle: Base\n")
    mine = kvbm.load(file(tmp_path, "sub/mine.yaml", "like: ../base.yaml\npitch: {t: 100}\ntitle: Mine\n"))
    assert dict(mine.pitch).keys() == {"b", "t"} and mine.title == "Mine"
    assert [one.name for one in spec.load_dir(tmp_path)] == ["base", "sub/mine"]
    file(tmp_path, "base.yaml", "like: vllm/flash_attn_nhd\npitch: {b: 4096 B}\n")
    assert kvbm.load(tmp_path / "sub/mine.yaml") != mine, "the other file is read again"


def test_blocks_are_copied_and_kernels_generated(tmp_path: Path) -> None:
    path = file(tmp_path, "mine.yaml", "like: vllm/flash_attn_nhd\npitch: {b: 256}\n")
    shape = "nl=2,no=2,nh=2,nt=4,hd=8,dtype=float32"
    pool, back = kvbm.Pool.allocate(path, shape, 3), kvbm.Pool.allocate("universal", shape, 3)
    for layer, array in enumerate(pool.arrays):
        array[...] = np.arange(array.size).reshape(array.shape) + 1000 * layer
    kvbm.convert(pool, back, [2, 0], [0, 1])
    for block, stored in zip([2, 0], back.arrays, strict=False):
        assert np.array_equal(stored, np.stack([a[:, block] for a in pool.arrays]).transpose(3, 0, 1, 2, 4))
    assert pool.arrays[0].strides[1] == 1024
    kvbm.store.save(tmp_path / "file", pool)
    again = kvbm.store.load(tmp_path / "file", src_layout=path)
    assert again.layout == pool.layout
    assert all(np.array_equal(one, other) for one, other in zip(again.arrays, pool.arrays, strict=True))
    assert codegen.generate([*map(kvbm.load, ("nhd", "universal")), pool.layout])


@pytest.mark.parametrize(
    ("text", "said"),
    {
        "like: b": r"mine.yaml:1: like: 'b': expected a name that `kvbm layouts` lists, or the path",
        "title: x\nlike: vllm/LBHCN": "mine.yaml:2: like: 'vllm/LBHCN': .*Did you mean vllm/",
        "like: no.yaml": "mine.yaml:1: like: .*no.yaml: no such file",
        "like: mine.yaml": "mine.yaml:1: like: each of these files derives from the next: .*mine.yaml → .*mine.yaml",
        "like: ''": "mine.yaml:1: like: ''",
        "like: [nhd]": "mine.yaml:1: like: expected a text, got a list",
        "like: nhd\norder: b l o h t d": "mine.yaml:2: order: a layout that is like another has its order",
        "like: vllm/deepseek_v4\nplanes: {scale: {order: s t}}": "mine.yaml:2: order of plane 'scale': a layout that is like",
        "like: vllm/deepseek_v4\nplanes:\n  scales: {offset: 3}": "mine.yaml:3: unknown key 'scales': expected one of latent, rope",
        "like: nhd\nplanes: {scale: {offset: 3}}": "nhd.yaml:2: order: expected a term such as <data scale>",
        "like: nhd\npitch: {t: 3, t: 4}": "mine.yaml:2: key 't' is there twice",
        "like: nhd\npitch: 3": "mine.yaml:2: pitch: expected a mapping",
        "like: nhd\n\npitch: {x: 3}": "mine.yaml:3: pitch: expected one of d, h, t",
        "like: nhd\n\npitch: {t: 3}": "mine.yaml:3: pitch of 't': neighbours overlap",
        "like: bad.yaml\ntitle: x": "bad.yaml:2: order '.b l o. t h q': axis 'q'",
    }.items(),
)
def test_refused(tmp_path: Path, text: str, said: str) -> None:
    file(tmp_path, "bad.yaml", "title: Bad\norder: '[b l o] t h q'\n")
    with pytest.raises(kvbm.KvbmError, match=said):
        kvbm.load(file(tmp_path, "mine.yaml", text)).resolve(V4 if "deepseek" in text else "llama-3.1-8b", 2)


def test_a_circle_of_several_files(tmp_path: Path) -> None:
    for one, other in (("a", "b"), ("b", "c"), ("c", "a")):
        file(tmp_path, f"{one}.yaml", f"like: ./{other}.yaml\n")
    circle = " → ".join(re.escape(str(tmp_path / f"{name}.yaml")) for name in "abca")
    with pytest.raises(kvbm.SpecError, match=f"c.yaml:1: like: .*: {circle};"):
        kvbm.load(tmp_path / "a.yaml")


def test_a_text_from_elsewhere_reads_no_file() -> None:
    """Such as the layout in a file of blocks, or in the card of a peer."""
    with pytest.raises(kvbm.SpecError, match="like: expected the whole layout"):
        parse("like: nhd")
