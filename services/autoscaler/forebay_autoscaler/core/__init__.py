"""How many replicas a pool should have, and what to order for it; pure."""
