"""Hugging Face models as tasks: ``hf:NAME[,key=value...]``, ``hf:FOLDER[,key=value...]``.

The loss is the model's own, made of its scores and labels outside the model, as a sum over what
counts and how much that is: so a mini-batch's is the same however it is cut into micro-batches (but
for the balance of experts, where a config asks for that).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, default_collate

from ..errors import TargetError, TaskWarning, one_line
from ..tasks.hooks import in_one_line
from ..tasks.task import Split, read_loss
from ..units import texts
from ..zoo.synthetic import (
    IGNORED,
    adamw,
    class_accuracy,
    class_loss,
    counted_token_accuracy,
    counted_token_loss,
    perplexity,
    sgd,
)
from .data import HuggingFaceSamples, Lengths, lengths_of, rows_of, splits_of
from .model import (
    LENGTH,
    LONGEST,
    MAX_LENGTH,
    NAMES,
    Request,
    is_config,
    no_model,
    patterns,
    quiet,
    read,
    request_of,
    skeleton,
)
from .padding import UnpaddedSamples
from .small import explained
from .synthetic import synthetic_samples

FINE_TUNING_RATE = 5e-5
"""Learning rate for weights that are there: that of transformers' own trainer."""


class HuggingFaceTask:
    """A Hugging Face model, its samples, its own loss, and AdamW.

    Args:
        request: which model, and the data that the target names.
        data: rows in memory, or by split; None: what the target says.
    """

    def __init__(self, request: Request, data: Any = None) -> None:
        self._request = request
        self._data = data
        if request.family in ("image", "classification"):
            real = data is not None or bool(request.data)
            self._criterion, self._correct = _classes(request.problem, real)
        else:
            self._criterion, self._correct = counted_token_loss, counted_token_accuracy

    def model(self) -> nn.Module:
        return build(self._request)

    def data(self, split: Split) -> Dataset[Any]:
        if self._splits is None:
            return synthetic_samples(self._request, split)
        splits, lengths = self._splits
        kind = UnpaddedSamples if self._request.padding == LONGEST else HuggingFaceSamples
        return kind(self._request, split, splits[split], lengths)

    @cached_property
    def _splits(self) -> tuple[dict[Split, Any], Lengths] | None:
        """Rows of both splits and the length of samples; None: they are synthetic."""
        request = self._request
        if self._data is None and not request.data:
            if request.padding == LONGEST:
                raise TargetError(
                    f"{request.target}: padding={LONGEST}: synthetic samples have one length; say "
                    "what to train on with data="
                )
            return None
        found = rows_of(request) if self._data is None else splits_of(request.target, self._data)
        image = request.family == "image"
        return found, Lengths(0, 0) if image else lengths_of(request, found)

    def loss(self, output: Any, target: Any) -> Any:
        found = self._criterion(logits(output), target)
        balance = output.get("aux_loss") if hasattr(output, "keys") else None
        if balance is None:
            return found
        balance = balance * self._request.balance
        if not isinstance(found, tuple):
            return found + balance
        total, count = found
        return total + balance * count, count

    def metrics(self, output: Any, target: Any) -> dict[str, Any]:
        if self._correct is None:
            return {}
        return {"accuracy": self._correct(logits(output), target)}

    def figures(self, means: dict[str, float]) -> dict[str, float]:
        if self._request.family not in ("causal", "seq2seq"):
            return {}
        return {"perplexity": perplexity(means["loss"])}

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if self._request.model == "resnet":
            return sgd(parameters)
        return adamw(parameters, FINE_TUNING_RATE) if self._request.weights else adamw(parameters)


def make_task(name: str, argument: str | None) -> HuggingFaceTask:
    """The task of ``hf:argument``. Raises TargetError when there is no such model or key."""
    request = read(f"{name}:{argument or ''}", argument or "")
    _look(request)
    return HuggingFaceTask(request)


def task_of_object(found: Any) -> Any:
    """A config as a task; any other object of the library as it is."""
    return hugging_face(found) if is_config(found) else found


