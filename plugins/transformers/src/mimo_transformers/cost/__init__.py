"""What stages and towers of the library take, counted without storage."""
