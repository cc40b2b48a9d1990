"""CUDA graphs: kernels that are recorded once and started again by one call; and what can't be.

While a stream is captured nothing is computed. Whatever the host does then (reads a number, draws a
random one, copies from its own memory) stays as it was at that time in every replay, without a
word. So a pass runs once as ever before it is captured, under `Capturable`, which sees every
operation and refuses those.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..tasks.hooks import describe_error
from ..tracing.pieces import tensors_in
from ..tracing.random_states import same_states, states
from ..tracing.remembered import changes, marks_of_places
from .process_settings import without_collections

_ATEN = torch.ops.aten
_BY_MASK = (_ATEN.index, _ATEN.index_put, _ATEN.index_put_, _ATEN._index_put_impl_)
"""With masks they look at how much is in these; with numbers they don't."""

_MOST = 200
"""Characters of what torch says, which may be pages."""

_BY_NUMBERS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

_KEEP_SEEDS = ("flash_attention", "efficient_attention", "cudnn_attention")
"""In their names. What they drew with is kept on the host, and on the device while it is captured
(PyTorch's attention.cu, on the device of seed and offset)."""


class CannotCaptureError(Exception):
    """What a pass does can't be captured; it says what. Nothing is wrong with the pass."""


def reason(error: BaseException) -> str:
    """Why something couldn't be captured, in one short line."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, CannotCaptureError):
        cause = cause.__cause__
    said = describe_error(error) if cause is None else str(cause)
    return shorten(said, _MOST, placeholder=" …")


class Capturable(TorchDispatchMode):
    """Lets operations run on a device, and raises CannotCaptureError for those that a graph can't
    have."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`."""
        given, name = tensors_in((args, dict(kwargs or {}))), str(func)
        self._look(name, given)
        if func.overloadpacket in _BY_MASK:
            if any(t.dtype in (torch.bool, torch.uint8) for t in given[1:]):
                raise CannotCaptureError(f"{name} takes as much as a mask says")
        elif func is _ATEN.lift_fresh.default:
            raise CannotCaptureError("a tensor is made of numbers of the host (torch.tensor)")
        elif any(tag in func.tags for tag in _BY_NUMBERS):
            raise CannotCaptureError(f"{name} has to know numbers of a tensor")
        # A mode of functions has seen it already.
        with torch._C.DisableTorchFunction():
            made = func(*args, **(kwargs or {}))
        # What the host makes of nothing is looked at where it goes.
        if given or torch.Tag.nondeterministic_seeded in func.tags:
            self._look(name, tensors_in(made))
        return made

    def _look(self, name: str, tensors: list[Tensor]) -> None:
        seeds = name.startswith("aten.") and any(part in name for part in _KEEP_SEEDS)
        # What is kept for a backward is detached, which computes nothing.
        seeds = seeds or name == "aten.detach.default"
        for t in tensors:
            if t.layout != torch.strided:
                raise CannotCaptureError(f"{name} has a sparse tensor")
            if t.device.type != self._device.type and not (seeds and not t.is_floating_point()):
                raise CannotCaptureError(f"{name} has a tensor of the {t.device.type}")


@contextmanager
def nothing_left_on_host(
    module: nn.Module, functions: Sequence[Callable[..., Any]] = ()
) -> Iterator[None]:
    """Raises CannotCaptureError where what is run in the context leaves something on the host:
    attributes of modules, other buffers, numbers in whatever these and `functions` can reach,
    states of Python's or NumPy's random numbers."""

    def made() -> dict[tuple[int, str], object]:
        inside = {(id(m), n): value for m in modules for n, value in vars(m).items()}
        return {**inside, **{(id(m), n): b for m in modules for n, b in m._buffers.items()}}

    modules = list(module.modules())
    before, left, drawn = made(), marks_of_places(module, functions), states()
    yield
    after = made()
    changed = {key for key in before.keys() | after.keys() if before.get(key) is not after.get(key)}
    if changed:
        names = ", ".join(sorted({name for _, name in changed}))
        raise CannotCaptureError(f"a forward gives its modules other attributes ({names})")
    if found := changes(left, marks_of_places(module, functions)):
        names = ", ".join(sorted(found))
        raise CannotCaptureError(f"a forward or the loss counts or keeps something ({names})")
    if not same_states((drawn[0], *states()[1:]), drawn):
        raise CannotCaptureError("Python's or NumPy's random numbers are drawn")


class Capture:
    """Captures what is handed to a GPU.

    All of it goes to one stream, that of the pass which runs before: libraries keep their
    workspaces by stream. Other threads may use the GPU meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def pool(self) -> Any:
        """Memory for graphs that are replayed in the sequence in which they are captured: what one
        needs no more, the next ones use."""
        return torch.cuda.graph_pool_handle()

    def held_bytes(self) -> int:
        """What all of the process has of the device; what isn't used is given back first."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)

    def free_bytes(self) -> int:
        """What all of the device's processes have left of it."""
        return torch.cuda.mem_get_info(self._device)[0]

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Run something as it will be captured; later draws are as if it hadn't drawn. Raises
        CannotCaptureError."""
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices), self.aside(), Capturable(self._device):
            yield

    @contextmanager
    def of(self, pool: Any) -> Iterator[torch.cuda.CUDAGraph]:
        """Capture what is run in the context. Raises whatever can't be captured raises; then the
        device is as it was."""
        graph = torch.cuda.CUDAGraph()
        # Of another stream's memory, what is collected here might be asked for in vain.
        with without_collections(), self.aside(), warnings.catch_warnings():
            # A stage or a layer may do nothing but look at its input in another way.
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            try:
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                with Capturable(self._device):
                    yield graph
                graph.capture_end()
            except BaseException:
                self._end(graph, pool)
                raise

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run something on the stream that is captured."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                # What failed has handed in work all the same; what it wrote to is put back now.
                current.wait_stream(self._stream)

    def _end(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """End a capture that failed. One that CUDA broke off may go on for torch's allocator (its
        #180395), and for its generator, which draws nothing then until another one ends (#171265).
        """
        with suppress(RuntimeError):
            graph.capture_end()
            return
        # It is refused where torch has done it.
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(self._device.index or 0, pool)
            torch._C._cuda_releasePool(self._device.index or 0, pool)
        with suppress(RuntimeError):
            nothing = torch.cuda.CUDAGraph()
            nothing.capture_begin(capture_error_mode="thread_local")
            nothing.capture_end()


def capture_on(device: torch.device) -> Capture | None:
    """What captures on a device; None: there are no graphs."""
    return Capture(device) if device.type == "cuda" else None
