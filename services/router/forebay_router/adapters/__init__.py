"""What the router touches: etcd, batchers and HTTP clients. No decisions are made here."""
