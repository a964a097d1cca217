"""One process of a run: which one it is, where it computes, what it does now. Free of torch."""
