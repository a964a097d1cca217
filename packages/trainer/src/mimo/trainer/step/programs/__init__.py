"""What each stage of a module does in a plan, by the kind of its module."""
