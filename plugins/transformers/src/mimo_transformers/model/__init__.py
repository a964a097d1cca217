"""One pipeline stage of a model of the library: its own layers, with parallel parts and stand-ins put into them."""
