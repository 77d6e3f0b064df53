"""Runs: adapters whose training loop is their user's own, through the Tinker protocol. The part of a partition's owner.

    API ─ Operation ─► ops:<p> ─► Run ─ Operations ─► trainers ─ OperationsDone ─► Run ─► results:<run>, done

Its files:

    records.py   names what Redis keeps of a run
"""
