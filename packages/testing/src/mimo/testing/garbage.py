"""Importing this makes Python look for garbage rarely: a test is short, and importing torch makes a million objects.

A process inherits it from the one that it is forked from.
"""

import gc

gc.set_threshold(100_000, 20, 50)
