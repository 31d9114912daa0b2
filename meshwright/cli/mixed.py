"""Actions of a command (`data show`) whose positional words may stand before and after its options."""

from __future__ import annotations

import argparse
from typing import Any


def intermixed(parser: argparse.ArgumentParser) -> type[argparse.ArgumentParser]:
    """The kind of parser that a command's actions have: as the command's own, with words and options in any order.
    (argparse mixes them only for a parser without actions.)"""

    class Mixed(type(parser)):  # type: ignore[misc]
        inside = False  # parse_known_intermixed_args calls parse_known_args itself

        def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
            if self.inside:
                return super().parse_known_args(args, namespace)
            self.inside = True
            try:
                return self.parse_known_intermixed_args(args, namespace)
            finally:
                self.inside = False

    return Mixed
