"""Commands about this machine: hardware, topo, doctor, support-bundle, profile."""
