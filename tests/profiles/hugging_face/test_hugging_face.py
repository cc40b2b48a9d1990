"""Hugging Face models as tasks: heads and their losses, folders, and data as people have it."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
import torch
from helpers.plans import plan_by_hand, with_times
from timeprest.profiles.errors import RunError, TargetError, TaskWarning
from timeprest.profiles.hugging_face.model import read, skeleton
from timeprest.profiles.hugging_face.task import hugging_face
from timeprest.profiles.measuring.measure import measure
from timeprest.profiles.target import resolve
from timeprest.profiles.tasks.samples import fetch
from timeprest.profiles.tasks.task import read_loss
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings
from torch.utils.data import default_collate

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
pandas = pytest.importorskip("pandas")

SIZES = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2"
SPLITS = ("train", "test")
UNTIED = "n_layer=1,tie_word_embeddings=false"
TINY = f"{SIZES},intermediate_size=24"


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Any attempt to reach another machine fails the test."""

    def refuse(*_):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr("socket.socket.connect", refuse)
    datasets.disable_progress_bars()


def first_batch(task, samples=4, split="train"):
    call, labels = fetch(task.data(split), list(range(samples)))
    return dict(zip(call.names, call.tensors, strict=True)), labels


def refusal(argument, data=None):
    def first_sample():
        return hugging_face(argument, data).data("train")[0]

    with pytest.raises(TargetError) as caught:
        first_sample()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Heads and their losses -------------------------------------------------------------------------

CLASSES = [0, 2, 1, -100, 2, 0]
HEADS = {
    "classes": (f"bert,{TINY},head=classification,num_labels=3", CLASSES),
    "classes, from left to right": (f"llama,{TINY},head=classification,num_labels=3", CLASSES),
    "a measure": (f"bert,{TINY},head=classification,num_labels=1", [0.5, 2.0, -1.0, 0, 3, 1]),
    "two measures": (
        f"bert,{TINY},head=classification,num_labels=2,problem_type=regression",
        [[0.5, k] for k in range(6)],
    ),
    "several classes": (
        f"bert,{TINY},head=classification,num_labels=2,problem_type=multi_label_classification",
        [[k % 2, k % 3 > 0] for k in range(6)],
    ),
    "tokens": (
        f"bert,{TINY},head=AutoModelForTokenClassification,num_labels=3",
        [[0, 1, -100, 2]] + [[-100, 1, -100, -100]] * 5,
    ),
    "images": (f"vit,{TINY},image_size=16,num_labels=3", CLASSES),
    "images by head": (f"vit,{TINY},image_size=16,num_labels=3,head=classification", CLASSES),
    "text to text": (f"t5,{SIZES},d_kv=8", [[5, 6, 7], [5, -100, 8]] * 3),
    "another text to text": (
        "bart,d_model=16,encoder_layers=1,decoder_layers=1,encoder_ffn_dim=24,decoder_ffn_dim=24",
        [[5, 6, 7], [5, -100, 8]] * 3,
    ),
}


@pytest.mark.parametrize("case", HEADS)
def test_the_loss_is_the_models_own_however_it_is_cut(case):
    argument, labels = HEADS[case]
    if "image" in argument:
        rows = [{"pixel_values": torch.randn(3, 16, 16), "label": label} for label in labels]
    else:
        ids = [[2 + k, 3, 4, 5 + k] for k in range(6)]
        rows = [{"input_ids": i, "labels": v} for i, v in zip(ids, labels, strict=True)]
    task = hugging_face(argument, {"train": rows, "test": rows})
    model = task.model().eval().requires_grad_(False)
    inputs, target = first_batch(task, 6)
    own = model(**{k: v for k, v in inputs.items() if k != "decoder_input_ids"}, labels=target)
    output = model(**inputs)
    torch.testing.assert_close(read_loss(task.loss(output, target)).mean, own.loss)
    # Micro-batches with unlike numbers of labels, one with none at all among the first case's.
    total = weight = 0.0
    for part in (slice(0, 3), slice(3, 4), slice(4, 6)):
        found = read_loss(task.loss(model(**{k: v[part] for k, v in inputs.items()}), target[part]))
        counted = part.stop - part.start if found.weight is None else found.weight
        total += float(found.value) * (counted if found.weight is None else 1)
        weight += counted
    assert total / weight == pytest.approx(float(own.loss), rel=1e-5)
    for value in task.metrics(output, target).values():
        assert value is not None


