"""Hardware as data: GPUs, CPUs, links, clusters, and what the drivers of this machine report."""
