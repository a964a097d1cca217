"""A run from its first check to its end, and what commands have each rank do."""
