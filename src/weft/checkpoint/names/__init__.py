"""Models that Weft knows by name, without a network: the catalogue, and tags of GGUF files."""
