"""A run's model exported to what other libraries load: torch's own checkpoints."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from helpers.trained_runs import TIED, runs_of_tasks, with_run_weights
from safetensors.torch import load_file
from timeprest.cli.run import main
from timeprest.profiles import plugins
from timeprest.profiles.errors import FileError, UserError
from timeprest.profiles.target import resolve
from timeprest.runtime.checkpoint.export import export
from torch.distributed.checkpoint import load
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return runs_of_tasks(tmp_path_factory)


@pytest.mark.parametrize("size", [None, 500])
def test_torchs_checkpoint_loads_in_plain_torch(size, trained, tmp_path):
    """By `load` into a model, and by way of a file of torch.save; a tie is under both names."""
    where, folder = trained(TIED), tmp_path / "model"
    files = export(where, folder, to="dcp", shard_bytes=size).files
    assert files == len(list(folder.glob("*.distcp")))
    assert (files > 1) == (size is not None)
    task = resolve(TIED).task
    wanted = with_run_weights(where, task.model()).state_dict()
    model = task.model()
    state = model.state_dict()
    assert not torch.equal(state["wte.weight"], wanted["wte.weight"])
    load(state, checkpoint_id=folder, no_dist=True)
    model.load_state_dict(state)
    dcp_to_torch_save(folder, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=True)
    for found in (model.state_dict(), again):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_files_of_a_size_have_an_index(trained, tmp_path):
    """None is larger, but for one of a single tensor; a tied parameter is in one of them."""
    where, folder = trained(TIED), tmp_path / "model"
    done = CliRunner().invoke(
        main, ["export", str(where), "--shard-size", "700", "-o", str(folder)]
    )
    assert done.exit_code == 0, done.output
    assert "head.weight is wte.weight, and written once" in done.stdout
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {}
    for file in sorted(folder.glob("model-*-of-*.safetensors")):
        part = load_file(file)
        assert len(part) == 1 or sum(t.nbytes for t in part.values()) <= 700
        assert all(index["weight_map"][name] == file.name for name in part)
        found.update(part)
    assert len(set(index["weight_map"].values())) > 2
    assert found.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    wanted = with_run_weights(where, resolve(TIED).model()).state_dict()
    assert found.keys() == wanted.keys() - {"head.weight"}
    assert all(torch.equal(found[name], wanted[name]) for name in found)


def test_nothing_is_written_over(trained, tmp_path):
    """A folder with something in it, a file, and a run's own."""
    where = trained(TIED)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "file").touch()
    for output in (tmp_path / "full", tmp_path / "file"):
        with pytest.raises(FileError, match="isn't overwritten: give a new or empty folder"):
            export(where, output, to="dcp")
    with pytest.raises(FileError, match="belongs to the run"):
        export(where, where / "checkpoints" / "model", to="dcp")
    with pytest.raises(FileError, match=r"/file/model: can't be written: .*/file isn't a folder"):
        export(where, tmp_path / "file" / "model", to="dcp")
    (tmp_path / "empty").mkdir()
    export(where, tmp_path / "empty", to="dcp")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "file", "full"]
    done = CliRunner().invoke(main, ["export", str(where), "--shard-size", "0", "-o", "x"])
    assert (done.exit_code, "a byte at least" in done.output) == (2, True)


@pytest.mark.usefixtures("plugins_forgotten")
def test_plugins_have_other_formats(trained, tmp_path):
    with pytest.raises(UserError, match="to 'mine': give one of safetensors, dcp"):
        export(trained(TIED), tmp_path / "model", to="mine")
    (tmp_path / "mine.py").write_text(
        "def write(weights, folder, most):\n"
        "    (folder / 'names').write_text(' '.join(weights.named))\n"
        "    return 1\n\n\n"
        "FORMATS = {'mine': write}\n"
    )
    plugins.load_file(str(tmp_path / "mine.py"))
    assert export(trained(TIED), tmp_path / "model", to="mine").files == 1
    assert "wte.weight" in (tmp_path / "model/names").read_text()
