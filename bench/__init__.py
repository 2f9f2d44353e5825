"""Benchmarks that need more than the engine: other engines, a long text, a GPU. `tidemill bench` is
the rest."""
