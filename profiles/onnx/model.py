"""An ONNX file as a torch.fx graph that can be trained.

Layer-like operators become modules, the others function calls; every fx node says in
``meta["onnx"]`` which ONNX node it was made for: ``(name, op_type)``. Float constants are
parameters where they are data of an operator; those of `Constant` nodes where they are an
operator's weights, or the file has no others (`weights_in_nodes`).

The first dimension of every input is the batch. Files often fix it, mostly to 1: the imported
graph takes any batch size all the same. Reshapes to fixed sizes follow the batch (`follow_batch`),
an Expand to the file's batch size leaves the batch as it is, a Concat repeats what the file has
for its one sample; a node that can't follow, or that would mix samples, is refused with its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import fx

from ..errors import TargetError
from ..tracing.front_ends import OWN_FRONT_END
from .builder import GraphBuilder, can_train
from .file import OnnxFile, open_inputs, read_file, sizes_in
from .operators import handler_of

ONNX = "onnx"
"""The front end for these graphs."""


class OnnxModel:
    """What makes the model of an ONNX file, as a task's `model`.

    Training must not start from what profiling left behind: each call reads the file again.
    """

    def __init__(self, path: str, inputs: Mapping[str, Sequence[int]] | None) -> None:
        # Wherever a task goes to by then.
        self.path, self.inputs = Path(path).absolute(), inputs

    def __call__(self) -> fx.GraphModule:
        """A new one. Raises FileError and TargetError as `import_onnx` does."""
        if self.inputs is None:
            return import_onnx(self.path)
        own = open_inputs(self.path)
        if self.inputs.keys() != own.keys():
            raise TargetError(
                f"{self.path}: inputs: give the shape of one sample for each of "
                f"{', '.join(map(repr, own))}, not for {', '.join(map(repr, self.inputs))}"
            )
        shapes = [tuple(self.inputs[name]) for name in own]
        return import_onnx(self.path, sizes=sizes_in(self.path, own, shapes))

    def __repr__(self) -> str:
        return f"timeprest.onnx({str(self.path)!r})"


def onnx(path: str | Path, *, inputs: Mapping[str, Sequence[int]] | None = None) -> OnnxModel:
    """What makes the model of an ONNX file: ``model = timeprest.onnx("file.onnx")`` in a task.

    Called, it gives a new torch module with the file's weights, which takes a tensor of any number
    of samples for each of the file's inputs, and gives one for each output.

    Args:
        path: the file; beside it lies its external data, if it has some.
        inputs: where the file leaves sizes open besides the batch, the shape of one sample of each
            input, by its name: ``{"ids": (64,)}``.
    """
    return OnnxModel(str(path), inputs)


def import_onnx(path: str | Path, *, sizes: Mapping[str, int] | None = None) -> fx.GraphModule:
    """Import an ONNX file (with its external data), in training mode.

    The module takes tensors ``[m, *input.shape]`` for any batch size m, and gives one tensor,
    or a tuple of them where the file has several outputs.

    Arguments and errors as of `read_file`; TargetError, too, where the file holds an operator or a
    setting of one that can't be imported.
    """
    file = read_file(path, sizes)
    handlers = [handler_of(node, file.path) for node in file.nodes]
    builder = GraphBuilder(file, weights_in_nodes(file))
    for node, handler in zip(file.nodes, handlers, strict=True):
        builder.add(node, handler)
    found = builder.finish()
    found.meta[OWN_FRONT_END] = ONNX
    return found


_WEIGHTS = {
    "BatchNormalization": (1, 2),
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "GRU": (1, 2, 3),
    "Gather": (0,),
    "Gemm": (1, 2),
    "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "LSTM": (1, 2, 3, 7),
    "LayerNormalization": (1, 2),
    "MatMul": (0, 1),
    "PRelu": (1,),
    "RNN": (1, 2, 3),
}
"""Inputs of operators that are weights, by position."""

_PASSED_ON = frozenset(
    ("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
)
"""Operators that leave a weight one."""


def weights_in_nodes(file: OnnxFile) -> frozenset[str]:
    """Outputs of `Constant` nodes that are weights.

    Some exporters write all weights so, others what is never trained. Where initializers hold
    weights, only what operators take as theirs are some; else all that initializers could be.
    """
    made = frozenset(x for node in file.nodes if node.op_type == "Constant" for x in node.outputs)
    if not any(can_train(tensor) for tensor in file.initializers.values()):
        return made
    taken = set[str]()
    for node in reversed(file.nodes):
        places = _WEIGHTS.get(node.op_type, ())
        if node.op_type in _PASSED_ON and taken.intersection(node.outputs):
            places = (0,)
        taken.update(node.inputs[k] for k in places if k < len(node.inputs))
    return made & taken
