"""One training step of one rank: forward, backward, reduction, agreement, update; and evaluation by the same plan."""
