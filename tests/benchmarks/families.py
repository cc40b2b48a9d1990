"""Which Hugging Face models train as pipelines with no code for them: ours, and torch's own.

    python tests/benchmarks/families.py [gpt2 llama …]

prints the table of docs/hugging_face.md. Every model has three layers of width 64 and random
weights; samples have equal numbers of labels, and there is no dropout, so that a pipeline's losses
can be held against those of a plain loop over the model with labels: AdamW, 20 mini-batches of 8.
Ours goes through the commands: tp-profile, tp-plan solve (a system that flushes), tp-run. For
torch's, `torch.distributed.pipelining.pipeline` traces the model, cut before blocks of its own, and
GPipe runs it in 4 micro-batches.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timeprest.profiles.errors import UserError
from timeprest.profiles.target import resolve
from timeprest.runtime.records.progress import read_losses
from timeprest.tests.benchmarks import shared

STEPS, MINI_BATCH, MICRO_BATCHES, LENGTH, VOCABULARY = 20, 8, 4, 16, 100
STAGES = (2, 3)
RATE = 3e-4
NEAR = 1e-4
LIMIT_S = 300
command = partial(shared.command, limit_s=LIMIT_S)

DROPOUT = {
    "gpt2": "attn_pdrop=0,embd_pdrop=0,resid_pdrop=0",
    "llama": "",
    "qwen2": "",
    "mistral": "",
    "gemma": "",
    "phi": "",
    "opt": "dropout=0",
    "bert": "hidden_dropout_prob=0,attention_probs_dropout_prob=0",
    "t5": "dropout_rate=0",
    "vit": "",
}
"""The families, each with what switches its dropout off."""
CUTS = {
    "gpt2": ("transformer.h.1", "transformer.h.2"),
    "opt": ("model.decoder.layers.1", "model.decoder.layers.2"),
    "bert": ("bert.encoder.layer.1", "bert.encoder.layer.2"),
    "t5": ("decoder.block.0", "decoder.block.2"),
    "vit": ("vit.layers.1", "vit.layers.2"),
}
"""Where torch's stages begin; elsewhere before model.layers.1 and 2."""
HEADS = {"bert": "MaskedLM", "t5": "Seq2SeqLM", "vit": "ImageClassification"}


def make_data(folder: Path) -> None:
    """Rows of tokens and of images, as datasets folders."""
    import datasets

    datasets.disable_progress_bars()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, VOCABULARY, (STEPS * MINI_BATCH + 16, LENGTH), generator=generator)
    images = torch.randn(len(ids), 3, 32, 32, generator=generator)
    classes = torch.randint(0, 10, (len(ids),), generator=generator)
    for name, rows in {
        "tokens": {"input_ids": ids.tolist(), "labels": ids.tolist()},
        "images": {"pixel_values": images.tolist(), "labels": classes.tolist()},
    }.items():
        whole = datasets.Dataset.from_dict(rows)
        parts = {"train": whole, "test": whole.select(range(8))}
        datasets.DatasetDict(parts).save_to_disk(str(folder / name))


def target_of(family: str, folder: Path) -> str:
    kind = "images" if family == "vit" else "tokens"
    more = [DROPOUT[family], "" if family == "vit" else f"vocab_size={VOCABULARY}"]
    given = "".join(f",{keys}" for keys in more if keys)
    return f"hf:{family},num_hidden_layers=3{given},data={folder / kind}"


def made(family: str, folder: Path) -> Any:
    """The model as anyone makes it of its config, and its batches with labels."""
    import datasets
    import transformers

    config = resolve(target_of(family, folder)).model().config
    torch.manual_seed(0)
    maker = getattr(transformers, f"AutoModelFor{HEADS.get(family, 'CausalLM')}")
    model = maker.from_config(config).train()
    rows = datasets.load_from_disk(str(folder / ("images" if family == "vit" else "tokens")))
    rows = rows["train"].with_format("torch")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = [order[b * MINI_BATCH : (b + 1) * MINI_BATCH] for b in range(STEPS)]
    return model, [rows[part] for part in chosen]


# A plain loop -----------------------------------------------------------------------------------


