"""weft plan and weft cost."""
