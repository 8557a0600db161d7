"""The commands of the command line, one file each; app.py puts them together. Imports nothing heavy before one runs."""
