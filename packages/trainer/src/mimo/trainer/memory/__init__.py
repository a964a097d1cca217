"""What ranks hold while they train: measured by kind and module, and what would fit where memory is out."""
