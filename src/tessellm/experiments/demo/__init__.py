"""What `tessellm demo` does: letters, from training to a composed checkpoint and a picture."""
