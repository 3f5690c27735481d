"""Acting when a module is imported: after it ran, before its importer goes on. For seams in modules that load late.

A plug-in's own errors are swallowed by the engines; an import that fails is not. So the checks and the replacements run inside
the import of the module that holds the model's class, and what they raise is raised there. Standard library only.
Invariant: an action runs once per module and process, also when the module is there already.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

_actions: dict[str, list[Callable[[ModuleType], None]]] = {}


class _Loader(importlib.abc.Loader):
    """Runs the module by its own loader, then the actions."""

    def __init__(self, name: str, loader: importlib.abc.Loader) -> None:
        self._name, self._loader = name, loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader            # what others look at is the module's own
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        for action in _actions.pop(self._name, ()):
            action(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what is watched by the other finders, and puts our loader around theirs."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name not in _actions:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(name, spec.loader)
                return spec
        return None


_finder = _Finder()


def when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    """Run `action(module)` when module `name` has been imported: at once if it has. What it raises fails the import."""
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        action(module)
        return
    _actions.setdefault(name, []).append(action)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def forget(names: Sequence[str]) -> None:
    """Watch these no more (tests)."""
    for name in names:
        _actions.pop(name, None)
    if not _actions and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
