"""The world: etcd, batchers, and the processes of replicas."""
