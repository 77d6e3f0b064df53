"""Base models as numbers: sizes, what our code supports of them, and memory. Nothing here loads a weight.

Its files:

    base_digest.py   identifies a base model by a digest of its files
    base_shape.py    reads the sizes of a base model from its configuration
    families.py      names unsupported features of a base model, by its configuration and its weights
    footprint.py     computes how much memory training takes, by those sizes
    host_memory.py   finds how much memory this process may have
    stages.py        divides a base model's layers among loaders that serve together before any has the whole
    weight_files.py  reads what the headers of a base model's weights say
"""
