"""Pools: a layout bound to memory, and the sections of it that are copied."""
