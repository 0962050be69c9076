"""The caller's side of the engine: prompts in, outputs out, in process or across a socket."""
