"""Whole image-text models of the library: the half that makes rows of images is an encoder."""
