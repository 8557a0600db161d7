"""The server: OpenAI's API on one engine, and a page on which the experts are seen speaking."""
