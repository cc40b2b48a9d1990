"""Which Hugging Face model a target names: ``hf:NAME[,key=value...]``, ``hf:FOLDER[,...]``.

Nothing is downloaded, ever. Needs the optional library transformers, which is imported only when
such a target is asked for.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import TargetError, one_line
from ..tasks.hooks import in_one_line
from ..zoo.arguments import LIMITS, pairs
from .small import SMALL, for_each_layer, small_sizes, special_ids

# Heads, and which models have them --------------------------------------------------------------


class Head(NamedTuple):
    """What a model is trained for: the class that makes it, and the table of those that can be."""

    maker: str
    table: str


HEADS = {
    "seq2seq": Head("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "masked": Head("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "causal": Head("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "image": Head(
        "AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"
    ),
    "classification": Head(
        "AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"
    ),
    "tokens": Head(
        "AutoModelForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"
    ),
}
"""In the order in which a model's own is looked for: as many masked models can be had as causal
ones too."""
CHOICES = ("causal", "masked", "seq2seq", "classification", "tokens")
"""What users may ask for with ``head=``; a classifier of images is one that takes images."""

# The config -------------------------------------------------------------------------------------
# Made from its class, small unless its keys say otherwise; or read from a folder.

NAMES = (
    *("gpt2", "bert", "vit", "resnet", "llama", "t5", "qwen2", "mistral", "gemma", "phi", "opt"),
)
"""Models that are tested; others are tried."""
LENGTH = 16
"""Of synthetic samples."""
TEXT_LENGTH = 128
"""Of samples that are cut from text, unless the model has fewer positions."""
IMAGE_SIZE = 32
FIXED = {
    "model_type",
    "transformers_version",
    "architectures",
    "_name_or_path",
    "return_dict",
    "use_cache",
    "id2label",
    "label2id",
    "auto_map",
    "quantization_config",
}
"""Keys of a config that aren't for the user to set."""
LATER = ("num_labels", "problem_type", "decoder_start_token_id", "pad_token_id")
"""Keys that a config takes though its class may not list them."""
OURS = ("head", "data", "tokenizer", "weights", "padding", "frozen")
"""Keys of every target that aren't the config's, besides its length or image_size."""
LONGEST, MAX_LENGTH = "longest", "max_length"
"""Kinds of padding, in the library's own words: to the longest row of a mini-batch, and to one
length for all."""


@dataclass(frozen=True)
class Request:
    """What stands in a target, checked.

    Attributes:
        target: as the user wrote it, for messages.
        model: its name among the library's configs.
        family: a key of HEADS.
        length: of the samples in tokens, None: not said; size: side of the images in pixels.
        folder: where config and weights are, or a name in the library's own cache; empty: they
            are made.
        weights: the folder's are taken.
        own_head: the model has this head where it comes from, with weights.
        data: where samples come from, a file or a folder; empty: they are synthetic.
        tokenizer: a folder; empty: there is none; "bytes".
        padding: LONGEST or MAX_LENGTH.
        frozen: patterns of parameters' names, or of modules that have them: these aren't trained.
        given: keys of the config that the target sets.
    """

    target: str
    model: str
    family: str
    config: Any
    length: int | None
    size: int
    folder: str = ""
    weights: bool = False
    own_head: bool = True
    data: str = ""
    tokenizer: str = ""
    padding: str = MAX_LENGTH
    frozen: tuple[str, ...] = ()
    given: tuple[str, ...] = ()

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self.config.vocab_size)

    @property
    def positions(self) -> int | None:
        """Tokens that the model can take; None: any number."""
        found = getattr(self.config, "max_position_embeddings", None)
        return found if isinstance(found, int) else None

    def special_id(self, name: str) -> int:
        """A special token id of the config by its name; 0 where the model has none."""
        found = getattr(self.config, name, None)
        return found if isinstance(found, int) and found > 0 else 0

    @property
    def balance(self) -> float:
        """By how much the balance of experts counts in the loss; 0: there is none in the result."""
        there = getattr(self.config, "output_router_logits", False)
        return float(getattr(self.config, "router_aux_loss_coef", 0) or 0) if there else 0.0

    @property
    def problem(self) -> str:
        """Which kind of labels a classifier has, as transformers' own find out."""
        kind = getattr(self.config, "problem_type", None)
        if kind is not None:
            return str(kind)
        return "regression" if self.config.num_labels == 1 else "single_label_classification"

    @property
    def maker(self) -> Any:
        """What makes models with its head. Raises TargetError without the library."""
        return getattr(library(self.target), HEADS[self.family].maker)


