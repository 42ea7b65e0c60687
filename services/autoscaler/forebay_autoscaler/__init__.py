"""Decides how many replicas each pool has."""

import os

# This process starts others. gRPC's fork handlers, on by default in Python, can leave a child hanging
# on a lock before it has become its command; what is started here never uses gRPC before that.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
