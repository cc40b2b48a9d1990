"""Files of published planners that are broken: one line each, naming the line or the place."""

from __future__ import annotations

import json
import os
import re
from importlib import import_module

import pytest
from helpers.published_files import GRAPH, PIPER, PLACEMENT, placement_edge, placement_node, write
from hypothesis import given
from hypothesis import strategies as st
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.search.solve import solve
from timeprest.profiles.errors import FileError, TargetError, UserError
from timeprest.profiles.files import read_file, write_file
from timeprest.profiles.imported.reader import import_profile, is_foreign
from timeprest.profiles.profile import Profile, check_profile

pytestmark = pytest.mark.usefixtures("planners")


def complaint(path, kind=FileError, **arguments):
    with pytest.raises(kind) as raised:
        import_profile(path, **{"batch_size": 4, **arguments})
    line = str(raised.value)
    assert "\n" not in line
    assert path.name in line
    return line


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("\tnode10 -- node9\n", "\tnode10 -- node77\n", r"txt:12: no node is named node77"),
        ("\tnode10 -- node9\n", "\tnode10\n", r"txt:12: expected an edge"),
        (
            "\tnode2 -- node3\n",
            "\tnode2 -- node3\n\tnode9 -- node2\n",
            r"node9 → node2 → node9 is a cycle",
        ),
        ("\tnode2 -- node3\n", "\tnode2 -- node2\n", r"node2 → node2 is a cycle"),
        (
            "forward_compute_time=1.0",
            "forward_compute_time=-1.0",
            r"txt:3: forward_compute_time=-1",
        ),
        ("forward_compute_time=1.0", "forward_compute_time=nan", r"txt:3: .*=nan: expected mill"),
        ("forward_compute_time=1.0", "forward_compute_time=1e400", r"txt:3: .*=1e400"),
        ("activation_size=64.0", "activation_size=64_0", r"txt:3: activation_size=64_0.* bytes"),
        ("[32.0; 16.0; 8.0]", "[32.0; ; 8.0]", r"txt:4: activation_size=: expected bytes"),
        ("parameter_size=160.000", "parameter_size=1e30", r"txt:3: parameter_size=1e30"),
        (", parameter_size=160.000", "", r"txt:3: expected nodeID -- description"),
        ("node9 -- Add", "node2 -- Add", r"txt:3: node2 has a line already"),
        ("__getitem__(0)", "__getitem__(3)", r"takes element 3 of node3:LSTM, whose .* lists 3"),
    ],
)
def test_a_broken_graph_names_its_line(old, new, message, tmp_path):
    assert old in GRAPH
    assert re.search(message, complaint(write(tmp_path, "graph.txt", GRAPH.replace(old, new, 1))))


def change(workload, path, value):
    changed = json.loads(json.dumps(workload))
    *steps, last = path
    place = changed
    for step in steps:
        place = place[step]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return changed


