"""Entry points under the names of vLLM's modules, for scripts that start a server with `python -m`."""
