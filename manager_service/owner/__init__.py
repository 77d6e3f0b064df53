"""The loop of a manager replica: it holds partitions, applies what arrives, and writes what follows."""
