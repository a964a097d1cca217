"""The conformance kit's checks of encoders."""
