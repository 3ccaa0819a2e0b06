"""The worker: leases rollouts from the queue and runs agents for them, as processes of this machine."""
