"""Tests of `marlaas_client`; `tests/manager/test_cli.py` has those of its command line."""
