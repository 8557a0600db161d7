"""Routing: which members should answer a prompt. From the base's own forward pass, descriptions and examples to a prior
over base and experts. No expert runs, nothing is trained."""

from .route import BASE, Route, RoutedPrompt, Router
from .template import ChatMarks

__all__ = ["BASE", "ChatMarks", "Route", "RoutedPrompt", "Router"]
