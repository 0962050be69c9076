"""weft bench."""
