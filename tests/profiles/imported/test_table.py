"""A table of costs: what its numbers become, and what is wrong with one is said."""

from __future__ import annotations

import pytest
import timeprest
from click.testing import CliRunner
from timeprest.cli.profile import main
from timeprest.planner.costs.stage_costs import Costs
from timeprest.profiles.errors import FileError, TargetError, UserError
from timeprest.profiles.files import read_file
from timeprest.profiles.imported.reader import import_profile, is_foreign
from timeprest.profiles.profile import Profile

TABLE = """layer,forward (ms),backward (ms),parameter bytes,activation bytes
embedding,0.5,0.25,32MB,4MB
block,5,10,28MB,4MB
head,2,4,32MB,130MB
"""
EDGES = "from,to,bytes\nembedding,block,\nblock,head,\nembedding,head,1MB\n"


def write(tmp_path, text, name="costs.csv"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_rows_are_layers_and_each_feeds_the_next(tmp_path):
    path = write(tmp_path, TABLE)
    assert is_foreign(path)
    profile = import_profile(path, batch_size=16, micro_batch_sizes=[4])
    assert [layer.name for layer in profile.layers] == ["embedding", "block", "head"]
    assert (profile.batch_size, profile.micro_batch_sizes) == (16, (4, 16))
    small, whole = profile.layers[1].measurements
    assert (whole.forward_s, whole.backward_s) == pytest.approx((5e-3, 10e-3))
    assert small.forward_s == pytest.approx(5e-3 / 4)
    assert (whole.saved_bytes, profile.layers[1].parameter_bytes) == (4_000_000, 28_000_000)
    ends = [(edge.producer, edge.consumer) for edge in profile.edges]
    assert ends == [("embedding", "block"), ("block", "head"), ("head", "output")]
    said = " ".join(profile.assumptions)
    assert "taken to be for 16 samples" in said
    assert "Each layer feeds the next" in said
    assert "Each layer keeps its own activation" in said


def test_units_stand_in_the_header_or_in_the_cell(tmp_path):
    def of(text):
        (layer,) = import_profile(write(tmp_path, text), batch_size=1).layers
        (one,) = layer.measurements
        return one.forward_s, one.backward_s, layer.parameter_bytes, one.saved_bytes

    plain = "Layer,Forward,Backward,Parameters,Activation_bytes\na,0.001,2e-3,1000,20\n"
    assert of(plain) == pytest.approx((1e-3, 2e-3, 1000, 20))
    header = "layer,forward time us,backward_ms,parameter KiB,activations (B)\na,1000,2,1,20\n"
    assert of(header) == pytest.approx((1e-3, 2e-3, 1024, 20))
    cells = "\ufefflayer,forward,backward (ms),parameters,activations\n\n a ,1 ms,2e3us,1kB,20\n"
    assert of(cells) == pytest.approx((1e-3, 2e-3, 1000, 20))
    saved = "layer,forward,backward,parameters,activations,saved bytes\na,1,2,0,20,7\n"
    assert of(saved)[3] == 7


SEVERAL = """layer,micro-batch,forward (ms),backward (ms),update us,parameters,activations,workspace
a,1,2,4,100,10kB,2kB,1kB
a,2,3,5,120,10kB,3kB,2kB
a,8,8.2,20,110,10kB,9kB,8kB
b,2,1,1,,1kB,20kB,
b,8,2,3,,1kB,80kB,
"""


def test_a_size_that_was_measured_is_not_scaled(tmp_path):
    path = write(tmp_path, SEVERAL)
    profile = import_profile(path, micro_batch_sizes=[16, 4], batch_size=32)
    assert (profile.batch_size, profile.micro_batch_sizes) == (32, (1, 2, 4, 8, 16))
    seconds = [m.forward_s for m in profile.layers[0].measurements]
    # On the lines from 2 to 8, and on beyond them.
    assert seconds == pytest.approx(
        [2e-3, 3e-3, 3e-3 + 5.2e-3 / 3, 8.2e-3, 8.2e-3 + 8 * 5.2e-3 / 6]
    )
    assert [m.workspace_bytes for m in profile.layers[0].measurements][3] == 8000
    # Never less in proportion for fewer samples than for more.
    assert profile.layers[1].measurements[0].forward_s == pytest.approx(1e-3 - 1e-3 / 6)
    edge = profile.edges[0]
    assert (edge.bytes_per_sample, edge.fixed_bytes) == pytest.approx((1000, 1000))
    said = " ".join(profile.assumptions)
    assert "for micro-batches of 1, 2, 8 samples; those for 4, 16 lie on the line" in said
    assert "16 beyond what was measured" in said
    assert "b has no row for 1 samples: its costs were taken to be on the line" in said
    assert "in proportion" not in said
    assert import_profile(path).batch_size == 8
    assert import_profile(path, batch_size=4).micro_batch_sizes == (1, 2, 4)


def test_updates_cost_what_the_table_says(tmp_path):
    profile = import_profile(write(tmp_path, SEVERAL))
    costs = Costs(profile)
    assert costs.stage(("a",), 8, False).update_s == pytest.approx(110e-6)
    assert costs.stage(("a", "b"), 8, True).update_s == pytest.approx(110e-6)
    assert costs.stage(("a", "b"), 8, True).workspace_bytes == 8000
    said = " ".join(profile.assumptions)
    assert "Optimizer steps were taken to cost no time, for b, and to hold no state" in said
    plan = timeprest.plan(profile, devices=2, stages=2, variant="gpipe", replicas=False)
    free = import_profile(
        write(tmp_path, SEVERAL.replace("00,", "0,").replace("20,", "0,"), "f.csv")
    )
    other = timeprest.plan(free, devices=2, stages=2, variant="gpipe", replicas=False)
    assert plan.solver.optimal
    assert plan.solver.bound_s <= plan.predicted.period_s
    assert plan.predicted.period_s > other.predicted.period_s


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("a,2,", "a,1,", r":3: layer 'a' has a row for micro-batches of 1 already"),
        ("a,2,", "a,x,", r":3: micro-batch: 'x': give a whole number from 1"),
        ("a,2,", "a,0,", r":3: micro-batch: '0': give a whole number from 1"),
        ("10kB,3kB", "11kB,3kB", r"layer 'a': has 10000 and 11000 parameter bytes; they are the"),
        ("10kB,3kB", "10kB,4kB", r"layer 'a': activation bytes of micro-batches of 2 don't fit"),
        ("10kB,9kB", "10kB,1kB", r"layer 'a': activation bytes"),
    ],
)
def test_rows_of_a_layer_agree(tmp_path, old, new, message):
    with pytest.raises(FileError, match=message):
        import_profile(write(tmp_path, SEVERAL.replace(old, new, 1)))