def library(target: str, module: str = "transformers") -> Any:
    """A module of an optional library. Raises TargetError where it isn't installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise TargetError(
            f"{target}: needs the library {name} ({error}): in the checkout, pip install -e '.[hf]'"
        ) from None


def read(target: str, argument: str) -> Request:
    """What the argument ``NAME[,key=value...]`` asks for.

    Args:
        target: the whole target, for messages.

    Raises:
        TargetError: there is no such model, folder or key, or the config doesn't take a value.
    """
    name, _, rest = argument.partition(",")
    transformers = library(target)
    made = name in transformers.CONFIG_MAPPING
    plain = _make(target, name, {}) if made else _from_folder(target, name)
    folder = "" if made else name
    model = plain.model_type
    known = {*LATER, *plain.to_dict(), *plain.attribute_map} - FIXED
    texts = pairs(target, rest, [*OURS, *_some(known)])
    asked = texts.pop("head", "")
    family = _family(target, model, plain, asked)
    settings = {key: texts.pop(key, "") for key in OURS if key != "head"}
    ours = {"length"} if family != "image" else {"image_size"} - known
    for key in texts:
        if key not in known | ours:
            shown = ", ".join([*sorted(ours), *OURS, *_some(known)])
            near = get_close_matches(key, sorted(known | ours), 1, 0.75)
            more = f" (did you mean {near[0]}?)" if near else ""
            raise TargetError(
                f"{target}: there is no {key!r}{more}; among its arguments are {shown}"
            )
    if settings["weights"] not in ("", "random"):
        raise TargetError(
            f"{target}: weights={settings['weights']}: leave it out for the folder's own, or say "
            "weights=random"
        )
    padding = _padding(target, settings["padding"], family)
    length = _whole(target, "length", texts["length"]) if "length" in texts else None
    given = {plain.attribute_map.get(k, k): _value(texts[k]) for k in texts if k in known}
    if folder:
        config = _changed(target, plain, given)
    else:
        fresh = _defaults(target, plain, family, length, settings, given)
        config = _made_small(target, plain, fresh, given)
    _take_first_class(target, config, family)
    size = 0
    if family == "image":
        _whole(target, "num_labels", str(config.num_labels))
        size = _side(target, config, texts.get("image_size"))
    else:
        _check_tokens(target, config, length)
    own = _own_family(plain) if folder else family
    return Request(
        target,
        model,
        family,
        config,
        length,
        size,
        folder=folder,
        weights=bool(folder) and not settings["weights"] and has_weights(target, folder),
        own_head=own == family,
        data=settings["data"],
        tokenizer=settings["tokenizer"] or own_tokenizer(folder),
        padding=padding,
        frozen=patterns(settings["frozen"]),
        given=tuple(given),
    )


def patterns(text: str) -> tuple[str, ...]:
    """Names with ``*`` that are joined by ``+``."""
    return tuple(filter(None, text.split("+")))


def _padding(target: str, asked: str, family: str) -> str:
    """Raises TargetError for a kind that there isn't, or isn't for this model."""
    if asked not in ("", LONGEST, MAX_LENGTH):
        raise TargetError(
            f"{target}: padding={asked}: say {LONGEST} (of each mini-batch) or {MAX_LENGTH} (one "
            "length for all)"
        )
    if asked == LONGEST and family == "image":
        raise TargetError(
            f"{target}: padding={LONGEST}: is for tokens, and this model takes images"
        )
    return asked or MAX_LENGTH


def has_weights(target: str, folder: str) -> bool:
    """Whether there are weights beside a config. Raises TargetError for those in other files."""
    path = Path(folder).expanduser()
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return True
    if other := [file.name for file in sorted(path.glob("*.bin"))]:
        raise TargetError(
            f"{target}: its weights are in {other[0]}, which isn't read, as such files may run "
            "code: save them as safetensors, or begin without them (weights=random)"
        )
    return False


def own_tokenizer(folder: str) -> str:
    """The folder itself where a tokenizer lies in it; else empty."""
    path = Path(folder).expanduser()
    there = any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    return folder if folder and (there or not path.is_dir()) else ""


# Tokens of text ---------------------------------------------------------------------------------

FIRST_ID = 2
"""First token id that isn't special in synthetic samples, and where each byte is a token."""
BYTES = "bytes"


def tokenizer_of(target: str, folder: str) -> Any:
    """The tokenizer of a folder. Raises TargetError where there is none."""
    transformers = library(target)
    path = Path(folder).expanduser()
    with in_one_line(f"{target}: tokenizer={folder}: can't be read", text=one_line), quiet():
        return transformers.AutoTokenizer.from_pretrained(
            str(path) if path.is_dir() else folder, local_files_only=True
        )


def vocabulary_of(target: str, tokenizer: str) -> int:
    """Number of token ids that text becomes."""
    if tokenizer in ("", BYTES):
        return FIRST_ID + 256
    return len(tokenizer_of(target, tokenizer))


# The model --------------------------------------------------------------------------------------


