"""Which models, on which devices, cut how: costs from shapes, plans, and their search in the simulator. Ints and floats only."""
