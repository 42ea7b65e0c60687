"""Benchmarks: ratios within one run, against peers or a baseline."""
