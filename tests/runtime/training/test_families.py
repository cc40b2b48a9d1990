"""Hugging Face models train with no user code, as with their own loss in a plain loop."""

from __future__ import annotations

import re
import runpy
from importlib.util import find_spec

import pytest
import torch
from helpers.alike import check_processes
from helpers.paths import ROOT
from helpers.plans import plan_by_hand, with_times
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.measuring.measure import measure
from timeprest.profiles.measuring.platforms import platform_of
from timeprest.profiles.target import resolve
from timeprest.runtime.checkpoint.export import export
from timeprest.runtime.records.progress import read_losses
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings

pytestmark = pytest.mark.skipif(
    not (find_spec("transformers") and find_spec("datasets")), reason="needs timeprest[hf]"
)

STEPS, MINI_BATCH, LENGTH = 4, 6, 8

FAMILIES = {
    "gpt2": "attn_pdrop=0,embd_pdrop=0,resid_pdrop=0",
    "llama": "intermediate_size=24,num_key_value_heads=1",
    "qwen2": "intermediate_size=24,num_key_value_heads=1",
    "mistral": "intermediate_size=24,num_key_value_heads=2",
    "gemma": "intermediate_size=24,num_key_value_heads=1,head_dim=8",
    "phi": "intermediate_size=24,num_key_value_heads=2",
    "opt": "ffn_dim=24,word_embed_proj_dim=16,dropout=0",
    "bert": "intermediate_size=24,hidden_dropout_prob=0,attention_probs_dropout_prob=0",
    "t5": "d_ff=24,d_kv=8,dropout_rate=0",
    "vit": "intermediate_size=24,image_size=16,num_labels=4",
}


