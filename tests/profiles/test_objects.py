"""Targets that are given as Python objects: their names, and how other processes get them."""

from __future__ import annotations

import copy
import inspect
import random
import subprocess
import sys
import textwrap
import threading
import warnings
from types import ModuleType, SimpleNamespace

import pytest
import timeprest
import torch
import torch.distributed as dist
from helpers.processes.forked import Python
from timeprest.profiles.errors import TargetError, TaskWarning, UserError
from timeprest.profiles.measuring import process_settings
from timeprest.profiles.target import resolve
from timeprest.profiles.tasks.objects import as_bytes, find, give, give_bytes, name_of
from timeprest.profiles.zoo.digits import Digits
from timeprest.runtime.communication.signed_store import ForeignEntryError, Secret, SignedStore
from timeprest.runtime.processes.store import LaunchingProcess
from timeprest.runtime.records.progress import read_losses
from torch import nn
from torch.utils.data import TensorDataset


def make_task(width=6):
    """A class that no file has under a name, which uses what is around it."""

    class Made:
        def model(self):
            return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))

        def data(self, split):
            x = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
            return TensorDataset(x, (x.sum(1) > 0).long())

        def loss(self, output, target):
            return nn.functional.cross_entropy(output, target)

        def optimizer(self, parameters):
            return torch.optim.SGD(parameters, lr=0.1)

    return Made


def test_names_of_what_can_be_imported(tmp_path, monkeypatch):
    assert name_of("digits") == "digits"
    assert name_of(Digits) == "timeprest.profiles.zoo.digits:Digits"
    assert resolve(name_of(Digits)).task is not None
    # A neighbour of a script goes by its file.
    (tmp_path / "neighbour.py").write_text("class Task: ...\ntask = Task()\n")
    monkeypatch.syspath_prepend(tmp_path)
    import neighbour

    assert name_of(neighbour.Task) == f"{tmp_path}/neighbour.py:Task"
    assert name_of(neighbour.task) == f"{tmp_path}/neighbour.py:task"
    assert name_of(neighbour.Task()).startswith("session:Task")


def test_names_in_the_module_that_runs(tmp_path, monkeypatch):
    main = ModuleType("__main__")
    main.Task = type("Task", (), {"__module__": "__main__"})
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert name_of(main.Task) == "session:Task"
    script, other = tmp_path / "train.py", tmp_path / "train"
    script.touch()
    other.touch()
    main.__file__, main.__spec__ = str(script), None
    assert name_of(main.Task) == f"{script}:Task"
    # What can't be imported as a file: python - < train.py, a script without .py, one that is gone.
    for file in ("<stdin>", str(other), str(tmp_path / "gone.py")):
        main.__file__ = file
        assert name_of(main.Task) == "session:Task"
    main.__spec__ = SimpleNamespace(name="pkg.train")
    assert name_of(main.Task) == "pkg.train:Task"
    # A notebook that runs the cell once more means the class as it is now.
    del main.__file__
    first = name_of(main.Task)
    main.Task = type("Task", (), {"__module__": "__main__"})
    assert name_of(main.Task) == first
    # Instances aren't taken for each other.
    one, other = main.Task(), main.Task()
    assert name_of(one) != name_of(other)
    assert name_of(one) == name_of(one)


