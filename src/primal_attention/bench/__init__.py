"""Benchmarks: ratios within one process, beside the peers that matter, short sequences included."""
