"""weft simulate."""
