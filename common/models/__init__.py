"""Base models as numbers: sizes, what our code computes of them, and the memory that they take. Nothing here loads a weight.

Its files:

    base_shape.py    reads the sizes of a base model from its configuration
    downloads.py     says how far the download of a base model is
    families.py      says what of a base model is not computed, by its configuration and its weights
    footprint.py     says how much memory training takes, by those sizes
    host_memory.py   finds how much memory this process may have
    weight_files.py  reads what the headers of a base model's weights say
"""
