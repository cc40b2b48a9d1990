"""ONNX files: each operator and the nine light models against onnxruntime, batches, errors."""

from __future__ import annotations

import copy
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from timeprest.profiles.errors import FileError, TargetError
from timeprest.profiles.onnx.file import read_file
from timeprest.profiles.onnx.model import import_onnx
from timeprest.profiles.onnx.operators import OPERATORS
from timeprest.profiles.onnx.recurrent import RECURRENT
from timeprest.profiles.onnx.values import BatchAxis, find_batch, follow_batch

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
np = pytest.importorskip("numpy")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
MODELS = [
    "bvlc_alexnet",
    "densenet121",
    "inception_v1",
    "inception_v2",
    "resnet50",
    "shufflenet",
    "squeezenet",
    "vgg19",
    "zfnet512",
]
KINDS = {
    "float32": TensorProto.FLOAT,
    "int64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
    "float64": TensorProto.DOUBLE,
}


def node(op_type, inputs, outputs, name=None, **attributes):
    return helper.make_node(op_type, inputs.split(","), outputs.split(","), name, **attributes)


def save(folder, nodes, inputs, constants=None, outputs="y", opset=17, name="model.onnx"):
    """Write a model file. inputs: name → (dims, dtype); constants: name → numpy array."""
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info(k, KINDS[d], dims) for k, (dims, d) in inputs.items()],
        [helper.make_empty_tensor_value_info(k) for k in outputs.split(",")],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in (constants or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    path = folder / name
    onnx.save(model, path)
    return path


def reference(path, feeds):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, {k: v.numpy() for k, v in feeds.items()})


def close(found, expected, tolerance=1e-5):
    expected = torch.as_tensor(expected)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.detach(), expected, rtol=tolerance, atol=tolerance)


def compare(path, feeds, **settings):
    """The imported model, in evaluation mode, gives what onnxruntime gives."""
    model = import_onnx(path, **settings)
    found = model.eval()(*feeds.values())
    found = found if isinstance(found, tuple) else (found,)
    expected = reference(path, feeds)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        close(one, other)
    return model


def train_step(model, *inputs):
    """Forward and backward in training mode: every parameter gets a finite gradient."""
    found = model.train()(*inputs)
    found = found if isinstance(found, tuple) else (found,)
    sum((f * torch.randn_like(f)).sum() for f in found).backward()
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
    return parameters


def rng(*shape, low=None, dtype=np.float32, seed=0):
    found = np.random.default_rng(seed).standard_normal(shape)
    return (found if low is None else np.abs(found) + low).astype(dtype)


def light(name):
    path = LIGHT / f"light_{name}.onnx"
    if not path.is_file():
        pytest.skip("this onnx package comes without its light models")
    return path


# --- the nine light models ----------------------------------------------------------------


@pytest.mark.choice(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_light_model_runs_as_in_onnxruntime_and_trains(name):
    path = light(name)
    torch.manual_seed(0)
    x = torch.randn(1, 3, 224, 224)
    model = import_onnx(path)
    (given,) = read_file(path).inputs
    assert (given.shape, given.dtype) == ((3, 224, 224), torch.float32)
    with torch.no_grad():
        close(model.eval()(x), reference(path, {given.name: x})[0])
    if name != "vgg19":  # its operators are AlexNet's, and its gradients half a gigabyte
        assert len(train_step(model, x)) > 10


def randomised(path, folder):
    """A copy of a light model with random weights in place of its constant ones."""
    model = onnx.load(path)
    shapes = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    kept, made = [], []
    for k, one in enumerate(model.graph.node):
        if one.op_type != "ConstantOfShape":
            kept.append(one)
            continue
        shape = shapes[one.input[0]].tolist()
        value = rng(*shape, seed=k)
        if len(shape) > 1:  # keeps the activations' size through the layers
            value *= 1.4 / math.sqrt(max(math.prod(shape[1:]), 1))
        else:  # scales and variances about 1, biases and means about 0
            about = 1.0 if re.search("scale|var|riv|bn_[sw]", one.output[0]) else 0.0
            value = about + 0.1 * value
        made.append(numpy_helper.from_array(value.astype(np.float32), one.output[0]))
    if kept[-1].op_type == "Softmax":  # its outputs would hardly differ
        model.graph.output[0].name = kept.pop().input[0]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    model.graph.initializer.extend(made)
    onnx.save(model, folder / "random.onnx")
    return folder / "random.onnx"


@pytest.mark.choice("squeezenet", "shufflenet")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["squeezenet", "shufflenet", "inception_v1", "densenet121"])
def test_light_model_with_random_weights(name, tmp_path):
    path = randomised(light(name), tmp_path)
    model = import_onnx(path)
    torch.manual_seed(0)
    x = torch.randn(3, 3, 224, 224) * torch.tensor([0.5, 1, 2]).reshape(3, 1, 1, 1)
    (given,) = read_file(path).inputs
    expected = [reference(path, {given.name: x[k : k + 1]})[0] for k in range(3)]
    with torch.no_grad():
        found = model.eval()(x)
    scale = float(np.std(expected[0]))
    assert np.abs(expected[0] - expected[1]).max() > 1e-2 * scale, "the outputs say nothing"
    close(found / scale, np.concatenate(expected) / scale)


# --- single operators ---------------------------------------------------------------------

F = "float32"
IMAGE = {"x": ((2, 4, 7, 9), F)}
MATRIX = {"x": ((2, 6), F)}
SEQUENCE = {"x": ((2, 5, 8), F)}
W = {"w": rng(6, 4, 3, 3), "b": rng(6)}


def i64(*values):
    return np.array(values, dtype=np.int64)


