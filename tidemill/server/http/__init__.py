"""HTTP: connections, bodies, access, errors and responses, the same for every API."""
