"""Limits of what a client may send and how long it may take, for the server and the router."""

from __future__ import annotations

# ---- connections
MAX_CONNECTIONS = 8192
MAX_IDLE_PER_ADDRESS = 1024  # connections without a request under way
KEEP_ALIVE_S = 75.0  # an idle connection, as clients see it in the Keep-Alive header
KEEP_ALIVE_SPARE_S = 5.0  # longer than that: a request sent in the last moment still arrives
MAX_PIPELINED = 16  # requests that wait for the response to the one before
READ_WITHIN_S = 60.0  # some of a response, by a client that is behind

# ---- headers
MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 256
HEADERS_WITHIN_S = 10.0

# ---- bodies
MAX_BODY_BYTES = 8 * 2**20
MAX_UPLOAD_BYTES = 200 * 2**20  # of a file, with what wraps it
MAX_OPEN_BODY_BYTES = 4096  # of a request without a key, where keys are needed
MAX_BUFFERED_BYTES = 2**30  # of the bodies of all requests together
BODY_WITHIN_S, PART_WITHIN_S = 120.0, 20.0  # all of a body, and the next part of it
UPLOAD_WITHIN_S = 3600.0
REST_WITHIN_S = 5.0  # the rest of a body whose response was complete before it was all there
# Parsing a body keeps the event loop from others for some calls of a library, so the number of its
# parts is bounded. A text with more of these characters would hardly fit a context.
MAX_PARTS = 2**16  # objects, lists and members
MAX_ITEMS = 2**19  # such as token ids
MAX_MESSAGES = 2**14  # of a conversation
