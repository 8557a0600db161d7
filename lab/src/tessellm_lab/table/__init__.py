"""The paper's table in miniature: members trained here, by the real scorers, beside merges of the same members."""
