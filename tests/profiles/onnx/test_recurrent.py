"""RNN, GRU and LSTM of ONNX, held against onnxruntime, and what torch exports against torch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from timeprest.profiles.errors import TargetError
from timeprest.profiles.onnx.model import import_onnx
from timeprest.profiles.onnx.recurrent import Recurrent, RecurrentSteps
from torch import nn

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

TIME, BATCH, INPUTS, HIDDEN = 5, 3, 4, 6
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
PLACES = ("x", "w", "r", "b", "lengths", "h", "c", "p")


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def save(folder, kind, *, batch="n", states=(), lengths=None, bias=True, outputs=None, **settings):
    """A file of x ``[batch, time, input]``, whose node has what is asked for."""
    directions = 2 if settings.get("direction") == "bidirectional" else 1
    gates, layout = GATES[kind] * HIDDEN, settings.get("layout", 0)
    given = {"w": numbers(directions, gates, INPUTS, seed=1) / 2}
    given["r"] = numbers(directions, gates, HIDDEN, seed=2) / 2
    if bias:
        given["b"] = numbers(directions, 2 * gates, seed=3) / 2
    if settings.pop("peepholes", False):
        given["p"] = numbers(directions, 3 * HIDDEN, seed=4) / 2
    constants = [numpy_helper.from_array(value, name) for name, value in given.items()]
    inputs = {"x": [batch, TIME, INPUTS]}
    for name in states:  # of the batch, so that they are inputs
        inputs[f"{name}0"] = [batch, directions, HIDDEN]
    nodes = []
    if lengths is not None:
        given["lengths"] = lengths
        if isinstance(lengths, str):
            inputs["lengths"] = [batch]
        else:
            constants.append(numpy_helper.from_array(np.array(lengths, "int32"), "lengths"))
    source = {"x": "x"} | {name: f"{name}0" for name in states} | {name: name for name in given}
    if not layout:
        for name in ("x", *states):
            nodes.append(
                helper.make_node("Transpose", [source[name]], [f"{name}t"], perm=[1, 0, 2])
            )
            source[name] = f"{name}t"
    takes = [source.get(name, "") for name in PLACES]
    while not takes[-1]:
        takes.pop()
    gives = ["y", "yh", "yc"][: 3 if kind == "LSTM" else 2]
    nodes.append(helper.make_node(kind, takes, gives, "cell", hidden_size=HIDDEN, **settings))
    wanted = []
    for name in gives:  # with the batch in front
        order = [0, 1, 2, 3] if name == "y" else [0, 1, 2]
        if not layout:
            order = [2, 0, 1, 3] if name == "y" else [1, 0, 2]
        nodes.append(helper.make_node("Transpose", [name], [f"{name}_"], perm=order))
        wanted.append(f"{name}_")
    graph = helper.make_graph(
        nodes,
        "test",
        [
            helper.make_tensor_value_info(
                name, TensorProto.INT32 if name == "lengths" else TensorProto.FLOAT, dims
            )
            for name, dims in inputs.items()
        ],
        [helper.make_empty_tensor_value_info(name) for name in wanted],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "model.onnx")
    return str(folder / "model.onnx")


def check(path, *given, as_torchs=None):
    """It gives what onnxruntime gives, and each weight and input a gradient."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]
    wanted = session.run(None, {k: v.numpy() for k, v in zip(names, given, strict=True)})
    model = import_onnx(path)
    given = [t.clone().requires_grad_(t.is_floating_point()) for t in given]
    found = model.train()(*given)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.detach(), torch.from_numpy(other), rtol=1e-4, atol=1e-5)
    sum(y.square().sum() for y in found).backward()
    parameters = dict(model.named_parameters())
    assert parameters
    for name, p in parameters.items():
        assert p.grad is not None, name
        assert bool(p.grad.any()), name
    assert all(t.grad is not None for t in given if t.is_floating_point())
    # Of any other batch size, too.
    other = model(*(torch.cat([t, t]) for t in given))
    for one, two in zip(found, other, strict=True):
        torch.testing.assert_close(two, torch.cat([one, one]))
    if as_torchs is not None:
        kind = Recurrent if as_torchs else RecurrentSteps
        assert any(type(module) is kind for module in model.modules())


def x():
    return torch.from_numpy(numbers(BATCH, TIME, INPUTS))


def state(directions, seed=7):
    return torch.from_numpy(numbers(BATCH, directions, HIDDEN, seed=seed))


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("kind", GATES)
def test_it_is_onnxruntimes(kind, direction, tmp_path):
    before_reset = {"linear_before_reset": 1} if kind == "GRU" else {}
    path = save(tmp_path, kind, direction=direction, **before_reset)
    check(path, x(), as_torchs=True)
    path = save(tmp_path, kind, direction=direction, bias=False, **before_reset)
    check(path, x(), as_torchs=True)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("kind", GATES)
