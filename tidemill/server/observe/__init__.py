"""What the server tells about itself: explanations, the live view, traces and recordings."""
