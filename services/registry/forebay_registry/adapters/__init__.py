"""The catalogue in etcd."""
