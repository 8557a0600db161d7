"""The commands that the lab adds to `tessellm`, one file each. Imports nothing heavy before one runs."""
