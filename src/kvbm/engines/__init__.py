"""What an engine's own objects say of its cache: layout, sizes, groups of layers, ranks."""
