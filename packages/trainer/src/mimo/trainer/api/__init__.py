"""Whole runs from Python: each in fresh processes, whatever the calling program has done before; and checkpoints."""
