"""What a run reports while it trains: the console, metrics, and predictions of evaluations."""
