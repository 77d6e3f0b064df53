"""A job: its state machine, and the parts that it is made of."""
