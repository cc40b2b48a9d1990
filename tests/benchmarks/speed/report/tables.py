"""The page's tables, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from timeprest.profiles.units import format_bytes

from ...shared import markdown
from ..contestants import ALL, BASE, bare_name, contestant_named
from .bars import BarRow
from .ratios import Ratio, bottleneck_idle, of_stages, over_runs, runs_of, speed_ratio
from .records import Figures, Held, LinkRun, Round


def names_in(rounds: Sequence[Round], model: str) -> list[str]:
    """Who ran on a model, in the table's sequence: rivals, then ours."""
    seen = {name for each in rounds if each.model == model for name in each.runs}
    places = list(ALL)
    return sorted(seen, key=lambda name: (places.index(bare_name(name)), name))


def ratios_of(rounds: Sequence[Round], model: str) -> dict[str, Ratio]:
    """Everybody's speed over one thread's."""
    found = {name: speed_ratio(rounds, model, name) for name in names_in(rounds, model)}
    return {name: ratio for name, ratio in found.items() if ratio is not None}


def speed_table(rounds: Sequence[Round], model: str) -> str:
    """Who was how fast on a model."""
    rows = []
    for name, ratio in ratios_of(rounds, model).items():
        runs = runs_of(rounds, model, name)
        newest = runs[-1]
        piped = contestant_named(name).kind in ("ours", "tdp", "deepspeed")
        rows.append(
            [
                _title(name),
                f"**{ratio.value:.2f}**"
                if contestant_named(name).kind == "ours"
                else str(ratio)[:4],
                f"{ratio.least:.2f}–{ratio.most:.2f}",
                str(ratio.rounds),
                f"{over_runs(runs, lambda run: run.samples_per_s):.1f}",
                str(newest.micro_batches) if piped else "",
                ", ".join(newest.cuts),
            ]
        )
    head = ["", "× one thread", "of rounds from–to", "rounds", "samples/s", "N", "stages begin at"]
    return markdown(head, rows)


GROUPS = (
    "one process, as many threads",
    "data parallelism",
    "torch.distributed.pipelining",
    "DeepSpeed",
    "ours, with a flush",
    "ours, without",
)
"""Of contestants. Those with a flush train as one process does; so do all that aren't ours."""


def group_of(name: str) -> str | None:
    """One of GROUPS; None: it isn't one way to train one model faster."""
    contestant = contestant_named(name)
    if contestant.kind == "ours":
        return GROUPS[4] if contestant.synchronous else GROUPS[5]
    if name == "two-threads":
        return GROUPS[0]
    return {"ddp": GROUPS[1], "tdp": GROUPS[2], "deepspeed": GROUPS[3]}.get(contestant.kind)


def fastest_table(rounds: Sequence[Round]) -> str:
    """On each model, the fastest of each group of contestants: speed over one thread."""
    rows = []
    for model in dict.fromkeys(each.model for each in rounds):
        best: dict[str, tuple[float, str]] = {}
        for name, ratio in ratios_of(rounds, model).items():
            group = group_of(name)
            if group is not None:
                best[group] = max(best.get(group, (0.0, "")), (ratio.value, name))
        cells = [
            f"{value:.2f} `{name}`" if value else ""
            for value, name in (best.get(group, (0.0, "")) for group in GROUPS)
        ]
        rows.append([model, *cells])
    return markdown(["× one thread", *GROUPS], rows)


def _title(name: str) -> str:
    contestant = contestant_named(name)
    return f"`{name}`" if contestant.kind == "ours" else contestant.title


def speed_bars(rounds: Sequence[Round], model: str) -> list[BarRow]:
    """The same as a plot's rows."""
    return [
        BarRow(name, ratio.value, ratio.least, ratio.most, contestant_named(name).kind == "ours")
        for name, ratio in ratios_of(rounds, model).items()
        if name != BASE
    ]


def stage_table(rounds: Sequence[Round], model: str) -> str:
    """What every contestant's processes did, and what was predicted of ours."""
    rows = []
    for name in names_in(rounds, model):
        runs = runs_of(rounds, model, name)
        predicted = runs[-1].predicted_period_s
        period = over_runs(runs, lambda run: run.period_s)
        rows.append(
            [
                _title(name),
                *(
                    _share(runs, what, period)
                    for what in ("compute_s", "communication_s", "idle_s")
                ),
                _bytes(runs, "peak_bytes"),
                _bytes(runs[-1:], "predicted_bytes"),
                _bytes(runs, "rss_bytes"),
                _sent(runs),
                f"{predicted / period - 1:+.0%}" if predicted else "",
            ]
        )
    head = ["", "compute", "comm.", "idle", "peak", "predicted", "RSS", "sent", "period predicted"]
    return markdown(head, rows)


def _share(runs: Sequence[Figures], what: str, period_s: float) -> str:
    found = of_stages(runs, lambda stage: getattr(stage, what))
    return ", ".join(f"{seconds / period_s:.0%}" for seconds in found) if found else ""


