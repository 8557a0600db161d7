"""How many neurons a plain network needs for a family of composed tasks: the theorem, built."""