def test_a_head_that_the_model_cannot_have_is_refused():
    assert "causal" in refusal("bert,head=nonsense")
    assert "transformers has no vit for head=causal: it has classification" in refusal(
        "vit,head=causal"
    )
    assert "no trace can follow" in refusal("t5,head=classification")


def test_another_loss_than_cross_entropy_is_refused(monkeypatch):
    monkeypatch.setattr(
        "timeprest.profiles.hugging_face.task._own_loss", lambda *_: torch.tensor(1234.0)
    )
    assert "own loss isn't plain cross-entropy" in refusal("roberta")


def test_a_dropped_balance_of_experts_is_no_rounding(monkeypatch):
    argument = "mixtral,output_router_logits=true"
    with pytest.warns(TaskWarning, match="the balance of its experts .* each micro-batch"):
        task = hugging_face(argument)
    model = task.model().eval().requires_grad_(False)
    inputs, target = first_batch(task)
    target[:, -1] = -100
    labels = torch.cat([torch.full((4, 1), -100), target[:, :-1]], 1)
    own = model(**inputs, labels=labels).loss
    assert float(read_loss(task.loss(model(**inputs), target)).mean) == pytest.approx(float(own))
    monkeypatch.setattr("timeprest.profiles.hugging_face.model.Request.balance", 0.0)
    assert "own loss isn't plain cross-entropy" in refusal(argument)


# Sizes ------------------------------------------------------------------------------------------

