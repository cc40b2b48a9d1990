"""TiMePReSt: profile, plan and train any PyTorch model as a pipeline.

    profile = timeprest.profile("digits")             what the model costs
    plan = timeprest.plan(profile, devices=2)         how to cut it
    run = timeprest.run(plan, "runs/first")           train it by the plan

Nothing heavy is imported before it is used; planning never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .profiles.profile import import_graphs_with

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .api import (
        check,
        dry_run,
        front,
        links,
        plan,
        plans,
        plugin,
        profile,
        resume,
        run,
        what_if,
    )
    from .planner.cluster.cluster import Cluster
    from .planner.exports.export import export
    from .planner.plan import Plan
    from .profiles.errors import TimeprestError
    from .profiles.hugging_face.task import hugging_face
    from .profiles.onnx.model import onnx
    from .profiles.profile import Profile
    from .runtime.records.callbacks import Callback, EarlyStopping
    from .runtime.records.events import Stop
    from .runtime.records.run import Run
    from .runtime.trainer import Trainer

_HOME = {
    "profile": "api",
    "plan": "api",
    "plans": "api",
    "front": "api",
    "what_if": "api",
    "plugin": "api",
    "run": "api",
    "resume": "api",
    "check": "api",
    "dry_run": "api",
    "links": "api",
    "Profile": "profiles.profile",
    "Cluster": "planner.cluster.cluster",
    "Plan": "planner.plan",
    "Run": "runtime.records.run",
    "Trainer": "runtime.trainer",
    "Callback": "runtime.records.callbacks",
    "EarlyStopping": "runtime.records.callbacks",
    "Stop": "runtime.records.events",
    "TimeprestError": "profiles.errors",
}

__all__ = [
    "Callback",
    "Cluster",
    "EarlyStopping",
    "Plan",
    "Profile",
    "Run",
    "Stop",
    "TimeprestError",
    "Trainer",
    "__version__",
    "check",
    "dry_run",
    "export",
    "front",
    "hugging_face",
    "links",
    "onnx",
    "plan",
    "plans",
    "plugin",
    "profile",
    "resume",
    "run",
    "what_if",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    from .profiles import plugins

    if name.startswith("_") or name not in plugins.names("api"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return plugins.load("api", name)


def _import_graph() -> Any:
    from .profiles.imported.networkx_graph import import_graph

    return import_graph


import_graphs_with(_import_graph)


def __dir__() -> list[str]:
    return __all__
