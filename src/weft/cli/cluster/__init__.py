"""weft cluster."""