def _bytes(runs: Sequence[Figures], what: str) -> str:
    found = of_stages(runs, lambda stage: getattr(stage, what))
    return ", ".join(format_bytes(int(nbytes)) for nbytes in found) if found else ""


def _sent(runs: Sequence[Figures]) -> str:
    sent = runs[-1].sent_bytes
    if not sent:
        return ""
    planned = [stage.predicted_sent_bytes for stage in runs[-1].stages]
    known = sum(each for each in planned if each is not None)
    return format_bytes(int(sent)) + (f" ({sent / known - 1:+.0%})" if known else "")


def idle_of_bottleneck(rounds: Sequence[Round], model: str, name: str) -> float:
    """The median share that the busiest stage waits."""
    return over_runs(runs_of(rounds, model, name), bottleneck_idle)


def held_table(held: Iterable[Held], others: Mapping[str, Held], title: str) -> str:
    """What systems hold at S stages.

    Args:
        others: by system, what it is held against, in columns with this title.
    """
    rows = []
    for each in held:
        other = others.get(each.variant)
        rows.append(
            [
                f"`{each.variant}`",
                str(each.micro_batches),
                _list(each.in_flight),
                _list(each.versions),
                _list(each.differences),
                *_totals(
                    each.accounted_bytes,
                    each.predicted_bytes,
                    other.accounted_bytes if other else (),
                ),
                *_totals(
                    each.accounted_weight_bytes,
                    each.predicted_weight_bytes,
                    other.accounted_weight_bytes if other else (),
                ),
                _over(each.predicted_period_s, other.predicted_period_s if other else None),
            ]
        )
    both = ["in all", "largest stage", "predicted", f"× {title}"]
    head = ["", "N", "in flight", "versions held", "difference", *(f"peak {text}" for text in both)]
    head += [*(f"weights {text}" for text in both), f"period predicted × {title}"]
    return markdown(head, rows)


def stage_by_stage(one: Held, other: Held) -> str:
    """What two systems hold at each stage, and a line that says where the first holds less."""
    less = [
        mine < its for mine, its in zip(one.accounted_bytes, other.accounted_bytes, strict=True)
    ]
    where = {
        wanted: [str(s) for s, is_less in enumerate(less) if is_less == wanted]
        for wanted in (True, False)
    }
    said = [
        f"{word} on {'stages' if len(stages) > 1 else 'stage'} {', '.join(stages)}"
        for word, stages in (("less", where[True]), ("more, or as much,", where[False]))
        if stages
    ]
    rows = [
        [
            str(s),
            *(
                text
                for each in (one, other)
                for text in (
                    str(each.versions[s]),
                    format_bytes(each.accounted_weight_bytes[s]),
                    format_bytes(each.accounted_bytes[s]),
                )
            ),
            f"{one.accounted_bytes[s] / other.accounted_bytes[s]:.2f}",
        ]
        for s in range(len(one.versions))
    ]
    both = (f"`{each.variant}`" for each in (one, other))
    head = [
        "stage",
        *(f"{name} {what}" for name in both for what in ("versions", "weights", "peak")),
    ]
    table = markdown([*head, "peak ×"], rows)
    line = f"Stage by stage `{one.variant}` holds {'; '.join(said)}, against `{other.variant}`:"
    return f"{line}\n\n{table}"


def _list(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def _totals(found: Sequence[int], wanted: Sequence[int], other: Sequence[int]) -> list[str]:
    """`other`: what to hold it against; empty where there is nothing."""
    total = sum(found)
    return [
        format_bytes(total),
        format_bytes(max(found)),
        f"{sum(wanted) / total - 1:+.1%}",
        _over(total, sum(other)),
    ]


def _over(found: float | None, other: float | None) -> str:
    return f"{found / other:.2f}" if found and other else ""


def link_table(links: Sequence[LinkRun]) -> str:
    """What the wire costs."""
    rows = []
    for run in links:
        others = [o for o in links if o.rate == run.rate and o.contestant == "ddp"]
        other = next((o for o in others if o is not run), None)
        predicted = run.predicted_period_s
        rows.append(
            [
                run.rate,
                _title(run.contestant),
                format_bytes(int(run.wire_bytes)),
                f"{1 - run.wire_bytes / other.wire_bytes:.1%} fewer" if other else "",
                f"{run.period_s * 1e3:.0f} ms",
                f"{other.period_s / run.period_s:.2f} × as fast" if other else "1",
                str(run.micro_batches) if run.cuts else "",
                ", ".join(run.cuts),
                f"{predicted / run.period_s - 1:+.0%}" if predicted else "",
            ]
        )
    return markdown(
        [
            "wire",
            "",
            "bytes a mini-batch",
            "than data parallel",
            "time a mini-batch",
            "of data parallel's speed",
            "N",
            "stages begin at",
            "period predicted",
        ],
        rows,
    )
