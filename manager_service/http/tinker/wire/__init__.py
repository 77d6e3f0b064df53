"""Translates the Tinker protocol between bytes and our own values. Pure functions.

    bytes ─► reading: zstd, protobuf ─► learning: checks ─► Forward (common/wire/operations.py)
    Outputs, samples ─► protobuf ─► bytes

Its files:

    tinker_pb2.py       is what `deploy/compile_proto.py` makes of it
    protobuf.py         writes protobuf
    learning.py         checks a pass over data, and makes it a Forward
    pass_reading.py     takes a body from its bytes to a pass that is checked
    sample_requests.py  checks what a request for samples asks for
"""
