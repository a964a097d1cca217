"""The rerun machine: judges what a step came to, and runs it again where that is anomalous."""
