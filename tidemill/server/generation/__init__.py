"""Generation: models, services and what a request asks of them, apart from any API."""
