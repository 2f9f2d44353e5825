"""The servers that the examples of the documentation talk to."""

from tests.server.conftest import roomy, roomy_folder

__all__ = ["roomy", "roomy_folder"]