@pytest.mark.parametrize(
    ("workload", "path", "value", "message"),
    [
        (PLACEMENT, ("nodes", 1, "id"), 7, r"\$\.nodes\[1\]\.id: 7 is the id of \$\.nodes\[0\]"),
        (PLACEMENT, ("nodes", 1, "fpgaLatency"), None, r"fpgaLatency.*\$\.nodes\[1\]"),
        (PLACEMENT, ("nodes", 1, "fpgaLatency"), -1, r">= 0.*\$\.nodes\[1\]\.fpgaLatency"),
        (PLACEMENT, ("nodes", 1, "size"), "big", r"float.*\$\.nodes\[1\]\.size"),
        (PLACEMENT, ("nodes", 1, "id"), "seven", r"int.*\$\.nodes\[1\]\.id"),
        (PLACEMENT, ("edges", 1, "destId"), 70, r"\$\.edges\[1\]\.destId: no node has the id 70"),
        (PLACEMENT, ("edges", 1, "size"), None, r"size.*\$\.edges\[1\]"),
        (PLACEMENT, ("edges", 0, "sourceId"), 2, r"(a → b|b → a) is|is a cycle"),
        (PLACEMENT, ("edges",), None, r"edges"),
        (PLACEMENT, ("nodes",), [], r"\$\.nodes: has no list of nodes"),
        (PLACEMENT, ("nodes",), [{"id": 1}], r"\$\.nodes: of an unknown kind"),
        (PLACEMENT, ("nodes",), [placement_node(1, 1.0, backward=True)], r"\$\.edges\[0\]"),
        (PIPER, ("nodes", 0, "id"), 8, r"8 is the id of|already"),
        (PIPER, ("nodes", 0, "TMPCs"), None, r"TMPCs.*\$\.nodes\[0\]"),
        (PIPER, ("nodes", 0, "TMPCs", "1"), None, r'\$\.nodes\[0\]\.TMPCs\["1"\]: expected one'),
        (PIPER, ("nodes", 0, "TMPCs", "1", 1, "memoryUsageA"), -2, r">= 0.*memoryUsageA"),
        (PIPER, ("nodes", 0, "TMPCs", "1", 1, "timePerSample"), None, r"timePerSample"),
        (PIPER, ("edges", 2, "destId"), 4, r"is a cycle"),
        (PIPER, ("edges", 2, "communicationCost"), 1e300, r"communicationCost"),
    ],
)
def test_a_broken_workload_names_its_place(workload, path, value, message, tmp_path):
    if path == ("edges", 0, "sourceId"):
        workload = change(workload, ("edges", 0, "destId"), 1)
        value = 6
    assert re.search(message, complaint(write(tmp_path, "w.json", change(workload, path, value))))


@pytest.mark.parametrize("number", ["1e400", "NaN", "Infinity", "-Infinity", "1" + "0" * 400])
@pytest.mark.parametrize(("workload", "known"), [(PLACEMENT, "2000.0"), (PIPER, "64.0")])
def test_numbers_that_are_none_are_refused(number, workload, known, tmp_path):
    complaint(write(tmp_path, "w.json", json.dumps(workload).replace(known, number)))


def test_times_too_short_for_a_rate_count_as_none(tmp_path):
    graph = re.sub(r"compute_time=[\d.]+", "compute_time=1e-310", GRAPH)
    profile = import_profile(write(tmp_path, "graph.txt", graph), batch_size=4)
    plan = solve(profile, uniform_cluster(1))
    assert plan.predicted.period_s == 0
    assert plan.predicted.samples_per_s == 0


def test_files_of_another_kind(tmp_path):
    assert "has no node" in complaint(write(tmp_path, "graph.txt", ""))
    assert "isn't text" in complaint(write(tmp_path, "graph.txt", b"node1 -- \xff\xfe"))
    assert "input nodes only" in complaint(write(tmp_path, "graph.txt", GRAPH.splitlines()[0]))
    assert "expected nodeID" in complaint(write(tmp_path, "graph.txt", "It was a dark night"))
    assert "not valid JSON" in complaint(write(tmp_path, "w.json", '{"nodes": ['))
    assert "not valid JSON" in complaint(write(tmp_path, "w.json", "[" * 100_000))
    assert "no list of nodes" in complaint(write(tmp_path, "w.json", [1]))
    assert "no such file" in complaint(tmp_path / "nowhere.json")
    (tmp_path / "folder.txt").mkdir()
    assert "isn't a file" in complaint(tmp_path / "folder.txt")
    workload = {"nodes": [placement_node(1, 1.0, backward=True)], "edges": []}
    assert "every node is a backward node" in complaint(write(tmp_path, "w.json", workload))
    large = write(tmp_path, "large.txt", "")
    os.truncate(large, 2**28 + 1)
    assert "larger than 64 MiB" in complaint(large)
    pipe = tmp_path / "pipe.txt"
    os.mkfifo(pipe)
    assert "isn't a file" in complaint(pipe)


def test_sizes_that_contradict_each_other(tmp_path):
    path = write(tmp_path, "w.json", PIPER)
    assert import_profile(path, micro_batch_sizes=[4]).batch_size == 4
    assert "more than the mini-batch of 2" in complaint(
        path, TargetError, batch_size=2, micro_batch_sizes=[4]
    )
    assert "1 or more" in complaint(path, TargetError, batch_size=0)
    assert "too large" in complaint(path, TargetError, batch_size=2**40)


