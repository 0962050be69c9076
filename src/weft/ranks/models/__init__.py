"""Model architectures, composed of `weft.ranks.layers`."""
