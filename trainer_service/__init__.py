"""Trains LoRA adapters: a batch of scored trajectories in, the next version of the adapter out."""
