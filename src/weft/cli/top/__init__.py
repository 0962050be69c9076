"""weft top."""
