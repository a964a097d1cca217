"""Reading a dataset once, in blocks and on all cores, for an index of its sizes and a report."""
