"""Which constants of a file are its weights; files that have none."""

from __future__ import annotations

import numpy as np
import pytest
import timeprest
import torch
from timeprest.profiles.errors import TargetError
from timeprest.profiles.measuring.measure import measure
from timeprest.profiles.onnx.model import import_onnx
from timeprest.profiles.target import parse_input, resolve
from torch import nn

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402


def tensor(name, *shape):
    numbers = np.random.default_rng(len(name)).standard_normal(shape).astype("float32")
    return numpy_helper.from_array(numbers, name)


def constant(name, *shape):
    return helper.make_node("Constant", [], [name], value=tensor(name, *shape))


def save(folder, nodes, dims, initializers=()):
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
        [helper.make_empty_tensor_value_info("y")],
        list(initializers),
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 12)], ir_version=8)
    onnx.save(model, folder / "model.onnx")
    return str(folder / "model.onnx")


def trained(path):
    """Shapes of what is trained, in order."""
    return sorted(tuple(p.shape) for p in import_onnx(path).parameters())


CONV = [
    helper.make_node("Conv", ["x", "k"], ["c"], pads=[1, 1, 1, 1]),
    helper.make_node("Add", ["c", "shift"], ["a"]),
    helper.make_node("GlobalAveragePool", ["a"], ["g"]),
    helper.make_node("Flatten", ["g"], ["f"]),
    helper.make_node("Transpose", ["w"], ["wt"], perm=[1, 0]),
    helper.make_node("MatMul", ["f", "wt"], ["y"]),
]
SHAPES = {"k": (8, 3, 3, 3), "shift": (1, 8, 1, 1), "w": (4, 8)}


def test_weights_in_constant_nodes_are_trained(tmp_path):
    nodes = [constant(name, *shape) for name, shape in SHAPES.items()]
    path = save(tmp_path, nodes + CONV, [-1, 3, "?", "?"])
    x = torch.randn(2, 3, 8, 6)
    as_nodes = resolve(path, [parse_input("3x8x6")]).model()
    initializers = [tensor(name, *shape) for name, shape in SHAPES.items()]
    path = save(tmp_path, CONV, ["n", 3, 8, 6], initializers)
    as_initializers = import_onnx(path)
    torch.testing.assert_close(as_nodes(x), as_initializers(x))
    for model in (as_nodes, as_initializers):
        model(x).square().sum().backward()
        assert sorted(tuple(p.shape) for p in model.parameters()) == [
            (1, 8, 1, 1),
            (8, 3, 3, 3),
            (8, 4),
        ]
        assert all(bool(p.grad.any()) for p in model.parameters())


def test_beside_initializers_only_what_operators_take_as_weights_is(tmp_path):
    nodes = [constant("w", *SHAPES["w"]), constant("shift", *SHAPES["shift"])]
    path = save(tmp_path, nodes + CONV, ["n", 3, 8, 6], [tensor("k", *SHAPES["k"])])
    assert trained(path) == [(8, 3, 3, 3), (8, 4)]


def test_a_factor_that_the_exporter_made_is_not_trained(tmp_path):
    nodes = [
        helper.make_node("Mul", ["x", "val_3"], ["scaled"]),
        helper.make_node("MatMul", ["scaled", "val_4"], ["taken"]),
        helper.make_node("Mul", ["taken", "gain"], ["y"]),
    ]
    weights = [tensor("val_3", 1), tensor("val_4", 5, 3), tensor("gain", 1)]
    assert trained(save(tmp_path, nodes, [-1, 5], weights)) == [(1,), (5, 3)]


