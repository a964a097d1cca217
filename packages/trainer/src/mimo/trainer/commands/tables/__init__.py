"""What commands print: settings, memory, plans, checkpoints and simulations as tables and text."""
