"""Plans before hardware: simulation of engines and clusters, costs measured or estimated, and the
search for a plan."""
