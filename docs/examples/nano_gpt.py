"""A small GPT on characters: tied head, cosine rate with warm-up, gradient clipping, bfloat16.

    python docs/examples/nano_gpt.py --devices 2 --steps 200

profiles it, plans a pipeline and trains it, a process for each device. The embedding is the head's
weights too: in systems that flush, the first and the last stage have copies whose gradients are
summed; in others (--variant timeprest) one device has the first and the last stage.
"""

from __future__ import annotations

import argparse
import math
from pydoc_data.topics import topics

import timeprest
import torch
from timeprest.planner.systems.variants import VARIANTS
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler

LENGTH, WIDTH, HEADS, BLOCKS = 64, 64, 4, 4
BATCH, RATE, WARMUP = 16, 1e-3, 10

TEXT = "".join(topics[name] for name in sorted(topics))[:60_000]
"""Of Python's own reference."""
CHARACTERS = sorted(set(TEXT))


class Windows(Dataset):
    """Stretches of the text, each with itself one character on; the last tenth is for testing."""

    def __init__(self, split: str) -> None:
        number = {character: k for k, character in enumerate(CHARACTERS)}
        text = torch.tensor([number[character] for character in TEXT])
        border = len(text) * 9 // 10
        self.text = text[:border] if split == "train" else text[border:]

    def __len__(self) -> int:
        return (len(self.text) - 1) // LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        at = index * LENGTH
        return self.text[at : at + LENGTH], self.text[at + 1 : at + LENGTH + 1]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, 2)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(len(CHARACTERS), WIDTH)
        self.wpe = nn.Embedding(LENGTH, WIDTH)
        self.h = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, len(CHARACTERS), bias=False)
        self.lm_head.weight = self.wte.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = 1 / math.sqrt(2 * BLOCKS) if name.endswith("proj.weight") else 1
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[m, LENGTH]`` → ``[m, LENGTH, characters]``."""
        places = torch.arange(LENGTH, device=tokens.device)
        return self.lm_head(self.ln_f(self.h(self.wte(tokens) + self.wpe(places))))


class Task:
    scheduler_step = "update"

    def model(self) -> nn.Module:
        return GPT()

    def data(self, split: str) -> DataLoader:
        windows = Windows(split)
        sampler = DistributedSampler(windows, 1, 0, shuffle=True) if split == "train" else None
        return DataLoader(windows, batch_size=BATCH, sampler=sampler, drop_last=split == "train")

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output.flatten(0, 1).float(), target.flatten())

    def optimizer(self, parameters) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)

    def scheduler(self, optimizer, steps: int, steps_per_epoch: int):
        """Rises over WARMUP updates, then falls along a cosine to a tenth at the run's end."""

        def factor(update: int) -> float:
            if update < WARMUP:
                return (update + 1) / WARMUP
            share = (update - WARMUP) / max(steps - WARMUP, 1)
            return 0.1 + 0.45 * (1 + math.cos(math.pi * min(share, 1.0)))

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def main(arguments: list[str] | None = None) -> timeprest.Run:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--variant", default="pipedream-flush")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--autocast", choices=["bfloat16", "off"], default="bfloat16")
    parser.add_argument("--seconds", type=float, default=5.0, help="to measure the model")
    parser.add_argument("--run-dir", default="runs/nano_gpt")
    asked = parser.parse_args(arguments)
    profile = timeprest.profile(
        Task,
        batch_size=BATCH,
        micro_batch_sizes=[4, 8, 16],
        autocast=None if asked.autocast == "off" else asked.autocast,
        granularity="h.*",
        seconds=asked.seconds,
    )
    tie = {"tied": "split", "stages": asked.devices}
    if not VARIANTS[asked.variant].flushes:
        tie = {"stages_per_device": 2, "placement": "v"}
    plan = timeprest.plan(
        profile, variant=asked.variant, devices=asked.devices, replicas=False, **tie
    )
    plan.show()
    run = timeprest.run(plan, asked.run_dir, steps=asked.steps, clip_norm=1.0)
    run.show()
    return run


if __name__ == "__main__":
    main()
