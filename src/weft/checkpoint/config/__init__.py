"""config.json and the other small files of a model's folder: the shape of a model, its layers, its pooling."""
