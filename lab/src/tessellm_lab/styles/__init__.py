"""Both experts act on every token, in different features of it (`experiment`), and which rules blend (`blending`)."""
