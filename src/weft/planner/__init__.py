"""How a model is cut: split, places, fills, memory, the plan."""
