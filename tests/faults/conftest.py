"""Fixtures of these tests: a folder with a config, and `meshwright train` started in it."""

from __future__ import annotations

from tests.support.commands import folder as folder
from tests.support.commands import start as start
