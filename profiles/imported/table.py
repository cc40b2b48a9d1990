"""A table of costs (CSV), for those who have only numbers: a row for each layer, or one for each
layer and size of micro-batches.

Columns: ``layer``, ``forward``, ``backward``, ``parameter bytes``, ``activation bytes`` and, if
they are known, ``micro-batch``, ``saved bytes``, ``workspace bytes`` and ``update``. A unit stands
in the header, ``forward (ms)``, or in the cell, ``1.5 ms``; without one, times are seconds and the
others bytes. A second table may list the edges: ``from``, ``to`` and, where not all of an
activation is sent, ``bytes``; rows may then stand in any sequence. Without it, each layer feeds the
next.
"""

from __future__ import annotations

import csv
import io
import re
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import FileError, TargetError, UserError
from ..files import read_json
from ..profile import Profile
from ..units import parse_bytes, parse_seconds
from .cost_graph import (
    MAX_BYTES,
    Cost,
    Sizes,
    Tensor,
    choose_sizes,
    costs_of,
    make_profile,
    readable,
    topological_order,
)

REQUIRED = ("layer", "forward", "backward", "parameter bytes", "activation bytes")
EXPECTED = f"expected a table (CSV) with the columns {', '.join(REQUIRED)}"
_MORE = "and, where known, micro-batch, saved bytes, workspace bytes, update"
_HEADER = re.compile(
    r"(layer|forward|backward|parameter|activation|saved|workspace|update|micro[ -]?batch)"
    r"(?:e?s)?(?: time)?(?: bytes)?(?: size)?"
    r"(?: ?\(? ?(s|ms|us|µs|ns|[kmgt]?i?b) ?\)?)?"
)
MICRO_BATCH = "micro-batch"
_ROUNDED = 0.02
"""How far bytes may be off by rounding."""


@dataclass(frozen=True)
class TableRow:
    """A layer at one size. Times in seconds; None where the table doesn't say.

    Attributes:
        micro_batch: samples in the micro-batch that the row is for.
        update_s: of the optimizer's step on the layer's parameters.
        workspace_bytes: what it needs while it computes, besides what it keeps.
    """

    name: str
    forward_s: float
    backward_s: float
    parameter_bytes: int
    activation_bytes: int
    saved_bytes: int | None = None
    micro_batch: int | None = None
    update_s: float | None = None
    workspace_bytes: int | None = None


@dataclass(frozen=True)
class TableEdge:
    """From a layer to one that uses its activation, by their positions; None: all of it."""

    source: int
    target: int
    nbytes: int | None


def import_table(
    where: str,
    text: str,
    batch_size: int | None,
    micro_batch_sizes: Sequence[int] | None,
    edges_path: str | Path | None = None,
) -> Profile:
    """A profile from the table's text; arguments and errors as of `reader.import_profile`."""
    rows = read_rows(where, text)
    known = [row.micro_batch for row in rows if row.micro_batch is not None]
    if batch_size is None and not known:
        raise TargetError(
            f"{where}: a table doesn't say the batch size its numbers are for; give it with "
            "--batch-size, or a column micro-batch"
        )
    sizes = choose_sizes(where, known or batch_size or 0, batch_size, micro_batch_sizes)
    names = list(dict.fromkeys(row.name for row in rows))
    if edges_path is None:
        chain = [TableEdge(k, k + 1, None) for k in range(len(names) - 1)]
        feeds = ["Each layer feeds the next, and no other."]
        return profile_of(where, "table", rows, chain, sizes, feeds)
    edges = read_edges(str(edges_path), names)
    return profile_of(where, "table", rows, edges, sizes, edges_at=str(edges_path))


