"""The service behind all endpoints: the engine, checked requests, streams of outputs, and wire types."""
