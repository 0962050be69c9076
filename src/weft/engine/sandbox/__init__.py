"""Work on data of strangers, such as chat templates and grammars, in child processes with limits."""
