"""Request, plan, scheduler, policies. Ints only; time is a Clock passed in; the same inputs give
the same plan."""
