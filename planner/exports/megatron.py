"""Megatron-Core: the string of ``--pipeline-model-parallel-layout``.

A letter for each layer, E the embedding, t a transformer block, L the output and its loss, with
``|`` between stages; stages of one rank lie so many stages apart as there are ranks
(docs/user-guide/features/pipeline_parallel_layout.md of Megatron-LM, and
PipelineParallelLayerLayout in megatron/core/transformer). The schedule is 1F1B, interleaved where
ranks have several stages; the final normalisation goes with the last block.
"""

from __future__ import annotations

from collections import Counter

from ..plan import Plan
from .blocks import blocks_by_stage, list_of
from .engines import Engine, EngineFiles, precision_notes, ranks_of

MEGATRON = Engine(
    "Megatron-Core",
    {"1f1b-flush": "1F1B", "interleaved": "interleaved 1F1B"},
    placements=frozenset({"loop"}),
    sums_ties=True,
    makes_masks=True,
)

ARGUMENTS = "arguments.txt"


def for_megatron(plan: Plan, look: object) -> EngineFiles:
    """The arguments; no model is looked at.

    Raises PlanError where Megatron-Core can't express the plan.
    """
    MEGATRON.check(plan)
    layout = layout_of(plan)
    ranks, replicas = len(ranks_of(plan)), len(plan.stages[0].devices)
    if ranks < len(plan.stages) and plan.micro_batches // replicas % ranks:
        raise MEGATRON.refuse(
            f"its interleaved schedule takes micro-batches in groups of {ranks}, one for each "
            f"rank, which don't divide {plan.micro_batches // replicas}"
        )
    lines = [
        f"--num-layers {layout.count('t')}",
        f"--pipeline-model-parallel-size {ranks}",
        f"--pipeline-model-parallel-layout {layout}",
        f"--micro-batch-size {plan.micro_batch}",
        f"--global-batch-size {plan.mini_batch}",
    ]
    return EngineFiles(
        {ARGUMENTS: "\n".join(lines) + "\n"},
        (
            f"pass them on: pretrain_gpt.py $(cat {{folder}}/{ARGUMENTS}) …",
            "it ties the output's weight to the embedding's; where the model doesn't, add "
            "--untie-embeddings-and-output-weights",
            *precision_notes(plan),
        ),
    )


def layout_of(plan: Plan) -> str:
    """``Ett|ttt|tL``. Raises PlanError where stages don't consist of whole transformer blocks."""
    parts = blocks_by_stage(MEGATRON, plan)
    places = [(s, block, list_of(block)) for s, blocks in enumerate(parts) for block in blocks]
    lists = Counter(place[0] for _, _, place in places if place is not None)
    if not lists:
        raise MEGATRON.refuse("its layers are in no list of transformer blocks")
    if len(lists) > 1:
        raise MEGATRON.refuse(
            f"its layers are in several lists, {', '.join(map(repr, lists))}, and there is one "
            "list of transformer blocks alone"
        )
    if "" in lists:
        raise MEGATRON.refuse(
            "the model is itself a list of layers, which are taken for an embedding, a list of "
            "transformer blocks and an output there"
        )
    inside = [k for k, (_, _, place) in enumerate(places) if place is not None]
    first, last = inside[0], inside[-1]
    stages = ["t" * sum(list_of(block) is not None for block in blocks) for blocks in parts]
    for k, (s, block, place) in enumerate(places):
        if place is not None:
            continue
        if k < first and s:
            raise MEGATRON.refuse(
                f"{block!r} comes before the blocks on stage {s}, and what does is its embedding, "
                "on the first stage"
            )
        if first < k < last:
            raise MEGATRON.refuse(f"{block!r} comes between its blocks, and there nothing does")
        if k > last and places[last][0] < s < len(parts) - 1:
            raise MEGATRON.refuse(
                f"{block!r} comes behind the blocks on stage {s}, and what does is its output, on "
                "the last stage"
            )
    return f"E{'|'.join(stages)}L"
