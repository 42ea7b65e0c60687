"""A whole fleet on this machine: one supervisor runs, watches and stops its services."""
