"""The local page: approvals and keys in a browser on this machine, and nowhere else."""
