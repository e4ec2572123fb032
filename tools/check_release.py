"""Checks before a release that the tag, the version, the changelog and the repository's address agree.

python tools/check_release.py TAG ADDRESS, as in: python tools/check_release.py v0.1.0 https://github.com/owner/kvbm-layouts
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def problems(tag: str, address: str, root: Path = ROOT) -> list[str]:
    """What has to be changed before this tag can be released, one sentence each."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version, named = project["version"], project["urls"]["Repository"]
    found = []
    if tag != f"v{version}":
        found.append(f"tag: expected v{version} (pyproject.toml), got {tag}")
    if named != address:
        found.append(f"pyproject.toml, project.urls: expected {address}, got {named}")
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"
    if not re.search(heading, (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE):
        found.append(f"CHANGELOG.md: expected a line '## [{version}] - YYYY-MM-DD'")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(problems(*sys.argv[1:])) or 0)
