"""KV pages move between engines: content keys, ints and bytes."""
