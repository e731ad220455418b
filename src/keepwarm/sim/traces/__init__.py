"""Recorded and generated workloads, read into one form: `sim.traces.call`."""
