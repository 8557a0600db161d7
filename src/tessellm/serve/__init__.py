"""The server: OpenAI's API on one engine, for the composition, each of its members, and other rules and weights."""
