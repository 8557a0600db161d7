"""The library's fixtures and tiny members (tests/fixtures.py): the lab's tests use the same."""

from fixtures import *  # noqa: F403
