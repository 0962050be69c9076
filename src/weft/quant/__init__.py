"""How weights are stored, and how a product with them is computed."""
