"""Fixtures of several files of tests/pure."""

from tests.pure.machines_with_gpus import on as on
