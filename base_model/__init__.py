"""The frozen base model with an adapter per row: the torch code that the rollout and the trainer service share."""
