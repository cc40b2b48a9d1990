"""Synthetic samples for Hugging Face models."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..tasks.task import Split
from ..zoo.synthetic import IGNORED, Labelled, Synthetic, images, integer, mask_tokens, progression
from .data import free_id
from .model import FIRST_ID, LENGTH, Request


def synthetic_samples(request: Request, split: Split) -> Synthetic:
    """Samples with a dict of inputs, keyed by the arguments of the model's forward."""
    if request.family != "image":
        return Synthetic(partial(_token_sample, request, request.length or LENGTH), split)
    plain = images(request.size, request.config.num_labels)
    named = Labelled(
        plain.classes, lambda label, generator: {"pixel_values": plain.make(label, generator)}
    )
    return Synthetic(named, split)


def _token_sample(
    request: Request, length: int, generator: torch.Generator
) -> tuple[dict[str, Tensor], Tensor]:
    """Ids ``[length]``, in half of the samples with up to a quarter of padding at the end."""
    padding_id = request.special_id("pad_token_id")
    padded = integer(generator, 0, 2) * integer(generator, 1, length // 4 + 1)
    used = torch.arange(length) < length - padded
    ids = progression(generator, length + 1, FIRST_ID, request.vocabulary)
    inputs = {"input_ids": ids[:-1].where(used, padding_id), "attention_mask": used.long()}
    if request.family == "causal":
        return inputs, ids[1:].where(used, IGNORED)
    if request.family == "masked":
        inputs["input_ids"], labels = mask_tokens(
            generator, inputs["input_ids"], length - padded, free_id(padding_id)
        )
        return inputs, labels
    if request.family == "classification":
        # Whether ids begin in the vocabulary's first or second half, or so.
        return inputs, ids[0] * request.config.num_labels // request.vocabulary
    if request.family == "tokens":
        labels = inputs["input_ids"] * request.config.num_labels // request.vocabulary
        return inputs, labels.where(used, IGNORED)
    # Id k translates to k + 1; the decoder sees the translation one position later.
    target = (ids[:-1] + 1 - FIRST_ID) % (request.vocabulary - FIRST_ID) + FIRST_ID
    start = torch.tensor([request.special_id("decoder_start_token_id")])
    inputs["decoder_input_ids"] = torch.cat([start, target[:-1]]).where(used, padding_id)
    return inputs, target.where(used, IGNORED)
