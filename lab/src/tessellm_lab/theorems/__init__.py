"""The definitions and theorems, exactly, on random families."""
