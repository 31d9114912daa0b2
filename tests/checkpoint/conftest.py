"""Fixtures of these tests: a folder with a config, and a function that starts `meshwright train` in it."""

from __future__ import annotations

from tests.support.commands import folder as folder
from tests.support.commands import start as start
