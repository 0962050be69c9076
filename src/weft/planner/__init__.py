"""How a model is cut, and the plan of it; what fits and how fast it is, the search for the best, and advice."""
