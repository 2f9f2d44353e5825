"""The version, by itself so that anybody may import it."""

__version__ = "0.1.0"
