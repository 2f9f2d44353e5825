"""The front router: several servers behind one address (docs/how/router.md). Asyncio protocols and
httptools; loads no torch."""
