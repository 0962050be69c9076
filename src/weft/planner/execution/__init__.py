"""Plans that run: the plan of an engine, its replicas, its plan file on this machine, its forecast."""
