"""A run's model as `from_pretrained` loads it (tp-run export --to hf)."""

from __future__ import annotations

import sys

import pytest
import torch
from helpers.models.small import needs_hf
from helpers.trained_runs import TASKS, TIED, runs_of_tasks, with_run_weights
from timeprest.profiles.errors import UserError
from timeprest.profiles.target import resolve
from timeprest.runtime.checkpoint.export import export

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return runs_of_tasks(tmp_path_factory)


@pytest.mark.choice("resnet")
@needs_hf
@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "size"),
    [
        ("hf:t5,num_layers=1,num_decoder_layers=1", 50_000),
        ("hf:resnet", None),
        (f"{TASKS}:WrappedTask", 4_000),
    ],
)
def test_from_pretrained_gives_the_same_logits(task, size, trained, tmp_path):
    """Tied heads, buffers of batch norms, several files, and a module of the user's around it."""
    import transformers

    where, folder = trained(task), tmp_path / "model"
    done = export(where, folder, to="hf", shard_bytes=size)
    assert done.files == len(list(folder.glob("*.safetensors")))
    assert (folder / "model.safetensors.index.json").exists() == (size is not None)
    target = resolve(task)
    model = with_run_weights(where, target.model())
    (inputs, _) = target.call(3)
    wanted = model(**dict(zip(inputs.names, inputs.tensors, strict=True)))
    inner = getattr(model, "net", model)
    loaded, told = type(inner).from_pretrained(folder, output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    found = loaded.eval()(**dict(zip(inputs.names, inputs.tensors, strict=True)))["logits"]
    assert torch.equal(found, wanted if inner is not model else wanted["logits"])
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.architectures == [type(inner).__name__]


@needs_hf
def test_what_isnt_hugging_faces_alone_is_refused(trained, tmp_path, monkeypatch):
    for task, message in (
        (TIED, "TiedTask is a Tied.*, and has no Hugging Face model in it"),
        (f"{TASKS}:ScaledTask", "'scale' beside its GPT2LMHeadModel"),
    ):
        with pytest.raises(UserError, match=message):
            export(trained(task), tmp_path / "model", to="hf")
    for name in [n for n in sys.modules if n.partition(".")[0] == "transformers"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        UserError, match=r"needs the library transformers.*pip install -e '\.\[hf\]'"
    ):
        export(trained(TIED), tmp_path / "model", to="hf")
    assert not list(tmp_path.iterdir())
