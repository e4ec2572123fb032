"""The time and the modules of an import, and the errors on a machine without a GPU or driver."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import kvbm
from conftest import why_no_gpu

NO_DRIVER = pytest.mark.skipif("no CUDA driver" not in why_no_gpu(), reason="there is a driver here")


def fresh(code: str, **env: str) -> str:
    import os

    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **env},
        cwd="/",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_pulls_nothing_in() -> None:
    """Only modules of Python's standard library, so it is quick; and no compiled module."""
    before, after = (set(fresh(f"import sys{more}; print(*sys.modules)").split()) for more in ("", ", kvbm"))
    pulled_in = {name.partition(".")[0] for name in after - before} - sys.stdlib_module_names
    assert pulled_in == {"kvbm"} and "kvbm._core" not in after


def test_the_compiled_half_imports_neither_numpy_nor_torch() -> None:
    loaded = fresh("import sys; from kvbm import _core; _core.num_images(); print(sorted(sys.modules))")
    for name in ("numpy", "torch", "cuda"):
        assert f"'{name}'" not in loaded, name


@pytest.mark.quick
def test_describing_needs_no_numpy_and_nothing_compiled() -> None:
    loaded = fresh(
        "import sys, kvbm\n"
        "plan = kvbm.plan(kvbm.load('nhd'), kvbm.load('universal'), kvbm.load_shape('llama-3.1-8b'))\n"
        "str(plan), plan.explain()\n"
        "from kvbm.compile import codegen\n"
        "codegen.generate([kvbm.load('nhd')])\n"
        "print(sorted(sys.modules))"
    )
    for name in ("numpy", "torch", "click", "rich", "kvbm._core", "cuda"):
        assert f"'{name}'" not in loaded, name


def test_the_command_line_loads_its_commands_when_they_are_asked_for() -> None:
    loaded = fresh("import sys, kvbm.cli; print(sorted(sys.modules))")
    for name in ("numpy", "torch", "rich", "cuda", "kvbm._core", "kvbm.bench", "kvbm.testing", "kvbm.cli.doctor"):
        assert f"'{name}'" not in loaded, name


@pytest.mark.slow  # half a second
@pytest.mark.quick
def test_converting_does_not_import_torch() -> None:
    loaded = fresh(
        "import sys, kvbm\n"
        "shape = kvbm.BlockShape(2, 2, 2, 4, 8, 'bfloat16')\n"
        "pools = [kvbm.Pool.allocate(kvbm.load(n), shape, 2) for n in ('nhd', 'universal')]\n"
        "kvbm.convert(*pools)\n"
        "from kvbm import kernels\n"
        "kernels.is_using_stubs()\n"
        "print(sorted(sys.modules))"
    )
    for name in ("torch", "cupy", "rich", "click"):
        assert f"'{name}'" not in loaded, name
    assert "'kvbm._core'" in loaded


@pytest.mark.slow  # half a second
@pytest.mark.quick
def test_works_where_torch_cannot_be_imported() -> None:
    out = fresh(
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import numpy as np, kvbm\n"
        "shape = kvbm.BlockShape(1, 1, 1, 1, 4, 'uint8')\n"
        "a = kvbm.Pool(kvbm.load('universal'), shape, [np.arange(4, dtype='uint8').reshape(1, 1, 1, 1, 4)])\n"
        "b = kvbm.Pool(kvbm.load('nhd'), shape, [np.zeros((1, 1, 4), 'uint8')])\n"
        "kvbm.convert(a, b)\n"
        "print(b.arrays[0].ravel().tolist())"
    )
    assert out.strip() == "[0, 1, 2, 3]"


def test_public_names() -> None:
    for name in kvbm.__all__:
        assert getattr(kvbm, name) is not None
    assert set(kvbm.__all__) <= set(dir(kvbm))
    with pytest.raises(AttributeError, match="nonsense"):
        kvbm.nonsense  # noqa: B018
    out = fresh("from kvbm import *; print(BlockShape, convert, kernels, load)")
    assert "BlockShape" in out


