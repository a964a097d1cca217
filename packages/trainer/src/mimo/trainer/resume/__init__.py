"""What a run saves, and what it resumes from."""
