"""Checks before a release: tools/check_release.py, which the release workflow runs for a tag."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "https://github.com/owner/kvbm-layouts"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree of version 1.2.3, with a date, at ADDRESS."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "check_release.py", tmp_path / "tools")
    (tmp_path / "pyproject.toml").write_text(f'[project]\nversion = "1.2.3"\nurls = {{Repository = "{ADDRESS}"}}\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [1.2.3] - 2026-12-01\n\n### Added\n\n## [1.2.2] - 2026-11-01\n")
    return tmp_path


def check(tree: Path, tag: str, address: str = ADDRESS) -> tuple[int, list[str]]:
    command = [sys.executable, str(tree / "tools" / "check_release.py"), tag, address]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not result.stdout
    return result.returncode, result.stderr.splitlines()


def test_a_release_that_is_ready(tree: Path) -> None:
    assert check(tree, "v1.2.3") == (0, [])


@pytest.mark.parametrize("tag", ["1.2.3", "v1.2.4", "v1.2.3rc1", "v1.2.2"])
def test_a_tag_of_another_version(tree: Path, tag: str) -> None:
    assert check(tree, tag) == (1, [f"tag: expected v1.2.3 (pyproject.toml), got {tag}"])


def test_a_repository_with_another_address(tree: Path) -> None:
    other = "https://github.com/fork/kvbm-layouts"
    assert check(tree, "v1.2.3", other) == (1, [f"pyproject.toml, project.urls: expected {other}, got {ADDRESS}"])


@pytest.mark.parametrize("heading", ["## [1.2.3] - unreleased", "## [1.2.3]", "## 1.2.3 - 2026-12-01", "## [1.2.30] - 2026-12-01"])
def test_a_heading_without_the_date(tree: Path, heading: str) -> None:
    changelog = tree / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("## [1.2.3] - 2026-12-01", heading))
    assert check(tree, "v1.2.3") == (1, ["CHANGELOG.md: expected a line '## [1.2.3] - YYYY-MM-DD'"])


def test_the_tree_has_a_heading_for_its_version() -> None:
    """The date and the address may be missing; any other problem is a mistake of this tree."""
    import tomllib

    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines() if line.startswith("## ")]
    assert headings[0].startswith(f"## [{version}] - ")
