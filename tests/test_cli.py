"""The command line: what it prints, what it writes, and an exit code a class of error."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import kvbm
import matrix
import oracle
from kvbm.cli import main
from memory import numpy_dtype, placed

SHAPE = "nl=2,no=2,nh=4,nt=16,hd=32,dtype=bfloat16"


def call(*args: str | Path) -> Result:
    return CliRunner().invoke(main, [str(a) for a in args], env={"COLUMNS": "200"})


def ok(*args: str | Path) -> str:
    result = call(*args)
    assert result.exit_code == 0, result.output
    return result.output


def test_help() -> None:
    text = ok("--help")
    for command in ("layouts", "show", "check", "plan", "gallery", "schema", "codegen", "convert", "doctor", "demo"):
        assert command in text
        assert "Usage" in ok(command, "--help")
    assert kvbm.__version__ in ok("--version")


def test_layouts() -> None:
    text = ok("layouts")
    for name in matrix.orders():
        assert name in text
        assert kvbm.load(name).fingerprint in text


@pytest.mark.parametrize("name", sorted(matrix.orders()))
def test_show(name: str) -> None:
    shape = "deepseek-v3" if matrix.latent(name) else "llama-3.1-70b/tp4"
    text = ok("show", name, "--shape", shape if not matrix.scales(name) else "nl=1,no=1,nh=1,nt=256,hd=16")
    assert name in text and len(text.splitlines()) > 3


def test_plan() -> None:
    text = ok("plan", "nhd", "universal", "--shape", "llama-3.1-70b")
    made = kvbm.plan(kvbm.load("nhd"), kvbm.load("universal"), kvbm.load_shape("llama-3.1-70b"))
    assert str(made) in text
    assert made.kernels()[0] in text


def test_check_good(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text('title: mine\norder: "[b l o] t h d"\n', encoding="utf-8")
    text = ok("check", path)
    assert "mine.yaml" in text and "nhd" in text, "an alias of a shipped layout is told"
    assert "ok" in ok("check", matrix.LAYOUTS / "universal.yaml", matrix.LAYOUTS / "vllm" / "LBHNC.yaml")


def test_check_bad() -> None:
    bad = Path(__file__).parent / "data" / "bad"
    result = call("check", bad / "unknown_key.yaml", bad / "repeated_axis.yaml")
    assert result.exit_code == kvbm.SpecError.exit_code
    assert "unknown_key.yaml:3" in result.output and "repeated_axis.yaml:2" in result.output, (
        "every error, not the first alone"
    )
    result = call("check", bad / "shape_split_does_not_cover.yaml", "--shape", SHAPE.replace("hd=32", "hd=128"))
    assert result.exit_code == kvbm.LayoutError.exit_code


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("plan", "nhd", "no/such", "--shape", SHAPE), kvbm.SpecError),
        (("plan", "nhd", "universal", "--shape", "llama-9"), kvbm.SpecError),
        (("plan", "nhd", "universal", "--shape", "llama-3.1-8b,dtype=float7"), kvbm.DTypeError),
        (("plan", "operational", "universal", "--shape", SHAPE), kvbm.PlanError),
        (("plan", "nhd", "vllm/paged_attn_v0", "--shape", SHAPE.replace("hd=32", "hd=5")), kvbm.LayoutError),
        (("show", "vllm/paged_attn_v0", "--shape", SHAPE.replace("hd=32", "hd=5")), kvbm.LayoutError),
        (("show", "no/such", "--shape", SHAPE), kvbm.SpecError),
    ],
)
def test_exit_codes(args: tuple[str, ...], error: type[kvbm.KvbmError]) -> None:
    result = call(*args)
    assert result.exit_code == error.exit_code, result.output
    assert "Traceback" not in result.output and "error" in result.output
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize(
    "args", [(), ("nonsense",), ("plan", "nhd"), ("show", "nhd"), ("convert", "nowhere", "out", "--to", "nhd")]
)
def test_usage(args: tuple[str, ...]) -> None:
    assert call(*args).exit_code == 2


def test_codegen(tmp_path: Path) -> None:
    layouts, out = tmp_path / "layouts", tmp_path / "out"
    layouts.mkdir()
    (layouts / "a.yaml").write_text('order: "[b l o] t h d"\n', encoding="utf-8")
    (layouts / "b.yaml").write_text('order: "[b] h l o t d"\n', encoding="utf-8")
    assert call("codegen", "--layouts", layouts, "--out", out, "--check").exit_code == 1
    assert not list(out.glob("*")), "--check writes nothing"
    ok("codegen", "--layouts", layouts, "--out", out)
    assert (out / "kernels_00.cu").is_file() and (out / "manifest.txt").is_file()
    ok("codegen", "--layouts", layouts, "--out", out, "--check")
    (out / "kernels_00.cu").write_text("// edited\n", encoding="utf-8")
    result = call("codegen", "--layouts", layouts, "--out", out, "--check")
    assert result.exit_code == 1 and "kernels_00.cu" in result.output
    assert (out / "kernels_00.cu").read_text(encoding="utf-8") == "// edited\n"


def test_doctor() -> None:
    text = ok("doctor")
    for word in ("kvbm", "driver", "torch", "numpy"):
        assert word in text


# ---- convert -------------------------------------------------------------------------------------------------------


def _source(path: Path, name: str, text: str, blocks: int, metadata: dict[str, str] | None = None) -> oracle.Placed:
    """A safetensors file of coded blocks, written without kvbm."""
    shape = kvbm.load_shape(text)
    where = placed(matrix.orders()[name], shape, blocks)
    codes = {
        "bfloat16": "BF16",
        "float16": "F16",
        "float8_e4m3fn": "F8_E4M3",
        "float32": "F32",
        "uint8": "U8",
        "int64": "I64",
    }
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for i, space in enumerate(where.spaces):
        header[f"alloc_{i:05d}"] = {
            "dtype": codes[shape.dtype],
            "shape": space.shape,
            "data_offsets": [at, at + space.nbytes],
        }
        at += space.nbytes
    body = np.zeros(at, np.uint8)
    oracle.scatter(body, _flat(where), oracle.coded(where, range(blocks), 0))
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + body.tobytes())
    return where


def _flat(where: oracle.Placed) -> np.ndarray:
    """Byte positions where allocations follow each other."""
    starts = np.cumsum([0] + [space.nbytes for space in where.spaces])[:-1]
    entry, offset = where.address(range(where.num_blocks))
    return starts[entry] + offset


def _check(path: Path, name: str, text: str, blocks: int) -> dict[str, str]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    metadata = header.pop("__metadata__")
    shape = kvbm.load_shape(text)
    where = placed(matrix.orders()[name], shape, blocks)
    body = np.frombuffer(raw[8 + length :], np.uint8)
    assert [header[f"alloc_{i:05d}"]["shape"] for i in range(len(where.spaces))] == [
        list(s.shape) for s in where.spaces
    ]
    assert len(header) == len(where.spaces) and body.size == sum(s.nbytes for s in where.spaces)
    got = oracle.gather(body, _flat(where), shape.itemsize)
    assert np.array_equal(got, oracle.coded(where, range(blocks), 0))
    return metadata


@pytest.mark.parametrize(
    ("src", "dst", "dtype"),
    [
        ("vllm/LBHNC", "universal", "bfloat16"),
        ("nhd", "vllm/paged_attn_v0", "float8_e4m3fn"),
        ("hf/dynamic_cache", "nhd", "float32"),
        ("universal", "vllm/BHLNC", "int64"),
    ],
)
def test_convert(tmp_path: Path, src: str, dst: str, dtype: str) -> None:
    text = SHAPE.replace("bfloat16", dtype)
    _source(tmp_path / "in.safetensors", src, text, 5)
    before = (tmp_path / "in.safetensors").read_bytes()
    ok(
        "convert",
        tmp_path / "in.safetensors",
        tmp_path / "out.safetensors",
        "--from",
        src,
        "--to",
        dst,
        "--shape",
        text,
    )
    metadata = _check(tmp_path / "out.safetensors", dst, text, 5)
    assert metadata["kvbm.layout"] == dst and metadata["kvbm.fingerprint"] == kvbm.load(dst).fingerprint
    assert (tmp_path / "in.safetensors").read_bytes() == before
    # The file says what it is: back without --from and --shape.
    ok("convert", tmp_path / "out.safetensors", tmp_path / "back.safetensors", "--to", src)
    _check(tmp_path / "back.safetensors", src, text, 5)
    assert {p.name for p in tmp_path.iterdir()} == {"in.safetensors", "out.safetensors", "back.safetensors"}


def test_converted_files_are_safetensors(tmp_path: Path, torch: Any) -> None:
    safetensors = pytest.importorskip("safetensors")
    _source(tmp_path / "in.safetensors", "nhd", SHAPE, 3)
    ok(
        "convert",
        tmp_path / "in.safetensors",
        tmp_path / "out.safetensors",
        "--from",
        "nhd",
        "--to",
        "universal",
        "--shape",
        SHAPE,
    )
    with safetensors.safe_open(tmp_path / "out.safetensors", framework="pt") as file:
        tensor = file.get_tensor("alloc_00001")
        assert tensor.shape == (4, 2, 2, 16, 32) and tensor.dtype == torch.bfloat16
        where = placed(matrix.orders()["universal"], kvbm.load_shape(SHAPE), 3)
        want = oracle.coded(where, [1], 0)[0].transpose(2, 0, 1, 3, 4, 5)  # h l o t d
        assert np.array_equal(tensor.contiguous().view(torch.uint8).numpy().reshape(want.shape), want)


def _fails(tmp_path: Path, error: type[kvbm.KvbmError] | int, *args: str | Path) -> str:
    result = call("convert", tmp_path / "in.safetensors", tmp_path / "out.safetensors", *args)
    code = error if isinstance(error, int) else error.exit_code
    assert result.exit_code == code, result.output
    assert not (tmp_path / "out.safetensors").exists(), "nothing half-written"
    assert {p.name for p in tmp_path.iterdir()} == {"in.safetensors"}
    return result.output


def test_convert_refuses(tmp_path: Path) -> None:
    meta = {"kvbm.layout": "nhd", "kvbm.fingerprint": kvbm.load("hnd").fingerprint}
    _source(tmp_path / "in.safetensors", "nhd", SHAPE, 3)
    _fails(tmp_path, kvbm.BindError, "--to", "universal", "--shape", SHAPE)  # which layout?
    _fails(tmp_path, kvbm.BindError, "--from", "nhd", "--to", "universal")  # which shape?
    _fails(tmp_path, kvbm.BindError, "--from", "nhd", "--to", "universal", "--shape", SHAPE.replace("nl=2", "nl=5"))
    _fails(tmp_path, kvbm.BindError, "--from", "hnd", "--to", "universal", "--shape", SHAPE)
    _fails(
        tmp_path, kvbm.BindError, "--from", "nhd", "--to", "universal", "--shape", SHAPE.replace("bfloat16", "float16")
    )
    _fails(tmp_path, kvbm.SpecError, "--from", "nhd", "--to", "no/such", "--shape", SHAPE)
    _fails(tmp_path, 2, "--from", "nhd", "--to", "universal", "--shape", SHAPE, "--device", "tpu")
    _source(tmp_path / "in.safetensors", "nhd", SHAPE, 3, meta)
    text = _fails(tmp_path, kvbm.BindError, "--from", "nhd", "--to", "universal", "--shape", SHAPE)
    assert kvbm.load("hnd").fingerprint in text, "a stored fingerprint is never ignored"
    _source(tmp_path / "in.safetensors", "operational", SHAPE, 3)
    _fails(tmp_path, kvbm.PlanError, "--from", "operational", "--to", "universal", "--shape", SHAPE)


def test_convert_refuses_broken_files(tmp_path: Path) -> None:
    path = tmp_path / "in.safetensors"
    args = ("--from", "nhd", "--to", "universal", "--shape", SHAPE)
    for data in (b"", b"\x01", b"\xff" * 100, struct.pack("<Q", 4) + b"{}  ", struct.pack("<Q", 1 << 40) + b"{}"):
        path.write_bytes(data)
        _fails(tmp_path, kvbm.BindError, *args)
    _source(path, "nhd", SHAPE, 3)
    path.write_bytes(path.read_bytes()[:-1])
    _fails(tmp_path, kvbm.BindError, *args)


def test_convert_keeps_what_is_there(tmp_path: Path) -> None:
    _source(tmp_path / "in.safetensors", "nhd", SHAPE, 3)
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"mine")
    args = ("convert", tmp_path / "in.safetensors", out, "--from", "nhd", "--to", "universal", "--shape", SHAPE)
    assert call(*args).exit_code == 2 and out.read_bytes() == b"mine"
    ok(*args, "--force")
    _check(out, "universal", SHAPE, 3)
    same = call("convert", out, out, "--to", "nhd", "--force")
    assert same.exit_code == 2
    _check(out, "universal", SHAPE, 3)


@pytest.mark.gpu
def test_convert_on_a_gpu(tmp_path: Path) -> None:
    _source(tmp_path / "in.safetensors", "vllm/LBHNC", SHAPE, 70)
    args = ("--from", "vllm/LBHNC", "--to", "vllm/paged_attn_v0", "--shape", SHAPE, "--device", "cuda:0")
    ok("convert", tmp_path / "in.safetensors", tmp_path / "out.safetensors", *args)
    _check(tmp_path / "out.safetensors", "vllm/paged_attn_v0", SHAPE, 70)


def test_convert_on_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    _source(tmp_path / "in.safetensors", "nhd", SHAPE, 3)
    args = ("--from", "nhd", "--to", "universal", "--shape", SHAPE, "--device", "cuda:99")
    result = call("convert", tmp_path / "in.safetensors", tmp_path / "out.safetensors", *args)
    assert result.exit_code in (kvbm.CudaError.exit_code, kvbm.CudaUnavailableError.exit_code), result.output
    assert not (tmp_path / "out.safetensors").exists()


def test_numpy_dtype_agrees() -> None:
    from kvbm import store

    for dtype in oracle.ITEMSIZE:
        assert store.numpy_dtype(dtype).itemsize == numpy_dtype(dtype).itemsize
