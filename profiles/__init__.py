"""What a model costs: targets and tasks, their graphs, measuring, profiles.

The data modules (`errors`, `units`, `files`, `profile`) never import torch; the planner
builds on those alone.
"""
