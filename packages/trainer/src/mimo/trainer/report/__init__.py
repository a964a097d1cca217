"""What a run reports while it trains: the console, metrics, pictures and TensorBoard."""
