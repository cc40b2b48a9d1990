"""Pages of the docs, taken apart: fenced blocks, commands, and code in running text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from helpers.paths import ROOT

LANGUAGES = ("", "console", "sh", "text", "python", "toml", "json")
"""What a block may be marked with."""

_FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})\s*([^`]*)$")
_COMMAND = re.compile(r"^(sudo|srun|torchrun|make|export|python3?|pip|tp-(profile|plan|run)) ")
_CODE = re.compile(r"^\s*(import \w|from [\w.]+ import |>>> |class \w+.*:|def \w+\(|timeprest\.\w)")
_TABLE = re.compile(r"^\s*\[\[?\w+\]?\]\s*(#.*)?$")
_INDENTED = re.compile(
    r"^( {4,}|\t)\s*(\$ |>>> |tp-(profile|plan|run) |import \w|from \w+ import )"
)


@dataclass(frozen=True)
class Text:
    """Part of a page. Attributes: where: ``docs/tasks.md:6``; text: without its indentation."""

    where: str
    language: str
    text: str


def pages() -> list[Path]:
    """What people read. The heads of generated pages are read in those pages."""
    every = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page for page in every if not page.name.endswith(".head.md")]


def _parts(page: Path, text: str) -> Iterator[tuple[bool, Text]]:
    """Blocks and single lines of running text in turn; True: a block."""
    lines = text.splitlines()
    k = 0
    while k < len(lines):
        opening = _FENCE.match(lines[k])
        where = f"{page.parent.name}/{page.name}:{k + 1}".removeprefix(f"{ROOT.name}/")
        if opening is None:
            yield False, Text(where, "", lines[k])
            k += 1
            continue
        indent, fence, language = opening[1], opening[2], opening[3].strip()
        body = []
        for line in lines[k + 1 :]:
            if line.strip().startswith(fence) and not line.strip().strip(fence[0]):
                break
            body.append(line[len(indent) :] if line.startswith(indent) else line)
        else:
            raise AssertionError(f"{where}: a block that isn't closed")
        yield True, Text(where, language, "\n".join(body))
        k += len(body) + 2


def blocks(page: Path, text: str | None = None) -> list[Text]:
    """Fenced blocks. `text`: of the page; by default what is in it.

    Raises AssertionError for what would look like code, and isn't looked at: blocks of unknown
    languages, code in blocks that aren't marked, and commands or code that isn't fenced.
    """
    found = []
    for fenced, part in _parts(page, page.read_text("utf-8") if text is None else text):
        if not fenced:
            assert not _INDENTED.match(part.text), f"{part.where}: put it between fences"
            continue
        assert part.language in LANGUAGES, f"{part.where}: mark it as one of {LANGUAGES}"
        if part.language in ("", "console", "sh", "text") and not commands(part):
            for line in part.text.splitlines():
                assert not _CODE.match(line), f"{part.where}: mark it as python"
                assert not _TABLE.match(line), f"{part.where}: mark it as toml"
        found.append(part)
    return found


def commands(block: Text) -> list[Text]:
    """The command lines of a block that isn't marked as code. Where some begin with ``$ ``, other
    lines are output; else all lines must be commands or comments."""
    if block.language in ("python", "toml", "json"):
        return []
    joined = re.sub(r"\\\n\s*", "", block.text).splitlines()
    prompts = [line[2:] for line in joined if line.startswith("$ ")]
    if prompts:
        found = prompts
    elif any(_COMMAND.match(line) for line in joined):
        found = [line for line in joined if line.strip() and not line.startswith("#")]
    else:
        return []
    for line in found:
        assert _COMMAND.match(line), f"{block.where}: what command is {line!r}?"
    return [Text(block.where, "sh", line) for line in found]


def spans(page: Path) -> list[Text]:
    """Code in running text: what stands between single backticks, over the ends of lines too."""
    found = []
    running: list[Text] = []
    for fenced, part in [*_parts(page, page.read_text("utf-8")), (True, Text("", "", ""))]:
        # A paragraph's lines belong together.
        if not fenced and part.text.strip():
            running.append(part)
            continue
        whole = "\n".join(line.text for line in running)
        for match in re.finditer(r"(?<!`)`([^`]+)`(?!`)", whole):
            first = running[whole[: match.start()].count("\n")]
            found.append(Text(first.where, "", re.sub(r"\s+", " ", match[1])))
        running = []
    return found


@dataclass(frozen=True)
class Table:
    """Attributes: where: of its head; head, rows: texts of the cells."""

    where: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def names(self, column: int = 0) -> list[str]:
        """What stands between backticks in a column."""
        return [name for row in self.rows for name in re.findall(r"`([^`]+)`", row[column])]


def tables(page: Path) -> list[Table]:
    """Those of the running text."""
    found: list[list[Text]] = [[]]
    for fenced, part in _parts(page, page.read_text("utf-8")):
        if not fenced and part.text.startswith("|"):
            found[-1].append(part)
        elif found[-1]:
            found.append([])
    every = []
    for head, _, *rows in filter(None, found):
        cells = [tuple(c.strip() for c in row.text.strip("| ").split(" | ")) for row in rows]
        every.append(Table(head.where, _cells(head.text), tuple(cells)))
    return every


def _cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip("| ").split(" | "))


def section(page: Path, heading: str) -> str:
    """A page's text from a heading (``## Profile``, or how it begins) to the next of its rank."""
    rank = heading.split(" ")[0]
    lines = page.read_text("utf-8").splitlines()
    begin = next(k for k, line in enumerate(lines) if line.startswith(heading))
    rest = lines[begin + 1 :]
    end = next((k for k, line in enumerate(rest) if re.match(rf"#{{1,{len(rank)}}} ", line)), None)
    return "\n".join(rest[:end])


def names_defined(tree):
    """Classes, functions and variables of a module, and what classes have: ``Plan.mini_batch``."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.ClassDef():
                yield node.name
                yield from (f"{node.name}.{name}" for name in names_defined(node))
            case ast.FunctionDef():
                yield node.name
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                yield name


def names_beside_files(page: Path) -> Iterator[tuple[str, str]]:
    """Files of ours in running text, and the names that it says they have: `name` (`file.py`), of
    it or in it; and `file.py`: `name`, `name`."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    file, name = r"`([\w/]+/\w+\.py)`", r"`([A-Za-z_][\w.]*)`"
    before = rf"{name},? (?:of |in |\(){file}"
    joined = re.sub(r"\s+", " ", text)
    yield from ((path, each) for each, path in re.findall(before, joined))
    for match in re.finditer(rf"{file}: ((?:[^`|;.]*(?!{before}){name})+)", text):
        yield from ((match[1], each) for each in re.findall(name, match[2]))
