"""How fast a composition decodes: beside its base alone, and against the memory-bandwidth limit."""
