"""Recordings: what a server did in a day, kept so that it can be computed again and compared."""
