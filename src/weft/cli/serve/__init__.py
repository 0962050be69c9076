"""Commands about servers and the models on this machine: serve, gateway, ps, pull, ls, rm, stop."""
