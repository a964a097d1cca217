"""Generation: from a prompt to text, token by token."""
