"""SGLang's API."""
