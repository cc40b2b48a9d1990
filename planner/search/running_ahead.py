"""Stages that nothing holds up run ahead of later ones, and their messages pile up."""

from __future__ import annotations

from ..simulator.pipeline import Link, Pipeline

_MORE = 1.005
"""Paces that differ by less are printed as the same."""


def running_ahead(pipeline: Pipeline, period_s: float) -> list[tuple[Link, float]]:
    """Links whose source may begin mini-batches faster than its target, for as long as a run lasts.

    A stage goes at the pace of the stages that gradients come back from, and of those that send to
    it. Where no gradient comes back from a slower stage, nothing keeps it at that one's pace.

    Returns:
        Links, each with the mini-batches, less than one, by which the source's lead grows in every
        period, at the most: what a stage takes besides its operations isn't counted.
    """
    stages = range(pipeline.stages)
    holders = {
        s: {link.target for link in pipeline.links if link.source == s and link.has_gradient}
        for s in stages
    }
    # What a stage's pace is at the least that of.
    follows = [holders[s] | {k.source for k in pipeline.links if k.target == s} for s in stages]
    paces = [pipeline.work_s(s) for s in stages]
    for _ in stages:
        paces = [max([paces[s], *(paces[other] for other in follows[s])]) for s in stages]
    return [
        (link, 1 - paces[link.source] / period_s)
        for link in pipeline.links
        if not link.has_gradient and paces[link.source] * _MORE < period_s
    ]