def hugging_face(
    model: Any,
    data: Any = None,
    *,
    head: str = "",
    length: int | None = None,
    padding: str = "",
    frozen: str | Iterable[str] = "",
) -> HuggingFaceTask:
    """A task of a Hugging Face model, to be trained with its own loss.

    Args:
        model: what stands behind ``hf:`` in a target (a name or a folder, with keys); or a config
            of transformers, for a model with random weights.
        data: rows with a length, each a dict of columns (a Dataset of datasets or of torch, a
            list); columns by their names; or one of these for each of "train" and "test". None:
            what `model` names, or synthetic samples.
        head: "causal", "masked", "seq2seq", "classification" or "tokens"; empty: the model's own.
        length: of samples in tokens; None: the longest row's.
        padding: "max_length", to that length; "longest", to the longest row of a mini-batch.
        frozen: names of modules or parameters that aren't trained, or patterns (*): several of
            them, or one text, joined by +.

    Raises:
        TargetError: there is no such model, or it can't have this head.
    """
    frozen = "+".join(texts(frozen, "frozen", "transformer.wte"))
    if isinstance(model, str):
        more = {"head": head, "length": length or "", "padding": padding, "frozen": frozen}
        keys = "".join(f",{key}={value}" for key, value in more.items() if value)
        request = read(f"hf:{model}{keys}", f"{model}{keys}")
    else:
        request = request_of(model, head, length, padding)
        request = replace(request, frozen=patterns(frozen))
    _look(request)
    return HuggingFaceTask(request, data)


def logits(output: Any) -> Tensor:
    """The scores in what a model returns: transformers' own output, a dict or a tuple."""
    if isinstance(output, Tensor):
        return output
    found = output["logits"] if hasattr(output, "keys") else output[0]
    assert isinstance(found, Tensor)
    return found


# The model and its own loss -----------------------------------------------------------------------


def build(request: Request) -> nn.Module:
    """The model, with the folder's weights or random ones, in training mode.

    Raises TargetError where the folder's weights aren't the model's, or nothing is called as what
    is to be frozen.
    """
    model = _with_weights(request).train()
    for pattern in request.frozen:
        named = model.named_parameters(remove_duplicate=False)
        found = [p for name, p in named if _is_in(name, pattern)]
        if not found:
            inside = [name for name, _ in model.named_modules() if name.endswith(f".{pattern}")]
            known = inside[:3] or [name for name, _ in model.named_children()]
            raise TargetError(
                f"{request.target}: frozen={pattern}: no parameter or module of the model is "
                f"called so; it has {', '.join(known)}"
            )
        for p in found:
            p.requires_grad_(False)
    return model


def _is_in(name: str, pattern: str) -> bool:
    """Whether a parameter, or a module that it is in, is called so."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:k]), pattern) for k in range(1, len(parts) + 1))


def _with_weights(request: Request) -> nn.Module:
    config = copy.deepcopy(request.config)
    if not request.weights:
        # A folder's config may say bfloat16, in which its weights were saved: half precision is
        # autocast's.
        dtype = {"dtype": torch.float32} if request.folder else {}
        model: nn.Module = request.maker.from_config(config, **dtype)
        return model
    path = Path(request.folder).expanduser()
    with in_one_line(f"{request.target}: its weights can't be taken", text=one_line), quiet():
        model, found = request.maker.from_pretrained(
            str(path) if path.is_dir() else request.folder,
            config=config,
            local_files_only=True,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
        )
    missing = sorted(found["missing_keys"])
    if request.own_head and missing:
        raise TargetError(
            f"{request.target}: its weights lack {', '.join(missing[:3])}"
            + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            + ": complete them, or begin without them (weights=random)"
        )
    return model


def _classes(problem: str, real: bool) -> tuple[Any, Any]:
    """Loss and share of right answers. `real`: labels are the user's; some may be IGNORED."""
    if problem == "regression":
        return _squares, None
    if problem == "multi_label_classification":
        return functional.binary_cross_entropy_with_logits, _right_labels
    if real:
        return partial(_counted, counted_token_loss), partial(_counted, counted_token_accuracy)
    return class_loss, class_accuracy


def _counted(figure: Any, logits: Tensor, labels: Tensor) -> Any:
    """A figure for sequences, of samples ``[m]``: as if they were one."""
    return figure(logits[None], labels[None])


