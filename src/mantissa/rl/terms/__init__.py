"""What a step minimises besides a policy loss of log-probs: a file each, by the one protocol of ``base.py``."""
