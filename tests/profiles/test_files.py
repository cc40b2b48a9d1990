"""What reading a file takes of memory, and what numbers of a profile go together."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import msgspec
import pytest
from helpers.by_hand.profiles import chain
from timeprest.planner.plan import Plan
from timeprest.profiles.errors import FileError
from timeprest.profiles.files import (
    new_folder,
    read_file,
    read_limited,
    read_lines,
    read_toml,
    write_bytes,
)
from timeprest.profiles.profile import Profile, check_profile


def of_toml(text):
    return lambda path: path.write_text(text), lambda path: read_toml(path, "")


def of_json(text, kind=Plan):
    return lambda path: path.write_text(text), lambda path: read_file(path, kind)


LISTS = "[],"
"""Each takes 3 bytes in a file, and 64 in memory."""

PLAN = '{"format": "timeprest-plan/2", '


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (of_toml("a" + ".a" * 20_000 + " = 1"), "too many keys, or a key of too many parts; not"),
        (of_toml("".join(f"[q{k}{'.a' * 500}]\n" for k in range(1000))), "has too many keys"),
        (of_toml("".join(f"q{k}=[]\n" for k in range(100_001))), "has too many keys"),
        (of_toml(f"a = {'[' * 50_000}"), "not valid TOML: maximum recursion depth"),
        (of_toml(f"a = {'{a=' * 50_000}"), "not valid TOML: maximum recursion depth"),
        (of_json(f"{PLAN}{'[' * 10**6}"), "not valid JSON"),
        (of_json(PLAN + '"a":{' * 10**6), "not valid JSON"),
        (of_json(f"[{LISTS * 4_000_000}1]"), "has more than 4 million values; not read"),
        (of_json(f'{PLAN}"stages": [{LISTS * 2_000_000}1]}}'), r"Expected `object`, .*\.stages\[0"),
        (of_json(f'{PLAN}"other": [{LISTS * 2_000_000}1]}}'), "unknown field `other`"),
    ],
)
def test_small_files_take_no_more_than_some_memory(made, message, tmp_path):
    """However they are made: an allocator's thousand times the file, and none above 200 MB."""
    write, read = made
    write(tmp_path / "file")
    tracemalloc.start()
    try:
        with pytest.raises(FileError, match=message) as caught:
            read(tmp_path / "file")
        assert tracemalloc.get_traced_memory()[1] < 200e6
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)


def test_names_may_be_as_long_as_the_file_system_has_them(tmp_path):
    """What is written first, beside the file, has a name of its own: of 3 bytes a sign, here."""
    name = "層" * 83
    write_bytes(tmp_path / f"{name}.json", b"{}")
    with new_folder(tmp_path / name) as folder:
        (folder / "file").touch()
    assert {path.name for path in tmp_path.iterdir()} == {name, f"{name}.json"}


def test_broken_json_says_the_line(tmp_path):
    """Plans are edited by hand."""
    path = tmp_path / "plan.json"
    path.write_text(PLAN + '\n "mini_batch": 8,\n}\n', encoding="utf-8-sig")
    with pytest.raises(FileError, match=r"plan\.json: not valid JSON: .*\(line 3, column 1\)"):
        read_file(path, Plan)


def test_the_mark_that_editors_begin_files_with_is_left_out(tmp_path):
    profile, table = tmp_path / "profile.json", tmp_path / "cluster.toml"
    chain(2).save(profile)
    for path, text in ((profile, profile.read_text()), (table, "a = 1")):
        path.write_text(text, encoding="utf-8-sig")
    assert read_toml(table, "") == {"a": 1}
    read = read_file(profile, Profile)
    assert read == chain(2)
    read.save(profile)  # over a profile, though one with a mark


def test_a_small_file_is_read_where_there_is_little_memory(tmp_path):
    """And lines of a large one: a gigabyte was asked for, however little there was to read."""
    small, log = tmp_path / "small.json", tmp_path / "log.jsonl"
    small.write_text("{}")
    log.write_text('{"a": 1}\n' * 100_000)
    tracemalloc.start()
    try:
        assert read_limited(small, "") == b"{}"
        assert sum(line["a"] for _, line in read_lines(log)) == 100_000
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()


def test_what_there_is_no_memory_for_is_said_in_a_line(tmp_path, monkeypatch):
    def none(*_):
        raise MemoryError

    (tmp_path / "plan.json").write_text("{}")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", none)
        with pytest.raises(FileError, match=r"plan\.json: can't be read: no memory"):
            read_limited(tmp_path / "plan.json", "")


@pytest.mark.parametrize("part", ["matrix_bytes", "frozen_bytes"])
def test_a_part_of_a_layers_bytes_is_no_more_than_all(part):
    profile = chain(2)
    first, *others = profile.layers
    odd = msgspec.structs.replace(first, **{part: 2 * (first.parameter_bytes + first.buffer_bytes)})
    with pytest.raises(FileError, match=f"'n0': more {part} than"):
        check_profile(msgspec.structs.replace(profile, layers=(odd, *others)))
