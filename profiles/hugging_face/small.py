"""Sizes in configs of transformers, whatever a family calls them: small ones; which don't fit."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

from ..errors import one_line

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

_KINDS = {
    "num_hidden_layers": r"(^|_)layers?$|^num_blocks$",
    "head_dim": r"(^|_)(head_?dim|d_head|dim_head|head_size)$|^(d_kv|rotary_dim|kv_channels)$",
    "num_attention_heads": r"(^|_)heads?$|^num_query_groups$",
    "intermediate_size": r"(ffn_dim|ffn_hidden_size|intermediate_size|intermediate_size_mlp)$"
    r"|^(d_ff|dff|dim_ff|d_inner|n_inner|hidden_dim|feed_forward_size)$",
    "vocab_size": r"(^|_)vocab_size(_|$)|_hash_byte_group_vocab$",
    "max_position_embeddings": r"(^|_)max_.*position_embeddings$",
    "experts": r"(^|_)experts$|^zero_expert_num$",
    "experts_of_a_token": r"experts?_per_tok(en)?$|^moe_(topk|k)$",
    "groups_of_experts": r"^(n_group|topk_group|num_expert_groups?|n_groups|o_groups)$",
    "rank": r"(^|_)(rank|lowrank|dt_rank|extent)$",
}
"""What families call their sizes, by what these are: keys of `SMALL`, and those of `_OTHERS`."""
_OTHERS = {
    "experts": 4,
    "experts_of_a_token": 2,
    "groups_of_experts": 1,
    "shared_experts": 1,
    "rank": 16,
}

_NEEDED = {
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "n_shared_experts": "shared_experts",
    "n_routed_experts": "experts",
    "num_experts_per_tok": "experts_of_a_token",
}
"""Of these, configs without a number of their own can't be made."""

_WIDTH = re.compile(r"(size|dim|width|d_model)$")
"""One of these that is as large as the model's width is one more name for it, or for that of what
is added to it."""

_DEPTHS = ("depths", "num_block_repeats", "stage_num_blocks", "stage_numb_of_layers")
_WIDTHS = ("hidden_sizes", "embed_dims", "embed_dim", "neck_hidden_sizes", "base_attn_unit_dims")
_NARROWEST, _STEP = 16, 8
"""Of networks in stages: how many blocks each has, how wide each is; the narrowest here, and what
divides all."""

