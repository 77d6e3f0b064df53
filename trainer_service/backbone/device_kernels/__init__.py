"""Kernels for CUDA, chosen by `MARLAAS_TRAINER_KERNELS`; the backbone's plain path is their reference.

    varlen     attention
    lora       adapters' products
    compile    whole layers as one graph, in which those two are operators

`make test-gpu` compares each with the plain path, `benchmarks.gpu --kernels` measures it.

Its files:

    varlen.py         attention over a pack in one call of flash attention
    lora_kernels.py   products of adapters over segments of tokens, by Triton
    head_kernel.py    log-probs from logits, by Triton
    uses_kernel.py    sums of the gradients of keys over their uses, by Triton
    kernel_choice.py  refuses what cannot run, chooses by default, switches kernels on, compiles layers
"""
