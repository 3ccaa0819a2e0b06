"""What the scenarios stand on: the cluster, the installation, namespaces, and an explanation when one fails."""
