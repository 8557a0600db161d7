"""Train one model on more combinations, or compose experts that never saw one? Both on the same skills and compute."""
