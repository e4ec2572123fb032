"""A layout is an address map: the declared place of every element of a block, read from YAML, for any sizes."""
