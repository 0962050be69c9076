"""The published architectures, a file per family. A file says what its models are: fields, names, and what differs.

Source of names: the modelling files of Transformers 5.23 and the headers of the published checkpoints; of defaults: its
configuration classes, and for Qwen v1 and MiniMax the classes in their repositories.
"""
