"""The `mimo` command. It imports nothing here, so that ``mimo --help`` answers at once."""
