"""Text in, text out: prompts from files, stop texts, streams, and whole texts by the fast path or the reference."""
