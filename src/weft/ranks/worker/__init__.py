"""One rank: it loads its share of the model, measures memory, allocates its KV cache, runs steps and samples."""
