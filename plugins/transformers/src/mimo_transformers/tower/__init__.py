"""Vision towers of the library as encoders."""
