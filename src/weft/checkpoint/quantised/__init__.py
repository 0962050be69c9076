"""Published quantisation: how files store quantised weights, and the engine's own storage formats."""
