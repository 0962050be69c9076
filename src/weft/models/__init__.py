"""Model architectures, composed of `weft.layers`."""
