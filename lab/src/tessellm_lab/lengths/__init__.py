"""What a composition inherits at lengths that its members were not trained at."""