def case(op, inputs=MATRIX, constants=None, opset=17, extra="", mark="", **attributes):
    constants = constants or {}
    names = extra if extra else ",".join([*inputs, *constants])
    id_ = f"{op}-{opset}" + "".join(f"-{k}" for k in attributes) + (mark and f"-{mark}")
    return pytest.param(op, names, inputs, constants, opset, attributes, id=id_)


UNARY = [
    "Abs",
    "Ceil",
    "Cos",
    "Elu",
    "Erf",
    "Exp",
    "Floor",
    "HardSigmoid",
    "HardSwish",
    "Identity",
    "LeakyRelu",
    "LogSoftmax",
    "Mish",
    "Neg",
    "Relu",
    "Round",
    "Selu",
    "Sigmoid",
    "Sign",
    "Sin",
    "Softmax",
    "Softplus",
    "Softsign",
    "Tanh",
    "Celu",
]
REDUCTIONS = [
    "ReduceMean",
    "ReduceSum",
    "ReduceMax",
    "ReduceMin",
    "ReduceProd",
    "ReduceL1",
    "ReduceL2",
    "ReduceSumSquare",
    "ReduceLogSumExp",
]
TWO = {"x": ((2, 6), F), "z": ((2, 6), F)}
INT = {"x": ((2, 6), "int64")}
BOOLS = {"x": ((2, 6), "bool"), "z": ((2, 6), "bool")}

