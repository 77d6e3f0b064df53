"""Base models as numbers: sizes, what our code computes of them, and the memory that they take. Nothing here loads a weight.

Its files:

    base_shape.py    reads the sizes of a base model from its configuration
    families.py      names what is not computed of a base model, by its configuration and its weights
    footprint.py     computes how much memory training takes, by those sizes
    host_memory.py   finds how much memory this process may have
    weight_files.py  reads what the headers of a base model's weights say
"""
