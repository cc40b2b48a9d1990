"""The HTML page of plans and runs: one file, which loads nothing from anywhere.

`page` takes plain data, as JSON holds it::

    {"title": str, "plans": [plan, …], "runs": [run, …]}

A plan is made by `plan_part`, a run by `run_data.run_part`, the recordings in both by `columns`.
The rest is done by the scripts in `assets/`, joined in the sequence of `SCRIPTS`.

To add to the page
------------------
* A section is registered by name::

      TP.section({
        name: "loss",                    // also the id of its element: report.html#loss
        title: "Loss",
        order: 15,                       // sections stand in this sequence; see plan.js
        when: (view) => view.runs.length > 0,
        build: (host, view) => { … },    // host: the section's element, below its heading
      });

  `view` has `data` (all of it), `plans`, `runs`, and `plan`: the one chosen where there are
  several; the sections are built anew when another is chosen.
* `new TP.Recording(columns)` decodes a recording; `new TP.TimeGroup(host, end_s)` makes charts
  that share a time axis, a toolbar, the mini-batch followed and the tool tip; in it go any number
  of ``new TP.Gantt(group, recording, {title})`` and
  ``new TP.Memory(group, recording, {title, limits})``, stacked in the sequence in which they are
  made. That is how measured stands below predicted.
* `TP.chart({title, name, series, xLabel, …})` draws lines and points of several series (chart.js).
* `TP.el(tag, attributes, …children)` makes elements; text goes in as text, never as markup.
  `TP.figure(path, number, text)` makes a number that scripts and tests can read
  (``<data value data-path>``). `TP.table(caption, heads, rows)` makes the table that stands beside
  every picture. `TP.bytes`, `TP.seconds` and `TP.number` print units as the commands do.
* Colours are CSS variables made from `cli.palette`: ``--op-F``, ``--op-F-ink``, ``--mem-weights``,
  ``--series-0`` …; in canvases `TP.colour(name)`. `TP.onTheme(f)` calls f after a change.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import click
import msgspec
import numpy as np

from .... import __version__
from ....planner.plan import Plan
from ....planner.recordings.predicted import predicted
from ....planner.recordings.recording import MEMORY_KINDS, MemoryPoint, Message, Recording, Span
from ....planner.search.answer.recheck import was_edited
from ....profiles.files import write_bytes
from ...errors import printable
from ...options.values import FileName
from ...tables.layout import counted
from ...tables.palette import LIGHTENED, LIMIT, MEMORY, OPERATIONS, SERIES
from ...tables.stages import placement_name
from ..svg.frame import FigureSettings, window_of

# A recording as packed columns of numbers: tens of thousands of operations stay small -------------

KINDS = "FBWU"
_ALL_TICKS = 2**32 - 2
"""Times are whole numbers of ticks, of which the whole recording has so many."""


def columns(recording: Recording) -> dict[str, Any]:
    """A recording as columns of numbers, which the script's `TP.Recording` decodes.

    A column is ``"u4:…"``: the type, then its numbers in base64, the lowest byte first. Indices
    that may be missing are -1 there. Memory points refer to the table of distinct states. Where
    lanes have several stages, "stages" of "lanes" has them all, "stage" the first, and columns say
    which of them each operation and both ends of each message are of.
    """
    lanes, end_s = recording.lanes, recording.end_s
    tick_s = end_s / _ALL_TICKS if end_s > 0 else 1.0
    several = any(len(lane.stages) > 1 for lane in lanes)
    return {
        "source": recording.source,
        "variant": recording.variant,
        "period_s": recording.period_s,
        "end_s": end_s,
        "tick_s": tick_s,
        "idle_shares": list(recording.idle_shares),
        "lanes": {
            "name": [lane.name for lane in lanes],
            "stage": [lane.stages[0] for lane in lanes],
            "replica": [lane.replica for lane in lanes],
            **({"stages": [list(lane.stages) for lane in lanes]} if several else {}),
        },
        "spans": _spans(recording.spans, tick_s, several),
        **_messages(recording.messages, tick_s, several),
        **_memory(recording.memory, tick_s),
    }


def _spans(spans: Sequence[Span], tick_s: float, several: bool) -> dict[str, Any]:
    return {
        "count": len(spans),
        "lane": packed("u4", (s.lane for s in spans)),
        "kind": packed("u1", (KINDS.index(s.kind) for s in spans)),
        "mini": packed("i4", (s.mini_batch for s in spans)),
        "micro": _indices(s.micro_batch for s in spans),
        "start": _ticks((s.start_s for s in spans), tick_s),
        "end": _ticks((s.end_s for s in spans), tick_s),
        "version": _indices(s.version for s in spans),
        "forward_version": _indices(s.forward_version for s in spans),
        **({"stage": packed("u4", (s.stage for s in spans))} if several else {}),
    }


def _messages(messages: Sequence[Message], tick_s: float, several: bool) -> dict[str, Any]:
    """The tensors' names, and messages of them by position."""
    tensors: dict[str, int] = {}
    tensor = [tensors.setdefault(m.tensor, len(tensors)) for m in messages]
    ends = ("source_stage", "target_stage") if several else ()
    return {
        "tensors": list(tensors),
        "messages": {
            "count": len(messages),
            "source": packed("u4", (m.source for m in messages)),
            "target": packed("u4", (m.target for m in messages)),
            "tensor": packed("u4", tensor),
            "mini": packed("i4", (m.mini_batch for m in messages)),
            "micro": _indices(m.micro_batch for m in messages),
            "backward": packed("u1", (int(m.backward) for m in messages)),
            "nbytes": packed("f8", (m.nbytes for m in messages)),
            "sent": _ticks((m.sent_s for m in messages), tick_s),
            "start": _ticks((m.start_s for m in messages), tick_s),
            "end": _ticks((m.end_s for m in messages), tick_s),
            **{end: packed("u4", (getattr(m, end) for m in messages)) for end in ends},
        },
    }


