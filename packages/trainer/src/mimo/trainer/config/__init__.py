"""Settings: what a run's file may say, how it is read, and how it is written again. Free of torch."""
