"""What to do about a model's cost: clusters, training systems, schedules, simulation, plans.

Nothing here imports torch.
"""
