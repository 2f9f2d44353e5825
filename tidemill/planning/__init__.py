"""The choice of models, devices and cuts: costs from shapes, plans, and their search in the simulator. Ints and floats only."""
