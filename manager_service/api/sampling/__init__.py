"""Chat and text completions over the same workers as training."""
