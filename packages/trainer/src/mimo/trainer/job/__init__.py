"""What settings resolve to: a `Job`, complete and checked. Free of torch."""
