"""Resharding: one planned, proven copy between engines that spread a cache differently over their ranks."""

from __future__ import annotations

from .messages import Message, Resharding, gather, plan
from .placement import Placement
from .proof import prove

__all__ = ["Message", "Placement", "Resharding", "gather", "plan", "prove"]
