"""One file an architecture; a lazy registry of names."""
