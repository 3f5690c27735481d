"""Benchmarks: each module prints its own table, with the baseline it is measured against (`ssdgram bench NAME`)."""
