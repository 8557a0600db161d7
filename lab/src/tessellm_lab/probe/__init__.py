"""What can be read linearly off a model's layers, with controls."""
