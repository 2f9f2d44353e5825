"""The step loop, the process around it, its client, and the offline API."""
