"""`scripts/bench front-ends`: Weft's HTTP server beside vLLM's, over engines that answer at once."""
