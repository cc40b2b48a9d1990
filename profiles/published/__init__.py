"""Profiles that other planners published: PipeDream's graphs, the NeurIPS'20 and '21 workloads."""
