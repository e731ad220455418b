"""Who may run now: admission policies. `policy` has the protocol; each policy has its own module."""