def test_states_at_the_beginning_and_lengths(kind, direction, tmp_path):
    directions = 2 if direction == "bidirectional" else 1
    names = "hc" if kind == "LSTM" else "h"
    given = [state(directions, seed) for seed, _ in enumerate(names)]
    before_reset = {"linear_before_reset": 1} if kind == "GRU" else {}
    path = save(tmp_path, kind, states=names, direction=direction, **before_reset)
    check(path, x(), *given, as_torchs=True)
    path = save(tmp_path, kind, states=names, lengths="lengths", direction=direction)
    check(path, x(), *given, torch.tensor([5, 2, 3], dtype=torch.int32), as_torchs=False)


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_a_state_that_is_reset_before_the_product(direction, tmp_path):
    check(save(tmp_path, "GRU", direction=direction), x(), as_torchs=False)
    check(save(tmp_path, "GRU", direction=direction, bias=False), x(), as_torchs=False)


SETTINGS = [
    ("LSTM", {"peepholes": True}),
    ("LSTM", {"peepholes": True, "direction": "bidirectional"}),
    ("LSTM", {"input_forget": 1}),
    ("LSTM", {"clip": 0.3}),
    ("GRU", {"clip": 0.3}),
    ("RNN", {"clip": 0.3}),
    ("RNN", {"activations": ["Relu"]}),
    ("LSTM", {"activations": ["HardSigmoid", "Tanh", "Softsign"]}),
    ("GRU", {"activations": ["Sigmoid", "LeakyRelu"], "activation_alpha": [0.3]}),
    (
        "RNN",
        {
            "direction": "bidirectional",
            "activations": ["Affine", "ScaledTanh"],
            "activation_alpha": [0.5, 0.7],
            "activation_beta": [0.1, 0.9],
        },
    ),
]


@pytest.mark.parametrize(("kind", "settings"), SETTINGS)
def test_other_settings(kind, settings, tmp_path):
    check(save(tmp_path, kind, **settings), x())


@pytest.mark.parametrize("kind", GATES)
def test_the_batch_as_first_dimension(kind, tmp_path):
    """onnxruntime hasn't got this layout: held against the other one."""
    names = "hc" if kind == "LSTM" else "h"
    for direction in ("reverse", "bidirectional"):
        directions = 2 if direction == "bidirectional" else 1
        given = [x(), *(state(directions, seed) for seed, _ in enumerate(names))]
        wanted = import_onnx(save(tmp_path, kind, states=names, direction=direction))(*given)
        path = save(tmp_path, kind, states=names, direction=direction, layout=1)
        for one, other in zip(import_onnx(path)(*given), wanted, strict=True):
            torch.testing.assert_close(one, other)


def test_constant_lengths_and_states_of_the_files_batch(tmp_path):
    path = save(tmp_path, "LSTM", batch=1, lengths=[TIME])
    check_one(path, Recurrent)
    check_one(save(tmp_path, "LSTM", batch=1, lengths=[3]), RecurrentSteps)
    with pytest.raises(TargetError, match="sequence_lens differ between the samples"):
        import_onnx(save(tmp_path, "LSTM", batch=2, lengths=[3, 4]))


def check_one(path, kind):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    wanted = session.run(None, {"x": numbers(1, TIME, INPUTS)})
    model = import_onnx(path)
    given = torch.from_numpy(numbers(1, TIME, INPUTS))
    for one, other in zip(model(given), wanted, strict=True):
        torch.testing.assert_close(one.detach(), torch.from_numpy(other), rtol=1e-4, atol=1e-5)
    assert model(torch.cat([given] * 3))[0].shape[0] == 3
    assert any(type(module) is kind for module in model.modules())


def test_refusals_say_what_is_wrong(tmp_path):
    with pytest.raises(TargetError, match="node 'cell' is a 'LSTM': its direction is 'sideways'"):
        import_onnx(save(tmp_path, "LSTM", direction="sideways"))
    with pytest.raises(TargetError, match="its activation 'Sine' isn't known"):
        import_onnx(save(tmp_path, "RNN", activations=["Sine"]))
    with pytest.raises(TargetError, match="has 1 activations; 3 for each direction are needed"):
        import_onnx(save(tmp_path, "LSTM", activations=["Tanh"]))


class Reader(nn.Module):
    def __init__(self, kind, layers, both):
        super().__init__()
        self.words = nn.Embedding(11, 4)
        more = {"batch_first": True, "bidirectional": both}
        self.rnn = getattr(nn, kind)(4, HIDDEN, layers, **more)
        self.out = nn.Linear(HIDDEN * (1 + both), 3)

    def forward(self, ids):
        return self.out(self.rnn(self.words(ids))[0])


@pytest.mark.parametrize(("kind", "both"), [*itertools.product(GATES, [False, True])])
def test_what_torch_exports_is_the_same(kind, both, tmp_path):
    torch.manual_seed(0)
    model, ids = Reader(kind, 2, both), torch.randint(11, (2, TIME))
    path = tmp_path / "reader.onnx"
    try:
        torch.onnx.export(
            model, (ids,), path, dynamo=False, dynamic_axes={"ids": {0: "n"}}, input_names=["ids"]
        )
    except Exception as error:  # another torch, whose exporter needs more packages
        pytest.skip(str(error))
    found = import_onnx(path)
    ids = torch.randint(11, (7, TIME))
    torch.testing.assert_close(found(ids), model(ids))
    trained = sum(p.numel() for p in found.parameters())
    assert trained == sum(p.numel() for p in model.parameters())
