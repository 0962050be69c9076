"""The command line: each command parses its flags, builds one frozen config and calls one function."""
