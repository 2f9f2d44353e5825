"""The APIs: one folder a dialect."""
