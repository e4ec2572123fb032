"""Metrics of links for ``prometheus_client``."""

from ..link.metrics import Links

__all__ = ["Links"]
