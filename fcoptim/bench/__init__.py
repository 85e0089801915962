"""Benchmarks that run where you train: everything compared is timed side by side in one run."""
