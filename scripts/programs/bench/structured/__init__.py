"""`scripts/bench structured`: the cost of constrained answers, and the libraries that could compute them."""
