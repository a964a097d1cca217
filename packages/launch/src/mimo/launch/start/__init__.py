"""Starting the processes of a run, and joining them."""
