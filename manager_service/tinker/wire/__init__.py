"""Translates the Tinker protocol between bytes and our own values. Pure functions.

    bytes ─► zstd ─┬─► protobuf ─┬─► GivenPass ─► learning: checks ─► Forward (common/operations.py)
                   └─► plain ────┘
    Outputs, samples ─► protobuf or plain ─► bytes

Its files:

    tinker.proto    declares the protocol's messages
    tinker_pb2.py   is what `deploy/compile_proto.py` makes of it
    zstd.py         unpacks compressed bodies, up to a limit
    protobuf.py     reads and writes protobuf: the `tinker` SDK from 0.25 on
    plain.py        reads and writes the same as JSON: older ones
    learning.py     checks a pass over data, and makes it a Forward
    reading.py      takes a body from its bytes to a pass that is checked
    samples.py      checks what a request for samples asks for
"""