CASES = [
    *(case(op, opset=18) for op in UNARY),
    *(
        case(op, TWO)
        for op in [
            "Add",
            "Sub",
            "Mul",
            "Div",
            "Max",
            "Min",
            "Mean",
            "Sum",
            "Equal",
            "Less",
            "Greater",
        ]
    ),
    *(case(op, TWO) for op in ("LessOrEqual", "GreaterOrEqual")),
    *(case(op, BOOLS) for op in ("And", "Or", "Xor")),
    *(case(op, MATRIX, {"c": rng(6, low=0.5)}) for op in ("Add", "Sub", "Mul", "Div")),
    *(case(op, MATRIX, {"c": np.float32(1.5)}, mark="number") for op in ("Add", "Div", "Less")),
    case("Div", INT, {"c": i64(-4)}, mark="integers"),
    case("Pow", MATRIX, {"c": np.float32(2)}),
    case("Pow", MATRIX, {"c": np.float32([3])}, mark="vector"),
    case("Pow", MATRIX, {"c": np.float32([1, 2, 3, 4, 5, 6])}, mark="vectors"),
    case("Mod", INT, {"c": i64(3)}),
    case("Mod", TWO, fmod=1),
    case("Not", {"x": ((2, 6), "bool")}),
    case("IsNaN"),
    case("IsInf"),
    case("Sqrt", mark="positive"),
    case("Log", mark="positive"),
    case("Reciprocal", mark="positive"),
    case("Gelu", opset=20),
    case("Gelu", opset=20, approximate="tanh"),
    case("PRelu", IMAGE, {"c": rng(4, 1, 1)}),
    case("HardSigmoid", alpha=0.3, beta=0.4),
    case("Selu", alpha=1.5, gamma=1.2),
    case("Clip", MATRIX, {"lo": np.float32(-0.5), "hi": np.float32(0.25)}),
    case("Clip", opset=6, min=-0.5, max=0.25),
    case("Clip", MATRIX, {"hi": np.float32(0.25)}, extra="x,,hi", mark="above"),
    case("Where", BOOLS, {"c": rng(6), "d": np.float32(0)}, extra="x,c,d"),
    case("Softmax", IMAGE, opset=11),
    case("Softmax", IMAGE, opset=11, axis=3),
    case("Softmax", IMAGE, axis=1),
    case("LogSoftmax", IMAGE, opset=11),
    case("LogSoftmax", IMAGE, axis=-2),
    case("Conv", IMAGE, W),
    case("Conv", IMAGE, {"w": W["w"]}, strides=[2, 1], pads=[1, 1, 1, 1], dilations=[1, 2]),
    case("Conv", IMAGE, W, strides=[2, 2], pads=[0, 1, 2, 0]),
    case("Conv", IMAGE, W, strides=[2, 2], auto_pad="SAME_UPPER", kernel_shape=[3, 3]),
    case("Conv", IMAGE, {"w": rng(6, 4, 2, 2)}, auto_pad="SAME_LOWER"),
    case("Conv", IMAGE, {"w": rng(6, 4, 2, 2)}, auto_pad="VALID", mark="valid"),
    case("Conv", IMAGE, {"w": rng(8, 2, 3, 3)}, group=2),
    case("Conv", SEQUENCE, {"w": rng(3, 5, 3), "b": rng(3)}, mark="1d"),
    case("Conv", {"x": ((2, 2, 4, 5, 6), F)}, {"w": rng(3, 2, 3, 3, 3)}, mark="3d"),
    case("ConvTranspose", IMAGE, {"w": rng(4, 3, 3, 3), "b": rng(3)}, strides=[2, 2]),
    case("ConvTranspose", IMAGE, {"w": rng(4, 3, 3, 3)}, strides=[2, 2], pads=[1, 0, 0, 1]),
    case("ConvTranspose", IMAGE, {"w": rng(4, 3, 3, 3)}, strides=[2, 2], auto_pad="SAME_UPPER"),
    case(
        "ConvTranspose",
        IMAGE,
        {"w": rng(4, 3, 3, 3)},
        strides=[2, 2],
        pads=[1, 1, 1, 1],
        output_padding=[1, 0],
        group=2,
    ),
    case("ConvTranspose", IMAGE, {"w": rng(4, 3, 3, 3)}, strides=[2, 2], output_shape=[14, 18]),
    case("Gemm", MATRIX, {"w": rng(4, 6), "b": rng(4)}, transB=1),
    case("Gemm", MATRIX, {"w": rng(4, 6)}, transB=1),
    case("Gemm", MATRIX, {"w": rng(6, 4), "b": rng(1, 4)}, alpha=0.5, beta=2.0),
    case("Gemm", MATRIX, {"w": rng(4, 6), "b": rng(1)}, transB=1, mark="scalar-bias"),
    case("Gemm", TWO, transB=1, alpha=0.5),
    case("MatMul", SEQUENCE, {"w": rng(8, 3)}),
    case("MatMul", {"x": ((2, 5, 8), F), "z": ((2, 8, 3), F)}, mark="batched"),
    case(
        "BatchNormalization",
        IMAGE,
        {"s": rng(4), "b": rng(4), "m": rng(4), "v": rng(4, low=0.5)},
        epsilon=1e-3,
    ),
    case(
        "BatchNormalization",
        MATRIX,
        {"s": rng(6), "b": rng(6), "m": rng(6), "v": rng(6, low=0.5)},
        mark="2d",
    ),
    case("LayerNormalization", SEQUENCE, {"s": rng(8), "b": rng(8)}),
    case("LayerNormalization", SEQUENCE, {"s": rng(5, 8)}, axis=1),
    case("LayerNormalization", SEQUENCE, {"s": rng(1)}, axis=1, mark="broadcast"),
    case("InstanceNormalization", IMAGE, {"s": rng(4), "b": rng(4)}),
    case("GroupNormalization", IMAGE, {"s": rng(4), "b": rng(4)}, opset=21, num_groups=2),
    case("GroupNormalization", IMAGE, {"s": rng(2), "b": rng(2)}, opset=18, num_groups=2),
    case("LRN", IMAGE, size=3, alpha=0.1, beta=0.6, bias=2.0),
    case("MaxPool", IMAGE, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    case("MaxPool", IMAGE, kernel_shape=[3, 2], strides=[2, 2], pads=[0, 0, 1, 1]),
    case("MaxPool", IMAGE, kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
    case("MaxPool", IMAGE, kernel_shape=[3, 3], auto_pad="SAME_UPPER", strides=[2, 2]),
    case("MaxPool", IMAGE, kernel_shape=[3, 3], dilations=[2, 1]),
    case("MaxPool", SEQUENCE, kernel_shape=[2], mark="1d"),
    case("AveragePool", IMAGE, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    case(
        "AveragePool", IMAGE, kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1, opset=19
    ),
    case("AveragePool", IMAGE, kernel_shape=[3, 3], strides=[2, 2], pads=[0, 0, 1, 1]),
    case("AveragePool", IMAGE, kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
    case("AveragePool", IMAGE, kernel_shape=[4, 4], strides=[3, 3], auto_pad="SAME_LOWER"),
    case("GlobalAveragePool", IMAGE),
    case("GlobalMaxPool", IMAGE),
    case("GlobalMaxPool", SEQUENCE, mark="1d"),
    case("Dropout", opset=10, ratio=0.3),
    case("Dropout", MATRIX, {"r": np.float32(0.3)}),
    case("Concat", TWO, axis=1),
    case("Reshape", IMAGE, {"t": i64(0, -1, 9)}),
    case("Reshape", IMAGE, {"t": i64(2, 28, 9)}, mark="fixed"),
    case("Reshape", {"x": ((2, 3, 1), F)}, {"t": i64(2, 1, 3)}, allowzero=1),
    case("Flatten", IMAGE),
    case("Flatten", IMAGE, axis=3),
    case("Flatten", MATRIX, axis=-1, opset=13),
    case("Transpose", IMAGE, perm=[0, 2, 3, 1]),
    case("Transpose", mark="reversed"),
    case("Squeeze", {"x": ((2, 1, 3, 1), F)}, opset=11, axes=[1]),
    case("Squeeze", {"x": ((2, 1, 3, 1), F)}, {"a": i64(-1)}),
    case("Squeeze", {"x": ((2, 1, 3, 1), F)}),
    case("Unsqueeze", opset=11, axes=[1, 3]),
    case("Unsqueeze", MATRIX, {"a": i64(-1, 1)}),
    case("Slice", IMAGE, opset=9, starts=[1, -3], ends=[3, 1000], axes=[1, 3]),
    case(
        "Slice", IMAGE, {"s": i64(-1, 1), "e": i64(-(2**63), 6), "a": i64(1, -1), "p": i64(-1, 2)}
    ),
    case("Gather", SEQUENCE, {"i": np.array([[0, -1], [2, 1]])}, axis=1),
    case("Gather", SEQUENCE, {"i": np.array(-2)}, axis=2),
    case("GatherElements", {"x": ((2, 12), F), "i": ((2, 3), "int64")}, axis=1),
    case("Shape"),
    case("Shape", IMAGE, start=1, end=-1),
    case("Size"),
    case("Cast", to=TensorProto.INT64),
    case("Cast", INT, to=TensorProto.DOUBLE),
    case("CastLike", MATRIX, {"c": np.float64([1])}),
    case("Expand", {"x": ((2, 1, 6), F)}, {"t": i64(2, 4, 1)}),
    case("Expand", MATRIX, {"t": i64(3, 1, 1)}),
    case("Tile", MATRIX, {"r": i64(1, 3)}),
    *(case(op, IMAGE, axes=[1, -1]) for op in REDUCTIONS if op != "ReduceSum"),
    *(case(op, IMAGE, {"a": i64(2)}, opset=18, keepdims=0) for op in REDUCTIONS),
    case("ReduceLogSum", IMAGE, axes=[1], mark="positive"),
    case("ReduceSum", IMAGE, {"a": i64(1, 3)}),
    case("ReduceMean", {"x": (("n", 6), F)}, mark="all"),
    *(
        case(op, opset=18, noop_with_empty_axes=1)
        for op in ("ReduceMean", "ReduceL1", "ReduceSumSquare")
    ),
    case("ArgMax", IMAGE, axis=1),
    case("ArgMin", IMAGE, axis=2, keepdims=0),
    case("Pad", IMAGE, {"p": i64(0, 0, 1, 2, 0, 0, 3, -1), "v": np.float32(0.5)}),
    case("Pad", IMAGE, {"p": i64(1, 2, 3, 0), "a": i64(2, 3)}, extra="x,p,,a", opset=18),
    case("Pad", IMAGE, {"p": i64(0, 0, 1, 2, 0, 0, 3, 1)}, mode="reflect"),
    case("Pad", IMAGE, {"p": i64(0, 0, 1, 2, 0, 0, 3, 1)}, mode="edge", mark="edge"),
    case("Pad", IMAGE, opset=10, pads=[0, 1, 0, 0, 0, 0, 2, 1], value=1.0),
    case("Trilu", {"x": ((2, 5, 5), F)}, upper=0),
    case("Trilu", {"x": ((2, 5, 5), F)}, {"k": np.array(1)}),
    case("CumSum", SEQUENCE, {"a": np.array(1)}),
    case("CumSum", SEQUENCE, {"a": np.array(-1)}, exclusive=1, reverse=1),
    case("Einsum", {"x": ((2, 5, 8), F), "z": ((2, 8, 3), F)}, equation="bij,bjk->bik"),
    case("DepthToSpace", {"x": ((2, 8, 3, 5), F)}, blocksize=2),
    case("DepthToSpace", {"x": ((2, 8, 3, 5), F)}, blocksize=2, mode="CRD"),
    case("SpaceToDepth", {"x": ((2, 3, 4, 6), F)}, blocksize=2),
    case("Upsample", IMAGE, opset=7, scales=[1.0, 1.0, 2.0, 3.0]),
    case("Upsample", IMAGE, {"s": np.float32([1, 1, 2, 2])}, opset=9, mode="linear"),
    case("Resize", IMAGE, {"s": np.float32([1, 1, 2, 1.5])}, opset=10),
]
for _modes in ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"):
    for _scales in ([1, 1, 2, 2], [1, 1, 0.6, 1.7]):
        for _mode in ("nearest", "linear"):
            CASES.append(
                case(
                    "Resize",
                    IMAGE,
                    {"s": np.float32(_scales)},
                    extra="x,,s",
                    mark=f"{_modes}-{_scales[2]}-{_mode}",
                    mode=_mode,
                    coordinate_transformation_mode=_modes,
                )
            )
CASES += [
    case("Resize", IMAGE, {"t": i64(2, 4, 14, 5)}, extra="x,,,t", mode="linear"),
    case("Resize", IMAGE, {"t": i64(2, 4, 14, 5)}, extra="x,,,t", nearest_mode="ceil"),
    case("Resize", IMAGE, {"s": np.float32([1, 1, 3, 2])}, extra="x,,s", nearest_mode="floor"),
    case(
        "Resize",
        IMAGE,
        {"s": np.float32([1, 1, 3, 2])},
        extra="x,,s",
        nearest_mode="floor",
        coordinate_transformation_mode="asymmetric",
    ),
    *(
        case(
            "Resize",
            {"x": ((2, 3, 30), F)},
            {"s": np.float32([1, 1, scale])},
            extra="x,,s",
            nearest_mode="floor",
            coordinate_transformation_mode="asymmetric",
            mark=f"single-precision-{scale}",
        )
        for scale in (0.6, 0.7)
    ),
]


def feeds_of(inputs, positive=False):
    torch.manual_seed(1)
    feeds = {}
    for name, (dims, dtype) in inputs.items():
        dims = [2 if isinstance(d, str) else d for d in dims]
        if dtype == "int64":
            feeds[name] = torch.randint(-9, 9, dims)
        elif dtype == "bool":
            feeds[name] = torch.rand(dims) > 0.5
        else:
            found = torch.randn(dims, dtype=getattr(torch, dtype))
            feeds[name] = found.abs() + 0.1 if positive else found * 2
    return feeds


@pytest.mark.slow
@pytest.mark.parametrize(("op", "names", "inputs", "constants", "opset", "attributes"), CASES)
def test_operator(op, names, inputs, constants, opset, attributes, tmp_path, request):
    path = save(
        tmp_path, [node(op, names, "y", "a/b.1", **attributes)], inputs, constants, opset=opset
    )
    feeds = feeds_of(inputs, "positive" in request.node.callspec.id)
    model = compare(path, feeds)
    for made in model.graph.nodes:
        if made.op.startswith("call"):
            assert made.meta["onnx"] == ("a/b.1", op)
    again = copy.deepcopy(model)(*feeds.values())
    assert again.shape == model(*feeds.values()).shape
    if again.requires_grad:
        train_step(model, *feeds.values())


def test_channel_norm_of_even_size(tmp_path):
    """onnxruntime refuses it; ONNX's formula, channel by channel."""
    path = save(tmp_path, [node("LRN", "x", "y", size=4, alpha=0.2, bias=1.5)], IMAGE)
    x = torch.randn(2, 4, 7, 9)
    sums = [(x[:, max(0, c - 1) : c + 3] ** 2).sum(1) for c in range(4)]
    expected = x / (1.5 + 0.2 / 4 * torch.stack(sums, 1)) ** 0.75
    close(import_onnx(path)(x), expected)


def test_every_operator_of_the_table_is_tested():
    elsewhere = {"Constant", "ConstantOfShape", "Range", "Split", *RECURRENT}
    assert elsewhere | {c.values[0] for c in CASES} == set(OPERATORS)


@pytest.mark.parametrize(
    ("constants", "opset", "attributes", "parts"),
    [
        ({}, 11, {"split": [1, 5]}, "y,z"),
        ({"s": i64(2, 3, 1)}, 17, {}, "y,z,w"),
        ({}, 13, {}, "y,z,w"),
        ({}, 18, {"num_outputs": 5}, "y,z,w,v,u"),
    ],
)
def test_split(constants, opset, attributes, parts, tmp_path):
    names = ",".join(["x", *constants])
    inputs = {"x": ((2, 9 if "num_outputs" in attributes else 6), F)}
    path = save(
        tmp_path,
        [node("Split", names, parts, "s", axis=1, **attributes)],
        inputs,
        constants,
        outputs=parts,
        opset=opset,
    )
    compare(path, feeds_of(inputs))


# --- constants, names, parameters -----------------------------------------------------------


def test_constants_are_folded_and_names_kept(tmp_path):
    """Reshape's target is computed from constants and sizes; nothing of it stays."""
    nodes = [
        node("Shape", "x", "s", "/shape"),
        node("Constant", "", "zero", value=numpy_helper.from_array(np.array(1))),
        node("Gather", "s,zero", "c", "/gather"),
        node("Constant", "", "two", value_int=2),
        node("Div", "c,two", "half", "/half"),
        node("Unsqueeze", "half,axes", "h", "/un"),
        node("Concat", "minus,two1,h", "target", "/cat", axis=0),
        node("Reshape", "x,target", "r", "/block/0/reshape"),
        node("Relu", "r", "y", "1st.relu"),
    ]
    nodes[1].ClearField("input")
    nodes[3].ClearField("input")
    constants = {"axes": i64(0), "minus": i64(-1), "two1": i64(2)}
    path = save(tmp_path, nodes, {"x": (("batch", 6), F)}, constants)
    model = compare(path, {"x": torch.randn(3, 6)})
    found = [(n.op, n.name) for n in model.graph.nodes]
    assert found == [
        ("placeholder", "x"),
        ("call_function", "_block_0_reshape"),
        ("call_module", "n1st_relu"),
        ("output", "output"),
    ]
    assert isinstance(model.get_submodule("n1st_relu"), torch.nn.ReLU)
    assert list(model.graph.nodes)[2].meta["onnx"] == ("1st.relu", "Relu")


def test_tied_weights_stay_one_parameter(tmp_path):
    """An embedding whose transpose makes the scores, and its scale, used twice."""
    nodes = [
        node("Gather", "table,x", "e"),
        node("Mul", "e,scale", "m"),
        node("Transpose", "table", "t", perm=[1, 0]),
        node("MatMul", "m,t", "p"),
        node("Mul", "p,one", "q"),
        node("Mul", "m,scale", "z"),
    ]
    constants = {"table": rng(10, 4), "scale": rng(4), "one": np.float32(2)}
    path = save(tmp_path, nodes, {"x": (("n", 3), "int64")}, constants, outputs="q,z")
    model = compare(path, {"x": torch.randint(0, 10, (2, 3))})
    parameters = train_step(model, torch.randint(0, 10, (2, 3)))
    assert set(parameters) == {"table", "scale"}


def test_norms_of_a_new_model_are_not_tied(tmp_path):
    """Exporters write their ones and zeros once; torch's has an Identity for each further one."""
    nodes = [
        node("LayerNormalization", "x,ones,zeros", "a", "n1"),
        node("Identity", "ones", "other"),
        node("LayerNormalization", "a,other,zeros", "y", "n2"),
    ]
    constants = {"ones": np.ones(6, np.float32), "zeros": np.zeros(6, np.float32)}
    model = compare(save(tmp_path, nodes, MATRIX, constants, opset=17), feeds_of(MATRIX))
    names = {f"n{k}.{name}" for k in (1, 2) for name in ("weight", "bias")}
    assert {name for name, _ in model.named_parameters()} == names
    assert len({p.data_ptr() for p in model.parameters()}) == 4


def test_what_becomes_a_parameter(tmp_path):
    """ConstantOfShape and initializers do; Constant nodes, masks and statistics don't."""
    fill = numpy_helper.from_array(np.float32([0.5]))
    nodes = [
        node("ConstantOfShape", "size", "w", value=fill),
        node("Constant", "", "c", value=numpy_helper.from_array(rng(6))),
        node("Add", "x,w", "a"),
        node("Mul", "a,c", "b"),
        node("Add", "b,mask", "d"),
        node("BatchNormalization", "d,s,s2,m,v", "e", "bn"),
        node("Unsqueeze", "u,axes", "u2"),
        node("MatMul", "e,u2", "y", "product"),
    ]
    nodes[1].ClearField("input")
    constants = {
        "size": i64(6),
        "mask": np.float32([0, 0, 0, 0, 0, -3e38]),
        "axes": i64(1),
        "u": rng(6),
        **{k: rng(6, low=0.5) for k in ("s", "s2", "m", "v")},
    }
    model = compare(save(tmp_path, nodes, MATRIX, constants), feeds_of(MATRIX))
    names = {name for name, _ in model.named_parameters()}
    assert names == {"w", "bn.weight", "bn.bias", "product.weight"}
    buffers = {name for name, _ in model.named_buffers()}
    assert {"c", "mask", "bn.running_mean", "bn.running_var"} <= buffers
    before = model.bn.running_mean.clone()
    model.train()(torch.randn(4, 6))
    assert not torch.equal(before, model.bn.running_mean)


def test_dropout_follows_the_mode(tmp_path):
    model = import_onnx(save(tmp_path, [node("Dropout", "x", "y", "drop")], MATRIX))
    x = torch.ones(50, 6)
    assert bool((model(x) == 0).any()), "imported in training mode"
    assert torch.equal(model.eval()(x), x)


# --- batches --------------------------------------------------------------------------------


def attention(batch):
    """A transformer block on token numbers: ``[batch, 6]`` → ``[batch, 6, 11]``, as exported."""
    heads, width, time, words = 2, 8, 6, 11
    each = width // heads
    nodes = [
        node("Gather", "words,ids", "e"),
        node("Slice", "places,zero,six,zero", "p"),
        node("Add", "e,p", "h0"),
        # Layer normalization, spelled out
        node("ReduceMean", "h0", "mean", axes=[-1]),
        node("Sub", "h0,mean", "centred"),
        node("Pow", "centred,two", "squares"),
        node("ReduceMean", "squares", "var", axes=[-1]),
        node("Add", "var,eps", "var2"),
        node("Sqrt", "var2", "std"),
        node("Div", "centred,std", "unit"),
        node("Mul", "unit,g", "scaled"),
        node("Add", "scaled,gb", "h1"),
        node("MatMul", "h1,wqkv", "qkv0"),
        node("Add", "qkv0,bqkv", "qkv"),
        node("Split", "qkv,thirds", "q,k,v", axis=2),
    ]
    for x, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        nodes += [
            node("Reshape", f"{x},split", f"{x}4"),
            node("Transpose", f"{x}4", f"{x}t", perm=order),
        ]
    nodes += [
        node("MatMul", "qt,kt", "s0"),
        node("Div", "s0,root", "s1"),
        node("Where", "mask,s1,low", "s2"),
        node("Softmax", "s2", "a", axis=-1),
        node("MatMul", "a,vt", "o4"),
        node("Transpose", "o4", "ot", perm=[0, 2, 1, 3]),
        node("Reshape", "ot,join", "o"),
        # The output projection, as older exporters write it: on a matrix
        node("Reshape", "o,rows", "o2"),
        node("Gemm", "o2,wo,bo", "o3", transB=1),
        node("Reshape", "o3,join", "o5"),
        node("Add", "h0,o5", "h2"),
        node("LayerNormalization", "h2,g2,gb2", "h3"),
        node("MatMul", "h3,w1", "f"),
        node("Div", "f,root2", "f1"),
        node("Erf", "f1", "f2"),
        node("Add", "f2,one", "f3"),
        node("Mul", "f,f3", "f4"),
        node("Mul", "f4,half", "f5"),
        node("MatMul", "f5,w2", "f6"),
        node("Add", "h2,f6", "h4"),
        node("MatMul", "h4,wout", "y"),
    ]
    weights = {
        "words": rng(words, width, seed=1),
        "places": rng(9, width, seed=2),
        "g": rng(width, seed=3),
        "gb": rng(width, seed=4),
        "wqkv": rng(width, 3 * width, seed=5),
        "bqkv": rng(3 * width, seed=6),
        "wo": rng(width, width, seed=7),
        "bo": rng(width, seed=8),
        "g2": rng(width, seed=9),
        "gb2": rng(width, seed=10),
        "w1": rng(width, 4 * width, seed=11),
        "w2": rng(4 * width, width, seed=12),
        "wout": rng(width, words, seed=13),
    }
    first = batch if isinstance(batch, int) else 0
    settings = {
        "split": i64(first, time, heads, each),
        "join": i64(first, time, width),
        "rows": i64(first * time or -1, width),
        "thirds": i64(width, width, width),
        "zero": i64(0),
        "six": i64(6),
        "mask": np.tril(np.ones((1, 1, time, time), dtype=bool)),
        "low": np.float32(-1e9),
        "two": np.float32(2),
        "eps": np.float32(1e-5),
        "root": np.float32(each**0.5),
        "root2": np.float32(2**0.5),
        "one": np.float32(1),
        "half": np.float32(0.5),
    }
    if not isinstance(batch, int):  # sizes that the model reads from its input
        nodes = [
            node("Shape", "ids", "size"),
            node("Gather", "size,zero0", "n"),
            node("Unsqueeze", "n,zero", "n1"),
            node("Concat", "n1,join_rest", "join", axis=0),
            *nodes,
        ]
        settings |= {"zero0": np.array(0), "join_rest": settings.pop("join")[1:]}
    return nodes, {"ids": ((batch, time), "int64")}, weights, settings


@pytest.mark.parametrize("batch", [1, 4, "batch"])
def test_transformer_block(batch, tmp_path):
    """A batch of 3 equals runs of one sample, whatever batch size the file fixes."""
    nodes, inputs, weights, settings = attention(batch)
    path = save(tmp_path, nodes, inputs, weights | settings)
    torch.manual_seed(0)
    ids = torch.randint(0, 11, (batch if isinstance(batch, int) else 5, 6))
    model = compare(path, {"ids": ids})
    ids = torch.randint(0, 11, (3, 6))
    with torch.no_grad():
        together = model(ids)
        alone = [model(ids[k : k + 1]) for k in range(3)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-5)
    parameters = train_step(model, ids)
    assert sum(p.numel() for p in parameters.values()) == sum(w.size for w in weights.values())
    # A free batch leaves no arithmetic on sizes behind.
    assert not [n for n in model.graph.nodes if n.meta.get("onnx", "")[-1:] == ("Shape",)]


def test_class_token_follows_the_batch(tmp_path):
    """Files for one image hold one class token: each sample gets it."""
    nodes = [
        node("Conv", "x,w", "p", strides=[4, 4]),
        node("Reshape", "p,to", "flat"),
        node("Transpose", "flat", "t", perm=[0, 2, 1]),
        node("Expand", "token,once", "c"),
        node("Concat", "c,t", "all", axis=1),
        node("Gather", "all,zero", "y", axis=1),
        node("Expand", "all,fit", "z"),
    ]
    constants = {
        "w": rng(5, 3, 4, 4),
        "to": i64(1, 5, -1),
        "token": rng(1, 1, 5),
        "once": i64(1, -1, -1).clip(1),
        "zero": np.array(0),
        "fit": i64(1, 5, 5),
    }
    path = save(tmp_path, nodes, {"x": ((1, 3, 8, 8), F)}, constants, outputs="y,z")
    model = compare(path, {"x": torch.randn(1, 3, 8, 8)})
    assert [tuple(t.shape) for t in model(torch.randn(3, 3, 8, 8))] == [(3, 5), (3, 5, 5)]
    assert "token" in train_step(model, torch.randn(3, 3, 8, 8))


def test_sizes_at_run_time(tmp_path):
    """A mask and places made from the input's own sizes: real arithmetic on shapes."""
    nodes = [
        node("Shape", "x", "s"),
        node("Slice", "s,zero,two", "s2"),
        node("ConstantOfShape", "s2", "zeros"),
        node("Unsqueeze", "zeros,last", "z3"),
        node("Gather", "s,zero0", "n"),
        node("Range", "zero0,n,one", "r"),
        node("Cast", "r", "rf", to=TensorProto.FLOAT),
        node("Reshape", "rf,column", "r3"),
        node("Add", "x,z3", "a"),
        node("Add", "a,r3", "b"),
        node("Mul", "s,doubling", "sizes"),
        node("Expand", "ones,sizes", "wide"),
        node("ReduceMean", "wide", "m", axes=[2]),
        node("Mul", "m,w", "m2"),
    ]
    constants = {
        "zero": i64(0),
        "two": i64(2),
        "last": i64(2),
        "zero0": np.array(0),
        "one": np.array(1),
        "column": i64(-1, 1, 1),
        "doubling": i64(1, 1, 2),
        "ones": np.ones((1, 1, 1), np.float32),
        "w": rng(1, 4),
    }
    path = save(tmp_path, nodes, {"x": (("n", 4, "width"), F)}, constants, outputs="b,m2")
    model = compare(path, {"x": torch.randn(3, 4, 5)}, sizes={"width": 5})
    assert [tuple(t.shape) for t in model(torch.randn(7, 4, 5))] == [(7, 4, 5), (7, 4, 4)]


@pytest.mark.parametrize(
    ("shape", "axis", "target", "batch", "expected"),
    [
        ((1, 512, 7, 7), BatchAxis(0), (1, 25088), 1, BatchAxis(0)),
        ((4, 512, 7, 7), BatchAxis(0), (4, 25088), 4, BatchAxis(0)),
        ((1, 12, 6, 64), BatchAxis(0), (12, 6, 64), 1, BatchAxis(0, 1, 12)),
        ((12, 6, 64), BatchAxis(0, 1, 12), (1, 12, 6, 64), 1, BatchAxis(0)),
        ((6, 1, 64), BatchAxis(1), (6, 1, 2, 32), 1, BatchAxis(1)),
        ((6, 1, 64), BatchAxis(1), (6, 64), 1, None),  # [6 * m, 64] or [6, m * 64]
        ((6, 1, 64), BatchAxis(1), (1, 6, 64), 1, None),  # a transposition for one sample
        ((6, 4, 64), BatchAxis(1), (24, 64), 4, BatchAxis(0, 6, 1)),
        ((24, 64), BatchAxis(0, 6, 1), (6, 4, 64), 4, BatchAxis(1)),
        ((4, 6), BatchAxis(0), (2, 12), 4, None),  # takes the batch apart
    ],
)
def test_where_the_batch_goes(shape, axis, target, batch, expected):
    assert follow_batch(shape, axis, target, batch) == expected


def test_where_the_batch_is():
    assert find_batch((1, 3), (11, 3), (1, 11), ()) == BatchAxis(0)
    assert find_batch((12, 3), (132, 3), (1, 11), ()) is None
    assert find_batch((12, 3), (132, 3), (1, 11), [BatchAxis(2, 1, 12)]) == BatchAxis(0, 1, 12)
    assert find_batch((1, 1), (11, 11), (1, 11), ()) is None


# --- errors -----------------------------------------------------------------------------------


def refused(path, kind, *words, **settings):
    with pytest.raises(kind) as caught:
        import_onnx(path, **settings)
    text = str(caught.value)
    assert "\n" not in text
    assert str(path) in text
    for word in words:
        assert word in text, text


@pytest.mark.parametrize(
    ("nodes", "inputs", "constants", "words"),
    [
        ([node("Foo", "x", "y", "odd")], MATRIX, {}, ["'odd'", "'Foo'", "isn't known"]),
        (
            [node("Relu", "x", "y", "odd", domain="com.other")],
            MATRIX,
            {},
            ["'Relu' (domain com.other)"],
        ),
        ([node("Relu", "x", "y", "a", slope=2)], MATRIX, {}, ["'a'", "'slope' isn't known"]),
        ([node("Relu", "q", "y", "a")], MATRIX, {}, ["'q' isn't made"]),
        ([node("Relu", "x", "q", "a")], MATRIX, {}, ["no node makes the output 'y'"]),
        ([node("Reshape", "x,t", "y", "a")], MATRIX, {"t": i64(5, 5)}, ["doesn't fit"]),
        ([node("Reshape", "x,t", "y", "a")], MATRIX, {"t": i64(3, 4)}, ["where the batch is"]),
        ([node("Reshape", "x,z", "y", "a")], {**MATRIX, "z": ((2,), "int64")}, {}, ["on data"]),
        ([node("Gather", "x,i", "y", "a")], MATRIX, {"i": np.array(0)}, ["mixes or drops"]),
        ([node("Softmax", "x", "y", "a", axis=0)], MATRIX, {}, ["mixes samples"]),
        ([node("Add", "x,c", "y", "a")], MATRIX, {"c": rng(2, 6)}, ["a batch of 2 only"]),
        ([node("Add", "x,c", "y", "a")], MATRIX, {"c": rng(5)}, ["torch can't compute it"]),
        ([node("MaxPool", "x", "y,z", "a", kernel_shape=[2])], SEQUENCE, {}, ["output 2"]),
        ([node("Resize", "x,,s", "y", "a", mode="cubic")], IMAGE, {"s": rng(4)}, ["'cubic'"]),
        ([node("AveragePool", "x", "y", "a")], IMAGE, {}, ["can't be imported"]),
        ([node("Relu", "x", "y")], {"x": ((), F)}, {}, ["'x' has no dimensions"]),
        ([node("Relu", "x", "y")], {"x": (None, F)}, {}, ["'x' has no shape"]),
        (
            [node("Relu", "x", "y")],
            {"x": ((1, None), F)},
            {},
            ["2", "'x'", "give a size for it", "--input x=16"],
        ),
        ([node("Relu", "x", "y")], {"x": ((1, "time"), F)}, {}, ["give a size for 'time'"]),
        (
            [node("Add", "x,z", "y")],
            {"x": ((1, 2), F), "z": ((2, 2), F)},
            {},
            ["1 for 'x' and 2 for 'z'"],
        ),
    ],
)
def test_refusals_name_the_culprit(nodes, inputs, constants, words, tmp_path):
    outputs = "y,z" if "output 2" in words else "y"
    refused(save(tmp_path, nodes, inputs, constants, outputs), TargetError, *words)


def test_sizes_must_belong_to_free_dimensions(tmp_path):
    path = save(tmp_path, [node("Relu", "x", "y")], {"x": (("n", "time"), F)})
    assert read_file(path, {"time": 4}).inputs[0].shape == (4,)
    refused(path, TargetError, "'width'", "time", sizes={"width": 4})
    refused(path, TargetError, "'n'", "batch", sizes={"n": 4, "time": 4})
    refused(path, TargetError, "at least 1", sizes={"time": 0})


def test_graphs_inside_nodes_are_refused(tmp_path):
    inner = helper.make_graph(
        [node("Relu", "x", "o")], "inner", [], [helper.make_empty_tensor_value_info("o")]
    )
    choice = node("If", "c", "y", "choice", then_branch=inner, else_branch=inner)
    path = save(tmp_path, [choice], MATRIX, {"c": np.array(True)})
    refused(path, TargetError, "'choice'", "'If'", "control flow")


def test_broken_files(tmp_path):
    refused(tmp_path / "none.onnx", FileError, "no such file")
    (tmp_path / "text.onnx").write_text("this is not a model\n" * 9)
    refused(tmp_path / "text.onnx", FileError, "no ONNX file")
    (tmp_path / "empty.onnx").write_bytes(b"")
    refused(tmp_path / "empty.onnx", FileError, "no ONNX file")
    path = save(tmp_path, [node("Add", "x,w", "y")], MATRIX, {"w": rng(6)})
    path.write_bytes(path.read_bytes()[:-20])
    refused(path, FileError, "no ONNX file")


def test_broken_parts_of_files(tmp_path):
    def broken(change, *words):
        path = save(tmp_path, [node("Add", "x,w", "y", "a")], MATRIX, {"w": rng(6)})
        model = onnx.load(path)
        change(model)
        onnx.save(model, path)
        refused(path, FileError, *words)

    def bad_text(model):
        model.graph.node[0].attribute.append(helper.make_attribute("mode", b"\xff\xfe"))

    def reference_outside(model):
        model.graph.node[0].attribute.add(name="mode", ref_attr_name="other")

    def bad_type(model):
        model.graph.initializer[0].data_type = 99

    def recursion(model):
        sets = [helper.make_opsetid("", 17), helper.make_opsetid("d", 1)]
        inner = helper.make_node("F", ["p"], ["q"], domain="d")
        model.functions.append(helper.make_function("d", "F", ["p"], ["q"], [inner], sets))
        model.graph.node.append(helper.make_node("F", ["x"], ["z"], domain="d"))
        model.opset_import.append(helper.make_opsetid("d", 1))

    broken(bad_text, "node 'a' is a 'Add': its attribute 'mode' is broken", "utf-8")
    broken(reference_outside, "its attribute 'mode' is broken")
    broken(bad_type, "the constant 'w' is broken: ONNX has no type 99")
    broken(recursion, "its functions can't be put in where they are called", "d::F")


def test_external_data(tmp_path):
    path = save(tmp_path, [node("MatMul", "x,w", "y")], MATRIX, {"w": rng(6, 50)})
    compare(path, feeds_of(MATRIX))
    onnx.save(
        onnx.load(path),
        path,
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    compare(path, feeds_of(MATRIX))
    (tmp_path / "weights.bin").unlink()
    refused(path, FileError, "external data", "weights.bin")


def test_without_the_library_the_message_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnx", None)
    words = ("needs the library onnx", "pip install -e '.[onnx]'")
    refused(tmp_path / "any.onnx", TargetError, *words)