def test_a_file_without_weights_is_planned_and_not_trained(tmp_path):
    nodes = [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Tanh", ["r"], ["y"])]
    path = save(tmp_path, nodes, ["n", 6])
    profile = measure(resolve(path), batch_size=4, micro_batch_sizes=[4], seconds=0)
    assert [layer.parameter_bytes for layer in profile.layers] == [0, 0]
    assert (profile.optimizer.name, profile.dtype) == ("none", "float32")


def test_a_task_without_weights_is_refused(tmp_path):
    class Task:
        def model(self):
            return nn.Tanh()

        def data(self, split):
            return torch.utils.data.TensorDataset(torch.randn(8, 6), torch.randn(8, 6))

        def loss(self, output, target):
            return (output - target).square().mean()

        def optimizer(self, parameters):
            return torch.optim.SGD(parameters, lr=0.1)

    from timeprest.profiles.tasks.objects import name_of

    target = resolve(name_of(Task))
    with pytest.raises(TargetError, match="the model has no parameter to train"):
        measure(target, batch_size=4, micro_batch_sizes=[4], seconds=0)


# --- in a task --------------------------------------------------------------------------------


TASK = """
import timeprest
import timeprest
import torch


class Task:
    model = timeprest.onnx("model.onnx")

    def data(self, split):
        x = torch.randn(16, 3, 8, 6, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.TensorDataset(x, torch.zeros(16, dtype=torch.long))

    def loss(self, output, target):
        return torch.nn.functional.cross_entropy(output, target)

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.01)


class Written(Task):
    def model(self):
        return timeprest.onnx("model.onnx")()


class Inside(Task):
    def model(self):
        return torch.nn.Sequential(timeprest.onnx("model.onnx")(), torch.nn.Linear(4, 4))


class Shaped(Task):
    model = timeprest.onnx("open.onnx", inputs={"x": (3, 8, 6)})
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    nodes = [constant(name, *shape) for name, shape in SHAPES.items()]
    save(tmp_path, nodes + CONV, ["?", 3, "?", "?"])
    (tmp_path / "model.onnx").rename(tmp_path / "open.onnx")
    save(tmp_path, nodes + CONV, ["n", 3, 8, 6])
    (tmp_path / "it.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "front_end"),
    [("Task", "onnx"), ("Written", "onnx"), ("Inside", "fx"), ("Shaped", "onnx")],
)
def test_a_file_is_trained_as_a_tasks_model(name, front_end, folder):
    profile = timeprest.profile(f"it.py:{name}", batch_size=4, micro_batch_sizes=[2], seconds=0)
    assert profile.front_end == front_end
    plan = timeprest.plan(profile, devices=2, stages=2, variant="gpipe", micro_batches=2)
    run = timeprest.run(plan, folder / "run", epochs=1, inline=True)
    assert run.summary.mini_batches == 4
    away = timeprest.profile(f"it.py:{name}", batch_size=4, device="meta", spec="a100-80gb")
    assert [x.name for x in away.layers] == [x.name for x in profile.layers]


def test_a_plan_of_the_file_is_run_with_a_task(folder):
    profile = timeprest.profile("model.onnx", batch_size=4, micro_batch_sizes=[2], seconds=0)
    plan = timeprest.plan(profile, devices=2, stages=2, variant="gpipe", micro_batches=2)
    with pytest.raises(TargetError, match=r"model = timeprest\.onnx\(FILE\) for an ONNX file"):
        timeprest.run(plan, folder / "run", inline=True)
    timeprest.run(plan, folder / "run", epochs=1, inline=True, task="it.py:Task")


def test_inputs_that_the_file_has_not(folder):
    with pytest.raises(TargetError, match=r"of timeprest\.onnx they are its `inputs`"):
        timeprest.onnx("open.onnx")()
    with pytest.raises(TargetError, match="for each of 'x', not for 'z'"):
        timeprest.onnx("open.onnx", inputs={"z": (3, 8, 6)})()


def test_the_batch_is_where_sizes_that_are_computed_have_it(tmp_path):
    """Time and batch in one dimension, of a file for one sample: it could be the other one, too."""
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
        helper.make_node("Shape", ["t"], ["s"]),
        *(helper.make_node("Gather", ["s", k], [f"s{k}"]) for k in ("i0", "i1")),
        helper.make_node("Mul", ["si0", "si1"], ["m"]),
        helper.make_node("Unsqueeze", ["m"], ["u"], axes=[0]),
        helper.make_node("Concat", ["u", "width"], ["d"], axis=0),
        helper.make_node("Reshape", ["t", "d"], ["f"]),
        helper.make_node("Gemm", ["f", "w"], ["g"], transB=1),
        helper.make_node("Concat", ["s0", "s1", "out"], ["e"], axis=0),
        helper.make_node("Reshape", ["g", "e"], ["r"]),
        helper.make_node("Transpose", ["r"], ["y"], perm=[1, 0, 2]),
    ]
    nodes[9:9] = [helper.make_node("Unsqueeze", [f"si{k}"], [f"s{k}"], axes=[0]) for k in (0, 1)]
    numbers = {"i0": 0, "i1": 1, "width": [8], "out": [4]}
    constants = [numpy_helper.from_array(np.array(v, "int64"), k) for k, v in numbers.items()]
    path = save(tmp_path, nodes, [1, 16, 8], [*constants, tensor("w", 4, 8)])
    model, x = import_onnx(path), torch.randn(3, 16, 8)
    (weight,) = model.parameters()
    torch.testing.assert_close(model(x), x @ weight.T)