def train_plainly(family: str, folder: Path) -> list[float]:
    model, batches = made(family, folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# Ours -------------------------------------------------------------------------------------------


def train_ours(family: str, folder: Path, stages: int) -> list[float]:
    """Losses of a run in processes, by the commands. Raises UserError with what they say."""
    at = folder / family
    at.mkdir(exist_ok=True)
    profile, plan, run = at / "profile.json", at / f"plan{stages}.json", at / f"run{stages}"
    if not profile.exists():
        command(
            "profile", target_of(family, folder), "--batch-size", MINI_BATCH, "--seconds", 2,
            "-o", profile,
        )  # fmt: skip
    command(
        "plan", "solve", profile, "--stages", stages, "--devices", stages, "--replicas", "off",
        "--variant", "pipedream-flush", "--tied", "split", "--time-limit", 10, "-o", plan,
    )  # fmt: skip
    command("run", plan, "--steps", STEPS, "--no-evaluate", "--run-dir", run)
    return list(read_losses(run / "metrics.jsonl"))


# Torch's ----------------------------------------------------------------------------------------


def train_torchs(family: str, folder: Path, stages: int) -> list[float]:
    """Losses of torch.distributed.pipelining. Raises RuntimeError with what it says."""
    out = folder / f"torch.{family}.{stages}.json"
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", family, str(folder), str(rank), str(stages)],
            env={**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": "29611"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(stages)
    ]
    try:
        said = [worker.communicate(timeout=LIMIT_S)[1] for worker in workers]
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no end after {LIMIT_S} s") from None
    finally:
        for worker in workers:
            worker.kill()
    failed = [text for text, worker in zip(said, workers, strict=True) if worker.returncode]
    if failed:
        # The first worker's to fail; others then say that it is gone.
        own = [e for text in failed for e in re.findall(r"(\w+(?:Error|Exception): .+)", text)]
        raise RuntimeError(own[0] if own else " ".join(failed[0].split())[-200:])
    return [float(loss) for loss in json.loads(out.read_text())]


def torchs_worker(family: str, folder: Path, rank: int, stages: int) -> None:
    from torch import distributed
    from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    model, batches = made(family, folder)

    def taken(batch: dict[str, Any]) -> dict[str, Any]:
        given = {name: value for name, value in batch.items() if name != "labels"}
        if family == "t5":
            # The model makes it of labels, which are in no pipeline's first stage.
            labels = batch["labels"]
            given["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
        return given

    def loss_of(output: Any, labels: torch.Tensor) -> torch.Tensor:
        scores = output[0] if isinstance(output, tuple) else output
        if family in ("t5", "bert", "vit"):
            classes = scores.shape[-1]
            return torch.nn.functional.cross_entropy(scores.reshape(-1, classes), labels.flatten())
        found: torch.Tensor = model.loss_function(scores, labels, vocab_size=VOCABULARY)
        return found

    cuts = CUTS.get(family, ("model.layers.1", "model.layers.2"))[: stages - 1]
    example = {
        name: value[: MINI_BATCH // MICRO_BATCHES] for name, value in taken(batches[0]).items()
    }
    pipe = pipeline(
        model,
        mb_args=(),
        mb_kwargs=example,
        split_spec=dict.fromkeys(cuts, SplitPoint.BEGINNING),
    )
    distributed.init_process_group("gloo", rank=rank, world_size=stages)
    stage = pipe.build_stage(rank, torch.device("cpu"))
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=RATE)
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=loss_of)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        parts: list[torch.Tensor] = []
        given = taken(batch) if rank == 0 else {}
        last = rank == stages - 1
        schedule.step(**given, **({"target": batch["labels"], "losses": parts} if last else {}))
        optimizer.step()
        losses.append(float(torch.stack(parts).mean()) if last else 0.0)
    if rank == stages - 1:
        (folder / f"torch.{family}.{stages}.json").write_text(json.dumps(losses))
    distributed.barrier()
    distributed.destroy_process_group()


# The table --------------------------------------------------------------------------------------


def verdict(train: Any, wanted: list[float], *where: Any) -> str:
    """ "equal", or what is the matter."""
    try:
        losses = train(*where)
    except (RuntimeError, UserError) as error:
        return " ".join(str(error).split())[:200]
    apart = [abs(a - b) for a, b in zip(losses, wanted, strict=True)]
    if max(apart) <= NEAR:
        return f"equal ({max(apart):.0e})"
    first = next(k for k, gap in enumerate(apart) if gap > NEAR)
    return f"other losses from mini-batch {first} on, by {max(apart):.2g} at most"


def main(families: list[str]) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    columns = [f"{who}, {s} stages" for who in ("ours", "torch's") for s in STAGES]
    print("| family |", " | ".join(columns), "|\n|---|" + "---|" * len(columns), flush=True)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_data(folder)
        for family in families or DROPOUT:
            wanted = train_plainly(family, folder)
            cells = [
                verdict(train, wanted, family, folder, stages)
                for train in (train_ours, train_torchs)
                for stages in STAGES
            ]
            print(f"| {family} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        name, where, rank, stages = sys.argv[2:]
        torchs_worker(name, Path(where), int(rank), int(stages))
    else:
        main(sys.argv[1:])
