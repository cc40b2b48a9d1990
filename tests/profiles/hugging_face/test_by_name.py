"""``hf:NAME``: models by the names of their families, on made-up samples."""

from __future__ import annotations

import sys

import pytest
import torch
from helpers.models.built_in import batch, built_in, count
from timeprest.profiles.errors import TargetError
from timeprest.profiles.tasks.task import read_figure, read_loss


def test_without_the_library_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TargetError, match=r"hf:gpt2.*pip install -e '\.\[hf\]'"):
        built_in("hf", "gpt2")


@pytest.fixture
def offline(monkeypatch):
    """Any attempt to reach another machine fails the test."""
    pytest.importorskip("transformers")

    def refuse(*_):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr("socket.socket.connect", refuse)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("argument", "kind"),
    [
        ("gpt2", "GPT2LMHeadModel"),
        ("bert", "BertForMaskedLM"),
        ("vit", "ViTForImageClassification"),
        ("resnet", "ResNetForImageClassification"),
        ("llama", "LlamaForCausalLM"),
        ("t5", "T5ForConditionalGeneration"),
        ("gpt2,n_layer=3,hidden_size=32,length=70,resid_pdrop=0", "GPT2LMHeadModel"),
        ("resnet,image_size=40,layer_type=basic,num_labels=3", "ResNetForImageClassification"),
        ("vit,image_size=48,qkv_bias=false", "ViTForImageClassification"),
        ("roberta", "RobertaForMaskedLM"),
        ("mistral,length=80", "MistralForCausalLM"),
    ],
)
def test_hugging_face_models_learn(argument, kind):
    task = built_in("hf", argument)
    torch.manual_seed(0)
    model = task.model()
    assert type(model).__name__ == kind
    assert model.training
    assert count(model) < 1_000_000
    _, inputs, target = batch(task, 4)
    output = model(**inputs)
    loss = read_loss(task.loss(output, target)).mean
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert "past_key_values" not in output
    torch.testing.assert_close(read_loss(task.loss(dict(output), target)).mean, loss)
    if kind in ("BertForMaskedLM", "T5ForConditionalGeneration"):
        # Others shift labels by themselves; so does the sampler.
        torch.testing.assert_close(
            model.eval()(**inputs, labels=target).loss,
            read_loss(task.loss(model(**inputs), target)).mean,
        )
    total, weight = read_figure("accuracy", task.metrics(output, target)["accuracy"], 4)
    assert 0 <= total <= weight
    again = built_in("hf", argument).data("train")
    torch.testing.assert_close(again[3], task.data("train")[3], rtol=0, atol=0)


@pytest.mark.usefixtures("offline")
def test_arguments_reach_the_config():
    config = built_in("hf", "gpt2,n_layer=3,hidden_size=32,attn_pdrop=0.25").model().config
    assert (config.n_layer, config.n_embd, config.attn_pdrop) == (3, 32, 0.25)
    assert config.use_cache is False
    assert built_in("hf", "llama,attention_bias=true").model().config.attention_bias is True


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_some_samples_are_padded_and_none_is_all_padding(name):
    data = built_in("hf", name).data("train")
    used = []
    for k in range(40):
        inputs, labels = data[k]
        mask = inputs["attention_mask"]
        used.append(int(mask.sum()))
        assert (mask[: used[-1]] == 1).all()
        assert (labels[used[-1] :] == -100).all()
        assert (labels != -100).any()
    assert min(used) >= 12
    assert max(used) == 16
    assert min(used) < 16


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (None, ["hf:", "gpt2", "bert", "vit", "resnet", "llama", "t5"]),
        ("nothing", ["nothing", "gpt2", "bert", "vit", "resnet", "llama", "t5"]),
        ("wav2vec2", ["wav2vec2", "gpt2", "bert", "vit", "resnet", "llama", "t5"]),
        (
            "detr",
            [
                "detr",
                "transformers has it for image segmentation",
                "gpt2",
                "bert",
                "vit",
                "resnet",
                "llama",
                "t5",
            ],
        ),
        ("deepseek", ["deepseek_v2, deepseek_v3"]),
        ("whisper", ["speech seq 2 seq", "write a task"]),
        ("gemma3", ["no vocab_size", "hf:gemma3_text"]),
        ("gptj,rotary_dim=64", ["tensor a (16)", "of its config, rotary_dim=64"]),
        ("gpt2,layers=2", ["'layers'", "vocab_size", "num_hidden_layers", "length"]),
        ("gpt2,n_layers=2", ["'n_layers' (did you mean n_layer?)"]),
        ("gpt2,n_layer", ["n_layer", "key=value"]),
        ("gpt2,n_layer=many", ["n_layer", "many"]),
        ("gpt2,use_cache=true", ["use_cache"]),
        ("gpt2,length=0", ["length=0"]),
        ("bert,length=90,max_position_embeddings=64", ["length=90", "max_position_embeddings=64"]),
        ("bert,vocab_size=2", ["vocab_size=2"]),
        ("vit,length=8", ["length", "image_size"]),
        ("vit,num_labels=0", ["num_labels=0"]),
        ("resnet,image_size=x", ["image_size=x"]),
    ],
)
def test_wrong_hugging_face_arguments_are_named(argument, words):
    with pytest.raises(TargetError) as caught:
        built_in("hf", argument)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words)
