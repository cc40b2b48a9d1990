"""Published planners' files and cost models, as a plugin of `tp-profile` and `tp-plan`.

tp-profile graph.txt --batch-size 128 --plugin tests/benchmarks/published/plugin.py
tp-plan --plugin tests/benchmarks/published/plugin.py published graph.txt --devices 4
"""

from __future__ import annotations

from timeprest.tests.benchmarks.published.command import published
from timeprest.tests.benchmarks.published.reader import import_published

IMPORTERS = {".txt": import_published, ".json": import_published}
COMMANDS = {"plan.published": published}
