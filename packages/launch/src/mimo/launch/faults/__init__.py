"""What ends a run: the first fault, the ranks that wait because of it, and the watchdog that looks for both."""
