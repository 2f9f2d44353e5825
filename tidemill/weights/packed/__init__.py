"""Quantized Hugging Face folders: the stored tensors of a linear, read as one matrix. A new layout
is one file and a line in `scheme.METHODS`."""
