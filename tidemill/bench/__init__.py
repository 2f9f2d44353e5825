"""Measuring: workloads, an honest load generator, statistics, plots. What `tidemill bench` is made
of."""
