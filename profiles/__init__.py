"""What a model costs: graph and profile data, tracing, measuring, targets, built-in tasks.

The data modules (`errors`, `units`, `files`, `profile`) never import torch; the planner
builds on those alone.
"""
