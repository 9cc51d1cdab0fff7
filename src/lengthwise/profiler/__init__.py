"""What this machine takes for the parts of a step: runs them, and writes measurements that plans are priced with."""
