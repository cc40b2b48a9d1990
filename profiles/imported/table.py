"""A table of costs (CSV), for those who have only numbers: a row for each layer.

Columns: ``layer``, ``forward``, ``backward``, ``parameter bytes``, ``activation bytes`` and, if
they are known, ``saved bytes``. A unit stands in the header, ``forward (ms)``, or in the cell,
``1.5 ms``; without one, times are seconds and the others bytes. A second table may list the edges:
``from``, ``to`` and, where not all of an activation is sent, ``bytes``; rows may then stand in any
sequence. Without it, each layer feeds the next.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
_HEADER = re.compile(
    r"(layer|forward|backward|parameter|activation|saved)s?(?: time)?(?: bytes)?"
    r"(?: ?\(? ?(s|ms|us|µs|ns|[kmgt]?i?b) ?\)?)?"
)
_EDGE_COLUMNS = ("from", "to")


@dataclass(frozen=True)
class TableRow:
    """A layer. Times in seconds; `saved_bytes` is None where the table doesn't say."""

    name: str
    forward_s: float
    backward_s: float
    parameter_bytes: int
    activation_bytes: int
    saved_bytes: int | None


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
    if batch_size is None:
        raise TargetError(
            f"{where}: a table doesn't say the batch size its numbers are for; give it with "
            "--batch-size"
        )
    sizes = choose_sizes(where, batch_size, batch_size, micro_batch_sizes)
    if edges_path is None:
        chain = [TableEdge(k, k + 1, None) for k in range(len(rows) - 1)]
        feeds = ["Each layer feeds the next, and no other."]
        return profile_of(where, "table", rows, chain, sizes, feeds)
    edges = read_edges(str(edges_path), [row.name for row in rows])
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
        assumptions: more sentences about what was taken to be so.

    Raises:
        FileError: edges that form a cycle, or costs beyond what a profile can hold.
    """
    import networkx as nx

    graph = nx.DiGraph()
    for k, row in enumerate(rows):
        graph.add_node(k, name=row.name)
    graph.add_edges_from((edge.source, edge.target) for edge in edges)
    order = topological_order(edges_at or where, graph, int)
    results = [k for k in order if not graph.succ[k]]
    uses = [(rows[e.source].name, rows[e.target].name, _tensor(rows, e)) for e in edges]
    uses += [(rows[k].name, "output", _tensor(rows, TableEdge(k, k, None))) for k in results]
    return make_profile(
        where,
        front_end,
        sizes,
        [_cost(rows[k], front_end, sizes.given) for k in order],
        uses,
        storage_bytes={row.name: float(row.activation_bytes) for row in rows},
        assumptions=_assumptions(front_end, rows, sizes.given, results, assumptions),
    )


def _tensor(rows: Sequence[TableRow], edge: TableEdge) -> Tensor:
    row = rows[edge.source]
    if edge.nbytes is None or edge.nbytes == row.activation_bytes:
        return Tensor(row.name, row.name, row.activation_bytes, needs_grad=True)
    return Tensor(f"{row.name}[{edge.nbytes}]", row.name, edge.nbytes, needs_grad=True)


def _cost(row: TableRow, kind: str, given: int) -> Cost:
    own = row.saved_bytes is None
    return Cost(
        name=row.name,
        kind=kind,
        measured=(
            costs_of(
                given,
                row.forward_s,
                row.backward_s,
                row.activation_bytes if row.saved_bytes is None else row.saved_bytes,
            ),
        ),
        parameter_bytes=row.parameter_bytes,
        saves=(row.name,) if own and row.activation_bytes else (),
    )


def _assumptions(
    front_end: str,
    rows: Sequence[TableRow],
    given: int,
    results: Sequence[int],
    more: Sequence[str],
) -> list[str]:
    whose = "table" if front_end == "table" else "graph"
    sentences = [f"The {whose}'s times and activations were taken to be for {given} samples."]
    unsaid = sum(row.saved_bytes is None for row in rows)
    if unsaid:
        which = "Each layer" if unsaid == len(rows) else f"{unsaid} layers without saved bytes"
        keeps = "keeps its" if unsaid == len(rows) else "keep their"
        sentences.append(f"{which} {keeps} own activation for the backward, and nothing else.")
    sentences.append("Gradients are as large as the tensors they belong to.")
    sentences.extend(more)
    last = ", ".join(rows[k].name for k in results[:4])
    more = f" and {len(results) - 4} more" if len(results) > 4 else ""
    sentences.append(f"The model's result was taken to be that of {last}{more}.")
    return sentences


# The tables as they are written -------------------------------------------------------------------


def read_rows(where: str, text: str) -> list[TableRow]:
    """The layers. Raises FileError naming the line and the column."""
    lines = _records(where, text)
    at, header = next(lines, (where, []))
    columns: dict[str, tuple[int, str]] = {}
    for k, cell in enumerate(header):
        match = _HEADER.fullmatch(re.sub(r"[_\s]+", " ", cell.strip().lower()))
        if match is None:
            raise FileError(f"{at}: column {readable(cell)!r}: isn't known; {EXPECTED}")
        if match[1] in columns:
            raise FileError(f"{at}: column {readable(cell)!r}: stands there twice")
        columns[match[1]] = (k, match[2] or "")
    for name in REQUIRED:
        if name.split()[0] not in columns:
            raise FileError(f"{at}: has no column {name!r}; {EXPECTED}")
    rows: list[TableRow] = []
    taken: set[str] = set()
    for at, cells in lines:
        if len(cells) != len(header):
            raise FileError(f"{at}: has {len(cells)} cells; the header has {len(header)}")
        row = _row(at, cells, columns)
        if row.name in taken:
            raise FileError(f"{at}: layer {row.name!r} has a row already; names must be unique")
        taken.add(row.name)
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
        with _at(at):
            return parse_seconds(cell(column), column)

    def count(column: str) -> int:
        with _at(at):
            return parse_bytes(cell(column), column, most=MAX_BYTES)

    name = " ".join(cells[columns["layer"][0]].split())
    if not name or name == "output":
        raise FileError(f"{at}: layer: {name!r} can't be a layer's name")
    saved = "saved" in columns and cells[columns["saved"][0]].strip() != ""
    return TableRow(
        name=readable(name),
        forward_s=seconds("forward"),
        backward_s=seconds("backward"),
        parameter_bytes=count("parameter"),
        activation_bytes=count("activation"),
        saved_bytes=count("saved") if saved else None,
    )


def read_edges(where: str, names: Sequence[str]) -> list[TableEdge]:
    """The edges between layers of these names. Raises FileError naming the line."""
    text = _decoded(where, read_json(Path(where), "expected a table (CSV) of edges"))
    position = {name: k for k, name in enumerate(names)}
    lines = _records(where, text)
    at, header = next(lines, (where, []))
    columns = [cell.strip().lower() for cell in header]
    if columns not in ([*_EDGE_COLUMNS], [*_EDGE_COLUMNS, "bytes"]):
        raise FileError(f"{at}: expected the columns from, to and, if need be, bytes")
    found: dict[tuple[int, int], TableEdge] = {}
    for at, cells in lines:
        if len(cells) != len(columns):
            raise FileError(f"{at}: has {len(cells)} cells; the header has {len(columns)}")
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
    """Where each line that isn't empty stands, and its cells. Raises FileError."""
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""))
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield f"{where}:{reader.line_num}", cells
    except csv.Error as error:
        raise FileError(f"{where}:{reader.line_num}: isn't CSV: {error}") from None


def _decoded(where: str, text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"{where}: isn't text: {error}") from None


@contextmanager
def _at(line: str) -> Iterator[None]:
    """What is wrong with an amount is said with the line where it stands."""
    try:
        yield
    except UserError as error:
        raise FileError(f"{line}: {error}") from None