def test_version_is_the_distribution_s() -> None:
    import importlib.metadata

    assert importlib.metadata.version("kvbm-layouts") == kvbm.__version__


@pytest.mark.parametrize(
    "call",
    [
        "kvbm.Pool.allocate(kvbm.load('nhd'), shape, 2, 'cuda:0')",
        "kernels.block_to_universal([[Fake((4, 2, 8))] * 1], [Fake((2, 1, 1, 4, 8))], stream=0)",
        "kernels.block_to_operational([[Fake((64,))]], [Fake((1, 1, 64))], stream=0)",
        "kernels.block_to_operational([[Fake((64,))]], [Fake((1, 1, 64))], 'async', stream=0)",
        "_core.driver_version()",
        "_core.synchronize(0, 0)",
        "_core.warm(None, 0)",
    ],
)
@NO_DRIVER
def test_a_gpu_call_without_a_driver(call: str) -> None:
    """It raises an error and never aborts; the message says what is missing and what to do."""
    out = fresh(
        "import itertools, numpy as np, kvbm\n"
        "from kvbm import _core, kernels\n"
        "shape = kvbm.BlockShape(1, 1, 2, 4, 8, 'float16')\n"
        "at = itertools.count(1 << 40, 1 << 20)\n"
        "class Fake:\n"
        "    device = 0\n"
        "    def __init__(self, shape):\n"
        "        at_ = (next(at), False)\n"
        "        self.__cuda_array_interface__ = dict(shape=shape, typestr='<f2', data=at_, version=3, strides=None)\n"
        f"try:\n    {call}\n"
        "except kvbm.CudaUnavailableError as error:\n"
        "    print(type(error).__name__, error.code, error.name, '|', error)\n"
        "try:\n    {}\nexcept Exception: pass\n".format(call)
    )
    assert "CudaUnavailableError" in out
    text = out.split("|", 1)[1]
    assert len(text.split()) >= 8 and ("driver" in text or "without CUDA" in text), text


@NO_DRIVER
def test_probing_without_a_driver() -> None:
    out = fresh(
        "import kvbm\nfrom kvbm import _core, kernels\n"
        "print(kernels.is_using_stubs(), kernels.is_memcpy_batch_available())\n"
        "try:\n    print(_core.device_count())\n"
        "except kvbm.CudaUnavailableError as error:\n    print('none:', error)"
    )
    stubs, batch = out.split()[:2]
    assert stubs in ("True", "False") and batch == "False"
    assert "none:" in out or out.split()[2] == "0"


@NO_DRIVER
def test_conversion_on_cuda_without_a_driver_leaves_the_destination() -> None:
    import numpy as np

    from memory import Bound, FakeCuda

    shape = kvbm.BlockShape(1, 2, 2, 4, 8, "float16")
    far = kvbm.Pool(kvbm.load("vllm/LBHNC"), shape, FakeCuda((1, 2, 2, 4, 2, 8)))
    away = kvbm.Pool(kvbm.load("vllm/BLHNC"), shape, FakeCuda((2, 1, 2, 4, 2, 8)))
    with pytest.raises(kvbm.CudaUnavailableError):
        kvbm.convert(far, away, stream=0)
    near = Bound("vllm/BLHNC", shape, 2, dst=True)
    with pytest.raises(kvbm.BindError, match="destination is in host memory that GPUs cannot access"):
        kvbm.convert(far, near.pool)
    assert near.untouched
    assert np.array_equal(near.buffer, near.before)


def test_typed() -> None:
    from pathlib import Path

    assert (Path(kvbm.__file__).parent / "py.typed").is_file()


def test_free_of_side_effects(capfd: Any) -> None:
    assert fresh("import kvbm, kvbm.kernels, kvbm.cli") == ""
