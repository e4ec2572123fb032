"""Which versions of vLLM this was tested with."""

from __future__ import annotations

from ...errors import BindError

__all__ = ["require_version"]

#: The first version that is supported, and the first that is not.
VERSIONS = ((0, 32), (0, 33))


def require_version(found: str) -> None:
    """Raise `BindError` unless this vLLM is one of those that kvbm was tested with."""
    number = tuple(int(part) if part.isdecimal() else -1 for part in found.split(".")[:2])
    if not VERSIONS[0] <= number < VERSIONS[1]:
        first, end = (".".join(map(str, version)) for version in VERSIONS)
        raise BindError(
            f"kvbm.integrations.vllm: expected vLLM {first} or newer, before {end}, got {found}; install one of these, or a "
            "kvbm-layouts that knows yours"
        )
