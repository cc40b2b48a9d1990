"""Transformers of torch.nn are cut like everything else, in training and in evaluation mode."""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers.by_hand.pieces import run_pieces
from timeprest.profiles.errors import TaskWarning
from timeprest.profiles.tracing.call import Call
from timeprest.profiles.tracing.front_ends import trace
from torch import nn

WIDTH, LENGTH = 8, 5


def layer(kind, **settings):
    settings = {"dropout": 0.0, "batch_first": True, **settings}
    return kind(WIDTH, 2, 16, **settings)


class Encoder(nn.Module):
    """Of words, of which those called 0 are padding; causal where it is said to be."""

    def __init__(self, masks="", **settings):
        super().__init__()
        self.words = nn.Embedding(20, WIDTH)
        norm = nn.LayerNorm(WIDTH)
        self.encoder = nn.TransformerEncoder(layer(nn.TransformerEncoderLayer, **settings), 3, norm)
        self.out = nn.Linear(WIDTH, 2)
        self.masks = masks
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("causal", mask)

    def forward(self, ids):
        more = {}
        if "padding" in self.masks:
            more["src_key_padding_mask"] = ids == 0
        if "causal" in self.masks:
            more["mask"] = self.causal
        if "hint" in self.masks:
            more["is_causal"] = True
        return self.out(self.encoder(self.words(ids), **more))


class Both(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.words = nn.Embedding(20, WIDTH)
        settings = {"dropout": 0.0, "batch_first": True, **settings}
        self.net = nn.Transformer(WIDTH, 2, 2, 2, 16, **settings)

    def forward(self, ids):
        x = self.words(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        if self.net.batch_first:
            return self.net(x, x, tgt_mask=mask, src_key_padding_mask=ids == 0)
        x = x.transpose(0, 1)
        return self.net(x, x, tgt_mask=mask, src_key_padding_mask=ids == 0).transpose(0, 1)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, WIDTH)
        self.decoder = nn.TransformerDecoder(layer(nn.TransformerDecoderLayer), 2)

    def forward(self, ids):
        x = self.words(ids)
        return self.decoder(x, x)


MODELS = {
    "encoder": Encoder,
    "norms first": lambda: Encoder(norm_first=True),
    "gelu": lambda: Encoder(activation="gelu"),
    "causal": lambda: Encoder("causal"),
    "causal, told": lambda: Encoder("causal hint"),
    "padding": lambda: Encoder("padding"),
    "padding, norms first": lambda: Encoder("padding", norm_first=True),
    "both masks": lambda: Encoder("padding causal"),
    "time first": lambda: Both(batch_first=False),
    "transformer": Both,
    "decoder": Decoder,
}


def words(samples=3, left=True):
    ids = torch.randint(1, 20, (samples, LENGTH), generator=torch.Generator().manual_seed(0))
    for k in range(1, samples):
        ids[k, slice(-k, None) if left else slice(0, k)] = 0
    return ids


def build(name):
    torch.manual_seed(0)
    return MODELS[name]()


@pytest.mark.parametrize(
    ("name", "front_end"),
    [*((name, "fx") for name in MODELS), ("causal", "export"), ("transformer", "export")],
)
def test_its_layers_are_cut_everywhere(name, front_end):
    model, call = build(name), Call((words(),), (None,))
    traced = trace(model, name, call, front_end=front_end)
    names = {x.name.partition("@")[0] for x in traced.layers}
    wanted = {n for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.LayerNorm))}
    assert names >= {n for n in wanted if "out_proj" not in n}
    assert any("self_attn" in name for name in names)
    groups = [[k] for k in range(len(traced.layers))]
    result, _ = run_pieces(traced, groups, call.tensors, 0)
    torch.testing.assert_close(result, model(words()))


@pytest.mark.parametrize("name", MODELS)
def test_evaluated_it_gives_what_the_model_does(name):
    """Which leaves padding out, where it may, by nested tensors."""
    model = build(name).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # With a causal mask, what is padded at its beginning sees nothing at all.
        for ids in (words(), words(left=name == "both masks")):
            traced = trace(model, name, Call((ids,), (None,)))
            assert traced.front_end == "fx"
            with torch.no_grad():
                for other in (words(), words(left=name == "both masks")):
                    found = traced.module(other)
                    torch.testing.assert_close(found, model(other))


def test_layers_by_a_pattern():
    model, call = build("padding"), Call((words(),), (None,))
    for front_end in ("fx", "export"):
        found = trace(model, "it", call, granularity="encoder.layers.*", front_end=front_end)
        assert [x.name for x in found.layers] == [
            "words",
            *(f"encoder.layers.{k}" for k in range(3)),
            "encoder.norm",
            "out",
        ]
    whole = trace(model, "it", call, granularity="encoder")
    assert [x.name for x in whole.layers] == ["words", "encoder", "out"]


@pytest.mark.parametrize("pattern", ["encoder.layers.0.self_attn.out_proj", "encoder.layers"])
def test_a_pattern_that_changes_nothing_is_told(pattern):
    model, call = build("encoder"), Call((words(),), (None,))
    with pytest.warns(TaskWarning, match=f"--granularity '{pattern}' changes nothing"):
        trace(model, "it", call, granularity=f"out,{pattern}")


def test_hooks_on_it_run():
    model, call = build("encoder"), Call((words(),), (None,))
    model.encoder.layers[1].register_forward_hook(lambda module, given, result: result * 2)
    traced = trace(model, "it", call)
    assert traced.front_end == "fx"
    torch.testing.assert_close(traced.module(words()), model(words()))


def test_own_blocks_of_a_layer_are_used():
    class Own(nn.TransformerEncoderLayer):
        def _ff_block(self, x):
            return super()._ff_block(x) * 3

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, WIDTH), nn.TransformerEncoder(layer(Own), 2))
    traced = trace(model, "it", Call((words(),), (None,)))
    assert traced.front_end == "fx"
    torch.testing.assert_close(traced.module(words()), model(words()))
