"""Tool-call parsers. The laws are in `base`, the names in `registry`."""