def test_edges_are_those_of_their_table(tmp_path):
    """And rows may stand in any sequence."""
    rows = TABLE.splitlines(keepends=True)
    path = write(tmp_path, "".join([rows[0], *reversed(rows[1:])]))
    edges = write(tmp_path, EDGES, "edges.csv")
    profile = import_profile(path, batch_size=16, edges=edges)
    assert [layer.name for layer in profile.layers] == ["embedding", "block", "head"]
    nbytes = {
        (edge.producer, edge.consumer): 16 * edge.bytes_per_sample + edge.fixed_bytes
        for edge in profile.edges
    }
    assert nbytes == {
        ("embedding", "block"): 4_000_000,
        ("block", "head"): 4_000_000,
        ("embedding", "head"): 1_000_000,
        ("head", "output"): 130_000_000,
    }
    assert "feeds the next" not in " ".join(profile.assumptions)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"costs\.csv: .*(empty|has no column)"),
        ("layer,forward\na,1\n", r"costs\.csv:1: has no column 'backward'; expected a table"),
        ("layer,colour\na,1\n", r":1: column 'colour': isn't known; expected"),
        (TABLE.replace("parameter bytes", "forward"), r":1: column 'forward': stands there twice"),
        (TABLE.splitlines()[0], r"costs\.csv: has no layer; expected a table"),
        (TABLE + "more,1,2\n", r"costs\.csv:5: has 3 cells; the header has 5"),
        (TABLE + "head,1,2,3,4\n", r":5: layer 'head' has a row already; names must be unique"),
        (TABLE + ",1,2,3,4\n", r":5: layer: '' can't be a layer's name"),
        (TABLE + "x,fast,2,3,4\n", r":5: forward: can't read 'fast'; write it like 10us, 0.5ms"),
        (TABLE + "x,-1,2,3,4\n", r":5: forward: can't read '-1ms'"),
        (TABLE + "x,1,2,3,4 apples\n", r":5: activation: unknown unit in '4 apples'"),
        (TABLE + '"x,1,2,3,4\n', r"costs\.csv:\d: "),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path, text, message):
    with pytest.raises(FileError, match=message):
        import_profile(write(tmp_path, text), batch_size=16)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n", r"edges\.csv:1: expected the columns from, to and, if need be, bytes"),
        ("from,to\nblock,tail\n", r"edges\.csv:2: no layer is named 'tail'"),
        ("from,to\nblock\n", r"edges\.csv:2: has 1 cells; the header has 2"),
        (EDGES + "block,head,\n", r"edges\.csv:5: block to head stands there twice"),
        (EDGES + "head,embedding,\n", r"edges\.csv: "),
        ("from,to,bytes\nblock,head,much\n", r"edges\.csv:2: bytes: can't read 'much'"),
    ],
)
def test_what_is_wrong_with_edges_is_said_too(tmp_path, text, message):
    path, edges = write(tmp_path, TABLE), write(tmp_path, text, "edges.csv")
    with pytest.raises(FileError, match=message):
        import_profile(path, batch_size=16, edges=edges)


def test_what_doesnt_go_together_is_refused(tmp_path):
    path = write(tmp_path, TABLE)
    with pytest.raises(TargetError, match=r"doesn't say the batch size .* --batch-size"):
        import_profile(path)
    graph = write(tmp_path, "node1 -- Linear -- x\n", "graph.txt")
    with pytest.raises(TargetError, match="edges go with a table of costs"):
        import_profile(graph, batch_size=1, edges=path)
    with pytest.raises(UserError, match="edges: goes with a table of costs"):
        timeprest.profile("digits", edges=path)


def test_the_command_reads_it_and_it_can_be_planned(tmp_path):
    path, edges = write(tmp_path, TABLE), write(tmp_path, EDGES, "edges.csv")
    out = tmp_path / "profile.json"
    arguments = [str(path), "--edges", str(edges), "--batch-size", "16", "-o", str(out)]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    plan = timeprest.plan(read_file(out, Profile), devices=2, variant="timeprest")
    assert [stage.nodes for stage in plan.stages] == [("embedding", "block"), ("head",)]
    wrong = CliRunner().invoke(main, ["digits", "--edges", str(edges), "-o", str(out)])
    assert wrong.exit_code == 2
    assert wrong.output.endswith(": --edges: goes with a table of costs (.csv)\n")