_WINDOWS: dict[str, Any] = {
    "patch_size": 2,
    "window_size": 4,
    "embed_dim": 32,
    "depths": [2, 2],
    "num_heads": [2, 4],
}
SMALLER: dict[str, dict[str, Any]] = {
    "resnet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]},
    "bit": {"embedding_size": 16, "num_groups": 8},
    "regnet": {"embedding_size": 16, "groups_width": 8},
    # Its blocks are narrower within.
    "mobilebert": {"embedding_size": 32, "true_hidden_size": 32, "intra_bottleneck_size": 32},
    # Each stage halves the sides, which must be whole windows.
    "swin": _WINDOWS,
    "swinv2": _WINDOWS,
    "donut-swin": _WINDOWS,
}
"""Further defaults of one model."""

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def small_sizes(
    plain: Any, given: dict[str, Any], *, vocabulary: int, positions: int
) -> dict[str, Any]:
    """Small sizes for a config, by its own keys.

    Args:
        plain: of this kind, with its class's own sizes.
        given: by the user, which others are to fit.
        vocabulary: number of token ids.
        positions: that are needed.
    """
    names = plain.attribute_map
    wanted = {**SMALL, "vocab_size": vocabulary, "max_position_embeddings": positions}
    for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"):
        if type(value := given.get(names.get(key, key))) is int:
            wanted[key] = value
    heads = wanted["num_attention_heads"]
    wanted["head_dim"] = max(wanted["hidden_size"] // max(heads, 1), 1)
    if heads % wanted["num_key_value_heads"]:
        wanted["num_key_value_heads"] = heads
    # A key by the same name may mean another thing, such as a list with a value for each stage.
    found: dict[str, Any] = {
        names.get(key, key): value
        for key, value in wanted.items()
        if isinstance(_own(plain, key), int) and (key != "patch_size" or value < plain.patch_size)
    }
    width = _own(plain, "hidden_size")
    for key, value in vars(plain).items():
        if value is None:
            if key in _NEEDED:
                found[key] = {**wanted, **_OTHERS}[_NEEDED[key]]
            continue
        if key in found or key.startswith("_") or _own(plain, key) is None:
            continue
        if key in _DEPTHS and _numbers(value):
            found[key] = [1] * len(value)
            # Where stages count as layers, they are as many as the lists have.
            found.pop(names.get("num_hidden_layers", "num_hidden_layers"), None)
        elif key in _WIDTHS and _numbers(value):
            by = _NARROWEST / (_STEP * min(value))
            found[key] = [max(round(v * by), 1) * _STEP for v in value]
        elif key == "image_size" and _numbers(value):
            found[key] = [SMALL[key]] * len(value)
        elif type(value) is int:
            small = _small(key, {**wanted, **_OTHERS})
            if small is None and value == width and _WIDTH.search(key):
                small = wanted["hidden_size"]
            if small is not None and value > small:
                found[key] = small
        elif hasattr(value, "attribute_map"):
            more = small_sizes(value, {}, vocabulary=vocabulary, positions=positions)
            ids = special_ids(value, "", vocabulary)
            found[key] = {**value.to_diff_dict(), **more, **dict(ids)}
    return {**found, **_of_one_family(plain, wanted)}


def _small(key: str, wanted: dict[str, int]) -> int | None:
    kind = next((kind for kind, pattern in _KINDS.items() if re.search(pattern, key)), None)
    return None if kind is None else wanted[kind]


def _numbers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(type(v) is int for v in value) and bool(value)


def _of_one_family(plain: Any, wanted: dict[str, int]) -> dict[str, Any]:
    layers, heads = wanted["num_hidden_layers"], wanted["num_attention_heads"]
    if plain.model_type == "gpt_neo":
        # Kinds of attention, and for how many layers they alternate.
        pairs, one = divmod(layers, 2)
        kinds = [[["global", "local"], pairs], [["global"], one]]
        return {"attention_types": [kind for kind in kinds if kind[1]]}
    if plain.model_type == "mamba2":
        return {"head_dim": plain.expand * wanted["hidden_size"] // heads, "state_size": 16}
    return SMALLER.get(plain.model_type, {})


def for_each_layer(plain: Any, layers: int) -> dict[str, Any]:
    """A config's lists that have an entry for each layer, for so many layers: of each kind of layer
    one, where there is room, in their order."""
    before = _own(plain, "num_hidden_layers")
    lists = {
        key: value
        for key, value in plain.to_dict().items()
        if isinstance(value, (list, tuple)) and len(value) == before
    }
    if not lists or before <= layers:
        return {}
    kinds: dict[str, int] = {}
    for k, layer in enumerate(zip(*lists.values(), strict=True)):
        kinds.setdefault(repr(layer), k)
    chosen = list(kinds.values())[:layers]
    others = (k for k in range(before) if k not in chosen)
    chosen = sorted([*chosen, *(next(others) for _ in range(layers - len(chosen)))])
    return {key: [value[k] for k in chosen] for key, value in lists.items()}


def special_ids(plain: Any, family: str, vocabulary: Any) -> Iterator[tuple[str, int]]:
    """Ids of special tokens that a config needs others of: they are no tokens of so small a
    vocabulary, or there are none."""
    for key in SPECIAL_IDS:
        special = getattr(plain, key, None)
        if isinstance(vocabulary, int) and isinstance(special, int) and special >= vocabulary:
            yield key, 0
    if family == "classification" and getattr(plain, "pad_token_id", None) is None:
        # By it, models that read from left to right find a text's last token.
        yield "pad_token_id", 0
    if family == "seq2seq" and getattr(plain, "decoder_start_token_id", None) is None:
        yield "decoder_start_token_id", getattr(plain, "pad_token_id", None) or 0


def _own(config: Any, key: str) -> Any:
    """What a config has by this name, or by another one for it; None: nothing that can be set."""
    found = getattr(type(config), key, None)
    if isinstance(found, property) and found.fset is None:
        return None
    try:
        return getattr(config, key, None)
    except Exception:  # the library's, where each layer has a size of its own
        return None


_SAYS_NOTHING = re.compile(
    r"token_id|^_|architectures|problem_type|dtype|_types?$|pruned|task|path"
)


def explained(error: Exception, config: Any, given: Collection[str]) -> str:
    """Why a model can't be made or run, and which keys of its config have the numbers in that:
    where shapes don't fit, it is two of these that don't."""
    reason = one_line(error)
    mentioned = set(re.findall(r"(?<![\w.])\d+(?![\w.])", reason))
    keys = [
        f"{key}={value}"
        for key, value in sorted(config.to_dict().items(), key=lambda item: item[0] not in given)
        if type(value) is int and value > 2 and str(value) in mentioned and "token_id" not in key
    ]
    if "NoneType" in reason:
        none = [key for key, value in config.to_dict().items() if value is None]
        none = [key for key in none if not _SAYS_NOTHING.search(key)]
        reason += f" (its config has no {', '.join(none[:8]) or 'such number'}: give it)"
    elif keys:
        reason += f" (of its config, {', '.join(keys[:8])})"
    elif given:
        reason += f" (with {', '.join(given)} as given)"
    return reason
