"""The name of the ranks' processes, as lists of processes have it."""
