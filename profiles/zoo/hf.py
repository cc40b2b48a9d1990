"""Hugging Face models with random weights: ``hf:NAME[,key=value...]``.

Samples are synthetic, and nothing is downloaded. Needs the optional library transformers, which
is imported only when such a target is asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from .hf_config import FAMILIES, NAMES, Request, no_model, read, transformers
from .synthetic import (
    IGNORED,
    Sampler,
    Synthetic,
    SyntheticTask,
    adamw,
    class_accuracy,
    class_loss,
    counted_token_accuracy,
    counted_token_loss,
    images,
    integer,
    mask_tokens,
    progression,
    sgd,
)

FIRST_ID = 2
"""First token id that isn't special in the samples."""


def make_task(name: str, argument: str | None) -> SyntheticTask:
    """The task of ``hf:argument``. Raises TargetError when there is no such model or key."""
    target = f"{name}:{argument or ''}"
    request = read(target, argument or "")
    if request.model not in NAMES:
        _try(read(target, request.model))
    criterion, correct = (
        (class_loss, class_accuracy)
        if request.family == "image"
        else (counted_token_loss, counted_token_accuracy)
    )
    return SyntheticTask(
        build=lambda: _build(request),
        sampler=_sampler(request),
        criterion=lambda output, target: criterion(logits(output), target),
        correct=lambda output, target: correct(logits(output), target),
        make_optimizer=sgd if request.model == "resnet" else adamw,
        perplexity=request.family in ("causal", "seq2seq"),
    )


def _build(request: Request) -> nn.Module:
    maker = getattr(transformers(request.target), FAMILIES[request.family][0])
    model: nn.Module = maker.from_config(request.config)
    return model.train()


def _try(request: Request) -> None:
    """Raise TargetError where a model, at its smallest, doesn't take the samples made for it."""
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            inputs, target = default_collate([Synthetic(_sampler(request), "train")[0]])
            scores = logits(_build(request).eval()(**inputs))
            (class_loss if request.family == "image" else counted_token_loss)(scores, target)
    except Exception as error:  # any model of the library may run here
        reason = " ".join(str(error).split())
        raise no_model(request.target, f"a small model of this kind fails: {reason}") from None


def logits(output: Any) -> Tensor:
    """The scores in what a model returns: transformers' own output, a dict or a tuple."""
    if isinstance(output, Tensor):
        return output
    found = output["logits"] if hasattr(output, "keys") else output[0]
    assert isinstance(found, Tensor)
    return found


def _sampler(request: Request) -> Sampler:
    """Samples with a dict of inputs, keyed by the arguments of the model's forward."""
    if request.family == "image":
        plain = images(request.size, request.config.num_labels)

        def image(generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
            pixels, label = plain(generator)
            return {"pixel_values": pixels}, label

        return image

    def tokens(generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        return _token_sample(request, generator)

    return tokens


def _token_sample(request: Request, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Ids ``[length]``, in half of the samples with up to a quarter of padding at the end."""
    length, padding_id = request.length, request.special_id("pad_token_id")
    padded = integer(generator, 0, 2) * integer(generator, 1, length // 4 + 1)
    used = torch.arange(length) < length - padded
    ids = progression(generator, length + 1, FIRST_ID, request.vocabulary)
    inputs = {"input_ids": ids[:-1].where(used, padding_id), "attention_mask": used.long()}
    if request.family == "causal":
        return inputs, ids[1:].where(used, IGNORED)
    if request.family == "masked":
        mask_id = 1 if padding_id == 0 else 0
        inputs["input_ids"], labels = mask_tokens(
            generator, inputs["input_ids"], length - padded, mask_id
        )
        return inputs, labels
    # Id k translates to k + 1; the decoder sees the translation one position later.
    target = (ids[:-1] + 1 - FIRST_ID) % (request.vocabulary - FIRST_ID) + FIRST_ID
    start = torch.tensor([request.special_id("decoder_start_token_id")])
    inputs["decoder_input_ids"] = torch.cat([start, target[:-1]]).where(used, padding_id)
    return inputs, target.where(used, IGNORED)