def class_of(request: Request) -> Any:
    """The class that its head makes of its config."""
    found = request.maker._model_mapping[type(request.config)]
    known = {kind.__name__: kind for kind in found} if isinstance(found, tuple) else {}
    return known[request.config.architectures[0]] if known else found


def _take_first_class(target: str, config: Any, family: str) -> None:
    """Say in the config which class it is for, where there are several for its head."""
    names = _names_in(getattr(_tables(target), HEADS[family].table)[config.model_type])
    if len(names) > 1 and not set(names) & set(config.architectures or ()):
        config.architectures = [names[0]]


def _side(target: str, config: Any, given: str | None) -> int:
    """Side of images in pixels. Raises TargetError for what isn't square."""
    found = getattr(config, "image_size", given or IMAGE_SIZE)
    if isinstance(found, (list, tuple)) and len(set(found)) == 1:
        found = found[0]
    return _whole(target, "image_size", str(found))


def skeleton(request: Request) -> nn.Module:
    """The model without numbers, which takes no time and no memory."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model: nn.Module = request.maker.from_config(copy.deepcopy(request.config))
    return model


def request_of(config: Any, head: str, length: int | None, padding: str = "") -> Request:
    """What a config of transformers asks for, made in Python.

    Args:
        head: as behind ``head=``; empty: the config's own, or the first that it can have.
        padding: as behind ``padding=``.

    Raises:
        TargetError: it isn't a config, or of a model without such a head.
    """
    target = type(config).__name__
    if not is_config(config):
        more = ": give its .config, or a folder that it was saved to for its weights, too"
        raise TargetError(
            f"{target}: isn't a config of transformers{more * hasattr(config, 'save_pretrained')}"
        )
    config = _without_cache(copy.deepcopy(config))
    family = _family(target, config.model_type, config, head)
    _take_first_class(target, config, family)
    padding = _padding(target, padding, family)
    if family == "image":
        size = _side(target, config, None)
        return Request(target, config.model_type, family, config, None, size)
    _check_tokens(target, config, length)
    return Request(target, config.model_type, family, config, length, 0, padding=padding)


def is_config(found: Any) -> bool:
    """Whether something is a config of transformers, without importing that."""
    return any(
        kind.__module__.startswith("transformers.") and kind.__name__.lower() == "pretrainedconfig"
        for kind in type(found).__mro__
    )


def no_model(target: str, what: str) -> TargetError:
    """The error for a model that can't be had: why, and which can."""
    return TargetError(f"{target}: {what}; take one of {', '.join(NAMES)}")


def _some(known: set[str]) -> list[str]:
    """Keys to show in a message: those that most users look for, then a dozen others."""
    return [*sorted(known & set(SMALL)), *sorted(known - set(SMALL))[:12], "…"]


def _make(target: str, model: str, values: dict[str, Any]) -> Any:
    with _taken_by_config(target), quiet():
        config = library(target).CONFIG_MAPPING[model](**values)
    return _without_cache(config)


def _taken_by_config(target: str) -> AbstractContextManager[None]:
    return in_one_line(f"{target}: the model's config doesn't take this", text=one_line)


def _without_cache(config: Any) -> Any:
    """The cache serves generation alone, and would be part of the model's result."""
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return config


def _from_folder(target: str, name: str) -> Any:
    """The config of a folder, or of a model that the library's cache holds."""
    transformers = library(target)
    path = Path(name).expanduser()
    if not name or (not path.is_dir() and (path.exists() or name[0] in "./~")):
        what = f"{name} is no folder" if name else "no model is named"
        raise no_model(target, f"{what}: give hf:FOLDER with a config.json, or hf:NAME")
    if path.is_dir() and not (path / "config.json").is_file():
        raise no_model(target, f"{name}: there is no config.json in this folder")
    try:
        with quiet():
            config = transformers.AutoConfig.from_pretrained(
                str(path) if path.is_dir() else name, local_files_only=True
            )
    except Exception as error:  # the file is the user's, and what the library raises its own
        if path.is_dir():
            reason = one_line(error)
            raise TargetError(f"{target}: {name}/config.json can't be read: {reason}") from None
        known = {n for head in HEADS.values() for n in getattr(_tables(target), head.table)}
        near = [other for other in sorted(known) if other.startswith(name.lower())]
        near += get_close_matches(name.lower(), sorted(known), 3)
        raise no_model(
            target,
            f"there is no model {name!r} among transformers' configs"
            + (f" (it has {', '.join(dict.fromkeys(near[:6]))})" if near else "")
            + ", no folder of this name, and nothing in its cache (nothing is downloaded)",
        ) from None
    return _without_cache(config)


def _changed(target: str, config: Any, given: dict[str, Any]) -> Any:
    with _taken_by_config(target):
        for key, value in given.items():
            setattr(config, key, value)
    return config


