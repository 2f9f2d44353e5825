"""The front router: several servers behind one address (docs/router.md). Asyncio protocols and httptools; loads no torch."""
