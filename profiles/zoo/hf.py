"""Hugging Face models with random weights: ``hf:NAME[,key=value...]``.

Samples are synthetic, and nothing is downloaded. Needs the optional library transformers, which
is imported only when such a target is asked for.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from ..errors import TargetError
from .arguments import LIMITS, pairs
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

# Which model a target names, and its config -----------------------------------------------------
# Nothing is downloaded: a config is made from its class, small unless its keys say otherwise.

NAMES = ("gpt2", "bert", "vit", "resnet", "llama", "t5")
"""Models that are tested; others are tried."""
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 100,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 10,
}
"""Defaults for every config that has a number by this name, or one that stands for it."""
SMALLER: dict[str, dict[str, Any]] = {
    "resnet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]},
    "t5": {"d_ff": 128},
}
"""Further defaults of one model."""
LENGTH = 16
IMAGE_SIZE = 32
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
FIXED = {
    "model_type",
    "transformers_version",
    "architectures",
    "_name_or_path",
    "return_dict",
    "use_cache",
    "id2label",
    "label2id",
}
"""Keys of a config that aren't for the user to set."""
FAMILIES = {
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "masked": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "causal": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "image": (
        "AutoModelForImageClassification",
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    ),
}
"""What a model is trained for: the class that makes it, and the table of the models it makes;
in order of preference, as many masked models can be had as causal ones too."""


@dataclass(frozen=True)
class Request:
    """What stands in a target, checked.

    Attributes:
        target: as the user wrote it, for messages.
        model: its name among the library's configs.
        family: a key of FAMILIES.
        length: of the samples in tokens; size: side of the images in pixels.
    """

    target: str
    model: str
    family: str
    config: Any
    length: int
    size: int

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self.config.vocab_size)

    def special_id(self, name: str) -> int:
        """A special token id of the config by its name; 0 where the model has none."""
        found = getattr(self.config, name, None)
        return found if isinstance(found, int) and found > 0 else 0


def transformers(target: str, module: str = "transformers") -> Any:
    """A module of the library. Raises TargetError where it isn't installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise TargetError(
            f"{target}: needs the library transformers ({error}): install timeprest[hf]"
        ) from None


def read(target: str, argument: str) -> Request:
    """What the argument ``NAME[,key=value...]`` asks for.

    Args:
        target: the whole target, for messages.

    Raises:
        TargetError: there is no such model or key, or the config doesn't take a value.
    """
    model, _, rest = argument.partition(",")
    library = transformers(target)
    if model not in library.CONFIG_MAPPING:
        raise no_model(target, f"there is no model {model!r}")
    make_config = library.CONFIG_MAPPING[model]
    plain = _make(target, make_config, {})
    family = _family(target, model, plain)
    known = ({"num_labels"} | set(plain.to_dict()) | set(plain.attribute_map)) - FIXED
    ours = {"length"} if family != "image" else {"image_size"} - known
    texts = pairs(target, rest, [*sorted(ours), *_some(known)])
    for key in texts:
        if key not in known | ours:
            shown = ", ".join([*sorted(ours), *_some(known)])
            raise TargetError(f"{target}: there is no {key!r}; among its arguments are {shown}")
    length = _whole(target, "length", texts.get("length", str(LENGTH)))
    given = {plain.attribute_map.get(k, k): _value(texts[k]) for k in texts if k in known}
    config = _make(target, make_config, {**_defaults(model, plain, length, given), **given})
    if family == "image":
        _whole(target, "num_labels", str(config.num_labels))
        size = str(getattr(config, "image_size", texts.get("image_size", IMAGE_SIZE)))
        return Request(target, model, family, config, 0, _whole(target, "image_size", size))
    _check_tokens(target, config, length)
    return Request(target, model, family, config, length, 0)


def no_model(target: str, what: str) -> TargetError:
    """The error for a model that can't be had: why, and which can."""
    return TargetError(f"{target}: {what}; take one of {', '.join(NAMES)}")


def _some(known: set[str]) -> list[str]:
    """Keys to show in a message: those that most users look for, then a dozen others."""
    return [*sorted(known & set(SMALL)), *sorted(known - set(SMALL))[:12], "…"]


def _make(target: str, make_config: Any, values: dict[str, Any]) -> Any:
    try:
        config = make_config(**values)
    except Exception as error:  # the library checks values in many ways
        reason = " ".join(str(error).split())
        raise TargetError(f"{target}: the model's config doesn't take this: {reason}") from None
    if hasattr(config, "use_cache"):
        # The cache serves generation alone, and would be part of the model's result.
        config.use_cache = False
    return config


def _family(target: str, model: str, config: Any) -> str:
    tables = transformers(target, "transformers.models.auto.modeling_auto")
    for family, (_, table) in FAMILIES.items():
        if model in getattr(tables, table) and config.is_encoder_decoder == (family == "seq2seq"):
            return family
    raise no_model(target, f"{model} is neither a language model nor an image classifier")


def _defaults(model: str, plain: Any, length: int, given: dict[str, Any]) -> dict[str, Any]:
    """A small config, its keys under the config's own names."""
    # Some models count positions from behind the padding id: hence a few more.
    wanted = {**SMALL, "max_position_embeddings": max(64, length + 8)}
    # A key by the same name may mean another thing, such as a list with a value for each stage.
    found = {
        plain.attribute_map.get(key, key): value
        for key, value in wanted.items()
        if isinstance(getattr(plain, key, None), int)
    }
    vocabulary = given.get("vocab_size", SMALL["vocab_size"])
    for key in SPECIAL_IDS:
        special = getattr(plain, key, None)
        if isinstance(vocabulary, int) and isinstance(special, int) and special >= vocabulary:
            found[key] = 0
    return {**found, **SMALLER.get(model, {})}


def _check_tokens(target: str, config: Any, length: int) -> None:
    """Raise TargetError for sizes that can't be."""
    low, _ = LIMITS["vocabulary"]
    vocabulary = getattr(config, "vocab_size", None)
    if not isinstance(vocabulary, int) or vocabulary < low:
        raise TargetError(f"{target}: vocab_size={vocabulary}: must be {low} or more")
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and length > positions:
        raise TargetError(
            f"{target}: length={length} is more than max_position_embeddings={positions}"
        )


def _whole(target: str, key: str, text: str) -> int:
    low, high = LIMITS.get(key.removeprefix("image_"), (1, 2**20))
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise TargetError(f"{target}: {key}={text}: must be a whole number from {low} to {high}")
    return value


def _value(text: str) -> int | float | bool | str:
    """What a config's key is given: a number or a truth value where it looks like one."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


# The task ---------------------------------------------------------------------------------------

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