def _memory(points: Sequence[MemoryPoint], tick_s: float) -> dict[str, Any]:
    """The distinct states, and points in time at which lanes come to them, by position."""
    states: dict[tuple[int, ...], int] = {}
    state = [states.setdefault(p.nbytes, len(states)) for p in points]
    return {
        "memory_kinds": list(MEMORY_KINDS),
        "states": packed("f8", (number for found in states for number in found)),
        "memory": {
            "count": len(points),
            "lane": packed("u4", (p.lane for p in points)),
            "at": _ticks((p.at_s for p in points), tick_s),
            "state": packed("u4", state),
        },
    }


def _indices(numbers: Iterable[int | None]) -> str:
    return packed("i4", (-1 if number is None else number for number in numbers))


def _ticks(seconds: Iterable[float], tick_s: float) -> str:
    return packed("u4", (min(max(round(s / tick_s), 0), _ALL_TICKS) for s in seconds))


def packed(kind: str, numbers: Iterable[float]) -> str:
    """A column of numbers in base64. kind: "u1", "u4", "i4" or "f8"."""
    array = np.fromiter(numbers, dtype=f"<{kind}")
    return f"{kind}:{base64.b64encode(array.tobytes()).decode('ascii')}"


# The page from its data and assets ----------------------------------------------------------------

ASSETS = Path(__file__).parent / "assets"

SCRIPTS = (
    *("base", "timeline/recording", "timeline/time_group", "timeline/lane_chart"),
    *("timeline/gantt", "timeline/memory", "graph", "plan", "chart", "run", "main"),
)
"""In the sequence in which they are joined: each stands on those before it."""
STYLES = ("page",)


def page(
    data: Mapping[str, Any], scripts: Sequence[str] = SCRIPTS, styles: Sequence[str] = STYLES
) -> str:
    """The page's HTML text, with scripts and styles of the assets, by name, or others by path;
    both without their suffix."""
    style = _palette_style() + "".join(_asset(f"{name}.css") for name in styles)
    script = "\n".join(_asset(f"{name}.js") for name in scripts)
    return Template(_asset("page.html")).substitute(
        title=escape(printable(str(data.get("title", "TiMePReSt")))),
        policy=_policy(style, script),
        style=style,
        data=script_text({"palette": _palette(), **data}),
        script=script,
    )


