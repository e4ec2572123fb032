"""The public name of `link.metrics`."""

from ..link.metrics import Links

__all__ = ["Links"]
