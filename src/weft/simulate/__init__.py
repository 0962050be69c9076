"""The real scheduler on a virtual clock, with the planner's costs: what a deployment makes of a load."""
