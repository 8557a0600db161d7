"""See who spoke: trace a text token by token, diagnose a composition on prompts, report it as one page."""

from .diagnosis import Diagnosis, diagnose
from .trace import Trace, trace, trace_generation

__all__ = ["Diagnosis", "Trace", "diagnose", "trace", "trace_generation"]
