"""The `mimo` command, and what it prints."""