def write_page(path: str | Path, data: Mapping[str, Any]) -> None:
    """Write the page. Raises FileError."""
    write_bytes(path, page(data).encode("utf-8"))


def script_text(data: Any) -> str:
    """Data as JSON that can stand inside a script element, whatever strings are in it."""
    text = json.dumps(_shown(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _shown(data: Any) -> Any:
    """The same with strings as people can read them, whatever is in names (`printable`)."""
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, Mapping):
        return {_shown(key): _shown(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        # Recordings are long lists of numbers.
        return [each if type(each) in (float, int) else _shown(each) for each in data]
    return data


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return "sha256-" + base64.b64encode(digest).decode("ascii")


def _palette() -> dict[str, Any]:
    """Labels, patterns and shades, which scripts can't read from CSS variables."""
    return {
        "operations": {kind: [p.label, p.pattern] for kind, p in OPERATIONS.items()},
        "memory": {kind: [p.label, p.pattern] for kind, p in MEMORY.items()},
        "lightened": list(LIGHTENED),
        "series": len(SERIES),
    }


def _palette_style() -> str:
    paints = {f"op-{kind}": paint for kind, paint in OPERATIONS.items()}
    paints |= {f"mem-{kind}": paint for kind, paint in MEMORY.items()}
    paints |= {f"series-{k}": paint for k, paint in enumerate(SERIES)}
    paints["limit"] = LIMIT
    light = ((name, paint.light, paint.light_ink) for name, paint in paints.items())
    dark = ((name, paint.dark, paint.dark_ink) for name, paint in paints.items())
    return f":root{{{_variables(light)}}}\n:root[data-theme=dark]{{{_variables(dark)}}}\n"


def _variables(colours: Iterable[tuple[str, str, str]]) -> str:
    return "".join(f"--{name}:{fill};--{name}-ink:{ink};" for name, fill, ink in colours)


# A plan's page ------------------------------------------------------------------------------------


def plan_part(plan: Plan, name: str, *, recorded: bool = True) -> dict[str, Any]:
    """The plan as its file has it, by the name that the page calls it, and, unless it is to have
    none, a recording of what it predicts: of as many mini-batches as become steady, fewer where
    they are too many to look at. Raises ScheduleError for a plan whose stages wait for each
    other."""
    part: dict[str, Any] = {
        "name": name,
        "plan": msgspec.to_builtins(plan),
        # Nothing where each stage has a device of its own.
        **({"placement": placement_name(plan)} if plan.placement else {}),
        **({"edited": True} if was_edited(plan) else {}),
        "recording": None,
        "mini_batches_shown": 0,
    }
    if recorded:
        recording = predicted(plan)
        # It opens where a figure would be drawn.
        window = window_of(recording, FigureSettings())
        part["recording"] = {**columns(recording), "window": [window.begin_s, window.end_s]}
        part["mini_batches_shown"] = len({span.mini_batch for span in recording.spans})
    return part


def plans_report(plans: Mapping[str, Plan], path: str) -> None:
    """Write the page of plans, by their names; of several, timelines of all of them on one axis,
    and the rest of one that is chosen there. Raises FileError, and ScheduleError as `plan_part`."""
    systems = ", ".join(dict.fromkeys(plan.variant for plan in plans.values()))
    title = f"{len(plans)} plans: {systems}"
    if len(plans) == 1:
        (plan,) = plans.values()
        title = f"{plan.profile.target}: {plan.title}, {counted(len(plan.stages), 'stage')}"
    write_page(
        path,
        {
            "title": title,
            "made_by": {"timeprest": __version__},
            "plans": [plan_part(plan, name) for name, plan in plans.items()],
            "runs": [],
        },
    )


html_option = click.option(
    "--html",
    "html",
    type=FileName(),
    help="Write a page with the stages, the timeline and the memory to look at in a browser.",
)
"""Of `tp-plan show` and `tp-plan compare`."""
