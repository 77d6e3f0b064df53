"""Tests of the benchmarks' sums and reports."""
