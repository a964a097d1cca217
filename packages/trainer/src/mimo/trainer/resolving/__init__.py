"""From settings to a `Job`: everything that can be wrong before launch is refused here."""