def profile_of(
    where: str,
    front_end: str,
    rows: Sequence[TableRow],
    edges: Sequence[TableEdge],
    sizes: Sizes,
    assumptions: Sequence[str] = (),
    *,
    edges_at: str | None = None,
) -> Profile:
    """A profile of rows in any sequence, whose edges form no cycle.

    Args:
        where: what messages name; edges_at: where the edges come from, if from elsewhere.
        rows: for each layer one, or one for each size of its own.
        edges: between layers, counted as they first come.
        assumptions: more sentences about what was taken to be so.

    Raises FileError: edges that form a cycle, costs beyond what a profile can hold, or rows of one
    layer that contradict each other.
    """
    import networkx as nx

    by_name: dict[str, list[TableRow]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    layers = [_layer(where, front_end, of, sizes) for of in by_name.values()]
    costs, activations = zip(*layers, strict=True)
    names = list(by_name)
    graph = nx.DiGraph()
    for k, name in enumerate(names):
        graph.add_node(k, name=name)
    graph.add_edges_from((edge.source, edge.target) for edge in edges)
    order = topological_order(edges_at or where, graph, int)
    results = [k for k in order if not graph.succ[k]]
    uses = [
        (names[e.source], names[e.target], _part(activations[e.source], e.nbytes)) for e in edges
    ]
    uses += [(names[k], "output", activations[k]) for k in results]
    return make_profile(
        where,
        front_end,
        sizes,
        [costs[k] for k in order],
        uses,
        storage_bytes={whole.storage: whole.nbytes for whole in activations},
        assumptions=[
            *_assumptions(front_end, costs, sizes, sum(map(_keeps_own, by_name.values()))),
            *assumptions,
            _result(names, results),
        ],
    )


def _part(whole: Tensor, nbytes: int | None) -> Tensor:
    """So much of an activation; None: all of it."""
    if nbytes is None or nbytes == whole.nbytes:
        return whole
    fixed = whole.fixed_bytes * nbytes / whole.nbytes if whole.nbytes else 0.0
    return replace(whole, name=f"{whole.name}[{nbytes}]", nbytes=nbytes, fixed_bytes=fixed)


def _keeps_own(rows: Sequence[TableRow]) -> bool:
    """Whether a layer was taken to keep its own activation."""
    return any(row.saved_bytes is None for row in rows)


def _layer(where: str, kind: str, rows: Sequence[TableRow], sizes: Sizes) -> tuple[Cost, Tensor]:
    """A layer, and its activation. Raises FileError where its rows contradict each other."""
    rows = sorted(rows, key=lambda row: row.micro_batch or 0)
    first, name = rows[0], rows[0].name
    for row in rows:
        if row.parameter_bytes != first.parameter_bytes:
            raise FileError(
                f"{where}: layer {name!r}: has {first.parameter_bytes} and {row.parameter_bytes} "
                "parameter bytes; they are the same at all micro-batch sizes"
            )
    activation = _activation(where, rows, sizes.given)
    updates = [row.update_s for row in rows if row.update_s is not None]
    measured = [
        costs_of(
            row.micro_batch or sizes.given,
            row.forward_s,
            row.backward_s,
            row.activation_bytes if row.saved_bytes is None else row.saved_bytes,
            row.workspace_bytes or 0,
        )
        for row in rows
    ]
    cost = Cost(
        name=name,
        kind=kind,
        measured=measured,
        parameter_bytes=first.parameter_bytes,
        saves=(name,) if _keeps_own(rows) and activation.nbytes else (),
        update_s=statistics.median(updates) if updates else None,
    )
    return cost, activation


def _activation(where: str, rows: Sequence[TableRow], given: int) -> Tensor:
    """A layer's activation at a size. Raises FileError for bytes that aren't a fixed part and so
    much for each sample."""
    sizes, found = [row.micro_batch or given for row in rows], [r.activation_bytes for r in rows]
    fixed = 0.0
    if len(rows) > 1:
        slope = (found[-1] - found[0]) / (sizes[-1] - sizes[0])
        fixed = max(found[0] - slope * sizes[0], 0.0)
        # What is rounded to its last digit, as 4MB, is off by a little.
        fixed = 0.0 if fixed <= _ROUNDED * found[0] else fixed
    per_sample = (found[-1] - fixed) / sizes[-1]
    for size, nbytes in zip(sizes, found, strict=True):
        if abs(fixed + per_sample * size - nbytes) > _ROUNDED * nbytes:
            raise FileError(
                f"{where}: layer {rows[0].name!r}: activation bytes of micro-batches of {size} "
                f"don't fit those of {sizes[-1]}: what one sample adds is the same at all sizes"
            )
    name, nbytes = rows[0].name, round(fixed + per_sample * given)
    return Tensor(name, name, nbytes, needs_grad=True, fixed_bytes=fixed)


def _assumptions(
    front_end: str, costs: Sequence[Cost], sizes: Sizes, keep_own: int
) -> Iterator[str]:
    """`keep_own`: so many layers were taken to keep their own activations."""
    whose = "table" if front_end == "table" else "graph"
    if len(sizes.measured) == 1:
        yield f"The {whose}'s times and activations were taken to be for {sizes.given} samples."
    for cost in costs:
        own = [m.micro_batch for m in cost.measured]
        missing = [m for m in sizes.measured if m in sizes.micro_batches and m not in own]
        if missing:
            how = "in proportion to" if len(own) == 1 else "on the line through"
            yield (
                f"{cost.name} has no row for {', '.join(map(str, missing))} samples: its "
                f"costs were taken to be {how} those for {', '.join(map(str, own))}."
            )
    if keep_own:
        every = keep_own == len(costs)
        which = "Each layer" if every else f"{keep_own} layers without saved bytes"
        keeps = "keeps its" if every else "keep their"
        yield f"{which} {keeps} own activation for the backward, and nothing else."
    yield "Gradients are as large as the tensors they belong to."


def _result(names: Sequence[str], results: Sequence[int]) -> str:
    last = ", ".join(names[k] for k in results[:4])
    more = f" and {len(results) - 4} more" if len(results) > 4 else ""
    return f"The model's result was taken to be that of {last}{more}."


# The tables as they are written -------------------------------------------------------------------


def read_rows(where: str, text: str) -> list[TableRow]:
    """The layers. Raises FileError naming the line and the column."""
    lines = _records(where, text)
    at, header = next(lines, (where, []))
    columns: dict[str, tuple[int, str]] = {}
    for k, cell in enumerate(header):
        match = _HEADER.fullmatch(re.sub(r"[_\s]+", " ", cell.strip().lower()))
        if match is None:
            raise FileError(f"{at}: column {readable(cell)!r}: isn't known; {EXPECTED} {_MORE}")
        name = MICRO_BATCH if match[1].startswith("micro") else match[1]
        if name in columns:
            raise FileError(f"{at}: column {readable(cell)!r}: stands there twice")
        columns[name] = (k, match[2] or "")
    for name in REQUIRED:
        if name.split()[0] not in columns:
            raise FileError(f"{at}: has no column {name!r}; {EXPECTED}")
    rows: list[TableRow] = []
    taken: set[tuple[str, int | None]] = set()
    for at, cells in lines:
        row = _row(at, cells, columns)
        if (row.name, row.micro_batch) in taken:
            what = "has a row already; names must be unique"
            if row.micro_batch is not None:
                what = f"has a row for micro-batches of {row.micro_batch} already"
            raise FileError(f"{at}: layer {row.name!r} {what}")
        taken.add((row.name, row.micro_batch))
        rows.append(row)
    if not rows:
        raise FileError(f"{where}: has no layer; {EXPECTED}")
    return rows


def _row(at: str, cells: Sequence[str], columns: dict[str, tuple[int, str]]) -> TableRow:
    def cell(column: str) -> str:
        k, unit = columns[column]
        text = cells[k].strip()
        return text + unit if re.fullmatch(r"[\d.eE+-]+", text) else text

    def seconds(column: str) -> float:
        return parse_seconds(cell(column), column)

    def count(column: str) -> int:
        return parse_bytes(cell(column), column, most=MAX_BYTES)

    name = " ".join(cells[columns["layer"][0]].split())
    if not name or name == "output":
        raise FileError(f"{at}: layer: {name!r} can't be a layer's name")

    def there(column: str) -> bool:
        return column in columns and cells[columns[column][0]].strip() != ""

    with _at(at):
        return TableRow(
            name=readable(name),
            forward_s=seconds("forward"),
            backward_s=seconds("backward"),
            parameter_bytes=count("parameter"),
            activation_bytes=count("activation"),
            saved_bytes=count("saved") if there("saved") else None,
            micro_batch=_size(cell(MICRO_BATCH)) if MICRO_BATCH in columns else None,
            update_s=seconds("update") if there("update") else None,
            workspace_bytes=count("workspace") if there("workspace") else None,
        )


def _size(text: str) -> int:
    if not text.isdecimal() or not text.isascii() or not 0 < len(text) < 10 or not int(text):
        raise UserError(f"{MICRO_BATCH}: {readable(text)!r}: give a whole number from 1")
    return int(text)


def read_edges(where: str, names: Sequence[str]) -> list[TableEdge]:
    """The edges between layers of these names. Raises FileError naming the line."""
    text = read_text(where, "expected a table (CSV) of edges")
    position = {name: k for k, name in enumerate(names)}
    lines = _records(where, text)
    at, header = next(lines, (where, []))
    columns = [cell.strip().lower() for cell in header]
    if columns not in (["from", "to"], ["from", "to", "bytes"]):
        raise FileError(f"{at}: expected the columns from, to and, if need be, bytes")
    found: dict[tuple[int, int], TableEdge] = {}
    for at, cells in lines:
        ends = [readable(" ".join(cell.split())) for cell in cells[:2]]
        for name in ends:
            if name not in position:
                raise FileError(f"{at}: no layer is named {name!r}")
        source, target = (position[name] for name in ends)
        if (source, target) in found:
            raise FileError(f"{at}: {ends[0]} to {ends[1]} stands there twice")
        text = cells[2].strip() if len(cells) > 2 else ""
        with _at(at):
            nbytes = parse_bytes(text, most=MAX_BYTES) if text else None
        found[source, target] = TableEdge(source, target, nbytes)
    return list(found.values())


def _records(where: str, text: str) -> Iterator[tuple[str, list[str]]]:
    """Where each line that isn't empty stands, and its cells, as many as the first has. Raises
    FileError."""
    width = 0
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""))
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                at, width = f"{where}:{reader.line_num}", width or len(cells)
                if len(cells) != width:
                    raise FileError(f"{at}: has {len(cells)} cells; the header has {width}")
                yield at, cells
    except csv.Error as error:
        raise FileError(f"{where}:{reader.line_num}: isn't CSV: {error}") from None


def read_text(where: str, expected: str) -> str:
    """A text file of moderate size. Raises FileError saying what was expected."""
    try:
        return read_json(Path(where), expected).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"{where}: isn't text: {error}; {expected}") from None


@contextmanager
def _at(line: str) -> Iterator[None]:
    """What is wrong with an amount is said with the line where it stands."""
    try:
        yield
    except UserError as error:
        raise FileError(f"{line}: {error}") from None
