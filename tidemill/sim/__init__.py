"""The same scheduler on a virtual clock, with a cost model in place of the device. Ints only."""
