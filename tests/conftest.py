"""The fixtures and tiny members of fixtures.py, which the lab's tests share."""

from fixtures import *  # noqa: F403
