"""One rank: load, measure, allocate, run, sample."""
