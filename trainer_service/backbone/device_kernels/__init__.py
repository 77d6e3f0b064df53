"""Kernels for CUDA in the backbone of devices, chosen by `MARLAAS_TRAINER_KERNELS`; the plain path is their reference.

    attention           varlen               auto: varlen where flash attention runs
    between products    liger, or compile    a step may have one of them

`make test-gpu` compares each with the plain path, `benchmarks.gpu --kernels` measures it.

Its files:

    varlen.py         attention over a pack in one call of flash attention
    liger.py          liger-kernel's norms and gated products
    kernel_choice.py  refuses what cannot run here, chooses where nobody has, switches kernels on, compiles layers
"""