def test_which_files_are_foreign(tmp_path):
    assert is_foreign(write(tmp_path, "graph.txt", GRAPH))
    assert is_foreign(write(tmp_path, "w.json", PIPER))
    assert is_foreign(tmp_path / "nowhere.txt")
    assert not is_foreign("text:nowhere.txt")
    assert not is_foreign("digits")
    assert not is_foreign("model.onnx")
    assert not is_foreign(write(tmp_path, "p.json", ' {\n "format": "timeprest-profile/1"}'))


def test_names_from_a_file_cannot_upset_a_table(tmp_path, monkeypatch, capsys):
    """Brackets, line ends and the name that stands for the model's result."""
    workload = {
        "nodes": [
            placement_node(1, 1.0, name="[/red]x\n\x1b[2J"),
            placement_node(2, 1.0, name="output"),
            placement_node(3, 1.0, name="same"),
            placement_node(4, 1.0, name="same"),
        ],
        "edges": [placement_edge(k, k + 1) for k in (1, 2, 3)],
    }
    profile = import_profile(write(tmp_path, "w.json", workload))
    assert [layer.name for layer in profile.layers] == [
        "(/red)x (2J",
        "output@2",
        "same.3",
        "same.4",
    ]
    monkeypatch.chdir(tmp_path)
    write_file("profile.json", profile)
    main = import_module("timeprest.cli.plan").main
    main(["solve", "profile.json", "--devices", "4"], standalone_mode=False)
    assert "(/red)x" in capsys.readouterr().out


SEEDS = [GRAPH.encode(), json.dumps(PLACEMENT).encode(), json.dumps(PIPER).encode()]
PIECES = [b"\n", b"\t", b" -- ", b"node2", b"node9", b"-", b"1e308", b"9" * 30, b"[", b"]", b"{"]
PIECES += [
    b"}",
    b",",
    b'"',
    b"null",
    b"true",
    b"0",
    b"\\ud800",
    b"\xff",
    b"\x00",
    b";",
    b"[]",
    b"{}",
]


@given(
    seed=st.sampled_from(SEEDS),
    changes=st.lists(
        st.tuples(st.floats(0, 1), st.integers(0, 30), st.sampled_from([*PIECES, b""])),
        max_size=4,
    ),
    end=st.floats(0.2, 4),
    batch_size=st.sampled_from([None, 1, 4, 2**31 - 1]),
)
def test_a_mutated_file_is_a_profile_or_one_line(seed, changes, end, batch_size, tmp_path_factory):
    text = seed
    for where, length, piece in changes:
        at = int(where * len(text))
        text = text[:at] + piece + text[at + length :]
    path = tmp_path_factory.getbasetemp() / "mutated.txt"
    path.write_bytes(text[: int(end * len(text))])
    try:
        profile = import_profile(path, batch_size=batch_size)
    except UserError as error:
        line = str(error)
    else:
        line = "mutated.txt"
        write_file(path, check_profile(profile))
        assert read_file(path, Profile) == profile
    assert "mutated.txt" in line
    assert "\n" not in line


@given(data=st.data())
def test_a_workload_with_any_value_anywhere_is_a_profile_or_one_line(data, tmp_path_factory):
    """Every place of a workload in turn gets a value of another kind or size."""
    workload = json.loads(json.dumps(data.draw(st.sampled_from([PLACEMENT, PIPER]))))
    for _ in range(data.draw(st.integers(1, 3))):
        place, step = workload, None
        while isinstance(place, (dict, list)) and place:
            parent = place
            keys = sorted(place) if isinstance(place, dict) else range(len(place))
            step = data.draw(st.sampled_from(list(keys)))
            place = parent[step]
            if data.draw(st.integers(0, 5)) == 0:
                break
        values = [0, -1, 1, 7, 2**60, 10**30, 1e17, 0.5, "", "1", True, None, [], {}, "é\n[/x]"]
        parent[step] = data.draw(st.sampled_from(values))
    path = tmp_path_factory.getbasetemp() / "valued.json"
    path.write_text(json.dumps(workload))
    try:
        profile = import_profile(path)
    except UserError as error:
        line = str(error)
    else:
        line = "valued.json"
        write_file(path, check_profile(profile))
        assert read_file(path, Profile) == profile
    assert "valued.json" in line
    assert "\n" not in line
