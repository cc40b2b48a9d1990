"""Of a Hugging Face model's data, stages read the columns that they need, and have the samples that
whole rows give."""

from __future__ import annotations

import pytest
import torch
from timeprest.profiles.errors import TargetError, UserError
from timeprest.profiles.hugging_face.task import hugging_face
from timeprest.profiles.tasks.parts import INPUTS, TARGET, Parts
from timeprest.profiles.zoo.synthetic import images
from timeprest.runtime.prepare.samples import Samples

pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

TINY = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2"
IDS = [[2 + k, 3, 4, 5 + k][: 2 + k % 3] for k in range(6)]
CLASSES = [0, 2, 1, 0, 2, 0]
IMAGES = torch.randn(6, 3, 16, 16).tolist()
TEXTS = ["ab", "cd", "e", "fgh", "i", "jk"]
CASES = {
    "images": (
        f"vit,{TINY},image_size=16,num_labels=3",
        {"pixel_values": IMAGES, "label": CLASSES},
        {INPUTS: {"pixel_values"}, TARGET: {"label"}},
    ),
    "texts": (
        f"bert,{TINY},head=classification,num_labels=3,vocab_size=300",
        {"text": TEXTS, "label": CLASSES, "id": CLASSES},
        {INPUTS: {"text"}, TARGET: {"label"}},
    ),
    "tokens": (
        f"bert,{TINY},head=tokens,num_labels=3",
        {"input_ids": IDS, "labels": [[1] * len(row) for row in IDS]},
        {INPUTS: {"input_ids"}, TARGET: {"labels"}},
    ),
    "hidden tokens": (
        f"bert,{TINY},head=masked",
        {"input_ids": IDS, "id": CLASSES},
        {INPUTS: {"input_ids"}, TARGET: {"input_ids"}},
    ),
    "next tokens": (
        "gpt2",
        {"input_ids": IDS, "attention_mask": [[1] * len(row) for row in IDS]},
        {INPUTS: {"input_ids", "attention_mask"}, TARGET: {"input_ids", "attention_mask"}},
    ),
    "given tokens": (
        "gpt2",
        {"input_ids": IDS, "labels": IDS},
        {INPUTS: {"input_ids"}, TARGET: {"labels"}},
    ),
    "text to text": (
        f"t5,{TINY.split(',')[0]},vocab_size=300",
        {"source": TEXTS, "target": TEXTS},
        {INPUTS: {"source", "target"}, TARGET: {"target"}},
    ),
}


class Column(list):
    """Counts what is read of it."""

    reads = 0

    def __getitem__(self, k):
        self.reads += 1
        return super().__getitem__(k)


@pytest.mark.parametrize("padding", ["max_length", "longest"])
@pytest.mark.parametrize("case", CASES)
def test_a_stage_reads_its_columns_and_has_the_samples_of_whole_rows(case, padding):
    argument, columns, needed = CASES[case]
    if padding == "longest" and case == "images":
        return
    columns = {name: Column(values) for name, values in columns.items()}
    task = hugging_face(argument, {"train": columns, "test": columns}, padding=padding)
    whole = Samples(task, "train", 2, 0)
    for part, wanted in needed.items():
        found = Samples(task, "train", 2, 0, parts=Parts({part}))
        for column in columns.values():
            column.reads = 0
        taken = [found.take(1, range(k, k + 2)) for k in (0, 2, 4)]
        found.close()
        divided = padding == "max_length" or case == "texts"
        read = {name for name, column in columns.items() if column.reads}
        assert read == wanted if divided else read >= wanted
        for k, (inputs, target) in zip((0, 2, 4), taken, strict=True):
            all_inputs, labels = whole.take(1, range(k, k + 2))
            assert len(inputs) == (len(all_inputs) if part == INPUTS else 0)
            assert all(torch.equal(a, b) for a, b in zip(inputs, all_inputs, strict=False))
            assert target is None if part == INPUTS else torch.equal(target, labels)
    whole.close()


def test_a_folders_columns_are_selected(tmp_path):
    rows = {"text": TEXTS, "label": CLASSES}
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "rows"))
    head = f"bert,{TINY},head=classification,num_labels=3,vocab_size=300"
    task = hugging_face(f"{head},data={tmp_path / 'rows'}")
    given = task.data("train")
    for part, column in ((INPUTS, "text"), (TARGET, "label")):
        assert given.only(Parts({part}))._rows.column_names == [column]
    samples = Samples(task, "train", 5, 0, parts=Parts({TARGET}))
    whole = Samples(task, "train", 5, 0)
    assert torch.equal(samples.take(0, range(5))[1], whole.take(0, range(5))[1])
    samples.close(), whole.close()


@pytest.mark.parametrize("splits", [("train", "test"), ("train",)])
def test_rows_that_a_transform_makes_are_read_whole(splits):
    def transform(rows):
        found = {"pixel_values": [torch.tensor(row) for row in rows["img"]]}
        return found | {"label": rows["class"]}

    rows = datasets.Dataset.from_dict({"img": IMAGES, "class": CLASSES}).with_transform(transform)
    task = hugging_face(CASES["images"][0], dict.fromkeys(splits, rows))
    whole = Samples(task, "train", 4, 0)
    inputs, target = whole.take(0, range(4))
    for part in (INPUTS, TARGET):
        found = Samples(task, "train", 4, 0, parts=Parts({part}))
        some, labels = found.take(0, range(4))
        assert torch.equal(some[0], inputs[0]) if part == INPUTS else torch.equal(labels, target)
        found.close()
    whole.close()


def test_synthetic_classes_come_without_their_images():
    sampler = images(8, 10)
    for k in range(5):
        one, other = (torch.Generator().manual_seed(k) for _ in range(2))
        assert torch.equal(sampler.target(one)[1], sampler(other)[1])


# What is trained of a model ---------------------------------------------------------------------

GPT2 = "gpt2,n_layer=3,n_embd=16,n_head=2"


@pytest.mark.parametrize(
    ("frozen", "trained"),
    [
        ("transformer", set()),
        ("transformer.wte+transformer.wpe", {"transformer.h.0", "transformer.h.2"}),
        ("transformer.*e+transformer.h.[01]", {"transformer.h.2", "transformer.ln_f"}),
        ("*.weight", {"transformer.h.0", "transformer.ln_f"}),
    ],
)
def test_modules_and_parameters_are_frozen_by_name(frozen, trained):
    """The head has the embedding's weight, which is one parameter."""
    for task in (
        hugging_face(f"{GPT2},frozen={frozen}"),
        hugging_face(GPT2, frozen=frozen),
        hugging_face(GPT2, frozen=frozen.split("+")),
    ):
        model = task.model()
        found = {name for name, p in model.named_parameters() if p.requires_grad}
        assert all(any(n.startswith(f"{part}.") for n in found) for part in trained)
        assert bool(found) == bool(trained)
        assert not model.lm_head.weight.requires_grad
        if frozen == "*.weight":
            assert all(name.endswith(".bias") for name in found)


def test_names_of_nothing_are_refused():
    with pytest.raises(UserError, match="frozen: give one or more such as"):
        hugging_face(GPT2, frozen=[3])
    with pytest.raises(TargetError, match=r"frozen=wte: .* called so; it has transformer.wte$"):
        hugging_face(GPT2, frozen="wte").model()
    with pytest.raises(
        TargetError, match=r"frozen=bert: .* called so; it has transformer, lm_head$"
    ):
        hugging_face(GPT2, frozen="lm_head+bert").model()