def test_a_class_that_a_notebook_defines_anew_is_taken_as_it_is_now(monkeypatch):
    """As a script's is, which each run imports."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)

    def cell() -> type:
        return type("Task", (), {"__module__": "__main__"})

    main.Task = first = cell()
    name, made = name_of(first), name_of(instance := first())
    main.Wider = type("Wider", (first,), {"__module__": "__main__"})
    assert find(name) is first
    main.Task = again = cell()
    with pytest.warns(TaskWarning, match="^session:Task: has been defined anew .* as it is now$"):
        assert find(name) is again
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find(name) is again
    for old, found in ((made, instance), (name_of(main.Wider), main.Wider)):
        with pytest.warns(TaskWarning, match="is of the class Task as it was before .* make it"):
            assert find(old) is found
    # Another class under that name isn't this one, nor is one that is gone.
    for other in (main.Wider, 3):
        main.Task = other
        assert find(name) is again
    del main.Task
    assert find(name) is again


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "changed", "named"),
    [
        ("task = Task()", "", True),
        ("", "task = Task()", False),
        ("task = Task()", "task.width = 9", False),
        ("task = Net(3, 3)", "task.eval()", True),
        ("task = Net(3, 3)", "task.bias, task.out_features = None, 4", False),
    ],
)
def test_what_a_script_makes_of_an_instance_is_what_counts(made, changed, named, tmp_path):
    """Workers that import it would have it without what stands under its guard."""
    script = tmp_path / "train.py"
    script.write_text(
        "from timeprest.profiles.tasks.objects import name_of\nfrom torch import nn\n"
        "class Net(nn.Linear): ...\n"
        f"class Task:\n    def __init__(self):\n        self.width = 3\n{made}\n"
        f"if __name__ == '__main__':\n    {changed or 'pass'}\n    print(name_of(task))\n"
    )
    printed = Python(script).ended()
    assert printed.startswith(f"{script}:task" if named else "session:")


@pytest.mark.processes
def test_a_task_of_a_session_trains_in_processes(tmp_path):
    task = make_task()
    profile = timeprest.profile(task, batch_size=8, seconds=0)
    assert profile.target == "session:Made"
    plan = timeprest.plan(profile, stages=2, replicas=False)
    for name, inline in (("inline", True), ("processes", False)):
        timeprest.run(plan, tmp_path / name, task=task, steps=3, inline=inline)
    inline, processes = (
        read_losses(tmp_path / name / "metrics.jsonl") for name in ("inline", "processes")
    )
    assert inline == processes
    # Nothing of it is in a file.
    assert not list(tmp_path.rglob("*.pkl"))


@pytest.mark.choice(0)
@pytest.mark.processes
def test_a_task_of_a_script_from_stdin_trains_in_processes(tmp_path):
    body = "\n".join(inspect.getsource(make_task).splitlines()[1:])
    script = (
        "import timeprest, torch\nfrom torch import nn\n"
        "from torch.utils.data import TensorDataset\n"
        f"width = 6\n{textwrap.dedent(body).removesuffix('return Made')}\n"
        "profile = timeprest.profile(Made, batch_size=8, seconds=0)\n"
        "plan = timeprest.plan(profile, stages=2, replicas=False)\n"
        "run = timeprest.run(plan, 'run', task=Made(), steps=2)\n"
        "print(profile.target, len(run.losses))\n"
    )
    done = subprocess.run(
        [sys.executable, "-"],
        input=script,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["session:Made", "2"]


def test_a_model_of_a_session_is_profiled():
    found = timeprest.profile(
        lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU()),
        inputs=["3:float32"],
        batch_size=4,
        seconds=0,
    )
    assert [layer.name for layer in found.layers] == ["0", "1"]
    with pytest.raises(UserError, match="together: session:Made is in no file"):
        timeprest.profile(make_task(), together=2)


def test_a_module_that_the_task_gives_each_time_is_trained_as_processes_train_it(tmp_path):
    """From its own weights, and not from those of a training before, nor a check's other side."""

    class Keeps(make_task()):
        def __init__(self):
            self.net = super().model()

        def model(self):
            return self.net

    task = Keeps()
    before = copy.deepcopy(task.net.state_dict())
    profile = timeprest.profile(task, batch_size=8, seconds=0)
    plan = timeprest.plan(profile, variant="gpipe", micro_batches=2, stages=2, replicas=False)
    assert timeprest.check(plan, steps=2, inline=True).verdict == "same"
    one, other = (
        timeprest.run(plan, tmp_path / name, steps=2, inline=True) for name in ("one", "other")
    )
    assert one.losses == other.losses
    assert not torch.equal(one.weights()["0.weight"], before["0.weight"])
    assert all(torch.equal(value, before[name]) for name, value in task.net.state_dict().items())
    assert all(p.grad is None for p in task.net.parameters())


