"""The process engine: tokens are computed by a process of its own, such as vLLM's."""
