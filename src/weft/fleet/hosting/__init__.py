"""Several models behind one address: the set's values, its plan, who is awake, and the processes of its models."""