@pytest.fixture(scope="module")
def rows():
    """Rows of tokens, of unlike lengths and with unlike numbers of labels, and of images."""
    generator = torch.Generator().manual_seed(0)

    def number(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    tokens = []
    for _ in range(STEPS * MINI_BATCH + 4):
        ids = torch.randint(2, 30, (number(4, LENGTH + 1),), generator=generator)
        labels = ids.where(torch.rand(len(ids), generator=generator) < 0.5, -100)
        labels[-1] = ids[-1]
        tokens.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    tokens[0]["input_ids"] += [2] * (LENGTH - len(tokens[0]["input_ids"]))
    tokens[0]["labels"] += [-100] * (LENGTH - len(tokens[0]["labels"]))
    images = [
        {
            "pixel_values": torch.randn(3, 16, 16, generator=generator).tolist(),
            "labels": number(0, 4) if k % 5 else -100,
        }
        for k in range(STEPS * MINI_BATCH + 4)
    ]
    return {"tokens": tokens, "images": images}


@pytest.fixture(scope="module")
def folders(rows, tmp_path_factory):
    """The same as folders of `datasets`, with rows for testing."""
    import datasets

    datasets.disable_progress_bars()
    folder = tmp_path_factory.mktemp("data")
    for name, found in rows.items():
        whole = datasets.Dataset.from_list(found)
        parts = {"train": whole, "test": whole.select(range(5))}
        datasets.DatasetDict(parts).save_to_disk(str(folder / name))
    return folder


def target_of(family, folders):
    # Most of the time is torch.export's, three times for each layer.
    layers = 2 if family in ("gpt2", "bert") else 1
    sizes = f"hidden_size=16,num_attention_heads=2,num_hidden_layers={layers}"
    kind = "images" if family == "vit" else "tokens"
    more = "" if family == "vit" else ",vocab_size=30"
    return f"hf:{family},{sizes}{more},{FAMILIES[family]},data={folders / kind}"


def plan_of(target, variant, stages, micro_batches):
    profile = measure(
        resolve(target),
        batch_size=MINI_BATCH,
        micro_batch_sizes=[MINI_BATCH // micro_batches],
        platform=platform_of("meta", "a100-80gb", None),
        seconds=0,
    )
    tied = "split" if VARIANTS[variant].flushes else "together"
    return plan_by_hand(
        with_times(profile), variant, stages, micro_batches, mini_batch=MINI_BATCH, tied=tied
    )


def train_by_own_loss(target, rows):
    """A plain loop over the rows, with the loss that the model makes of labels."""
    config = resolve(target).model().config
    maker = {"bert": "MaskedLM", "t5": "Seq2SeqLM", "vit": "ImageClassification"}
    import transformers

    kind = getattr(transformers, f"AutoModelFor{maker.get(config.model_type, 'CausalLM')}")
    torch.manual_seed(0)
    model = kind.from_config(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    losses = []
    for b in range(STEPS):
        chosen = [rows[k] for k in order[b * MINI_BATCH : (b + 1) * MINI_BATCH]]
        if config.model_type == "vit":
            batch = {name: torch.tensor([row[name] for row in chosen]) for name in chosen[0]}
        else:
            batch = {
                "input_ids": padded([row["input_ids"] for row in chosen], config.pad_token_id or 0),
                "attention_mask": padded([[1] * len(row["input_ids"]) for row in chosen], 0),
                "labels": padded([row["labels"] for row in chosen], -100),
            }
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def padded(lists, filling):
    return torch.tensor([one + [filling] * (LENGTH - len(one)) for one in lists])


@pytest.mark.choice("qwen2", "vit")
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_flush_run_is_the_plain_loop_with_the_models_own_loss(family, folders, rows, tmp_path):
    target = target_of(family, folders)
    plan = plan_of(target, "gpipe", 3, 3)
    assert plan.profile.front_end == "export"
    run(plan, RunSettings(task=target, steps=STEPS), tmp_path / "run", inline=True)
    wanted = train_by_own_loss(target, rows["images" if family == "vit" else "tokens"])
    found = read_losses(tmp_path / "run" / "metrics.jsonl")
    assert found == pytest.approx(wanted, rel=2e-6)


@pytest.mark.choice(0)
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_processes_equal_inline(folders, tmp_path):
    """The example below trains a BERT in processes."""
    target = target_of("llama", folders)
    plan = plan_of(target, "timeprest", 2, 3)
    check_processes(plan, RunSettings(task=target, steps=STEPS), tmp_path)


@pytest.mark.choice(0)
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_example_fine_tunes_a_model_that_loads_anywhere(tmp_path, monkeypatch):
    import transformers

    monkeypatch.chdir(tmp_path)
    example = runpy.run_path(str(ROOT / "docs/examples/fine_tuning.py"))
    # Which micro-batches and versions there are hangs on measured times.
    assert example["main"](2, epochs=8) > 0.9
    export("runs/fine_tuning", "fine_tuned", to="hf")
    model = transformers.AutoModelForSequenceClassification.from_pretrained("fine_tuned").eval()
    tokens = transformers.AutoTokenizer.from_pretrained("model")
    texts = tokens(["we saw rain and snow", "a soup the bread"], return_tensors="pt", padding=True)
    with torch.no_grad():
        assert model(**texts).logits.argmax(-1).tolist() == [0, 1]


# By name alone (docs/families.md) ---------------------------------------------------------------

PAGE = runpy.run_path(str(ROOT / "docs/families.py"))


@pytest.mark.slow
@pytest.mark.choice(2)
@pytest.mark.parametrize("family", ["deepseek_v3", "gptj", "convnext", "gpt_neo"])
def test_families_by_name_train_as_one_process_does(family):
    found = PAGE["tried"](family)
    assert found["through"] == 3, found
    assert found["apart"] < 1e-4


def test_the_page_of_families_has_each_with_its_end():
    kinds = [family for some in PAGE["KINDS"].values() for family in some]
    page = (ROOT / "docs/families.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `hf:([\w-]+)` \|(.*)\|$", page, re.MULTILINE))
    assert sorted(rows) == sorted(kinds)
    ends = re.findall(r"^- `hf:([\w-]+)`: \S", page, re.MULTILINE)
    assert ends == [family for family in kinds if "equal, " not in rows[family]]
    sound = PAGE["tried"]("wav2vec2")
    assert sound["line"].startswith(
        "hf:wav2vec2: wav2vec2 is neither a language model nor an image"
    )
