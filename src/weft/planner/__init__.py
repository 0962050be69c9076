"""The planner: search for the best layout, its predicted speed and memory, advice and costs."""
