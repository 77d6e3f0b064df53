"""Translates the Tinker protocol between bytes and our own values. Pure functions.

    bytes ─► learning: zstd, protobuf, checks ─► Forward (common/wire/operations.py)
    Outputs, samples ─► protobuf ─► bytes

Its files:

    tinker_pb2.py       is what `deploy/compile_proto.py` makes of it
    protobuf.py         writes protobuf
    learning.py         reads a pass over data, checks it, and makes it a Forward
    sample_requests.py  checks what a request for samples asks for
"""
