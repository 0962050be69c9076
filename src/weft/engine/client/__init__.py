"""The caller's side of the engine: prompts in, outputs out, within the process or across a socket."""
