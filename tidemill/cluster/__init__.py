"""Several engines and machines: a router before servers, and Ray."""