def _squares(logits: Tensor, wanted: Tensor) -> Tensor:
    return functional.mse_loss(logits.reshape(wanted.shape), wanted)


def _right_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of labels that are on the right side."""
    return ((logits > 0) == (labels > 0.5)).double().mean()


# Models that aren't tested ----------------------------------------------------------------------

_NEAR = 1e-5
_LARGE, _TOO_LARGE = 10**8, 10**9
"""Parameters of models that aren't tried as they are where a small one can be, and that no name
stands for; and of those that aren't tried at all."""


def _look(request: Request) -> None:
    """Try a model as it was asked for; a large one as a small one of its kind. Raises TargetError
    where it doesn't take the samples made for it, or its own loss is another than ours."""
    if request.balance:
        warnings.warn(
            f"{request.target}: the balance of its experts (aux_loss, {request.balance:g} of it) "
            "is that of each micro-batch, for it can't be had of a mini-batch in parts",
            TaskWarning,
            stacklevel=3,
        )
    tested = request.model in NAMES
    if tested and not request.given:
        return
    parameters = _parameters(request)
    if parameters > _LARGE and not (tested or request.folder or request.given):
        raise no_model(
            request.target,
            "no small sizes are known for this model, and with its own it has "
            f"{parameters:,} parameters: give its sizes",
        )
    length = min(request.length or LENGTH, request.positions or LENGTH)
    own = replace(request, data="", padding=MAX_LENGTH, weights=False, frozen=(), length=length)
    if parameters > _LARGE and tested:
        return
    reasons: list[str] = []
    tries = [own]
    if parameters > _LARGE:
        # Sizes may have to fit each other in ways that our small ones don't.
        try:
            tries.insert(0, read(request.target, f"{request.model},head={request.family}"))
        except TargetError as refusal:
            reasons.append(str(refusal))
        tries = [tried for tried in tries if _parameters(tried) <= _TOO_LARGE]
        if not tries:
            return
    for tried in tries:
        try:
            wanted, found = _losses(tried)
        except Exception as error:  # any model of the library may run here
            reasons.append(explained(error, tried.config, tried.given))
        else:
            break
    else:
        reason = "; and with its own sizes: ".join(dict.fromkeys(reasons))
        raise TargetError(f"{request.target}: the model fails on samples made for it: {reason}")
    if not abs(wanted - found) <= _NEAR * max(abs(wanted), 1):
        raise no_model(
            request.target,
            f"this model's own loss isn't plain cross-entropy: of one batch {wanted:.6g}, not "
            f"{found:.6g}",
        )


def _parameters(request: Request) -> int:
    """How many numbers it has; 0 where it can't be made, which shows when it is tried."""
    try:
        return sum(p.numel() for p in skeleton(request).parameters())
    except Exception:  # the library's, for sizes that don't go together
        return 0


def _losses(request: Request) -> tuple[float, float]:
    """The model's own loss of two samples made for it, and ours. Whatever it raises comes out."""
    with torch.random.fork_rng(devices=[]), torch.no_grad(), quiet():
        task = HuggingFaceTask(request)
        inputs, target = default_collate([task.data("train")[k] for k in range(2)])
        target = _as_the_problem_has_them(request, target)
        if request.family == "causal":
            # As models shift labels, they have none for what would follow the last token.
            target[:, -1] = IGNORED
        model = task.model().eval()
        output = model(**inputs)
        ours = float(read_loss(task.loss(output, target)).mean)
        return float(_own_loss(model, request, inputs, target)), ours


def _as_the_problem_has_them(request: Request, target: Tensor) -> Tensor:
    """Labels of synthetic samples, which are classes, for other kinds of problem."""
    if request.family not in ("image", "classification"):
        return target
    if request.problem == "regression":
        return target[:, None].expand(-1, request.config.num_labels).float().squeeze(1)
    if request.problem == "multi_label_classification":
        return functional.one_hot(target, request.config.num_labels).float()
    return target


def _own_loss(model: nn.Module, request: Request, inputs: Any, target: Tensor) -> Tensor:
    labels = target
    if request.family == "causal":
        labels = torch.cat([torch.full_like(target[:, :1], IGNORED), target[:, :-1]], 1)
    found: Tensor = model(**inputs, labels=labels).loss
    return found
