"""transformers: its paged cache as pools, and requests that move to host memory or to another manager.

Importing it imports transformers and torch.
"""

from .batching import VERSIONS, Batching, Group, HandOver, Held, Host, Offloading, Parked, groups_of, offloading

__all__ = [
    "VERSIONS", "Batching", "Group", "HandOver", "Held", "Host", "Offloading", "Parked", "groups_of", "offloading"
]