FAMILIES = [
    *("bart", "mbart", "marian", "deepseek_v2", "deepseek_v3", "qwen2_moe", "gptj", "gpt_neo"),
    *("convnext", "segformer", "pvt_v2", "deit", "swinv2", "mamba2", "mobilebert", "xglm", "dots1"),
    *("prophetnet", "funnel", "nemotron", "clip"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_small_is_small_by_whatever_names(family):
    request = read(f"hf:{family}", family)
    model = skeleton(request)
    assert sum(p.numel() for p in model.parameters()) < 1e6
    lists = (m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    # Networks in stages have 4 or so; experts are 4.
    assert max(map(len, lists), default=0) <= 4


def test_sizes_that_were_not_given_fit_those_that_were():
    for argument, head in (("gpt_neo,num_layers=3", 16), ("llama,num_attention_heads=8", 8)):
        config = hugging_face(argument).model().config
        assert getattr(config, "head_dim", None) in (None, head)
    layers = hugging_face("gpt_neo,num_layers=3").model().config.attention_layers
    assert layers == ["global", "local", "global"]
    assert hugging_face("swin,window_size=3").model().config.depths == [2, 2]
    # Its decoder starts with the last of 58,101 tokens.
    assert hugging_face("marian").model().config.decoder_start_token_id == 0


def test_a_model_is_tried_at_its_own_sizes_and_not_at_ours(tmp_path, monkeypatch):
    """So that none is refused for sizes that nobody asked for."""

    def none(*_, **__):
        raise TargetError("small sizes were asked for")

    sizes = {"image_size": 16, "patch_size": 1, "embed_dim": 16, "depths": [1, 1]}
    configs = [
        transformers.SwinConfig(**sizes, num_heads=[2, 2], window_size=4, num_labels=3),
        transformers.GPTNeoConfig(
            num_layers=1, hidden_size=16, num_heads=2, vocab_size=40, intermediate_size=32,
            max_position_embeddings=32, attention_types=[[["global"], 1]], bos_token_id=0,
            eos_token_id=0,
        ),
    ]  # fmt: skip
    monkeypatch.setattr("timeprest.profiles.hugging_face.model.small_sizes", none)
    for k, config in enumerate(configs):
        config.save_pretrained(tmp_path / str(k))
        for given in (config, str(tmp_path / str(k))):
            assert first_batch(hugging_face(given))
    assert "small sizes were asked for" in refusal("swin")


def test_what_is_too_large_to_be_tried_is_tried_small(monkeypatch):
    tried = []

    def losses(request):
        tried.append(request.config.hidden_size)
        return 1.0, 1.0

    monkeypatch.setattr("timeprest.profiles.hugging_face.task._losses", losses)
    asked = "roberta,hidden_size=128"
    for large, too_large, sizes in [(1e8, 1e9, [128]), (1e4, 1e9, [64]), (1e4, 2e4, [])]:
        monkeypatch.setattr("timeprest.profiles.hugging_face.task._LARGE", large)
        monkeypatch.setattr("timeprest.profiles.hugging_face.task._TOO_LARGE", too_large)
        tried.clear()
        hugging_face(asked)
        assert tried == sizes
    assert "no small sizes are known for this model, and with its own it has" in refusal("roberta")


# Configs and folders ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small causal model with weights and a tokenizer, as save_pretrained writes them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("models") / "mine"
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        vocab_size=40,
        max_position_embeddings=32,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    words = {word: k for k, word in enumerate(["<unk>", "<pad>", "<mask>", *"abcdefgh"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", mask_token="<mask>"
    ).save_pretrained(path)
    return path


def test_a_folders_weights_are_where_training_begins(folder):
    found = resolve(f"hf:{folder}").task.model()
    own = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert found.training
    assert type(found) is type(own)
    for name, weight in own.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], weight, rtol=0, atol=0)
    assert found.config.use_cache is False
    torch.manual_seed(0)
    fresh = resolve(f"hf:{folder},weights=random").task.model().state_dict()
    assert not torch.equal(fresh["lm_head.weight"], own.state_dict()["lm_head.weight"])
    optimizers = [
        resolve(name).task.optimizer(own.parameters()).param_groups[0]["lr"]
        for name in (f"hf:{folder}", f"hf:{folder},weights=random")
    ]
    assert optimizers == [5e-5, 3e-4]


def test_a_folders_model_gets_a_new_head_when_asked(folder):
    task = hugging_face(f"{folder},head=classification,num_labels=3,pad_token_id=1")
    torch.manual_seed(0)
    model = task.model()
    own = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "LlamaForSequenceClassification"
    torch.testing.assert_close(model.model.embed_tokens.weight, own.model.embed_tokens.weight)
    assert model.score.weight.shape == (3, 16)


def test_folders_that_are_not_whole_are_refused(folder, tmp_path):
    assert "no config.json in this folder" in refusal(str(tmp_path))
    assert "no folder" in refusal(str(tmp_path / "missing"))
    assert "nothing is downloaded" in refusal("somebody/something")
    assert "is no folder" in refusal(str(folder / "config.json"))
    config = (folder / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    assert (tmp_path / "config.json").exists()
    hugging_face(str(tmp_path)).model()  # without weights: random ones
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin, which isn't read" in refusal(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    smaller = json.loads(config) | {"hidden_size": 8, "head_dim": 4}
    (tmp_path / "config.json").write_text(json.dumps(smaller))
    with pytest.raises(TargetError, match="its weights can't be taken"):
        hugging_face(str(tmp_path)).model()
    (tmp_path / "config.json").write_text(json.dumps(json.loads(config) | {"num_hidden_layers": 2}))
    with pytest.raises(TargetError, match=r"its weights lack model\.layers\.1.*and 6 more"):
        hugging_face(str(tmp_path)).model()
    (tmp_path / "config.json").write_text("{")
    assert "config.json can't be read" in refusal(str(tmp_path))


def test_a_config_is_a_task(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from transformers import GPT2Config\n"
        "config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=30, n_positions=32)\n"
    )
    target = resolve(f"{tmp_path / 'mine.py'}:config")
    model = target.model()
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert target.call(2)[0].tensors[0].shape == (2, 16)
    assert model.config.use_cache is False
    data = {"input_ids": torch.randint(0, 30, (20, 6))}
    task = hugging_face(model.config, data, head="causal")
    assert [len(task.data(split)) for split in ("train", "test")] == [18, 2]
    inputs, labels = task.data("train")[0]
    assert labels.tolist() == [*inputs["input_ids"].tolist()[1:], -100]
    with pytest.raises(TargetError, match="isn't a config"):
        hugging_face(3)


# Data -------------------------------------------------------------------------------------------


def test_a_text_file_is_cut_into_samples(folder, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("a b c d e f g h " * 20)
    task = resolve(f"hf:{folder},data={file},length=8").task
    assert [len(task.data(split)) for split in ("train", "test")] == [18, 2]
    inputs, labels = task.data("train")[3]
    assert inputs["input_ids"].tolist() == [3, 4, 5, 6, 7, 8, 9, 10]
    assert inputs["attention_mask"].tolist() == [1] * 8
    assert labels.tolist() == [4, 5, 6, 7, 8, 9, 10, -100]
    # Without a tokenizer, each byte is a token.
    task = resolve(f"hf:gpt2,data={file},length=8").task
    assert task.data("train")[0][0]["input_ids"].tolist() == [2 + b for b in b"a b c d "]
    assert task.model().config.vocab_size == 258
    assert "less than 2 samples of 400" in refusal(f"gpt2,data={file},length=400")
    assert "no such file" in refusal(f"gpt2,data={tmp_path / 'no.txt'}")


def test_tokens_are_hidden_for_a_masked_model(folder, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("a b c d e f g h " * 20)
    task = resolve(f"hf:bert,{TINY},data={file},tokenizer={folder},length=8").task
    assert task.model().config.vocab_size == 11
    inputs, labels = task.data("train")[0]
    hidden = labels != -100
    assert hidden.sum() == 1
    assert (inputs["input_ids"][hidden] == 2).all()
    assert (torch.where(hidden, labels, inputs["input_ids"]) == torch.arange(3, 11)).all()
    assert (task.data("train")[0][1] == labels).all()


def test_no_padding_is_hidden_wherever_it_stands():
    ids, mask = list(range(2, 12)), [0] * 6 + [1] * 4
    for columns in ((ids, mask), (ids[::-1], mask[::-1])):
        row = dict(zip(("input_ids", "attention_mask"), columns, strict=True))
        nothing = {"input_ids": ids, "attention_mask": [0] * 10}
        data = hugging_face(f"bert,{TINY},head=masked", [row] * 20 + [nothing] * 9).data("train")
        places = set()
        for k in range(20):
            inputs, labels = data[k]
            places |= set((labels != -100).nonzero().flatten().tolist())
            restored = torch.where(labels == -100, inputs["input_ids"], labels)
            assert restored.tolist() == row["input_ids"]
        assert places == {k for k in range(10) if row["attention_mask"][k]}
        assert (data[20][1] == -100).all()


def test_what_a_decoder_is_to_write_may_be_another_language(monkeypatch):
    def tokenizer(text=None, text_target=None, **_):
        return {"input_ids": [5] if text_target is None else [6]}

    monkeypatch.setattr("timeprest.profiles.hugging_face.data.tokenizer_of", lambda *_: tokenizer)
    rows = [{"source": "a", "target": "b"}] * 2
    inputs, labels = hugging_face(f"t5,{SIZES},tokenizer=x,length=4", rows).data("train")[0]
    assert (inputs["input_ids"][0], labels[0]) == (5, 6)


def test_lines_with_a_tab_are_pairs(tmp_path):
    file = tmp_path / "pairs.tsv"
    file.write_text("".join(f"abc{k}\t{'good' if k % 2 else 'bad'}\n" for k in range(10)))
    task = resolve(f"hf:bert,{TINY},head=classification,num_labels=2,data={file}").task
    inputs, label = task.data("train")[1]
    assert int(label) == 1
    assert inputs["input_ids"].tolist()[:5] == [2 + b for b in b"abc1"] + [0]
    assert inputs["attention_mask"].sum() == 4
    task = resolve(f"hf:t5,{SIZES},data={file},length=6").task
    inputs, labels = task.data("train")[0]
    assert labels.tolist() == [2 + b for b in b"bad"] + [-100] * 3
    assert inputs["decoder_input_ids"].tolist() == [0, *[2 + b for b in b"bad"], 0, 0]
    file.write_text("one\n")
    assert "its line 1 must be source, a tab and target" in refusal(f"t5,data={file}")
    assert "give a datasets folder" in refusal(f"bert,head=tokens,data={file}")


CLASSIFIER = f"bert,{TINY},head=classification,vocab_size=300"


@pytest.fixture
def named(tmp_path):
    """A folder with a classifier whose classes have names, and what a file of these labels is."""
    config = transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        vocab_size=300,
        id2label={0: "positive", 1: "negative", 2: "neither"},
        label2id={"positive": 0, "negative": 1, "neither": 2},
        architectures=["BertForSequenceClassification"],
    )
    config.save_pretrained(tmp_path / "model")

    def labels(*names):
        file = tmp_path / "pairs.tsv"
        file.write_text("".join(f"a\t{name}\n" for name in names))
        data = resolve(f"hf:{tmp_path / 'model'},tokenizer=bytes,data={file}").task.data("train")
        return [data[k][1].item() for k in range(len(data))]

    return labels


def test_classes_of_a_text_file_have_the_models_numbers(named, tmp_path):
    assert named("positive", "negative", "negative", "negative") == [0, 1, 1]
    assert named("2", "1", "2", "0") == [2, 1, 2]
    with pytest.raises(TargetError, match=r"its line 2 has the class 'good', and .*positive, neg"):
        named("positive", "good", "positive")
    file = tmp_path / "pairs.tsv"
    file.write_text("a\t2.5\nb\t-1\nc\t0\n")
    data = resolve(f"hf:{CLASSIFIER},num_labels=1,data={file}").task.data("train")
    assert [data[k][1].item() for k in range(2)] == [2.5, -1]
    file.write_text("a\t2.5\nb\tlow\n")
    assert "its line 2 must be text, a tab and a number" in refusal(
        f"{CLASSIFIER},num_labels=1,data={file}"
    )
    several = "num_labels=2,problem_type=multi_label_classification"
    assert "give a datasets folder" in refusal(f"{CLASSIFIER},{several},data={file}")


def test_named_classes_of_other_numbers_are_refused(named, tmp_path):
    named("positive", "negative")
    classes = datasets.ClassLabel(names=["negative", "positive"])
    features = datasets.Features({"text": datasets.Value("string"), "label": classes})
    rows = datasets.Dataset.from_dict({"text": ["a"] * 4, "label": [0, 1, 0, 1]}, features)
    model = f"{tmp_path / 'model'},tokenizer=bytes"
    assert "class 'negative' has number 0 in the data and 1 in the model" in refusal(model, rows)
    numbers = {"positive": 0, "negative": 1}
    aligned = rows.align_labels_with_mapping(numbers, "label")
    assert int(hugging_face(model, aligned).data("train")[0][1]) == 1


def test_a_datasets_folder_is_read(folder, tmp_path):
    rows = [{"input_ids": list(range(2, 4 + k % 3)), "other": "x"} for k in range(20)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "tokens"))
    task = resolve(f"hf:gpt2,data={tmp_path / 'tokens'}").task
    assert [len(task.data(split)) for split in ("train", "test")] == [18, 2]
    # Lengths are read without the rows.
    assert all(hasattr(task.data(split)._rows, "data") for split in ("train", "test"))
    inputs, labels = first_batch(task, 3)
    assert sorted(inputs) == ["attention_mask", "input_ids"]
    assert inputs["input_ids"].tolist() == [[2, 3, 0, 0], [2, 3, 4, 0], [2, 3, 4, 5]]
    assert labels.tolist() == [[3, -100, -100, -100], [3, 4, -100, -100], [3, 4, 5, -100]]
    texts = datasets.Dataset.from_dict({"text": ["a b", "c d e"], "label": [1, 0]})
    whole = datasets.DatasetDict({"train": texts, "validation": texts.select([1])})
    whole.save_to_disk(str(tmp_path / "texts"))
    task = resolve(
        f"hf:bert,{TINY},head=classification,num_labels=2,tokenizer={folder},length=4,"
        f"data={tmp_path / 'texts'}"
    ).task
    inputs, labels = first_batch(task, 2)
    assert inputs["input_ids"].tolist() == [[3, 4, 0, 0], [5, 6, 7, 0]]
    assert labels.tolist() == [1, 0]
    assert len(task.data("test")) == 1
    (tmp_path / "empty").mkdir()
    assert "isn't what a dataset's save_to_disk writes" in refusal(
        f"gpt2,data={tmp_path / 'empty'}"
    )


def test_images_are_sized_and_scaled():
    image = torch.full((8, 8, 3), 255, dtype=torch.uint8).numpy()
    rows = [{"image": image, "label": 1}] * 3
    task = hugging_face(f"vit,{TINY},image_size=16,num_labels=2", rows)
    inputs, label = task.data("train")[0]
    assert inputs["pixel_values"].shape == (3, 16, 16)
    assert torch.allclose(inputs["pixel_values"], torch.ones(()))
    assert int(label) == 1


@pytest.fixture
def seen(tmp_path):
    """What a white pixel and a grey one become, by the folder's preprocessor."""
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
    )
    config.image_size, config.num_labels = 16, 2
    config.save_pretrained(tmp_path)
    image = np.full((16, 16, 3), 255, np.uint8)
    image[8:] = 51
    white = [{"image": image, "label": 1}] * 3

    def first_and_last(rows=white, **said):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
        pixels = hugging_face(str(tmp_path), rows).data("train")[0][0]["pixel_values"]
        assert pixels.shape == (3, 16, 16)
        return [round(pixels[0, k, 0].item(), 4) for k in (0, -1)]

    return first_and_last


def test_images_are_scaled_as_the_folder_says(seen):
    assert seen() == [1, -0.6]
    assert seen(image_mean=[0, 0, 0], image_std=[2, 2, 2]) == [0.5, 0.1]
    assert seen(do_normalize=False, image_mean=[0.5] * 3) == [1, 0.2]
    assert seen(do_normalize=False, do_rescale=False) == [255, 51]
    assert seen(do_normalize=False, rescale_factor=1 / 51) == [5, 1]
    for said, words in {
        "do_flip_channel_order": "do_flip_channel_order isn't done here",
        "rescale_offset": "rescale_offset isn't done here",
        "image_mean": "preprocessor_config.json: can't be followed",
    }.items():
        with pytest.raises(TargetError, match=words):
            seen(**{said: {"a": 1}})


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (np.zeros((3, 16, 16), np.uint8), r"its image has shape \[3, 16, 16\]; it must be height"),
        (np.full((16, 16), 0.5), "numbers from 0.5 to 0.5; pixels go from 0 to 255"),
        (np.full((16, 16), 4000, np.uint16), "numbers from 4000 to 4000"),
        (np.eye(16, dtype=bool), "numbers from 0 to 1"),
    ],
)
def test_images_of_other_numbers_are_refused(image, words, seen):
    with pytest.raises(TargetError, match=words):
        seen([{"image": image, "label": 1}] * 3)


def test_images_of_a_palette_are_seen_in_colour(seen):
    image = pytest.importorskip("PIL.Image").new("P", (16, 16))
    image.putpalette([255, 0, 0])
    assert seen([{"image": image, "label": 1}] * 3) == [1, 1]


@pytest.mark.parametrize(
    ("argument", "rows", "words"),
    [
        ("gpt2", [{"input_ids": [2, 300]}], "row 0 has 300 in input_ids.*vocab_size=100"),
        ("gpt2,vocab_size=9", [{"input_ids": [2], "labels": [9]}], "row 0 has 9 among its labels"),
        ("gpt2", [{"words": "a"}], "has columns words; for causal there must be input_ids or text"),
        ("t5", [{"input_ids": [2]}], "for seq2seq there must be input_ids and labels"),
        ("gpt2", (row for row in ()), "of class generator, has no rows by number: give a list"),
        ("gpt2", {"train": pandas.DataFrame()}, "of class DataFrame, .*Dataset.from_pandas"),
        ("gpt2", [{"text": None}], "row 0: its text is 'None', which is no text"),
        ("t5", [{"source": "a", "target": ["b"]}], "row 0: its target is .*, which is no text"),
        ("gpt2", [{"input_ids": [2], "position_ids": [0]}], "position_ids.*isn't given here"),
        ("gpt2", [[1, 2]], "a row of its data is a list"),
        ("gpt2", {"test": []}, "has splits test, but no 'train'"),
        ("gpt2,n_positions=4", [{"input_ids": [2] * 9}], "longest row has 9.*4 positions.*length="),
        ("vit,image_size=16", [{"image": "a"}], "for image there must be pixel_values or image"),
        (
            "vit,image_size=16,num_labels=2",
            [{"pixel_values": torch.zeros(3, 8, 8), "label": 0}],
            r"pixel_values have shape \[3, 8, 8\].*3?16, 16",
        ),
        (
            "bert,head=classification,num_labels=2",
            [{"input_ids": [2], "label": 2}],
            "row 0 has 2 among its labels.*num_labels=2",
        ),
        (
            "bert,head=classification,num_labels=2",
            [{"input_ids": [2], "label": 0.5}],
            "must be the number of a class.*problem_type",
        ),
        (
            "bert",
            [{"input_ids": torch.ones(1, 9).long()}],
            r"row 0: its input_ids have shape \[1, 9\].*return_tensors=.*\[0\]",
        ),
        ("bert,length=4", [{"input_ids": [[2, 3]]}], r"input_ids have shape \[1, 2\]"),
        ("gpt2", [{"input_ids": [2, 10.7]}], "row 0: its input_ids must be.*one of these is 10.7"),
        ("gpt2", [{"input_ids": [[2], [2, 3]]}], "row 0: its input_ids must be a list of whole"),
        ("gpt2,length=4", [{"input_ids": 3}], r"row 0: its input_ids have shape \[\]"),
        (
            "gpt2",
            [{"input_ids": [2, 3], "attention_mask": [1]}],
            "row 0: there are 1 attention_mask and 2 input_ids",
        ),
        (
            "bert,head=tokens",
            [{"input_ids": [2, 3], "labels": [1, 1, 1]}],
            "row 0: there are 3 labels and 2 input_ids",
        ),
    ],
)
def test_data_that_a_model_cannot_take_is_named(argument, rows, words):
    if isinstance(rows, list):
        rows = {"train": rows, "test": rows}
    found = refusal(argument, rows)
    assert re.search(words, found), found


def test_a_folders_rows_of_lists_in_lists_are_named(tmp_path):
    """Their lengths are read without the rows."""
    rows = datasets.Dataset.from_dict({"input_ids": [[[2, 3]], [[4, 5]]] * 5})
    rows.save_to_disk(str(tmp_path / "rows"))
    splits = datasets.DatasetDict({"train": rows, "test": rows})
    splits.save_to_disk(str(tmp_path / "splits"))
    for name in ("rows", "splits"):
        found = refusal(f"gpt2,data={tmp_path / name}")
        assert "row 0: its input_ids have shape [1, 2]" in found


@pytest.mark.parametrize("how", ["filter", "select", "transform"])
def test_rows_that_are_left_out_do_not_count_as_the_longest(how):
    def halved(rows):
        return {"input_ids": [row[:4] for row in rows["ids"]]}

    long = [list(range(2, 2 + n)) for n in (3, 90, 4, 2)]
    rows = datasets.Dataset.from_dict({"input_ids": long, "ids": long})
    if how == "filter":
        rows = rows.filter(lambda row: len(row["input_ids"]) < 9)
    elif how == "select":
        rows = rows.select([3, 2, 0]).shuffle(seed=1)
    else:
        rows = rows.with_transform(halved)
    task = hugging_face("gpt2,n_positions=16", {"train": rows, "test": rows})
    assert task.data("train")[0][0]["input_ids"].shape == (4,)


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5", "classes"])
def test_rows_are_filled_up_to_their_mini_batchs_longest(family):
    """The loss, by counted labels, is that of one length for all."""
    lengths = (3, 9, 5, 4)
    rows = [{"input_ids": list(range(2, 2 + n))} for n in lengths]
    if family == "t5":
        rows = [{**row, "labels": row["input_ids"][1:]} for row in rows]
    name = f"{family},{SIZES}"
    if family == "classes":
        name = f"bert,{TINY},head=classification,num_labels=3"
        rows = [{**row, "labels": k % 3} for k, row in enumerate(rows)]
    rows = {"train": rows, "test": rows[:1]}
    found = []
    for how in ({"padding": "longest"}, {"padding": "max_length", "length": 12}):
        task = hugging_face(name, rows, **how)
        data = task.data("train")
        torch.manual_seed(0)
        model = task.model().eval()
        collate = getattr(data, "collate_fn", default_collate)
        inputs, labels = collate([data[k] for k in range(4)])
        with torch.no_grad():
            found.append(read_loss(task.loss(model(**inputs), labels)).mean.item())
        assert inputs["input_ids"].shape == (4, 9 if how["padding"] == "longest" else 12)
        if how["padding"] == "longest":
            short, wanted = collate([data[0], data[3]])
            assert short["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
            if family == "t5":
                assert short["decoder_input_ids"].shape == wanted.shape == (2, 3)
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("short", ["train", "test"])
def test_lengths_differ_though_the_first_mini_batches_do_not(short, tmp_path):
    """Each has a row that is cut; those of a last mini-batch, or for testing, needn't."""
    even = [{"input_ids": list(range(2, 12))}] * 32
    uneven = [{"input_ids": list(range(2, 5 + 9 * (k % 2)))} for k in range(32)]
    splits = {"train": even, "test": even, short: uneven}
    splits["test"] = [*splits["test"][:4], {"input_ids": [5, 6, 7]}]
    splits = {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "rows"))
    name = f"hf:gpt2,{UNTIED},data={tmp_path / 'rows'},padding=longest,length=8"
    profile = measure(resolve(name), batch_size=8, micro_batch_sizes=[4], seconds=0)
    assert profile.varying.profiled == profile.varying.most == ((8,), (8,))
    assert profile.varying.least == ((3,), (3,))
    plan = plan_by_hand(with_times(profile), "gpipe", 2, 2)
    summary = run(plan, RunSettings(task=name, epochs=1), tmp_path / "run", inline=True)
    assert summary.epochs[0].test["loss"] > 0


@pytest.mark.slow
def test_lengths_that_no_profile_has_seen_end_in_what_to_do(tmp_path):
    def rows(*lengths):
        made = [{"input_ids": list(range(2, 2 + n))} for n in lengths]
        return datasets.DatasetDict(dict.fromkeys(SPLITS, datasets.Dataset.from_list(made)))

    rows(*[8] * 16).save_to_disk(str(tmp_path / "rows"))
    name = f"hf:gpt2,{UNTIED},data={tmp_path / 'rows'},padding=longest"
    profile = measure(resolve(name), batch_size=8, micro_batch_sizes=[4], seconds=0)
    plan = plan_by_hand(with_times(profile), "gpipe", 1, 2)
    shutil.rmtree(tmp_path / "rows")
    rows(*[8] * 8, *[5] * 8).save_to_disk(str(tmp_path / "rows"))
    with pytest.raises(RunError, match=r"shapes \[5\] of .*first mini-batch.* more --batches"):
        run(plan, RunSettings(task=name, epochs=1), tmp_path / "run", inline=True)


def test_padding_that_there_is_none_of_is_refused():
    assert "say longest (of each mini-batch) or max_length" in refusal("gpt2,padding=even")
    assert "is for tokens, and this model takes images" in refusal("vit,padding=longest")
    assert "synthetic samples have one length" in refusal("gpt2,padding=longest")
