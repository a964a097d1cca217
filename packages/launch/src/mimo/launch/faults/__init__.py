"""What ends a run: the first fault, who else is held up, and the thread that watches for both."""
