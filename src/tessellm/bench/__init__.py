"""How fast a composition decodes: against the memory-bandwidth limit, and against the loops that people write."""
