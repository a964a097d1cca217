"""What a family can do here, found out on a small model of it."""
