"""Registries of the entries that config keys choose from, and the plugins that add entries. No torch.

A plugin is a Python module that registers its entries when it is imported. Configs name plugins in `run.plugins`; an
installed package names its plugins in the entry point group `meshwright.plugins`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import traceback
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Generic, TypeVar

from meshwright.errors import UserError, nearest

GROUP = "meshwright.plugins"
Entry = TypeVar("Entry")


class Registry(dict[str, Entry], Generic[Entry]):
    """The entries that a config key chooses from, by name. `entry` raises a UserError for an unknown name."""

    def __init__(self, key: str, entries: Mapping[str, Entry]) -> None:
        super().__init__(entries)
        self.key = key

    def register(self, name: str, entry: Entry) -> None:
        """Add an entry. Every process of a run must do so before it reads its config."""
        if name in self:
            raise UserError(f"there is a {self.key}={name} already: choose another name")
        self[name] = entry

    def entry(self, name: str) -> Entry:
        """Return the entry of that name, or raise a UserError that lists the names."""
        if name not in self:
            raise UserError(f"{self.key}={name} is not one of {', '.join(self)}{nearest(name, self)}")
        return self[name]


@lru_cache
def load_object(path: str) -> Any:
    """Return the object that `package.module:name` names. Registries hold such paths for objects that need torch."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


# The modules that configs of this process named, in order. A dict keeps the order and drops repetitions.
_LOADED: dict[str, None] = {}


def load_plugins(names: Iterable[str] = ()) -> None:
    """Import the plugins of installed packages, and the named modules, each of them once."""
    _load_installed()
    for name in names:
        _load(f"run.plugins={name}", name)
        _LOADED[name] = None


def loaded_plugins() -> tuple[str, ...]:
    """Return the modules that configs have named so far, which a launcher passes on to its ranks."""
    return tuple(_LOADED)


@lru_cache(maxsize=1)
def _load_installed() -> None:
    for point in importlib.metadata.entry_points(group=GROUP):
        _load(f"the plugin '{point.name}' of an installed package", point.value)


def _load(description: str, path: str) -> None:
    module = path.partition(":")[0]
    try:
        importlib.import_module(module)
    except UserError:
        raise
    except ModuleNotFoundError as error:
        # Either the plugin itself, or a package around it, is missing, or a module that the plugin imports.
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            fix = "install it, or add the folder that holds it to PYTHONPATH"
            reason = f"since Python finds no module '{error.name}'"
            raise UserError(f"{description} can't be imported, {reason}: {fix}") from None
        raise UserError(f"{description} can't be imported ({_place(error)}): install what it needs") from None
    except (Exception, SystemExit) as error:
        raise UserError(f"{description} can't be imported ({_place(error)}): correct it") from None


def _place(error: BaseException) -> str:
    """Return the text of an error, with the file and line in the plugin that raised it."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error}, at {last.filename}:{last.lineno}"
