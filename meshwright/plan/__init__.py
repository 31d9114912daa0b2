"""The planner: bytes, memory and seconds of a step, added up from `spec`, and the search for a layout.

`meshwright.plan(...)` is a function of `meshwright.library.planning`. Importing this folder makes Python put it in the
function's place, so the folder can be called too.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A module that can be called like the function of its name."""

    @property
    def __wrapped__(self) -> Any:
        """The function, whose signature editors show."""
        # Imported by its name, because it belongs to a layer above this folder.
        return importlib.import_module("meshwright.library.planning").plan

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.__wrapped__(*args, **options)


sys.modules[__name__].__class__ = _Callable