@contextmanager
def quiet() -> Iterator[None]:
    """The library's bars and hints are for other uses."""
    logging = importlib.import_module("transformers.utils.logging")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _tables(target: str) -> Any:
    return library(target, "transformers.models.auto.modeling_auto")


def _family(target: str, model: str, config: Any, asked: str) -> str:
    """The head that is asked for; else the one it had, or the first that it can have."""
    tables = _tables(target)
    can = [name for name, head in HEADS.items() if model in getattr(tables, head.table)]
    if asked:
        named = {head.maker: name for name, head in HEADS.items()}.get(asked, asked)
        if named not in (*CHOICES, "image"):
            raise TargetError(f"{target}: head={asked}: must be one of {', '.join(CHOICES)}")
        if named == "classification" and named not in can:
            named = "image"
        if named == "classification" and config.is_encoder_decoder:
            raise TargetError(
                f"{target}: head={asked}: a {model} with encoder and decoder finds a text's end by "
                "its values, which no trace can follow; take a model without a decoder"
            )
        if named not in can:
            heads = " or ".join(dict.fromkeys("classification" if c == "image" else c for c in can))
            raise TargetError(
                f"{target}: transformers has no {model} for head={asked}"
                + (f": it has {heads}" if heads else "")
            )
        return named
    own = _own_family(config)
    if own in can:
        return own
    for name in ("seq2seq", "masked", "causal", "image"):
        if name in can and config.is_encoder_decoder == (name == "seq2seq"):
            return name
    others = [
        name.removeprefix("MODEL_FOR_").removesuffix("_MAPPING_NAMES").replace("_", " ").lower()
        for name, table in vars(tables).items()
        if name.startswith("MODEL_FOR_") and name.endswith("_NAMES") and model in table
    ]
    others = [other for other in others if other not in ("image", "causal lm")]
    raise no_model(
        target,
        f"{model} is neither a language model nor an image classifier"
        + (f" (transformers has it for {', '.join(others[:3])})" if others else "")
        + ": write a task for it (docs/tasks.md)",
    )


def _own_family(config: Any) -> str:
    """Which head a config says that the model has; empty: none of ours."""
    tables = _tables("")
    for architecture in getattr(config, "architectures", None) or ():
        for name, head in HEADS.items():
            if architecture in _names_in(getattr(tables, head.table).get(config.model_type)):
                return name
    return ""


def _names_in(value: Any) -> tuple[str, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (str(value),)


def _defaults(
    target: str,
    plain: Any,
    family: str,
    length: int | None,
    settings: dict[str, str],
    given: dict[str, Any],
) -> dict[str, Any]:
    """A small config, its keys under the config's own names."""
    length = length or (TEXT_LENGTH if settings["data"] else LENGTH)
    vocabulary = SMALL["vocab_size"]
    if settings["data"] and family != "image":
        vocabulary = vocabulary_of(target, settings["tokenizer"])
    # Some models count positions from behind the padding id: hence a few more.
    found = small_sizes(plain, given, vocabulary=vocabulary, positions=max(64, length + 8))
    return {**found, **dict(special_ids(plain, family, given.get("vocab_size", vocabulary)))}


def _made_small(target: str, plain: Any, fresh: dict[str, Any], given: dict[str, Any]) -> Any:
    """A config of what the user gave, and small sizes of as much else as goes with it; TargetError
    where there are none."""
    model = plain.model_type
    layers = given.get("num_hidden_layers", SMALL["num_hidden_layers"])
    by_layer = for_each_layer(plain, layers) if isinstance(layers, int) else {}
    tried = [fresh, {**fresh, **by_layer}]
    tried += [{k: v for k, v in fresh.items() if k != key} for key in fresh]
    refusals: list[TargetError] = []
    for some in [*tried, {}]:
        try:
            return _make(target, model, {**some, **given})
        except TargetError as refusal:
            refusals.append(refusal)
    raise refusals[0]


def _check_tokens(target: str, config: Any, length: int | None) -> None:
    """Raise TargetError for sizes that can't be."""
    low, _ = LIMITS["vocabulary"]
    vocabulary = getattr(config, "vocab_size", None)
    if vocabulary is None:
        text = getattr(config, "text_config", None)
        alone = getattr(text, "model_type", "")
        known = alone in getattr(_tables(target), HEADS["causal"].table)
        raise TargetError(
            f"{target}: the config of {config.model_type} has no vocab_size of its own, for it is "
            f"made of several models: "
            + (f"its language model alone is hf:{alone}" if known else "write a task for it")
        )
    if not isinstance(vocabulary, int) or vocabulary < low:
        raise TargetError(f"{target}: vocab_size={vocabulary}: must be {low} or more")
    positions = getattr(config, "max_position_embeddings", None)
    if length is not None and isinstance(positions, int) and length > positions:
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
