"""The server: OpenAI's API on one engine, and the playground (play.html), where the experts are seen speaking."""
