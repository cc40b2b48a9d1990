"""Cutting a graph into stages: the problem, and exact solvers for it. Never imports torch."""
