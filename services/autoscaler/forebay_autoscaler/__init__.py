"""Decides how many replicas each pool has."""

import os

# This process starts others. gRPC's fork handlers, on by default in Python, can leave a child
# hanging on a lock before it has become its command.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
