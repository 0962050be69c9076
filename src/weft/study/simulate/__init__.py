"""Simulation of a deployment under a load: the real scheduler on a virtual clock, with the planner's step times."""
