"""Pages, free list, prefix index, manager. Ints only: no tensor is ever seen here."""
