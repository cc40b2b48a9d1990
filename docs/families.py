"""Tries Hugging Face families by name and writes docs/families.md: `make hf-families`.

Each is profiled, planned for three stages of a system that flushes, and trained, and the training
held against that of the whole model in one piece: what tp-profile, tp-plan solve and
tp-run --check --inline do with a name, without anything else. Goes on where it was stopped;
`python docs/families.py bert gpt2` tries these anew.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FOUND = HERE.parent / "runs" / "families"
"""What was found of each; a family of this list that is there isn't tried again."""

STAGES, MINI_BATCH, MICRO_BATCHES = 3, 8, 4
LIMIT_S = 900

KINDS = {
    "reads both ways": (
        *("bert", "roberta", "distilbert", "albert", "electra", "deberta-v2", "xlm-roberta"),
        *("mpnet", "modernbert"),
    ),
    "reads from left to right": (
        *("gpt2", "gptj", "gpt_neo", "gpt_neox", "opt", "bloom", "llama", "mistral", "qwen2"),
        *("gemma2", "gemma3_text", "phi3", "falcon", "mpt", "stablelm"),
        *("olmo", "cohere"),
    ),
    "has experts": ("mixtral", "qwen2_moe", "deepseek_v3"),
    "text to text": ("t5", "bart", "pegasus", "mbart"),
    "images": ("vit", "deit", "swin", "convnext", "resnet", "segformer"),
    "sound": ("wav2vec2", "whisper"),
}
"""The families, by what they are for."""

ENDS = ("profile", "plan", "training")


def tried(family: str) -> dict[str, Any]:
    """How far a family comes, and the line that it ends in."""
    import timeprest
    from timeprest.profiles.errors import TimeprestError

    found: dict[str, Any] = {"family": family, "through": 0}
    try:
        profile = timeprest.profile(
            f"hf:{family}", batch_size=MINI_BATCH, micro_batch_sizes=[2, MINI_BATCH], seconds=0
        )
        found.update(through=1, layers=len(profile.layers), front_end=profile.front_end)
        plan = timeprest.plan(
            profile,
            devices=STAGES,
            stages=STAGES,
            micro_batches=MICRO_BATCHES,
            replicas="off",
            variant="pipedream-flush",
            tied="split",
            time_limit_s=20.0,
        )
        found["through"] = 2
        report = timeprest.check(plan, inline=True)
    except TimeprestError as error:
        return {**found, "line": str(error)}
    counted = [d for one in report.against if one.counts for d in one.differences if d.counts]
    if report.verdict == "same":
        apart = max(d.relative for d in counted if d.what != "weight")
        return {**found, "through": 3, "apart": apart}
    worst = next(d for d in counted if not d.same)
    where = worst.name or f"mini-batch {worst.mini_batch}"
    line = f"differs: {worst.what} of {where}, by {worst.relative:.1g} of the largest number"
    return {**found, "line": "; ".join([line, *report.notes])}


def in_a_process(family: str) -> dict[str, Any]:
    """The same in a process of its own: nothing of one family is left for the next."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def work() -> None:
        warnings.simplefilter("ignore")
        theirs.send(tried(family))

    process = context.Process(target=work)
    process.start()
    theirs.close()
    line = f"no end after {LIMIT_S} s"
    try:
        if ours.poll(LIMIT_S):
            found: dict[str, Any] = ours.recv()
            return found
    except EOFError:
        line = "its process ended without a word"
    finally:
        process.kill()
        process.join()
    return {"family": family, "through": 0, "line": line}


def row(found: dict[str, Any]) -> str:
    """A line of the table."""
    ends = ["yes" if found["through"] > k else "no" for k in range(len(ENDS))]
    how = f"equal, {found['apart']:.0e}" if found["through"] == len(ENDS) else ends[2]
    cells = [
        f"`hf:{found['family']}`",
        str(found.get("layers", "")),
        found.get("front_end", ""),
        *ends[:2],
        how,
    ]
    return f"| {' | '.join(cells)} |"


def page(results: dict[str, list[dict[str, Any]]]) -> str:
    """The page of what was found, by kind."""
    import torch
    import transformers

    every = [found for some in results.values() for found in some]
    through = Counter(k for found in every for k in range(found["through"]))
    lines = [
        (HERE / "families.head.md")
        .read_text()
        .format(
            families=len(every),
            profiled=through[0],
            planned=through[1],
            equal=through[2],
            torch=torch.__version__.split("+")[0],
            transformers=transformers.__version__,
        )
    ]
    for kind, some in results.items():
        lines += [f"## {kind.capitalize()}\n"]
        lines += ["| target | layers | front end | profile | plan | training |"]
        lines += ["|---|---|---|---|---|---|", *map(row, some), ""]
    if refused := [found for found in every if found["through"] < len(ENDS)]:
        lines += ["## What the others end in\n"]
        lines += [f"- `hf:{found['family']}`: {found['line']}" for found in refused]
    return "\n".join(lines).rstrip() + "\n"


def main(only: Sequence[str]) -> None:
    import torch

    torch.set_num_threads(1)
    # Loaded once for all.
    for module in (
        "profiles.measuring.measure",
        "runtime.verify.check",
        "profiles.hugging_face.task",
    ):
        importlib.import_module(f"timeprest.{module}")
    importlib.import_module("transformers").logging.set_verbosity_error()
    FOUND.mkdir(parents=True, exist_ok=True)
    every = [family for families in KINDS.values() for family in families]
    for family in only or every:
        file = FOUND / f"{family}.json"
        if only or not file.exists():
            file.write_text(json.dumps(in_a_process(family)) + "\n")
            print(file.read_text(), end="", flush=True)
    if all((FOUND / f"{family}.json").exists() for family in every):
        results = {
            kind: [json.loads((FOUND / f"{family}.json").read_text()) for family in families]
            for kind, families in KINDS.items()
        }
        (HERE / "families.md").write_text(page(results))


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main(sys.argv[1:])
