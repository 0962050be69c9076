"""What is true: model shapes, parameters as data, checkpoint headers, this machine."""
