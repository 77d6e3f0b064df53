"""Kernels for CUDA in the backbone of devices, off unless `MARLAAS_TRAINER_KERNELS` names them; the plain path is their reference.

    attention                    flex, or varlen
    between products             liger, or compile          a step may have one of each

None has run on CUDA yet: `make test-gpu` compares each with the plain path, `benchmarks.gpu --kernels` measures it.

    choice.py    refuses what cannot run here, and switches the others on
    flex.py      attention over a pack with its trees as a block mask
    varlen.py    attention over a pack in one call of flash attention
    liger.py     liger-kernel's norms and gated products
    blocks.py    transformers' layers, compiled
"""
