"""The schedules with fixed orders: `1f1b`, `gpipe`, `interleaved`, `zero-bubble`; an entry point loads each file."""
