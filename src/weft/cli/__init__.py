"""Parse, build one frozen config, call one function."""
