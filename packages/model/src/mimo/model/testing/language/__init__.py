"""The conformance kit's checks of language models."""
