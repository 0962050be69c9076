"""HTTP for one replica."""
