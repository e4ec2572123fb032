"""Layouts that derive from another: the keys of both."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

#: Keys that say what a file is.  Those of the other layout say nothing about this one.
OWN = ("title", "like", "used_by", "read_from", "notes")


def derive(base: Mapping[str, yaml.Node], own: Mapping[str, yaml.Node]) -> dict[str, yaml.Node]:
    """The keys of a layout: its own, and beside them those of the layout that it is like.

    Mappings are merged key by key: a pitch of one axis leaves those of the others, a key of a plane leaves its other keys.  What
    the base says about itself (`OWN`) is left out.
    """
    keys = {key: node for key, node in base.items() if key not in OWN}
    return keys | {key: _merged(keys[key], node) if key in keys else node for key, node in own.items()}


def _merged(base: yaml.Node, own: yaml.Node) -> yaml.Node:
    if not (isinstance(base, yaml.MappingNode) and isinstance(own, yaml.MappingNode)):
        return own
    there = {key.value: value for key, value in base.value if isinstance(key, yaml.ScalarNode)}
    here = {key.value for key, _ in own.value if isinstance(key, yaml.ScalarNode)}
    pairs = [(key, value) for key, value in base.value if key.value not in here]
    pairs += [(key, _merged(there[key.value], value) if key.value in there else value) for key, value in own.value]
    return yaml.MappingNode(own.tag, pairs, own.start_mark, own.end_mark)
