"""What stages cost and send, from a profile alone: nothing is kept from one call to the next."""

from __future__ import annotations

from timeprest.planner.costs.stage_costs import Costs


def stage_cost(profile, names, micro_batch, *, last):
    """Cost of a stage made of these layers. `last`: it computes the loss too."""
    return Costs(profile).stage(tuple(names), micro_batch, last)


def transfers(profile, stages, micro_batch):
    """Tensors that cross the cuts, each once for each receiving stage, in the graph's order."""
    return Costs(profile).transfers(tuple(tuple(names) for names in stages), micro_batch)
