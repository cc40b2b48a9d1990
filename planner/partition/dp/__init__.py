"""Exact cuts by dynamic programming over the graph's downsets."""
