"""tp-profile: measure a model → a profile file."""

from __future__ import annotations

from collections.abc import Sequence

import click
import msgspec

from ..profiles.errors import UserError
from ..profiles.files import check_writable, write_file
from ..profiles.profile import Profile
from ..profiles.units import format_bytes, format_seconds
from .common import Bar, common_options, errors_as_lines, output, whole_numbers
from .tables import compact_table


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("target")
@click.option("-o", "--output", "path", default="profile.json", show_default=True)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Samples in a mini-batch.",
)
@click.option(
    "--micro-batch-sizes",
    metavar="LIST",
    help="Sizes to measure, like 4,8,16. Default: the mini-batch and its halves.",
)
@click.option("--device", type=click.Choice(["cpu"]), default="cpu", show_default=True)
@click.option(
    "--threads",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Torch's threads; each stage will run with as many.",
)
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="SHAPE:DTYPE",
    help="What a model that isn't a task takes, one sample: 3x32x32:float32, or "
    "64:int64:1000 for integers below 1000. Once for each input.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0),
    default=8.0,
    show_default=True,
    help="Time to spend on timing; at least 5 rounds are made.",
)
@common_options
@errors_as_lines
def main(
    target: str,
    path: str,
    batch_size: int,
    micro_batch_sizes: str | None,
    device: str,
    threads: int,
    inputs: Sequence[str],
    seconds: float,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Measure TARGET layer by layer and write a profile file.

    TARGET: a built-in task (digits, text, text:FILE), file.py:NAME or pkg.module:NAME, where
    NAME is a task, a model, or a function that makes a model.
    """
    sizes = whole_numbers(micro_batch_sizes, "--micro-batch-sizes")
    if sizes and max(sizes) > batch_size:
        raise UserError(
            f"--micro-batch-sizes: {max(sizes)} is more than the mini-batch of {batch_size}"
        )
    check_writable(path)
    # Torch takes its time; bad options needn't wait for it.
    from ..profiles.measure import measure
    from ..profiles.target import parse_input, resolve

    found = resolve(target, [parse_input(text) for text in inputs])
    with Bar(f"profiling {target}", quiet=quiet) as bar:
        profile = measure(
            found,
            batch_size=batch_size,
            micro_batch_sizes=sizes,
            threads=threads,
            seconds=seconds,
            progress=bar,
        )
    write_file(path, profile)
    if as_json:
        click.echo(msgspec.json.encode(profile))
    elif not quiet:
        _print(profile, path, verbose)


def _print(profile: Profile, path: str, verbose: bool) -> None:
    console = output()
    size = profile.micro_batch_sizes[-1]
    table = compact_table(
        f"{profile.target}: {len(profile.layers)} layers, micro-batch of {size}",
        ["layer", "kind"],
        ["parameters", "forward", "backward", "saved"],
    )
    rows = profile.layers if verbose or len(profile.layers) <= 40 else profile.layers[:40]
    for layer in rows:
        m = layer.measurements[-1]
        table.add_row(
            layer.name,
            layer.kind,
            format_bytes(layer.parameter_bytes),
            format_seconds(m.forward_s),
            format_seconds(m.backward_s),
            format_bytes(m.saved_bytes),
        )
    if len(rows) < len(profile.layers):
        table.add_row(f"… {len(profile.layers) - len(rows)} more (-v)", "", "", "", "", "")
    if profile.loss:
        m = profile.loss[-1]
        table.add_row(
            "loss",
            "",
            "",
            format_seconds(m.forward_s),
            format_seconds(m.backward_s),
            format_bytes(m.saved_bytes),
        )
    table.add_section()
    whole = profile.whole_model[-1]
    table.add_row(
        "whole model",
        "measured in one piece",
        format_bytes(sum(layer.parameter_bytes for layer in profile.layers)),
        format_seconds(whole.forward_s),
        format_seconds(whole.backward_s),
        format_bytes(whole.saved_bytes),
    )
    console.print(table)
    ratios = ", ".join(f"{m}: {ratio:.2f}" for m, ratio in layer_sum_ratios(profile))
    console.print(f"sum of layers / whole model, by micro-batch size: {ratios}")
    console.print(f"wrote {path}; next: tp-plan solve {path}")


def layer_sum_ratios(profile: Profile) -> list[tuple[int, float]]:
    """For each micro-batch size, the layers' times added up over the whole model's."""
    ratios = []
    for k, whole in enumerate(profile.whole_model):
        parts = [layer.measurements[k] for layer in profile.layers]
        parts += [profile.loss[k]] if profile.loss else []
        total = sum(m.forward_s + m.backward_s for m in parts)
        ratios.append((whole.micro_batch, total / (whole.forward_s + whole.backward_s)))
    return ratios


if __name__ == "__main__":
    main()
