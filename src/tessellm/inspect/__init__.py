"""What a composition is and what it needs: members, sizes, vocabulary; memory, largest batch and speed on a machine."""
