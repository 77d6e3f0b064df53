"""The embedded engine: continuous batching on torch in this process."""
