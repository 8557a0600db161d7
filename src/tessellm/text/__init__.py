"""Text in, text out: prompts, stop texts, streams, and the one loop by which all who write texts drive the engine."""
