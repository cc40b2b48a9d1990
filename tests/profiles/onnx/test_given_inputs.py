"""Inputs of ONNX files: what --input says of them, and names that aren't Python's."""

from __future__ import annotations

import pytest
import torch
from timeprest.profiles.errors import TargetError
from timeprest.profiles.target import parse_input, resolve

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper  # noqa: E402

SETTINGS = {"Concat": {"axis": 1}}


def save(folder, nodes, inputs):
    """Write a file of float inputs (name → dims) whose output is y; nodes: (operator, inputs,
    output)."""
    graph = helper.make_graph(
        [
            helper.make_node(operator, names, [made], **SETTINGS.get(operator, {}))
            for operator, names, made in nodes
        ],
        "test",
        [helper.make_tensor_value_info(k, TensorProto.FLOAT, dims) for k, dims in inputs.items()],
        [helper.make_empty_tensor_value_info("y")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "model.onnx")
    return str(folder / "model.onnx")


def shapes(path, *texts):
    """Of the inputs that the file's model is called with, for 2 samples."""
    call, _ = resolve(path, [parse_input(text) for text in texts]).call(2)
    return [tuple(tensor.shape) for tensor in call.tensors]


def refused(path, *texts):
    with pytest.raises(TargetError) as caught:
        resolve(path, [parse_input(text) for text in texts])
    line = str(caught.value)
    assert line.startswith(f"{path}: ")
    assert "\n" not in line
    return line


# --- names ------------------------------------------------------------------------------------


def test_inputs_given_by_name_are_the_files(tmp_path):
    path = save(tmp_path, [("Concat", ["a.1", "b"], "y")], {"a.1": ["N", 6], "b": ["N", 4]})
    wanted = [(2, 6), (2, 4)]
    assert shapes(path) == shapes(path, "6", "4") == wanted
    assert shapes(path, "b=4", "a.1=6") == shapes(path, "b=4", "6") == wanted
    assert "--input c=…: the file has no input of that name; it has 'a.1' and 'b'" in refused(
        path, "c=4"
    )
    assert "--input b=… is given twice" in refused(path, "b=4", "b=5")
    assert "takes 2 inputs, but --input was given 1" in refused(path, "b=4")


def test_arguments_of_python_have_pythons_names():
    with pytest.raises(TargetError, match=r"^net.py:Net: --input x\.1=…: no argument can have"):
        resolve("net.py:Net", [parse_input("x.1=3")])


@pytest.mark.parametrize(
    "names",
    [
        ["class"],
        ["self"],
        ["torch"],
        ["getattr", "slice"],
        ["x.1", "x_1"],
        ["x_1", "x.1"],
        ["input", "input_1", "input.1"],
        ["torch", "torch_1", "1", "n1", "_"],
        ["self", "self_"],
    ],
)
def test_names_that_no_argument_can_have(names, tmp_path):
    nodes = [("Exp", [name], f"e{k}") for k, name in enumerate(names)]
    nodes.append(("Concat", [f"e{k}" for k in range(len(names))], "y"))
    path = save(tmp_path, nodes, {name: ["N", k + 2] for k, name in enumerate(names)})
    given = [torch.randn(3, k + 2) for k in range(len(names))]
    found = resolve(path).model()(*given)
    torch.testing.assert_close(found, torch.cat(given, 1).exp())


def test_a_node_may_be_called_self(tmp_path):
    path = save(tmp_path, [("Exp", ["x"], "self"), ("Softmax", ["self"], "y")], {"x": ["N", 3]})
    x = torch.randn(2, 3)
    torch.testing.assert_close(resolve(path).model()(x), x.exp().softmax(-1))


# --- free dimensions --------------------------------------------------------------------------


def test_shapes_give_free_dimensions_their_sizes(tmp_path):
    nodes = [("Add", ["x", "z"], "y")]
    path = save(tmp_path, nodes, {"x": ["N", "seq", 6], "z": ["N", "seq", "width"]})
    assert "give a size for 'seq', with the shape" in refused(path)
    assert "like --input x=16x6:DTYPE" in refused(path)
    target = resolve(path, [parse_input("z=8x6:float32"), parse_input("x=8x6:float32")])
    assert target.call(3)[0].of(target.model()).shape == (3, 8, 6)
    assert "gives the free dimension 'seq' two sizes, 8 in 'x' and 7 in 'z'" in refused(
        path, "8x6", "7x6"
    )
    assert "a sample of input 'x' has 2 dimensions, but --input gives 1: write it like" in refused(
        path, "6", "8x6"
    )


def test_negative_dimensions_are_free(tmp_path):
    path = save(tmp_path, [("Relu", ["x"], "y")], {"x": [-1, 6]})
    assert resolve(path).model()(torch.ones(3, 6)).shape == (3, 6)
    path = save(tmp_path, [("Relu", ["x"], "y")], {"x": ["N", -1, 6]})
    assert "dimension 2 of input 'x' is free: give a size for it, with" in refused(path)
    assert shapes(path, "5x6") == [(2, 5, 6)]


@pytest.mark.parametrize("nameless", ["?", -1, "*", None])
def test_dimensions_without_a_name_are_each_its_own(nameless, tmp_path):
    """As exporters write images of any size: neither one size, nor the batch's."""
    inputs = {"x": [nameless, 3, nameless, nameless], "z": [nameless, 3, nameless, 1]}
    path = save(tmp_path, [("Add", ["x", "z"], "y")], inputs)
    assert "dimension 3 of input 'x' is free: give a size for it, with" in refused(path)
    assert "like --input x=3x16x16:DTYPE" in refused(path)
    assert shapes(path, "3x8x6", "3x8x1") == [(2, 3, 8, 6), (2, 3, 8, 1)]
    target = resolve(path, [parse_input("x=3x8x6"), parse_input("z=3x8x1")])
    assert target.call(5)[0].of(target.model()).shape == (5, 3, 8, 6)


# --- dtypes -----------------------------------------------------------------------------------


def test_an_inputs_dtype_is_the_files(tmp_path):
    path = save(tmp_path, [("Concat", ["a", "b"], "y")], {"a": ["N", 6], "b": ["N", 4]})
    call, _ = resolve(path, [parse_input("6"), parse_input("b=4:float32")]).call(2)
    assert {tensor.dtype for tensor in call.tensors} == {torch.float32}
    line = "--input gives 'a' as int64, and in the file it is float32: leave the dtype out"
    assert line in refused(path, "6:int64:9", "4")
