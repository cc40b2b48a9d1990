"""Fine-tune a Hugging Face model on one's own texts, in stages, and load it where it is used.

    python docs/examples/fine_tuning.py [STAGES]

A small BERT and some texts of two kinds are made here, in place of yours; nothing is downloaded.
The same from a shell, once the two folders are there:

    tp-profile hf:./model,head=classification,num_labels=2,length=16,data=./texts --batch-size 32
    tp-plan solve profile.json --devices 2 --stages 2
    tp-run plan.json --epochs 4 --run-dir runs/fine_tuning
    tp-run export runs/fine_tuning --to hf -o fine_tuned
"""

from __future__ import annotations

import random
import sys
from typing import Any

import datasets
import timeprest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

KINDS = (
    ["rain", "wind", "storm", "cloud", "snow"],
    ["bread", "cheese", "apple", "soup", "tea"],
)
OTHERS = ["the", "a", "we", "saw", "some", "more", "and", "then", "there", "was"]
TARGET = "hf:./model,head=classification,num_labels=2,length=16,data=./texts"


def make_model() -> None:
    """A folder as `save_pretrained` writes it: a model without a classifier, and its tokenizer."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *KINDS[0], *KINDS[1], *OTHERS]
    tokenizer = Tokenizer(models.WordLevel({w: k for k, w in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", mask_token="[MASK]"
    ).save_pretrained("model")
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    transformers.set_seed(0)
    transformers.BertForMaskedLM(config).save_pretrained("model")


def make_texts() -> None:
    """A folder as a dataset's `save_to_disk` writes it."""
    draw = random.Random(0)

    def text(kind: int) -> str:
        words = draw.choices(OTHERS, k=draw.randrange(3, 12)) + draw.choices(KINDS[kind], k=2)
        return " ".join(draw.sample(words, len(words)))

    splits = {}
    for split, count in (("train", 384), ("test", 64)):
        rows = [{"text": text(k % 2), "label": k % 2} for k in range(count)]
        splits[split] = datasets.Dataset.from_list(rows)
    datasets.DatasetDict(splits).save_to_disk("texts")


def main(stages: int = 2, **settings: Any) -> float:
    """Make, profile, plan, train. Returns the accuracy on the test texts."""
    make_model()
    make_texts()
    profile = timeprest.profile(TARGET, batch_size=32, micro_batch_sizes=[8, 32], seconds=1)
    plan = timeprest.plan(profile, devices=stages, stages=stages, replicas=False)
    given = {"epochs": 4, "optimizer": {"name": "adamw", "lr": 1e-3}, **settings}
    summary = timeprest.run(plan, "runs/fine_tuning", **given)
    return summary.epochs[-1].test["accuracy"]


if __name__ == "__main__":
    print(f"accuracy {main(int((sys.argv[1:] or ['2'])[0])):.3f}")
