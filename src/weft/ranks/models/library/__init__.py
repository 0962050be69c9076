"""Models that run through Transformers' own classes, with the products, the attention and the cuts of Weft."""
