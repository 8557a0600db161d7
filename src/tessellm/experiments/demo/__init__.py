"""What `tessellm demo` does: letters, from training to a composed checkpoint and a picture."""

from .experiment import run_demo

__all__ = ["run_demo"]
