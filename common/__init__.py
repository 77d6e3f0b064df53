"""What the four services share: messages, streams, bus, worker loop, object store, tokens, settings, telemetry.

Imports no service and no torch.
"""