def test_one_input_needs_no_list():
    one, several = (
        timeprest.profile(nn.Linear(3, 2), inputs=each, batch_size=4, seconds=0).inputs
        for each in ("3:float32", ["3:float32"])
    )
    assert one == several
    with pytest.raises(UserError, match="inputs: give one or more such as '3x32x32:float32', not"):
        timeprest.profile(nn.Linear(3, 2), inputs=[(3,)], batch_size=4)


def test_a_session_is_left_as_it_was():
    """Threads and random numbers, and a model of the user's own."""
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)).eval()
    model[0].weight.grad = torch.ones(5, 3)
    state = copy.deepcopy(model.state_dict())
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    torch.manual_seed(5)
    random.seed(5)
    try:
        timeprest.profile(model, inputs=["3:float32"], batch_size=4, seconds=0)
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    drawn = torch.rand(3), random.random()
    torch.manual_seed(5)
    random.seed(5)
    assert torch.equal(drawn[0], torch.rand(3))
    assert drawn[1] == random.random()
    assert not model.training
    assert torch.equal(model[0].weight.grad, torch.ones(5, 3))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model.own = threading.Lock()
    with pytest.raises(TargetError, match=r"session:Sequential.*can't be copied.*give a function"):
        timeprest.profile(model, inputs=["3:float32"], batch_size=4, seconds=0)


def test_processes_at_once_are_measured_as_the_model_was(monkeypatch):
    """With freed memory kept, as the command does."""
    done = []
    monkeypatch.setattr(process_settings, "_kept_for_good", False)
    monkeypatch.setattr(process_settings, "_set", lambda given: done.append(given) or True)
    monkeypatch.setattr(
        "timeprest.runtime.profile.with_processes",
        lambda profile, *_, **__: done.append("at once") or profile,
    )
    timeprest.profile("mlp:width=16,depth=1", batch_size=4, seconds=0, together=2)
    assert done == [process_settings._KEPT, "at once", process_settings._GIVEN_BACK]


def test_what_cannot_be_sent_is_told_in_one_line(monkeypatch, tmp_path):
    with pytest.raises(TargetError, match=r"session:gone: is an object of the Python session"):
        resolve("session:gone")
    task = make_task()()
    with (tmp_path / "file").open("w") as file:
        task.file = file
        give("session:bad", task)
        message = r"session:bad: can't be sent to the workers' processes: .*pickle files.*inline$"
        with pytest.raises(TargetError, match=message):
            as_bytes("session:bad")
    with pytest.raises(TargetError, match="session:bad: can't be made in a worker's process"):
        give_bytes("session:bad", b"nonsense")
    assert as_bytes("digits") is None
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(UserError, match=r"in the checkout, pip install -e '\.\[notebook\]'"):
        as_bytes("session:bad")


def test_a_worker_takes_nothing_but_what_the_launcher_sent():
    under = dist.HashStore()
    store = SignedStore(under, Secret(b"ours"))
    launching = LaunchingProcess(store, 0, 1.0)
    assert launching.task() is None
    store.set("task", b"the task")
    assert launching.task() == b"the task"
    under.set("task", b"another")
    with pytest.raises(ForeignEntryError, match="'task' in the run's store has no signature"):
        launching.task()


@pytest.mark.parametrize(
    "call", ["timeprest.profile(Task)", "timeprest.Trainer(None, 'runs/a', task=Task)"]
)
def test_a_script_that_trains_when_imported_is_refused(call, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(f"import timeprest\nclass Task: ...\n{call}\n")
    message = rf"train.py:Task: calls {call.split('(')[0]} when it is imported.*__main__"
    with pytest.raises(UserError, match=message):
        resolve(f"{script}:Task")
